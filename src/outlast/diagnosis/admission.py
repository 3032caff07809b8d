"""Why pods are not created: how the API server answered the controller of the Job or StatefulSet, or the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from outlast.contract import Label
from outlast.diagnosis import messages
from outlast.diagnosis.finding import Finding
from outlast.diagnosis.snapshot import Snapshot, event_text, event_time
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document


def creations(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Pods that could not be created, while there are fewer than the job asks for."""
    alive = [pod for pod in snapshot.pods if kube_pods.phase(pod) in ("Pending", "Running", "Succeeded")]
    missing, wanted = snapshot.wanted() - len(alive), snapshot.wanted()
    if missing <= 0:
        return
    one = "the worker" if Label.JOB in (snapshot.workload.get("metadata", {}).get("labels") or {}) else "it"
    some = f"{missing} of {wanted} workers" if wanted > 1 else one
    told: dict[str, Finding] = {}
    for event in sorted((each for each in snapshot.events if _failed_to_make(each, snapshot)), key=event_time, reverse=True):
        found = refusal(snapshot.namespace, event.get("message", ""))
        what = f"{some} {'have' if missing > 1 else 'has'} no pod: {found.what}"
        told.setdefault(what, replace(found, what=what, evidence=(event_text(event),)))
    yield from told.values()


def _failed_to_make(event: Document, snapshot: Snapshot) -> bool:
    """Whether it is about a pod of the workload that could not be created; ReplicaSets create those of a Deployment."""
    about, name = event.get("involvedObject", {}), kube_pods.name(snapshot.workload)
    mine = about.get("name") == name or (about.get("kind") == "ReplicaSet" and str(about.get("name")).startswith(f"{name}-"))
    return bool(event.get("reason") == "FailedCreate" and name and mine)


def refusal(namespace: str, message: str) -> Finding:
    """What a refusal of the API server means."""
    return messages.meaning("admission", message, namespace=namespace, amounts=_amounts(message))


def _amounts(message: str) -> str:
    """`pods: a pod asks for 1, 3 of 3 are used`, from `requested: pods=1, used: pods=3, limited: pods=3`."""
    if (found := re.search(r"requested: (\S+), used: (\S+), limited: (\S+)", message)) is None:
        return ""
    asked, used, limit = (dict(part.partition("=")[::2] for part in text.split(",")) for text in found.groups())
    said = (f"{name}: a pod asks for {amount}, {used.get(name)} of {limit.get(name)} are used" for name, amount in asked.items())
    return "; ".join(said)
