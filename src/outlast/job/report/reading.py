"""Selects and orders the events of a ledger for the account. Used by `report.timeline`."""

from __future__ import annotations

import dataclasses
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
    "hang": ("worker", "rank", "silent_s", "reason"),
    "unheard": ("workers", "reason"),
    "attempt": ("attempt", "reason"),
}
"""Required fields of each kind of event: an event without them was written by another program, or by another version."""
_NUMBERS = (
    *("attempt", "bytes", "code", "copied_s", "every", "generation", "rank", "replicas", "repaired"),
    *("silent_s", "step", "steps", "waited_s", "worker"),
)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(("path", "source", "suspends"), str),
    "workers": list,
}
"""Types of fields, which are the same in every kind of event that has them."""
KINDS = frozenset(
    {
        *("submitted", "asked", "launcher", "worker", "failure", "resumed", "session", "restoring", "interrupted", "chaos"),
        *("saving", "staged", "committed", *_NEEDED),
    }
)
"""Kinds of events that the account is computed from."""
_REOPENS = ("submitted", "launcher", "resumed", "worker")
Timed = tuple[int, Event]
"""An event and its time in microseconds since the epoch."""


def microseconds(t: float) -> int:
    """Return the seconds as a whole number of microseconds, the resolution of the ledger."""
    return round(t * 1e6)


def usable(event: Mapping[str, Any]) -> bool:
    """Return whether an event has a time, a known kind, and the required fields with the right types."""
    kind = event.get("kind")
    known = isinstance(event.get("t"), (int, float)) and isinstance(kind, str) and kind in KINDS
    typed = all(value is None or isinstance(value, _TYPES.get(field, object)) for field, value in event.items())
    return known and typed and all(event.get(field) is not None for field in _NEEDED.get(str(kind), ()))


def in_order(events: Iterable[Event]) -> Iterator[Timed]:
    """Yield the events that the account is computed from, in the order of time and without duplicates: equal events at the same
    instant count once.

    Events that other machines' clocks date after `finished` happened before it, unless the job was resumed.
    """
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
    now, heard = None, []
    for event in events:
        if not usable(event):
            continue
        t = microseconds(event["t"])
        if t != now:
            now, heard = t, [event]
        elif event in heard:
            continue
        else:
            heard.append(event)
        yield t, event


@dataclasses.dataclass
class Survey:
    """Facts about all events that the timeline needs before its own pass over them."""

    start: int | None = None
    """Time of the first event, microseconds since the epoch; None if there is no event."""
    last_steps: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    """End of the last step of each attempt of each generation: until then its world was intact, whatever was reported."""
    blind: bool = True
    """True if the script reports no progress."""


def survey(ordered: Iterable[Timed]) -> Survey:
    """Return a first pass over all events."""
    found, newest, announced, begun = Survey(), -1, 0, 0
    for t, event in ordered:
        found.start = t if found.start is None else found.start
        kind = event["kind"]
        found.blind = found.blind and kind not in ("session", "step")
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
                found.last_steps[newest, begun] = t
    return found
