"""Detects a training process's progress by comparing samples of its main thread, which `deadlocks.Watch` takes.

A process moves if its main thread is at another place in the code or has begun another call or collective, or if the process or
its child processes use CPU time. Some waits spin, e.g. for a GPU: then CPU time counts only if the main thread is at another
place, and allocations on the GPU count, too. A polling loop, which repeats the same few places with hardly any CPU time, counts
as still. See docs/decisions/0022-what-is-a-hang.md.
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
"""Share of a core above which this process counts as working: a training loop uses more, ten polls a second use less."""
CHILDREN_BUSY = 0.2
"""Share of a core above which child processes count as working. It allows for processes that record metrics all the time."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One observation of a process."""

    place: Hashable
    """The main thread's stack, as the code and instruction of each frame."""
    counts: Hashable = 0
    cpu_s: float = 0.0
    """CPU seconds of all threads except the sampling thread."""
    spins: bool = False
    """True if this process uses CPU time while it waits."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work by child processes and GPUs. Measuring it costs more than taking a `Sample`."""

    children_s: float = 0.0
    allocated: tuple[int, ...] = ()
    """Number of allocations on each GPU. It grows with operations on tensors, but not during waits."""


class Motion:
    """Compares each sample with earlier ones."""

    def __init__(self) -> None:
        self._last = Sample(None)
        self._work: Work | None = None
        self._places: set[Hashable] = set()
        """The main thread's places since the last sign of motion of another kind."""

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
    """Return a thread's stack, in a form that can be compared with later stacks."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def cpu_s() -> float:
    """Return the CPU seconds used by this process, excluding the calling thread."""
    return time.process_time() - time.thread_time()


def accelerator() -> Any:
    """Return the torch module for the accelerators that this process uses; None if it uses none yet."""
    torch: Any = sys.modules.get("torch")
    modules = (getattr(torch, device, None) for device in accelerators.DEVICES)
    with contextlib.suppress(AttributeError):  # torch is only partly imported
        return next((module for module in modules if module and module.is_initialized()), None)
    return None


def work() -> Work:
    """Measure the work done for this process by child processes and GPUs."""
    allocated: tuple[int, ...] = ()
    if module := accelerator():
        with contextlib.suppress(Exception):  # an allocator without statistics
            stats = [module.memory_stats(index) for index in range(module.device_count())]
            allocated = tuple(each["allocation.all.allocated"] for each in stats)
    return Work(_children_s(os.getpid()), allocated)


def _children_s(pid: int) -> float:
    """Return the CPU seconds of a process's live descendants; 0 if the kernel lacks CONFIG_PROC_CHILDREN (proc(5))."""
    total = 0.0
    for file in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the process has just ended
            for child in map(int, Path(file).read_text().split()):
                total += progress_file.cpu_s(child) + _children_s(child)
    return total
