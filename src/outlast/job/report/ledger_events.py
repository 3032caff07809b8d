"""Selects and orders a ledger's events for the account. Used by `report.goodput`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outlast.job.ledger import Event

_NEEDED = {
    "called": ("generation",),
    "world": ("generation",),
    "exited": ("worker", "code", "interrupted"),
    "finished": ("state",),
    "restored": ("step",),
    "step": ("step",),
    "snapshots": ("every", "bytes", "replicas", "reason"),
    "save_failed": ("step", "reason"),
    "not_copied": ("step", "reason"),
    "damaged": ("path", "reason"),
    "slow": ("rank", "reason"),
    "differs": ("step", "reason"),
    "hang": ("worker", "rank", "silent_s", "reason"),
    "unheard": ("workers", "reason"),
    "attempt": ("attempt", "reason"),
}
"""Required fields for each kind of event. An event without them comes from another program or version."""
_NUMBERS = (
    *("attempt", "bytes", "code", "copied_s", "every", "generation", "rank", "replicas", "repaired"),
    *("silent_s", "step", "steps", "waited_s", "worker"),
)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(("path", "source", "suspends"), str),
    "workers": list,
}
KINDS = frozenset(
    {
        *("submitted", "asked", "launcher", "worker", "failure", "resumed", "session", "restoring", "interrupted", "chaos"),
        *("saving", "staged", "committed", *_NEEDED),
    }
)
_REOPENS = ("submitted", "launcher", "resumed", "worker")
Timed = tuple[int, Event]
"""An event and its time in microseconds since the epoch."""


def microseconds(t: float) -> int:
    """Convert seconds to whole microseconds, the resolution of the ledger."""
    return round(t * 1e6)


def usable(event: Mapping[str, Any]) -> bool:
    """Return whether an event has a time, a known kind, and all required fields with the right types."""
    kind = event.get("kind")
    return isinstance(kind, str) and _has_fields(kind, tuple(event), tuple(map(type, event.values())))


@functools.lru_cache(1000)  # in a month there may be a million events, in few shapes
def _has_fields(kind: str, fields: tuple[str, ...], types: tuple[type, ...]) -> bool:
    given = {field: each for field, each in zip(fields, types, strict=True) if each is not type(None)}
    if kind not in KINDS or not issubclass(given.get("t", str), (int, float)):
        return False
    if not all(issubclass(each, _TYPES[field]) for field, each in given.items() if field in _TYPES):
        return False
    return all(field in given for field in _NEEDED.get(kind, ()))


def in_order(events: Iterable[Event]) -> Iterator[Timed]:
    """Yield the events for the account in chronological order. Equal events at the same instant count as one. Unless the job was
    resumed, events after `finished` are moved before `finished`, because the clock of the machine that wrote them was ahead."""
    finished: Timed | None = None
    for t, event in _once(events):
        if finished is None:
            if event["kind"] == "finished":
                finished = t, event
            else:
                yield t, event
        elif event["kind"] in _REOPENS:
            yield finished
            yield t, event
            finished = None
        elif event["kind"] != "finished":
            yield finished[0], event
    if finished is not None:
        yield finished


def _once(events: Iterable[Event]) -> Iterator[Timed]:
    for t, simultaneous in itertools.groupby(filter(usable, events), key=lambda event: microseconds(event["t"])):
        seen: list[Event] = []
        for event in simultaneous:
            if event not in seen:
                seen.append(event)
                yield t, event


@dataclasses.dataclass
class Survey:
    """Facts about all events, which the timeline needs before it processes them."""

    start: int | None = None
    """Time of the first event in microseconds since the epoch; None if there are no events."""
    last_steps: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    """When the last step of each generation and attempt ended. The world was intact until then, whatever other events say."""
    blind: bool = True
    """True if the script does not report progress."""


def survey(ordered: Iterable[Timed]) -> Survey:
    """Build a `Survey` in a first pass over all events."""
    facts, newest, announced, begun = Survey(), -1, 0, 0
    for t, event in ordered:
        facts.start = t if facts.start is None else facts.start
        kind = event["kind"]
        facts.blind = facts.blind and kind not in ("session", "step")
        if kind in ("world", "session", "step", "attempt"):
            generation = event.get("generation", max(0, newest))
            if generation > newest:
                newest, announced, begun = generation, 0, 0
            if generation < newest:
                continue
            if kind == "attempt":
                announced = max(announced, event["attempt"])
            elif kind == "session" and event.get("rank") in (0, None):
                begun = announced
            elif kind == "step":
                facts.last_steps[newest, begun] = t
    return facts
