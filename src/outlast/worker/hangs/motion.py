"""Detects whether a training process makes progress, by comparing samples of its main thread.

A process moves if its main thread is at another place in the code or has begun another call or collective, or if the process or
its child processes use CPU time. Some waits spin: a process that waits for a GPU, and some backends inside a collective, use a
whole core and do nothing. In such a wait CPU time counts only if the main thread is at another place than before; allocations on
the GPU count as well. A polling loop shows the same few places again and again, with hardly any CPU time, and counts as not
moving.

`deadlocks.Watch` takes the samples, `hangs.rule` decides. Docs: docs/decisions/0022-what-is-a-hang.md.
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
from outlast.job.workerfiles import progress

BUSY = 0.01
"""Share of a core above which this process counts as working. A training loop uses more; a loop that polls ten times a second
uses less."""
CHILDREN_BUSY = 0.2
"""The same share for its child processes. It is higher, since services that only record metrics run all the time."""


@dataclasses.dataclass(frozen=True)
class Sample:
    place: Hashable
    """The stack of the main thread: code and instruction of each frame."""
    counts: Hashable = 0
    """Number of calls and collectives begun, which changes only if the process moves."""
    cpu_s: float = 0.0
    """CPU seconds that all threads except the sampling one have used so far."""
    spins: bool = False
    """True if this process uses CPU time while it waits."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work that child processes and GPUs do for this process. It is more expensive to measure than a `Sample`."""

    children_s: float = 0.0
    """CPU seconds that child processes have used."""
    allocated: tuple[int, ...] = ()
    """Number of allocations on each GPU so far: operations on tensors allocate, whereas waiting does not."""


class Motion:
    """Compares each sample with earlier ones."""

    def __init__(self) -> None:
        self._last = Sample(None)
        self._work: Work | None = None
        """The work at the last sample; None unless that sample needed it."""
        self._places: set[Hashable] = set()
        """Places of the main thread since it last showed any other sign of motion."""

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
    """CPU seconds that this process has used, without the calling thread."""
    return time.process_time() - time.thread_time()


def accelerator() -> Any:
    """Return the torch module of the accelerators that this process uses; None if it uses none yet."""
    torch: Any = sys.modules.get("torch")
    modules = (getattr(torch, device, None) for device in accelerators.DEVICES)
    with contextlib.suppress(AttributeError):  # half imported
        return next((module for module in modules if module and module.is_initialized()), None)
    return None


def work() -> Work:
    """Measure the work that child processes and GPUs do for this process."""
    allocated: tuple[int, ...] = ()
    if module := accelerator():
        with contextlib.suppress(Exception):  # allocators that do not count
            stats = [module.memory_stats(index) for index in range(module.device_count())]
            allocated = tuple(each["allocation.all.allocated"] for each in stats)
    return Work(_children_s(os.getpid()), allocated)


def _children_s(pid: int) -> float:
    """CPU seconds of the living descendants of a process; 0 without CONFIG_PROC_CHILDREN in the kernel (proc(5))."""
    total = 0.0
    for file in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # it ends while we read
            for child in map(int, Path(file).read_text().split()):
                total += progress.cpu_s(child) + _children_s(child)
    return total
