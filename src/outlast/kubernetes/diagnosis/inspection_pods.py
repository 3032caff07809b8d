"""Checks from inside of pods: the image, DNS, the network between pods, and a store.

One or two small pods, as restricted as workers, run `diagnosis.inspection`. The pods are always deleted; if we are killed before
that, they end by themselves after the time limit.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

from outlast import __version__
from outlast.base.errors import Absent, ClusterError, Forbidden
from outlast.job import accelerators, contract
from outlast.job.accelerators import Accelerator
from outlast.kubernetes import diagnosis
from outlast.kubernetes.api import kinds, pod_status, within
from outlast.kubernetes.diagnosis import gather_evidence, inspection, sample_pod
from outlast.kubernetes.diagnosis.finding import Finding, Outcome, warned
from outlast.kubernetes.diagnosis.inspection import MARK
from outlast.kubernetes.diagnosis.nodes import TOLERATED, usable
from outlast.kubernetes.manifests.render_request import Document

if TYPE_CHECKING:
    from outlast.kubernetes.api import Cluster

LABEL = f"{contract.GROUP}/doctor"
_LABELS = {f"app.kubernetes.io/{key}": value for key, value in (("name", "outlast"), ("part-of", "outlast"))}
NAMES = (f"kubernetes.default.svc.{contract.CLUSTER_DOMAIN}",)
"""Names that every pod in a cluster must be able to resolve."""
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError")
_PORT = 29400
_MEMORY = "2Gi"
"""Memory limit of a pod; importing torch takes a third of it."""
DEVICES = [
    *{row.device: f"{row.device}:{row.package}:{row.files}" for row in reversed(accelerators.TABLE) if row.device}.values()
]
"""Accelerators, in the format of `inspection.torch`."""


@dataclass(frozen=True)
class Options:
    """The options of the checks in pods."""

    image: str
    store: str = ""
    secrets: Sequence[str] = ()
    """Names of Secrets whose entries the pods get as environment variables, for access to the store."""
    network: bool = True
    """Whether two pods test the network between each other."""
    timeout_s: float = 300.0


def checks(cluster: Cluster, options: Options) -> Iterator[Finding]:
    """The findings of pods in the cluster's namespace. Raises ClusterError if no pod can be created."""
    try:
        ready = [node for node in cluster.list_(kinds.NODE) if usable(node)]
        two = options.network and len(ready) > 1
    except Forbidden:
        ready, two = [], options.network
    name = f"{sample_pod.NAME}-{uuid.uuid4().hex[:8]}"
    on = _on_two(ready) if two else None
    if options.network and not two:
        yield warned("network", f"{len(ready)} node takes pods: there is no other one to reach", "add a node to try the network")
    try:
        ends = [pod_status.name(cluster.create(pod(name, 0, options, rank=two, on=on)))]
        if two:
            addressed = lambda pods: any(each.get("status", {}).get("podIP") for each in pods)  # noqa: E731
            if placed := _until(cluster, name, addressed, options.timeout_s):
                address = placed[0]["status"]["podIP"]
                ends.append(pod_status.name(cluster.create(pod(name, 1, options, rank=True, on=on, address=address))))
        over = _until(
            cluster, name, lambda pods: len(pods) == len(ends) and all(map(pod_status.finished, pods)), options.timeout_s
        )
        yield from _answers(cluster, ends)
        if over is None or any(each["status"]["phase"] != "Succeeded" for each in over):
            yield from _unfinished(cluster, name, options)
    finally:
        for index in (0, 1):  # also pods whose creation was not answered
            with contextlib.suppress(Absent):
                cluster.delete(kinds.POD, f"{name}-{index}", grace_s=0)


def _on_two(nodes: Sequence[Document]) -> Accelerator | None:
    """The first accelerator that two nodes offer and that torch supports by itself, so that two pods can test its backend."""
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
    """A pod like a worker's, with the inspection in place of the agent. With `rank`, the pod tests the connection with the other
    pod, and each of the two uses one device of `on`; the first pod listens on `address`."""
    made = sample_pod.worker(options.image, options.secrets)
    made["metadata"] = {"name": f"{name}-{index}", "labels": {**_LABELS, "app.kubernetes.io/component": "doctor", LABEL: name}}
    spec, container = made["spec"], made["spec"]["containers"][0]
    for each in ("startupProbe", "livenessProbe", "readinessProbe", "ports", "workingDir"):
        container.pop(each)
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] != "config"]
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "config"]
    asked = calls(index, options, {"rank": index, "address": address} if rank else {}, on)
    container["command"] = ["python3", "-c", source(), json.dumps(asked)]
    device = {on.resource: 1} if on else {}
    container["resources"] = {
        "requests": {"cpu": sample_pod.CORES, "memory": sample_pod.MEMORY, **device},
        "limits": {"memory": _MEMORY, **device},
    }
    spec |= {"activeDeadlineSeconds": round(2 * options.timeout_s), "terminationGracePeriodSeconds": 1, "tolerations": TOLERATED}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {LABEL: name}}}
    spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}} if index else {}
    return made


def calls(index: int, options: Options, peer: dict[str, Any], on: Accelerator | None) -> list[tuple[str, dict[str, Any]]]:
    """The checks that a pod runs; the first pod also checks the image and the store."""
    asked: list[tuple[str, dict[str, Any]]] = [("dns", {"names": NAMES})]
    if index == 0:
        asked.insert(0, ("image", {"asking": __version__, "accelerators": DEVICES}))
        asked += [("store", {"url": options.store})] if options.store else []
    if peer:
        backend = {"backend": on.backend, "device": on.device} if on else {"backend": "gloo"}
        asked.append(("peer", {**peer, **backend, "port": _PORT, "timeout_s": options.timeout_s}))
    return asked


def source() -> str:
    """The source of the program that a pod runs. The source is sent along, so that images without Outlast, or with another
    version of it, can be checked. The source contains no `$(...)`, which Kubernetes would expand as a variable."""
    return resources.files("outlast.kubernetes.diagnosis").joinpath("inspection.py").read_text()


def answers(lines: Sequence[str]) -> list[Finding]:
    """The findings in the log of a pod."""
    return [found(json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]


def found(check: inspection.Check) -> Finding:
    """The finding for a check."""
    name, outcome, what, remedy = check
    return Finding(name, what, remedy, outcome=cast(Outcome, outcome))


def _answers(cluster: Cluster, pods: Sequence[str]) -> list[Finding]:
    """The findings of the pods so far, without the second pod's repetitions."""
    checks: list[Finding] = []
    for pod in pods:
        told = {(check.name, check.outcome) for check in checks}
        with contextlib.suppress(ClusterError):  # it has not begun: `_unfinished` reports why
            checks += [each for each in answers(list(cluster.logs(pod))) if (each.name, each.outcome) not in told]
    return sorted(
        checks, key=lambda check: check.name == "all-reduce"
    )  # pods report in any order: show the all-reduce check last


def _unfinished(cluster: Cluster, name: str, options: Options) -> Iterator[Finding]:
    """Why our pods did not finish."""
    seen = gather_evidence.workload(cluster, name, cluster.namespace, labels=f"{LABEL}={name}", kind=kinds.POD)
    wrong = [each for each in diagnosis.causes(seen, time.time()) if each.wrong and each.name != "absent"]
    late = f"they had not ended after {options.timeout_s:.0f} s"
    given_up = Finding("pods", late, "give them longer with --timeout, or see what holds them: kubectl describe pod")
    yield from [Finding("pods", each.what, each.remedy) for each in wrong] or [given_up]


def _until(cluster: Cluster, name: str, done: Callable[[list[Document]], bool], timeout_s: float) -> list[Document] | None:
    """Our pods as soon as `done` is true for them; None on timeout, or if a pod can no longer start."""
    pods: dict[str, Document] = {}
    with within(timeout_s) as stop:
        for change in cluster.watch(kinds.POD, stop=stop, labels=f"{LABEL}={name}"):
            pods[change.document["metadata"]["name"]] = change.document
            if done(list(pods.values())):
                return list(pods.values())
            if any(reason in _HOPELESS for pod in pods.values() for reason, _ in pod_status.waiting_states(pod)):
                return None
    return None
