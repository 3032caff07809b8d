"""Which settings are best: every one is played through the same traces, so that they differ in nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from outlast.simulation.profile import Profile
from outlast.simulation.run import Fleet, Job, Outcome, simulate
from outlast.simulation.traces import Trace

INTERVALS_S = (60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Between checkpoints, that are tried."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A fleet and settings of a job."""

    name: str
    fleet: Fleet
    job: Job


@dataclasses.dataclass(frozen=True)
class Result:
    """A choice, and how it went with each trace."""

    choice: Choice
    outcomes: tuple[Outcome, ...]

    @property
    def ended(self) -> bool:
        """Whether the job ended with every trace."""
        return all(each.ended for each in self.outcomes)

    def median(self, of: Callable[[Outcome], float]) -> float:
        """Of the traces."""
        return statistics.median(map(of, self.outcomes))

    @property
    def wall_s(self) -> float:
        return self.median(lambda each: each.wall_s)

    @property
    def longest_s(self) -> float:
        """With the worst trace."""
        return max(each.wall_s for each in self.outcomes)

    @property
    def cost(self) -> float:
        return self.median(lambda each: each.cost)

    @property
    def typical(self) -> Outcome:
        """The outcome of the trace with the median time, the earlier of two."""
        ordered = sorted(self.outcomes, key=lambda each: each.wall_s)
        return ordered[(len(ordered) - 1) // 2]


def played(choice: Choice, profile: Profile, traces: Sequence[Trace]) -> Result:
    """One choice, with all traces."""
    return Result(choice, tuple(simulate(choice.job, profile, choice.fleet, trace) for trace in traces))


def fleets(given: Choice) -> Iterator[Choice]:
    """The choice as it is, and its fleet with one kind of machine alone."""
    yield given
    fleet, machines = given.fleet, given.fleet.spot + given.fleet.on_demand
    if fleet.spot and fleet.on_demand:
        yield dataclasses.replace(given, name="spot only", fleet=dataclasses.replace(fleet, on_demand=0))
    if fleet.spot:
        yield dataclasses.replace(given, name="on-demand only", fleet=dataclasses.replace(fleet, spot=0, on_demand=machines))


def settings(given: Choice) -> Iterator[Choice]:
    """The choice with other checkpoint intervals and other least and most workers, out of the sizes that the job allows and the
    fleet can hold."""
    machines = given.fleet.spot + given.fleet.on_demand
    sizes = [size for size in given.job.sizes if size <= machines]
    some = sorted({sizes[round(place * (len(sizes) - 1) / 3)] for place in range(4)}) if sizes else []
    intervals = sorted({given.job.every_s, *INTERVALS_S})
    for (least, most), every in itertools.product(itertools.combinations_with_replacement(some, 2), intervals):
        allowed = tuple(size for size in sizes if least <= size <= most)
        yield dataclasses.replace(given, job=dataclasses.replace(given.job, sizes=allowed, every_s=every))


def cheapest(results: Iterable[Result]) -> Result | None:
    """Of those that always end; of two as cheap the faster, of two as fast the first."""
    return min((each for each in results if each.ended), key=lambda each: (each.cost, each.wall_s), default=None)


def fastest(results: Iterable[Result]) -> Result | None:
    """Of those that always end; of two as fast the cheaper, of two as cheap the first."""
    return min((each for each in results if each.ended), key=lambda each: (each.wall_s, each.cost), default=None)
