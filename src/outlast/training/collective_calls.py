"""A session's collective calls, which raise an error on all ranks if the ranks make different calls.

Each call begins with a small all-reduce, which carries a hash of the call's name, its step and the stream's position, and the
numbers that the call sums (votes, losses). `hangs.deadlocks` detects ranks that are in no call.

With as many ranks as cores, a call delays a step by milliseconds, since the threads that run it need the same cores. So the ranks
vote (`Session.boundary`) only every few steps, and votes take at most a hundredth of the time (`Pace`).
"""

from __future__ import annotations

import collections
import contextlib
import os
import statistics
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from outlast.base.errors import OutlastError
from outlast.training.state import snapshot_taking
from outlast.worker.hangs import deadlocks

_ROOM = 14
"""Maximum number of values in the first message; arbitrary, since a few hundred bytes cost no more than a few bytes."""
_BITS = 20
"""Number of bits of a hash. The squares of 8,192 such hashes still add up exactly in a double."""
_SAME = "every rank must make the same calls in the same order"
REMEDY = f"{_SAME}: move what only some ranks call out of its `if`"


def place() -> str:
    """Return the line of the script that called into Outlast, such as `train.py:20`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("outlast.training"):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class Calls:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._message = torch.zeros(2 + _ROOM, dtype=torch.float64)
        self._numbers = self._message.numpy()
        self._store = deadlocks.store() if self.ranks > 1 else None
        self.waited_s = 0.0
        """Seconds spent in the first messages of calls, mostly waiting for other ranks."""

    def meet(self, call: str, position: int, numbers: Sequence[float] = ()) -> list[float]:
        """Return the sums of `numbers` over all ranks. Raises OutlastError on all ranks if they are in different calls or at
        different positions of their streams. All ranks must call this."""
        if self.ranks == 1:
            return list(numbers)
        watch = deadlocks.watch()
        watch.calls += 1
        watch.call = f"{call} ({place()})"
        key = zlib.crc32(f"{call} {position}".encode()) & ((1 << _BITS) - 1)
        first, rest = numbers[:_ROOM], numbers[_ROOM:]
        self._numbers[:] = 0
        self._numbers[: 2 + len(first)] = key, key * key, *first
        begun = time.monotonic()
        try:
            dist.all_reduce(self._message, group=self._group)
        except RuntimeError as error:
            if sentence := self._who_left(watch.call):
                raise OutlastError(sentence) from error
            raise
        self.waited_s += time.monotonic() - begun
        keys, squares, *sums = self._numbers.tolist()
        if int(keys) ** 2 != self.ranks * int(squares):  # Cauchy-Schwarz: equal only if all keys are
            calls: list[Any] = [None] * self.ranks
            dist.all_gather_object(calls, (watch.call, position), group=self._group)
            raise OutlastError(differing(calls))
        if rest:
            more = torch.tensor(rest, dtype=torch.float64)
            dist.all_reduce(more, group=self._group)
            return [*sums[: len(first)], *more.tolist()]
        return [float(number) for number in sums[: len(first)]]

    def leave(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that serves the store has left already
                self._store.set(f"outlast/left/{self.rank}", place())

    def close(self) -> None:
        self._group = self._store = None

    def _who_left(self, call: str) -> str:
        """Return an error message if another rank has left the session during this rank's `call`, or an empty string."""
        try:
            if self._store is None:
                return ""
            for rank in range(self.ranks):
                if rank != self.rank and self._store.check([f"outlast/left/{rank}"]):
                    where = self._store.get(f"outlast/left/{rank}").decode()
                    return f"rank {self.rank} is in {call}, rank {rank} has left the session ({where}); {_SAME}"
        except RuntimeError:
            pass  # the store is gone, so only the lost connection can be reported
        return ""


def differing(calls: Sequence[tuple[str, int]]) -> str:
    """Return an error message for ranks in different calls. `calls` has each rank's (call, stream position)."""
    positions = {position for _, position in calls}
    places = [f"{call} after batch {position}" if len(positions) > 1 else call for call, position in calls]
    return f"{deadlocks.listed(places, 'in')}; {REMEDY}"


_VOTES = 15
"""The duration of a vote is averaged over this many votes."""
_LONGEST_S = 0.25


def interval(vote_s: float, step_s: float) -> int:
    """Return the number of steps between votes, given the durations of a vote and of a step."""
    most = max(1, int(_LONGEST_S / step_s)) if step_s > 0 else 1
    return min(most, snapshot_taking.interval(vote_s, step_s))


class Pace:
    def __init__(self) -> None:
        self.agreed, self.next = 1, 0
        """The interval on which the ranks have agreed, and the step of the next vote."""
        self._votes_s: collections.deque[float] = collections.deque(maxlen=_VOTES)

    @contextlib.contextmanager
    def voting(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._votes_s.append(time.monotonic() - begun)

    def interval(self, step_s: float) -> int:
        """Return the interval that this rank proposes, which is 1 until enough votes have been measured."""
        return interval(statistics.fmean(self._votes_s), step_s) if len(self._votes_s) == _VOTES else 1
