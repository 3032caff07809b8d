"""The faults of a trial, as data: the same for every system.

A fault comes when training reaches a step for the first time, so every system trains equally long and a slow recovery shows as
wall time. A trial has three legs, each a job of its own: `calm` without faults, for the pace and the weights; `machine` with all
workers on this machine's network; `network` with one network namespace per worker, in which the packets of one vanish.
"""

from __future__ import annotations

import dataclasses
import random

KINDS = ("process", "worker", "silent", "hang", "resize", "notice")
STEP_S = 0.25
"""Approximate seconds of a step: a pause of 0.2 s and the work."""
SAMPLES = 1440
"""Size of the data set: 60 steps of 24 samples are an epoch."""
SAVED_EVERY = 40
"""Steps between saves to disk, in all systems; 10 s."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    process  SIGKILL to a training process
    worker   SIGKILL to a worker: its agent and all that it started
    silent   all packets of a worker vanish, and its processes live
    hang     SIGSTOP to a training process
    resize   the job is asked to train with `size` workers from now on
    notice   SIGTERM to a worker, which is gone `Trace.notice_s` later
    """

    step: int
    kind: str
    worker: int
    """Never 0, which has the store of torchrun and of Ray, and decides for Outlast."""
    phase: float
    """When in the step: 0 is its beginning, 1 its end."""
    size: int = 0


@dataclasses.dataclass(frozen=True)
class Leg:
    """One job of a trial: it ends after so many steps."""

    name: str
    steps: int
    faults: tuple[Fault, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trace:
    """What happens in a trial, and how long the driver waits."""

    name: str
    seed: int
    workers: int
    legs: tuple[Leg, ...]
    limit_s: float
    """A system that does not train this long after a fault did not come back; its job is started again by hand."""
    quiet_limit_s: float
    """The same after a hang or silence, which only time-outs show."""
    replace_s: float = 2.0
    """Seconds until the cluster has a new machine for a worker that is gone."""
    silent_s: float = 20.0
    """Seconds until the cluster takes a silent machine for lost, ends what is left on it and has a new one."""
    notice_s: float = 30.0

    def limit(self, kind: str) -> float:
        """Return the seconds within which training must go on after a fault of this kind."""
        return self.quiet_limit_s if kind in ("hang", "silent") else self.limit_s

    @property
    def least(self) -> int:
        """Number of workers without which elastic systems do not train."""
        return max(1, self.workers - 1)


def short(seed: int = 0, workers: int = 3) -> Trace:
    """Return the trace of about 90 s of training, with one fault of each kind."""
    return _trace(
        "short", seed, workers, {"process": 1, "hang": 1, "worker": 1}, gap=40, jitter=6, calm=110, limits_s=(30.0, 60.0)
    )


def full(seed: int = 0, workers: int = 3) -> Trace:
    """Return the trace of about 30 minutes of training."""
    return _trace(
        "full", seed, workers, {"process": 10, "hang": 1, "worker": 3}, gap=380, jitter=120, calm=1000, limits_s=(120.0, 120.0)
    )


def _trace(
    name: str, seed: int, workers: int, counts: dict[str, int], gap: int, jitter: int, calm: int, limits_s: tuple[float, float]
) -> Trace:
    """Faults `gap` steps apart, give or take `jitter`. What changes the number of workers on purpose comes last."""
    rng = random.Random(f"{name} {seed}")
    kinds = [kind for kind, count in counts.items() for _ in range(count) if workers > 1 or kind != "worker"]
    rng.shuffle(kinds)
    planned = ["notice", "resize", "resize"] if workers > 1 else []
    sizes = iter((max(1, workers - 1), workers))
    faults, step = [], 0
    for kind in [*kinds, *planned]:
        step = step + gap + rng.randint(-jitter, jitter) if faults else max(SAVED_EVERY + 10, gap + rng.randint(-jitter, jitter))
        worker = rng.randrange(1, workers) if workers > 1 else 0
        faults.append(Fault(step, kind, worker, rng.random(), next(sizes) if kind == "resize" else 0))
    unplanned = faults[len(kinds)].step if planned else step + gap
    legs = [Leg("calm", min(calm, unplanned)), Leg("machine", step + gap, tuple(faults))]
    if workers > 1:
        at = SAVED_EVERY + rng.randint(5, 35)
        legs.append(Leg("network", at + 40, (Fault(at, "silent", rng.randrange(1, workers), rng.random()),)))
    return Trace(name, seed, workers, tuple(legs), *limits_s)
