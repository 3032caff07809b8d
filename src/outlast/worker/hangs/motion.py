"""Whether a training process makes progress, from what its main thread shows in one sample and the next.

It moves if it is at another place of the code, has begun another call or collective, or uses CPU time, its own or that of the
processes it has started. Some waits spin: a process that waits for a GPU, and some backends inside a collective, use a whole core
and do nothing. There CPU time counts only if the main thread is at another place than before; allocations on the GPU count as
well. A polling loop shows the same few places again and again, with hardly any CPU time: it does not move.

`stall.Watch` samples, `hangs.rule` judges. Docs: docs/decisions/0022-what-is-a-hang.md.
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
"""Share of a core above which this process counts as working. A training loop uses more, a loop that polls ten times a second
less."""
CHILDREN_BUSY = 0.2
"""The same for its child processes. Higher, since services that only record metrics run all the time."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """One sample."""

    place: Hashable
    """Where the main thread is: the code and instruction of each frame of its stack."""
    counts: Hashable = 0
    """Calls and collectives begun: only a process that moves changes them."""
    cpu_s: float = 0.0
    """CPU seconds of all threads so far, except the one that samples."""
    spins: bool = False
    """Whether waiting uses CPU time here."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Work outside of this process on its behalf. Takes longer to find out."""

    children_s: float = 0.0
    """CPU seconds of the processes that it has started."""
    allocated: tuple[int, ...] = ()
    """How often memory has been allocated on each GPU so far; operations on tensors do so, a wait does not."""


class Motion:
    """Compares each sample with those before."""

    def __init__(self) -> None:
        self._last = Sight(None)
        self._work: Work | None = None
        """None unless the last sample needed it."""
        self._places: set[Hashable] = set()
        """Places of the main thread since it last showed any other sign of motion."""

    def moves(self, seen: Sight, seconds: float, work: Callable[[], Work] = Work) -> bool:
        """Whether it has moved since the last sample, `seconds` ago."""
        before, self._last = self._last, seen
        busy = seen.cpu_s - before.cpu_s > BUSY * seconds and not (seen.spins and seen.place == before.place)
        if busy or seen.counts != before.counts:
            self._work = None
        else:
            then, self._work = self._work, work()
            busy = then is not None and (
                self._work.children_s - then.children_s > CHILDREN_BUSY * seconds or self._work.allocated != then.allocated
            )
            if not busy:
                new = seen.place not in self._places
                self._places.add(seen.place)
                return new
        self._places = {seen.place}
        return True


def place(frame: FrameType | None) -> Hashable:
    """Where a thread is."""
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def cpu_s() -> float:
    """CPU seconds of this process without the calling thread."""
    return time.process_time() - time.thread_time()


def accelerator() -> Any:
    """The torch module of the accelerators that this process has begun to use; None if it uses none."""
    torch: Any = sys.modules.get("torch")
    modules = (getattr(torch, device, None) for device in accelerators.DEVICES)
    with contextlib.suppress(AttributeError):  # half imported
        return next((module for module in modules if module and module.is_initialized()), None)
    return None


def work() -> Work:
    """Work of others for this process."""
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
        with contextlib.suppress(OSError):  # it ends as we read
            for child in map(int, Path(file).read_text().split()):
                total += progress.cpu_s(child) + _children_s(child)
    return total
