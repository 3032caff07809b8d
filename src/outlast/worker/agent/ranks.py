"""Observes a worker's training processes for its agent: which of them are alive, and how long each has been silent.

A process is identified by pid and start time, since pids are reused. It is silent from the last observed change in its progress
or heartbeat (`workerfiles.progress_file`). The clock (`clock.Awake`) stops while the agent is stopped, so neither a jump of the
wall clock nor a suspended machine makes a process silent.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from outlast.base.clock import Seen
from outlast.job import contract
from outlast.job.workerfiles import progress_file
from outlast.worker.hangs.hang_limit import Process

FROZEN_S = 10.0
"""Seconds without a heartbeat after which native code probably holds the GIL. Using CPU time then counts as activity."""


class Ranks:
    """Observes `count` training processes through their records in the directory `state`. The agent calls `look` every 0.1 s."""

    def __init__(self, state: Path, count: int, clock: Callable[[], float]) -> None:
        self._state, self._count = state, count
        self._seen = Seen(clock)
        self._condemned: set[tuple[int, int]] = set()
        """Pid and start time of each killed process, which may take a while to die."""

    def forget(self) -> None:
        """Remove the records of an earlier agent's processes, whose pids a new container may reuse."""
        for local_rank in range(self._count):
            for name in (contract.PROGRESS, contract.PULSE, contract.NEXT):
                (self._state / name.format(local_rank=local_rank)).unlink(missing_ok=True)

    def look(self, written: int = 0) -> list[Process]:
        """Return the live processes, sorted by local rank. `written` is the number of bytes that they have written to the log."""
        processes = []
        for local_rank in range(self._count):
            record = progress_file.read(self._state, local_rank)
            if record is None or (record.pid, record.started) in self._condemned:
                continue
            state = _state(record)
            if state in ("", "Z", "X"):
                continue
            processes.append(self._observe(local_rank, record, state in ("T", "t"), written))
        return processes

    def _observe(self, local_rank: int, record: progress_file.Progress, stopped: bool, written: int) -> Process:
        process = record.pid, record.started
        pulse = progress_file.pulse(self._state, local_rank)
        if pulse is not None and (pulse.pid, pulse.started) != process:
            pulse = None
        age_s = self._seen.age((local_rank, "process"), process)
        frozen = pulse is not None and self._seen.age((local_rank, "looks"), pulse.looks) > FROZEN_S
        signs = (record, pulse.moves if pulse else None, written if record.phase == "started" else None)
        silent_s = self._seen.age(local_rank, signs)
        idle_s = self._seen.age((local_rank, "CPU"), (process, int(progress_file.cpu_s(record.pid))))
        if frozen:
            silent_s = min(silent_s, idle_s)
        where, alone = (pulse.where, pulse.alone) if pulse else ("", 0)
        watched = pulse is not None
        return Process(local_rank, record, stopped, silent_s, frozen, age_s, watched=watched, where=where, alone=alone)

    def kill(self, process: Process) -> None:
        """Kill a hung process, unless its pid now belongs to another process."""
        record = process.progress
        self._condemned.add((record.pid, record.started))
        if _state(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


def _state(record: progress_file.Progress) -> str:
    """Return the state letter (proc(5)) of a record's process; empty if the process has ended."""
    state, started = progress_file.kernel(record.pid)
    return state if record.started in (0, started) else ""
