"""What clouds announce about a machine, as notices: a kind, a deadline, a reason. Pure.

    read = aws_spot(text, now)                 parsers: one for each document of a metadata service
    known = merged(known, read, now)           duplicates dropped, withdrawn notices taken back
    notice = due(known, now, ahead_s=900)      the one to act on: the earliest deadline

Times are seconds since the epoch. Documents:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/viewing_scheduled_events.html
https://cloud.google.com/compute/docs/instances/preemptible
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from outlast.contract import LeavingKind

AWS_SPOT_S, AZURE_SPOT_S = 120.0, 30.0
"""Seconds that a cloud gives a spot machine, where its notice carries no time."""
GCP_SPOT_S = 15.0
"""The same of Google, which gives 30: the kubelets of GKE end ordinary pods after half of them.
https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms"""
GCP_MAINTENANCE_S = 60.0
"""The same for a machine of Google's that cannot be migrated; with GPUs it is an hour, which the notice does not say."""
SURVIVED_S = 60.0
"""A machine that still runs so long after its deadline has survived it: stopped and started again, for example."""
_FINAL = (LeavingKind.SPOT, LeavingKind.TERMINATING)
"""Kinds that no cloud withdraws: an answer without the notice is a mistake, as long as the deadline has not passed."""
_ACTIONS = {"terminate": "terminates", "stop": "stops", "hibernate": "hibernates"}
_AZURE = {
    "Preempt": (LeavingKind.SPOT, "takes this spot machine back"),
    "Terminate": (LeavingKind.TERMINATING, "deletes this machine"),
    "Reboot": (LeavingKind.MAINTENANCE, "reboots this machine"),
    "Redeploy": (LeavingKind.MAINTENANCE, "moves this machine to other hardware"),
}
"""Event types that end what runs; `Freeze` only pauses it for some seconds."""


@dataclass(frozen=True)
class Notice:
    """One announcement."""

    kind: LeavingKind
    deadline: float | None
    """When the machine may be gone; None: the cloud sets no time."""
    reason: str
    """One sentence."""
    id: str = ""
    """The same in two answers about the same event."""
    alone: bool = False
    """Whether the event may be acknowledged: it is about this machine alone."""


# Of AWS


def aws_spot(text: str, now: float) -> Notice:
    """`spot/instance-action`: `{"action": "terminate", "time": "2026-01-01T00:02:00Z"}`.

    A document that cannot be read still means that the machine goes, within two minutes.
    """
    found = _document(text)
    fields = found if isinstance(found, dict) else {}
    action, at = str(fields.get("action", "")), time(fields.get("time"))
    does = _ACTIONS.get(action, "takes back")
    deadline = now + AWS_SPOT_S if at is None else at
    return Notice(LeavingKind.SPOT, deadline, f"AWS {does} this spot machine", f"spot {action} {fields.get('time', '')}")


def aws_rebalance(text: str, now: float) -> Notice:
    """`events/recommendations/rebalance`: `{"noticeTime": "2026-01-01T00:00:00Z"}`."""
    return Notice(LeavingKind.REBALANCE, None, "AWS recommends to leave this spot machine: it may soon take it back", "rebalance")


def aws_scheduled(text: str, now: float) -> list[Notice]:
    """`events/maintenance/scheduled`: a list; each has a code, a window, and a state. Raises ValueError for anything else."""
    found = _document(text) if text.strip() else []
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise ValueError("it is no list of events")
    read = []
    for event in found:
        at = time(event.get("NotBefore"))
        if event.get("State", "active") == "active" and not str(event.get("Description", "")).startswith("["):  # [Canceled]
            code = event.get("Code", "maintenance")
            reason = f"AWS has scheduled {code} for this machine: {event.get('Description') or 'it does not say why'}"
            id_ = f"{event.get('EventId', '')} {event.get('NotBefore', '')}"
            read.append(Notice(LeavingKind.MAINTENANCE, now if at is None else at, reason, id_))
    return read


# Of Google


def gcp_preempted(text: str, now: float) -> list[Notice]:
    """`instance/preempted`: `TRUE` from the moment at which its seconds begin."""
    if text.strip().upper() != "TRUE":
        return []
    return [Notice(LeavingKind.SPOT, now + GCP_SPOT_S, "Google takes this spot machine back", "preempted")]


def gcp_maintenance(text: str, now: float) -> list[Notice]:
    """`instance/maintenance-event`: `NONE`, `MIGRATE_ON_HOST_MAINTENANCE` (only a pause) or `TERMINATE_ON_HOST_MAINTENANCE`."""
    if text.strip().upper() != "TERMINATE_ON_HOST_MAINTENANCE":
        return []
    reason = "Google stops this machine for maintenance of its host"
    return [Notice(LeavingKind.MAINTENANCE, now + GCP_MAINTENANCE_S, reason, "maintenance-event")]


# Of Azure


def azure_events(text: str, now: float, machine: str) -> list[Notice]:
    """`scheduledevents`: events of a whole group of machines. Raises ValueError for a document without them."""
    found = _document(text)
    events = found.get("Events") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("it has no list of Events")
    read = []
    for event in events:
        machines = event.get("Resources") or []
        if machine not in machines or event.get("EventType") not in _AZURE:
            continue
        kind, does = _AZURE[event["EventType"]]
        at = time(event.get("NotBefore"))  # empty as soon as it has begun
        least = AZURE_SPOT_S if kind is LeavingKind.SPOT else 0.0
        said = f": {event['Description']}" if event.get("Description") else ""
        read.append(
            Notice(
                kind, now + least if at is None else at, f"Azure {does}{said}", str(event.get("EventId")), machines == [machine]
            )
        )
    return read


# Of any other address


def from_address(text: str, now: float) -> Notice:
    """An answer of an address of one's own: a time, `{"time": ...}`, or anything else for a notice without a deadline."""
    at = time(text)
    if at is None:
        found = _document(text)
        at = time(found.get("time")) if isinstance(found, dict) else None
    return Notice(LeavingKind.SPOT, at, "a notice says that this machine is taken back", "address")


# Together


def merged(known: Sequence[Notice], read: Iterable[Notice], now: float) -> tuple[Notice, ...]:
    """The notices that hold after another answer. Each event once, with the earliest deadline that was given for it: some count
    from the moment of the question."""
    held = {each.id: each for each in known}
    found: dict[str, Notice] = {}
    for each in read:
        times = [
            at.deadline for at in (each, held.get(each.id), found.get(each.id)) if at is not None and at.deadline is not None
        ]
        found[each.id] = dataclasses.replace(each, deadline=min(times, default=None))
    for each in known:
        final = each.kind in _FINAL and each.deadline is not None and now < each.deadline + SURVIVED_S
        if final and each.id not in found:
            found[each.id] = each
    return tuple(found.values())


def due(known: Iterable[Notice], now: float, *, ahead_s: float) -> Notice | None:
    """The notice to act on: of those whose deadline is at most `ahead_s` away, or that have none, the one with the earliest."""
    near = [each for each in known if each.deadline is None or each.deadline - now <= ahead_s]
    return min(near, key=lambda each: (math.inf if each.deadline is None else each.deadline, each.kind, each.id), default=None)


def utc(at: float) -> str:
    """A time as RFC 3339 in UTC, whole seconds: `2026-01-01T00:02:00Z`; a deadline is not moved to later."""
    return datetime.fromtimestamp(math.floor(at), UTC).isoformat().replace("+00:00", "Z")


def _document(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def time(text: object) -> float | None:
    """Seconds since the epoch of `2026-01-01T00:02:00Z` or `Mon, 19 Sep 2016 18:29:47 GMT`; None for anything else."""
    said = str(text or "").strip()
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            found = parse(said)
        except ValueError:
            continue
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None


def against(deadline: float | None, now: float) -> str:
    """How a time lies against a deadline, as the end of a sentence; nothing where there is none."""
    if deadline is None:
        return ""
    left_s = deadline - now
    return f", {abs(left_s):.0f} s {'before' if left_s >= 0 else 'after'} its deadline"
