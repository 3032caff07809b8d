"""ElasticJobs in a queue, on a real API server with the operator that is installed there. What Kueue would say the test says, by
hand; where Kueue's definitions are not installed, others stand in that take anything.

KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/kubernetes/test_queues_cluster.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import namespaces
from namespaces import ELASTIC, Document, Namespace, status
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests.scheduling import kueue

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
KINDS = (kinds.WORKLOAD_V1BETA2, kinds.FLAVOR_V1BETA2, kinds.WORKLOAD_PRIORITY_V1BETA2)
WORKLOADS = "workloads.kueue.x-k8s.io"
FLAVOR = kinds.FLAVOR_V1BETA2.document({"name": "outlast-test"}, spec={"nodeLabels": {"kubernetes.io/os": "linux"}})


def definition(kind: kinds.Kind) -> Document:
    """A definition of a kind of Kueue that takes anything."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1beta2", "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    names = {"plural": kind.plural, "kind": kind.kind, "singular": kind.kind.lower(), "listKind": f"{kind.kind}List"}
    scope = "Namespaced" if kind.namespaced else "Cluster"
    return kinds.CRD.document(
        {"name": kind.resource, "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"}},
        spec={"group": kind.group, "names": names, "scope": scope, "versions": [version]},
    )


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    with namespaces.made() as made:
        missing = [kind for kind in KINDS if not made.kubectl("get", "crd", kind.resource, "-o", "name", fails=True)]
        for kind in missing:
            made.apply([definition(kind)])
        for kind in missing:
            made.kubectl("wait", "--for=condition=Established", f"crd/{kind.resource}")
        made.apply([FLAVOR])
        yield made
        made.kubectl("delete", kinds.FLAVOR.resource, "outlast-test")
        for kind in missing:
            made.kubectl("delete", "crd", kind.resource)


def seen(namespace: Namespace, what: Callable[[], object], timeout_s: float = 120) -> Any:
    return namespace.wait(what, lambda: namespace.kubectl("get", f"{ELASTIC},{WORKLOADS},pods", "-o", "yaml"), timeout_s)


def state(namespace: Namespace, name: str) -> str:
    return str(status(namespace, name).get("state"))


def workloads(namespace: Namespace, job: str) -> list[Document]:
    found = json.loads(namespace.kubectl("get", WORKLOADS, "-l", f"outlast.dev/job={job}", "-o", "json"))["items"]
    return sorted(found, key=lambda each: str(each["metadata"]["name"]))


def counts(namespace: Namespace, job: str) -> list[int]:
    return [each["spec"]["podSets"][0]["count"] for each in workloads(namespace, job)]


def conditions(workload: Document) -> dict[str, str]:
    return {each["type"]: each["status"] for each in (workload.get("status") or {}).get("conditions", ())}


def say(namespace: Namespace, workload: Document, changed: dict[str, bool], **fields: Any) -> None:
    """Be Kueue."""
    held = {**conditions(workload), **{type_: str(holds) for type_, holds in changed.items()}}
    always = {"reason": "Said", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    said = [{"type": each, "status": holds, "message": f"{each}, says the test", **always} for each, holds in held.items()]
    change = json.dumps({"status": {"conditions": said, **fields}})
    namespace.kubectl("patch", WORKLOADS, workload["metadata"]["name"], "--subresource=status", "--type=merge", "-p", change)


def admit(namespace: Namespace, workload: Document, count: int) -> None:
    assignment = {"name": kueue.PODS, "flavors": {"cpu": "outlast-test"}, "count": count}
    admission = {"clusterQueue": "test", "podSetAssignments": [assignment]}
    say(namespace, workload, {"QuotaReserved": True, "Admitted": True, "Evicted": False}, admission=admission)


def test_pods_are_there_for_what_is_admitted_and_for_nothing_else(namespace: Namespace) -> None:
    name = "queued"
    workers = {"replicas": 3, "min": 2, "max": 4}
    namespace.run(name, "elasticjob", workers=workers, scheduling={"queue": "q"}, args=["--epochs=100000"])
    seen(namespace, lambda: counts(namespace, name) == [3])
    seen(namespace, lambda: state(namespace, name) == "Queued")
    assert namespace.pods(name) == []

    admit(namespace, workloads(namespace, name)[0], 2)
    seen(namespace, lambda: len(namespace.pods(name)) == 2)
    assert {pod["spec"]["nodeSelector"]["kubernetes.io/os"] for pod in namespace.pods(name)} == {"linux"}
    seen(namespace, lambda: counts(namespace, name) == [3, 1])
    admit(namespace, workloads(namespace, name)[1], 1)
    seen(namespace, lambda: len(namespace.pods(name)) == 3)

    say(namespace, workloads(namespace, name)[1], {"Evicted": True})
    seen(namespace, lambda: len(namespace.pods(name)) == 2)
    seen(namespace, lambda: conditions(workloads(namespace, name)[1])["QuotaReserved"] == "False")
    say(namespace, workloads(namespace, name)[0], {"Evicted": True})
    seen(namespace, lambda: state(namespace, name) == "Queued")
    assert str(status(namespace, name)["reason"]).endswith(": Evicted, says the test")
    seen(namespace, lambda: not namespace.pods(name))
    seen(namespace, lambda: counts(namespace, name) == [3])
    (waiting,) = workloads(namespace, name)
    assert (conditions(waiting)["Admitted"], "admission" in waiting["status"]) == ("False", False)

    admit(namespace, waiting, 3)
    seen(namespace, lambda: len(namespace.pods(name)) == 3)
    namespace.kubectl("patch", ELASTIC, name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    seen(namespace, lambda: not namespace.pods(name))
    seen(namespace, lambda: not workloads(namespace, name))
    namespace.kubectl("patch", ELASTIC, name, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    seen(namespace, lambda: counts(namespace, name) == [3])
    namespace.kubectl("delete", ELASTIC, name)
    seen(namespace, lambda: not workloads(namespace, name))


def test_a_job_that_has_ended_holds_no_quota(namespace: Namespace) -> None:
    name = "ended"
    namespace.run(name, "elasticjob", scheduling={"queue": "q"}, activeDeadlineSeconds=5, args=["--epochs=100000"])
    (asked,) = seen(namespace, lambda: workloads(namespace, name))
    admit(namespace, asked, 2)
    seen(namespace, lambda: state(namespace, name) == "Failed")
    seen(namespace, lambda: conditions(workloads(namespace, name)[0]).get("Finished") == "True")
    namespace.kubectl("delete", ELASTIC, name)


def test_a_job_that_somebody_else_manages_is_left_alone(namespace: Namespace) -> None:
    namespace.run("remote", "elasticjob", scheduling={"queue": "q"}, managedBy="kueue.x-k8s.io/multikueue")
    namespace.run("local", "elasticjob", scheduling={"queue": "q"})
    seen(namespace, lambda: state(namespace, "local") == "Queued")
    assert (status(namespace, "remote"), workloads(namespace, "remote"), namespace.pods("remote")) == ({}, [], [])
    change = '[{"op": "remove", "path": "/spec/managedBy"}]'
    changed = namespace.kubectl("patch", ELASTIC, "remote", "--type=json", "-p", change, fails=True)
    assert changed == "", "who manages a job cannot change"
    namespace.kubectl("delete", ELASTIC, "remote", "local")
