"""Maintains the `JobStatus` that the launcher writes to `status.json`: step, rate, checkpoints, uploads, goodput and workers."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from outlast.job import contract, differing_ranks, ledger, slow_ranks
from outlast.job.report import goodput, incidents
from outlast.job.report.goodput import Goodput
from outlast.job.status import (
    BestStatus,
    CheckpointStatus,
    JobStatus,
    LostStatus,
    RankStatus,
    SnapshotStatus,
    StoreStatus,
    WorkerStatus,
)
from outlast.job.workerfiles import guessed_progress, progress_file
from outlast.local.state_dir import Run, StateDir
from outlast.local.worker_processes import Worker, WorkerPool
from outlast.rendezvous.who_trains import World
from outlast.storage import checkpoints

SCAN_INTERVAL_S = 2.0
"""Minimum interval in seconds between scans for a plain script's files, and between goodput computations."""
MAX_SHARE = 0.02
"""Maximum share of the launcher's time for scans, and for goodput computations."""


class LiveStatus:
    """Updates a run's status from its workers' files."""

    def __init__(self, state_dir: StateDir, run: Run, pool: WorkerPool, status: JobStatus, clock: Callable[[], float]) -> None:
        self.status = status
        self._state_dir, self._run, self._pool, self._clock = state_dir, run, pool, clock
        self._output = Path(run.output)
        self.has_session = False
        self.warning = ""
        self.begun_anew = self.alone = ""
        """Warnings that a plain script begins anew after a restart, and that it trains without a process group."""
        self._pid = 0
        self._previous: guessed_progress.Logged | None = None
        """The previous process's last step; None once it has been compared with the first step of process `_pid`."""
        self._first_of_run: guessed_progress.Logged | None = None
        self._next_scan = 0.0
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=64)
        """Recent times and steps, from which the rate is computed."""
        self._thread = ThreadPoolExecutor(1, "outlast-goodput")
        self._computing: Future[Goodput | None] | None = None
        self._next_goodput = 0.0

    def start(self) -> None:
        """Show the newest checkpoint from earlier worlds or, if there is none, the newest file that a plain script saved."""
        if newest := self._newest():
            self.status.step, self.status.checkpoint = newest.step, newest
            self.status.reason = f"goes on from step {newest.step}"
        else:
            self._find_saves(now=True)

    def world_formed(self) -> None:
        self.has_session, self.warning = False, ""

    def committed(self) -> int:
        """Return the step of the newest committed checkpoint; 0 if there is none."""
        newest = self._newest()
        return newest.step if newest else 0

    def saved_sentence(self) -> str:
        saved, step = self.committed(), self.status.step
        if not saved and self.has_session:
            return f"no step is saved, {step} {'is' if step == 1 else 'are'} lost" if step else "no step was done yet"
        if not saved:
            return guessed_progress.sentence(self.status.saved, time.time())
        return f"step {saved} is saved" if saved >= step else f"step {saved} is saved, {step - saved} later ones are not"

    def read(self, world: World | None) -> None:
        """Read the progress that rank 0 of the current world reports."""
        if world is None:
            return
        record = progress_file.read(self._state_dir.worker(world.members[0]), 0)
        if record is None or record.phase in ("open", "restore") or record.generation != world.generation:
            return
        if record.phase == "started":
            self._read_plain(record, world)
            return
        self._set_step(record.step, record.steps, "session")
        self.has_session, self.status.saved = True, None
        self.warning = record.warning
        self.status.snapshot = SnapshotStatus(step=record.snapshot, every=record.every) if record.snapshot else None
        if self.status.checkpoint is None or record.committed != self.status.checkpoint.step:
            self.status.checkpoint = self._newest() or self.status.checkpoint

    def _read_plain(self, record: progress_file.Progress, world: World) -> None:
        now = self.status
        if record.pid != self._pid:
            restarted = now.step and (self._pid or record.started > progress_file.kernel(os.getpid())[1])  # else it was adopted
            self._previous = guessed_progress.Logged(now.step, None, now.epoch) if restarted else None
            self._pid = record.pid
        self._find_saves()
        worker = self._pool.present.get(world.members[0])
        report = self._pool.report(worker) if worker else {}
        self.alone = report.get("warning", self.alone)
        logged, more = report.get("logged"), report.get("logged_more") or {"pid": record.pid}
        of_epoch = more.get("epoch", guessed_progress.UNNAMED if now.epoch == guessed_progress.UNNAMED else None)
        if record.step:
            logged, more, of_epoch = (record.step, record.steps), {"first": (record.step,)}, None
        elif not logged or logged[2] != world.generation or more["pid"] != record.pid:
            return  # printed by an earlier process
        self._set_step(logged[0], None if of_epoch is not None else logged[1], "script" if record.step else "log")
        now.epoch, now.epoch_steps = of_epoch, None if of_epoch is None else logged[1]
        first = guessed_progress.Logged(*more["first"]) if more.get("first") else None
        if first and self._previous:
            self.begun_anew = guessed_progress.begun_anew(now.saved, self._previous, first, self._first_of_run) or self.begun_anew
            self._previous = None
        elif self._first_of_run is None and world.generation == 1 and not record.attempt:
            self._first_of_run = first

    def update_workers(self, world: World | None) -> None:
        self.status.workers = [self._worker(worker, world) for _, worker in sorted(self._pool.present.items())]
        self.status.warnings += [sentence for worker in self.status.workers for sentence in worker.suspicions]
        if self.status.store is not None:
            self.status.store = self._store(self.status.store)

    def update_goodput(self) -> None:
        """Compute the goodput periodically, in a thread, since a long run's ledger takes a minute to read."""
        now = self._clock()
        if self._computing is None and now >= self._next_goodput:
            self._next_goodput = now
            self._computing = self._thread.submit(self._account)
        elif self._computing is not None and self._computing.done():
            self._show_account(self._computing.result())
            self._computing = None
            self._next_goodput = now + max(SCAN_INTERVAL_S, (now - self._next_goodput) / MAX_SHARE)

    def _account(self) -> Goodput | None:
        try:
            return goodput.buckets(ledger.read(self._output / contract.LEDGER), time.time())
        except OSError:  # the ledger was removed
            return None

    def _show_account(self, account: Goodput | None) -> None:
        if account is not None:
            self.status.goodput = account.goodput
            total = incidents.total(account.incidents)
            self.status.lost = LostStatus(**dataclasses.asdict(total)) if total.failures else None

    def finish(self) -> None:
        """Find the last files that a plain script saved, and clear the warning."""
        self._find_saves(now=True)
        self.warning = ""

    def final_goodput(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._show_account(self._account())

    def _newest(self) -> CheckpointStatus | None:
        good = [c for c in checkpoints.list_(self._output / contract.CHECKPOINTS) if c.run == self._run.run and not c.problem]
        if not good:
            return None
        ranked = (BestStatus(step=c.step, value=c.metric.value, by=c.metric.by) for c in checkpoints.ranked(good) if c.metric)
        newest, best = good[-1], next(ranked, None)
        return CheckpointStatus(step=newest.step, path=str(newest.path), time=newest.time, bytes=newest.bytes, best=best)

    def _set_step(self, step: int, steps: int | None, source: str) -> None:
        now = self._clock()
        if step != self.status.step or not self._recent:
            if step < self.status.step:
                self._recent.clear()
            self._recent.append((now, step))
        self.status.step, self.status.steps, self.status.told = step, steps, source
        (then, first), *_ = self._recent
        self.status.rate = (step - first) / (now - then) if now - then > 0.5 else self.status.rate

    def _find_saves(self, *, now: bool = False) -> None:
        began = time.monotonic()
        if now or began >= self._next_scan:
            self.status.saved = guessed_progress.newest(self._output, self._run.submitted)
            self._next_scan = time.monotonic() + max(SCAN_INTERVAL_S, (time.monotonic() - began) / MAX_SHARE)

    def _store(self, last: StoreStatus) -> StoreStatus:
        """Return the store's status, from the newest report of any worker's uploader."""
        reports = (self._pool.report(worker).get("pushed") for worker in self._pool.present.values())
        newest = max(filter(None, reports), key=lambda record: record["pushed"] or 0.0, default=None)
        if newest is None:
            return last
        pushed = newest["pushed"] or last.pushed  # a new uploader has no record of earlier uploads
        return StoreStatus(url=last.url, **{**newest, "pushed": pushed, "step": max(newest["step"], last.step)})

    def _worker(self, worker: Worker, world: World | None) -> WorkerStatus:
        report = self._pool.report(worker)
        ranks = [RankStatus(**rank) for rank in report.get("ranks", [])]
        slow, differs, where = (0.0, 0), (0, 0), slow_ranks.place(worker.index, "")
        for rank in ranks:
            record = progress_file.read(self._state_dir.worker(worker.index), rank.local_rank)
            rank.step = record.step or None if record and record.pid == rank.pid else None
            if record and record.pid == rank.pid:
                slow, differs = max(slow, (record.slow, rank.rank)), max(differs, (record.differs, rank.rank))
            if rank.rank == 0 and rank.step is None and self.status.told == "log" and world:
                rank.step = self.status.step
        return WorkerStatus(
            index=worker.index,
            state=report.get("state", "starting"),
            pid=worker.pid,
            ranks=ranks,
            restarts=worker.attempt - 1,
            probes=report.get("probes"),
            reason=f"stands still: {report['still']}" if report.get("still") else "",
            slow=slow_ranks.sentence(slow[1], slow[0], where) if slow[0] else "",
            differs=differing_ranks.notice(differs[1], differs[0], where) if differs[0] else "",
            replaced=report.get("replaced", 0),
        )
