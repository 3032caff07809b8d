"""Notices from AWS about a machine, and how they are written on its node. Pure; times are whole seconds since the epoch.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/viewing_scheduled_events.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from outlast.job.contract import LEAVING, Annotation, LeavingKind

SPOT_S = 120.0
"""Time from an interruption notice to the machine's end, used if the notice cannot be read."""
AHEAD_S = 900.0
"""Time before the start of maintenance at which the watcher acts; AWS announces maintenance days in advance."""
SURVIVED_S = 60.0
"""Time after the deadline when a machine that still runs counts as having survived, for example a stop and a start."""
_ACTIONS = {"terminate": "terminates", "stop": "stops", "hibernate": "hibernates"}


@dataclass(frozen=True)
class Notice:
    """A notice that AWS will or may take a machine away: an interruption, a rebalance recommendation or maintenance."""

    kind: LeavingKind
    deadline: float | None
    """Time when the machine may be gone; None if AWS sets no time."""
    reason: str


REBALANCE = Notice(LeavingKind.REBALANCE, None, "AWS recommends to leave this spot machine: it may soon take it back")


def spot(text: str, now: float) -> Notice:
    """The notice in `spot/instance-action`: `{"action": "terminate", "time": "2026-01-01T00:02:00Z"}`. A notice that cannot be
    read still counts."""
    try:
        fields = dict(json.loads(text))
    except (ValueError, TypeError):
        fields = {}
    at, does = time(fields.get("time")), _ACTIONS.get(str(fields.get("action")), "takes back")
    return Notice(LeavingKind.SPOT, math.floor(now + SPOT_S) if at is None else at, f"AWS {does} this spot machine")


def scheduled(text: str, now: float) -> list[Notice]:
    """The notices in `events/maintenance/scheduled`: a list of events with a code, a window and a state. Raises ValueError for
    any other text.

    The deadline of maintenance that has begun is the end of its window; once that has passed, there is no deadline.
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise ValueError("they are no list of events")
    events = []
    for event in found:
        about = str(event.get("Description") or "it does not say why")
        if event.get("State", "active") == "active" and not about.startswith("["):  # [Canceled] or [Completed]
            times = (time(event.get("NotBefore")), time(event.get("NotAfter")))
            reason = f"AWS has scheduled {event.get('Code', 'maintenance')} for this machine: {about}"
            events.append(Notice(LeavingKind.MAINTENANCE, next((at for at in times if at and at > now), None), reason))
    return events


def due(current: Sequence[Notice], written: Notice | None, now: float) -> Notice | None:
    """The notice to act on: the one with the earliest deadline among AWS's current notices and the notice written on the node.
    AWS may withdraw a recommendation or maintenance, but never an interruption: if an answer lacks a known interruption, this
    counts as a mistake until SURVIVED_S after the deadline."""
    near = [each for each in current if each.deadline is None or each.deadline - now <= AHEAD_S]
    if written and written.kind is LeavingKind.SPOT and written.deadline is not None and now < written.deadline + SURVIVED_S:
        near.append(written)
    return min(near, key=lambda each: math.inf if each.deadline is None else each.deadline, default=None)


def marked(node: Mapping[str, Any], notice: Notice | None) -> dict[str, Any]:
    """The patch that writes this notice on a node, or removes it. Other taints stay, and so does a cordon that the watcher has
    not made."""
    meta, spec = node["metadata"], node["spec"]
    taints = [each for each in spec.get("taints") or () if each["key"] != LEAVING]
    change: dict[str, Any] = {"taints": taints or None}
    annotations: dict[str, Any] = dict.fromkeys((Annotation.LEAVING_AT, Annotation.LEAVING_REASON))
    if notice is not None:
        taint = {"key": LEAVING, "value": notice.kind.value, "effect": "NoSchedule"}
        change = {"taints": [*taints, taint], "unschedulable": True}
        at = None if notice.deadline is None else utc(notice.deadline)
        annotations = {Annotation.LEAVING_AT: at, Annotation.LEAVING_REASON: notice.reason}
        annotations |= {} if spec.get("unschedulable") else {Annotation.CORDONED: "true"}
    elif Annotation.CORDONED in (meta.get("annotations") or {}):
        change["unschedulable"] = annotations[Annotation.CORDONED] = None
    return {"metadata": {"resourceVersion": meta["resourceVersion"], "annotations": annotations}, "spec": change}


def read(node: Mapping[str, Any]) -> Notice | None:
    """The notice that a watcher has written on a node; None if there is none. A taint without a reason belongs to somebody else,
    and stays."""
    taint = next((each for each in node["spec"].get("taints") or () if each["key"] == LEAVING), None)
    said = node["metadata"].get("annotations") or {}
    if taint is None or Annotation.LEAVING_REASON not in said:
        return None
    return Notice(LeavingKind(taint.get("value", "")), time(said.get(Annotation.LEAVING_AT)), said[Annotation.LEAVING_REASON])


def utc(at: float) -> str:
    """A time as RFC 3339 in UTC: `2026-01-01T00:02:00Z`."""
    return datetime.fromtimestamp(math.floor(at), UTC).isoformat().replace("+00:00", "Z")


def time(text: object) -> float | None:
    """Seconds since the epoch of `2026-01-01T00:02:00Z` or `19 Sep 2016 18:29:47 GMT`; None for any other text."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            found = parse(str(text).strip())
        except ValueError:
            continue
        return math.floor((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
    return None
