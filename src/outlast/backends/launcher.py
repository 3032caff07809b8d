"""The launcher: decides for one job on this machine. It starts workers, listens to them, forms worlds, judges failures, keeps
the status.

    python -m outlast.backends.launcher STATE_DIR

One launcher a job (it holds a lock). It may be killed at any moment: workers train on, start a new launcher when they miss it,
and the new one adopts them. What must survive is in `launcher.json`, written before anything that depends on it; what the user
wants is in `wanted.json`, written by the command line; what there is to see is in `status.json`. The decisions are
`world.decide` and `restarts.judge`; this file is the shell around them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from outlast import checkpoints, contract, restarts, spec
from outlast.backends.places import Places, Wanted, replace_text
from outlast.rendezvous import local, world
from outlast.rendezvous.world import Standing
from outlast.report import goodput
from outlast.runtime import ledger as ledgers
from outlast.runtime import progress
from outlast.runtime.agent import processes_per_worker
from outlast.status import CheckpointStatus, Failure, JobStatus, RankStatus, State, WorkerStatus

TICK_S = 0.1
SETTLE_S = 1.0
"""Failures of one generation are collected this long, so that the first of them is judged and not its echoes."""
WAITED_S = 2.0
"""A wait longer than this is worth more words than what led to it."""
CLOSING_S = 15.0
"""How long workers may take to leave after the end of the job."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before a worker is started again that has not joined a world since its last start."""


@dataclasses.dataclass
class Worker:
    """A worker process of ours, started or adopted."""

    index: int
    pid: int
    created: float
    attempt: int
    child: subprocess.Popen[bytes] | None = None
    joined: bool = False
    """Whether it has been in a world since its start."""
    told: bool = False
    """Whether we have told it to leave."""

    def poll(self) -> int | None:
        """Its exit code once it has ended, None before. The code of an adopted one is in its `worker.json`; -9 if it is not."""
        if self.child is not None:
            return self.child.poll()
        try:
            process = psutil.Process(self.pid)
            alive = abs(process.create_time() - self.created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            alive = False
        return None if alive else -signal.SIGKILL


class Launcher:
    """All that is known and done for one job. `run` returns the exit code of the launcher."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.job = spec.load(places.job)
        record = json.loads(places.run.read_text())
        self.run_id: str = record["run"]
        self.output = Path(record["output"])
        self.code = Path(record["code"])
        self.ledger = ledgers.Ledger(self.output / contract.LEDGER, "launcher")
        self.wanted = Wanted.read(places)
        self.policy = restarts.Policy(self.job.spec.restarts.limit, self.job.spec.restarts.window)
        self.patience = dataclasses.replace(world.Patience(), leave=self.job.spec.interruption.grace.total_seconds())
        self.processes = processes_per_worker(self.job)
        self.history = restarts.History()
        self.workers: dict[int, Worker] = {}
        self.reports: dict[int, local.Report] = {}
        self.known = world.State({})
        """What `world.decide` goes by."""
        self.not_before: dict[int, float] = {}
        self.pending: list[tuple[bool, Failure]] = []
        """Failures of the current generation, each with whether it only echoes another."""
        self.closing: tuple[State, str, int] | None = None
        """The end that has been decided: state, reason, exit code."""
        self.close_by = 0.0
        self.attempts: collections.Counter[int] = collections.Counter()
        """Starts of each worker."""
        self.paces: collections.deque[tuple[float, int]] = collections.deque(maxlen=64)
        self.status = JobStatus(
            name=self.job.metadata.name,
            run=self.run_id,
            submitted=record["submitted"],
            output=str(self.output),
            processes=self.processes,
            min=self.job.spec.workers.allowed()[0],
            max=self.job.spec.workers.allowed()[-1],
        )
        self._goodput_at = 0.0
        self._written = ""
        self._poke = asyncio.Event()
        self.server = local.Server(heard=self._heard, gone=self._gone)

    # The loop

    async def run(self) -> int:
        """Decide until the job is over."""
        self._recover()
        await self.server.start(self.places.socket)
        self.ledger.write("launcher", pid=os.getpid(), adopted=len(self.workers))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._close, State.INTERRUPTED, f"the launcher received {number.name}", 75)
        while True:
            self._poke.clear()
            for id in self.server.drop_silent(time.monotonic()):
                self._put_down(id, f"was silent for {local.SILENCE_S:g} s")
            self._reap()
            self._obey()
            if self.closing is None:
                self._keep_deadlines()
                self._staff()
                self._decide()
                self._judge_when_settled()
            elif self._left():
                break
            self._show()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), TICK_S)
        await self.server.stop()
        return self._finish()

    # What we remember

    def _recover(self) -> None:
        """Take over from a launcher that died: its counts, and the workers that still live."""
        try:
            memory = json.loads(self.places.memory.read_text())
        except FileNotFoundError:
            return
        self.history = restarts.History(tuple(restarts.Record(*record) for record in memory["history"]))
        self.status.restarts, self.status.interruptions = memory["restarts"], memory["interruptions"]
        with contextlib.suppress(OSError, ValueError):
            before = JobStatus.model_validate_json(self.places.status.read_text())
            self.status.started, self.status.failure, self.status.step = before.started, before.failure, before.step
        for fields in memory["workers"]:
            worker = Worker(**fields)
            self.attempts[worker.index] = worker.attempt
            if worker.poll() is None:
                self.workers[worker.index] = worker
            else:
                lost = f"worker {worker.index} was lost while the launcher was away"
                code = contract.exit_code(-signal.SIGKILL)
                self._failed(
                    Failure(worker=worker.index, code=code, reason=lost, generation=memory["generation"], time=time.time()),
                    echo=False,
                )
        generation = memory["generation"]
        if self.workers and memory["world"]:  # it may still train: listen before deciding
            self.known = world.State({}, local.world_from(memory["world"]), since=time.time())
            self._say(State.RUNNING, "the launcher was started again over a running world")
            for worker in self.workers.values():
                worker.joined = True
        elif generation:
            self.known = world.State({}, called=world.Call(generation + 1, "the run goes on", False, time.time()))

    def _remember(self) -> None:
        memory = {
            "generation": self._generation(),
            "world": dataclasses.asdict(self.known.world) if self.known.world else None,
            "history": self.history.failures,
            "restarts": self.status.restarts,
            "interruptions": self.status.interruptions,
            "workers": [
                {"index": w.index, "pid": w.pid, "created": w.created, "attempt": w.attempt} for w in self.workers.values()
            ],
        }
        replace_text(self.places.memory, json.dumps(memory))

    def _generation(self) -> int:
        """The newest generation that there has been."""
        called = self.known.called.generation - 1 if self.known.called else 0
        return max(called, self.known.world.generation if self.known.world else 0)

    # What members say

    def _heard(self, report: local.Report) -> None:
        if report.run != self.run_id:
            self.server.send(report.id, "closed", local.Closed(f"run {report.run} is over", contract.Exit.FAILED))
            return
        before = self.reports.get(report.id)
        self.reports[report.id] = report
        if before is not None and dataclasses.replace(before, since=report.since) == report:
            return  # a heartbeat
        standing = Standing(report.standing)
        self.known = self.known.heard(
            world.Member(report.id, report.address, standing, report.generation, time.time(), report.failed)
        )
        now = self.known.world
        if report.failed and report.failure and now and report.generation == now.generation:
            self._failed(Failure(worker=report.id, generation=report.generation, step=self.status.step, **_facts(report.failure)),
                         echo=bool(report.failure["echo"]))  # fmt: skip
        # It may have missed what was said before it connected.
        if self.known.called is not None:
            self.server.send(report.id, "called", self._call(self.known.called))
        elif now is not None and report.id in now.members and report.generation < now.generation:
            self.server.send(report.id, "world", now)
        if self.closing is not None and self.closing[2] != contract.Exit.INTERRUPTED:  # else it saves, and leaves by itself
            self.server.send(report.id, "closed", local.Closed(self.closing[1], self.closing[2]))
        self._poke.set()

    def _gone(self, id: int) -> None:
        self.reports.pop(id, None)
        self.known = self.known.gone(id)
        self._poke.set()

    # Workers

    def _staff(self) -> None:
        """Start the workers that are wanted and missing."""
        now = time.time()
        present = set(self.workers)
        missing = self.wanted.replicas - len([w for w in self.workers.values() if not w.told])
        for index in range(max(self.wanted.replicas, self.status.max)):
            if missing <= 0:
                break
            if index in present:
                continue
            missing -= 1
            if now >= self.not_before.get(index, 0.0):
                self._start(index)

    def _start(self, index: int) -> None:
        state = self.places.worker(index)
        state.mkdir(parents=True, exist_ok=True)
        (state / contract.WORKER).unlink(missing_ok=True)
        for local_rank in range(self.processes):
            (state / contract.PROGRESS.format(local_rank=local_rank)).unlink(missing_ok=True)
        logs = self.output / contract.LOGS
        logs.mkdir(parents=True, exist_ok=True)
        self.attempts[index] += 1
        attempt = self.attempts[index]
        with open(logs / contract.worker_log(index), "ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "outlast.runtime.agent"],
                env=self._environ(index, state),
                cwd=self.code,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        created = psutil.Process(child.pid).create_time()
        self.workers[index] = Worker(index, child.pid, created, attempt, child)
        self.ledger.write("worker", worker=index, pid=child.pid, attempt=attempt)
        self._remember()

    def _put_down(self, index: int, why: str) -> None:
        """Kill a worker that lives but does not work; it is started again like one that died."""
        worker = self.workers.get(index)
        if worker is not None:
            print(f"worker {index} {why}; killing it", flush=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)  # the agent leads its session; what it forked dies with it

    def _environ(self, index: int, state: Path) -> dict[str, str]:
        """The environment contract of a worker, the same as a pod's."""
        every = self.job.spec.checkpoint.every
        cpus = self.job.spec.resources.cpu or (os.cpu_count() or 1) / max(1, self.job.spec.workers.replicas)
        return {
            **os.environ,
            # Results depend on the number of threads and on the order of sets: both must be the same after every restart.
            "OMP_NUM_THREADS": str(max(1, int(cpus / self.processes))),
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            **self.job.spec.env,
            contract.Env.JOB: self.job.metadata.name,
            contract.Env.RUN: self.run_id,
            contract.Env.WORKER: str(index),
            contract.Env.STATE: str(state),
            contract.Env.OUTPUT: str(self.output),
            contract.Env.LEDGER: str(self.output / contract.LEDGER),
            contract.Env.NOTICE: str(state / contract.NOTICE),
            contract.Env.RENDEZVOUS: f"{local.SCHEME}{self.places.socket}",
            contract.Env.CHECKPOINT_EVERY: str(every),
            contract.Env.CHECKPOINT_KEEP: str(self.job.spec.checkpoint.keep),
            contract.Env.JOB_FILE: str(self.places.job),
            contract.Env.CODE: str(self.code),
            contract.Env.PROBE_PORT: str(base + index if (base := int(os.environ.get(contract.Env.PROBE_PORT) or 0)) else 0),
            contract.Env.REVIVE: json.dumps([sys.executable, "-m", "outlast.backends.launcher", str(self.places.state)]),
        }

    def _reap(self) -> None:
        for index, worker in list(self.workers.items()):
            status = worker.poll()
            if status is None:
                continue
            del self.workers[index]
            said = _read_json(self.places.worker(index) / contract.WORKER)
            if worker.child is None and said.get("pid") == worker.pid and said.get("code") is not None:
                status = int(said["code"])
            self._ended(worker, contract.exit_code(status), said.get("reason") or "")
            self._remember()

    def _ended(self, worker: Worker, code: int, said: str) -> None:
        index = worker.index
        interrupted = code == contract.Exit.INTERRUPTED or worker.told
        self.ledger.write("exited", worker=index, code=code, reason=said, interrupted=interrupted)
        if self.closing is not None or worker.told:
            return
        if interrupted:
            self.status.interruptions += 1
            return
        starts = 0 if worker.joined else worker.attempt
        self.not_before[index] = time.time() + BACKOFF_S[min(starts, len(BACKOFF_S) - 1)]
        how = f"was killed by {signal.Signals(code - 128).name}" if contract.killed(code) else f"exited with code {code}"
        reason = f"worker {index} {how}" + (f": {said}" if said and not contract.killed(code) else "")
        generation = self._generation()
        self._failed(
            Failure(worker=index, code=code, reason=reason, step=self.status.step, generation=generation, time=time.time()),
            echo=False,
        )

    # Decisions

    def _decide(self) -> None:
        expected = frozenset(index for index, worker in self.workers.items() if not worker.told)
        wanted = world.Wanted(self.wanted.replicas, self.job.spec.workers.allowed(), expected)
        decision = world.decide(self.known, wanted, self.patience, time.time())
        match decision:
            case world.Call():
                self._publish_call(decision)
            case world.World():
                self._publish_world(decision)
            case world.Closed(reason, done):
                self._close(
                    State.SUCCEEDED if done else State.SUSPENDED,
                    reason,
                    contract.Exit.DONE if done else contract.Exit.INTERRUPTED,
                )
            case world.Wait(reason):
                called = self.known.called
                if (called and time.time() - called.at > WAITED_S) or (not called and not self.known.world):
                    self.status.reason = reason

    def _call(self, call: world.Call) -> local.Called:
        return local.Called(call.generation, call.reason, call.planned, call.at + self.patience.leave)

    def _publish_call(self, call: world.Call) -> None:
        self.known = self.known.after(call)
        self.ledger.write("called", generation=call.generation, reason=call.reason, planned=call.planned)
        self._say(State.RESIZING if call.planned else State.RESTARTING, call.reason)
        for id in self.reports:
            self.server.send(id, "called", self._call(call))

    def _publish_world(self, formed: world.World) -> None:
        if not self._judge():
            return
        self.known = self.known.after(formed)
        self._remember()  # the generation must grow even if we die now
        self.ledger.write("world", generation=formed.generation, workers=list(formed.members), reason=formed.reason)
        self.status.started = self.status.started or time.time()
        self._say(State.RUNNING, formed.reason)
        for id in formed.members:
            if id in self.workers:
                self.workers[id].joined = True
            self.server.send(id, "world", formed)
        surplus = len([w for w in self.workers.values() if not w.told]) - self.wanted.replicas
        outside = sorted((w for i, w in self.workers.items() if i not in formed.members and not w.told), key=lambda w: -w.index)
        for worker in outside[: max(0, surplus)]:
            self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        worker.told = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)

    def _failed(self, failure: Failure, *, echo: bool) -> None:
        self.pending.append((echo, failure))
        self._poke.set()

    def _judge_when_settled(self) -> None:
        if self.pending and time.time() - min(failure.time for _, failure in self.pending) > SETTLE_S:
            self._judge()

    def _judge(self) -> bool:
        """Judge the failures that have come together; False when the job ends by it."""
        if not self.pending:
            return True
        echo, first = min(self.pending, key=_cause_first)
        self.pending.clear()
        step = self._newest_step()
        # An error that only echoes somebody's death, whoever that was, says nothing of the step.
        judged = first.model_copy(update={"step": None if echo else step})
        verdict = restarts.judge(self.history, judged, self._committed(), time.time(), self.policy)
        counted = isinstance(verdict, restarts.Stop) or verdict.counted
        self.status.failure = first.model_copy(update={"counted": counted, "step": step})
        facts = first.model_dump(include={"generation", "worker", "rank", "code", "reason"})
        self.ledger.write("failure", **facts, step=step, counted=counted)
        if isinstance(verdict, restarts.Stop):
            self._close(State.FAILED, verdict.reason, verdict.code)
            return False
        self.history = verdict.history
        self.status.restarts += counted
        self._say(State.RESTARTING, verdict.reason)
        self._remember()
        return True

    def _keep_deadlines(self) -> None:
        """End a job that does not get to train, or trains for too long."""
        now, limits = time.time(), self.job.spec
        startup, active = limits.startup_deadline_seconds, limits.active_deadline_seconds
        if startup and self.status.started is None and now - self.status.submitted > startup:
            self._close(State.FAILED, f"training has not begun within startupDeadlineSeconds ({startup})", contract.Exit.FAILED)
        elif active and self.status.started is not None and now - self.status.started > active:
            self._close(State.FAILED, f"the job has run for activeDeadlineSeconds ({active})", contract.Exit.FAILED)

    # What the user wants

    def _obey(self) -> None:
        wanted = Wanted.read(self.places)
        if wanted == self.wanted and not wanted.end:
            return
        if wanted.replicas != self.wanted.replicas:
            self.ledger.write("scaled", replicas=wanted.replicas)
        before, self.wanted = self.wanted, wanted
        if self.closing is not None:
            if wanted.end in ("kill", "cancel") and before.end != wanted.end:
                self.closing = (_END_STATES[wanted.end], _ENDS[wanted.end], self.closing[2])
                self.close_by = 0.0
        elif wanted.end:
            code = contract.Exit.INTERRUPTED if wanted.end in ("interrupt", "suspend") else contract.Exit.FAILED
            self._close(_END_STATES[wanted.end], _ENDS[wanted.end], code)
            if wanted.end in ("kill", "cancel"):
                self.close_by = 0.0

    # The end

    def _close(self, state: State, reason: str, code: int) -> None:
        """Decide the end: workers that trained to it are told so, the others are told to leave."""
        if self.closing is not None:
            return
        self.closing = (state, reason, code)
        self._say(State.RUNNING if state is State.SUCCEEDED else State.RESIZING if code == 75 else self.status.state, reason)
        leave = code == contract.Exit.INTERRUPTED
        self.status.interruptions += leave
        self.close_by = time.time() + (self.patience.leave + CLOSING_S if leave else CLOSING_S)
        if leave:
            for worker in self.workers.values():
                self._tell(worker)
        else:
            for id in list(self.reports):
                self.server.send(id, "closed", local.Closed(reason, code))
            for index, worker in self.workers.items():
                if index not in self.reports:
                    self._tell(worker)
        self._poke.set()

    def _left(self) -> bool:
        """Whether all workers are gone; those that take too long are killed."""
        if self.workers and time.time() > self.close_by:
            for index in self.workers:
                self._put_down(index, "has not left in time")
        return not self.workers

    def _finish(self) -> int:
        assert self.closing is not None
        state, reason, code = self.closing
        self._judge_last()
        self.status.world = []
        self.status.finished = time.time()
        self.status.exit_code = code
        self.status.state, self.status.reason = state, reason
        self.ledger.write("finished", state=str(state), reason=reason, step=self.status.step, code=code)
        self.status.launcher = None
        self._show(final=True)
        return code

    def _judge_last(self) -> None:
        """A failure that came with the end is still shown, although nobody restarts for it."""
        if self.pending and self.status.failure is None and self.closing and self.closing[0] is State.FAILED:
            self.status.failure = min(self.pending, key=_cause_first)[1]

    # What there is to see

    def _say(self, state: State, reason: str) -> None:
        self.status.state, self.status.reason = state, reason
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {state}: {reason}", flush=True)

    def _newest_step(self) -> int:
        self._read_progress()
        return self.status.step

    def _committed(self) -> int:
        found = checkpoints.latest(checkpoints.list_(self.output / contract.CHECKPOINTS), self.run_id)
        return found.step if found else 0

    def _read_progress(self) -> None:
        now_world = self.known.world
        if now_world is None:
            return
        record = progress.read(self.places.worker(now_world.members[0]), 0)
        if record is None or record.phase in ("started", "open", "restore") or record.generation != now_world.generation:
            return
        now = time.time()
        if record.step != self.status.step or not self.paces:
            if record.step < self.status.step:
                self.paces.clear()
            self.paces.append((now, record.step))
        self.status.step = record.step
        self.status.steps = record.steps
        self.status.warnings = [record.warning] if record.warning else []
        if self.status.checkpoint is None or record.committed != self.status.checkpoint.step:
            found = checkpoints.latest(checkpoints.list_(self.output / contract.CHECKPOINTS), self.run_id)
            if found is not None:
                self.status.checkpoint = CheckpointStatus(
                    step=found.step, path=str(found.path), time=found.time, bytes=found.bytes
                )
        (then, step), *_ = self.paces
        self.status.rate = (record.step - step) / (now - then) if now - then > 0.5 else self.status.rate

    def _show(self, *, final: bool = False) -> None:
        self._read_progress()
        status = self.status
        status.replicas = self.wanted.replicas
        status.generation = self._generation()
        if not final:
            running = self.known.world is not None and self.known.called is None
            status.world = list(self.known.world.members) if running and self.known.world else []
            status.launcher = os.getpid()
        status.workers = [self._worker_status(worker) for _, worker in sorted(self.workers.items())]
        now = time.time()
        if final or now > self._goodput_at:
            before = time.perf_counter()
            status.goodput = goodput.buckets(ledgers.read(self.output / contract.LEDGER), now).goodput
            self._goodput_at = now + max(2.0, 50 * (time.perf_counter() - before))  # at most 2 % of our time
        text = status.model_dump_json()
        if text != self._written:
            replace_text(self.places.status, text)
            self._written = text

    def _worker_status(self, worker: Worker) -> WorkerStatus:
        said = _read_json(self.places.worker(worker.index) / contract.WORKER)
        if said.get("pid") != worker.pid:
            said = {}
        ranks = [RankStatus(**rank) for rank in said.get("ranks", [])]
        return WorkerStatus(
            index=worker.index, state=said.get("state", "starting"), pid=worker.pid, ranks=ranks,
            restarts=worker.attempt - 1, probes=said.get("probes"),
        )  # fmt: skip


_ENDS = {
    "interrupt": "interrupted; state saved",
    "suspend": "suspended; `outlast resume` goes on",
    "cancel": "cancelled by the user",
    "kill": "killed by the user; the newest checkpoint stays",
}
_END_STATES = {"interrupt": State.INTERRUPTED, "suspend": State.SUSPENDED, "cancel": State.CANCELLED, "kill": State.INTERRUPTED}


def _cause_first(pending: tuple[bool, Failure]) -> tuple[bool, bool, float]:
    """Orders failures of one generation: deaths before errors, errors before their echoes, the earlier before the later."""
    echo, failure = pending
    return echo, bool(failure.traceback), failure.time


def _facts(failure: Any) -> dict[str, Any]:
    return {key: failure[key] for key in ("rank", "code", "reason", "traceback", "time")}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _locked(lock: int) -> bool:
    """Take the lock; somebody who only looks whether it is held may hold it for a moment."""
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    """Run the launcher of one job; a second one of the same job leaves at once."""
    places = Places(Path(sys.argv[1]))
    with open(places.lock, "a") as lock:
        if not _locked(lock.fileno()):
            print(f"another launcher runs {places.state}", flush=True)
            sys.exit(0)
        log = os.open(places.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = asyncio.run(Launcher(places).run())
    sys.exit(code)


if __name__ == "__main__":
    main()
