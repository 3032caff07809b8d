"""What jobs need of a cluster, as its API server tells it. Changes nothing there.

Functions that judge take documents and return a `Check`; `checks` reads the documents.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast import accelerators, contract, manifests, spec, units
from outlast.cluster import installation
from outlast.contract import OPERATOR, OPERATOR_NAMESPACE
from outlast.diagnosis import admission
from outlast.diagnosis.cause import amount_text, joined
from outlast.diagnosis.snapshot import Snapshot
from outlast.doctor import Check, failed, passed, warned
from outlast.errors import Absent, ClusterError, Forbidden, NotServed, Refused
from outlast.kube import kinds
from outlast.kube import pods as kube_pods
from outlast.kube.kinds import Kind
from outlast.manifests import scheduling
from outlast.manifests.request import Document

if TYPE_CHECKING:
    from outlast.kube import Cluster

LEAST_MINOR, TESTED_MINOR = 29, 34
"""Kubernetes 1.29 takes the rules of the definition; from 1.34 on all that we render is a stable feature."""


@dataclass(frozen=True)
class Right:
    """Something that a verb of ours does."""

    verb: str
    kind: Kind
    subresource: str = ""
    needed: bool = True
    """False: `submit` works without."""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.resource}" + (f"/{self.subresource}" if self.subresource else "")


RIGHTS = (
    *(Right(verb, kinds.JOB) for verb in ("create", "list", "delete", "patch")),
    *(Right(verb, kind) for kind in (kinds.CONFIG_MAP, kinds.SERVICE) for verb in ("create", "patch")),
    Right("list", kinds.POD),
    Right("watch", kinds.POD),
    Right("get", kinds.POD, "log"),
    Right("create", kinds.POD, "exec", needed=False),
    *(Right(verb, kinds.SECRET, needed=False) for verb in ("get", "create", "patch")),  # the key of workers at worker 0
    *(Right("list", kind, needed=False) for kind in (kinds.EVENT, kinds.CLAIM, kinds.QUOTA, kinds.NODE, kinds.STORAGE_CLASS)),
)
ELASTIC = tuple(Right(verb, kinds.ELASTIC_JOB) for verb in ("create", "list", "patch", "delete"))

TOLERATED = scheduling.tolerated(accelerators.RESOURCES.values())
"""Taints that workers tolerate by default: those of the accelerators that they ask for."""
_CORES, _MEMORY = "100m", "256Mi"
_LITTLE = f"{_CORES} cores and {_MEMORY}"


def checks(cluster: Cluster) -> Iterator[Check]:
    """Look at a cluster. Raises Unanswered or Unauthorized when it cannot be asked at all."""
    version = cluster.version()
    yield server(version)
    if (found := kubectl(version)) is not None:
        yield found
    yield namespace(_maybe(lambda: cluster.get(kinds.NAMESPACE, cluster.namespace)), cluster.namespace)
    served = cluster.serves(kinds.ELASTIC_JOB)
    yield rights(_absent(cluster, RIGHTS))
    yield definition(served, _absent(cluster, ELASTIC) if served else [])
    yield operator(_operator(cluster), served=served)
    if there := installation.rivals(cluster):
        yield rivals(there)
    nodes = listed(cluster, kinds.NODE)
    yield machines(nodes)
    yield devices(nodes)
    yield storage(listed(cluster, kinds.STORAGE_CLASS))
    metrics = cluster.serves(kinds.POD_METRICS)
    without = "ask the cluster's administrator for metrics-server"
    yield passed("metrics", "served") if metrics else warned("metrics", "not served: `outlast top` has no numbers", without)
    yield queues({name: cluster.serves(kind) for name, kind in _QUEUES.items()})
    if (quotas := listed(cluster, kinds.QUOTA)) is not None:
        yield from used_up(quotas)
    yield from worker(cluster)


_QUEUES = {"Kueue": kinds.LOCAL_QUEUE, "Volcano": kinds.VOLCANO_GROUP, "coscheduling": kinds.POD_GROUP}


def _maybe(read: Callable[[], Document]) -> Document | str | None:
    """A document, None when it is not there, or why it may not be read."""
    try:
        return read()
    except (Absent, NotServed):
        return None
    except Forbidden as error:
        return str(error)


def listed(cluster: Cluster, kind: Kind) -> list[Document] | None:
    """All documents of a kind; None when they may not be read."""
    try:
        return cluster.list_(kind)
    except (Forbidden, NotServed):
        return None


def _absent(cluster: Cluster, wanted: Sequence[Right]) -> list[Right]:
    return [right for right in wanted if not cluster.may(right.verb, right.kind, subresource=right.subresource)]


def _operator(cluster: Cluster) -> Document | str | None:
    """The operator's Deployment: where its rights say that it is, or wherever it is, as far as one may look."""
    binding = _maybe(lambda: cluster.get(kinds.CLUSTER_ROLE_BINDING, OPERATOR))
    if isinstance(binding, dict) and (where := installation.holder(binding)):
        return _maybe(lambda: cluster.get(kinds.DEPLOYMENT, OPERATOR, namespace=where))
    try:
        found = cluster.list_(kinds.DEPLOYMENT, everywhere=True, labels="app.kubernetes.io/name=outlast")
    except Forbidden:
        return _maybe(lambda: cluster.get(kinds.DEPLOYMENT, OPERATOR, namespace=OPERATOR_NAMESPACE))
    return next((each for each in found if kube_pods.name(each) == OPERATOR), None)


def minor(version: str) -> int:
    """`v1.36.2` -> 36. Raises ClusterError for anything but a version."""
    found = re.match(r"v?1\.(\d+)", version)
    if not found:
        raise ClusterError(f"the API server says that its version is {version!r}; expected v1.N")
    return int(found[1])


def server(version: str) -> Check:
    """Whether the server knows all that we ask of it."""
    number = minor(version)
    if number < LEAST_MINOR:
        return failed("server", f"Kubernetes {version} is too old", f"upgrade it to 1.{LEAST_MINOR} or newer")
    if number < TESTED_MINOR:
        said = f"Kubernetes {version}; what we render is tested with 1.{TESTED_MINOR} and newer"
        return warned("server", said, f"upgrade to 1.{TESTED_MINOR}, or look at `outlast submit --dry-run`")
    return passed("server", f"Kubernetes {version}")


def kubectl(version: str) -> Check | None:
    """Whether the kubectl of this machine fits the server; None without one, which nothing needs."""
    if (program := shutil.which("kubectl")) is None:
        return None
    done = subprocess.run([program, "version", "--client", "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        return warned("kubectl", f"{program} does not run: {done.stderr.strip()}", "install it again; Outlast does not need it")
    return skew(json.loads(done.stdout)["clientVersion"]["gitVersion"], version)


def skew(client: str, version: str) -> Check:
    """https://kubernetes.io/releases/version-skew-policy/#kubectl"""
    if abs(minor(client) - minor(version)) > 1:
        said = f"{client} and the server's {version} are more than one minor apart"
        return warned("kubectl", said, f"install kubectl 1.{minor(version)}; Outlast itself does not need it")
    return passed("kubectl", client)


def namespace(found: Document | str | None, name: str) -> Check:
    """The namespace and its Pod Security level, https://kubernetes.io/docs/concepts/security/pod-security-admission/."""
    if found is None:
        return failed("namespace", f"{name} does not exist", f"make it (kubectl create namespace {name}), or choose one with -n")
    if isinstance(found, str):
        return passed("namespace", f"{name} (its Pod Security level may not be read; workers fit the strictest)")
    if found["metadata"].get("deletionTimestamp"):
        return failed("namespace", f"{name} is being deleted", "choose another with -n")
    level = found["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
    if level == "restricted":
        return passed("namespace", f"{name}, Pod Security level restricted: workers fit; a `template` may not ask for more")
    return passed("namespace", f"{name}, Pod Security level {level or 'not set'}: workers need none of what it allows")


def rights(absent: Sequence[Right]) -> Check:
    """Whether we may do what our verbs do."""
    remedy = "ask the cluster's administrator for the role `edit` in this namespace"
    if hard := [right for right in absent if right.needed]:
        return failed("rights", f"you may not {joined(map(str, hard), 'or')}", remedy)
    if absent:
        less = "`why` and `top` show less, `chaos` can do less; the role `edit`, and `view` of nodes, have all"
        return warned("rights", f"enough to submit; you may not {joined(map(str, absent), 'or')}", less)
    return passed("rights", "all that submit, logs and why need")


def definition(served: bool, absent: Sequence[Right] = ()) -> Check:
    """Whether ElasticJobs are known, and may be used."""
    if not served:
        return warned("ElasticJob", "is not defined here", "outlast install; `outlast submit --as indexed-job` works without")
    if absent:
        said = f"is defined; you may not {joined([right.verb for right in absent], 'or')} {kinds.ELASTIC_JOB.plural}"
        remedy = "the ClusterRole outlast-edit (of `outlast install`) adds that to `edit`; ask your administrator for both"
        return warned("ElasticJob", said, f"{remedy}; `outlast submit --as indexed-job` works without")
    return passed("ElasticJob", "is defined")


def operator(found: Document | str | None, *, served: bool) -> Check:
    """Whether an operator runs that takes up ElasticJobs."""
    if isinstance(found, str):
        return warned("operator", f"you may not see it ({OPERATOR_NAMESPACE})", "ask the cluster's administrator whether it runs")
    if found is None:
        made = failed if served else warned
        said = "there is none" + (": ElasticJobs are stored, and no operator acts on them" if served else "")
        return made("operator", said, "outlast install --wait; `outlast submit --as indexed-job` needs none")
    status, replicas = found.get("status", {}), found["spec"].get("replicas", 1)
    ready, image = status.get("availableReplicas", 0), found["spec"]["template"]["spec"]["containers"][0].get("image")
    where = found["metadata"]["namespace"]
    if ready:
        return passed("operator", f"{ready} of {replicas} run in namespace {where}, {image}")
    remedy = f"outlast install --wait{f' --namespace {where}' * (where != OPERATOR_NAMESPACE)} says why"
    return failed("operator", f"none of {replicas} runs in namespace {where}, {image}", remedy)


def rivals(controllers: Sequence[str]) -> Check:
    """A controller that the operator replaces runs too."""
    return failed("controller", f"{joined(controllers)} runs too and makes the same pods", installation.stop(controllers))


def machines(nodes: list[Document] | None) -> Check:
    """Whether there are nodes that take pods."""
    if nodes is None:
        return warned("nodes", "you may not list them", "`why` and this check need the right to list nodes")
    ready = [node for node in nodes if usable(node)]
    if not ready:
        return failed("nodes", f"none of {len(nodes)} takes pods", "add nodes, uncordon them, or see why they are not ready")
    if len(ready) < len(nodes):
        out = joined(sorted(kube_pods.name(node) for node in nodes if not usable(node)))
        return warned("nodes", f"{len(ready)} of {len(nodes)} take pods; not {out}", "kubectl describe node says why")
    return passed("nodes", f"{len(nodes)}, all take pods: {joined(sorted({_kind(node) for node in nodes}))}")


def usable(node: Document) -> bool:
    """Whether workers may be put there: ready, not cordoned, no taint that keeps them off."""
    taints = [taint for taint in node["spec"].get("taints", []) if taint.get("effect") != "PreferNoSchedule"]
    ready = bool(kube_pods.condition(node, "Ready")) and not node["spec"].get("unschedulable")
    return ready and all(any(_covers(each, taint) for each in TOLERATED) for taint in taints)


def _covers(toleration: Document, taint: Document) -> bool:
    """Whether one of ours, which ask for no value, is of this taint."""
    return bool(toleration["key"] == taint["key"] and toleration.get("effect") in (None, taint.get("effect")))


def _kind(node: Document) -> str:
    labels, has = node["metadata"].get("labels", {}), node["status"].get("allocatable", {})
    name = labels.get("node.kubernetes.io/instance-type", "")
    memory = amount_text("memory", units.quantity(has.get("memory", 0)))
    return f"{name + ' with ' if name else ''}{has.get('cpu', '?')} cores and {memory}"


def devices(nodes: list[Document] | None) -> Check:
    """Which accelerators the device plugins offer."""
    if nodes is None:
        remedy = "a job with resources.gpu that waits is explained by `outlast why`"
        return warned("accelerators", "you may not list nodes", remedy)
    total: Counter[str] = Counter()
    for node in nodes:
        offered = node["status"].get("allocatable", {})
        total.update({name: round(units.quantity(amount)) for name, amount in offered.items() if accelerators.known(name)})
    has = [f"{count} × {name}" for name, count in sorted(total.items()) if count]
    if has:
        return passed("accelerators", joined(has))
    for row in accelerators.TABLE:
        hidden = [kube_pods.name(node) for node in nodes if node["metadata"].get("labels", {}).get(row.label) == "true"]
        if hidden:
            said = f"{joined(hidden)} have GPUs that no device plugin offers"
            return failed("accelerators", said, f"install the {row.vendor} device plugin or GPU operator")
    said = "none is offered by any node"
    return warned("accelerators", said, "jobs with resources.gpu wait for ever: add nodes with devices and their device plugin")


def storage(classes: list[Document] | None) -> Check:
    """Whether a claim without a class gets a volume."""
    if classes is None:
        return warned("storage", "you may not list storage classes", "name storageClass in the job file if a claim stays pending")
    if not classes:
        said = "there are no storage classes: new claims stay pending"
        return warned("storage", said, "keep the output in a store, or ask the cluster's administrator for a provisioner")
    key = "storageclass.kubernetes.io/is-default-class"
    default = [kube_pods.name(each) for each in classes if each["metadata"].get("annotations", {}).get(key) == "true"]
    names = joined(sorted(map(kube_pods.name, classes)))
    if not default:
        return warned("storage", f"{names}; none is the default", "name storageClass under volumes in the job file")
    return passed("storage", f"{names}; {default[0]} is the default")


def queues(there: dict[str, bool]) -> Check:
    """Controllers of queues and gangs. None of them is needed."""
    have = [name for name, known in there.items() if known]
    return passed("queues and gangs", joined(have) if have else "none of Kueue, Volcano and coscheduling; none is needed")


def used_up(quotas: list[Document]) -> Iterator[Check]:
    """Quotas of the namespace that have nothing left."""
    for quota in quotas:
        status = quota.get("status", {})
        for resource, hard in status.get("hard", {}).items():
            used = status.get("used", {}).get(resource, "0")
            if units.quantity(used) >= units.quantity(hard):
                said = f"{kube_pods.name(quota)}: {resource} is used up ({used} of {hard})"
                yield warned("quota", said, "remove what is no longer needed, or have the quota raised")


def worker(cluster: Cluster) -> Iterator[Check]:
    """Whether a small worker would be let in, as the server sees it: quotas, LimitRanges, Pod Security, policies, webhooks."""
    try:
        cluster.apply(_small(cluster.namespace), dry_run=True)
    except Absent:
        return  # `namespace` has said so
    except Forbidden as error:
        yield warned("worker", f"not tried: {error}", "a job's pods are made for you; `outlast why` says what refuses them")
    except Refused as error:
        if "does not support dry run" in str(error):
            yield warned("worker", f"not tried: {error}", "`outlast why` says what refuses a job's pods")
            return
        cause = admission.refusal(Snapshot("", cluster.namespace), str(error))
        made = warned if cause.rule == "limit-range" else failed  # a worker that asks for more, or less, may be within
        yield made("worker", f"one with {_LITTLE} would not be let in: {cause.what}", cause.remedy)
    else:
        yield passed("worker", f"one with {_LITTLE} would be let in")


def _small(namespace: str) -> Document:
    """The pod of a worker that asks for little."""
    fields = {"image": "ghcr.io/outlast/outlast:0.1", "module": "train", "resources": {"cpu": _CORES, "memory": _MEMORY}}
    meta = {"name": "outlast-doctor", "namespace": namespace}
    job = spec.Job.model_validate({"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": meta, "spec": fields})
    *_, made = manifests.render(job, "job")
    template = made["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, **template["metadata"]}, "spec": template["spec"]}
