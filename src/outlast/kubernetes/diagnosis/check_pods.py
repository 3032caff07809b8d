"""Checks the image, DNS, the network between pods, and a store from inside pods.

One or two small pods run `diagnosis.image_checks`. The pods are always deleted, and have a time limit in case this process is
killed.
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
from outlast.kubernetes.diagnosis import gather_evidence, image_checks, sample_pod
from outlast.kubernetes.diagnosis.finding import Finding, Outcome, warned
from outlast.kubernetes.diagnosis.image_checks import MARK
from outlast.kubernetes.diagnosis.nodes import TOLERATED, usable
from outlast.kubernetes.manifests.render_request import Document

if TYPE_CHECKING:
    from outlast.kubernetes.api import Cluster

LABEL = f"{contract.GROUP}/doctor"
_LABELS = {f"app.kubernetes.io/{key}": value for key, value in (("name", "outlast"), ("part-of", "outlast"))}
REQUIRED_NAMES = (f"kubernetes.default.svc.{contract.CLUSTER_DOMAIN}",)
_FATAL_REASONS = (
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
)
_PORT = 29400
_MEMORY = "2Gi"
"""A pod's memory limit. Importing torch uses a third of it."""
DEVICES = [
    *{row.device: f"{row.device}:{row.package}:{row.files}" for row in reversed(accelerators.TABLE) if row.device}.values()
]
"""Accelerators, in the format of `image_checks.torch`."""


@dataclass(frozen=True)
class Options:
    image: str
    store: str = ""
    secrets: Sequence[str] = ()
    """Names of Secrets whose entries become the pods' environment variables."""
    network: bool = True
    timeout_s: float = 300.0


def checks(cluster: Cluster, options: Options) -> Iterator[Finding]:
    """Run pods in the cluster's namespace and yield their findings. Raises ClusterError."""
    try:
        usable_nodes = [node for node in cluster.list_(kinds.NODE) if usable(node)]
        test_network = options.network and len(usable_nodes) > 1
    except Forbidden:
        usable_nodes, test_network = [], options.network
    name = f"{sample_pod.NAME}-{uuid.uuid4().hex[:8]}"
    accelerator = _common_accelerator(usable_nodes) if test_network else None
    if options.network and not test_network:
        what = f"{len(usable_nodes)} node takes pods: the network test needs two"
        yield warned("network", what, "add a node to test the network")
    try:
        names = [pod_status.name(cluster.create(pod(name, 0, options, peer=test_network, accelerator=accelerator)))]
        if test_network and (addressed := _wait_for(cluster, name, 1, _has_address, options.timeout_s)):
            address = addressed[0]["status"]["podIP"]
            second = pod(name, 1, options, peer=True, accelerator=accelerator, address=address)
            names.append(pod_status.name(cluster.create(second)))
        finished = _wait_for(cluster, name, len(names), pod_status.finished, options.timeout_s)
        yield from _reported(cluster, names)
        if finished is None or any(each["status"]["phase"] != "Succeeded" for each in finished):
            yield from _unfinished(cluster, name, options)
    finally:
        for index in (0, 1):  # both, since a creation may succeed without a response
            with contextlib.suppress(Absent):
                cluster.delete(kinds.POD, f"{name}-{index}", grace_s=0)


def _has_address(pod: Document) -> bool:
    return bool(pod.get("status", {}).get("podIP"))


def _common_accelerator(nodes: Sequence[Document]) -> Accelerator | None:
    """Return the first accelerator that two nodes offer and torch supports without an extra package, or None."""
    offered = [node["status"].get("allocatable", {}) for node in nodes]
    rows = (row for row in accelerators.TABLE if row.backend and not row.package)
    return next((row for row in rows if sum(each.get(row.resource, "0") != "0" for each in offered) > 1), None)


def pod(
    name: str,
    index: int,
    options: Options,
    *,
    peer: bool,
    accelerator: Accelerator | None = None,
    address: str = "$(OUTLAST_ADDRESS)",
) -> Document:
    """Return a worker's pod that runs the checks instead of the agent. With `peer`, the pod also tests the connection to the
    other pod; pod 1 connects to pod 0 at `address`."""
    pod_ = sample_pod.worker(options.image, options.secrets)
    pod_["metadata"] = {"name": f"{name}-{index}", "labels": {**_LABELS, "app.kubernetes.io/component": "doctor", LABEL: name}}
    spec, container = pod_["spec"], pod_["spec"]["containers"][0]
    for each in ("startupProbe", "livenessProbe", "readinessProbe", "ports", "workingDir"):
        container.pop(each)
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] != "config"]
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "config"]
    checks_ = calls(index, options, {"rank": index, "address": address} if peer else {}, accelerator)
    container["command"] = ["python3", "-c", source(), json.dumps(checks_)]
    device = {accelerator.resource: 1} if accelerator else {}
    container["resources"] = {
        "requests": {"cpu": sample_pod.CORES, "memory": sample_pod.MEMORY, **device},
        "limits": {"memory": _MEMORY, **device},
    }
    spec |= {"activeDeadlineSeconds": round(2 * options.timeout_s), "terminationGracePeriodSeconds": 1, "tolerations": TOLERATED}
    anti_affinity = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {LABEL: name}}}
    spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [anti_affinity]}} if index else {}
    return pod_


def calls(
    index: int, options: Options, peer: dict[str, Any], accelerator: Accelerator | None
) -> list[tuple[str, dict[str, Any]]]:
    """Return the checks that a pod runs. The first pod also checks the image and the store."""
    calls_: list[tuple[str, dict[str, Any]]] = [("dns", {"names": REQUIRED_NAMES})]
    if index == 0:
        calls_.insert(0, ("image", {"expected": __version__, "accelerators": DEVICES}))
        calls_ += [("store", {"url": options.store})] if options.store else []
    if peer:
        backend = {"backend": accelerator.backend, "device": accelerator.device} if accelerator else {"backend": "gloo"}
        calls_.append(("peer", {**peer, **backend, "port": _PORT, "timeout_s": options.timeout_s}))
    return calls_


def source() -> str:
    """Return the source of the program that the pods run, so that it also runs in images without Outlast or with another version
    of it. The source contains no `$(...)`, which Kubernetes would expand."""
    return resources.files("outlast.kubernetes.diagnosis").joinpath("image_checks.py").read_text()


def parse_findings(lines: Sequence[str]) -> list[Finding]:
    """Return the findings in a pod's log."""
    return [finding_for(json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]


def finding_for(check: image_checks.Check) -> Finding:
    name, outcome, what, remedy = check
    return Finding(name, what, remedy, outcome=cast(Outcome, outcome))


def _reported(cluster: Cluster, pods: Sequence[str]) -> list[Finding]:
    checks: list[Finding] = []
    for pod in pods:
        reported = {(check.name, check.outcome) for check in checks}
        with contextlib.suppress(ClusterError):  # the pod has not started: `_unfinished` reports why
            checks += [each for each in parse_findings(list(cluster.logs(pod))) if (each.name, each.outcome) not in reported]
    return checks


def _unfinished(cluster: Cluster, name: str, options: Options) -> Iterator[Finding]:
    snapshot = gather_evidence.workload(cluster, name, cluster.namespace, labels=f"{LABEL}={name}", kind=kinds.POD)
    causes = [each for each in diagnosis.causes(snapshot, time.time()) if each.failed and each.name != "absent"]
    what = f"they had not ended after {options.timeout_s:.0f} s"
    timeout_finding = Finding("pods", what, "give them longer with --timeout, or see what delays them: kubectl describe pod")
    yield from [Finding("pods", each.what, each.remedy) for each in causes] or [timeout_finding]


def _wait_for(
    cluster: Cluster, name: str, count: int, ready: Callable[[Document], bool], timeout_s: float
) -> list[Document] | None:
    """Return the pods once there are `count`, all of which `ready` accepts; None after the timeout, or if a pod cannot start."""
    pods: dict[str, Document] = {}
    with within(timeout_s) as stop:
        for change in cluster.watch(kinds.POD, stop=stop, labels=f"{LABEL}={name}"):
            pods[change.document["metadata"]["name"]] = change.document
            if len(pods) == count and all(map(ready, pods.values())):
                return list(pods.values())
            if any(reason in _FATAL_REASONS for pod in pods.values() for reason, _ in pod_status.waiting_states(pod)):
                return None
    return None
