"""Why a driver of Spark has no executors: `outlast data prepare --engine spark` on Kubernetes. Spark makes their pods itself, and
writes no event when they are refused, so quotas are compared with what an executor asks for."""

from __future__ import annotations

from collections.abc import Iterator

from outlast import units
from outlast.contract import Label
from outlast.diagnosis.cause import Cause, joined
from outlast.diagnosis.snapshot import Snapshot, event_text
from outlast.kube import pods as kube_pods
from outlast.manifests import spark
from outlast.manifests.request import Document

_REMEDY = ", or ask for less (--conf spark.kubernetes.executor.request.cores=1, spark.executor.memoryOverhead=512m)"


def none(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """A driver that runs while none of its executors does."""
    role = snapshot.workload.get("metadata", {}).get("labels", {}).get(Label.SPARK_ROLE)
    if role is None or not any(kube_pods.running(pod) for pod in snapshot.pods):
        return
    alive = [pod for pod in snapshot.executors if not kube_pods.over(pod)]
    if any(kube_pods.running(pod) for pod in alive):
        return
    for pod in alive[:1]:
        reason = kube_pods.waits(pod) or "has not started yet"
        said = tuple(event_text(event) for event in snapshot.about(pod)[-1:])
        yield Cause("executors", f"none of Spark's {len(alive)} executors runs: the first {reason}", said, f"make room{_REMEDY}")
    if alive:
        return
    asks = _asks(spark.executor_of(snapshot.workload))
    for quota in snapshot.quotas:
        if short := list(_short(quota, asks)):
            what = f"Spark's driver gets no executor: the quota {kube_pods.name(quota)} leaves too little: {joined(short)}"
            yield Cause("quota", what, (), f"remove what is no longer needed, or have the quota raised{_REMEDY}")


def _asks(template: Document) -> dict[str, str]:
    """What an executor counts for, by the names that quotas use."""
    wanted = template["spec"]["containers"][0]["resources"]
    found = {"pods": "1", "count/pods": "1", **wanted["requests"]}
    for kind in ("requests", "limits"):
        found |= {f"{kind}.{name}": str(amount) for name, amount in wanted[kind].items()}
    return found


def _short(quota: Document, asks: dict[str, str]) -> Iterator[str]:
    """What of a quota is too little for one more, with the numbers."""
    status = quota.get("status", {})
    for name, hard in status.get("hard", {}).items():
        used = status.get("used", {}).get(name, "0")
        if name in asks and units.quantity(used) + units.quantity(asks[name]) > units.quantity(hard):
            yield f"{name} (an executor asks for {asks[name]}, {used} of {hard} are used)"
