"""Workers that are not heard, or fail, many at once: one cause is one failure, a path is no worker, and one side of a partition
trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import simulated
from outlast.kubernetes.api.pod_status import rfc3339
from outlast.kubernetes.operator import elasticjob_status
from outlast.kubernetes.operator.observed_job import RECEIVED_AT
from simulated import Cluster, Killed, training, trains

MANY = 12
HELD_S = 300


def deleted(cluster: Cluster, before: int) -> list[str]:
    return [write for write in cluster.writes[before:] if write.startswith("delete")]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_when_no_agent_is_heard_though_nodes_are_well_the_path_is_blamed_and_training_goes_on(workers: int) -> None:
    cluster = training(workers, high=24, steps=10_000)
    before, step, generation = len(cluster.writes), cluster.step, cluster.status["generation"]
    cluster.reached = False
    notes = []
    for _ in range(200):
        cluster.pass_()
        notes += cluster.look().events
    assert (deleted(cluster, before), cluster.status["restarts"]) == ([], 0)
    assert [note.reason for note in notes] == ["Unheard"]
    assert cluster.status["reason"] == (
        f"most of the {workers} workers have said nothing for 30 s though their nodes are well: the path from them to the API "
        "server is presumed broken, and none dead before 300 s are over"
    )
    assert elasticjob_status.condition_reason(cluster.status["conditions"], "Running") == "Unheard"
    cluster.reached = True
    cluster.run(30)
    assert (cluster.status["generation"], cluster.status["state"]) == (generation, "Running")
    assert elasticjob_status.condition_reason(cluster.status["conditions"], "Running") == "Training"
    assert cluster.step >= step + 230


@pytest.mark.parametrize("back", [3, 4])
def test_workers_that_are_heard_again_one_after_another_cost_the_others_nothing(back: int) -> None:
    cluster = training(5, high=5, steps=10_000)
    before, generation = len(cluster.writes), cluster.status["generation"]
    cluster.reached = False
    cluster.run(60)
    cluster.reached = True
    others = list(cluster.agents.values())[back:]
    for agent in others:
        agent.frozen = True  # its next attempt comes later
    cluster.run(12)
    for agent in others:
        agent.frozen = False
    cluster.run(30)
    assert (deleted(cluster, before), cluster.status["restarts"], cluster.status["generation"]) == ([], 0, generation)
    assert elasticjob_status.condition_reason(cluster.status["conditions"], "Running") == "Training"
    cluster.agent_of(1).frozen = True
    cluster.until(lambda c: c.status["generation"] > generation, 60)


def test_a_world_that_stays_silent_is_made_anew_and_counts_once() -> None:
    cluster = training(4, steps=10_000)
    before = len(cluster.writes)
    cluster.reached = False
    cluster.run(HELD_S + 60)
    assert len(deleted(cluster, before)) >= 4
    cluster.reached = True
    cluster.until(trains(4))
    assert (cluster.status["state"], cluster.status["restarts"]) == ("Running", 1)


@pytest.mark.parametrize(("workers", "silent"), [(24, 11), (MANY, MANY)])
def test_workers_that_fall_silent_together_are_one_failure_also_where_all_are_and_their_kubelets_end_them(
    workers: int, silent: int
) -> None:
    cluster = training(workers, high=24, steps=10_000)
    generation, began = cluster.status["generation"], cluster.now
    for agent in list(cluster.agents.values())[:silent]:
        agent.frozen = True
    cluster.until(lambda c: c.status["generation"] > generation and trains(workers)(c))
    assert cluster.now - began < 120
    assert (cluster.status["state"], cluster.status["restarts"]) == ("Running", 1)


def planned(cluster: Cluster) -> None:
    """A call is pending: training is to save first."""
    cluster.change(replicas=MANY + 1)
    cluster.until(lambda c: c.status["state"] == "Resizing")


@pytest.mark.parametrize("meanwhile", [planned, lambda cluster: None])
def test_twelve_pods_of_a_world_that_end_together_are_one_failure_whatever_was_planned(
    meanwhile: Callable[[Cluster], object],
) -> None:
    cluster = training(MANY, high=24, steps=10_000)
    generation = cluster.status["generation"]
    meanwhile(cluster)
    for index in range(MANY):
        cluster.end(cluster.documents["Pod", f"train-worker-{index}"], 1)
    cluster.until(lambda c: c.status["generation"] > generation and c.status["state"] == "Running")
    assert cluster.status["restarts"] == 1


def test_twelve_pods_that_fail_before_there_is_a_world_are_one_failure_and_count_again_when_they_fail_again() -> None:
    cluster = Cluster({"replicas": MANY, "min": MANY, "max": 24})
    for attempt in (1, 2):
        cluster.until(lambda c: len(c.agents) == MANY)
        first, second = cluster.pods[: MANY // 2], cluster.pods[MANY // 2 :]
        for pod in first:
            cluster.end(pod, 1)
        cluster.look()
        for pod in second:
            cluster.end(pod, 1)
        cluster.run(2)
        assert (cluster.status["state"], cluster.status["restarts"]) == ("Restarting", attempt)
    cluster.until(trains(MANY))
    cluster.end(cluster.pods[0], 1)
    cluster.look()
    assert cluster.status["restarts"] == 3, "in a world its end is its own"


@pytest.mark.parametrize("step", [-3600, 3600])
def test_a_clock_that_is_set_while_training_saves_takes_nothing_from_its_time(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "SAVE_S", 20.0)
    cluster = training(2, steps=10_000)
    cluster.change(replicas=3)
    cluster.until(lambda c: c.status["state"] == "Resizing")
    cluster.run(5)
    cluster.jump(step)
    cluster.until(trains(3))
    cluster.run(10)
    done = [step for _, step in cluster.done_steps]
    assert len(done) == len(set(done)), "no step was done again"


# Members that watch one another


def a_job(workers: int = 3, *, least: int = 1, **fields: Any) -> Cluster:
    """A job whose members watch one another, each on a node of its own, in its first world."""
    cluster = Cluster({"replicas": workers, "min": least, "max": workers}, steps=4000, **fields)
    cluster.mesh = True
    cluster.until(trains(workers))
    cluster.run(15)
    return cluster


def node(cluster: Cluster, index: int) -> str:
    agent = cluster.agent_of(index)
    assert agent is not None
    return cluster.node_of(agent)


def cut(cluster: Cluster, *sides: set[int]) -> None:
    where = {id: number for number, side in enumerate(sides) for id in side}
    nodes = {id: node(cluster, id) for id in where}
    cluster.broken = {frozenset((nodes[one], nodes[other])) for one in where for other in where if where[one] != where[other]}


def world(cluster: Cluster) -> tuple[int, list[int]]:
    told = cluster.status["rendezvous"]["world"]
    return told["generation"], told["members"]


LOST = "lost worker 2: workers 0 and 1 do not hear it"


@pytest.mark.parametrize(("seconds", "members"), [(0, [0, 1, 2]), (6, [0, 2])])
def test_an_elastic_agent_that_is_started_again_costs_a_restart_and_no_pod(seconds: float, members: list[int]):
    """Its peers do not hear the one before it, whose machine answers: this one is no side of a partition."""
    cluster = a_job()
    made = dict(cluster.made)
    cluster.relaunch(1, seconds)
    cluster.until(lambda c: world(c)[0] == 2)
    assert world(cluster) == (2, members), "the others go on without one that takes long"
    cluster.until(trains(3))
    cluster.run(20)
    assert (cluster.status["restarts"], cluster.status["state"], cluster.made) == (1, "Running", made)
    assert (cluster.status["lastFailure"]["worker"], cluster.status["lastFailure"]["code"]) == (1, 137)


def test_an_elastic_agent_that_takes_up_its_world_late_counts_once_and_so_does_the_next_failure_of_its_pod():
    cluster = a_job()
    cluster.relaunch(1)
    cluster.until(lambda c: world(c)[0] == 2)
    for _ in range(2):  # and nobody has heard of that world yet
        cluster.now += 1
        cluster.look()
    assert (world(cluster), cluster.status["restarts"]) == ((2, [0, 1, 2]), 1)
    cluster.until(trains(3))
    cluster.end(cluster.documents["Pod", "train-worker-1"], 137)
    cluster.run(20)
    assert (cluster.status["restarts"], cluster.made["train-worker-1"]) == (2, 2)


def test_a_silent_node_costs_seconds_and_is_an_interruption():
    cluster = a_job()
    where = node(cluster, 2)
    cluster.lose(where)
    began, lost = cluster.now, cluster.documents["Pod", "train-worker-2"]["metadata"]["uid"]
    cluster.run(3)
    assert world(cluster) == (2, [0, 1])
    assert cluster.status["reason"] == f"{LOST}; training goes on with 2 of 3"
    assert cluster.trained[-1][1] == 2
    assert next(now for now, generation in cluster.trained if generation == 2) - began <= 3
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 1)
    pod = cluster.documents["Pod", "train-worker-2"]
    assert pod["metadata"]["uid"] != lost
    assert pod["spec"]["nodeName"] != where
    kept = cluster.status["judged"]["lost"]
    assert [(each["worker"], each["node"], each["times"], each["held"]) for each in kept] == [(2, where, 1, True)]
    cluster.run(5)
    assert world(cluster) == (2, [0, 1])  # it has been lost less than 10 s ago
    cluster.until(trains(3), 15)


@pytest.mark.parametrize(("sides", "stay"), [(({0, 1}, {2, 3}), [0, 1]), (({0, 1}, {2, 3, 4}), [2, 3, 4])])
def test_one_side_of_a_partition_trains_on_and_only_one(sides: tuple[set[int], set[int]], stay: list[int]):
    cluster = a_job(sum(map(len, sides)))
    cut(cluster, *sides)
    cluster.run(6)
    assert world(cluster) == (2, stay)
    assert cluster.status["restarts"] == 0
    cluster.broken.clear()
    cluster.until(trains(sum(map(len, sides))), 30)
    generations, steps = zip(*cluster.done_steps, strict=True)
    assert [*generations] == sorted(generations)
    assert {*steps} == set(range(1, max(steps) + 1))


def test_an_operator_that_starts_in_the_middle_goes_on_as_the_one_before():
    cluster = a_job()
    where = node(cluster, 2)
    cluster.lose(where)
    cluster.pass_()
    for writes in range(4):
        with contextlib.suppress(Killed):
            cluster.look(dies_after=writes)
        cluster.since, cluster.clock = cluster.now, cluster.started()
        cluster.pass_()
    cluster.run(4)
    assert world(cluster) == (2, [0, 1])
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 1)
    cluster.run(2)
    assert world(cluster) == (2, [0, 1])
    cluster.until(trains(3), 15)


def test_a_node_that_is_not_ready_trains_on_while_its_worker_is_heard():
    cluster = a_job()
    document = cluster.documents["Node", node(cluster, 2)]
    document["status"] = {"conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": rfc3339(cluster.now)}]}
    cluster.run(120)
    assert world(cluster) == (1, [0, 1, 2])
    document["spec"] = {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}
    cluster.cut = {node(cluster, 2)}  # nor does its agent reach the API server
    cluster.run(60)
    assert world(cluster) == (1, [0, 1, 2])
    cluster.run(60)
    assert cluster.made["train-worker-2"] == 2  # nobody has heard of it for 100 s


@pytest.mark.parametrize(("mesh", "writes"), [(False, 12), (True, 4)])
def test_leases_of_a_world_that_watches_itself_are_renewed_every_half_minute_but_that_of_rank_0(mesh: bool, writes: int):
    cluster = Cluster({"replicas": 2, "min": 1, "max": 2}, steps=4000)
    cluster.mesh = mesh
    cluster.until(trains(2))
    cluster.run(30)
    heard = [cluster.documents["Lease", "train-worker-1"][RECEIVED_AT]]
    for _ in range(120):
        cluster.run(1)
        heard.append(cluster.documents["Lease", "train-worker-1"][RECEIVED_AT])
    assert len(set(heard)) - 1 == writes
