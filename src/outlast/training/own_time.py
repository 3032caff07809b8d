"""Measures each rank's own time per step, without the time in collectives, so that `job.slow_ranks` can find slow ranks.

In every n-th step, DDP's logger measures how long the backward pass waits for the last gradients, by the clock on a CPU and by
events on a GPU. The numbers are available once the next step's forward pass has begun. See
docs/decisions/0067-slow-and-differing-ranks.md.
"""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast.job import slow_ranks
from outlast.job.contract import Env
from outlast.job.ledger import Ledger
from outlast.job.workerfiles.progress_file import Progress
from outlast.training import ddp
from outlast.training.collective_calls import Calls
from outlast.training.samples.stream import Stream, share_of

log = logging.getLogger("outlast")

WINDOW_S = 15.0
_LEAST = 5
"""Minimum number of samples in a window."""
_EVERY_S, _EVERY_GPU_S = 0.1, 1.0
"""Seconds between two samples on a CPU and on a GPU, where reading the times waits for the GPU's stream."""
_RATE = 100
"""Maximum number of steps between two samples; torch's default."""


class OwnTimes:
    def __init__(
        self, calls: Calls, gather: Callable[[Any], list[Any]], ledger: Ledger, report: Callable[..., None], *, gpu: bool
    ) -> None:
        self._calls, self._gather, self._ledger, self._report, self._gpu = calls, gather, ledger, report, gpu
        self._clock = time.monotonic
        self._windows: collections.deque[slow_ranks.Window] = collections.deque(maxlen=slow_ranks.WINDOWS)
        self._named: dict[int, float] = {}
        """The slow ranks, each with the fraction by which its own time exceeds the other ranks' median."""
        self.begin({})

    def begin(self, state: Mapping[str, Any]) -> None:
        """Begin a window of measurements, with the streams in `state`. The time since the last step does not count as a step."""
        self._work = _work(state, self._calls.ranks)
        self._last: tuple[float, float] | None = None
        self._step: tuple[float, float] | None = None
        """Seconds that the last step took, and seconds that it spent in the session's calls."""
        self._count = self._next = self._missed = self._iteration = self._rate = 0
        self._samples: list[float] = []
        self._opened = self._clock()

    def due(self) -> bool:
        """Return whether the window is over. Only rank 0's result counts."""
        return self._calls.rank == 0 and len(self._samples) >= _LEAST and self._clock() - self._opened >= WINDOW_S

    def step(self, record: Progress, *, compare: bool) -> None:
        """Record the end of a step. With `compare`, also end the window, as a collective."""
        self._sample()
        if compare:
            self._compare(record)

    def _sample(self) -> None:
        now, last, previous = (self._clock(), self._calls.waited_s), self._last, self._step
        self._last, self._step = now, (now[0] - last[0], now[1] - last[1]) if last else None
        self._count += 1
        if self._count < self._next or not self._step:
            return
        stats = [net._get_ddp_logging_data() for net in ddp.wrapped]  # type: ignore[no-untyped-call]
        iteration = max((each.get("iteration", 0) for each in stats), default=0)
        if iteration == self._iteration:
            self._missed = min(_RATE, self._missed + 1)  # the model is not trained at present, or is not wrapped in DDP
            self._next = self._count + self._missed
            return
        first, self._iteration, self._missed = not self._iteration, iteration, 0
        self._rate = self._choose_rate(self._step[0])
        self._next = self._count + self._rate - iteration % self._rate
        if previous and not first and (wait_s := _backward_wait_s(stats)) is not None:
            step_s, called_s = previous
            in_collectives_s = max(wait_s, called_s) if self._gpu else wait_s + called_s
            self._samples.append(max(0.0, step_s - in_collectives_s))

    def _choose_rate(self, step_s: float) -> int:
        """Choose the number of steps between samples, and set it in DDP."""
        every_s = _EVERY_GPU_S if self._gpu else _EVERY_S
        rate = min(_RATE, max(1, round(every_s / max(step_s, 1e-6))))
        if self._rate and self._rate / 2 < rate < self._rate * 2:
            return self._rate
        for net in ddp.wrapped:
            net._set_ddp_runtime_logging_sample_rate(rate)  # type: ignore[no-untyped-call]
        return rate

    def _compare(self, record: Progress) -> None:
        """End the window, and report ranks that have become slow or have stopped being slow. All ranks must call this."""
        samples, self._samples, self._opened = self._samples, [], self._clock()
        own_s, error_s = slow_ranks.measured(samples) if len(samples) >= _LEAST else (0.0, 0.0)
        every = self._gather((own_s, error_s, int(os.environ.get(Env.WORKER, record.rank)), os.environ.get(Env.NODE, "")))
        self._windows.append([(own, error) for own, error, _, _ in every])
        before, self._named = self._named, slow_ranks.judged(self._windows, self._work, self._named)
        self._report(own_s=round(own_s, 6), slow=self._named.get(record.rank, 0.0))
        for rank in sorted(before.keys() ^ self._named.keys()) if record.rank == 0 else ():
            own, _, worker, node = every[rank]
            reason = slow_ranks.sentence(rank, self._named.get(rank, 0.0), slow_ranks.place(worker, node))
            about = {"generation": record.generation, "step": record.step, "rank": rank, "worker": worker, "node": node}
            self._ledger.write("slow", **about, own_s=round(own, 6), reason=reason)
            log.warning("outlast: %s", reason)


def _work(state: Mapping[str, Any], ranks: int) -> list[int]:
    for stream in (thing for thing in state.values() if isinstance(thing, Stream)):
        shares = [share_of(-(-stream.batch // (stream.microbatch or 1)), ranks, rank) for rank in range(ranks)]
        return [max(1, end - start) for start, end in shares]
    return [1] * ranks


def _backward_wait_s(stats: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds that backward passes waited for gradients, or None if DDP has not measured them."""
    trained = [each for each in stats if each.get("backward_comm_time")]
    waits = [each["backward_comm_time"] - each.get("backward_compute_comm_overlap_time", 0) for each in trained]
    return max(0, sum(waits)) / 1e9 if waits else None
