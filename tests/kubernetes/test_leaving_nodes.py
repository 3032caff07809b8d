"""A notice has a time: from the taint of a node to the deadline that its workers are told."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.job.contract import LEAVING, Annotation
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.operator import cluster_cache, leaving_nodes
from outlast.kubernetes.operator.leaving_nodes import Departure
from simulated import Cluster, training, trains

NOW = 1_700_000_000.0


def a_node(*taints: str, labels: dict[str, str] | None = None, **annotations: str) -> dict[str, Any]:
    """A node; a taint is `key` or `key=value`."""
    found = [dict(zip(("key", "value"), taint.split("="), strict=False)) for taint in taints]
    names = {"at": Annotation.LEAVING_AT, "why": Annotation.LEAVING_REASON}
    meta = {"name": "n", "labels": labels or {}, "annotations": {names[key]: value for key, value in annotations.items()}}
    return {"metadata": meta, "spec": {"taints": found}, leaving_nodes.TAINTED_AT: NOW}


def scheduled(message: str = "", *, cordoned: bool = True, labels: dict[str, str] | None = None) -> dict[str, Any]:
    conditions = [{"type": "VMEventScheduled", "status": "True", "message": message}]
    return {**a_node(labels=labels), "spec": {"unschedulable": cordoned}, "status": {"conditions": conditions}}


AT = "2023-11-14T22:13:35Z"  # NOW + 15
SPOT, AZURE = {"eks.amazonaws.com/capacityType": "SPOT"}, {"kubernetes.azure.com/scalesetpriority": "spot"}
ITN, REBALANCE = (f"aws-node-termination-handler/{kind}" for kind in ("spot-itn", "rebalance-recommendation"))


@pytest.mark.parametrize(
    ("node", "leave"),
    [
        (a_node(), None),
        (a_node("nvidia.com/gpu"), None),
        (a_node(at=AT), None),  # the taint is the notice: it was withdrawn
        (a_node(f"{LEAVING}=spot", at=AT, why="AWS takes it back"), Departure(f"{LEAVING}=spot", NOW + 15, "AWS takes it back")),
        (a_node(f"{LEAVING}=spot"), Departure(f"{LEAVING}=spot", NOW + 120)),
        (a_node(f"{LEAVING}=spot", at="soon"), Departure(f"{LEAVING}=spot", NOW + 120)),
        (a_node(f"{LEAVING}=rebalance"), Departure(f"{LEAVING}=rebalance")),
        (a_node(f"{LEAVING}=of-another-version"), Departure(LEAVING)),
        (a_node(f"{ITN}=x"), Departure(ITN, NOW + 120)),
        (a_node(f"{REBALANCE}=x"), Departure(REBALANCE)),
        (a_node(REBALANCE, ITN), Departure(REBALANCE, NOW + 120)),
        (a_node(f"{LEAVING}=maintenance", at=AT), Departure(f"{LEAVING}=maintenance", NOW + 15)),
        (a_node(f"{LEAVING}=maintenance", at="2023-11-13T22:13:20Z"), Departure(f"{LEAVING}=maintenance")),  # it has begun
        (a_node("remediator.kubernetes.azure.com/unschedulable"), Departure("remediator.kubernetes.azure.com/unschedulable")),
        (scheduled(labels=AZURE), Departure("VMEventScheduled", NOW + 30)),
        (scheduled(cordoned=False), None),  # it still takes pods: a freeze of some seconds
        (scheduled("Freeze is scheduled for this VM"), None),  # seconds, although somebody cordoned it
        (scheduled("Preempt is scheduled for this VM"), Departure("VMEventScheduled")),
        (a_node("karpenter.sh/disrupted"), Departure("karpenter.sh/disrupted")),
        (a_node("karpenter.sh/disrupted", labels=SPOT), Departure("karpenter.sh/disrupted", NOW + 120)),
        (a_node("karpenter.sh/disrupted", labels=SPOT, at=AT), Departure("karpenter.sh/disrupted", NOW + 15)),
    ],
)
def test_a_taint_has_the_annotated_deadline_or_the_usual_one_of_its_kind(node: dict[str, Any], leave: Departure | None) -> None:
    assert leaving_nodes.node_departure(node) == leave


def test_the_soonest_deadline_counts_and_none_is_the_latest() -> None:
    late, soon, open_ = Departure("a", NOW + 120), Departure("b", NOW + 15), Departure("c")
    assert leaving_nodes.earliest(None, open_, late, soon) == soon
    assert leaving_nodes.earliest(open_, None) == open_
    assert leaving_nodes.earliest(None) is None


@pytest.mark.parametrize(("left_s", "grace_s"), [(15, 13), (120, None), (108, None), (107, None), (106, 104), (1, 1), (-60, 1)])
def test_a_pod_is_given_the_time_that_is_left_and_never_more_than_its_own(left_s: float, grace_s: int | None) -> None:
    pod = {"spec": {"terminationGracePeriodSeconds": 105}}
    assert Departure("spot", NOW + left_s).grace_s(pod, NOW) == grace_s
    assert Departure("spot").grace_s(pod, NOW) is None


def test_the_operator_reads_a_nodes_deadline_and_nothing_else_of_its_annotations() -> None:
    node = a_node(f"{LEAVING}=spot", at=AT)
    node["metadata"]["annotations"]["volumes.kubernetes.io/controller-managed-attach-detach"] = "true"
    kept = cluster_cache.trimmed(kinds.NODE, {**node, "status": {}})
    assert kept["metadata"]["annotations"] == {Annotation.LEAVING_AT: AT}


# A job


def notice(cluster: Cluster, index: int, left_s: float | None, kind: str = "spot") -> str:
    """Taint the node of a worker; returns its name."""
    node: str = cluster.documents["Pod", f"train-worker-{index}"]["spec"]["nodeName"]
    document = cluster.documents["Node", node]
    document["spec"] = {"taints": [{"key": LEAVING, "value": kind, "effect": "NoSchedule"}]}
    if left_s is not None:
        document["metadata"]["annotations"] = {Annotation.LEAVING_AT: pod_status.rfc3339(cluster.now + left_s)}
    return node


@pytest.mark.parametrize("left_s", [15, 120, None])
def test_a_worker_is_gone_before_its_machine_is_and_nothing_is_lost(left_s: float | None) -> None:
    cluster = training(steps=10_000)
    began, generation = cluster.now, cluster.status["generation"]
    uid = cluster.documents["Pod", "train-worker-1"]["metadata"]["uid"]
    node = notice(cluster, 1, left_s, "spot" if left_s else "rebalance")
    plan = cluster.look()
    [deletion] = plan.deletes
    assert (deletion.name, deletion.grace_s) == ("train-worker-1", {15: 12, 120: None, None: None}[left_s])
    told = cluster.status["rendezvous"].get("leaving")
    assert [(each["worker"], each["uid"]) for each in told or ()] == ([(1, uid)] if left_s else [])
    assert not left_s or 0 <= began + left_s - told[0]["deadline"] < 1, "API servers keep whole seconds"
    cluster.until(lambda c: c.status["generation"] > generation and c.committed > 0, 12)
    assert cluster.now - began < 13, "saved before the shortest of these deadlines"
    cluster.until(trains(2), 60)
    cluster.run(10)
    assert cluster.documents["Pod", "train-worker-1"]["spec"]["nodeName"] != node
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 1)
    steps = [step for _, step in cluster.done_steps]
    assert sorted(steps) == list(range(1, max(steps) + 1)), "none is done twice, none left out"
    assert "leaving" not in cluster.status["rendezvous"], "it is of a pod that is gone"


def test_all_workers_of_a_node_leave_it_together() -> None:
    cluster = training(steps=10_000, nodes=1)
    notice(cluster, 0, 60)
    plan = cluster.look()
    assert {(each.name, each.grace_s) for each in plan.deletes} == {("train-worker-0", 57), ("train-worker-1", 57)}
    assert [each["worker"] for each in cluster.status["rendezvous"]["leaving"]] == [0, 1]


def test_a_deadline_that_comes_later_shortens_a_deletion_that_has_begun() -> None:
    cluster = training(steps=10_000)
    pod = cluster.documents["Pod", "train-worker-1"]
    pod["metadata"] |= {"deletionTimestamp": pod_status.rfc3339(cluster.now + 105), "deletionGracePeriodSeconds": 105}
    cluster.look()
    notice(cluster, 1, 15)
    plan = cluster.look()
    [deletion] = plan.deletes
    assert (deletion.name, deletion.grace_s) == ("train-worker-1", 12)
    assert cluster.status["rendezvous"]["leaving"][0]["worker"] == 1
    pod["metadata"] |= {"deletionTimestamp": pod_status.rfc3339(cluster.now + 12), "deletionGracePeriodSeconds": 12}
    assert not cluster.look().deletes, "once is enough"


def test_a_recommendation_that_is_withdrawn_in_time_costs_nothing() -> None:
    cluster = Cluster({"replicas": 2, "min": 1, "max": 4}, steps=10_000)
    cluster.until(lambda c: len(c.pods) == 2)
    node = notice(cluster, 1, None, "rebalance")
    assert not cluster.look().deletes, "a pod that was just put there waits a moment"
    cluster.documents["Node", node]["spec"] = {}
    cluster.until(trains(2))
    cluster.run(60)
    assert cluster.made == {"train-worker-0": 1, "train-worker-1": 1}
    assert cluster.status["interruptions"] == 0


def test_a_pod_can_carry_the_deadline_where_nobody_may_write_to_nodes() -> None:
    cluster = training(steps=10_000)
    pod = cluster.documents["Pod", "train-worker-0"]
    pod["metadata"]["annotations"][Annotation.LEAVING_AT] = pod_status.rfc3339(cluster.now + 40)
    [deletion] = cluster.look().deletes
    assert (deletion.name, deletion.grace_s) == ("train-worker-0", 37)
