"""Provides the reconciler for each kind of job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from outlast.kubernetes.api import dropins
from outlast.kubernetes.api.kinds import ELASTIC_JOB, Kind
from outlast.kubernetes.operator import decide, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.observed_job import Limits
from outlast.kubernetes.operator.operator import Reconciler
from outlast.kubernetes.operator.plan import Plan
from outlast.kubernetes.operator.rules import job_end

WRITES_PER_S = 100
"""Maximum number of status writes per second for progress, across all jobs."""


def orphans(limits: Limits, cached: CachedJob, now: float) -> Plan:
    """Return the plan for the remaining pods of an ElasticJob that no longer exists."""

    def operated(pod: observed_job.Pod) -> bool:  # pods of Jobs and StatefulSets have their job's label too
        return any(owner["kind"] == ELASTIC_JOB.kind for owner in pod.document["metadata"].get("ownerReferences") or ())

    return job_end.orphans(filter(operated, observed_job.pods_of(cached)), now, cached.observed_since, limits)


def reconcilers(limits: Limits, agent_image: Callable[[], str] | None = None) -> dict[Kind, Reconciler]:
    """Return the reconciler for each kind. Reconcile passes fail while `agent_image` raises ClusterError."""

    def elastic_jobs(cached: CachedJob, now: float, features: ClusterFeatures) -> Plan:
        image = agent_image() if agent_image else limits.agent_image
        progress_s = max(limits.progress_s, cached.job_count / WRITES_PER_S)
        own = dataclasses.replace(limits, agent_image=image, progress_s=progress_s)
        return decide.decide(observed_job.take_snapshot(cached, now, features, own))

    dropin_reconcilers = {each.kind: functools.partial(each.functions.reconcile, limits) for each in dropins.DROP_INS}
    return {ELASTIC_JOB: elastic_jobs, **dropin_reconcilers}
