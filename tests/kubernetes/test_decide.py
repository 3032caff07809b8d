"""The operator's decisions, in a simulated cluster whose pods, nodes and agents all act."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import simulated
from outlast.job.contract import Annotation, Env, Label
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.operator import prometheus
from outlast.kubernetes.operator.observed_job import Limits
from outlast.kubernetes.operator.plan import Plan
from simulated import BEGAN, EVERY, PROGRESS_S, Cluster, Killed, training, trains


def a_cluster(replicas: int = 2, *, low: int = 1, high: int = 4, **fields: Any) -> Cluster:
    return Cluster({"replicas": replicas, "min": low, "max": high}, **fields)


def succeeded(replicas: int, **fields: Any) -> Cluster:
    cluster = a_cluster(replicas, **fields)
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
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


def test_a_job_trains_to_its_end_and_is_then_left_alone_although_its_workers_end_one_after_another() -> None:
    cluster = succeeded(3, steps=30)
    assert [step for _, step in cluster.done_steps] == list(range(1, 31))
    assert (cluster.status["replicas"], len(cluster.alive())) == (0, 3)
    cluster.look()
    before = len(cluster.writes)
    for each in cluster.alive():
        cluster.end(each, 0)
        cluster.look()
    cluster.run(300)
    assert cluster.writes[before:] == []
    assert cluster.made == {"train-worker-0": 1, "train-worker-1": 1, "train-worker-2": 1}
    assert cluster.status["reason"] == "workers 0, 1 and 2 are done"
    assert (cluster.status["progress"], cluster.status["restarts"], cluster.status["workersText"]) == ("100 %", 0, "0/1-4")
    cluster.change()
    cluster.run(3)
    assert cluster.status["observedGeneration"] == 2


@pytest.mark.parametrize(
    ("annotations", "fresh", "key_is_optional"),
    [
        ({}, False, True),
        ({Annotation.FRESH: "true"}, True, True),
        ({Annotation.KEY: "{uid}"}, False, False),
        ({Annotation.KEY: "that of the job it is a copy of"}, False, True),
    ],
)
def test_pods_are_told_to_begin_anew_and_wait_for_the_secret_with_the_key_of_their_job(
    annotations: dict[str, str], fresh: bool, key_is_optional: bool
) -> None:
    cluster = a_cluster(1)
    meta = cluster.job["metadata"]
    meta["annotations"] = {name: value.format(uid=meta["uid"]) for name, value in annotations.items()}
    cluster.run(2)
    env = {each["name"]: each for each in pod(cluster, 0)["spec"]["containers"][0]["env"]}
    assert ("OUTLAST_FRESH" in env) == fresh
    assert env["OUTLAST_RENDEZVOUS_KEY"]["valueFrom"]["secretKeyRef"]["optional"] == key_is_optional


def test_the_rate_is_that_of_the_world_that_trains() -> None:
    cluster = a_cluster(2)
    cluster.until(trains(2))
    cluster.run(4)
    assert (cluster.status["step"] > 0, "rate" in cluster.status) == (True, False), "there is one report only"
    cluster.run(40)
    assert cluster.status["rate"] == 1.0
    assert cluster.status["snapshot"] == {"step": cluster.status["step"], "every": 1}
    cluster.change(suspend=True)
    cluster.until(lambda c: not c.pods)
    assert not {"rate", "snapshot"} & cluster.status.keys(), "they are of a world"
    cluster.run(200)
    cluster.change(suspend=False)
    cluster.until(trains(2))
    cluster.run(60)
    assert cluster.status["rate"] == 1.0, "the time in which it was suspended does not count"


def test_the_first_step_of_a_world_is_written_when_it_is_heard_and_then_every_3_s() -> None:
    cluster = training(2, steps=10_000)
    for _ in range(2):
        again(cluster, by=lambda: cluster.fail(1))  # until 10 s after the new world
        for _ in range(30):
            cluster.run(1)
            assert cluster.step - cluster.status["step"] <= PROGRESS_S + 1
        before = len(cluster.writes)
        cluster.run(300)
        assert len(cluster.writes) - before == 100


def test_a_job_costs_nine_writes_beside_its_pods_and_its_progress() -> None:
    cluster = a_cluster(2, steps=25)
    cluster.limits = Limits(progress_s=30)
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
    cluster.run(120)
    assert len([write for write in cluster.writes if not write.startswith("create")]) == 9


def test_workers_that_come_one_after_another_are_written_once() -> None:
    cluster = a_cluster(4, low=4)
    cluster.until(lambda c: len(c.agents) == 4)
    for agent in cluster.agents.values():
        agent.begins = agent.since = cluster.now + 1.5 * agent.index + (10 if agent.index == 3 else 0)
    cluster.until(trains(4))
    said = dict.fromkeys(write.partition(": waiting for ")[2] for write in cluster.writes if "waiting" in write)
    missing = ("workers 0, 1, 2 and 3: 0", "worker 3: 3")
    assert list(said) == [f"{each} of at least 4 workers are here" for each in missing]


def test_what_was_written_is_read_back_as_it_is() -> None:
    cluster = training(2, steps=10_000)
    statuses = 0
    for second in range(200):
        if second in (50, 90):
            cluster.fail(second % 2)
        cluster.pass_(0.987654321)
        plan = cluster.look()
        if plan.status is not None and not plan.deletes and not plan.creates:
            statuses += 1
            assert cluster.look().status is None, plan.status
    assert statuses > 8
    digits = [len(str(each).partition(".")[2]) for each in floats(cluster.status)]
    assert max(digits) <= 4, cluster.status


@pytest.mark.parametrize(
    "nonsense",
    [
        {"state": "Flying"},
        {"failures": [{}]},
        {"judged": {"silent": [{"uid": "x", "worker": 1, "node": "n", "since": 1.0, "of-another-version": 1}, {}]}},
        {"accounting": {"reported": {"step": 1}}},
        {"rendezvous": {"world": {"generation": 1}, "called": {"generation": 9}, "closed": {"reason": "because"}}},
        {"rendezvous": {"world": {"generation": 1, "members": [], "address": "", "reason": "", "at": 1.0}}},
    ],
)
def test_what_makes_no_sense_in_a_status_is_as_if_it_were_not_there(nonsense: dict[str, Any]) -> None:
    cluster = training(2)
    cluster.status.update(nonsense)
    cluster.look()
    cluster.run(60)
    assert trains(2)(cluster)
    again(cluster, by=lambda: cluster.end(pod(cluster, 1), 137))


def floats(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [each for part in (value.values() if isinstance(value, dict) else value) for each in floats(part)]
    return [value] if isinstance(value, float) else []


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


def conditions(cluster: Cluster) -> set[str]:
    return {each["type"] for each in cluster.status["conditions"] if each["status"] == "True"}


def test_a_job_that_is_resumed_while_a_silent_worker_still_goes_trains_again() -> None:
    cluster = training(2, steps=10_000)
    cluster.agent_of(1).frozen = True
    cluster.change(suspend=True)
    cluster.until(lambda c: (c.status.get("rendezvous") or {}).get("closed"))
    cluster.change(suspend=False)
    cluster.until(trains(2), 600)
    assert "closed" not in cluster.status["rendezvous"]


def test_a_suspended_job_that_could_not_be_understood_meanwhile_goes_on() -> None:
    cluster = training(2, steps=10_000)
    cluster.change(suspend=True)
    cluster.until(lambda c: not c.pods)
    cluster.change(replicas=9)
    cluster.until(lambda c: c.status["state"] == "Pending")
    assert conditions(cluster) == {"Created"}
    cluster.change(suspend=False, replicas=2)
    cluster.until(trains(2), 600)
    assert conditions(cluster) == {"Created", "Running"}


def test_a_worker_that_has_to_go_is_counted_once_however_often_the_operator_dies() -> None:
    cluster = training(2, steps=10_000)
    node = pod(cluster, 1)["spec"]["nodeName"]
    cluster.documents["Node", node]["spec"] = {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}
    for _ in range(3):
        with contextlib.suppress(Killed):
            cluster.look(dies_after=1)
        cluster.pass_()
    cluster.look()
    assert cluster.status["interruptions"] == 1


def test_a_pod_that_was_killed_because_somebody_deleted_it_is_no_failure() -> None:
    cluster = training(2, steps=10_000, restarts={"limit": 0})
    deleted = pod(cluster, 1)
    deleted["metadata"]["deletionTimestamp"] = pod_status.rfc3339(cluster.now + 1)
    ended = {"exitCode": 137, "reason": "Error", "finishedAt": pod_status.rfc3339(cluster.now)}
    deleted["status"] = {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}]}
    cluster.agents.pop(deleted["metadata"]["uid"])
    cluster.look()
    assert (cluster.status["state"], cluster.status["restarts"], cluster.status["interruptions"]) == ("Restarting", 0, 1)


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


def fail_without_log(cluster: Cluster) -> None:
    cluster.fail(1)
    for agent in cluster.agents.values():
        del (agent.failure or {})["log_tail"]


def crash(cluster: Cluster) -> None:
    """Worker 1 ends with its last words."""
    cluster.end(ended := pod(cluster, 1), 139)
    ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = "Segmentation fault"


def wrong_bits(cluster: Cluster) -> None:
    """End worker 1, whose rank has wrong bits."""
    cluster.fail(1)
    agent = next(each for each in cluster.agents.values() if each.index == 1)
    agent.standing, agent.failure = "training", {**(agent.failure or {}), "cause": "bits", "reason": "rank 1 has other bits"}
    cluster.report(agent)
    cluster.end(pod(cluster, 1), 1)


def avoids(pod: dict[str, Any], node: str) -> bool:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    avoided = {"key": "metadata.name", "operator": "NotIn", "values": [node]}  # one node a field, says the API server
    return {"weight": 100, "preference": {"matchFields": [avoided]}} in affinity


def exceed_its_storage(cluster: Cluster) -> None:
    """As a kubelet does it: with a second for the worker to leave, and without DisruptionTarget."""
    cluster.end(evicted := pod(cluster, 1), 75)
    evicted["status"] |= {"reason": "Evicted", "message": 'Usage of EmptyDir volume "cache" exceeds the limit "1Gi". '}


OVER = 'worker 1 was evicted by its node: Usage of EmptyDir volume "cache" exceeds the limit "1Gi"'
FAILURES: dict[str, tuple[Callable[[Cluster], object], str, str | None]] = {
    "a process": (lambda c: c.fail(1), "rank 1 on worker 1 failed", "rank 1 on worker 1 failed\n"),
    "no log tail": (fail_without_log, "rank 1 on worker 1 failed", None),
    "killed": (lambda c: c.end(pod(c, 1), 137), "worker 1 was killed (exit code 137)", None),
    "last words": (crash, "worker 1 failed with exit code 139", "Segmentation fault"),
    "its storage": (exceed_its_storage, f"{OVER}; write less, or raise the limit", None),
    "wrong bits": (wrong_bits, "rank 1 has other bits", "rank 1 on worker 1 failed\n"),
    "stands still": (lambda c: setattr(c.agent_of(1), "frozen", True), "worker 1 has said nothing for 30 s", None),
}
"""A harm, and the reason and the end of the log in the failure that is recorded for it."""


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_counts_once_is_told_with_its_node_and_costs_at_most_the_steps_since_the_checkpoint(what: str) -> None:
    happens, reason, tail = FAILURES[what]
    cluster = training()
    made, node = cluster.made["train-worker-1"], pod(cluster, 1)["spec"]["nodeName"]
    writes = again(cluster, by=lambda: happens(cluster))
    last = cluster.status["lastFailure"]
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (1, 0)
    assert (last["worker"], last["node"], last["reason"], last.get("logTail")) == (1, node, reason, tail)
    assert cluster.made["train-worker-1"] == made + (what not in ("a process", "no log tail"))
    assert (f"delete train-worker-1: {reason}" in writes) == (what == "stands still")
    assert repeated(cluster) <= EVERY
    if what == "wrong bits":
        assert avoids(pod(cluster, 1), node), "at once"
        assert [(each["node"], each.get("cause")) for each in cluster.status["failures"]] == [(node, "bits")]


def taint(cluster: Cluster) -> None:
    taints = [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]
    cluster.documents["Node", pod(cluster, 1)["spec"]["nodeName"]]["spec"] = {"taints": taints}


INTERRUPTIONS: dict[str, Callable[[Cluster], object]] = {
    "evicted": lambda c: c.end(pod(c, 1), 137, disrupted="EvictionByEvictionAPI"),
    "deleted": lambda c: c.delete(kinds.POD, "train-worker-1", pod(c, 1)["metadata"]["uid"]),
    "its node goes": taint,
}


@pytest.mark.parametrize("what", INTERRUPTIONS)
def test_an_interruption_never_counts_as_a_failure_and_one_that_is_announced_costs_no_step(what: str) -> None:
    cluster = training()
    for n in (1, 2, 3):
        node = pod(cluster, 1)["spec"]["nodeName"]
        again(cluster, by=lambda: INTERRUPTIONS[what](cluster))
        told = 0 if what == "deleted" else n  # by somebody who wants it so
        assert (cluster.status["restarts"], cluster.status["interruptions"], cluster.made["train-worker-1"]) == (0, told, n + 1)
        assert (pod(cluster, 1)["spec"]["nodeName"] == node) <= (what != "its node goes")
    assert (repeated(cluster) == 0) >= (what in ("deleted", "its node goes"))


@pytest.mark.parametrize(("low", "lost_s"), [(1, 30), (2, 30), (1, 120)])
def test_a_lost_node_is_given_up_after_the_time_that_is_said_and_nobody_is_blamed(low: int, lost_s: int) -> None:
    cluster = training(low=low)
    cluster.limits = Limits(lost_s=lost_s)
    began, node = cluster.now, pod(cluster, 1)["spec"]["nodeName"]
    cluster.lose(node)
    cluster.run(30)
    assert cluster.status["world"] == ([0] if low == 1 else [])
    writes = again(cluster, by=lambda: None)
    assert f"delete train-worker-1: worker 1 was lost: its node {node} has not answered for {lost_s} s" in writes
    assert lost_s <= cluster.now - began < lost_s + 70
    assert pod(cluster, 1)["spec"]["nodeName"] != node
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 1)


def test_a_repaired_process_that_knew_of_no_checkpoint_is_judged_by_those_of_the_run() -> None:
    cluster = training(restarts={"limit": 3})
    for _ in range(3):
        cluster.fail(1, code=137)
        cluster.run(8)
        cluster.until(trains(2))
    cluster.run(120)
    assert cluster.committed > cluster.status["failures"][-1]["committedStep"], "it has advanced: three restarts are refunded"
    cluster.repair(1)
    for agent in cluster.agents.values():
        agent.past[-1]["failure"] |= {"committed": None, "step": None}
    cluster.run(3)
    assert cluster.status["state"] == "Running", cluster.status["reason"]
    assert [each["committedStep"] for each in cluster.status["failures"]][-1] == cluster.committed


def failed_three_times_at_step_7(**failure: object) -> Cluster:
    """A job that has ended by that; `failure` is what its agents report otherwise."""
    cluster = training()
    for _ in range(3):
        cluster.committed = cluster.step = 0
        cluster.until(lambda c: c.status["state"] == "Failed" or any(a.standing == "training" for a in c.agents.values()))
        cluster.step = 7
        cluster.fail(0)
        for agent in cluster.agents.values():
            if agent.failure:
                agent.failure |= failure
        cluster.run(5)
    cluster.until(lambda c: c.status["state"] == "Failed")
    return cluster


HUNG = {"reason": "rank 0 on worker 0 hung: no progress for 750 s", "code": 137, "hung": True, "cause": "hang"}


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ({}, "rank 0 on worker 0 failed at step 7; this step has failed 3 times in a row"),
        (HUNG, "rank 0 on worker 0 hung: no progress for 750 s; it has hung here 3 times in a row"),
    ],
)
def test_a_script_that_fails_or_hangs_at_one_step_ends_the_job(failure: dict[str, Any], said: str) -> None:
    cluster = failed_three_times_at_step_7(**failure)
    assert cluster.status["reason"] == said
    assert cluster.status["lastFailure"].get("cause") == failure.get("cause")
    last = cluster.status["conditions"][-1]
    assert (last["type"], last["reason"]) == ("Failed", "NoProgress")
    cluster.until(lambda c: not c.alive())
    assert cluster.status["replicas"] == 0


def test_no_words_of_a_script_change_why_its_job_ended() -> None:
    cluster = training(restarts={"limit": 0})
    cluster.fail(0)
    agent = next(each for each in cluster.agents.values() if each.failure)
    agent.failure["reason"] = "rank 0 on worker 0 raised OSError: retried 5 times in a row, it hung: out of memory"
    cluster.until(lambda c: c.status["state"] == "Failed")
    assert cluster.status["conditions"][-1]["reason"] == "BackoffLimitExceeded"
    assert prometheus.failure_cause(cluster.status) == "error"


def test_running_out_of_memory_at_one_step_ends_like_an_error() -> None:
    cluster = training(low=2, restarts={"limit": 30}, resources={"memory": "16Gi"}, steps=10_000)
    cluster.every = 10_000  # no progress
    for _ in range(600):
        cluster.run(1)
        if cluster.status["state"] == "Failed":
            break
        for each in cluster.alive() if cluster.step == 30 else ():
            if each["metadata"]["name"] == "train-worker-0" and each["status"]["phase"] == "Running":
                cluster.end(each, 137, reason="OOMKilled")
    assert cluster.status["reason"] == (
        "worker 0 was OOMKilled: it used more than its limit of 16Gi; raise resources.memory; "
        "it has run out of memory at step 30 3 times in a row"
    )
    assert cluster.made["train-worker-0"] == 3


def test_a_worker_that_ends_beside_a_container_that_runs_on_has_ended() -> None:
    cluster = training(2)
    cluster.end_beside(pod(cluster, 0), 75)
    cluster.run(40)
    assert (cluster.status["restarts"], cluster.status["interruptions"], trains(2)(cluster)) == (0, 1, True)
    cluster.end_beside(pod(cluster, 1), 137, reason="OOMKilled")
    cluster.run(40)
    failure = cluster.status["lastFailure"]["reason"]
    assert (failure.startswith("worker 1 was OOMKilled"), cluster.status["restarts"], trains(2)(cluster)) == (True, 1, True)
    assert cluster.made == {"train-worker-0": 2, "train-worker-1": 2}
    cluster.end_beside(pod(cluster, 0), 78)
    cluster.run(70)
    assert (cluster.status["state"], cluster.alive()) == ("Failed", [])


@pytest.mark.parametrize(
    ("beside", "grace_s"),
    [
        ({}, 0),
        ({"initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 0}}}]}, 0),
        ({"initContainerStatuses": [{"name": "proxy", "state": {"running": {}}}]}, None),
        ({"ephemeralContainerStatuses": [{"name": "debug", "state": {"running": {}}}]}, None),
        ({"others": [{"name": "proxy", "state": {"terminated": {"exitCode": 0}}}]}, 0),
        ({"others": [{"name": "proxy", "state": {"waiting": {"reason": "PodInitializing"}}}]}, None),
        ({"others": []}, None),  # of a container of the pod there is no word
        ({"leaves": True}, 0),
    ],
)
def test_an_ended_pod_is_replaced_at_once_unless_a_container_may_still_run(beside: dict[str, Any], grace_s: int | None) -> None:
    cluster = training(2, low=2)
    crashed = pod(cluster, 1)
    cluster.end(crashed, 75 if "leaves" in beside else 137)
    crashed["status"] |= {"phase": "Running", **beside}  # until its sandbox is torn down
    if "others" in beside:
        crashed["spec"]["containers"] = [*crashed["spec"]["containers"], {"name": "proxy"}]
        crashed["status"]["containerStatuses"] += beside["others"]
    if "leaves" in beside:
        crashed["metadata"] |= {"deletionTimestamp": pod_status.rfc3339(cluster.now + 100), "deletionGracePeriodSeconds": 105}
        cluster.put(crashed)
    plan = cluster.look()
    assert [(each.name, each.grace_s) for each in plan.deletes] == [("train-worker-1", grace_s)]
    assert [each["metadata"]["name"] for each in plan.creates] == (["train-worker-1"] if grace_s == 0 else [])


@pytest.mark.parametrize("fail", [False, True])
def test_all_workers_are_done_although_other_containers_of_their_pods_run_on_or_fail(fail: bool) -> None:
    cluster = training(2)
    for each in list(cluster.pods):
        cluster.end_beside(each, 0)
        if fail:
            each["status"]["phase"] = "Failed"
            each["status"]["containerStatuses"][1]["state"] = {"terminated": {"exitCode": 2}}
    cluster.run(5)
    assert (cluster.status["state"], cluster.status["interruptions"]) == ("Succeeded", 0)
    cluster.run(70)
    assert len(cluster.pods) == (2 if fail else 0), "those that run are told to go, as cleanPodPolicy says"


def test_a_pod_that_finalizers_of_others_keep_is_deleted_once_and_named() -> None:
    cluster = training(2, low=2)
    kept = pod(cluster, 0)
    cluster.end(kept, 137)
    kept["metadata"] |= {"deletionTimestamp": pod_status.rfc3339(cluster.now), "deletionGracePeriodSeconds": 0}
    kept["metadata"]["finalizers"] = ["a/b"]
    cluster.look()
    before = len(cluster.writes)
    cluster.look()
    cluster.look()
    assert [each for each in cluster.writes[before:] if each.startswith("delete")] == []
    assert cluster.status["reason"].endswith("worker 0 has gone, and its name is kept by the finalizers a/b; have them removed")


@pytest.mark.parametrize("told", [True, False])
def test_a_node_that_has_joined_and_is_not_told_of_yet_is_not_taken_for_lost(told: bool) -> None:
    cluster = a_cluster()
    cluster.limits = Limits(lost_s=10)
    cluster.look()
    node = pod(cluster, 1)["spec"]["nodeName"]
    late, uid = cluster.documents.pop(("Node", node)), pod(cluster, 1)["metadata"]["uid"]
    for _ in range(9):
        cluster.now += 1
        cluster.look()
    if told:
        cluster.put(late)
    cluster.now += 1
    cluster.look()
    assert (pod(cluster, 1)["metadata"]["uid"] == uid) is told
    assert cluster.status["interruptions"] == (not told)


@pytest.mark.parametrize("kind", ["Role", "Service", "ServiceAccount", "RoleBinding"])
def test_what_workers_need_is_made_anew_when_somebody_has_deleted_it(kind: str) -> None:
    cluster = training(2)
    (name,) = [name for each, name in cluster.documents if each == kind]
    again(cluster, by=lambda: (cluster.documents.pop((kind, name)), cluster.fail(1)))
    assert (kind, name) in cluster.documents


def test_a_node_whose_clock_is_ahead_keeps_nobody_waiting() -> None:
    cluster = training(2)
    for agent in cluster.agents.values():
        cluster.drop(agent, echo=True)
        agent.failure = {**(agent.failure or {}), "time": cluster.now + 3600}
    cluster.until(lambda c: c.status["generation"] == 2 and trains(2)(c), 30)
    assert (cluster.status["restarts"], cluster.status["lastFailure"]["time"] < cluster.now) == (1, True)


def test_an_operator_whose_clock_is_behind_the_one_before_it_goes_on_at_once() -> None:
    cluster = training(2, low=2, restarts={"limit": 20})
    cluster.every = 10**6
    for _ in range(3):
        cluster.end(pod(cluster, 0), 137)
        cluster.run(1)
        cluster.until(trains(2))
    cluster.end(pod(cluster, 0), 137)
    cluster.look()
    cluster.jump(-3600)
    cluster.until(trains(2), 90)
    step = cluster.status["step"]
    cluster.run(70)
    assert cluster.status["step"] >= step + 30, "it is told how far training is"


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


@pytest.mark.parametrize(
    ("nodes", "condition", "said"),
    [(0, "StartupDeadlineExceeded", "startupDeadlineSeconds (30)"), (6, "WrongConfiguration", "a restart would not help")],
)
def test_a_job_that_never_starts_or_is_misconfigured_fails_and_says_why(nodes: int, condition: str, said: str) -> None:
    cluster = a_cluster(startupDeadlineSeconds=30, nodes=nodes)
    cluster.run(3)
    if nodes:
        cluster.end(pod(cluster, 0), 78)
    cluster.run(2 if nodes else 37)
    assert (cluster.status["state"], cluster.status["conditions"][-1]["reason"]) == ("Failed", condition)
    assert said in cluster.status["reason"]


def test_of_workers_that_cannot_be_scheduled_the_first_that_was_named_stays_named() -> None:
    cluster = a_cluster(3, nodes=0)
    cluster.run(5)
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    for index in (2, 0, 1):
        pod(cluster, index)["status"]["conditions"] = [refused]
        cluster.run(5)
        assert cluster.status["reason"].endswith("; worker 2 cannot be scheduled: no GPU")
    pod(cluster, 2)["status"]["conditions"] = []
    cluster.run(5)
    assert cluster.status["reason"].endswith("; worker 0 cannot be scheduled: no GPU")


def test_an_ended_job_goes_after_its_time_and_is_never_run_again() -> None:
    cluster = succeeded(2, steps=10, ttlSecondsAfterFinished=100)
    made, end = dict(cluster.made), cluster.now
    while cluster.documents:
        cluster.pass_()
        cluster.look()
        assert cluster.made == made
    assert 99 <= cluster.now - end <= 102


@pytest.mark.parametrize(("policy", "left"), [("All", 0), ("Running", 2), ("None", 2)])
def test_pods_of_an_ended_job_go_as_the_policy_says(policy: str, left: int) -> None:
    cluster = succeeded(2, steps=10, cleanPodPolicy=policy)
    cluster.run(120)
    assert len(cluster.pods) == left


@pytest.mark.parametrize(("output", "upload_s", "ended_s"), [("s3://bucket/runs", 1860, 1860), ("/out", 60, 100)])
def test_a_worker_of_an_ended_job_has_the_time_that_its_agent_takes_to_upload_the_results(
    output: str, upload_s: float, ended_s: float
) -> None:
    cluster = a_cluster(2, steps=10, output=output, ttlSecondsAfterFinished=100)
    cluster.uploading = {0}
    cluster.until(lambda c: c.status.get("state") == "Succeeded")
    end, uploaded = cluster.now, cluster.now
    while cluster.documents:
        uploaded = cluster.now if cluster.alive() else uploaded
        cluster.pass_()
        cluster.look()
    assert uploaded - end == pytest.approx(upload_s, abs=2)
    assert cluster.now - end == pytest.approx(ended_s, abs=2)


def test_a_node_on_which_workers_keep_failing_gets_no_more() -> None:
    cluster = training()
    node = pod(cluster, 1)["spec"]["nodeName"]
    for _ in range(2):
        cluster.committed = 0
        again(cluster, by=lambda: cluster.end(pod(cluster, 1), 139))
        cluster.documents["Pod", "train-worker-1"]["spec"]["nodeName"] = node
    cluster.committed = 0
    again(cluster, by=lambda: cluster.end(pod(cluster, 1), 139))
    assert avoids(pod(cluster, 1), node)
    spreads = [pod(cluster, worker)["spec"]["topologySpreadConstraints"] for worker in (0, 1)]
    assert [each["maxSkew"] for (each,) in spreads] == [1, 1000]  # that the node has no worker now speaks for no other one


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "NodeShutdown", "OutOfnvidia.com/gpu"])
def test_nodes_that_refuse_pods_are_not_asked_every_second_and_nobody_is_blamed(reason: str) -> None:
    cluster = a_cluster(1)
    for _ in range(120):
        cluster.pass_()
        for each in cluster.pods:
            if each["status"]["phase"] == "Running":
                cluster.agents.pop(each["metadata"]["uid"], None)
                times = {"lastTransitionTime": pod_status.rfc3339(cluster.now), "type": "Ready", "status": "False"}
                each["status"] = {"phase": "Failed", "reason": reason, "conditions": [times]}
        cluster.look()
    assert 8 <= cluster.made["train-worker-0"] <= 12
    assert cluster.status["restarts"] == 0
    assert f"worker 0 was refused or lost by its node ({reason})" in cluster.status["reason"]


def test_pods_that_end_up_on_nodes_that_go_away_are_not_made_every_second() -> None:
    cluster = a_cluster(1, nodes=1)
    cluster.until(trains(1))
    taints = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    cluster.documents["Node", "node-0"]["spec"]["taints"] = taints
    schedule = cluster.create

    def tolerated(made: dict[str, Any]) -> None:
        schedule(made)
        cluster.documents["Pod", made["metadata"]["name"]]["spec"]["nodeName"] = "node-0"

    cluster.create = tolerated  # type: ignore[method-assign]
    before = cluster.made["train-worker-0"]
    cluster.run(120)
    assert 5 <= cluster.made["train-worker-0"] - before <= 12


def test_a_job_that_is_scaled_down_lets_go_in_order_also_where_its_max_follows() -> None:
    cluster = Cluster({"replicas": 4, "min": 1})
    cluster.until(trains(4))
    again(cluster, 4, by=lambda: cluster.delete(kinds.POD, "train-worker-0", pod(cluster, 0)["metadata"]["uid"]))
    assert cluster.status["world"] == [1, 2, 3, 0]
    again(cluster, by=lambda: cluster.change(replicas=2))
    assert (cluster.status["world"], cluster.status["restarts"]) == ([1, 2], 0)
    assert repeated(cluster) == 0


@pytest.mark.parametrize(
    ("workers", "least"),
    [({"replicas": 2}, 1), ({"replicas": 3, "min": 1}, 1), ({"replicas": 3, "min": 2, "max": 4}, 2), ({}, 0)],
)
def test_a_drain_may_always_take_one_worker_and_leaves_as_many_as_are_needed(workers: dict[str, int], least: int) -> None:
    cluster = Cluster(workers)
    cluster.look()
    assert cluster.documents["PodDisruptionBudget", "train"]["spec"]["minAvailable"] == least


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


def test_pods_that_only_have_the_label_of_the_job_are_in_nobodys_way() -> None:
    cluster = a_cluster(2)
    labels = {Label.JOB: "train", Label.WORKER: "0"}
    meta = {"name": "train-8d1f-0-x7k2p", "labels": labels, "creationTimestamp": pod_status.rfc3339(BEGAN)}
    cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {"phase": "Succeeded"}})
    cluster.until(lambda c: len(c.status.get("world") or ()) == 2)  # an Indexed Job of this name was there before


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


VOLCANO, COSCHEDULING = "scheduling.volcano.sh", "scheduling.x-k8s.io"


def schedulers(cluster: Cluster) -> set[str | None]:
    return {pod["spec"].get("schedulerName") for pod in cluster.pods}


def test_a_gang_is_found_when_the_job_is_taken_up_and_stays_the_same() -> None:
    cluster = a_cluster(3, low=2)
    cluster.found = frozenset([VOLCANO])
    cluster.until(trains(3))
    assert schedulers(cluster) == {"volcano"}
    group = cluster.documents["PodGroup", "train"]
    assert (group["apiVersion"], group["spec"]) == ("scheduling.volcano.sh/v1beta1", {"minMember": 2})
    cluster.found = frozenset([COSCHEDULING])
    again(cluster, 3, by=lambda: cluster.end(pod(cluster, 1), 137))
    cluster.change(min=3)
    cluster.run(5)
    assert cluster.documents["PodGroup", "train"]["spec"] == {"minMember": 3}
    assert schedulers(cluster) == {"volcano"}
    assert cluster.status["gang"] == "volcano"


def test_a_scheduler_that_comes_later_takes_over_no_job() -> None:
    cluster = training(3, low=2)
    cluster.found = frozenset([VOLCANO])
    again(cluster, 3, by=lambda: cluster.end(pod(cluster, 1), 137))
    assert (schedulers(cluster), cluster.all("PodGroup")) == ({None}, [])


def test_a_gang_that_nobody_could_start_is_said_and_begun_when_somebody_can() -> None:
    cluster = a_cluster(2, low=2, scheduling={"gang": "coscheduling"})
    cluster.run(5)
    assert cluster.status["reason"] == (
        "no pods can be created: scheduling.gang is coscheduling, and the cluster has no PodGroups of scheduling.x-k8s.io; "
        "ask the cluster's administrator for the coscheduling plugin, or set scheduling.gang to none"
    )
    assert cluster.pods == []
    cluster.found = frozenset([COSCHEDULING])
    cluster.until(trains(2))
    assert schedulers(cluster) == {"scheduler-plugins-scheduler"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"code": "./"}, "code (./) is on this machine"),
        ({"environment": {"requirements": "/home/me/requirements.txt"}}, "environment (/home/me/requirements.txt) is on this"),
        ({"template": {"spec": None}}, "template.spec must be a mapping"),
    ],
)
def test_a_job_that_no_pod_can_be_made_of_says_so(fields: dict[str, Any], why: str) -> None:
    cluster = a_cluster(2, **fields)
    cluster.run(5)
    assert cluster.status["reason"].startswith(f"no pods can be created: train: {why}")
    assert (cluster.status["state"], len(cluster.writes)) == ("Pending", 1)


@pytest.mark.parametrize(
    ("fields", "account"),
    [({}, "train-worker"), ({"serviceAccountName": "reads-s3"}, "reads-s3"), ({"serviceAccountName": None}, "default")],
)
def test_the_account_that_workers_have_may_say_that_they_are_there(fields: dict[str, Any], account: str) -> None:
    cluster = a_cluster(1, template={"metadata": {"name": "has no meaning", "labels": {"team": "vision"}}, "spec": fields})
    cluster.look()
    made = pod(cluster, 0)
    assert (made["metadata"]["labels"]["team"], made["spec"].get("serviceAccountName", "default")) == ("vision", account)
    (binding,) = cluster.all("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "team"}]


def test_a_job_that_somebody_else_manages_is_left_alone() -> None:
    cluster = a_cluster(2, managedBy="kueue.x-k8s.io/multikueue")
    cluster.run(10)
    assert cluster.writes == []
    cluster = a_cluster(2, managedBy="outlast.dev/operator")
    cluster.until(trains(2))


def test_a_worker_of_another_job_cannot_speak_for_one_of_this() -> None:
    cluster = training(2)
    lease = cluster.documents["Lease", "train-worker-1"]
    annotations = lease["metadata"]["annotations"]
    report = {**json.loads(annotations[Annotation.REPORT]), "failed": True, "failure": {"code": 78, "reason": "I say so"}}
    meta = {**lease["metadata"], "name": "other-worker-1", "annotations": {Annotation.REPORT: json.dumps(report)}}
    cluster.put({**lease, "metadata": meta})
    cluster.run(20)
    assert (cluster.status["state"], cluster.status["generation"]) == ("Running", 1)


@pytest.mark.parametrize("bits", [False, True])
def test_that_steps_were_lost_is_said_once_and_not_of_steps_that_were_withdrawn(
    monkeypatch: pytest.MonkeyPatch, bits: bool
) -> None:
    cluster, said = training(steps=10_000), []
    cluster.until(lambda c: c.committed >= 200, 300)

    def look(**how: Any) -> Plan:
        plan = Cluster.look(cluster, **how)
        said.extend(event.message for event in plan.events if event.reason == "StepsLost")
        return plan

    monkeypatch.setattr(cluster, "look", look)
    cluster.committed = 0  # with the disk on which it was
    again(cluster, by=lambda: wrong_bits(cluster) if bits else cluster.fail(1))
    assert [each.partition(" ")[0] for each in said] == ([] if bits else ["training"])
    if bits:
        return
    again(cluster, 3, by=lambda: cluster.job["spec"]["workers"].update(replicas=3))
    assert 0 < cluster.step < 200
    assert len(said) == 1


@pytest.mark.parametrize("after_s", [2, 5])
def test_a_newcomer_waits_for_the_save_of_the_last_worker_that_has_the_state(monkeypatch, after_s: int) -> None:
    cluster = Cluster({"replicas": 1, "min": 1, "max": 3})
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


def test_workers_that_the_version_before_had_meet_at_an_etcd_leave_for_others_and_no_step_is_lost() -> None:
    cluster = training(rendezvous={"backend": "etcd", "endpoint": "etcd:2379"}, steps=10_000)
    env = {each["name"]: each.get("value") for each in pod(cluster, 0)["spec"]["containers"][0]["env"]}
    assert env[Env.RENDEZVOUS] == "kubernetes://train"  # a stored job may still ask for it
    before, generation = {each["metadata"]["uid"] for each in cluster.pods}, cluster.status["generation"]
    cluster.status["rendezvous"]["wanted"] = {"number": 3, "replicas": 2, "sizes": [1, 2, 3, 4], "expected": [0, 1]}
    cluster.until(lambda c: c.status["generation"] > generation and trains(2)(c), 120)
    assert not before & {each["metadata"]["uid"] for each in cluster.pods}
    assert "wanted" not in cluster.status["rendezvous"]
    assert (cluster.status["restarts"], repeated(cluster)) == (0, 0)
