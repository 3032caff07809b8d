"""What the operator decides, in a cluster in memory where everything moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outlast import kinds
from simulated import EVERY, Cluster, Killed, trains


def a_cluster(replicas: int = 2, *, low: int = 1, high: int = 4, **fields: Any) -> Cluster:
    return Cluster({"replicas": replicas, "min": low, "max": high}, **fields)


def training(replicas: int = 2, **fields: Any) -> Cluster:
    """A cluster whose job trains for a while."""
    cluster = a_cluster(replicas, **fields)
    cluster.until(trains(replicas))
    cluster.run(10)
    return cluster


def again(cluster: Cluster, workers: int = 2, *, by: Callable[[], object], seconds: float = 300) -> list[str]:
    """Do something to it, and wait until so many workers train in another world; what was written meanwhile."""
    generation, before = cluster.status["generation"], len(cluster.writes)
    by()
    cluster.until(lambda c: c.status["generation"] > generation and trains(workers)(c), seconds)
    cluster.run(10)
    return cluster.writes[before:]


def pod(cluster: Cluster, index: int) -> dict[str, Any]:
    return cluster.documents["Pod", f"train-worker-{index}"]


def repeated(cluster: Cluster) -> int:
    """How many steps were done more than once; none may be missing."""
    counts = Counter(step for _, step in cluster.done_steps)
    assert sorted(counts) == list(range(1, max(counts) + 1))
    return sum(count - 1 for count in counts.values())


def test_a_job_trains_to_its_end_and_is_then_left_alone() -> None:
    cluster = a_cluster(2, steps=30)
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
    assert [step for _, step in cluster.done_steps] == list(range(1, 31))
    cluster.run(120)
    before = len(cluster.writes)
    cluster.run(300)
    assert cluster.writes[before:] == []
    assert {pod["status"]["phase"] for pod in cluster.pods} == {"Succeeded"}
    assert cluster.made == {"train-worker-0": 1, "train-worker-1": 1}
    assert cluster.status["reason"] == "workers 0 and 1 are done"
    assert (cluster.status["progress"], cluster.status["restarts"], cluster.status["workersText"]) == ("100 %", 0, "0/1-4")
    assert 0.7 < cluster.status["goodput"] <= 1


def test_scaling_makes_exactly_so_many_pods_and_loses_no_step() -> None:
    cluster = training(2)
    total = 2
    for wanted, more in ((4, 2), (1, 0), (3, 2)):
        cluster.most, total = 0, total + more
        again(cluster, wanted, by=lambda wanted=wanted: cluster.change(replicas=wanted))  # type: ignore[misc]
        assert cluster.most <= wanted
        assert sum(cluster.made.values()) == total
    assert repeated(cluster) == 0
    assert cluster.status["restarts"] == cluster.status["interruptions"] == 0


@pytest.mark.parametrize("change", [{"suspend": True}, {"replicas": 0}])
def test_a_suspended_job_saves_first_has_no_pods_and_goes_on_where_it_was(change: dict[str, Any]) -> None:
    cluster = training(2)
    step = cluster.step
    cluster.change(**change)
    cluster.until(lambda c: not c.pods)
    cluster.run(60)
    settled = len(cluster.writes)
    cluster.run(300)
    assert cluster.writes[settled:] == []
    assert (cluster.status["state"], cluster.status["reason"], cluster.status["replicas"]) == ("Suspended", "suspended", 0)
    assert cluster.committed >= step
    cluster.change(suspend=False, replicas=2)
    cluster.until(trains(2))
    cluster.run(20)
    assert repeated(cluster) == 0
    assert cluster.status["interruptions"] == 0


def test_a_process_that_fails_costs_no_pod() -> None:
    cluster = training()
    made = dict(cluster.made)
    again(cluster, by=lambda: cluster.fail(1))
    assert cluster.made == made
    assert cluster.status["restarts"] == 1
    failure = cluster.status["lastFailure"]
    assert (failure["worker"], failure["reason"], failure["node"]) == (1, "rank 1 on worker 1 failed", "node-1")


def test_a_script_that_fails_at_one_step_ends_the_job() -> None:
    cluster = training()
    for _ in range(3):
        cluster.committed = cluster.step = 0
        cluster.until(lambda c: c.status["state"] == "Failed" or any(a.standing == "training" for a in c.agents.values()))
        cluster.step = 7
        cluster.fail(0)
        cluster.run(5)
    cluster.until(lambda c: c.status["state"] == "Failed")
    assert cluster.status["reason"] == "rank 0 on worker 0 failed at step 7; this step has failed 3 times in a row"
    assert cluster.status["conditions"][-1]["type"] == "Failed"
    assert cluster.status["conditions"][-1]["reason"] == "NoProgress"
    cluster.until(lambda c: not c.alive())
    assert cluster.status["replicas"] == 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_container_is_made_anew_and_counts(index: int) -> None:
    cluster = training()
    again(cluster, by=lambda: cluster.end(pod(cluster, index), 137))
    assert cluster.status["restarts"] == 1
    assert cluster.status["lastFailure"]["reason"] == f"worker {index} was killed (exit code 137)"
    assert repeated(cluster) <= EVERY


def test_running_out_of_memory_again_and_again_ends_by_the_budget() -> None:
    cluster = training(low=2, restarts={"limit": 3}, steps=10_000)
    cluster.every = 10_000  # no progress
    for _ in range(40):
        for each in cluster.pods:
            if each["status"]["phase"] == "Running" and each["metadata"]["name"] == "train-worker-0":
                cluster.end(each, 137, reason="OOMKilled")
        cluster.run(20)
        if cluster.status["state"] == "Failed":
            break
    assert cluster.status["reason"].startswith(
        "worker 0 was killed: out of memory; raise resources.memory; restarts.limit (3 within"
    )
    assert cluster.made["train-worker-0"] == 4


@pytest.mark.parametrize(
    "reason", ["EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager", "DeletionByPodGC"]
)
def test_a_disruption_never_counts(reason: str) -> None:
    cluster = training()
    for n in (1, 2, 3):
        again(cluster, by=lambda: cluster.end(pod(cluster, 1), 137, disrupted=reason))
        assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, n)


def test_a_pod_that_is_deleted_saves_first_and_comes_back() -> None:
    cluster = training()
    again(cluster, by=lambda: cluster.delete(kinds.POD, "train-worker-0", pod(cluster, 0)["metadata"]["uid"]))
    assert repeated(cluster) == 0
    assert cluster.status["restarts"] == 0
    assert cluster.made["train-worker-0"] == 2


def test_workers_leave_a_node_that_is_going_away() -> None:
    cluster = training()
    node = pod(cluster, 0)["spec"]["nodeName"]
    taints = {"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]}
    again(cluster, by=lambda: cluster.documents["Node", node].update(spec=taints))
    assert pod(cluster, 0)["spec"]["nodeName"] != node
    assert repeated(cluster) == 0
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 1)


def test_a_lost_node_is_given_up_after_a_short_time() -> None:
    cluster = training()
    began, node = cluster.now, pod(cluster, 1)["spec"]["nodeName"]
    writes = again(cluster, by=lambda: cluster.lose(node))
    assert f"delete train-worker-1: worker 1 was lost: its node {node} has not answered for 30 s" in writes
    assert cluster.now - began < 90
    assert pod(cluster, 1)["spec"]["nodeName"] != node


def test_a_worker_that_stands_still_as_a_whole_is_replaced() -> None:
    cluster = training()

    def freeze() -> None:
        agent = cluster.agent_of(0)
        assert agent is not None
        agent.frozen = True

    writes = again(cluster, by=freeze)
    assert "delete train-worker-0: worker 0 has said nothing for 30 s" in writes
    assert cluster.status["lastFailure"]["reason"] == "worker 0 has said nothing for 30 s"


def test_a_wrong_configuration_ends_the_job_at_once() -> None:
    cluster = a_cluster()
    cluster.run(3)
    cluster.end(pod(cluster, 0), 78)
    cluster.run(2)
    assert cluster.status["state"] == "Failed"
    assert "the configuration is wrong, a restart would not help" in cluster.status["reason"]
    assert cluster.status["conditions"][-1]["reason"] == "WrongConfiguration"


def test_the_api_server_is_away_and_nobody_is_taken_for_dead() -> None:
    cluster = training()
    generation, before = cluster.status["generation"], len(cluster.writes)
    cluster.reached = False
    for _ in range(60):
        cluster.pass_()
    cluster.reached, cluster.since = True, cluster.now
    step = cluster.step
    cluster.run(40)
    assert cluster.step > step + 30
    assert cluster.status["generation"] == generation
    assert [write for write in cluster.writes[before:] if not write.startswith("status Running")] == []


def test_deadlines_end_the_job_and_begin_anew_when_it_is_resumed() -> None:
    cluster = training(activeDeadlineSeconds=60)
    cluster.change(suspend=True)
    cluster.until(lambda c: not c.pods)
    cluster.run(120)
    cluster.change(suspend=False)
    cluster.until(trains(2))
    cluster.run(120)
    assert cluster.status["reason"] == "the job has run for activeDeadlineSeconds (60)"
    cluster.until(lambda c: not c.alive())


def test_a_job_that_never_starts_says_why() -> None:
    cluster = a_cluster(startupDeadlineSeconds=30, nodes=0)
    cluster.run(40)
    assert (cluster.status["state"], cluster.status["conditions"][-1]["reason"]) == ("Failed", "StartupDeadlineExceeded")


def test_an_ended_job_goes_after_its_time_and_is_never_run_again() -> None:
    cluster = a_cluster(2, steps=10, ttlSecondsAfterFinished=100)
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
    made, end = dict(cluster.made), cluster.now
    while cluster.documents:
        cluster.pass_()
        cluster.look()
        assert cluster.made == made
    assert 99 <= cluster.now - end <= 102


@pytest.mark.parametrize(("policy", "left"), [("All", 0), ("Running", 2), ("None", 2)])
def test_pods_of_an_ended_job_go_as_the_policy_says(policy: str, left: int) -> None:
    cluster = a_cluster(2, steps=10, cleanPodPolicy=policy)
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
    cluster.run(120)
    assert len(cluster.pods) == left


def test_a_node_on_which_workers_keep_failing_gets_no_more() -> None:
    cluster = training()
    node = pod(cluster, 1)["spec"]["nodeName"]
    for _ in range(2):
        cluster.committed = 0
        again(cluster, by=lambda: cluster.end(pod(cluster, 1), 139))
        cluster.documents["Pod", "train-worker-1"]["spec"]["nodeName"] = node
    cluster.committed = 0
    again(cluster, by=lambda: cluster.end(pod(cluster, 1), 139))
    affinity = pod(cluster, 1)["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    wanted = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]}
    assert wanted in affinity["nodeSelectorTerms"][0]["matchExpressions"]


def test_a_job_of_the_same_name_waits_for_the_pods_of_the_one_before() -> None:
    cluster = training()
    cluster.agents.clear()
    job = cluster.documents.pop(("ElasticJob", "train"))
    cluster.put({**job, "metadata": {"name": "train", "namespace": "team", "generation": 1}, "status": {}})
    cluster.documents["ElasticJob", "train"]["metadata"]["uid"] = "ffffffff-uid"
    made = dict(cluster.made)
    for _ in range(5):
        cluster.now += 1
        cluster.look()
    assert cluster.made == made, "their names are taken"
    for each in list(cluster.pods):
        cluster.gone(each)
    cluster.until(trains(2))
    assert cluster.status["run"] == "train-ffffffff"


def test_an_operator_that_is_killed_three_hundred_times_misses_nothing() -> None:
    cluster = a_cluster(3, steps=10**6, restarts={"limit": 1000})
    chance = random.Random(0)
    killed = 0
    while killed < 300:
        cluster.pass_()
        event = chance.random()
        if event < 0.02:
            cluster.change(replicas=chance.randint(1, 4))
        elif event < 0.05 and cluster.alive():
            each = chance.choice(cluster.alive())
            cluster.delete(kinds.POD, each["metadata"]["name"], each["metadata"]["uid"], chance.choice([None, 0]))
        elif event < 0.08:
            cluster.fail(chance.randint(0, 3))
        try:
            cluster.look(dies_after=chance.randint(0, 3))
        except Killed:
            killed += 1
        assert len(cluster.alive()) <= 4
    cluster.change(replicas=3)
    cluster.until(trains(3))
    cluster.steps = cluster.step + 50
    cluster.until(lambda c: c.status["state"] == "Succeeded", 3000)
    repeated(cluster)
    assert cluster.most <= 4
