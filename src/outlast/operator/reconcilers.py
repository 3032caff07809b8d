"""Who decides about which kind of job: the one place to name another kind."""

from __future__ import annotations

import dataclasses
import functools

from outlast.kube import wire
from outlast.kube.kinds import ELASTIC_JOB, LEGACY_JOB, Kind
from outlast.legacy import decide as legacy
from outlast.operator import decide, snapshot
from outlast.operator.cache import Looked
from outlast.operator.operator import Decider
from outlast.operator.plan import Plan
from outlast.operator.queues import Found
from outlast.operator.rules import ends
from outlast.operator.snapshot import Limits

WRITES_PER_S = 100
"""The most statuses that are written in a second to tell how far training is."""


def elastic_job(limits: Limits, looked: Looked, now: float, found: Found) -> Plan:
    """What is to be done about an ElasticJob of ours."""
    assert looked.job is not None, "it is asked about jobs that are there"
    documents = (looked.job, looked.pods, looked.leases, looked.nodes)
    if (pause_s := looked.jobs / WRITES_PER_S) > limits.progress_s:
        limits = dataclasses.replace(limits, progress_s=pause_s)
    return decide.decide(snapshot.observe(*documents, now, looked.since, found, limits, looked.refused))


def legacy_job(limits: Limits, looked: Looked, now: float, found: Found) -> Plan:
    """What is to be done about an ElasticJob of `elastic.pytorch.org`."""
    assert looked.job is not None, "it is asked about jobs that are there"
    if broken := looked.job.get(wire.UNREADABLE):
        return legacy.unreadable(looked.job, looked.pods, str(broken), now)
    ends: dict[str, float] = {}
    pods = snapshot.seen_pods(looked.pods, looked.nodes)
    for pod in pods:
        if pod.node_lost is not None:
            ends[pod.node] = max(ends.get(pod.node, 0.0), max(pod.node_lost, looked.since) + limits.lost_s)
    lost = {node for node, end in ends.items() if end <= now}
    leaving = {pod.node: pod.node_leaves for pod in pods if pod.node_leaves}
    plan = legacy.decide(looked.job, looked.pods, now, lost=lost, leaving=leaving)
    later = [end for end in ends.values() if end > now]
    return dataclasses.replace(plan, look_again=min([*later, plan.look_again or float("inf")])) if later else plan


def orphans(limits: Limits, looked: Looked, now: float) -> Plan:
    """What is to be done about pods whose ElasticJob is gone."""
    ours = [pod for pod in snapshot.seen_pods(looked.pods, looked.nodes) if _of_an_elastic_job(pod)]
    return ends.orphans(ours, now, looked.since, limits)


def _of_an_elastic_job(pod: snapshot.Pod) -> bool:
    """Whether we have made it; pods of Jobs and StatefulSets have the label of their job, too."""
    return any(owner["kind"] == ELASTIC_JOB.kind for owner in pod.document["metadata"].get("ownerReferences") or ())


def of(limits: Limits) -> dict[Kind, Decider]:
    """All of them, by kind."""
    return {ELASTIC_JOB: functools.partial(elastic_job, limits), LEGACY_JOB: functools.partial(legacy_job, limits)}
