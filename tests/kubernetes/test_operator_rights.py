"""What the operator may do is what it does. Every test with a `world` runs with the roles that are installed; here one uses all
that they allow."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from typing import Any

from operators import World
from outlast.kubernetes.api.kinds import ELASTIC_JOB, KINDS, LEGACY_JOB
from outlast.kubernetes.operator import main
from outlast.kubernetes.operator.observed_job import Limits
from rights import RULES, Right, may, needed, rights

Document = dict[str, Any]
FOR_WORKERS: set[Right] = {
    *(("create", "coordination.k8s.io", "leases"), ("patch", "coordination.k8s.io", "leases")),
    ("get", "outlast.dev", "elasticjobs"),
}
"""The API server lets nobody give what they do not have."""
SAME_RULE: set[Right] = {("get", LEGACY_JOB.group, "elasticjobs")}
WHERE_ENFORCED: set[Right] = {("update", group, "elasticjobs/finalizers") for group in (ELASTIC_JOB.group, LEGACY_JOB.group)}
"""What OwnerReferencesPermissionEnforcement asks for, of who makes what a job owns."""


def an_old_job(name: str, **more: Any) -> Document:
    template = {"spec": {"containers": [{"name": "w", "image": "i"}]}}
    replicas = {"replicaSpecs": {"Worker": {"replicas": 1, "template": template}}}
    meta = {"name": name, "namespace": "default"}
    return {"apiVersion": LEGACY_JOB.api_version, "kind": "ElasticJob", "metadata": meta, "spec": {**replicas, **more}}


def test_the_roles_allow_nothing_that_the_operator_does_not_do(world: World) -> None:
    api = world.api
    api.unserved = ()
    submit = functools.partial(world.submit, workers={"replicas": 2, "min": 2, "max": 4})

    def change(resource: str, name: str, **fields: Any) -> None:
        with api.lock:
            old = json.loads(json.dumps(api.documents[resource, "default", name]))
            old["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            api.put({**old, **{key: {**old.get(key, {}), **value} for key, value in fields.items()}})

    def has(part: str) -> bool:
        return any(re.search(part, each) for each in list(api.asked))

    def put(*kinds_: str, names: tuple[str, ...]) -> None:
        for kind in KINDS:
            for name in names if kind.kind in kinds_ else ():
                meta = {"name": name, "namespace": "default"}
                api.put({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta})

    def workloads(job: str) -> list[Document]:
        return [each for each in api.objects("workloads.kueue.x-k8s.io") if each["metadata"]["name"].startswith(job)]

    taken = ("Service", "ServiceAccount", "PersistentVolumeClaim", "PodDisruptionBudget", "PodGroup")
    put(*taken, names=("volcano", "coscheduling", "volcano-worker", "coscheduling-rdzv", "disk"))  # it looks whose they are
    put("Role", "RoleBinding", names=("role-worker",))
    for gang in ("volcano", "coscheduling"):
        submit(gang, scheduling={"gang": gang}, volumes=[{"claim": "disk", "to": "/data", "size": "1Gi"}])
        submit(f"own-{gang}", scheduling={"gang": gang}, volumes=[{"claim": "own", "to": "/data", "size": "1Gi"}])
    submit("role")  # refused again and again: its Event is counted
    submit("over", activeDeadlineSeconds=1, ttlSecondsAfterFinished=0)
    api.put(an_old_job("old", activeDeadlineSeconds=1, ttlSecondsAfterFinished=0))
    for name in ("waits", "evicted"):
        submit(name, scheduling={"queue": "q"}, volumes=[])
    late = api.documents[ELASTIC_JOB.resource, "default", "own-volcano"]["metadata"]["uid"]
    owner = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "name": "own-volcano", "uid": late}
    meta = {"name": "own-volcano-worker-0", "namespace": "default", "ownerReferences": [owner]}
    api.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}})  # another controller made it, without our label

    world.start(reconcilers=main.reconcilers(Limits()), every_s=0.5)
    api.until(lambda: has("PATCH .*/pods/own-volcano-worker-0") and workloads("waits") and workloads("evicted"))
    own = {f"own-{gang}-worker-{n}" for gang in ("volcano", "coscheduling") for n in (0, 1)}
    api.until(lambda: own <= set(world.pods()))  # what is made for them is there, so that a change patches it
    condition = {"status": "True", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    for conditions in (("QuotaReserved", "Admitted"), ("QuotaReserved", "Admitted", "Evicted")):
        admission = {"podSetAssignments": [{"name": "main", "flavors": {}, "count": 2}]}
        status = {"conditions": [{"type": each, "reason": each, **condition} for each in conditions], "admission": admission}
        change("workloads.kueue.x-k8s.io", workloads("evicted")[0]["metadata"]["name"], status=status)
        pods = [] if "Evicted" in conditions else ["evicted-worker-0", "evicted-worker-1"]
        api.until(lambda pods=pods: [name for name in world.pods() if name.startswith("evicted")] == pods)
    for name in ("own-volcano", "own-coscheduling", "waits"):
        change(ELASTIC_JOB.resource, name, spec={"workers": {"replicas": 3, "min": 3, "max": 5}})
    api.until(lambda: has("PATCH .*/workloads/waits"))
    change(ELASTIC_JOB.resource, "waits", spec={"suspend": True})

    allowed = rights(RULES["ClusterRole"]) | rights(RULES["Role"])
    kept = FOR_WORKERS | SAME_RULE | WHERE_ENFORCED

    def unused() -> set[Right]:
        return allowed - kept - {found[0] for each in list(api.asked) if (found := needed(each))}

    with contextlib.suppress(AssertionError):
        api.until(lambda: not unused())
    assert unused() == set()
    assert [each for each in api.asked if not may(each)] == []
