"""The operator's decisions when members of a world do not hear each other, in a simulated cluster."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from outlast.kubernetes.api.pod_status import rfc3339
from outlast.kubernetes.operator.observed_job import RECEIVED_AT
from simulated import Cluster, Killed, trains


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
