"""Claims, Secrets and ConfigMaps for which a pod waits, and the default storage class."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, of_pods
from outlast.kubernetes.diagnosis.finding import Finding, joined
from outlast.kubernetes.manifests.render_request import Document


def default_class(snapshot: Snapshot) -> str:
    """The storage class of a claim that names none; empty if there is no default."""
    key = "storageclass.kubernetes.io/is-default-class"
    annotated = [each for each in snapshot.classes if (each["metadata"].get("annotations") or {}).get(key) == "true"]
    return pod_status.name(annotated[0]) if annotated else ""


@of_pods
def claims(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Claims for which pods wait because they are missing or have no volume."""
    known = {pod_status.name(claim): claim for claim in snapshot.claims}
    for name in claimed(pod) if pod_status.phase(pod) == "Pending" else ():
        claim, what = known.get(name), f"waits for the claim {name}"
        if claim is not None and claim.get("status", {}).get("phase") != "Bound":
            yield _unbound(snapshot, claim, what)
        elif claim is None and "persistentvolumeclaims" not in snapshot.unseen:
            has = f"there are: {joined(sorted(known))}" if known else "the namespace has no claims"
            remedy = "correct `claim` under volumes, give it a `size` so that it is created, or create the PersistentVolumeClaim"
            yield Finding("claim-missing", f"{what}, which does not exist in namespace {snapshot.namespace}", remedy, (has,))


def claimed(pod: Document) -> list[str]:
    """Names of the claims that a pod uses."""
    volumes = pod["spec"].get("volumes", [])
    made = [f"{pod_status.name(pod)}-{volume['name']}" for volume in volumes if "ephemeral" in volume]
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume] + made


def _unbound(snapshot: Snapshot, claim: Document, waits: str) -> Finding:
    wanted, what = claim["spec"].get("storageClassName"), f"{waits}, which has no volume"
    events = tuple(event_text(event) for event in snapshot.about({**claim, "kind": "PersistentVolumeClaim"})[-2:])
    classes = {pod_status.name(each): each for each in snapshot.classes}
    unseen = "storageclasses.storage.k8s.io" in snapshot.unseen
    said = events if unseen else (f"the cluster's storage classes: {joined(sorted(classes)) or 'none'}", *events)
    default = default_class(snapshot)
    chosen = classes.get(wanted or default, {})
    provisioner = chosen.get("provisioner", "the provisioner")
    if claim.get("status", {}).get("phase") == "Lost":
        return Finding("claim-lost", f"{waits}, whose volume is gone", "restore the volume or make a new claim", events)
    if wanted is None and (any("no storage class is set" in event for event in events) if unseen else not default):
        remedy = "set storageClass to one of the cluster's, make one the default, or make a PersistentVolume for it"
        return Finding("claim-class", f"{what}: it names no storage class, and the cluster has no default one", remedy, said)
    if wanted and wanted not in classes and not unseen:
        remedy = "correct storageClass, or install the class (delete the claim first: its class cannot be changed)"
        return Finding("claim-class", f"{what}: there is no storage class {wanted}", remedy, said)
    if any(event.startswith("ProvisioningFailed") for event in events):
        remedy = f"see what {provisioner} says, or choose another class"
        return Finding("claim-failed", f"{what}: {provisioner} cannot make one", remedy, events)
    if chosen.get("volumeBindingMode") == "WaitForFirstConsumer":
        remedy = "see why its pod finds no node; if no other cause is given here, look at the provisioner's pods"
        return Finding("claim-waits", f"{what}: it is created when a pod that uses it has a node", remedy, events)
    return Finding("claim-pending", f"{what} yet", f"wait; if it stays so, see whether {provisioner} runs", events)


# Secrets, ConfigMaps and mounts

_MISSING = re.compile(
    r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found'
    r"|couldn't find key (?P<key>\S+) in (?P<of>Secret|ConfigMap) [^/]*/(?P<its>\S+)"
)
_WORDS = {"secret": "Secret", "configmap": "ConfigMap"}


def missing(message: str) -> tuple[str, str, str] | None:
    """Kind, name and key of a missing Secret or ConfigMap, according to a kubelet's message; the key is empty if the whole object
    is missing. None if the message is about something else."""
    if (found := _MISSING.search(message)) is None:
        return None
    return (found["kind"] or found["of"]).lower(), found["name"] or found["its"], found["key"] or ""


def _messages(snapshot: Snapshot, pod: Document) -> Iterator[str]:
    for _reason, message in pod_status.waiting_states(pod):
        yield message
    if pod_status.phase(pod) == "Pending":
        for event in snapshot.about(pod, "FailedMount", "FailedAttachVolume", "Failed"):
            yield str(event.get("message", ""))


@of_pods
def references(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Secrets and ConfigMaps, or keys in them, that do not exist."""
    for kind, name, key in dict.fromkeys(filter(None, map(missing, _messages(snapshot, pod)))):
        word, where = _WORDS[kind], f"-n {snapshot.namespace}"
        if key:
            remedy = f"add the key to it, or correct the name of the key (kubectl describe {kind} {name} {where})"
            yield Finding(f"{kind}-missing", f"waits for the key {key} of the {word} {name}, which has none", remedy)
            continue
        there = sorted(snapshot.secrets if kind == "secret" else snapshot.configs)
        has = (f"there are: {joined(there)}",) if there else ()
        remedy = f"make it (kubectl create configmap {name} {where} --from-file=FILE) or correct the template"
        if kind == "secret":
            remedy = f"make it (kubectl create secret generic {name} {where} --from-literal=KEY=VALUE) or correct `secrets`"
        what = f"waits for the {word} {name}, which does not exist in namespace {snapshot.namespace}"
        yield Finding(f"{kind}-missing", what, remedy, has)


@of_pods
def mounts(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Volumes that exist but cannot be mounted."""
    events = snapshot.about(pod, "FailedMount", "FailedAttachVolume") if pod_status.phase(pod) == "Pending" else []
    for event in events[-1:]:
        if not missing(message := str(event.get("message", ""))):
            yield messages.meaning("mounts", message, (event_text(event),), node=pod["spec"].get("nodeName"))
