"""From the lines that ranks write to the figures of a trial: what a fault cost, which steps count, whether weights are the same.

Training lost is the time from the last step before a fault until training is AHEAD steps further, less what so many steps take
undisturbed: detection, re-forming, restoring and the steps that are done again, however a system divides them. Steps that were
done again count once, in their last execution.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

AHEAD = 3
"""Steps after the fault at which training counts as going on."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A step that a rank has ended."""

    time: float
    pid: int
    rank: int
    world: int
    step: int
    samples: tuple[int, ...] = ()
    digest: str = ""
    """SHA-256 of the rank's weights, after every tenth step."""


def read(text: str) -> list[Line]:
    """Return the lines of a text in which every line is whole."""
    return [Line(*fields[:5], tuple(fields[5]), fields[6]) for fields in map(json.loads, text.splitlines())]


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault that was injected."""

    kind: str
    time: float
    gone: frozenset[int] = frozenset()
    """Processes that the fault took, whose later lines do not count."""
    size: int = 0
    """Number of workers that train once everything is well again."""
    hit: bool = True
    """Whether the fault met a process that trains. If not, it cost nothing, and is not counted."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a fault cost. None: not within the limit."""

    lost_s: float | None
    whole_s: float | None = None
    """The same until all workers train, the replaced ones, too."""
    again: int = 0
    """Steps that a rank did again, at most."""


def pace(lines: Iterable[Line]) -> float:
    """Return the median seconds of a step of rank 0's lines, NaN if there are none."""
    times = [line.time for line in lines if line.rank == 0]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else math.nan


def cost(lines: Sequence[Line], event: Event, step_s: float) -> Cost:
    """Return what a fault has cost so far. `step_s`: seconds of an undisturbed step."""
    before: dict[int, int] = {}
    first: dict[int, float] = {}
    for line in lines:
        if line.time <= event.time:
            before[line.rank] = line.step
            first.setdefault(line.step, line.time)
    last = max(first)
    after = [line for line in lines if line.time > event.time and line.pid not in event.gone]
    resumed: dict[int, int] = {}
    ranks: dict[int, set[int]] = collections.defaultdict(set)
    ahead = whole = None
    for line in after:
        resumed[line.rank] = min(line.step, resumed.get(line.rank, line.step))
        if line.step >= last + AHEAD and ahead is None:
            ahead = line.time - first[last] - (line.step - last) * step_s
        if line.world == event.size:
            ranks[line.step].add(line.rank)
            if len(ranks[line.step]) == event.size and whole is None and line.step >= last:
                whole = line.time - first[last] - (line.step - last) * step_s
    again = max((before[rank] + 1 - step for rank, step in resumed.items() if rank in before), default=0)
    if event.kind in ("notice", "resize"):  # training goes on until it is ready, so only the change shows what it costs
        ahead = whole
    return Cost(ahead, whole, max(0, again))


def final(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """Return the last execution of each step: the lines of its last world, one for each rank."""
    steps: dict[int, dict[int, Line]] = collections.defaultdict(dict)
    for line in lines:
        ranks = steps[line.step]
        if any(other.world != line.world for other in ranks.values()):
            ranks.clear()
        ranks[line.rank] = line
    return {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in sorted(steps.items())}


def samples(steps: Mapping[int, Sequence[Line]], number: int) -> tuple[int, int]:
    """Return how many samples were repeated and how many are missing, by counting visits over epochs of `number` samples.

    After v visits in all each sample should have been visited v / number times, rounded up or down; so this is the least that
    is wrong.
    """
    visits = collections.Counter(sample for lines in steps.values() for line in lines for sample in line.samples)
    low, rest = divmod(visits.total(), number)
    high = low + (rest > 0)
    repeated = sum(max(0, times - high) for times in visits.values())
    return repeated, sum(max(0, low - visits[sample]) for sample in range(number))


def same(calm: Mapping[int, Sequence[Line]], steps: Mapping[int, Sequence[Line]], workers: int, since: int) -> bool | None:
    """Return whether the weights are those of the undisturbed run, after step `since` of the first fault.

    Compared are the steps before the first that other than `workers` ranks have done. None: there are none to compare.
    """
    found = []
    for step, lines in steps.items():
        if any(line.world != workers for line in lines):
            break
        if step > since and step in calm:
            ours, theirs = {line.digest for line in lines}, {line.digest for line in calm[step]}
            found += [ours == theirs] if ours != {""} else []
    return all(found) if found else None


def curve(lines: Iterable[Line], every: int) -> list[tuple[float, int]]:
    """Return points (seconds since the first line, step): every so many steps, and around gaps and steps backwards."""
    found: list[Line] = []
    before: Line | None = None
    for line in lines:
        jump = before is not None and (line.step < before.step or line.time > before.time + 2)
        if before is not None and jump:
            found.append(before)
        if before is None or jump or line.step >= found[-1].step + every:
            found.append(line)
        before = line
    return [(round(line.time - found[0].time, 2), line.step) for line in found]
