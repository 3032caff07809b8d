"""Workers that fall silent, or fail, many at once: one cause is one failure, and a path is no worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import simulated
from outlast.kubernetes.operator import elasticjob_status
from simulated import Cluster, training, trains

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
