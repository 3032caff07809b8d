"""What the operator does for a job that asks for an etcd: agents decide who trains together, all else is as ever."""

from __future__ import annotations

import json
from typing import Any

import pytest

import simulated
from outlast.contract import Annotation, Env
from outlast.kube import kinds
from simulated import EVERY, Cluster, Killed, trains
from test_decide import again, pod, repeated

ETCD = {"backend": "etcd", "endpoint": "etcd:2379"}


def a_cluster(replicas: int = 2, *, low: int = 1, high: int = 4, **fields: Any) -> Cluster:
    return Cluster({"replicas": replicas, "min": low, "max": high}, rendezvous=ETCD, **fields)


def training(replicas: int = 2, **fields: Any) -> Cluster:
    cluster = a_cluster(replicas, **fields)
    cluster.until(trains(replicas))
    cluster.run(10)
    return cluster


def test_agents_decide_and_the_operator_learns_of_it_to_the_end() -> None:
    cluster = training(2, steps=60)
    env = {each["name"]: each.get("value") for each in pod(cluster, 0)["spec"]["containers"][0]["env"]}
    assert env[Env.RENDEZVOUS] == "etcd://etcd:2379"
    assert cluster.status["rendezvous"]["wanted"] == {"number": 1, "replicas": 2, "sizes": [1, 2, 3, 4], "expected": [0, 1]}
    assert cluster.deciders
    assert cluster.deciders.world
    assert cluster.status["reason"] == cluster.deciders.world.reason == "training starts with all 2"
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
    assert [step for _, step in cluster.done_steps] == list(range(1, 61))
    assert (cluster.status["reason"], cluster.status["restarts"]) == ("workers 0 and 1 are done", 0)


def test_a_worker_that_dies_is_replaced_and_its_end_is_counted_once() -> None:
    cluster = training(2)
    again(cluster, by=lambda: cluster.end(pod(cluster, 1), 137))
    assert (cluster.status["restarts"], cluster.status.get("interruptions", 0)) == (1, 0)
    assert cluster.status["lastFailure"]["reason"] == "worker 1 was killed (exit code 137)"
    assert repeated(cluster) <= EVERY


@pytest.mark.parametrize("fields", [{"rendezvous": ETCD}, {}], ids=["elected", "operator"])
@pytest.mark.parametrize("after_s", [2, 5])
def test_a_newcomer_waits_for_the_save_of_the_last_worker_that_has_the_state(monkeypatch, fields: Any, after_s: int) -> None:
    cluster = Cluster({"replicas": 1, "min": 1, "max": 3}, **fields)
    cluster.every = 10**6
    cluster.until(trains(1))
    cluster.run(10)
    cluster.change(replicas=2)
    cluster.run(after_s)
    before = len(cluster.done_steps)
    monkeypatch.setattr(simulated, "SAVE_S", 20.0)
    cluster.delete(kinds.POD, "train-worker-0", pod(cluster, 0)["metadata"]["uid"])
    cluster.run(60)
    steps = [step for _, step in cluster.done_steps[before:]]
    assert steps == list(range(cluster.done_steps[before - 1][1] + 1, steps[-1] + 1))
    assert not any("begins again" in write for write in cluster.writes)


def test_a_process_that_fails_is_counted_by_who_decides_and_the_status_knows() -> None:
    cluster = training(2)
    writes = again(cluster, by=lambda: cluster.fail(1))
    assert cluster.status["restarts"] == cluster.status["judged"]["elected"] == 1
    assert cluster.status["lastFailure"]["reason"] == "rank 1 on worker 1 failed"
    assert not [write for write in writes if write.startswith(("delete", "create"))]


def test_a_failure_that_cannot_be_read_is_counted_all_the_same() -> None:
    cluster = training(2)
    cluster.fail(1)
    for _ in range(10):
        cluster.pass_()
    for lease in cluster.all("Lease"):
        heard = json.loads(lease["metadata"]["annotations"][Annotation.DECIDED])
        heard["said"]["failure"] = {"code": "of another version"}
        lease["metadata"]["annotations"][Annotation.DECIDED] = json.dumps(heard)
    cluster.look()
    assert (cluster.status["restarts"], cluster.status["state"], cluster.status.get("lastFailure")) == (1, "Running", None)


def test_a_crash_loop_of_processes_ends_by_the_budget_with_the_operator_away() -> None:
    cluster = training(2, restarts={"limit": 2}, steps=4000, checkpoint={"every": "1h"})
    cluster.every = 10**6
    for _ in range(120):
        cluster.fail(0, code=137)
        cluster.pass_()
    assert {pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] for pod in cluster.pods} == {79}
    cluster.until(lambda c: c.status["state"] == "Failed", 5)
    assert "restarts.limit (2 within 1h without a new checkpoint) is used up" in cluster.status["reason"]
    assert [c["reason"] for c in cluster.status["conditions"] if c["type"] == "Failed"] == ["BackoffLimitExceeded"]
    assert cluster.status["restarts"] == 2


def test_a_run_that_is_given_up_is_not_begun_again_when_only_the_pods_could_tell() -> None:
    cluster = training(2)
    before = len(cluster.writes)
    for index in (0, 1):
        cluster.end(pod(cluster, index), 79)
    cluster.run(10)
    assert (cluster.status["state"], cluster.status["reason"]) == ("Failed", "worker 0 says that the run is given up")
    assert not [write for write in cluster.writes[before:] if write.startswith("create")]


def test_a_crash_loop_of_pods_ends_by_the_budget() -> None:
    cluster = training(2, restarts={"limit": 2}, steps=4000)
    cluster.every = 10**6
    for _ in range(400):
        if (agent := cluster.agent_of(1)) and agent.standing == "training":
            cluster.end(pod(cluster, 1), 137)
        cluster.pass_()
        cluster.look()
    assert cluster.status["state"] == "Failed"
    assert "restarts.limit (2 within 1h without a new checkpoint) is used up" in cluster.status["reason"]


def test_a_node_that_is_lost_is_nobodys_failure() -> None:
    cluster = training(2)
    again(cluster, by=lambda: cluster.lose(pod(cluster, 1)["spec"]["nodeName"]))
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 1)


def test_workers_come_and_go_as_is_wanted_and_no_step_is_lost() -> None:
    cluster = training(2)
    again(cluster, 3, by=lambda: cluster.change(replicas=3))
    writes = again(cluster, 1, by=lambda: cluster.change(replicas=1))
    assert [write.partition(":")[0] for write in writes if write.startswith("delete")] == [
        "delete train-worker-1", "delete train-worker-2",
    ]  # fmt: skip
    assert repeated(cluster) == 0
    generation = cluster.status["generation"]
    cluster.run(120)
    assert (cluster.status["generation"], cluster.status["world"]) == (generation, [0])
    assert (cluster.status["restarts"], cluster.status.get("interruptions", 0)) == (0, 0)


def test_who_is_rank_0_stays_when_there_are_to_be_fewer() -> None:
    cluster = training(2)
    again(cluster, by=lambda: cluster.end(pod(cluster, 0), 137))
    assert cluster.status["world"] == [1, 0]
    again(cluster, 1, by=lambda: cluster.change(replicas=1))
    assert cluster.status["world"] == [1]


def test_more_workers_than_the_job_began_with_may_train() -> None:
    cluster = training(2, high=2)
    again(cluster, 4, by=lambda: cluster.change(replicas=4, max=4))
    assert cluster.status["workersText"] == "4/1-4"


@pytest.mark.parametrize("pause", [10, 2000])
def test_a_job_is_suspended_and_goes_on_where_it_was(pause: float) -> None:
    cluster = training(2)
    generation = cluster.status["generation"]
    cluster.change(suspend=True)
    cluster.until(lambda c: c.status["state"] == "Suspended" and not c.pods)
    step = cluster.step
    cluster.run(pause)
    assert cluster.status["state"] == "Suspended"
    cluster.change(suspend=False)
    before = len(cluster.writes)
    cluster.until(trains(2))
    cluster.run(5)
    assert [write for write in cluster.writes[before:] if write.startswith("status Restarting")] == []
    assert cluster.status["generation"] > generation
    assert cluster.step > step
    assert (repeated(cluster), cluster.status["restarts"]) == (0, 0)


def test_a_drained_node_is_left_without_a_lost_step() -> None:
    cluster = training(2)
    node = cluster.documents["Node", pod(cluster, 1)["spec"]["nodeName"]]
    again(cluster, by=lambda: node["spec"].update(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]))
    assert (repeated(cluster), cluster.status["restarts"], cluster.status["interruptions"]) == (0, 0, 1)


def test_the_survivors_go_on_while_there_is_neither_an_operator_nor_an_api_server() -> None:
    cluster = training(3)
    cluster.reached = False
    cluster.end(pod(cluster, 1), 137)
    for _ in range(30):
        cluster.pass_()
    assert cluster.deciders
    assert cluster.deciders.world
    assert cluster.deciders.world.members == (0, 2)
    assert cluster.done_steps[-1][0] == cluster.deciders.world.generation
    cluster.reached, cluster.since = True, cluster.now
    again(cluster, 3, by=cluster.pass_)
    assert cluster.status["restarts"] == 1


def test_an_etcd_that_is_away_or_has_lost_everything_disturbs_nobody() -> None:
    cluster = training(2)
    assert cluster.deciders
    generation = cluster.status["generation"]
    cluster.deciders.etcd.up = False
    cluster.run(60)
    cluster.deciders.etcd.lose_data()
    cluster.deciders.etcd.up = True
    cluster.run(30)
    assert (cluster.status["state"], cluster.status["generation"]) == ("Running", generation)
    again(cluster, by=lambda: cluster.end(pod(cluster, 0), 137))
    assert (cluster.status["generation"] > generation + 1, cluster.status["restarts"]) == (True, 1)


def test_a_deadline_ends_the_job() -> None:
    cluster = training(2, activeDeadlineSeconds=60, startupDeadlineSeconds=30)
    cluster.until(lambda c: c.status["state"] == "Failed", 60)
    assert cluster.status["reason"] == "the job has run for activeDeadlineSeconds (60)"
    cluster.run(5)
    assert {pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] for pod in cluster.pods} == {79}


def test_the_operator_may_die_after_any_write() -> None:
    for after in range(12):
        cluster = training(2)
        cluster.delete(kinds.POD, "train-worker-1", pod(cluster, 1)["metadata"]["uid"])
        for _ in range(5):
            try:
                cluster.look(dies_after=after % 4)
            except Killed:
                cluster.since = cluster.now
            cluster.pass_()
        cluster.change(replicas=3)
        cluster.until(trains(3))
        assert cluster.status["restarts"] == 0
