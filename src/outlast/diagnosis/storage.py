"""Claims, Secrets and ConfigMaps that a pod waits for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.diagnosis import scheduling
from outlast.diagnosis.cause import Cause, grouped, joined, verb, workers_text
from outlast.diagnosis.snapshot import Snapshot, event_text
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document

_DEFAULT = "storageclass.kubernetes.io/is-default-class"


def claims(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Claims without a volume, or missing ones, that pods wait for."""
    known = {kube_pods.name(claim): claim for claim in snapshot.claims}
    pods = [pod for pod in snapshot.pods if kube_pods.phase(pod) == "Pending"]
    waiting = grouped((name, pod) for pod in pods for name in claimed(pod))
    for name, group in waiting.items():
        claim = known.get(name)
        whom = f"{workers_text(group)} {verb(group, 'waits', 'wait')}"
        if claim is None:
            if "persistentvolumeclaims" not in snapshot.unseen:
                yield _absent(snapshot, name, whom)
        elif claim.get("status", {}).get("phase") != "Bound":
            yield _unbound(snapshot, claim, whom)
    for pod in snapshot.waiting():
        for _count, text in scheduling.parts(scheduling.refusal(snapshot, pod)):
            if cause := _elsewhere(pod, text):
                yield cause


def claimed(pod: Document) -> list[str]:
    """Names of the claims that a pod uses."""
    volumes = pod["spec"].get("volumes", [])
    made = [f"{kube_pods.name(pod)}-{volume['name']}" for volume in volumes if "ephemeral" in volume]
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume] + made


def _absent(snapshot: Snapshot, name: str, whom: str) -> Cause:
    there = sorted(map(kube_pods.name, snapshot.claims))
    has = f"there are: {joined(there)}" if there else "the namespace has no claims"
    return Cause(
        "claim-missing",
        f"{whom} for the claim {name}, which does not exist in namespace {snapshot.namespace}",
        (has,),
        "correct `claim` under volumes, give it a `size` so that it is created, or create the PersistentVolumeClaim",
    )


def _unbound(snapshot: Snapshot, claim: Document, whom: str) -> Cause:
    name, wanted = kube_pods.name(claim), claim["spec"].get("storageClassName")
    events = [event_text(event) for event in snapshot.about({**claim, "kind": "PersistentVolumeClaim"})[-2:]]
    classes = {kube_pods.name(each): each for each in snapshot.classes}
    offered = f"the cluster's storage classes: {joined(sorted(classes)) or 'none'}"
    what = f"{whom} for the claim {name}, which has no volume"
    if claim.get("status", {}).get("phase") == "Lost":
        what = f"{whom} for the claim {name}, whose volume is gone"
        return Cause("claim-lost", what, tuple(events), "restore the volume or make a new claim")
    unseen = "storageclasses.storage.k8s.io" in snapshot.unseen
    unset = any("no storage class is set" in event for event in events)
    if wanted is None and (unset if unseen else not any(_is_default(each) for each in classes.values())):
        remedy = "set storageClass to one of the cluster's, make one the default, or make a PersistentVolume for it"
        said = (offered, *events) if not unseen else tuple(events)
        return Cause("claim-class", f"{what}: it names no storage class, and the cluster has no default one", said, remedy)
    if wanted and wanted not in classes and not unseen:
        remedy = "correct storageClass, or install the class (delete the claim first: its class cannot be changed)"
        return Cause("claim-class", f"{what}: there is no storage class {wanted}", (offered, *events), remedy)
    chosen = classes.get(wanted or next((each for each, its in classes.items() if _is_default(its)), ""), {})
    if any(event.startswith("ProvisioningFailed") for event in events):
        provisioner = chosen.get("provisioner", "the provisioner")
        remedy = f"see what {provisioner} says, or choose another class"
        return Cause("claim-failed", f"{what}: {provisioner} cannot make one", tuple(events), remedy)
    if chosen.get("volumeBindingMode") == "WaitForFirstConsumer":
        remedy = "see why its pod finds no node; if no other cause is given here, look at the provisioner's pods"
        return Cause("claim-waits", f"{what}: it is created when a pod that uses it has a node", tuple(events), remedy)
    provisioner = chosen.get("provisioner", "a provisioner")
    return Cause("claim-pending", f"{what} yet", tuple(events), f"wait; if it stays so, see whether {provisioner} runs")


def _is_default(storage_class: Document) -> bool:
    return bool(storage_class["metadata"].get("annotations", {}).get(_DEFAULT) == "true")


def _elsewhere(pod: Document, text: str) -> Cause | None:
    """The volume exists where the pod cannot run."""
    whom = f"{workers_text([pod])} {verb([pod], 'finds', 'find')} no node"
    if (
        "volume node affinity conflict" in text or "match PersistentVolume's node affinity" in text
    ):  # newer schedulers say the latter
        remedy = "use a class with volumeBindingMode WaitForFirstConsumer, or a nodeSelector for the volume's zone"
        what = f"{whom}: its volume is in another zone or on another machine than the free nodes"
        return Cause("volume-elsewhere", what, (text,), remedy)
    if "max volume count" in text:
        remedy = "add nodes, or use fewer volumes a pod"
        return Cause("volume-count", f"{whom}: nodes have as many volumes as they can", (text,), remedy)
    return None


# Secrets, ConfigMaps and mounts

_MISSING = re.compile(r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found')
_KEY = re.compile(r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) [^/]*/(?P<name>\S+)")
_PLURAL = {"secret": "Secret", "configmap": "ConfigMap"}


def _messages(snapshot: Snapshot, pod: Document) -> Iterator[str]:
    for _reason, message in kube_pods.waiting(pod):
        yield message
    if kube_pods.phase(pod) == "Pending":
        for event in snapshot.about(pod, "FailedMount", "FailedAttachVolume", "Failed"):
            yield str(event.get("message", ""))


def references(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Secrets and ConfigMaps, or keys in them, that do not exist."""
    found: list[tuple[tuple[str, str, str], Document]] = []
    for pod in snapshot.pods:
        for message in _messages(snapshot, pod):
            if absent := _MISSING.search(message):
                found.append(((absent["kind"], absent["name"], ""), pod))
            elif absent := _KEY.search(message):
                found.append(((absent["kind"].lower(), absent["name"], absent["key"]), pod))
    for kind, name, key in dict.fromkeys(each for each, _ in found):
        pods = [pod for pod in snapshot.pods if ((kind, name, key), pod) in found]
        whom = f"{workers_text(pods)} {verb(pods, 'waits', 'wait')}"
        word = _PLURAL[kind]
        if key:
            remedy = f"add the key to it, or correct the name of the key (kubectl describe {kind} {name} -n {snapshot.namespace})"
            yield Cause(f"{kind}-missing", f"{whom} for the key {key} of the {word} {name}, which has none", (), remedy)
            continue
        there = sorted(snapshot.secrets if kind == "secret" else snapshot.configs)
        has = (f"there are: {joined(there)}",) if there else ()
        if kind == "secret":
            made = f"kubectl create secret generic {name} -n {snapshot.namespace} --from-literal=KEY=VALUE"
            remedy = f"make it ({made}) or correct `secrets`"
        else:
            remedy = f"make it (kubectl create configmap {name} -n {snapshot.namespace} --from-file=FILE) or correct the template"
        what = f"{whom} for the {word} {name}, which does not exist in namespace {snapshot.namespace}"
        yield Cause(f"{kind}-missing", what, has, remedy)


def mounts(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Volumes that exist but cannot be mounted."""
    for pod in snapshot.pods:
        if kube_pods.phase(pod) != "Pending":
            continue
        events = snapshot.about(pod, "FailedMount", "FailedAttachVolume")
        if events and not _MISSING.search(message := str(events[-1].get("message", ""))):
            held = "a volume cannot be mounted"
            remedy = "fix what the message names: the driver on that node, the server of the volume, or the rights"
            if "Multi-Attach" in message:
                held = "another node still has the volume"
                remedy = "wait until the other pod is gone, or use a class with ReadWriteMany"
            whom = f"{workers_text([pod])} {verb([pod], 'waits', 'wait')}"
            yield Cause("mount", f"{whom} on {pod['spec'].get('nodeName')}: {held}", (event_text(events[-1]),), remedy)
