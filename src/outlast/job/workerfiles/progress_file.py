"""One training process's progress: a small file that the process rewrites at each step and its agent reads to detect hangs, show
the step and refund restarts. Each record is one positioned write of a fixed size, so a process killed at any point leaves either
the old record or the new one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

from outlast.job import contract

_SIZE = 1024
_PULSE_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Progress:
    """One record of a process's progress."""

    generation: int
    rank: int
    phase: str
    """started | open | restore | first step | train | save | waiting (for the next world) | done"""
    step: int = 0
    steps: int | None = None
    committed: int = 0
    """Step of the newest committed checkpoint that this process knows of."""
    bytes: int = 0
    """Size in bytes of the checkpoint at step `committed`; 0 if unknown."""
    snapshot: int = 0
    every: int = 0
    """Number of steps between snapshots. `snapshot` is the step of the newest complete snapshot in memory; 0 if there is none."""
    batch: int = 0
    """Number of samples per step, shared equally by all ranks; 0 if unknown, or if any number of ranks is possible."""
    stepped: int = 0
    """Number of steps after this process's first step. They took `stepped_s` seconds, without stalls for saves."""
    stepped_s: float = 0.0
    waited_s: float = 0.0
    stalls: int = 0
    """Number of saves that this process has begun. Training stalled for them for `stalled_s` seconds in total."""
    stalled_s: float = 0.0
    saves: int = 0
    """On rank 0, the number of committed saves. They took `saved_s` seconds in total, each from its start to its commit."""
    saved_s: float = 0.0
    own_s: float = 0.0
    """Median of the rank's own time per step in the last window, in seconds (`job.slow_ranks`); 0 if unknown."""
    slow: float = 0.0
    """Fraction by which a slow rank's own time exceeds the other ranks' time; 0 if the rank is not slow."""
    differs: int = 0
    """Step of the first snapshot in which the rank's state differed (`job.differing_ranks`); 0 if there is none."""
    keeps: bool = False
    """True if the process can continue in the next world (`training.kept_process`)."""
    warning: str = ""
    pid: int = 0
    started: int = 0
    """Start time of the process in clock ticks since boot (proc(5)), needed because pids are reused; 0 if unknown."""
    attempt: int = 0
    time: float = 0.0
    """When the record was written, in seconds since the epoch. Only for people: the agent measures silence with its own clock."""


class Writer:
    """Writes the progress of one training process."""

    def __init__(self, directory: Path, local_rank: int) -> None:
        self._fd = _opened(directory / contract.PROGRESS.format(local_rank=local_rank))
        attempt = int(os.environ.get(contract.Env.ATTEMPT, "0"))
        self._process = {"pid": os.getpid(), "started": kernel(os.getpid())[1], "attempt": attempt}
        self._step, self._stepped, self._stepped_s = 0, 0, 0.0
        self._end: float | None = None
        """End of the last step, minus the stalls so far. None until the first step, which includes preparation, has ended."""

    def write(self, record: Progress) -> None:
        """Replace the record, adding the process, the time, and the measured duration of the process's steps."""
        if record.step != self._step:
            self._measure(record)
        measured = {"stepped": self._stepped, "stepped_s": round(self._stepped_s, 6)}
        fields = {**vars(record), **self._process, **measured, "time": time.time()}
        while len(line := json.dumps(fields).encode()) > _SIZE:
            fields["warning"] = fields["warning"][:-8]
        with contextlib.suppress(OSError):
            try:
                os.pwrite(self._fd, line.ljust(_SIZE), 0)
            except OSError:  # the disk is full, and readers would trust an earlier process's record
                os.ftruncate(self._fd, 0)

    def _measure(self, record: Progress) -> None:
        end, steps = time.monotonic() - record.stalled_s, record.step - self._step
        if self._end is not None and steps > 0:
            self._stepped, self._stepped_s = self._stepped + steps, self._stepped_s + end - self._end
        self._step, self._end = record.step, None if record.phase == "first step" else end

    def close(self) -> None:
        """Close the file, which keeps the last record."""
        os.close(self._fd)


def _opened(path: Path) -> int:
    """Open a file for writing, or /dev/null if the file cannot be created."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    return os.open(os.devnull, os.O_RDWR)


def read(directory: Path, local_rank: int) -> Progress | None:
    """Return the newest record; None before the first record, or if the record cannot be read."""
    try:
        record = json.loads((directory / contract.PROGRESS.format(local_rank=local_rank)).read_bytes())
        return Progress(**{field.name: record[field.name] for field in dataclasses.fields(Progress) if field.name in record})
    except (OSError, ValueError, TypeError):
        return None


def kernel(pid: int) -> tuple[str, int]:
    """Return a process's state letter and its start time in clock ticks since boot (proc(5)); `("", 0)` if it does not exist."""
    fields = _stat(pid)
    return (fields[0].decode(), int(fields[19])) if fields else ("", 0)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds used by a process; 0 if the process does not exist."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, which may contain any bytes; empty if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


# Heartbeats


@dataclasses.dataclass(frozen=True)
class Pulse:
    """A training process's heartbeat. About once a second, a separate thread reports on the main thread."""

    pid: int
    started: int
    fd: int
    """The process's file descriptor for the heartbeat file. A program started by execv does not inherit it."""
    looks: int
    """Number of heartbeats. While this number does not grow, the process cannot run Python code."""
    moves: int
    """Number of heartbeats at which the main thread had moved, or waited for a rank that had moved."""
    where: str = ""
    """Where the main thread is in the code or, if no rank moves, where all ranks are: `rank 0 is in run.save(20) (train.py:20),
    rank 1 is in ...`. Empty while the main thread moves."""
    alone: int = 0
    """Number of processes in the world while this process has not joined the process group; 0 after that."""


class Beat:
    """Writes the heartbeat of this process."""

    def __init__(self, directory: Path, local_rank: int) -> None:
        self._fd = _opened(directory / contract.PULSE.format(local_rank=local_rank))
        self._pulse = Pulse(*(os.getpid(), kernel(os.getpid())[1]), self._fd, 0, 0)

    def write(self, moves: bool, where: str, alone: int = 0) -> None:
        """Write one more heartbeat."""
        one = self._pulse
        self._pulse = dataclasses.replace(one, looks=one.looks + 1, moves=one.moves + moves, where=where, alone=alone)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, json.dumps(dataclasses.asdict(self._pulse)).encode().ljust(_PULSE_SIZE), 0)


def pulse(directory: Path, local_rank: int) -> Pulse | None:
    """Return a rank's newest heartbeat; None if there is none, or if the process that wrote it no longer has the file open."""
    try:
        path = directory / contract.PULSE.format(local_rank=local_rank)
        fields = json.loads(path.read_bytes())
        newest = Pulse(**{field.name: fields[field.name] for field in dataclasses.fields(Pulse) if field.name in fields})
        return newest if os.path.samefile(f"/proc/{newest.pid}/fd/{newest.fd}", path) else None
    except (OSError, ValueError, TypeError):
        return None
