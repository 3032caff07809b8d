"""Detects progress of a training process by comparing samples of its main thread.

A process moves if its main thread is at another place in the code or has begun another call or collective, or if the process or
its child processes use CPU time. Some waits spin: a wait for a GPU, and some backends inside a collective, use a whole core
without work. In such waits CPU time counts only if the main thread is at a new place; allocations on the GPU count as well. A
polling loop repeats the same few places with hardly any CPU time, and counts as still.

`deadlocks.Watch` takes the samples, `hangs.hang_limit` decides. Docs: docs/decisions/0022-what-is-a-hang.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from types import FrameType
from typing import Any

from outlast.job import accelerators
from outlast.job.workerfiles import progress_file

BUSY = 0.01
"""Share of a core above which this process counts as working: less than a training loop, more than ten polls a second."""
CHILDREN_BUSY = 0.2
"""The same for child processes; higher, since processes that record metrics always run."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One observation of a process."""

    place: Hashable
    """The stack of the main thread: code and instruction of each frame."""
    counts: Hashable = 0
    """Number of calls and collectives begun, which changes only if the process moves."""
    cpu_s: float = 0.0
    """CPU seconds used by all threads except the sampling thread."""
    spins: bool = False
    """True if this process uses CPU time while it waits."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of child processes and GPUs for this process, which is more expensive to measure than a `Sample`."""

    children_s: float = 0.0
    """CPU seconds used by child processes."""
    allocated: tuple[int, ...] = ()
    """Number of allocations on each GPU, which grows with operations on tensors, but not in waits."""


class Motion:
    """Compares each sample with earlier ones."""

    def __init__(self) -> None:
        self._last = Sample(None)
        self._work: Work | None = None
        """The work at the last sample; None if it was not measured."""
        self._places: set[Hashable] = set()
        """Places of the main thread since the last other sign of motion."""

    def moves(self, sample: Sample, seconds: float, work: Callable[[], Work] = Work) -> bool:
        """Return whether the process has moved since the last sample, `seconds` ago."""
        last, self._last = self._last, sample
        busy = sample.cpu_s - last.cpu_s > BUSY * seconds and not (sample.spins and sample.place == last.place)
        if busy or sample.counts != last.counts:
            self._work = None
        else:
            then, self._work = self._work, work()
            busy = then is not None and (
                self._work.children_s - then.children_s > CHILDREN_BUSY * seconds or self._work.allocated != then.allocated
            )
            if not busy:
                new = sample.place not in self._places
                self._places.add(sample.place)
                return new
        self._places = {sample.place}
        return True


def place(frame: FrameType | None) -> Hashable:
    """Return the stack of a thread, in a form that can be compared with later stacks."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def cpu_s() -> float:
    """Return the CPU seconds used by this process, without the calling thread."""
    return time.process_time() - time.thread_time()


def accelerator() -> Any:
    """Return the torch module of the accelerators that this process uses; None if it uses none yet."""
    torch: Any = sys.modules.get("torch")
    modules = (getattr(torch, device, None) for device in accelerators.DEVICES)
    with contextlib.suppress(AttributeError):  # half imported
        return next((module for module in modules if module and module.is_initialized()), None)
    return None


def work() -> Work:
    """Measure the work of child processes and GPUs for this process."""
    allocated: tuple[int, ...] = ()
    if module := accelerator():
        with contextlib.suppress(Exception):  # an allocator without statistics
            stats = [module.memory_stats(index) for index in range(module.device_count())]
            allocated = tuple(each["allocation.all.allocated"] for each in stats)
    return Work(_children_s(os.getpid()), allocated)


def _children_s(pid: int) -> float:
    """Return the CPU seconds of the live descendants of a process; 0 without CONFIG_PROC_CHILDREN in the kernel (proc(5))."""
    total = 0.0
    for file in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the process has just ended
            for child in map(int, Path(file).read_text().split()):
                total += progress_file.cpu_s(child) + _children_s(child)
    return total
