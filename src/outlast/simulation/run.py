"""One job, played through one trace: when it ends, what it costs, where the time goes. A function of its arguments.

Spot machines are taken first, up to their cap; what the job then lacks is taken on demand, up to that cap. A machine stays until
it is taken away or the job ends. A new one is paid from its start and trains after `boot_s`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from outlast.simulation.profile import Profile
from outlast.simulation.traces import Trace

MOST = 20
"""A job that takes so many times as long as it would undisturbed does not end, as far as we say."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The machines that a job may have, one worker on each."""

    spot: int
    """Most spot machines."""
    on_demand: int
    """Most machines on demand."""
    spot_price: float
    """Of a machine and hour, in any currency."""
    on_demand_price: float
    boot_s: float = 180.0
    """From the request for a machine until its worker is ready."""
    notice_s: float = 120.0
    """Warning before a spot machine is taken; 0: none."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be trained, and how."""

    steps: int
    sizes: tuple[int, ...]
    """Allowed numbers of workers, ascending."""
    every_s: float
    """Between two checkpoints."""
    replicas: int = 1
    """Workers that may be lost at once without going back to a checkpoint."""
    leaving_s: float = 5.0
    """What a worker needs of a notice to save; with less it is a loss like any other."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How it went. The seconds of the five fields that end so sum to `wall_s`."""

    ended: bool
    wall_s: float
    cost: float
    training_s: float
    """Steps whose result was kept."""
    again_s: float
    """Steps whose result was lost."""
    changing_s: float
    """Changes of the world: stopping, meeting, starting, loading."""
    saving_s: float
    waiting_s: float
    """For machines."""
    reclaims: int
    """Spot machines taken away."""
    losses: int
    """Times when that came without enough warning."""
    timeline: tuple[tuple[float, int, int], ...]
    """(seconds, spot machines, machines on demand) that are ready, from then on."""

    @property
    def goodput(self) -> float:
        """Share of the time spent on steps that were kept, 0 ... 1."""
        return self.training_s / self.wall_s if self.wall_s else 0.0


def simulate(job: Job, profile: Profile, fleet: Fleet, trace: Trace) -> Outcome:
    """Train the job with these machines."""
    return _Run(job, profile, fleet, trace).played()


class _Run:
    def __init__(self, job: Job, profile: Profile, fleet: Fleet, trace: Trace) -> None:
        self.job, self.profile, self.fleet = job, profile, fleet
        self.now = 0.0
        self.spot: list[float] = []
        """When each spot machine that we have is ready."""
        self.on_demand: list[float] = []
        self.changes: Iterator[tuple[float, int]] = trace.forever()
        self.available, self.next_change = 0, next(self.changes)
        self.world = 0
        """Workers that train."""
        self.done = self.committed = 0.0
        """Steps."""
        self.commit_at = math.inf
        self.busy_until, self.busy = 0.0, "changing"
        """Training stands still until then, for that."""
        self.seconds = dict.fromkeys(("training", "again", "changing", "saving", "waiting"), 0.0)
        self.cost = 0.0
        self.reclaims = self.losses = 0
        self.timeline: list[tuple[float, int, int]] = []
        self.marks: list[tuple[float, float]] = [(0.0, 0.0)]
        """(steps, seconds of training until then) since the newest checkpoint: between two of them the speed was the same."""

    def played(self) -> Outcome:
        machines = self.fleet.spot + self.fleet.on_demand
        size = max((size for size in self.job.sizes if size <= machines), default=0)
        longest_s = MOST * (self.fleet.boot_s + self.job.steps * self.profile.step_s(size)) if size else 0.0
        while self.done < self.job.steps and self.now < longest_s:
            while self.next_change[0] <= self.now:
                self._available(self.next_change[1])
                self.next_change = next(self.changes)
            self._acquire()
            self._form()
            self._advance(min(self._ends()))
            if self._trains and self.commit_at <= self.now and self.done < self.job.steps:
                self._commit()
        seconds = {f"{name}_s": value for name, value in self.seconds.items()}
        ended = self.done >= self.job.steps
        return Outcome(
            ended, self.now, self.cost, **seconds, reclaims=self.reclaims, losses=self.losses, timeline=tuple(self.timeline)
        )

    @property
    def _trains(self) -> bool:
        return self.world > 0 and self.now >= self.busy_until

    def _ends(self) -> Iterator[float]:
        """When something happens next."""
        yield self.next_change[0]
        yield from (ready for ready in (*self.spot, *self.on_demand) if ready > self.now)
        if self.now < self.busy_until:
            yield self.busy_until
        elif self.world:
            yield self.commit_at
            yield self._end

    @property
    def _end(self) -> float:
        """When the last step ends, if nothing happens before."""
        return self.now + (self.job.steps - self.done) * self.profile.step_s(self.world)

    def _advance(self, to: float) -> None:
        passed = to - self.now
        kind = self.busy if self.now < self.busy_until else "training" if self.world else "waiting"
        self.seconds[kind] += passed
        self.cost += passed / 3600 * self._price
        if kind == "training":
            over = to >= self._end
            self.done = float(self.job.steps) if over else self.done + passed / self.profile.step_s(self.world)
        self.now = to

    @property
    def _price(self) -> float:
        return len(self.spot) * self.fleet.spot_price + len(self.on_demand) * self.fleet.on_demand_price

    def _acquire(self) -> None:
        """Request the machines that the job lacks: spot first."""
        lacking = self.job.sizes[-1] - len(self.spot) - len(self.on_demand)
        spot = max(0, min(lacking, min(self.fleet.spot, self.available) - len(self.spot)))
        on_demand = max(0, min(lacking - spot, self.fleet.on_demand - len(self.on_demand)))
        self.spot += [self.now + self.fleet.boot_s] * spot
        self.on_demand += [self.now + self.fleet.boot_s] * on_demand

    def _ready(self) -> tuple[int, int]:
        return sum(at <= self.now for at in self.spot), sum(at <= self.now for at in self.on_demand)

    def _form(self) -> None:
        """Take machines that have come into the world."""
        ready = self._ready()
        if not self.timeline or self.timeline[-1][1:] != ready:
            self.timeline.append((self.now, *ready))
        size = max((size for size in self.job.sizes if size <= sum(ready)), default=0)
        if size <= self.world:
            return
        if self.world == 0:
            self.commit_at = self.now + self.job.every_s
        self._resize(size)
        self._stand(self.profile.planned_s, "changing")

    def _resize(self, world: int) -> None:
        self.world = world
        self.marks.append((self.done, self.seconds["training"]))

    def _available(self, machines: int) -> None:
        """So many spot machines can be had from now on: the last that came go first."""
        self.available = machines
        taken = max(0, len(self.spot) - machines)
        if not taken:
            return
        self.spot.sort()
        training = sum(at <= self.now for at in self.spot[-taken:])
        del self.spot[-taken:]
        self.reclaims += taken
        self.cost += taken * self.fleet.notice_s / 3600 * self.fleet.spot_price  # paid until they are gone
        left = max((size for size in self.job.sizes if size <= sum(self._ready())), default=0)
        if not training or not self.world:
            return
        if self.fleet.notice_s >= self.job.leaving_s:
            self._keep()
            self._stand(self.profile.planned_s, "changing")
        else:
            self._lose(training, survivors=sum(self._ready()))
        self._resize(min(self.world, left))

    def _lose(self, lost: int, survivors: int) -> None:
        """Workers have gone without a word: go back to the newest state that is left."""
        self.losses += 1
        every = self.profile.snapshot_every
        kept = self.committed
        if every and survivors and lost <= self.job.replicas:
            kept = max(kept, self.done // every * every)
        now = self.done, self.seconds["training"]
        while self.marks and self.marks[-1][0] > kept:
            now = self.marks.pop()
        before = self.marks[-1]
        share = (kept - before[0]) / (now[0] - before[0]) if now[0] > before[0] else 0.0
        training = before[1] + share * (now[1] - before[1])
        self.seconds["again"] += self.seconds["training"] - training
        self.seconds["training"], self.done = training, kept
        self._stand(self.profile.failure_s, "changing")

    def _commit(self) -> None:
        self._keep()
        self._stand(self.profile.stall_s, "saving")

    def _keep(self) -> None:
        self.committed, self.commit_at = self.done, self.now + self.job.every_s
        self.marks = [(self.done, self.seconds["training"])]

    def _stand(self, seconds: float, kind: str) -> None:
        """Training stands still for this long at least."""
        if self.now + seconds > self.busy_until:
            self.busy_until, self.busy = self.now + seconds, kind
