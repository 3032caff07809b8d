"""Rules about claims, Secrets and ConfigMaps that a pod waits for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.job.contract import Env
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, per_pod
from outlast.kubernetes.diagnosis.finding import Finding, joined
from outlast.kubernetes.manifests import names
from outlast.kubernetes.manifests.render_request import Document


@per_pod
def claims(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find missing or unbound claims for which pods wait."""
    by_name = {pod_status.name(claim): claim for claim in snapshot.claims}
    for name in claimed(pod) if pod_status.phase(pod) == "Pending" else ():
        claim = by_name.get(name)
        phase = claim.get("status", {}).get("phase") if claim else ""
        if claim is not None and phase != "Bound":
            events = tuple(map(event_text, snapshot.events_about({**claim, "kind": "PersistentVolumeClaim"})[-2:]))
            yield messages.meaning("claims", "; ".join([f"{phase}", *events]), events, claim=name)
        elif claim is None and "persistentvolumeclaims" not in snapshot.forbidden:
            evidence = f"there are: {joined(sorted(by_name))}" if by_name else "the namespace has no claims"
            remedy = "correct `claim` under volumes, give it a `size` so that it is created, or create the PersistentVolumeClaim"
            what = f"waits for the claim {name}, which does not exist in namespace {snapshot.namespace}"
            yield Finding("claim-missing", what, remedy, (evidence,))


def claimed(pod: Document) -> list[str]:
    volumes = pod["spec"].get("volumes", [])
    ephemeral = [f"{pod_status.name(pod)}-{volume['name']}" for volume in volumes if "ephemeral" in volume]
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume] + ephemeral


# Secrets, ConfigMaps and mounts

_MISSING = re.compile(
    r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found'
    r"|couldn't find key (?P<key>\S+) in (?P<of>Secret|ConfigMap) [^/]*/(?P<its>\S+)"
)
_KINDS = {
    "secret": ("Secret", "secret generic", "--from-literal=KEY=VALUE", "`secrets`"),
    "configmap": ("ConfigMap", "configmap", "--from-file=FILE", "the template"),
}
"""The kind's name, kubectl's words to create one, and where the job names it."""


def missing(message: str) -> tuple[str, str, str] | None:
    """Return the kind, name and key of what a kubelet's message reports missing, or None for any other message. The key is empty
    if a whole Secret or ConfigMap is missing."""
    if (match := _MISSING.search(message)) is None:
        return None
    return (match["kind"] or match["of"]).lower(), match["name"] or match["its"], match["key"] or ""


def _waiting_messages(snapshot: Snapshot, pod: Document) -> Iterator[str]:
    for _reason, message in pod_status.waiting_states(pod):
        yield message
    if pod_status.phase(pod) == "Pending":
        for event in snapshot.events_about(pod, "FailedMount", "FailedAttachVolume", "Failed"):
            yield str(event.get("message", ""))


@per_pod
def references(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find missing Secrets and ConfigMaps, and missing keys in them."""
    for kind, name, key in dict.fromkeys(filter(None, map(missing, _waiting_messages(snapshot, pod)))):
        kind_name, create, content, field = _KINDS[kind]
        if key:
            remedy = f"add the key to it, or correct its name (kubectl describe {kind} {name} -n {snapshot.namespace})"
            yield Finding(f"{kind}-missing", f"waits for the key {key} of the {kind_name} {name}, which has none", remedy)
            continue
        others = sorted(snapshot.secrets if kind == "secret" else snapshot.config_maps)
        evidence = (f"there are: {joined(others)}",) if others else ()
        remedy = f"make it (kubectl create {create} {name} -n {snapshot.namespace} {content}) or correct {field}"
        peers = [pod_status.name(each) for each in snapshot.pods if pod_status.phase(each) == "Running"]
        if name == names.Names(snapshot.name).service and peers:
            key_there = f"kubectl exec -n {snapshot.namespace} {peers[0]} -- printenv {Env.RENDEZVOUS_KEY}"
            remedy = f"give it the key of the other workers again (kubectl create {create} {name} -n {snapshot.namespace} "
            remedy += f'--from-literal=key="$({key_there})")'
        if kind == "configmap" and name.startswith(f"{snapshot.name}-code-"):
            remedy = "bring the code, which is deleted with its job: outlast submit FILE"
        what = f"waits for the {kind_name} {name}, which does not exist in namespace {snapshot.namespace}"
        yield Finding(f"{kind}-missing", what, remedy, evidence)


@per_pod
def mounts(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find volumes that exist but cannot be mounted."""
    events = snapshot.events_about(pod, "FailedMount", "FailedAttachVolume") if pod_status.phase(pod) == "Pending" else []
    for event in events[-1:]:
        if not missing(message := str(event.get("message", ""))):
            yield messages.meaning("mounts", message, (event_text(event),), node=pod["spec"].get("nodeName"))
