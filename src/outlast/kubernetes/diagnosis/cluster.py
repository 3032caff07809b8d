"""Whether jobs would train in this cluster: the checks of `outlast doctor` on a snapshot of it. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from outlast.base import units
from outlast.base.errors import Absent, ClusterError, Forbidden
from outlast.job import accelerators
from outlast.job.contract import OPERATOR_NAMESPACE
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.diagnosis import messages, sample_pod
from outlast.kubernetes.diagnosis.claims_and_secrets import default_class
from outlast.kubernetes.diagnosis.evidence import Snapshot
from outlast.kubernetes.diagnosis.finding import Finding, amount_text, joined, passed, warned
from outlast.kubernetes.diagnosis.nodes import offered, usable
from outlast.kubernetes.manifests.render_request import Document

LEAST_MINOR, TESTED_MINOR = 29, 34
"""Kubernetes 1.29 is the first that accepts the rules of the CRD; from 1.34 on, all features that we render are stable."""
_WITHOUT = "`outlast submit --as indexed-job` works without"


def minor(version: str) -> int:
    """The minor version: 36 for `v1.36.2`. Raises ClusterError if `version` is no version."""
    match = re.match(r"v?1\.(\d+)", version)
    if not match:
        raise ClusterError(f"the API server says that its version is {version!r}; expected v1.N")
    return int(match[1])


def server(it: Snapshot) -> Iterator[Finding]:
    """Whether the API server has all features that we need."""
    version = f"Kubernetes {it.version}"
    if minor(it.version) < LEAST_MINOR:
        yield Finding("server", f"{version} is too old", f"upgrade it to 1.{LEAST_MINOR} or newer")
    elif minor(it.version) < TESTED_MINOR:
        remedy = f"upgrade to 1.{TESTED_MINOR}, or look at `outlast submit --dry-run`"
        yield warned("server", f"{version}; what we render is tested with 1.{TESTED_MINOR} and newer", remedy)
    else:
        yield passed("server", version)


def namespace(it: Snapshot) -> Iterator[Finding]:
    """Whether the namespace exists, and its Pod Security level,
    https://kubernetes.io/docs/concepts/security/pod-security-admission/."""
    name, meta = it.namespace, (it.home or {}).get("metadata", {})
    level = (meta.get("labels") or {}).get("pod-security.kubernetes.io/enforce")
    if "namespaces" in it.unseen:
        yield passed("namespace", f"{name} (its Pod Security level may not be read; workers fit the strictest)")
    elif it.home is None:
        yield Finding("namespace", f"{name} does not exist", f"make it (kubectl create namespace {name}), or choose one with -n")
    elif meta.get("deletionTimestamp"):
        yield Finding("namespace", f"{name} is being deleted", "choose another with -n")
    elif level == "restricted":
        yield passed("namespace", f"{name}, Pod Security level restricted: workers fit; a `template` may not ask for more")
    else:
        yield passed("namespace", f"{name}, Pod Security level {level or 'not set'}: workers need none of what it allows")


def rights(it: Snapshot) -> Iterator[Finding]:
    """Whether we have the rights that our commands need."""
    missing = [right for right in it.lacking if right.kind != kinds.ELASTIC_JOB]
    if hard := [right for right in missing if right.needed]:
        remedy = "ask the cluster's administrator for the role `edit` in this namespace"
        yield Finding("rights", f"you may not {joined(map(str, hard), 'or')}", remedy)
    elif missing:
        less = "`why` and `top` show less, `chaos` can do less; the role `edit`, and `view` of nodes, have all"
        yield warned("rights", f"enough to submit; you may not {joined(map(str, missing), 'or')}", less)
    else:
        yield passed("rights", "all that submit, logs and why need")


def definition(it: Snapshot) -> Iterator[Finding]:
    """Whether the CRD of ElasticJob is installed, and we may use it."""
    if kinds.ELASTIC_JOB not in it.served:
        yield warned("ElasticJob", "is not defined here", f"outlast install; {_WITHOUT}")
    elif lacking := [right.verb for right in it.lacking if right.kind == kinds.ELASTIC_JOB]:
        said = f"is defined; you may not {joined(lacking, 'or')} {kinds.ELASTIC_JOB.plural}"
        remedy = "the ClusterRole outlast-edit (of `outlast install`) adds that to `edit`; ask your administrator for both"
        yield warned("ElasticJob", said, f"{remedy}; {_WITHOUT}")
    else:
        yield passed("ElasticJob", "is defined")


def operator(it: Snapshot) -> Iterator[Finding]:
    """Whether an operator runs that reconciles ElasticJobs."""
    served = kinds.ELASTIC_JOB in it.served
    if it.operator is None and "deployments.apps" in it.unseen:
        yield warned("operator", f"you may not see it ({OPERATOR_NAMESPACE})", "ask the cluster's administrator whether it runs")
    elif it.operator is None:
        said = "there is none" + (": ElasticJobs are stored, and no operator acts on them" if served else "")
        remedy = "outlast install --wait; `outlast submit --as indexed-job` needs none"
        yield Finding("operator", said, remedy, outcome="fail" if served else "warn")
    else:
        ready, replicas = it.operator.get("status", {}).get("availableReplicas", 0), it.operator["spec"].get("replicas", 1)
        where, image = it.operator["metadata"]["namespace"], pod_status.container(it.operator["spec"]["template"]).get("image")
        at = f"in namespace {where}, {image}"
        remedy = f"outlast install --wait{f' --namespace {where}' * (where != OPERATOR_NAMESPACE)} says why"
        some = passed("operator", f"{ready} of {replicas} run {at}")
        yield some if ready else Finding("operator", f"none of {replicas} runs {at}", remedy)


def rivals(it: Snapshot) -> Iterator[Finding]:
    """Whether a controller that the operator replaces runs, too."""
    if it.rivals:
        yield Finding("controller", f"{joined(it.rivals)} runs too and makes the same pods", stop(it.rivals))


def stop(controllers: Sequence[str]) -> str:
    """The commands that stop these controllers."""
    names = [controller.split("/") for controller in controllers]
    return " && ".join(f"kubectl -n {namespace} scale deployment {name} --replicas=0" for namespace, name in names)


def nodes(it: Snapshot) -> Iterator[Finding]:
    """Whether there are nodes that accept pods."""
    ready = [node for node in it.nodes if usable(node)]
    out = joined(sorted(pod_status.name(node) for node in it.nodes if not usable(node)))
    if "nodes" in it.unseen:
        yield warned("nodes", "you may not list them", "`why` and this check need the right to list nodes")
    elif not ready:
        remedy = "add nodes, uncordon them, or see why they are not ready"
        yield Finding("nodes", f"none of {len(it.nodes)} takes pods", remedy)
    elif out:
        yield warned("nodes", f"{len(ready)} of {len(it.nodes)} take pods; not {out}", "kubectl describe node says why")
    else:
        yield passed("nodes", f"{len(ready)}, all take pods: {joined(sorted({_size(node) for node in ready}))}")


def _size(node: Document) -> str:
    has, name = offered(node), node["metadata"].get("labels", {}).get("node.kubernetes.io/instance-type", "")
    return f"{name + ' with ' if name else ''}{has.get('cpu', 0):g} cores and {amount_text('memory', has.get('memory', 0))}"


def devices(it: Snapshot) -> Iterator[Finding]:
    """Which accelerators the nodes offer through their device plugins."""
    if "nodes" in it.unseen:
        remedy = "a job with resources.gpu that waits is explained by `outlast why`"
        yield warned("accelerators", "you may not list nodes", remedy)
        return
    total: Counter[str] = Counter()
    for node in it.nodes:
        total.update({name: round(amount) for name, amount in offered(node).items() if accelerators.is_accelerator(name)})
    hidden: dict[str, str] = {}
    for row in accelerators.TABLE:
        names = [pod_status.name(node) for node in it.nodes if node["metadata"].get("labels", {}).get(row.label) == "true"]
        hidden |= {row.vendor: joined(names)} if names else {}
    if has := [f"{count} × {name}" for name, count in sorted(total.items()) if count]:
        yield passed("accelerators", joined(has))
    elif hidden:
        vendor, names_ = next(iter(hidden.items()))
        remedy = f"install the {vendor} device plugin or GPU operator"
        yield Finding("accelerators", f"{names_} have GPUs that no device plugin offers", remedy)
    else:
        remedy = "jobs with resources.gpu wait for ever: add nodes with devices and their device plugin"
        yield warned("accelerators", "none is offered by any node", remedy)


def storage(it: Snapshot) -> Iterator[Finding]:
    """Whether a claim that names no storage class gets a volume."""
    names = joined(sorted(map(pod_status.name, it.classes)))
    if "storageclasses.storage.k8s.io" in it.unseen:
        remedy = "name storageClass in the job file if a claim stays pending"
        yield warned("storage", "you may not list storage classes", remedy)
    elif not it.classes:
        remedy = "keep the output in a store, or ask the cluster's administrator for a provisioner"
        yield warned("storage", "there are no storage classes: new claims stay pending", remedy)
    elif default := default_class(it):
        yield passed("storage", f"{names}; {default} is the default")
    else:
        yield warned("storage", f"{names}; none is the default", "name storageClass under volumes in the job file")


def optional(it: Snapshot) -> Iterator[Finding]:
    """Which optional add-ons are installed: metrics, queues and gangs."""
    if kinds.POD_METRICS in it.served:
        yield passed("metrics", "served")
    else:
        remedy = "ask the cluster's administrator for metrics-server"
        yield warned("metrics", "not served: `outlast top` has no numbers", remedy)
    by = {"Kueue": kinds.LOCAL_QUEUE, "Volcano": kinds.VOLCANO_GROUP, "coscheduling": kinds.POD_GROUP}
    have = joined(name for name, kind in by.items() if kind in it.served)
    yield passed("queues and gangs", have or f"none of {joined(by)}; none is needed")


def quotas(it: Snapshot) -> Iterator[Finding]:
    """Whether quotas of the namespace are used up."""
    for quota in it.quotas:
        status = quota.get("status", {})
        for resource, hard in status.get("hard", {}).items():
            used = status.get("used", {}).get(resource, "0")
            if units.quantity(used) >= units.quantity(hard):
                said = f"{pod_status.name(quota)}: {resource} is used up ({used} of {hard})"
                yield warned("quota", said, "remove what is no longer needed, or have the quota raised")


def worker(it: Snapshot) -> Iterator[Finding]:
    """Whether the API server would admit a small worker."""
    error, said = it.trial, str(it.trial)
    if error is None:
        yield passed("worker", f"one with {sample_pod.LITTLE} would be let in")
    elif isinstance(error, Forbidden):
        yield warned("worker", f"not tried: {said}", "a job's pods are made for you; `outlast why` says what refuses them")
    elif "does not support dry run" in said:
        yield warned("worker", f"not tried: {said}", "`outlast why` says what refuses a job's pods")
    elif not isinstance(error, Absent):  # `namespace` reports it
        found = messages.refusal(it.namespace, said)
        within = found.name == "limit-range"  # a worker that requests more, or less, may be admitted
        what = f"one with {sample_pod.LITTLE} would not be let in: {found.what}"
        yield Finding("worker", what, found.remedy, outcome="warn" if within else "fail")


CHECKS: tuple[Callable[[Snapshot], Iterator[Finding]], ...] = (
    server,
    namespace,
    rights,
    definition,
    operator,
    rivals,
    nodes,
    devices,
    storage,
    optional,
    quotas,
    worker,
)


def checks(it: Snapshot) -> Iterator[Finding]:
    """All checks of `outlast doctor` on a place for jobs. Raises ClusterError for an invalid version."""
    for check in CHECKS:
        yield from check(it)
