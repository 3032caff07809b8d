"""The launcher: decides for one job on this machine. It starts workers, listens to them, forms worlds, judges failures, keeps
the status.

    python -m outlast.local.launcher STATE_DIR

One launcher a job (it holds a lock). It may be killed at any moment: workers train on, start a new launcher when they miss it,
and the new one adopts them. What must survive is in `launcher.json`, written before anything that depends on it; what the user
wants is in `wanted.json`, written by the command line; what there is to see is in `status.json`. It is the
`rendezvous.coordinator` of one machine.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast import checkpoints, contract, files, locks, spec
from outlast import ledger as ledgers
from outlast.agent import upload_handle
from outlast.agent.lifecycle import Phase
from outlast.clock import Awake
from outlast.errors import OutlastError
from outlast.launch import titles
from outlast.local.state_dir import Request, Run, StateDir
from outlast.local.workers import Ended, Worker, WorkerPool
from outlast.rendezvous import failures, restarts, world
from outlast.rendezvous.coordinator import Coordinator, Settings, after
from outlast.rendezvous.transports import sockets
from outlast.report import goodput
from outlast.status import CheckpointStatus, End, Failure, JobStatus, RankStatus, SavedStatus, State, StoreStatus, WorkerStatus
from outlast.workerfiles import progress, saves

if TYPE_CHECKING:
    from outlast.runs import alive

TICK_S = 0.1
WAITED_S = 2.0
"""A wait longer than this is worth more words than what led to it."""
UNTOLD_S = 60.0
"""A script that does not report its steps and fails sooner than this has failed at its beginning."""
HAND_IN_S = 30.0
"""How long the launcher tries to push what the workers could not."""
SEE_S = 2.0
"""How often to look for the files of a plain script."""
CLOSING_S = 15.0
"""How long workers may take to leave after the end of the job."""
FOLD_S = 2.0
FOLD_SHARE = 0.02
"""The live goodput is folded from the ledger no more often than this, and in no larger a share of our time."""


class Launcher(Coordinator):
    """All that is known and done for one job. `run` returns the exit code of the launcher."""

    def __init__(self, state_dir: StateDir, clock: Awake | None = None) -> None:
        self.state_dir = state_dir
        self.job = spec.load(state_dir.job)
        super().__init__(Settings.of(self.job.spec), clock or Awake())
        record = Run.read(state_dir)
        self.run_id = record.run
        self.output = Path(record.output)
        self.record, self.store = record, record.store
        self.pool = WorkerPool(
            state_dir,
            self.job,
            run=self.run_id,
            output=self.output,
            code=Path(record.code),
            clock=self.clock,
            store=self.store,
            owner=record.owner,
        )
        self.ledger = ledgers.Ledger(self.output / contract.LEDGER, "launcher")
        self.request = Request.read(state_dir)
        self.known = after(record.generation, self.clock())
        self.closing: tuple[State, str, int] | None = None
        """The end that has been decided: state, reason, exit code."""
        self.close_by = self.closed_at = 0.0
        self.submitted = self.clock() - max(0.0, time.time() - state_dir.started_at())
        """When the run was taken up, by our clock."""
        self.started: float | None = None
        """When its first world was formed, by our clock."""
        self.joiners: dict[int, str] = {}
        """Workers outside a running world that did not manage to join it, and why."""
        self.stepped = False
        """Whether the training of the current world reports its steps; a plain script does not."""
        self.formed_at = 0.0
        self.warning = ""
        """What the training says of itself, e.g. that the disk is full."""
        self.saved_before: SavedStatus | None = None
        """What a plain script had saved when the current world was formed."""
        self._see_at = 0.0
        self.paces: collections.deque[tuple[float, int]] = collections.deque(maxlen=64)
        self.status = JobStatus(
            name=self.job.metadata.name,
            run=self.run_id,
            submitted=record.submitted,
            output=str(self.output),
            store=StoreStatus(url=self.store) if self.store else None,
            processes=self.pool.processes,
            min=self.sizes[0],
            max=self.sizes[-1],
        )
        self._folder = ThreadPoolExecutor(1, "outlast-goodput")
        self._folding: Future[float | None] | None = None
        self._fold_at = 0.0
        self.claim: int | None = None
        """Holds the lock of the output."""
        self.heart: alive.Heart | None = None
        """Says that we train the run in the store."""
        self._written = ""
        self._wake = asyncio.Event()
        self.server = sockets.Server(run=self.run_id, heard=self.heard, gone=self.gone, clock=self.clock)

    # The loop

    async def run(self) -> int:
        """Decide until the job is over."""
        self._recover()
        await self.server.start(self.state_dir.socket)
        self.ledger.write("launcher", pid=os.getpid(), adopted=len(self.pool.present))
        with contextlib.suppress(OSError):  # a full disk, or a file system without locks
            (self.output / contract.OWNER).write_text(str(self.state_dir.path))
            self.claim = locks.shared(self.output / contract.OWNER)
        if self.store:
            from outlast import store
            from outlast.local import stored
            from outlast.runs import alive

            home, owner = stored.home(self.state_dir.path), self.record.owner
            self.heart = alive.Heart(lambda: store.open_(self.store), self.run_id, owner, home, lost=lambda _: None)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._close, State.INTERRUPTED, f"the launcher received {number.name}", 75)
        while True:
            self._wake.clear()
            for worker in self.pool.silent():
                self.pool.kill(worker.index, "has an agent that does nothing")
            for id in self.server.drop_silent():
                self.pool.kill(id, f"was silent for {sockets.SILENCE_S:g} s")
            self._reap()
            self._obey()
            if self.closing is None:
                self._keep_deadlines()
                self._fill()
                self._decide()
                self.judge_when_settled()
            elif self._left():
                break
            self._show()
            await asyncio.sleep(0)  # hear what has come meanwhile, also when there is no pause
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
        await self.server.stop()
        return self._finish()

    # What we remember

    def _recover(self) -> None:
        """Take over from a launcher that died: its counts, and the workers that still live."""
        if found := self._newest():
            self.status.step, self.status.checkpoint = found.step, _shown(found)
            self.status.reason = f"goes on from step {found.step}"
        else:
            self._see_saves(now=True)
        try:
            memory = json.loads(self.state_dir.recovery.read_text())
        except FileNotFoundError:
            return
        self.history = restarts.History(tuple(restarts.Record(*record) for record in memory["history"]))
        self.restarts, self.status.interruptions = memory["restarts"], memory["interruptions"]
        with contextlib.suppress(OSError, ValueError):
            before = JobStatus.model_validate_json(self.state_dir.status.read_text())
            self.status.started, self.status.failure, self.status.step = before.started, before.failure, before.step
            if before.started is not None:
                self.started = self.clock() - max(0.0, time.time() - before.started)
        generation = max(memory["generation"], self.record.generation)
        if generation:
            self.known = after(generation, self.clock())
        self.judged = memory["judged"]
        self.pool.gpus = memory["gpus"]  # a worker that revives us shows us only its own
        self.pool.adopt(memory["workers"])
        state, reason, code = memory["closing"] or (State.RUNNING, "", 0)
        if state in (State.SUCCEEDED, State.FAILED):  # what the user wants is in `wanted.json`
            self.closing, self.close_by = (State(state), reason, code), self.clock() + self.patience.leave + CLOSING_S
            self.closed, self.status.end = sockets.Closed(reason, code), End(memory.get("end", ""))
        self._reap()
        if self.pool.present and memory["world"]:  # it may still train: listen before deciding
            self.known = world.State({}, sockets.world_from(memory["world"]), since=self.clock())
            self.say(State.RUNNING, "the launcher was started again over a running world")
        self.remember()

    def remember(self) -> None:
        memory = {
            "generation": self.generation(),
            "world": dataclasses.asdict(self.known.world) if self.known.world else None,
            "history": self.history.failures,
            "restarts": self.restarts,
            "interruptions": self.status.interruptions,
            "judged": self.judged,
            "gpus": self.pool.gpus,
            "closing": self.closing,
            "end": self.status.end,
            "workers": self.pool.records(),
        }
        with contextlib.suppress(OSError):  # a full disk: the workers know the newest generation, too
            files.replace(self.state_dir.recovery, json.dumps(memory), durable=True)

    # Workers

    def _fill(self) -> None:
        """Start the workers that are wanted and missing."""
        for index in self.pool.missing(self.request.replicas):
            try:
                worker = self.pool.start(index)
            except (OutlastError, OSError) as problem:
                if isinstance(problem, OutlastError) and not self.pool.present:
                    self._close(State.FAILED, str(problem), contract.Exit.MISCONFIGURED)
                    return
                self.joiners[index] = f"worker {index} cannot be started: {problem}"
                self.pool.pause(index)
                continue
            self.ledger.write("worker", worker=index, pid=worker.pid, attempt=worker.attempt)
            self.remember()

    def _reap(self) -> None:
        """Take note of the workers that have ended."""
        for end in self.pool.ended():
            worker = end.worker
            self.ledger.write("exited", worker=worker.index, code=end.code, reason=end.message, interrupted=end.interrupted)
            if end.displaced and self.closing is None:
                self._close(State.INTERRUPTED, end.message, contract.Exit.INTERRUPTED)
            elif self.closing is None and not worker.leaving:
                if end.interrupted:
                    self.status.interruptions += 1
                else:
                    self._died(end)
            self.remember()

    def _died(self, end: Ended) -> None:
        index = end.worker.index
        self.pool.pause(index)
        training = self.known.world if self.known.called is None else None
        if training is not None and index not in training.members:  # the world goes on without it
            self.joiners[index] = f"{end.reason}; it will be started again"
            return
        generation, step = self.generation(), self.status.step
        inside = self.known.world is not None and index in self.known.world.members and self.pool.trained(index)
        if inside and self.judged >= generation:
            return  # it goes with the failure of its world, which is counted
        died = Failure(worker=index, code=end.code, reason=end.reason, generation=generation, step=step, time=time.time())
        self.add_failure(died, echo=False)

    # Decisions

    def _decide(self) -> None:
        match self.decide(self.request.replicas, (worker.index for worker in self.pool.staying())):
            case world.Wait() as wait:
                called = self.known.called
                if (called and self.clock() - called.at > WAITED_S) or (not called and not self.known.world):
                    self.status.reason, self.status.waits = wait.reason, wait.steady

    def send(self, id: int, kind: str, content: object) -> None:
        self.server.send(id, kind, content)

    def wake(self) -> None:
        self._wake.set()

    def event(self, kind: str, **facts: Any) -> None:
        self.ledger.write(kind, **facts)

    def formed(self, new: world.World) -> None:
        now = self.clock()
        self.status.started = self.status.started or time.time()
        self.started = now if self.started is None else self.started
        self.formed_at, self.stepped = now, False
        self.warning, self.saved_before = "", self.status.saved
        for id in new.members:
            self.pool.joined(id)
            self.joiners.pop(id, None)
        surplus = len(self.pool.staying()) - self.request.replicas
        outside = sorted((w for w in self.pool.staying() if w.index not in new.members), key=lambda w: -w.index)
        for worker in outside[: max(0, surplus)]:
            self.pool.ask_to_leave(worker)

    def progress(self, failure: Failure, *, echo: bool) -> tuple[Failure, int | None, int]:
        self._read_progress()
        known = self.status.step
        step = 0 if self.status.told == "log" else known  # what a log says is shown, and decides nothing
        # An error that only echoes somebody's death says nothing of the step; a plain script that ran for a while tells none.
        if failure.hung:  # says itself after which step it did
            return failure, failure.step, self._committed()
        silent = not self.stepped and self.status.told != "script" and self.clock() - self.formed_at > UNTOLD_S
        return (
            failure.model_copy(update={"step": known if self.status.told else failure.step}),
            None if echo or silent else step,
            self._committed(),
        )

    def failed(self, failure: Failure) -> None:
        self.status.failure = failure

    def over(self, state: State, reason: str, code: int, end: End = End.UNKNOWN) -> None:
        self._close(state, reason, code, end)

    def _keep_deadlines(self) -> None:
        """End a job that does not get to train, or trains for too long. Time in which the machine slept is not the job's."""
        now, limits = self.clock(), self.job.spec
        startup, active = limits.startup_deadline_seconds, limits.active_deadline_seconds
        if startup and self.started is None and now - self.submitted > startup:
            reason = f"training has not begun within startupDeadlineSeconds ({startup})"
            self._close(State.FAILED, reason, contract.Exit.FAILED, End.STARTUP_DEADLINE)
        elif active and self.started is not None and now - self.started > active:
            reason = f"the job has run for activeDeadlineSeconds ({active})"
            self._close(State.FAILED, reason, contract.Exit.FAILED, End.DEADLINE)

    # What the user wants

    def _obey(self) -> None:
        wanted = Request.read(self.state_dir)
        if wanted == self.request and not wanted.end:
            return
        if wanted.replicas != self.request.replicas:
            self.ledger.write("scaled", replicas=wanted.replicas)
            self.joiners.clear()
        before, self.request = self.request, wanted
        if self.closing is not None:
            if wanted.end in ("kill", "cancel") and before.end != wanted.end:
                self.closing = (_END_STATES[wanted.end], _ENDS[wanted.end], contract.Exit.FAILED)
                self.closed = sockets.Closed(*self.closing[1:])
                self.close_by = 0.0
        elif wanted.end:
            code = contract.Exit.INTERRUPTED if wanted.end in ("interrupt", "suspend") else contract.Exit.FAILED
            self._close(_END_STATES[wanted.end], _ENDS[wanted.end], code)
            if wanted.end in ("kill", "cancel"):
                self.close_by = 0.0

    # The end

    def _close(self, state: State, reason: str, code: int, end: End = End.UNKNOWN) -> None:
        """Decide the end: workers that trained to it are told so, the others are told to leave."""
        if self.closing is not None:
            return
        self.status.end = end
        self.closing = (state, reason, code)
        self.remember()
        if state is State.FAILED and self.status.state is State.RESTARTING:
            self.say(State.RUNNING, "the job fails; its workers are told to end")  # why is said by its last state
        else:
            self.say(State.RUNNING if state is State.SUCCEEDED else State.RESIZING if code == 75 else self.status.state, reason)
        leave = code == contract.Exit.INTERRUPTED
        self.closed_at = self.clock()
        self.status.interruptions += leave
        self.close_by = self.closed_at + (self.patience.leave + CLOSING_S if leave else CLOSING_S)
        if leave:
            for worker in self.pool.present.values():
                self.pool.ask_to_leave(worker)
        else:  # who is to save leaves by itself
            self.closed = sockets.Closed(reason, code)
            for id in list(self.reports):
                self.send(id, "closed", self.closed)
            for worker in self.pool.present.values():
                if worker.index not in self.reports:
                    self.pool.ask_to_leave(worker)
        self.wake()

    def _left(self) -> bool:
        """Whether all workers are gone; those that take too long are killed."""
        assert self.closing is not None
        pushing = [w for w in self.pool.present.values() if self.pool.report(w).get("state") == Phase.FLUSHING]
        if self.store and pushing and self.clock() - self.closed_at > WAITED_S:
            self.status.reason, self.status.waits = f"{self.closing[1]}; pushing what is left to {self.store}", ""
        if self.clock() > self.close_by:
            for worker in list(self.pool.present.values()):
                if not self.close_by or self.pool.report(worker).get("state") != Phase.FLUSHING:  # its agent sees to the time
                    self.pool.kill(worker.index, "has not left in time")
        return not self.pool.present

    def _finish(self) -> int:
        assert self.closing is not None
        state, reason, code = self.closing
        self._judge_last()
        if self.status.told != "session" and self.status.checkpoint is None:
            self._see_saves(now=True)
            self.warning = ""
        if code == contract.Exit.INTERRUPTED:
            reason = f"{reason}; {self._what_is_saved()}"
        self.status.world, self.status.rate = [], None
        self.ledger.write("finished", state=str(state), reason=reason, step=self.status.step, code=code)
        if self.store and self.request.end != "kill":
            state, reason, code = self._hand_in(state, reason, code)
        if self.heart is not None:
            with contextlib.suppress(OutlastError):  # else it is heard of for a while longer
                self.heart.stop(left=True)
        self.status.finished = time.time()
        self.status.exit_code = code
        self.status.state, self.status.reason, self.status.waits = state, reason, ""
        self.status.launcher = None
        self._show(final=True)  # before the whole ledger is read, during which we may be killed
        self._folder.shutdown(cancel_futures=True)
        self.status.goodput = self._fold()
        self._show(final=True)
        if self.claim is not None:
            os.close(self.claim)
        return code

    def _hand_in(self, state: State, reason: str, code: int) -> tuple[State, str, int]:
        """Push what nobody has pushed: the end of the ledger, and what a killed worker left. Whoever is done but for this is
        to be started again."""
        from outlast.local import stored

        self.say(self.status.state, f"pushing what is left to {self.store}")
        self._show()
        last = upload_handle.UploadProcess(self.pool.pushing())
        failed, problem = last.flush(HAND_IN_S)
        if self.status.store is not None and last.report:
            self.status.store = StoreStatus(url=self.store, **last.report)
        if failed == upload_handle.SUPERSEDED:
            return State.INTERRUPTED, reason if problem in reason else f"{reason}; {problem}", contract.Exit.INTERRUPTED
        if not failed:
            problem = stored.end(self.record, state, reason, code)
        if not problem:
            return state, reason, code
        problem = f"the output is not all in {self.store}: {problem}; it is kept in {self.output}"
        if state is State.SUCCEEDED:
            return State.INTERRUPTED, f"{reason}; {problem}, and `outlast run` pushes it", contract.Exit.INTERRUPTED
        return state, f"{reason}; {problem}", code

    def _what_is_saved(self) -> str:
        self._read_progress()
        saved, step = self._committed(), self.status.step
        if not saved and self.stepped:
            return f"no step is saved, {step} {'is' if step == 1 else 'are'} lost" if step else "no step was done yet"
        if not saved:
            return saves.sentence(self.status.saved, time.time())
        return f"step {saved} is saved" if saved >= step else f"step {saved} is saved, {step - saved} later ones are not"

    def _judge_last(self) -> None:
        """A failure that came with the end is still shown, although nobody restarts for it."""
        if self.pending and self.status.failure is None and self.closing and self.closing[0] is State.FAILED:
            self.status.failure = failures.cause(self.pending).failure

    # What there is to see

    def say(self, state: State, reason: str) -> None:
        self.status.state, self.status.reason, self.status.waits = state, reason, ""
        with contextlib.suppress(OSError):  # a full disk costs the log, not the job
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {state}: {reason}", flush=True)

    def _newest(self) -> checkpoints.Checkpoint | None:
        return checkpoints.latest(checkpoints.list_(self.output / contract.CHECKPOINTS), self.run_id)

    def _committed(self) -> int:
        found = self._newest()
        return found.step if found else 0

    def _read_progress(self) -> None:
        now_world = self.known.world
        if now_world is None:
            return
        record = progress.read(self.state_dir.worker(now_world.members[0]), 0)
        if record is None or record.phase in ("open", "restore") or record.generation != now_world.generation:
            return
        if record.phase == "started":
            self._see_saves()
            logged = self._logged(now_world)
            if record.step:
                self._paced(record.step, record.steps, "script")
            elif logged:
                self._paced(logged[0], logged[1] or self.status.steps, "log")  # a line without the total does not take it back
            if record.step or logged:  # in this world
                told = self.status
                self.warning = self.warning or saves.begun_anew(self.saved_before, told.step, told.steps, told.told)
            return
        self._paced(record.step, record.steps, "session")
        self.stepped, self.status.saved = True, None
        self.warning = record.warning
        if self.status.checkpoint is None or record.committed != self.status.checkpoint.step:
            self.status.checkpoint = _shown(found) if (found := self._newest()) else self.status.checkpoint

    def _logged(self, now: world.World) -> tuple[int, int | None] | None:
        """The step that rank 0's worker has read in its log, printed in this world: its file may be older."""
        worker = self.pool.present.get(now.members[0])
        said = self.pool.report(worker).get("logged") if worker else None
        return (said[0], said[1]) if said and said[2:] == [now.generation] else None

    def _paced(self, step: int, steps: int | None, told: str) -> None:
        now = self.clock()
        if step != self.status.step or not self.paces:
            if step < self.status.step:
                self.paces.clear()
            self.paces.append((now, step))
        self.status.step, self.status.steps, self.status.told = step, steps, told
        (then, first), *_ = self.paces
        self.status.rate = (step - first) / (now - then) if now - then > 0.5 else self.status.rate

    def _see_saves(self, *, now: bool = False) -> None:
        """Look for what a plain script has saved, every few seconds; less often where that takes long."""
        began = time.monotonic()
        if now or began >= self._see_at:
            found = saves.newest(self.output, self.record.submitted)
            self.status.saved = SavedStatus(name=found.name, step=found.step, time=found.time) if found else None
            self._see_at = time.monotonic() + max(SEE_S, (time.monotonic() - began) / FOLD_SHARE)

    def _show(self, *, final: bool = False) -> None:
        self._read_progress()
        status = self.status
        each = f"each worker trains on the CPU, with {self.pool.processes} process{'es' if self.pool.processes > 1 else ''}"
        no_gpu = f"resources.gpu ({self.job.spec.resources.gpu}): this machine shows no GPU; {each}"
        cpu_instead = self.job.spec.resources.gpu and not self.pool.gpus
        status.warnings = [text for text in [self.warning, no_gpu if cpu_instead else "", *self.joiners.values()] if text]
        status.replicas = self.request.replicas
        status.restarts = self.restarts
        status.generation = self.generation()
        if not final:
            running = self.known.world is not None and self.known.called is None
            status.world = list(self.known.world.members) if running and self.known.world else []
            status.launcher = os.getpid()
        status.workers = [self._worker_status(worker) for _, worker in sorted(self.pool.present.items())]
        if not final:
            self._keep_goodput()
        if status.store is not None:
            status.store = self._store_status(status.store)
        text = status.model_dump_json()
        if text != self._written:
            with contextlib.suppress(OSError):  # a full disk: what there is to see is late, and written as soon as there is room
                files.replace(self.state_dir.status, text, durable=final)
                self._written = text

    def _store_status(self, before: StoreStatus) -> StoreStatus:
        """What the pusher says, whichever worker's it is."""
        said = (self.pool.report(worker).get("pushed") for worker in self.pool.present.values())
        newest = max(filter(None, said), key=lambda record: record["pushed"] or 0.0, default=None)
        if newest is None:
            return before
        pushed = newest["pushed"] or before.pushed  # a pusher that has just begun does not know what another did
        return StoreStatus(url=self.store, **{**newest, "pushed": pushed, "step": max(newest["step"], before.step)})

    def _keep_goodput(self) -> None:
        """Have the goodput folded anew now and then, in a thread: the ledger of a long run takes a minute."""
        now = self.clock()
        if self._folding is None and now >= self._fold_at:
            self._fold_at = now
            self._folding = self._folder.submit(self._fold)
        elif self._folding is not None and self._folding.done():
            self.status.goodput, self._folding = self._folding.result(), None
            self._fold_at = now + max(FOLD_S, (now - self._fold_at) / FOLD_SHARE)

    def _fold(self) -> float | None:
        """The goodput up to now, as `outlast report` has it."""
        try:
            return goodput.buckets(ledgers.read(self.output / contract.LEDGER), time.time()).goodput
        except OSError:  # somebody removed it; what was known stays
            return self.status.goodput

    def _worker_status(self, worker: Worker) -> WorkerStatus:
        said = self.pool.report(worker)
        ranks = [RankStatus(**rank) for rank in said.get("ranks", [])]
        for rank in ranks:
            record = progress.read(self.state_dir.worker(worker.index), rank.local_rank)
            rank.step = record.step or None if record and record.pid == rank.pid else None
            if rank.rank == 0 and rank.step is None and self.status.told == "log" and self.known.world:
                rank.step = self.status.step
        return WorkerStatus(
            index=worker.index, state=said.get("state", "starting"), pid=worker.pid, ranks=ranks,
            restarts=worker.attempt - 1, probes=said.get("probes"),
            reason=f"stands still: {said['still']}" if said.get("still") else "",
        )  # fmt: skip


def _shown(found: checkpoints.Checkpoint) -> CheckpointStatus:
    return CheckpointStatus(step=found.step, path=str(found.path), time=found.time, bytes=found.bytes)


_ENDS = {
    "interrupt": "stopped by the user",
    "suspend": "stopped by the user; `outlast resume` continues it",
    "cancel": "cancelled by the user",
    "kill": "killed by the user",
}
_END_STATES = {"interrupt": State.INTERRUPTED, "suspend": State.SUSPENDED, "cancel": State.CANCELLED, "kill": State.INTERRUPTED}


def _locked(lock: int) -> bool:
    """Take the lock; somebody who only looks whether it is held may hold it for a moment."""
    for _ in range(20):
        if locks.acquire(lock):
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    """Run the launcher of one job; a second one of the same job leaves at once."""
    state_dir = StateDir(Path(sys.argv[1]))
    titles.entitle(f"launcher {state_dir.path}")
    with open(state_dir.lock, "a") as lock:
        if not _locked(lock.fileno()):
            print(f"another launcher runs {state_dir.path}", flush=True)
            sys.exit(0)
        log = os.open(state_dir.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = asyncio.run(Launcher(state_dir).run())
    sys.exit(code)


if __name__ == "__main__":
    main()
