"""AWS's notices about a machine, and how they are recorded on its node. Pure. Times are in whole seconds since the epoch.

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
from outlast.kubernetes.api import pod_status

SPOT_S = 120.0
"""Assumed time between an interruption notice and the machine's end if the notice cannot be parsed, in seconds."""
MAINTENANCE_LEAD_S = 900.0
"""How long before maintenance the watcher acts, in seconds. AWS announces maintenance days in advance."""
SURVIVED_S = 60.0
"""How long after the deadline a machine must still run to count as having survived, in seconds."""
_ACTIONS = {"terminate": "terminates", "stop": "stops", "hibernate": "hibernates"}


@dataclass(frozen=True)
class Notice:
    """AWS's notice that it will or may take a machine away."""

    kind: LeavingKind
    deadline: float | None
    """When AWS may take the machine; None if AWS sets no time."""
    reason: str


REBALANCE = Notice(LeavingKind.REBALANCE, None, "AWS recommends to leave this spot machine: it may soon take it back")


def spot(text: str, now: float) -> Notice:
    """Parse the metadata item `spot/instance-action`, such as `{"action": "terminate", "time": "2026-01-01T00:02:00Z"}`. Text
    that cannot be parsed still counts as a notice."""
    try:
        fields = dict(json.loads(text))
    except (ValueError, TypeError):
        fields = {}
    deadline, verb = timestamp(fields.get("time")), _ACTIONS.get(str(fields.get("action")), "takes back")
    return Notice(LeavingKind.SPOT, math.floor(now + SPOT_S) if deadline is None else deadline, f"AWS {verb} this spot machine")


def scheduled(text: str, now: float) -> list[Notice]:
    """Parse the metadata item `events/maintenance/scheduled`. A notice's deadline is the start of the maintenance window, or its
    end once the window has begun, or None once the window is over. Raises ValueError."""
    parsed = json.loads(text)
    if not isinstance(parsed, list) or not all(isinstance(event, dict) for event in parsed):
        raise ValueError("they are no list of events")
    notices = []
    for event in parsed:
        description = str(event.get("Description") or "it does not say why")
        if event.get("State", "active") == "active" and not description.startswith("["):  # [Canceled] or [Completed]
            times = (timestamp(event.get("NotBefore")), timestamp(event.get("NotAfter")))
            reason = f"AWS has scheduled {event.get('Code', 'maintenance')} for this machine: {description}"
            notices.append(Notice(LeavingKind.MAINTENANCE, next((at for at in times if at and at > now), None), reason))
    return notices


def effective(current: Sequence[Notice], recorded: Notice | None, now: float) -> Notice | None:
    """Return the notice with the earliest deadline among the current ones and the recorded one. AWS never withdraws an
    interruption, so a recorded interruption counts until SURVIVED_S after its deadline, even if it is missing from the current
    notices."""
    candidates = [each for each in current if each.deadline is None or each.deadline - now <= MAINTENANCE_LEAD_S]
    if recorded and recorded.kind is LeavingKind.SPOT and recorded.deadline is not None and now < recorded.deadline + SURVIVED_S:
        candidates.append(recorded)
    return min(candidates, key=lambda each: math.inf if each.deadline is None else each.deadline, default=None)


def node_patch(node: Mapping[str, Any], notice: Notice | None) -> dict[str, Any]:
    """Return the patch that records this notice on a node, or removes the recorded notice if `notice` is None. Other taints and
    cordons stay."""
    meta, spec = node["metadata"], node["spec"]
    taints = [each for each in spec.get("taints") or () if each["key"] != LEAVING]
    spec_patch: dict[str, Any] = {"taints": taints or None}
    annotations: dict[str, Any] = dict.fromkeys((Annotation.LEAVING_AT, Annotation.LEAVING_REASON))
    if notice is not None:
        taint = {"key": LEAVING, "value": notice.kind.value, "effect": "NoSchedule"}
        spec_patch = {"taints": [*taints, taint], "unschedulable": True}
        at = None if notice.deadline is None else pod_status.rfc3339(notice.deadline)
        annotations = {Annotation.LEAVING_AT: at, Annotation.LEAVING_REASON: notice.reason}
        annotations |= {} if spec.get("unschedulable") else {Annotation.CORDONED: "true"}
    elif Annotation.CORDONED in (meta.get("annotations") or {}):
        spec_patch["unschedulable"] = annotations[Annotation.CORDONED] = None
    return {"metadata": {"resourceVersion": meta["resourceVersion"], "annotations": annotations}, "spec": spec_patch}


def read(node: Mapping[str, Any]) -> Notice | None:
    """Return the notice that a watcher has recorded on a node, or None. A taint without a recorded reason is ignored, because it
    was not set by a watcher."""
    taint = next((each for each in node["spec"].get("taints") or () if each["key"] == LEAVING), None)
    annotations = node["metadata"].get("annotations") or {}
    if taint is None or Annotation.LEAVING_REASON not in annotations:
        return None
    return Notice(
        LeavingKind(taint.get("value", "")),
        timestamp(annotations.get(Annotation.LEAVING_AT)),
        annotations[Annotation.LEAVING_REASON],
    )


def timestamp(text: object) -> float | None:
    """Parse a time such as `2026-01-01T00:02:00Z` or `19 Sep 2016 18:29:47 GMT` into seconds since the epoch; None for any other
    text."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            parsed = parse(str(text).strip())
        except ValueError:
            continue
        return math.floor((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
    return None
