"""How many spot machines can be had, as time goes by: read from a file, or made by chance."""

from __future__ import annotations

import csv
import dataclasses
import random
from collections.abc import Iterator

from outlast.errors import OutlastError


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step function of time that begins again after `length_s`."""

    changes: tuple[tuple[float, int], ...]
    """(seconds since the start, machines available from then on), ascending; the first at 0."""
    length_s: float

    def forever(self) -> Iterator[tuple[float, int]]:
        """All changes from the start on, without end."""
        begun = 0.0
        while True:
            for at, available in self.changes:
                yield begun + at, available
            begun += self.length_s


def read(text: str, name: str) -> Trace:
    """A trace from CSV with the columns `seconds` and `available`; the last line says how long it lasts. `name` is that of the
    file, for errors. Raises OutlastError."""
    lines = csv.DictReader(text.splitlines())
    if not {"seconds", "available"} <= set(lines.fieldnames or ()):
        raise OutlastError(f"{name} needs a first line with the columns seconds and available, such as `seconds,available`")
    found: list[tuple[float, int]] = []
    for number, line in enumerate(lines, start=2):
        try:
            at, available = float(line["seconds"]), int(line["available"])
        except (TypeError, ValueError):
            said = f"{line['seconds']},{line['available']}"
            raise OutlastError(
                f"{name}, line {number}: {said} must be a time in seconds and a whole number of machines"
            ) from None
        if available < 0 or not at >= 0 or at == float("inf") or (found and at <= found[-1][0]):
            raise OutlastError(f"{name}, line {number}: times must grow, and neither times nor machines may be negative: {line}")
        found.append((at, available))
    if len(found) < 2:
        raise OutlastError(f"{name} needs two lines at least: the machines at the start, and when the trace ends")
    start = found[0][0]
    return Trace(tuple((at - start, available) for at, available in found[:-1]), found[-1][0] - start)


def made(machines: int, per_hour: float, away_s: float, *, length_s: float, rng: random.Random) -> Trace:
    """A trace of so many machines that are taken independently, each `per_hour` times per hour that it is there on average, and
    can be had again after `away_s` seconds on average; both exponentially distributed."""
    steps: list[tuple[float, int]] = []
    for _ in range(machines):
        at = rng.expovariate(per_hour / 3600) if per_hour else length_s
        while at < length_s:
            back = at + rng.expovariate(1 / away_s)
            steps += [(at, -1), *([(back, 1)] if back < length_s else [])]
            at = back + rng.expovariate(per_hour / 3600)
    available, changes = machines, {0.0: machines}
    for at, step in sorted(steps):
        available += step
        changes[at] = available
    return Trace(tuple(changes.items()), length_s)
