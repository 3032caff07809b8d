"""The agent: first process of a worker on this machine, the second in a pod (`agent.init`). It imports no torch and outlives
everything it starts.

    python -m outlast.agent.agent            configured by the environment, see `contract.Env`

It carries out what `agent.lifecycle` decides: prepares code and data, starts the warm process and from it the elastic agent,
tells the training when to leave, finds hung processes, answers probes, and exits with a code of `contract.Exit`, however the
training ends. Its own state on disk (`worker.json`) is replaced as a whole, so it may be killed between any two lines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast import contract, files, probes
from outlast.agent import init, lifecycle, ranks, uploader
from outlast.agent.lifecycle import Phase
from outlast.clock import Awake
from outlast.doctor import inspection
from outlast.errors import OutlastError, Superseded
from outlast.launch import daemon, shim, titles
from outlast.ledger import Ledger
from outlast.prepare import prepare
from outlast.spec import references
from outlast.workerfiles import notice, saves
from outlast.workerfiles.output import Output

if TYPE_CHECKING:
    from outlast import spec
    from outlast.agent import ownership
    from outlast.rendezvous.transports import etcd
    from outlast.rendezvous.worker0 import Host
    from outlast.runs import alive

LOOK_S = 0.1
TOUCH_S = 1.0
"""How often `worker.json` is touched: the sign of life for whoever watches the agents."""
STILL_S = 30.0
"""From when on we say where processes stand still, before that is a hang."""
SEEK_S = 1.0
"""How often to see whether the decider can be reached."""
PUSH_S = 1800.0
"""How long a worker that has ended waits for a store that is away."""
LAST_PUSH_S = 10.0
"""How long a worker that was told to leave may push at least, even when its grace is over."""
REVIVE_AFTER_S = 1.5
"""How long the decider may be out of reach before we start it again."""
_FINAL = (contract.Exit.DONE, contract.Exit.MISCONFIGURED, contract.Exit.GIVEN_UP)
"""Exit codes after which a worker that is started again has nothing to do."""


class Agent:
    """One worker's agent. `main` makes one and runs it."""

    def __init__(
        self,
        warm: subprocess.Popen[bytes] | None,
        job: spec.Job,
        environ: dict[str, str],
        log: Output,
        clock: Awake | None = None,
    ) -> None:
        self.job = job
        self.index = int(environ[contract.Env.WORKER])
        self.state = Path(environ[contract.Env.STATE])
        self.output = Path(environ[contract.Env.OUTPUT])
        self.environ = environ
        self.notice = Path(environ[contract.Env.NOTICE])
        self.processes = job.spec.processes()
        self.worker = lifecycle.Worker()
        self.clock = clock or Awake()
        self._looked = self.clock()
        """The time of the last look, by our clock."""
        self.deadline = float("inf")
        """When the training is ended that was told to leave, by our clock."""
        self.exit: lifecycle.Exit | None = None
        self.health = probes.Health()
        self._warm = warm
        """None until the job's environment is there, if it brings one."""
        self._leaving = threading.Event()
        self._preparation = prepare.Preparation(job, environ, stop=self._leaving)
        self._preparing: threading.Thread | None = None
        self._elastic: socket.socket | None = None
        self._launched = False
        self._events: queue.SimpleQueue[lifecycle.Event] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._written: dict[str, Any] = {}
        self._touched = 0.0
        self._unreachable_since: float | None = None
        self._seek_at = 0.0
        self._log = log
        self._store = environ.get(contract.Env.STORE, "")
        self._pusher = uploader.Pusher(environ)
        self.alone = not environ[contract.Env.RENDEZVOUS].startswith("unix://")
        """Whether there is no launcher: then workers take up the run, and worker 0 decides unless another is known to."""
        self.operated = environ[contract.Env.RENDEZVOUS].startswith(contract.KUBERNETES)
        """Whether the operator decides."""
        self._word = environ.get(contract.Env.RUN, "")
        """By which whoever made this worker knows the run, see `ownership`."""
        self.elects = environ[contract.Env.RENDEZVOUS].startswith(contract.ETCD)
        """Whether the agents elect one of them who decides."""
        self._host: Host | etcd.Running | None = None
        self._heart: alive.Heart | None = None
        self._ending: threading.Thread | None = None
        self._told = threading.Event()
        self.displaced = False
        """Whether another machine has taken up our run."""
        self._said: tuple[int | None, str] = (None, "")
        """The end that the log speaks of already."""
        self._leave_by: float | None = None
        """When the grace of a worker that was told to leave is over, by our clock."""
        self._logged = Logged()
        self._ranks = ranks.Ranks(self.state, self.processes, self.clock)
        labels = {"job": job.metadata.name, "worker": str(self.index)}
        port = int(environ.get(contract.Env.PROBE_PORT, "0"))
        host = "" if contract.Env.ADDRESS in environ else "127.0.0.1"
        self.probes = probes.serve(lambda: self.health, labels, host=host, port=port)

    def run(self) -> lifecycle.Exit:
        """Live from the first event to the exit."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self.notice.unlink(missing_ok=True)
        (self.state / contract.END).unlink(missing_ok=True)
        self._ranks.forget()
        if self._warm and (lacking := inspection.uncompiled("torch", "outlast")):
            packages = f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no compiled bytecode"
            remedy = inspection.compile_them(lacking, image=contract.Env.ADDRESS in self.environ)
            print(f"outlast | {packages}: each start takes longer; {remedy}", flush=True)
        for left_over in self.state.glob("ranks-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        self._happened(lifecycle.Started())
        while self.exit is None:
            self._wait()
            while not self._events.empty():
                self._happened(self._events.get())
            self._look()
        self._write("done" if self.exit.code == contract.Exit.DONE else "gone")
        self._leaving.set()
        self._kill_training()
        if self._warm:
            self._warm.wait()
        if self._preparing:
            self._preparing.join(timeout=5)  # it ends what it has started
        if self._host:
            self._host.wait()
        if self._ending:
            self._ending.join(LAST_PUSH_S)
        if self._heart:
            self._heart.leave()
        if self.environ.get(contract.Env.STAY) == "1" and self.exit.code in _FINAL:
            print(f"outlast | worker {self.index} stays up and does nothing more", flush=True)
            done = self.exit.code == contract.Exit.DONE
            metrics = {"done": float(done), "failed": float(not done)}
            end = self._end(self.exit.code)
            self.health = probes.Health(True, False, self.exit.reason, metrics, end=end)
            self._told.wait()
            return lifecycle.Exit(contract.Exit.DONE, self.exit.reason)
        return self.exit

    def _end(self, code: int) -> str:
        """What other workers are told of how the run has ended; nothing, if it was this worker alone that could not go on."""
        if not self.alone or code == contract.Exit.MISCONFIGURED:
            return ""
        from outlast.agent import ownership

        said = f"run {self._word} has ended before, another worker says; nothing is left to do"
        return ownership.Ended(self._word, said, code).dumps()

    @functools.cached_property
    def ledger(self) -> Ledger:
        """What this agent has to say; opened when there is something, and what was written before has been fetched."""
        return Ledger(self.output / contract.LEDGER, f"agent-{self.index}")

    def _kill_training(self) -> None:
        if self._warm:
            self._warm.kill()  # and with it whatever it forked

    # Effects

    def _happened(self, event: lifecycle.Event) -> None:
        if event == lifecycle.Prepared(self.worker.phase) == lifecycle.Prepared(Phase.ENVIRONMENT) and self._warm is None:
            self._warm = start_warm(self._preparation.python, self.environ)  # by this thread: it dies with who starts it
        self.worker, effects = lifecycle.step(self.worker, event)
        for effect in effects:
            match effect:
                case lifecycle.Prepare(phase):
                    self._preparing = threading.Thread(target=self._prepare, args=(phase,), daemon=True)
                    self._preparing.start()
                case lifecycle.Launch():
                    self._launched = True
                case lifecycle.Notify(reason, deadline):
                    self.deadline = self._leave_by = deadline
                    try:
                        notice.write(self.notice, "leave", reason, time.time() + deadline - self.clock())
                    except OSError as problem:
                        print(f"outlast | cannot tell the training to leave: {problem}; ending it", flush=True)
                        self._kill_training()
                case lifecycle.Kill():
                    why = f"the time to leave is over ({self.worker.leaving})" if self.worker.leaving else self.worker.reason
                    print(f"outlast | {why}; ending the training", flush=True)
                    self._kill_training()
                case lifecycle.Push():  # the last line of the log first, so that it is pushed, too
                    self._said = self.worker.code, self.worker.reason
                    say_end(self.index, *self._said)
                    self._record_what_was_said()
                    if self._store:
                        threading.Thread(target=self._push_rest, args=(self._push_s(),), daemon=True).start()
                    else:  # the output is where it belongs
                        self._events.put(lifecycle.Pushed())
                case lifecycle.Exit(code, reason):
                    self.exit = effect
                    if (code, reason) != self._said:
                        say_end(self.index, code, reason)

    def _prepare(self, phase: Phase) -> None:
        try:
            if phase is Phase.RUN:
                if self.alone and (over := self._take_up()):
                    self._put(lifecycle.Over(over.code, over.reason))
                    return
            elif phase is Phase.CODE:
                self._preparation.code()
                if self.alone:
                    from outlast.prepare import workdir

                    workdir.enter(self.environ, self._preparation.say, self._leaving)
            elif phase is Phase.ENVIRONMENT:
                self._preparation.environment()
            elif phase is Phase.DATA:
                self._preparation.data()
            elif phase is Phase.CHECKPOINT:
                if self._store:
                    self._restore()
                if self.operated or self.elects:
                    self._look_back()
                if self.elects:
                    self._stand()
                elif self.alone and not self.operated and self.index == 0:
                    self._decide()
        except Superseded as problem:
            self._displaced(str(problem))
            os.write(self._wake_w, b"\0")
        except OutlastError as problem:
            self._put(lifecycle.Unprepared(phase, str(problem), retry=getattr(problem, "retry", False)))
        except OSError as problem:
            self._put(lifecycle.Unprepared(phase, f"{phase}: {problem}", retry=True))
        except Exception as problem:  # a bug of ours must not leave the worker in this phase for ever
            self._put(lifecycle.Unprepared(phase, f"{phase}: {problem!r}", retry=False))
            raise
        else:
            self._put(lifecycle.Prepared(phase))

    def _restore(self) -> None:
        from outlast import store
        from outlast.checkpoints import restore
        from outlast.prepare import workdir

        place, say = store.open_(self._store), self._preparation.say
        restore.restore(self.output, place, self.environ[contract.Env.RUN], say)
        if self.alone:  # else the submission has brought them
            workdir.fetch(self.output, place, say, self._leaving)

    def _take_up(self) -> ownership.Ended | None:
        """Find out which run this is, and go on with the log of this worker."""
        from outlast import runs
        from outlast.agent import ownership
        from outlast.runs import alive

        environ = self.environ
        if not environ[contract.Env.RENDEZVOUS].startswith(("c10d://", contract.KUBERNETES, *contract.ETCD)):
            raise OutlastError(f"rendezvous by {environ[contract.Env.RENDEZVOUS]} is not known here; say backend: c10d or etcd")
        word = self._word
        where = ownership.place(self.output, self._store)
        if environ.get(contract.Env.STAY) == "1" and runs.read(where) is None:
            others = ownership.others(environ[contract.Env.RENDEZVOUS], socket.getfqdn(), self.index, self.job.spec.workers.max)
            if end := ownership.told(others, word):
                return end
        self.output.mkdir(parents=True, exist_ok=True)
        begun = ownership.record(self.job.metadata.name, word, word)
        home, fresh = ownership.home(environ), environ.get(contract.Env.FRESH) == "1"

        def say(text: str) -> None:
            print(f"outlast | {text}", flush=True)

        run = ownership.take(where, begun, home=home, fresh=fresh, say=say)
        if isinstance(run, ownership.Ended):
            return run
        environ[contract.Env.RUN], environ[contract.Env.OWNER] = run, word
        if self._store:
            if self._heart is None:  # else this is another attempt
                self._heart = alive.Heart(lambda: where, run, word, home, self.index, self._lost)
            ownership.set_aside(self.output, run, say)
            ownership.fetch_own(where, self.output, self.index)
        self._log.keep(self.output / contract.LOGS / contract.worker_log(self.index))
        self._pusher = uploader.Pusher(environ)
        return None

    def _decide(self) -> None:
        """Be the one who decides, see `rendezvous.worker0`."""
        from outlast.agent import ownership
        from outlast.rendezvous import worker0 as host
        from outlast.rendezvous.transports import seal

        run = self.environ[contract.Env.RUN]
        where = ownership.place(self.output, self._store)
        generation = ownership.generation(where, self.output, run, stored=bool(self._store))

        def broken(reason: str) -> None:
            print(f"outlast | {reason}", flush=True)
            self._kill_training()

        ledger = Ledger(self.output / contract.LEDGER, "decider")
        self._host = host.Host(
            self.job,
            run=run,
            key=seal.key(self.environ),
            generation=generation,
            ledger=ledger,
            ended=self._record,
            broken=broken,
        )
        self._host.start(self.environ[contract.Env.RENDEZVOUS])

    def _stand(self) -> None:
        """Run for election as the one who decides, see `rendezvous.etcd.election`."""
        from outlast import etcd as servers
        from outlast.rendezvous import coordinator
        from outlast.rendezvous.etcd import schema
        from outlast.rendezvous.transports import etcd

        environ = self.environ
        self._host = etcd.Running(
            servers.address(environ[contract.Env.RENDEZVOUS], environ=environ),
            name=schema.run_name(environ[contract.Env.RUN], environ),
            terms=coordinator.Settings.of(self.job.spec),
            voice=_Voice(self),
            replicas=self.job.spec.workers.replicas,
            operated=contract.Env.MEMBER in environ,
            id=lambda: self.index,
        )
        self._host.start()

    def _look_back(self) -> None:
        """Find out which generations this run has had, so that who decides, and may know nothing of them, goes beyond."""
        from outlast.agent import ownership

        where = ownership.place(self.output, self._store)
        seen = ownership.seen(where, self.output, self.environ[contract.Env.RUN], stored=bool(self._store))
        self.environ[contract.Env.GENERATION] = str(seen)

    def _record(self, state: str, reason: str, code: int) -> None:
        """Record how the run has ended, in the background: then nobody trains it again."""
        from outlast import runs
        from outlast.agent import ownership

        run, word = self.environ[contract.Env.RUN], self.environ[contract.Env.OWNER]

        def end() -> None:
            try:
                runs.end(ownership.place(self.output, self._store), run, state, reason, code, by=word)
            except OutlastError as problem:
                print(f"outlast | how the run has ended could not be recorded: {problem}", flush=True)

        self._ending = threading.Thread(target=end, daemon=True)
        self._ending.start()

    def _record_what_was_said(self) -> None:
        """The operator knows no store, so workers record the end that it has said: each of them the same, for any may be gone."""
        try:
            said = json.loads((self.state / contract.END).read_text())
        except FileNotFoundError:
            return
        self._record("Failed" if said["code"] else "Succeeded", said["reason"], said["code"])

    def _push_s(self) -> float:
        """How long the rest may be pushed. Only who is done may wait: who failed is started again, and pushes it then."""
        if self.worker.code == contract.Exit.DONE:
            return PUSH_S
        return max(LAST_PUSH_S, self._leave_by - self.clock()) if self._leave_by else LAST_PUSH_S

    def _push_rest(self, seconds: float) -> None:
        """Push what is left, this worker's log to its last line included."""
        self._log.drain()
        try:
            code, problem = self._pusher.rest(seconds)
        except OSError as error:  # no process to be had
            code, problem = 1, str(error)
        if code == uploader.SUPERSEDED:
            self._displaced(problem)
            os.write(self._wake_w, b"\0")
            return
        kept = f"the output is not all in {self._store}: {problem}; it is kept in {self.output}, and the next start pushes it"
        self._put(lifecycle.Pushed(kept if code else ""))

    def _lost(self, reason: str) -> None:
        self._displaced(reason)
        os.write(self._wake_w, b"\0")

    def _displaced(self, reason: str) -> None:
        self.displaced = True
        self._events.put(lifecycle.Displaced(reason or "the run goes on elsewhere"))

    def _launch(self) -> None:
        """Have the elastic agent forked; the warm process listens a moment after its start and answers when torch is imported."""
        try:
            sock = shim.connect(str(self.state / "warm.sock"))
        except OSError:
            if self._warm and self._warm.poll() is not None:
                self._events.put(lifecycle.Trained(contract.exit_code(self._warm.returncode)))
                self._launched = False
            return
        grace = f"{self.job.spec.interruption.grace.total_seconds():g}"
        argv = [str(self.processes), grace, *prepare.command(self.job, self.environ)]
        with contextlib.suppress(OSError):  # it died this very moment: the connection tells
            shim.request(sock, "elastic", argv, self.environ, self.environ[contract.Env.CODE], (0, 1, 2))
        self._elastic = sock

    def _on_signal(self, number: int, _frame: object) -> None:
        grace = self.job.spec.interruption.grace.total_seconds()
        self._told.set()
        # The clock has a lock, which this very thread may hold.
        self._events.put(lifecycle.Told(f"received {signal.Signals(number).name}", self._looked, grace))

    def _put(self, event: lifecycle.Event) -> None:
        self._events.put(event)
        os.write(self._wake_w, b"\0")

    # Looking around

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            if self._elastic is not None:
                selector.register(self._elastic, selectors.EVENT_READ)
            for key, _ in selector.select(LOOK_S):
                if key.fileobj is self._elastic:
                    self._elastic_ended()
                else:
                    os.read(self._wake_r, 4096)

    def _elastic_ended(self) -> None:
        assert self._elastic is not None
        try:
            reply = self._elastic.recv(4096)
        except OSError:
            reply = b""
        status = json.loads(reply)["status"] if reply else -signal.SIGKILL  # the warm process died, and all with it
        self._elastic.close()
        self._elastic = None
        self._events.put(lifecycle.Trained(contract.exit_code(status)))

    def _look(self) -> None:
        now = self._looked = self.clock()
        if self._launched and self._elastic is None and self.worker.phase is Phase.TRAINING and self._events.empty():
            self._launch()
        if self.worker.leaving and now > self.deadline:
            self.deadline = float("inf")
            self._events.put(lifecycle.GraceOver())
        found = self._ranks.look(self._log.written)
        if self.worker.phase is Phase.TRAINING:
            hang = lifecycle.hung(found, self.job.spec.hang.limit.total_seconds())
            if hang is not None:
                self._end_hang(hang, found)
            self._revive()
            if self._store and self._pusher.look():
                self._displaced(self._pusher.said.get("error", ""))
        self._report(found)
        if not self.state.is_dir():  # somebody removed the job under us
            self._kill_training()
            os._exit(contract.Exit.FAILED)

    def _end_hang(self, hang: lifecycle.Hang, found: list[lifecycle.Process]) -> None:
        """Dump the stacks, leave the verdict for the elastic agent, kill."""
        stacks = self.output / contract.LOGS / f"stacks-worker-{self.index}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        ranks.dump_stacks([process.progress.pid for process in found], stacks)
        for process, reason in hang.victims:
            record = process.progress
            print(f"outlast | rank {record.rank} on worker {self.index} {reason}; stacks in {stacks}", flush=True)
            path = self.state / contract.VERDICT.format(local_rank=process.local_rank)
            with contextlib.suppress(OSError):  # a full disk costs the explanation, not the rescue
                verdict = {"pid": record.pid, "reason": reason, "stuck": not process.stopped, "early": process.early}
                path.write_text(json.dumps({**verdict, "time": time.time()}))
            self.ledger.write(
                "hang", worker=self.index, rank=record.rank, pid=record.pid, silent_s=round(process.silent_s, 1),
                state="stopped" if process.stopped else "stuck", stacks=str(stacks), reason=reason,
            )  # fmt: skip
            self._ranks.kill(process)

    def _revive(self) -> None:
        """Start the decider again when it has been out of reach for a while; whoever of us is second finds its lock held."""
        revive = self.environ.get(contract.Env.REVIVE)
        if not revive or self.worker.leaving:
            return
        now = time.monotonic()
        if now < self._seek_at:
            return
        self._seek_at = now + SEEK_S
        try:
            shim.connect(self.environ[contract.Env.RENDEZVOUS].removeprefix("unix://")).close()
            self._unreachable_since = None
        except TimeoutError:  # it is there, but busy or stopped: a running world does not need it
            self._unreachable_since = None
        except OSError:
            if self._unreachable_since is None:
                self._unreachable_since = now + 0.2 * self.index  # one after the other: the first will do
            elif now - self._unreachable_since > REVIVE_AFTER_S:
                self._unreachable_since = now + REVIVE_AFTER_S
                port = max(0, int(self.environ.get(contract.Env.PROBE_PORT, "0")) - self.index)
                daemon.start(json.loads(revive), Path(os.devnull), env={**os.environ, contract.Env.PROBE_PORT: str(port)})

    def _report(self, found: list[lifecycle.Process]) -> None:
        current = [p for p in found if p.progress.phase != "done"]
        training = bool(current) and self.worker.phase is Phase.TRAINING
        state = str(self.worker.phase)
        if self.worker.phase is Phase.TRAINING:
            state = "leaving" if self.worker.leaving else "training" if training else "waiting"
        ranks = [{"rank": p.progress.rank, "local_rank": p.local_rank, "pid": p.progress.pid} for p in found]
        self._logged.look(found, self._log)
        still = next((p.where for p in found if p.silent_s > STILL_S and p.where), "") if training else ""
        self._write(state, ranks, still)
        metrics = {"leaving": float(bool(self.worker.leaving)), **self._pusher.metrics()}
        healthy, reason = True, state
        if found:
            first = found[0].progress
            age = min(p.silent_s for p in found)
            metrics |= {
                "step": first.step,
                "committed_step": first.committed,
                "generation": first.generation,
                "progress_age_seconds": age,
            }
            if first.steps is not None:
                metrics["target_step"] = first.steps
            if first.rank == 0 and not first.step and self._logged.said:
                step, steps = self._logged.said
                metrics |= {"step": step, "step_logged": 1.0, **({"target_step": steps} if steps else {})}
            limit = self.job.spec.hang.limit.total_seconds() * lifecycle.OTHERS_FIRST
            if first.phase in ("train", "save") and age > limit:
                healthy, reason = False, f"no progress for {age:.0f} s"
        self.health = probes.Health(healthy, training, reason, metrics)

    def _write(self, state: str, ranks: list[dict[str, Any]] | None = None, still: str = "") -> None:
        now = time.monotonic()
        record = {
            "pid": os.getpid(),
            "state": state,
            "reason": self.worker.reason or self.worker.leaving,
            "code": self.exit.code if self.exit else None,
            "ranks": ranks or [],
            "logged": self._logged.told(),
            "probes": self.probes,
            "pushed": self._pusher.said,
            "displaced": self.displaced,
            "still": still,
        }
        if record == self._written or not self.state.is_dir():
            if now - self._touched > TOUCH_S:
                self._touched = now
                with contextlib.suppress(OSError):
                    os.utime(self.state / contract.WORKER)
            return
        self._written = record
        write_state(self.state, record)


class Logged:
    """The step that a plain script tells in its log, if rank 0 is here and tells none itself."""

    def __init__(self) -> None:
        self.said: tuple[int, int | None] | None = None
        self._of: tuple[int, int] | None = None
        self._written = 0

    def look(self, found: list[lifecycle.Process], log: Output) -> None:
        """Read what was written since the last look, at most the end of it."""
        first = next((p.progress for p in found if p.progress.rank == 0), None)
        if first is None:
            return
        if self._of != (first.generation, first.pid):  # what stands there was said by another process
            self.said, self._of, self._written, log.recent = None, (first.generation, first.pid), log.written, b""
        elif first.phase == "started" and not first.step and log.written != self._written:
            self._written = log.written
            self.said = saves.last_step(log.recent.decode(errors="replace"), self.said)

    def told(self) -> tuple[int, int | None, int] | None:
        """The step, the total, and the generation whose process has printed them."""
        return (*self.said, self._of[0]) if self.said and self._of else None


class _Voice:
    """What becomes of what this agent decides while it is elected."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._ledger: Ledger | None = None

    def say(self, text: str) -> None:
        print(f"outlast | {text}", flush=True)

    def event(self, kind: str, **facts: Any) -> None:
        if self._ledger is None:
            self._ledger = Ledger(self._agent.output / contract.LEDGER, f"decider-{self._agent.index}")
        self._ledger.write(kind, **facts)

    def finished(self, state: str, reason: str, code: int) -> None:
        """Each agent records the end, all the same: any of them may be gone."""
        self._agent._record(state, reason, code)


def say_end(worker: int | str, code: int | None, reason: str) -> None:
    """The last line of a worker's log."""
    print(f"outlast | worker {worker}: {reason} (exit {code})", flush=True)


def write_state(directory: Path, record: dict[str, Any]) -> None:
    """Replace `worker.json` (see `contract.WORKER`). On a full disk it stays as it was: training matters more."""
    with contextlib.suppress(OSError):
        files.replace(directory / contract.WORKER, json.dumps(record))


def start_warm(python: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the warm process in the Python that is to train."""
    socket_ = os.path.join(environ[contract.Env.STATE], "warm.sock")
    return subprocess.Popen(
        [python, "-m", "outlast.launch.warm", socket_, str(os.getpid())], stdin=subprocess.DEVNULL, env=environ
    )


def main() -> None:
    """Start the warm process first (it takes longest), then live. A job with an environment of its own has to make that first."""
    init.stand_by()
    titles.entitle(f"agent {os.environ[contract.Env.WORKER]}")
    log = Output()
    state = os.environ[contract.Env.STATE]
    environ = dict(os.environ)
    file = Path(environ[contract.Env.JOB_FILE])
    warm = None
    with contextlib.suppress(OSError):
        if b"environment:" not in file.read_bytes():  # to parse it takes a while, in which torch can be imported
            warm = start_warm(sys.executable, environ)
    try:
        from outlast import spec

        job = spec.load(file)
        environ |= references.values(job.spec.env, environ)
        agent = Agent(warm, job, environ, log)
        if not agent.alone:
            log.keep(None)
        ended = agent.run()
    except OutlastError as problem:
        if warm:
            warm.kill()
        ended = lifecycle.Exit(contract.Exit.MISCONFIGURED, str(problem))
        write_state(Path(state), {"pid": os.getpid(), "state": "gone", "reason": ended.reason, "code": ended.code})
        say_end(environ[contract.Env.WORKER], ended.code, ended.reason)
    log.close()
    sys.exit(ended.code)


if __name__ == "__main__":
    main()
