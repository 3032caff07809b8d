"""The reconciler of each kind of job: ours, and those of `kube.dropins`."""

from __future__ import annotations

import dataclasses
import functools

from outlast.kube import dropins
from outlast.kube.kinds import ELASTIC_JOB, Kind
from outlast.operator import decide, snapshot
from outlast.operator.cache import CachedJob
from outlast.operator.operator import Reconciler
from outlast.operator.plan import Plan
from outlast.operator.queues import Found
from outlast.operator.rules import end
from outlast.operator.snapshot import Limits

WRITES_PER_S = 100
"""The most statuses that are written in a second to tell how far training is."""


def elastic_job(limits: Limits, cached: CachedJob, now: float, found: Found) -> Plan:
    """What is to be done about an ElasticJob of ours."""
    assert cached.job is not None, "it is asked about jobs that are there"
    documents = (cached.job, cached.pods, cached.leases, cached.nodes)
    if (pause_s := cached.jobs / WRITES_PER_S) > limits.progress_s:
        limits = dataclasses.replace(limits, progress_s=pause_s)
    return decide.decide(snapshot.observe(*documents, now, cached.since, found, limits, cached.refused))


def orphans(limits: Limits, cached: CachedJob, now: float) -> Plan:
    """What is to be done about pods whose ElasticJob is gone."""
    ours = [pod for pod in snapshot.seen_pods(cached.pods, cached.nodes) if _of_an_elastic_job(pod)]
    return end.orphans(ours, now, cached.since, limits)


def _of_an_elastic_job(pod: snapshot.Pod) -> bool:
    """Whether we have made it; pods of Jobs and StatefulSets have the label of their job, too."""
    return any(owner["kind"] == ELASTIC_JOB.kind for owner in pod.document["metadata"].get("ownerReferences") or ())


def of(limits: Limits) -> dict[Kind, Reconciler]:
    """All of them, by kind."""
    added = {each.kind: functools.partial(each.functions.reconcile, limits) for each in dropins.DROP_INS}
    return {ELASTIC_JOB: functools.partial(elastic_job, limits), **added}
