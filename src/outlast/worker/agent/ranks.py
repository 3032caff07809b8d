"""The training processes of one worker as its agent observes them: which are alive, and for how long each has been silent.

A process is identified by its pid *and* its start time, both of which it records itself: a hung process is killed, and its pid
may have been reused. A process is silent from the time at which the agent last saw its progress or heartbeat change
(`workerfiles.progress`). The clock stops when the agent does (`clock.Awake`): neither a step of the wall clock nor a machine that
slept makes a process silent.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from outlast.base.clock import Seen
from outlast.job import contract
from outlast.job.workerfiles import progress
from outlast.worker.hangs.rule import Process

FROZEN_S = 10.0
"""Time without a heartbeat after which a process counts as unable to run Python, because native code holds the GIL. A process
that uses CPU time meanwhile does not count as silent."""


class Ranks:
    """Finds the live processes among the `count` training processes of a worker, by the records that they write into `state`, and
    kills those that hang. The agent calls `look` ten times a second."""

    def __init__(self, state: Path, count: int, clock: Callable[[], float]) -> None:
        self._state, self._count = state, count
        self._seen = Seen(clock)
        self._condemned: set[tuple[int, int]] = set()
        """Pid and start time of each process that was killed and may take a while to die."""

    def forget(self) -> None:
        """Remove the records of an earlier agent's processes: a new container may reuse their pids."""
        for local_rank in range(self._count):
            for name in (contract.PROGRESS, contract.PULSE):
                (self._state / name.format(local_rank=local_rank)).unlink(missing_ok=True)

    def look(self, written: int = 0) -> list[Process]:
        """Return the live processes by local rank. `written` is the number of bytes that all of them together have written to the
        log."""
        processes = []
        for local_rank in range(self._count):
            record = progress.read(self._state, local_rank)
            if record is None or (record.pid, record.started) in self._condemned:
                continue
            state = _state(record)
            if state in ("", "Z", "X"):
                continue
            processes.append(self._observe(local_rank, record, state in ("T", "t"), written))
        return processes

    def newest(self) -> progress.Progress | None:
        """Return the newest record, even if the process that wrote it has ended."""
        records = filter(None, (progress.read(self._state, local_rank) for local_rank in range(self._count)))
        return max(records, key=lambda record: (record.generation, record.attempt, record.step), default=None)

    def _observe(self, local_rank: int, record: progress.Progress, stopped: bool, written: int) -> Process:
        process = record.pid, record.started
        pulse = progress.pulse(self._state, local_rank)
        if pulse is not None and (pulse.pid, pulse.started) != process:
            pulse = None
        age_s = self._seen.age((local_rank, "process"), process)
        frozen = pulse is not None and self._seen.age((local_rank, "looks"), pulse.looks) > FROZEN_S
        signs = (
            record,
            pulse.moves if pulse else None,
            written if record.phase == "started" else None,
            int(progress.cpu_s(record.pid)) if frozen else None,
        )
        silent_s = self._seen.age(local_rank, signs)
        where, alone = (pulse.where, pulse.alone) if pulse else ("", 0)
        watched = pulse is not None
        return Process(local_rank, record, stopped, silent_s, frozen, age_s, watched=watched, where=where, alone=alone)

    def kill(self, process: Process) -> None:
        """Kill a process that hangs, unless its pid now belongs to another process."""
        record = process.progress
        self._condemned.add((record.pid, record.started))
        if _state(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


def _state(record: progress.Progress) -> str:
    """Return the state letter (proc(5)) of the process that wrote a record; "" if the process has ended."""
    state, started = progress.kernel(record.pid)
    return state if record.started in (0, started) else ""
