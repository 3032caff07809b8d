"""The cost of a look grows linearly with the number of workers: calls are counted, not timed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from large_jobs import NOW, documents
from outlast.job.contract import Annotation
from outlast.kubernetes.api.kinds import ELASTIC_JOB
from outlast.kubernetes.operator import main, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.decide import decide
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.observed_job import RECEIVED_AT, JobSnapshot, Limits
from outlast.kubernetes.operator.plan import Plan
from outlast.rendezvous.who_trains import World

FEW, MANY = 60, 240


class Counted(int):
    """A worker's index that counts what it is compared with: a search in a tuple is no call that a profiler sees."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other


Change = Callable[[Any, list[Any], list[Any], dict[str, Any]], object]


def work(workers: int, change: Change) -> int:
    """How many calls and comparisons a look takes."""
    job, pods, leases, nodes = documents(workers)
    change(job, pods, leases, nodes)
    calls = 0

    def profiled(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    Counted.compared = 0
    before = sys.getprofile()
    sys.setprofile(profiled)
    try:
        seen = observed_job.take_snapshot(CachedJob(job, pods, leases, nodes, NOW - 1000), NOW)
        decide(counting(seen))
    finally:
        sys.setprofile(before)
    return calls + Counted.compared


def counting(seen: JobSnapshot) -> JobSnapshot:
    """The same with indices that count."""
    ids = {id: Counted(id) for id in range(1000)}
    world = seen.status.world
    assert world is not None
    formed = World(1, tuple(ids[id] for id in world.members), world.address, world.reason, world.at)
    told = {
        ids[id]: dataclasses.replace(each, member=dataclasses.replace(each.member, id=ids[id]))
        for id, each in seen.reports.items()
    }
    pods = tuple(dataclasses.replace(pod, index=ids[pod.index]) for pod in seen.pods)
    return dataclasses.replace(seen, status=dataclasses.replace(seen.status, world=formed), reports=told, pods=pods)


def half(documents: list[Any], **fields: Any) -> None:
    for document in documents[::2]:
        document |= fields


def half_report(leases: list[Any], **fields: Any) -> None:
    for lease in leases[::2]:
        said = lease["metadata"]["annotations"]
        said[Annotation.REPORT] = json.dumps({**json.loads(said[Annotation.REPORT]), **fields})


def nodes_lost(job: Any, pods: list[Any], leases: list[Any], nodes: dict[str, Any]) -> None:
    silent = {RECEIVED_AT: NOW - 100}
    half([*nodes.values()], status={"conditions": [{"type": "Ready", "status": "Unknown"}]}, **silent)
    half(leases, **silent)


def suspended(job: Any, pods: list[Any], leases: list[Any], nodes: dict[str, Any]) -> None:
    job["spec"]["suspend"] = True
    half_report(leases, standing="waiting")


ENDED = {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z"}}
FAILED = {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": ENDED}]}
FAILURE = {"rank": 0, "code": 1, "reason": "rank 0 failed", "time": NOW - 9, "echo": True, "step": 7}
LEAVES = {"taints": [{"key": "karpenter.sh/disrupted"}]}
SITUATIONS: dict[str, Change] = {
    "nothing": lambda job, pods, leases, nodes: None,
    "half fail": lambda job, pods, leases, nodes: half(pods, status=FAILED),
    "half are silent": lambda job, pods, leases, nodes: half(leases, **{RECEIVED_AT: NOW - 100}),
    "half are gone": lambda job, pods, leases, nodes: [pods.pop(index) for index in range(len(pods) // 2)],
    "nodes are lost": nodes_lost,
    "nodes leave": lambda job, pods, leases, nodes: [node.update(spec=LEAVES) for node in nodes.values()],
    "it shrinks": lambda job, pods, leases, nodes: job["spec"]["workers"].update(replicas=len(pods) // 2),
    "it is suspended": suspended,
    "half are done": lambda job, pods, leases, nodes: half_report(leases, standing="done"),
    "half report failures": lambda job, pods, leases, nodes: half_report(
        leases, standing="waiting", failed=True, failure=FAILURE
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_look_at_four_times_as_many_workers_takes_four_times_the_work(situation: str) -> None:
    change = SITUATIONS[situation]
    work(FEW, change)  # what is done once a process is done
    few, many = work(FEW, change), work(MANY, change)
    assert many < 4.5 * few, (few, many)


def test_steps_that_are_heard_of_are_told_at_the_next_look_which_comes_by_itself() -> None:
    job, pods, leases, nodes = documents(2)
    for lease in leases:
        lease["metadata"]["annotations"][Annotation.PROGRESS] = json.dumps({"generation": 1, "step": 7, "time": NOW - 1})
    cached = CachedJob(job, pods, leases, nodes, NOW - 1000)
    job["status"] = decide(observed_job.take_snapshot(cached, NOW)).status
    assert job["status"] is not None
    for lease in leases:
        lease[RECEIVED_AT] = NOW + 10
    assert decide(observed_job.take_snapshot(cached, NOW + 10)) == Plan(requeue_at=NOW + 13)


@pytest.mark.parametrize(("jobs", "workers", "pause_s"), [(1, 2, 3), (10_000, 2, 100), (1, 4000, 56)])
def test_how_often_steps_are_told_depends_on_how_many_hear_it(jobs: int, workers: int, pause_s: float) -> None:
    job, pods, leases, nodes = documents(workers)
    leases[0]["metadata"]["annotations"][Annotation.PROGRESS] = json.dumps({"generation": 1, "step": 7, "time": NOW - 1})
    for lease in leases:
        lease["spec"]["leaseDurationSeconds"] = 600  # so that no silence is looked for before

    def look(now: float) -> Plan:
        cached = CachedJob(job, pods, leases, nodes, NOW - 1000, job_count=jobs)
        return main.reconcilers(Limits())[ELASTIC_JOB](cached, now, ClusterFeatures())

    job["status"] = look(NOW).status
    assert look(NOW + 1) == Plan(requeue_at=NOW + pause_s)


def test_members_of_a_large_world_renew_less_often_and_are_missed_later() -> None:
    job, pods, leases, nodes = documents(2)
    leases[0]["spec"]["leaseDurationSeconds"] = 150
    leases[0][RECEIVED_AT] = leases[1][RECEIVED_AT] = NOW - 60
    plan = decide(observed_job.take_snapshot(CachedJob(job, pods, leases, nodes, NOW - 1000), NOW))
    assert [deletion.name for deletion in plan.deletes] == ["train-worker-1"]
