"""Checks from inside of pods: the image, DNS, the network between pods, and a store.

One or two small pods run `doctor.inspection`, as restricted as workers. They are always deleted, and end by themselves after the
time limit, also when we are killed.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from outlast import __version__, accelerators, contract, diagnosis
from outlast.accelerators import Accelerator
from outlast.contract import Pod
from outlast.diagnosis import gather
from outlast.doctor import Check, failed, warned
from outlast.doctor import cluster as judged
from outlast.errors import Absent, ClusterError
from outlast.kube import kinds, within
from outlast.kube import pods as kube_pods
from outlast.manifests import volumes as places
from outlast.manifests.request import Document

if TYPE_CHECKING:
    from outlast.kube import Cluster

MARK = "outlast-doctor "
"""Prefix of the lines with checks in a pod's log."""
PLACES = (Pod.DATA, Pod.MODELS, Pod.OUTPUT, Pod.STATE, Pod.CACHE, Pod.HOME, "/tmp", "/dev/shm")
"""Directories where a worker writes, see `manifests.volumes`."""
LABEL = f"{contract.GROUP}/doctor"
_LABELS = {"name": "outlast", "part-of": "outlast", "component": "doctor"}
NAMES = (f"kubernetes.default.svc.{contract.CLUSTER_DOMAIN}",)
"""Names that every pod of a cluster must resolve."""
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError")
_MEMORY = "2Gi"
"""Memory limit of a pod: torch takes a third of it."""


@dataclass(frozen=True)
class Options:
    """What the pods check."""

    image: str
    store: str = ""
    secrets: Sequence[str] = ()
    """Names of Secrets whose entries the pods get as variables, for the store."""
    network: bool = True
    """Whether two pods try the network between them."""
    timeout_s: float = 300.0


def checks(cluster: Cluster, options: Options) -> Iterator[Check]:
    """The checks of pods in the cluster's namespace. Raises ClusterError when none can be created."""
    nodes = judged.listed(cluster, kinds.NODE)
    usable = [node for node in nodes or () if judged.usable(node)]
    two = options.network and (nodes is None or len(usable) > 1)
    name = f"outlast-doctor-{uuid.uuid4().hex[:8]}"
    on = _on_two(usable) if two else None
    if options.network and not two:
        yield warned("network", f"{len(usable)} node takes pods: there is no other one to reach", "add a node to try the network")
    try:
        first = cluster.create(pod(name, 0, options, rank=two, on=on))
        ends = [first["metadata"]["name"]]
        if two:
            addressed = lambda pods: any(each.get("status", {}).get("podIP") for each in pods)  # noqa: E731
            if placed := _until(cluster, name, addressed, options.timeout_s):
                address = placed[0]["status"]["podIP"]
                ends.append(cluster.create(pod(name, 1, options, rank=True, on=on, address=address))["metadata"]["name"])
        over = _until(cluster, name, lambda pods: len(pods) == len(ends) and all(map(kube_pods.over, pods)), options.timeout_s)
        yield from _answers(cluster, ends)
        if over is None or any(each["status"]["phase"] != "Succeeded" for each in over):
            yield from _unfinished(cluster, name, options)
    finally:
        _delete(cluster, name)


def _on_two(nodes: Sequence[Document]) -> Accelerator | None:
    """The first accelerator that two nodes offer and torch itself knows, so that two pods can try its backend."""
    offered = [node["status"].get("allocatable", {}) for node in nodes]
    rows = (row for row in accelerators.TABLE if row.backend and not row.package)
    return next((row for row in rows if sum(each.get(row.resource, "0") != "0" for each in offered) > 1), None)


def pod(
    name: str,
    index: int,
    options: Options,
    *,
    rank: bool,
    on: Accelerator | None = None,
    address: str = "$(OUTLAST_ADDRESS)",
) -> Document:
    """One of the pods; with `rank` it connects to the other one, which listens on `address`, each with one device of `on`."""
    volumes = {place: place.strip("/").replace("/", "-") for place in PLACES}
    device = {on.resource: 1} if on else {}
    container = {
        "name": Pod.CONTAINER,
        "image": options.image,
        "command": ["python3", "-c", source(), *_arguments(index, options, address if rank else "", on)],
        "env": [
            {"name": "OUTLAST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": Pod.HOME},
            {"name": "USER", "value": "outlast"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        **({"envFrom": [{"secretRef": {"name": each}} for each in options.secrets]} if options.secrets else {}),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi", **device}, "limits": {"memory": _MEMORY, **device}},
        "securityContext": places.confined(),
        "volumeMounts": [{"name": volume, "mountPath": place} for place, volume in volumes.items()],
    }
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {LABEL: name}}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    common = {f"app.kubernetes.io/{key}": value for key, value in _LABELS.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{name}-{index}", "labels": {**common, LABEL: name}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": round(2 * options.timeout_s),
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": places.security(),
            "tolerations": judged.TOLERATED,
            **({"affinity": affinity} if index else {}),
            "containers": [container],
            "volumes": [
                {"name": volume, "emptyDir": {"medium": "Memory"} if volume in ("dev-shm", "run-outlast") else {}}
                for volume in volumes.values()
            ],
        },
    }


def _arguments(index: int, options: Options, address: str, on: Accelerator | None) -> list[str]:
    """The arguments of the program; with an address it also connects to the other pod."""
    arguments = ["--timeout", f"{options.timeout_s:.0f}", "--mark", MARK]
    if index == 0:
        kinds = [f"{row.device}:{row.files}" for row in accelerators.TABLE if row.files]
        arguments += ["--image", "--outlast", __version__, "--accelerators", *kinds]
    arguments += ["--dns", *NAMES]
    arguments += ["--store", options.store] if options.store and index == 0 else []
    if address:
        arguments += ["--rank", str(index), "--address", address]
        arguments += ["--backend", on.backend, "--device", on.device] if on else []
    return arguments


def source() -> str:
    """The program that a pod runs. It is sent along, so that any image can be checked, without Outlast or with another version.

    It contains no `$(...)`, which Kubernetes would take for a variable.
    """
    return resources.files("outlast.doctor").joinpath("inspection.py").read_text()


def answers(lines: Sequence[str]) -> list[Check]:
    """The checks in the log of a pod."""
    found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return [Check(each["name"], each["outcome"], each["said"], each["remedy"]) for each in found]


def _answers(cluster: Cluster, pods: Sequence[str]) -> list[Check]:
    """What the pods have found so far; what the second only repeats is left out."""
    found: list[Check] = []
    for pod in pods:
        try:
            lines = list(cluster.logs(pod))
        except ClusterError:  # it has not begun: `_unfinished` says why
            continue
        told = {(check.name, check.outcome) for check in found}
        found += [check for check in answers(lines) if (check.name, check.outcome) not in told]
    return sorted(found, key=lambda check: check.name == "all-reduce")  # one pod says that, the other what comes before


def _unfinished(cluster: Cluster, name: str, options: Options) -> Iterator[Check]:
    """Why pods of ours did not get to their end."""
    seen = gather.workload(cluster, name, cluster.namespace, labels=f"{LABEL}={name}", kind=kinds.POD)
    wrong = [cause for cause in diagnosis.causes(seen, time.time()) if cause.wrong and cause.rule != "absent"]
    for cause in wrong:
        yield failed("pods", cause.what, cause.remedy)
    if not wrong:
        said = f"they had not ended after {options.timeout_s:.0f} s"
        yield failed("pods", said, "give them longer with --timeout, or see what holds them: kubectl describe pod")


def _until(cluster: Cluster, name: str, done: Callable[[list[Document]], bool], timeout_s: float) -> list[Document] | None:
    """Our pods as soon as they are as wished; None when they are not in time, or cannot get there."""
    pods: dict[str, Document] = {}
    with within(timeout_s) as stop:
        for change in cluster.watch(kinds.POD, stop=stop, labels=f"{LABEL}={name}"):
            pods[change.document["metadata"]["name"]] = change.document
            if done(list(pods.values())):
                return list(pods.values())
            if any(map(_hopeless, pods.values())):
                return None
    return None


def _hopeless(pod: Document) -> bool:
    """Whether waiting longer does not help: the image cannot be pulled, or the command cannot be started."""
    return any(reason in _HOPELESS for reason, _ in kube_pods.waiting(pod))


def _delete(cluster: Cluster, name: str) -> None:
    """Delete our pods, also those whose creation was not answered."""
    for index in (0, 1):
        with contextlib.suppress(Absent):
            cluster.delete(kinds.POD, f"{name}-{index}", grace_s=0)
