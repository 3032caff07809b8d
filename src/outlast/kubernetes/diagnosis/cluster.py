"""Checks of `outlast doctor` that predict from a cluster's snapshot whether jobs would train there. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from outlast.base.errors import Absent, ClusterError, Forbidden
from outlast.job import accelerators
from outlast.job.contract import OPERATOR_NAMESPACE
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.diagnosis import messages, sample_pod
from outlast.kubernetes.diagnosis.evidence import Snapshot
from outlast.kubernetes.diagnosis.finding import Finding, amount_text, joined, passed, warned
from outlast.kubernetes.diagnosis.nodes import offered, usable
from outlast.kubernetes.manifests.render_request import Document

MIN_MINOR = 29
"""Kubernetes 1.29 is the first version that accepts the CRD's rules."""
_WITHOUT_OPERATOR = "`outlast submit --as indexed-job` works without"


def minor(version: str) -> int:
    """Return the minor version of Kubernetes, such as 36 for `v1.36.2`. Raises ClusterError if `version` does not have this
    form."""
    match = re.match(r"v?1\.(\d+)", version)
    if not match:
        raise ClusterError(f"the API server says that its version is {version!r}; expected v1.N")
    return int(match[1])


def server(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that the API server is new enough."""
    version = f"Kubernetes {snapshot.version}"
    if minor(snapshot.version) < MIN_MINOR:
        yield Finding("server", f"{version} is too old", f"upgrade it to 1.{MIN_MINOR} or newer")
    else:
        yield passed("server", version)


def rights(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that the user has the rights that Outlast's commands require."""
    missing = [right for right in snapshot.missing_rights if right.kind != kinds.ELASTIC_JOB]
    if required := [right for right in missing if right.required]:
        remedy = "ask the cluster's administrator for the role `edit` in this namespace"
        yield Finding("rights", f"you may not {joined(map(str, required), 'or')}", remedy)
    elif missing:
        remedy = "`why` and `top` show less, `chaos` can do less; the role `edit`, and `view` of nodes, have all rights"
        yield warned("rights", f"enough to submit; you may not {joined(map(str, missing), 'or')}", remedy)
    else:
        yield passed("rights", "all that submit, logs and why need")


def definition(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that the ElasticJob CRD is installed and that the user may use it."""
    if not snapshot.defined:
        yield warned("ElasticJob", "is not defined here", f"outlast install; {_WITHOUT_OPERATOR}")
    elif missing := [right.verb for right in snapshot.missing_rights if right.kind == kinds.ELASTIC_JOB]:
        what = f"is defined; you may not {joined(missing, 'or')} {kinds.ELASTIC_JOB.plural}"
        remedy = "the ClusterRole outlast-edit (of `outlast install`) adds that to `edit`; ask your administrator for both"
        yield warned("ElasticJob", what, f"{remedy}; {_WITHOUT_OPERATOR}")
    else:
        yield passed("ElasticJob", "is defined")


def operator(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that the operator runs."""
    if snapshot.operator is None and "deployments.apps" in snapshot.forbidden:
        yield warned("operator", f"you may not see it ({OPERATOR_NAMESPACE})", "ask the cluster's administrator whether it runs")
    elif snapshot.operator is None:
        what = "there is none" + (": ElasticJobs are stored, and no operator acts on them" if snapshot.defined else "")
        remedy = "outlast install --wait; `outlast submit --as indexed-job` needs none"
        yield Finding("operator", what, remedy, outcome="fail" if snapshot.defined else "warn")
    else:
        fields, where = snapshot.operator["spec"], snapshot.operator["metadata"]["namespace"]
        ready, replicas = snapshot.operator.get("status", {}).get("availableReplicas", 0), fields.get("replicas", 1)
        detail = f"in namespace {where}, {pod_status.container(fields['template']).get('image')}"
        remedy = f"outlast install --wait{f' --namespace {where}' * (where != OPERATOR_NAMESPACE)} says why"
        running = passed("operator", f"{ready} of {replicas} run {detail}")
        yield running if ready else Finding("operator", f"none of {replicas} runs {detail}", remedy)


def conflicting_controllers(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that no controller that the operator replaces is running."""
    if rivals := snapshot.conflicting_controllers:
        yield Finding("controller", f"{joined(rivals)} runs too and makes the same pods", stop(rivals))


def stop(controllers: Sequence[str]) -> str:
    """Return a shell command that scales these Deployments (`namespace/name`) to zero."""
    names = [controller.split("/") for controller in controllers]
    return " && ".join(f"kubectl -n {namespace} scale deployment {name} --replicas=0" for namespace, name in names)


def nodes(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that at least one node accepts pods, and list the nodes that do not."""
    ready = [node for node in snapshot.nodes if usable(node)]
    unusable = joined(sorted(pod_status.name(node) for node in snapshot.nodes if not usable(node)))
    if "nodes" in snapshot.forbidden:
        yield warned("nodes", "you may not list them", "`why` and this check need the right to list nodes")
    elif not ready:
        remedy = "add nodes, uncordon them, or see why they are not ready"
        yield Finding("nodes", f"none of {len(snapshot.nodes)} takes pods", remedy)
    elif unusable:
        yield warned(
            "nodes", f"{len(ready)} of {len(snapshot.nodes)} take pods; not {unusable}", "kubectl describe node says why"
        )
    else:
        yield passed("nodes", f"{len(ready)}, all take pods: {joined(sorted({_size(node) for node in ready}))}")


def _size(node: Document) -> str:
    offer, name = offered(node), node["metadata"].get("labels", {}).get("node.kubernetes.io/instance-type", "")
    return f"{name + ' with ' if name else ''}{offer.get('cpu', 0):g} cores and {amount_text('memory', offer.get('memory', 0))}"


def devices(snapshot: Snapshot) -> Iterator[Finding]:
    """Report the accelerators that nodes offer."""
    amounts: Counter[str] = Counter()
    for node in snapshot.nodes:
        amounts.update({name: round(amount) for name, amount in offered(node).items() if accelerators.is_accelerator(name)})
    if offers := [f"{count} × {name}" for name, count in sorted(amounts.items()) if count]:
        yield passed("accelerators", joined(offers))
    elif "nodes" not in snapshot.forbidden:
        remedy = "jobs with resources.gpu wait for ever: add nodes with devices and their device plugin"
        yield warned("accelerators", "none is offered by any node", remedy)


def storage(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that a claim without a storage class gets a volume."""
    key = "storageclass.kubernetes.io/is-default-class"
    defaults = [each for each in snapshot.storage_classes if (each["metadata"].get("annotations") or {}).get(key) == "true"]
    names = joined(sorted(map(pod_status.name, snapshot.storage_classes)))
    if "storageclasses.storage.k8s.io" in snapshot.forbidden:
        yield warned("storage", "you may not list storage classes", "name storageClass in the job file if a claim stays pending")
    elif not names:
        remedy = "keep the output in a store, or ask the cluster's administrator for a provisioner"
        yield warned("storage", "there are no storage classes: new claims stay pending", remedy)
    elif defaults:
        yield passed("storage", f"{names}; {pod_status.name(defaults[0])} is the default")
    else:
        yield warned("storage", f"{names}; none is the default", "name storageClass under volumes in the job file")


def worker(snapshot: Snapshot) -> Iterator[Finding]:
    """Check that the API server would admit a small worker."""
    error, message = snapshot.dry_run_error, str(snapshot.dry_run_error)
    if error is None:
        yield passed("worker", f"one with {sample_pod.LITTLE} would be admitted")
    elif isinstance(error, Absent):
        yield Finding("worker", message, "choose another namespace with -n")
    elif isinstance(error, Forbidden) or "does not support dry run" in message:
        yield warned("worker", f"not tried: {message}", "`outlast why` says what refuses a job's pods")
    else:
        refusal = messages.refusal(snapshot.namespace, message)
        may_fit = refusal.name == "limit-range"  # a worker that requests more, or less, may be admitted
        what = f"one with {sample_pod.LITTLE} would not be admitted: {refusal.what}"
        yield Finding("worker", what, refusal.remedy, outcome="warn" if may_fit else "fail")


CHECKS = (server, rights, definition, operator, conflicting_controllers, nodes, devices, storage, worker)


def checks(snapshot: Snapshot) -> Iterator[Finding]:
    """Run all checks. Raises ClusterError if the API server's version is invalid."""
    for check in CHECKS:
        yield from check(snapshot)
