"""Fault injection, once or repeatedly (`outlast chaos`), or by a schedule (`outlast chaos FILE`, `outlast run --chaos FILE`),
such as

    - {step: 40, do: kill-worker, worker: 1}
    - {at: 20s, do: kill-process, worker: random}

The backend injects the faults. Random choices come from a seed, so repeating a command injects the same faults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from outlast.base import backoff, units
from outlast.base.errors import InvalidJob, NotFound, OutlastError
from outlast.job.spec import field_types, validation, yaml_document

if TYPE_CHECKING:
    from outlast.job.backend import Backend
    from outlast.job.status import JobStatus

ACTIONS = {
    "kill-process": "SIGKILL one training process",
    "kill-worker": "SIGKILL a worker: its agent and all its processes",
    "stop": "SIGSTOP one training process, so that it hangs",
    "slow": "stop and continue one training process for a while, so that it is slow",
    "term": "SIGTERM a worker, as when its machine is taken away",
    "evict": "evict a worker's pod, as draining its node does; on this machine the same as term",
}
"""Faults with their descriptions. In a cluster, kill-worker deletes the pod without a grace period, and term deletes it with its
grace period."""
SLOW = (20, 0.4, 0.1)
"""Parameters of `slow`: the number of stops, the seconds of each stop, and the seconds between two stops."""

_POLL_S = 0.05


class Fault(validation.Checked):
    """One fault. It is due once the job has reached both `at` and `step`, if they are set."""

    do: Annotated[str, field_types.Pattern("|".join(ACTIONS), f"must be one of {', '.join(ACTIONS)}")]
    worker: Annotated[field_types.Whole | None, BeforeValidator(lambda value: None if value == "random" else value)] = None
    """Index of the worker; None for a random worker."""
    at: Annotated[timedelta, BeforeValidator(units.duration)] | None = None
    """Time since the run was submitted."""
    step: field_types.Whole | None = None

    def due(self, elapsed: timedelta, step: int) -> bool:
        """Return whether the fault is due at this time and step."""
        return (self.at is None or elapsed >= self.at) and (self.step is None or step >= self.step)


class _Schedule(validation.Checked):
    faults: tuple[Fault, ...]


def check(action: str) -> str:
    """Return the action. Raises OutlastError if there is no such action."""
    if action not in ACTIONS:
        raise OutlastError(f"no fault {action!r}; choose one of {', '.join(ACTIONS)}")
    return action


def load(path: Path) -> tuple[Fault, ...]:
    """Read a schedule from a file. Raises OutlastError with all mistakes in the schedule."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OutlastError(f"the schedule {path} cannot be read: {error}") from error
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "chaos.yaml") -> tuple[Fault, ...]:
    """Parse a schedule from YAML text. Raises InvalidJob with all mistakes in the schedule."""
    read = yaml_document.read(text, source=source, start="a schedule starts with `- {step: 40, do: kill-worker}`")
    lines: dict[yaml_document.Place, int] = {("faults", *place): line for place, line in read.lines.items()}
    faults = validation.validated(
        _Schedule, yaml_document.Document({"faults": read.data}, lines, read.problems), source=source
    ).faults
    if never := [n for n, fault in enumerate(faults) if fault.at is None and fault.step is None]:
        raise InvalidJob([(lines["faults", n], "say when: `at: 20s` or `step: 40`") for n in never], source=source)
    return faults


def seed(faults: Sequence[Fault]) -> random.Random:
    """Return a random generator that is the same for the same schedule."""
    return random.Random(repr(faults))


def play(
    backend: Backend, name: str, faults: Sequence[Fault], rng: random.Random, *, say: Callable[[str], None] = lambda _: None
) -> Iterator[str]:
    """Inject each fault in a schedule once, when it is due, and yield a sentence about it. Stops after the last fault, or when
    the run stops or is replaced. Calls `say` when a cluster does not respond."""
    left = list(faults)
    run = backend.status(name).run
    while left and (status := _status(backend, name, run, say)) is not None:
        elapsed = timedelta(seconds=time.time() - status.submitted)
        for fault in [fault for fault in left if fault.due(elapsed, status.step)]:
            left.remove(fault)
            yield _attempt(backend, name, fault, rng)
        time.sleep(_pause_s(backend))


def repeat(
    backend: Backend,
    name: str,
    fault: Fault,
    *,
    every: timedelta,
    times: int | None,
    rng: random.Random,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Inject the same fault at an interval, starting now, and yield a sentence about each injection. Stops after `times` faults,
    or when the run stops or is replaced."""
    done = 0
    run = backend.status(name).run
    due = time.monotonic()
    while (times is None or done < times) and _status(backend, name, run, say) is not None:
        if time.monotonic() < due:
            time.sleep(min(_pause_s(backend), max(0.0, due - time.monotonic())))
            continue
        yield _attempt(backend, name, fault, rng)
        done += 1
        due = time.monotonic() + every.total_seconds()


def _pause_s(backend: Backend) -> float:
    return _POLL_S if backend.poll_s < 1 else backend.poll_s


def _status(backend: Backend, name: str, run: str, say: Callable[[str], None]) -> JobStatus | None:
    """Return the status of the run; None if the run has stopped, or if a later run, which must not be harmed, has replaced it."""
    try:
        status = backoff.until_answered(lambda: backend.status(name), say, every_s=_pause_s(backend))
    except NotFound:
        return None
    return status if status.state.active and status.run == run else None


def _attempt(backend: Backend, name: str, fault: Fault, rng: random.Random) -> str:
    """Inject a fault, and return a sentence about it. If that is impossible, e.g. while workers restart, the sentence says why,
    and the schedule continues."""
    try:
        return backend.chaos(name, fault.do, worker=fault.worker, rng=rng)
    except OutlastError as error:
        return f"{fault.do}: {error}"
