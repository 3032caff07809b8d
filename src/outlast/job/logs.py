"""Lines of workers' logs, wherever a job runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from outlast.base.errors import NotFound
from outlast.job import contract


@dataclasses.dataclass(frozen=True)
class LogLine:
    """One line of a worker's log, without its newline."""

    worker: int
    text: str

    def __str__(self) -> str:
        return f"worker-{self.worker} | {self.text}"


def previous_attempt(lines: Iterable[LogLine], *, tail: int | None = None) -> list[LogLine]:
    """Return the lines of each worker's second-to-last attempt, or the last `tail` of them, in their original order. Raises
    NotFound if no worker has had two attempts."""
    last: dict[int, list[tuple[int, LogLine]]] = {}
    before: dict[int, list[tuple[int, LogLine]]] = {}
    for number, line in enumerate(lines):
        if contract.is_start_line(line.text):
            before[line.worker] = last.pop(line.worker, [])
        last.setdefault(line.worker, []).append((number, line))
    if not before:
        raise NotFound("no worker has had more than one attempt; leave out -p" if last else "there is no log yet")
    kept = (each if tail is None else each[max(0, len(each) - tail) :] for each in before.values())
    return [line for _, line in sorted(itertools.chain(*kept), key=lambda numbered: numbered[0])]
