"""One account of a job of a cluster: the operator, `status`, `list`, `report` and the columns of `kubectl get ej` agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.base import units
from outlast.job import ledger
from outlast.job.report import goodput
from outlast.job.report.steps import Bucket
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.jobs import job_status as shown
from outlast.kubernetes.operator import elasticjob_status
from simulated import BEGAN, Agent, Cluster, trains

Document = dict[str, Any]
HARMS: dict[str, tuple[Callable[[Cluster], object], int, str]] = {
    "a process raises": (lambda c: c.fail(1), 3, "rank 1 on worker 1 failed"),
    "out of memory": (lambda c: c.end(pod(c, 1), 137, reason="OOMKilled"), 3, "worker 1 was OOMKilled"),
    "deleted by force": (lambda c: c.gone(pod(c, 0)), 3, "lost worker 0"),
    "evicted": (lambda c: c.end(pod(c, 2), 143, disrupted="EvictionByEvictionAPI"), 3, "worker 2 was evicted"),
    "its node is lost": (lambda c: c.lose(pod(c, 1)["spec"]["nodeName"]), 3, "worker 1 was lost: its node"),
    "scaled up": (lambda c: c.change(replicas=4), 4, "growing from 3 to 4"),
    "scaled down": (lambda c: c.change(replicas=2), 2, "shrinking from 4 to 2"),
    "silent": (lambda c: setattr(member(c, 1), "frozen", True), 2, "has said nothing for"),
    "a process is killed": (lambda c: c.fail(member(c, 0).index, code=137), 2, "rank 0 on worker 0 failed"),
}


def pod(cluster: Cluster, index: int) -> Document:
    return cluster.documents["Pod", f"train-worker-{index}"]


def member(cluster: Cluster, rank: int) -> Agent:
    """The agent of the worker that has this rank."""
    return next(agent for agent in cluster.agents.values() if agent.index == cluster.status["world"][rank])


def report(cluster: Cluster) -> goodput.Goodput:
    """Return the account as `outlast report` computes it, from the ledger in the store and from the cluster."""
    status = shown.status(shown.Snapshot("train", cluster.job))
    entries = shown.cluster_events(cluster.job, status)
    stored = ledger.Events([]).merged(cluster.ledger).merged(cluster.noted)
    return goodput.buckets(stored.merged(entries), cluster.now if status.state.active else None)


def test_all_that_happens_to_a_job_is_one_account_which_everybody_shows() -> None:
    """Ten harms, a suspension among them: the time from submission to the end has a cause, and every harm is named."""
    cluster = Cluster({"replicas": 3, "min": 1, "max": 4}, steps=700)
    cluster.accounts = True
    cluster.until(trains(3))
    for what, (harm, workers, _) in HARMS.items():
        cluster.run(40)
        generation = cluster.status["generation"]
        harm(cluster)
        cluster.until(lambda c, g=generation, n=workers: c.status["generation"] > g and trains(n)(c), 600)
        assert cluster.status["startTime"] == pod_status.rfc3339(BEGAN + 1), what
    cluster.run(20)
    cluster.change(suspend=True)
    cluster.until(lambda c: not c.pods)
    cluster.run(300)
    suspended = report(cluster)
    assert (suspended.state, cluster.status.get("goodput")) == ("Suspended", None), "nobody counts while nobody trains"
    cluster.change(suspend=False)
    cluster.until(trains(2), 600)
    cluster.run(6)
    assert cluster.step - 4 <= cluster.status["step"] <= cluster.step, "soon after it is resumed"
    cluster.until(lambda c: c.status["state"] == "Succeeded", 4000)
    cluster.run(60)

    account, status = report(cluster), shown.status(shown.Snapshot("train", cluster.job))
    assert account.start == int(BEGAN)
    assert account.end == pytest.approx(pod_status.timestamp(cluster.status["completionTime"]), abs=1)
    assert sum(account.seconds.values()) == pytest.approx(account.end - account.start)
    assert account.seconds[Bucket.SUSPENDED] == pytest.approx(302, abs=5)
    assert account.seconds[Bucket.PODS] > 0
    assert (account.state, status.state, cluster.status["state"]) == ("Succeeded",) * 3
    assert (account.steps_kept, status.step, cluster.status["step"]) == (700,) * 3
    assert round(account.goodput, 6) == status.goodput == cluster.status["goodput"] < 1
    assert cluster.status["goodputText"] == units.percent(account.goodput)
    told = [incident.text for incident in account.incidents]
    unnamed = {what: sentence for what, (_, _, sentence) in HARMS.items() if not any(sentence in text for text in told)}
    assert not unnamed, told
    assert any(text.startswith("suspended") for text in told), told
    assert status.checkpoint
    assert status.checkpoint.bytes == 1000


def test_the_status_keeps_the_submission_and_the_newest_entries_of_the_ledger() -> None:
    noted: tuple[Any, ...] = ()
    for t in range(100):
        noted = elasticjob_status.with_event(noted, t, "world", generation=t)
        assert elasticjob_status.with_event(noted, t, "world", generation=t) == noted, "a restarted operator notes nothing twice"
    assert [entry["t"] for entry in noted] == [0, *range(100 - elasticjob_status.MAX_LEDGER_EVENTS + 1, 100)]


def test_a_job_that_an_operator_of_another_version_ran_has_a_beginning_and_an_end() -> None:
    meta = {"name": "train", "creationTimestamp": "2026-01-01T00:00:00Z"}
    told = {"state": "Failed", "reason": "it failed", "completionTime": "2026-01-01T00:01:40Z", "step": 3}
    workload = {"kind": "ElasticJob", "metadata": meta, "spec": {}, "status": told}
    account = goodput.buckets(shown.cluster_events(workload, shown.status(shown.Snapshot("train", workload))), None)
    assert (account.state, account.wall_s, account.goodput) == ("Failed", 100, 0)
