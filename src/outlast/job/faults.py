"""Fault injection, once or repeatedly (`outlast chaos`), or by a schedule (`outlast chaos FILE`, `outlast run --chaos FILE`),
such as

    - {step: 40, do: kill-worker, worker: 1}
    - {at: 20s, do: kill-process, worker: random}

The backend injects the faults. Random choices come from a seed, so repeating a command injects the same faults.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base import backoff, units
from outlast.base.errors import NotFound, OutlastError
from outlast.base.typed_json import is_count

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


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. It is due once the job has reached both `at` and `step`, if they are set."""

    do: str
    worker: int | None = None
    """Index of the worker; None for a random worker."""
    at: timedelta | None = None
    """Time since the run was submitted."""
    step: int | None = None

    def due(self, elapsed: timedelta, step: int) -> bool:
        """Return whether the fault is due at this time and step."""
        return (self.at is None or elapsed >= self.at) and (self.step is None or step >= self.step)


def check(action: str) -> str:
    """Return the action. Raises OutlastError if there is no such action."""
    if action not in ACTIONS:
        raise OutlastError(f"no fault {action!r}; choose one of {', '.join(ACTIONS)}")
    return action


def load(path: Path) -> tuple[Fault, ...]:
    """Read a schedule from a file. Raises OutlastError with all mistakes in the schedule."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise NotFound(f"no chaos schedule at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OutlastError(f"{path} cannot be read: {error}") from error
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "chaos.yaml") -> tuple[Fault, ...]:
    """Parse a schedule from YAML text. Raises OutlastError with all mistakes in the schedule."""
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OutlastError(f"{source} is not YAML: {error}") from error
    if not isinstance(entries, list):
        raise OutlastError(f"{source}: expected a list of entries such as `- {{step: 40, do: kill-worker, worker: 1}}`")
    faults: list[Fault] = []
    problems: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            faults.append(_fault(entry))
        except OutlastError as error:
            problems.append(f"{source}: entry {number}: {error}")
    if problems:
        raise OutlastError("\n".join(problems))
    return tuple(faults)


def _fault(entry: object) -> Fault:
    if not isinstance(entry, dict) or "do" not in entry:
        raise OutlastError("expected a mapping with `do`, and with `at` or `step`")
    if unknown := [str(key) for key in entry if key not in ("at", "step", "do", "worker")]:
        raise OutlastError(f"unknown {', '.join(unknown)}; an entry has at, step, do, worker")
    if "at" not in entry and "step" not in entry:
        raise OutlastError("say when: `at: 20s` or `step: 40`")
    worker, step = entry.get("worker", "random"), entry.get("step")
    if wrong := [key for key in ("at", "step", "do", "worker") if isinstance(entry.get(key), list | dict)]:
        raise OutlastError(f"{wrong[0]} is a list or a mapping; expected one value")
    if worker != "random" and not is_count(worker):
        raise OutlastError(f"worker is {worker!r}; expected the index of a worker, or random")
    if step is not None and not is_count(step):
        raise OutlastError(f"step is {step!r}; expected a number of steps")
    return Fault(
        do=check(str(entry["do"])),
        worker=None if worker == "random" else worker,
        at=every(str(entry["at"])) if "at" in entry else None,
        step=step,
    )


def every(text: str) -> timedelta:
    """Parse a duration such as `15s` or `2m`. Raises OutlastError."""
    try:
        return units.duration(text)
    except ValueError as error:
        raise OutlastError(f"{text} {error}") from error


def seed(faults: Sequence[Fault]) -> random.Random:
    """Return a random generator seeded with a text that describes the schedule. The text stays the same if a class is renamed."""
    texts = [f"Strike(do={fault.do!r}, worker={fault.worker!r}, at={fault.at!r}, step={fault.step!r})" for fault in faults]
    return random.Random(f"({', '.join(texts)}{',' if len(texts) == 1 else ''})")


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
