"""One job's launcher on this machine: it starts workers, coordinates their rendezvous, counts failures, and writes the status.

    python -m outlast launcher STATE_DIR

A job has one launcher at a time, which holds a lock. It may be killed at any moment: the workers keep training and, if they
cannot reach it, start a new launcher, which adopts them. A launcher records its state in `launcher.json` before it acts on
that state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base import file_locks, files
from outlast.base.clock import Awake
from outlast.base.errors import OutlastError
from outlast.base.typed_json import decode
from outlast.job import contract, spec
from outlast.job import ledger as ledgers
from outlast.job.contract import End
from outlast.job.failure import Failure
from outlast.job.status import Ending, JobStatus, State, StoreStatus
from outlast.local.live_status import LiveStatus
from outlast.local.state_dir import ENDINGS, Request, Run, StateDir
from outlast.local.worker_processes import Ended, WorkerPool
from outlast.rendezvous import coordinator, root_cause, who_trains
from outlast.rendezvous.coordinator import PersistedState
from outlast.rendezvous.root_cause import Pending
from outlast.rendezvous.transports import sockets
from outlast.worker import tracking
from outlast.worker.agent import upload_supervisor
from outlast.worker.agent.lifecycle import Phase
from outlast.worker.launch import os_calls, package_copy

if TYPE_CHECKING:
    from outlast.storage.runs import heartbeat

TICK_S = 0.1
WAIT_NOTICE_S = 2.0
EARLY_FAILURE_S = 60.0
"""A script that fails within this many seconds, and before any step, counts as having failed at startup."""
UPLOAD_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 15.0
"""Seconds that workers may take to exit after the job has ended."""


class Launcher:
    """One job's launcher. `run` returns the launcher's exit code."""

    def __init__(self, state_dir: StateDir, clock: Awake | None = None) -> None:
        self.state_dir = state_dir
        self.job = spec.load(state_dir.job)
        self.clock = clock or Awake()
        self.settings = replace(coordinator.Settings.of(self.job.spec), gives_up=False)
        record = Run.read(state_dir)
        self.run_id = record.run
        self.output = Path(record.output)
        self.record, self.store = record, record.store
        self.pool = WorkerPool(state_dir, self.job, record, self.clock)
        self.ledger = ledgers.Ledger(self.output / contract.LEDGER, "launcher")
        self.request = Request.read(state_dir)
        self.state = coordinator.after(record.generation, self.clock())
        self.close_by = self.closed_at = 0.0
        self.displaced = False
        self.submitted = self.clock() - max(0.0, time.time() - state_dir.started_at())
        """When the run was submitted or resumed, on this launcher's clock."""
        self.started: float | None = None
        self.not_joined: dict[int, str] = {}
        """Why workers could not join the running world, keyed by worker index."""
        self.formed_at = 0.0
        self.unreachable: dict[int, str] = {}
        """Why unreachable workers were killed, keyed by worker index."""
        self.status = JobStatus(
            name=self.job.metadata.name,
            run=self.run_id,
            submitted=record.submitted,
            output=str(self.output),
            store=StoreStatus(url=self.store) if self.store else None,
            processes=self.pool.processes,
            min=self.settings.sizes[0],
            max=self.settings.sizes[-1],
        )
        self.live = LiveStatus(state_dir, record, self.pool, self.status, self.clock)
        self._started = 0, 0
        """The `newest_start` that the previous launcher recorded."""
        self.output_lock: int | None = None
        self.heartbeat: heartbeat.Heartbeats | None = None
        self._written = ""
        self._wake = asyncio.Event()
        self.server = sockets.Server(run=self.run_id, take=self._take, clock=self.clock)

    # The loop

    async def run(self) -> int:
        """Run the loop until the job is over, and return the exit code."""
        self._recover()
        await self.server.start(self.state_dir.socket)
        self.ledger.write("launcher", pid=os.getpid(), adopted=len(self.pool.present))
        with contextlib.suppress(OSError):  # a full disk, or a file system without locks
            (self.output / contract.OWNER).write_text(str(self.state_dir.path))
            self.output_lock = file_locks.shared(self.output / contract.OWNER)
        if self.store:
            from outlast.local import store_takeover
            from outlast.storage import store
            from outlast.storage.runs import heartbeat

            home, owner = store_takeover.home(self.state_dir.path), self.record.owner
            self.heartbeat = heartbeat.Heartbeats(lambda: store.open_(self.store), self.run_id, owner, home, lost=lambda _: None)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            ending = Ending(State.INTERRUPTED, f"the launcher received {number.name}", contract.Exit.INTERRUPTED)
            loop.add_signal_handler(number, self._take, ending)
        while True:
            self._wake.clear()
            self._end_silent()
            self._collect_ended()
            self._apply_request()
            if self.state.ending is None:
                self._keep_deadlines()
                self._start_missing()
                self._decide()
            elif self._all_exited():
                break
            self._write_status()
            await asyncio.sleep(0)  # receive pending messages even if there is no pause
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
        await self.server.stop()
        return self._finish()

    # Recovery

    def _recover(self) -> None:
        """Restore a dead launcher's state, and adopt its workers that are still alive."""
        self.live.start()
        try:
            memory = json.loads(self.state_dir.recovery.read_text())
        except FileNotFoundError:
            return
        ages = [(memory["time"] - at, committed, step) for at, committed, step in memory["history"]]
        before = {"counted": memory["judged"], "failures": ages}  # the previous version wrote no more than this
        last = decode(PersistedState, {**before, **memory, "closed": None})  # the end is in `closing`
        generation, now = max(memory["generation"], self.record.generation), self.clock()
        restored = last.restored(now, max(0.0, time.time() - memory["time"]))
        called = coordinator.after(generation, now).called
        self.state = replace(restored, world=None, called=called, followed=generation)
        self.status.interruptions = memory["interruptions"]
        with contextlib.suppress(OSError, ValueError):
            shown = JobStatus.model_validate_json(self.state_dir.status.read_text())
            self.status.started, self.status.failure = shown.started, shown.failure
            self.status.step, self.status.epoch = shown.step, shown.epoch
            if shown.started is not None:
                self.started = now - max(0.0, time.time() - shown.started)
        self._started = memory["generation"], memory.get("start", 0)
        self.pool.gpus = memory["gpus"]  # if a worker restarts us, we see only that worker's GPUs
        self.pool.adopt(memory["workers"])
        state, reason, code = memory["closing"] or (State.RUNNING, "", 0)
        if state in (State.SUCCEEDED, State.FAILED):  # other ends were requested by the user, in `wanted.json`
            ending = Ending(State(state), reason, code, End(memory.get("end", "")))
            self.state = replace(self.state, ending=ending)
            self.close_by = now + self.settings.timeouts.leave + EXIT_TIMEOUT_S
        self._collect_ended()
        if self.pool.present and last.world:  # the world may still be training, so wait for reports
            self.state = replace(self.state, world=restored.world, called=None, since=self.clock())
            self.say(State.RUNNING, "the launcher was started again over a running world")
        self.remember()

    def remember(self) -> None:
        end = self.state.ending
        memory = {
            **asdict(self.state.persisted(self.clock())),
            "time": time.time(),
            "generation": self.state.generation,
            "interruptions": self.status.interruptions,
            "history": self.state.history,  # for the previous version, which reads this and `judged`
            "judged": self.state.counted[0],
            "start": self.newest_start()[1],
            "gpus": self.pool.gpus,
            "closing": (end.state, end.reason, end.code) if end else None,
            "end": end.end if end else "",
            "workers": self.pool.records(),
        }
        with contextlib.suppress(OSError):  # a full disk; the workers also have the newest generation
            files.replace(self.state_dir.recovery, json.dumps(memory), durable=True)

    # Workers

    def _start_missing(self) -> None:
        for index in self.pool.missing(self.request.replicas, self.state.reports):
            try:
                worker = self.pool.start(index, self.state.reports)
            except (OutlastError, OSError) as problem:
                if isinstance(problem, OutlastError) and not self.pool.present:
                    return self._take(Ending(State.FAILED, str(problem), contract.Exit.MISCONFIGURED))
                self.not_joined[index] = f"worker {index} cannot be started: {problem}"
                self.pool.pause(index)
                continue
            self.ledger.write("worker", worker=index, pid=worker.pid, attempt=worker.attempt, forked=worker.child is None)
            self.remember()

    def _end_silent(self) -> None:
        """Kill the workers whose agents are silent, since the other workers may already train without them."""
        for worker in self.pool.silent():
            self.pool.kill(worker.index, "has an agent that does nothing")

    def _collect_ended(self) -> None:
        for end in self.pool.ended():
            worker = end.worker
            self.ledger.write("exited", worker=worker.index, code=end.code, reason=end.message, interrupted=end.interrupted)
            if end.displaced and self.state.ending is None:
                self.displaced = True
                self._take(Ending(State.INTERRUPTED, end.message, contract.Exit.INTERRUPTED))
            elif self.state.ending is None and not worker.leaving:
                if end.interrupted:
                    self.status.interruptions += 1
                else:
                    self._worker_died(end)
            self.remember()

    def _worker_died(self, end: Ended) -> None:
        index = end.worker.index
        reason = self.unreachable.pop(index, end.reason)
        self.pool.pause(index)
        training = self.state.world if self.state.called is None else None
        if training is not None and index not in training.members:  # the world continues without this worker
            self.not_joined[index] = f"{end.reason}; it will be started again"
            return
        (generation, attempt), step = self.newest_start(), self.status.step
        inside = self.state.world is not None and index in self.state.world.members and self.pool.trained(index)
        if inside and self.state.counted >= (generation, attempt):
            return  # part of a failure that is already counted
        died = Failure(worker=index, code=end.code, reason=reason, step=step, time=time.time())
        self._take(Pending(False, replace(died, generation=generation, attempt=attempt)))

    def newest_start(self) -> tuple[int, int]:
        """Return the newest generation and its newest reported attempt, even if only the previous launcher saw them."""
        current = self.state.generation
        starts = [(each.generation, each.attempt) for each in self.state.reports.values() if each.generation == current]
        return max([(current, 0), self._started, *starts])

    # Coordination

    def _decide(self) -> None:
        expected = frozenset(worker.index for worker in self.pool.staying())
        self._take(coordinator.Tick(expected, self.request.replicas, self._cause()))

    def _take(self, event: coordinator.Event) -> None:
        before = self.state
        self.state, effects = coordinator.step(self.settings, before, event, self.clock())
        if self.state is not before:
            self._wake.set()
        lasting, last = ((each.world, each.counted, each.history, each.ending) for each in (self.state, before))
        if lasting != last:
            self.remember()  # before any worker or user learns of it
        for effect in effects:
            match effect:
                case coordinator.Record(kind, facts, state, reason, failure):
                    self.status.failure = failure or self.status.failure
                    self.ledger.write(kind, **facts)
                    if state:
                        self.say(state, reason)
                case coordinator.Send(to, kind, message):
                    self.server.send(to, kind, message)
                case coordinator.Fence(id, reason):
                    self.unreachable[id] = reason
                    self.not_joined[id] = f"{reason}; it is started again, and may join after {self.state.lost[id].held_s:g} s"
                    self.pool.kill(id, f"is heard by nobody ({reason})")
                case Ending():
                    self._end(effect)
                case who_trains.World():
                    self.formed(effect)
                case who_trains.Wait():
                    called = self.state.called
                    if (called and self.clock() - called.at > WAIT_NOTICE_S) or (not called and not self.state.world):
                        self.status.reason, self.status.waits = effect.reason, effect.steady
                    elif effect.idle not in self.status.reason:
                        self.status.reason = effect.reason

    def formed(self, new: who_trains.World) -> None:
        now = self.clock()
        self.status.started = self.status.started or time.time()
        self.started = now if self.started is None else self.started
        self.formed_at = now
        self.live.world_formed()
        for id in new.members:
            self.pool.joined(id)
            self.not_joined.pop(id, None)
        surplus = len(self.pool.staying()) - self.request.replicas
        outside = sorted((w for w in self.pool.staying() if w.index not in new.members), key=lambda w: -w.index)
        for worker in outside[: max(0, surplus)]:
            self.pool.ask_to_leave(worker)

    def _cause(self) -> root_cause.Known | None:
        """Return what is known about the cause of the pending failures. Secondary failures without a step get the run's step."""
        if not self.state.pending:
            return None
        self.live.read(self.state.world)
        if self.status.told:
            pending = (
                each._replace(failure=replace(each.failure, step=each.failure.step or self.status.step)) if each.echo else each
                for each in self.state.pending
            )
            self.state = replace(self.state, pending=tuple(pending))
        cause = root_cause.cause(self.state.pending)
        failure, committed, step = cause.failure, self.live.committed(), self.status.step
        if failure.hung:  # a hung process has reported its step
            return root_cause.Known(failure, failure.step, committed)
        if self.live.has_session and failure.step:  # the failed rank's own step: others may be a step ahead
            step = failure.step
        # The step is unknown from a secondary failure, or from a plain script that ran for a while.
        silent = not self.live.has_session and self.status.told != "script" and self.clock() - self.formed_at > EARLY_FAILURE_S
        raised = 0 if self.status.told == "log" else step  # a step read from a log is shown, but decides nothing
        shown = replace(failure, step=step if self.status.told else failure.step)
        return root_cause.Known(shown, None if cause.echo or silent else raised, committed)

    def _keep_deadlines(self) -> None:
        """End a job that starts too late or runs too long. The clock stops while the machine sleeps."""
        now, limits = self.clock(), self.job.spec
        startup, active = limits.startup_deadline_seconds, limits.active_deadline_seconds
        if startup and self.started is None and now - self.submitted > startup:
            reason = f"training has not started within startupDeadlineSeconds ({startup})"
            self._take(Ending(State.FAILED, reason, contract.Exit.FAILED, End.STARTUP_DEADLINE))
        elif active and self.started is not None and now - self.started > active:
            reason = f"the job has run for activeDeadlineSeconds ({active})"
            self._take(Ending(State.FAILED, reason, contract.Exit.FAILED, End.DEADLINE))

    # The user's requests

    def _apply_request(self) -> None:
        new = Request.read(self.state_dir)
        if new == self.request and not new.end:
            return
        if new.replicas != self.request.replicas:
            self.ledger.write("scaled", replicas=new.replicas)
            self.not_joined.clear()
        old, self.request = self.request, new
        ending = ENDINGS.get(new.end)
        at_once = ending is not None and ending.code != contract.Exit.INTERRUPTED
        if ending and (self.state.ending is None or (at_once and old.end != new.end)):
            self.state = replace(self.state, ending=None)
            self._take(ending)
            self.close_by = 0.0 if at_once else self.close_by

    # The end

    def _end(self, ending: Ending) -> None:
        """Announce the end, and ask workers to leave: all after an interruption, otherwise those that cannot hear of it."""
        leave = ending.code == contract.Exit.INTERRUPTED
        if ending.state is State.FAILED and self.status.state is State.RESTARTING:
            self.say(State.RUNNING, "the job fails; its workers are told to end")  # the job's last state has the reason
        else:
            state = State.RUNNING if ending.state is State.SUCCEEDED else State.RESIZING if leave else self.status.state
            self.say(state, ending.reason)
        self.status.interruptions += leave
        self.closed_at = self.clock()
        self.close_by = self.closed_at + (self.settings.timeouts.leave if leave else 0.0) + EXIT_TIMEOUT_S
        for worker in self.pool.present.values():
            if leave or worker.index not in self.state.reports:
                self.pool.ask_to_leave(worker)

    def _all_exited(self) -> bool:
        """Kill workers that take too long to exit, and return whether all workers are gone."""
        assert self.state.ending is not None
        flushing = [w for w in self.pool.present.values() if self.pool.report(w).get("state") == Phase.FLUSHING]
        if self.store and flushing and self.clock() - self.closed_at > WAIT_NOTICE_S:
            self.status.reason, self.status.waits = f"{self.state.ending.reason}; pushing what is left to {self.store}", ""
        if self.clock() > self.close_by:
            for worker in list(self.pool.present.values()):
                if not self.close_by or self.pool.report(worker).get("state") != Phase.FLUSHING:  # agents limit their flush
                    self.pool.kill(worker.index, "has not left in time")
        return not self.pool.present

    def _finish(self) -> int:
        assert self.state.ending is not None
        state, reason, code = self.state.ending.state, self.state.ending.reason, self.state.ending.code
        if self.state.pending and self.status.failure is None and state is State.FAILED:  # came with the end, so not counted
            self.status.failure = root_cause.cause(self.state.pending).failure
        if self.status.told != "session" and self.status.checkpoint is None:
            self.live.finish()
        if code == contract.Exit.INTERRUPTED:
            self.live.read(self.state.world)
            reason = f"{reason}; {self.live.saved_sentence()}"
        self.status.world, self.status.rate = [], None
        self.live.warning = tracking.end(self.output, self.pool.tracker_environ(), state) or self.live.warning
        self.ledger.write("finished", state=str(state), reason=reason, step=self.status.step, code=code)
        if self.store and self.request.end != "kill":
            state, reason, code = self._upload_rest(state, reason, code)
        if self.heartbeat is not None:
            with contextlib.suppress(OutlastError):  # if this fails, the run looks alive until the heartbeat expires
                self.heartbeat.stop(left=True)
        self.status.finished = time.time()
        self.status.exit_code = code
        self.status.state, self.status.reason, self.status.waits = state, reason, ""
        self.status.launcher = None
        self._write_status(final=True)  # first, since we may be killed while the whole ledger is read
        self.live.final_goodput()
        self._write_status(final=True)
        if self.output_lock is not None:
            os.close(self.output_lock)
        return code

    def _upload_rest(self, state: State, reason: str, code: int) -> tuple[State, str, int]:
        """Upload the last ledger events and killed workers' files. If that fails, a successful job ends as interrupted."""
        from outlast.local import store_takeover

        self.say(self.status.state, f"pushing what is left to {self.store}")
        self._write_status()
        last = upload_supervisor.UploadProcess(self.pool.uploader_environ())
        failed, problem = last.flush(UPLOAD_TIMEOUT_S)
        if self.status.store is not None and last.report:
            self.status.store = StoreStatus(url=self.store, **last.report)
        if failed == upload_supervisor.SUPERSEDED:
            return State.INTERRUPTED, reason if self.displaced else f"{reason}; {problem}", contract.Exit.INTERRUPTED
        if not failed:
            problem = store_takeover.end(self.record, state, reason, code)
        if not problem:
            return state, reason, code
        problem = f"the output is not all in {self.store}: {problem}; it is kept in {self.output}"
        if state is State.SUCCEEDED:
            return State.INTERRUPTED, f"{reason}; {problem}, and `outlast run` pushes it", contract.Exit.INTERRUPTED
        return state, f"{reason}; {problem}", code

    # Status

    def say(self, state: State, reason: str) -> None:
        self.status.state, self.status.reason, self.status.waits = state, reason, ""
        with contextlib.suppress(OSError):  # a full disk costs the log, not the job
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {state}: {reason}", flush=True)

    def _write_status(self, *, final: bool = False) -> None:
        self.live.read(self.state.world)
        status = self.status
        each, cores = self.pool.processes, len(os.sched_getaffinity(0))
        train = f"{each * self.request.replicas} processes, {each} a worker, train on {cores} CPU cores"
        train += "; --set processesPerWorker=1 for one a worker" if each > 1 else ""
        no_gpu = f"resources.gpu ({self.job.spec.resources.gpu}): this machine shows no GPU; {train}"
        cpu_instead = self.job.spec.resources.gpu and not any(self.pool.gpus.values())
        warnings = [self.live.warning, self.live.begun_anew, self.live.alone, no_gpu if cpu_instead else ""]
        status.warnings = [text for text in [*warnings, *self.not_joined.values()] if text]
        status.replicas = self.request.replicas
        status.restarts, status.generation = self.state.restarts, self.state.generation
        status.end = self.state.ending.end if self.state.ending else End.UNKNOWN
        if not final:
            running = self.state.world is not None and self.state.called is None
            status.world = list(self.state.world.members) if running and self.state.world else []
            status.launcher = os.getpid()
            self.live.update_goodput()
        self.live.update_workers(self.state.world)
        text = status.model_dump_json()
        if text != self._written:
            with contextlib.suppress(OSError):  # a full disk; a later call writes the status
                files.replace(self.state_dir.status, text, durable=final)
                self._written = text


def _acquire(lock: int) -> bool:
    """Acquire the lock. Retries, since a process that only tests the lock also holds it for a moment."""
    for _ in range(20):
        if file_locks.acquire(lock):
            return True
        time.sleep(0.05)
    return False


def main(argv: list[str]) -> int:
    """Run a job's launcher; a second launcher for the same job exits at once."""
    state_dir = StateDir(Path(argv[0]))
    os_calls.entitle(f"launcher {state_dir.path}")
    with open(state_dir.lock, "a") as lock:
        if not _acquire(lock.fileno()):
            print(f"another launcher runs {state_dir.path}", flush=True)
            return 0
        package_copy.hold()
        log = os.open(state_dir.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        return asyncio.run(Launcher(state_dir).run())
