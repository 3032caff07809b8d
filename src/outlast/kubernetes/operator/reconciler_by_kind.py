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


def elastic_job(limits: Limits, cached: CachedJob, now: float, features: ClusterFeatures) -> Plan:
    """Return the plan for an Outlast ElasticJob."""
    if (interval_s := cached.job_count / WRITES_PER_S) > limits.progress_s:
        limits = dataclasses.replace(limits, progress_s=interval_s)
    return decide.decide(observed_job.take_snapshot(cached, now, features, limits))


def orphans(limits: Limits, cached: CachedJob, now: float) -> Plan:
    """Return the plan for the remaining pods of an ElasticJob that no longer exists."""
    pods = [pod for pod in observed_job.pods_of(cached) if _of_an_elastic_job(pod)]
    return job_end.orphans(pods, now, cached.observed_since, limits)


def _of_an_elastic_job(pod: observed_job.Pod) -> bool:
    """Return whether an ElasticJob owns the pod: pods of Jobs and StatefulSets have their job's label too."""
    return any(owner["kind"] == ELASTIC_JOB.kind for owner in pod.document["metadata"].get("ownerReferences") or ())


def reconcilers(limits: Limits, agent_image: Callable[[], str] | None = None) -> dict[Kind, Reconciler]:
    """Return the reconciler for each kind. Reconcile passes fail while `agent_image` raises ClusterError."""

    def elastic_jobs(cached: CachedJob, now: float, features: ClusterFeatures) -> Plan:
        own = dataclasses.replace(limits, agent_image=agent_image()) if agent_image else limits
        return elastic_job(own, cached, now, features)

    dropin_reconcilers = {each.kind: functools.partial(each.functions.reconcile, limits) for each in dropins.DROP_INS}
    return {ELASTIC_JOB: elastic_jobs, **dropin_reconcilers}
