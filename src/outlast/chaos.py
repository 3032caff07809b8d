"""Harm done on purpose: which, to whom, when.

`outlast chaos` strikes once or every so often; `outlast run --chaos FILE` and `outlast chaos FILE` carry out a schedule, a YAML
list such as

    - {step: 40, do: kill-worker, worker: 1}
    - {at: 20s, do: kill-process, worker: random}

How a worker is harmed is the backend's business. What is random comes from a seed, so that the same command does the same harm
again.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from outlast import backoff, units
from outlast.errors import NotFound, OutlastError

if TYPE_CHECKING:
    from outlast.backends import Backend
    from outlast.status import JobStatus

ACTIONS = {
    "kill-process": "SIGKILL one training process",
    "kill-worker": "SIGKILL a worker: its agent and all its processes",
    "stop": "SIGSTOP one training process, so that it hangs",
    "slow": "stop and continue one training process for a while, so that it is slow",
    "term": "SIGTERM a worker, as a machine that goes away does",
    "evict": "evict a worker's pod, as the drain of its node does; on this machine the same as term",
}
"""What can be done to a worker. In a cluster kill-worker deletes its pod without grace, and term with it."""
SLOW = (20, 0.4, 0.1)
"""What `slow` does: how often it stops a process, for how many seconds, and for how many it lets it run."""

_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class Strike:
    """One entry of a schedule. It is due when both `at` and `step` are reached, as far as they are given."""

    do: str
    """One of `ACTIONS`."""
    worker: int | None = None
    """Index of the worker; None: a random one."""
    at: timedelta | None = None
    """Time since the run was submitted."""
    step: int | None = None
    """A step that the training has reached."""

    def due(self, elapsed: timedelta, step: int) -> bool:
        """Whether the time has come."""
        return (self.at is None or elapsed >= self.at) and (self.step is None or step >= self.step)


def check(action: str) -> str:
    """The action itself; raises OutlastError for one that does not exist."""
    if action not in ACTIONS:
        raise OutlastError(f"no such chaos: {action!r}; there are {', '.join(ACTIONS)}")
    return action


def load(path: Path) -> tuple[Strike, ...]:
    """The schedule in a file; raises OutlastError with everything that is wrong with it."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise NotFound(f"no chaos schedule at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OutlastError(f"{path} cannot be read: {error}") from error
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "chaos.yaml") -> tuple[Strike, ...]:
    """The schedule in a YAML text; raises OutlastError with everything that is wrong with it."""
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OutlastError(f"{source} is not YAML: {error}") from error
    if not isinstance(entries, list):
        raise OutlastError(f"{source}: expected a list of entries such as `- {{step: 40, do: kill-worker, worker: 1}}`")
    strikes: list[Strike] = []
    problems: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            strikes.append(_strike(entry))
        except OutlastError as error:
            problems.append(f"{source}: entry {number}: {error}")
    if problems:
        raise OutlastError("\n".join(problems))
    return tuple(strikes)


def _strike(entry: object) -> Strike:
    if not isinstance(entry, dict) or "do" not in entry:
        raise OutlastError("expected a mapping with `do`, and with `at` or `step`")
    if unknown := [str(key) for key in entry if key not in ("at", "step", "do", "worker")]:
        raise OutlastError(f"unknown {', '.join(unknown)}; an entry has at, step, do, worker")
    if "at" not in entry and "step" not in entry:
        raise OutlastError("say when: `at: 20s` or `step: 40`")
    worker, step = entry.get("worker", "random"), entry.get("step")
    if wrong := [key for key in ("at", "step", "do", "worker") if isinstance(entry.get(key), list | dict)]:
        raise OutlastError(f"{wrong[0]} is a list or a mapping; expected one value")
    if worker != "random" and not _is_count(worker):
        raise OutlastError(f"worker is {worker!r}; expected the index of a worker, or random")
    if step is not None and not _is_count(step):
        raise OutlastError(f"step is {step!r}; expected a number of steps")
    return Strike(
        do=check(str(entry["do"])),
        worker=None if worker == "random" else worker,
        at=every(str(entry["at"])) if "at" in entry else None,
        step=step,
    )


def every(text: str) -> timedelta:
    """`15s`, `2m`: a duration, as `--every` and `at` give it; raises OutlastError."""
    try:
        return units.duration(text)
    except ValueError as error:
        raise OutlastError(f"{text} {error}") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def seed(strikes: Sequence[Strike]) -> random.Random:
    """The randomness of a schedule: the same for the same schedule."""
    return random.Random(repr(strikes))


def play(
    backend: Backend,
    name: str,
    strikes: Sequence[Strike],
    rng: random.Random,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Carry out a schedule, each entry once when it is due; yields what was done.

    Ends with the schedule, or when the run ends, leaves or is replaced. `say` is told that a cluster does not answer.
    """
    left = list(strikes)
    run = backend.status(name).run
    while left and (status := _status(backend, name, run, say)) is not None:
        elapsed = timedelta(seconds=time.time() - status.submitted)
        for strike in [strike for strike in left if strike.due(elapsed, status.step)]:
            left.remove(strike)
            yield _attempt(backend, name, strike.do, strike.worker, rng)
        time.sleep(_pause_s(backend))


def repeat(
    backend: Backend,
    name: str,
    action: str,
    *,
    worker: int | None,
    every: timedelta,
    times: int | None,
    rng: random.Random,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Do the same harm again and again, first now; yields what was done.

    Ends after `times`, or when the run ends, leaves or is replaced.
    """
    done = 0
    run = backend.status(name).run
    due = time.monotonic()
    while (times is None or done < times) and _status(backend, name, run, say) is not None:
        if time.monotonic() < due:
            time.sleep(min(_pause_s(backend), max(0.0, due - time.monotonic())))
            continue
        yield _attempt(backend, name, action, worker, rng)
        done += 1
        due = time.monotonic() + every.total_seconds()


def _pause_s(backend: Backend) -> float:
    """Between two looks at the clock and at the step: of this machine often, of a cluster as often as it is worth it."""
    return _LOOK_S if backend.look_s < 1 else backend.look_s


def _status(backend: Backend, name: str, run: str, say: Callable[[str], None]) -> JobStatus | None:
    """Where the run stands; None when it has ended or left, or the name has gone to another one: that is not ours to harm."""
    try:
        status = backoff.until_answered(lambda: backend.status(name), say, every_s=_pause_s(backend))
    except NotFound:
        return None
    return status if status.state.active and status.run == run else None


def _attempt(backend: Backend, name: str, action: str, worker: int | None, rng: random.Random) -> str:
    """One strike of many: that there is nothing to strike at this moment (everybody is restarting) does not end the others."""
    try:
        return backend.chaos(name, action, worker=worker, rng=rng)
    except OutlastError as error:
        return f"{action}: {error}"
