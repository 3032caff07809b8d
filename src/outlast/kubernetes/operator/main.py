"""Runs an `Operator` as a process, configured by command-line options and environment variables."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import NoReturn

from outlast.base import units
from outlast.base.clock import BREAK_S, Clock
from outlast.base.errors import ClusterError, OutlastError
from outlast.base.loglines import write_log
from outlast.job import contract
from outlast.job.contract import Env, Pod
from outlast.kubernetes import api
from outlast.kubernetes.api import dropins, kinds
from outlast.kubernetes.api.kinds import ELASTIC_JOB, Kind
from outlast.kubernetes.manifests.installed import operator_deployment
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE
from outlast.kubernetes.operator import decide, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.leader import Leadership
from outlast.kubernetes.operator.observed_job import Limits
from outlast.kubernetes.operator.operator import Operator, Reconciler
from outlast.kubernetes.operator.plan import Plan
from outlast.kubernetes.operator.rules import job_end
from outlast.kubernetes.operator.watches import Settings

log = logging.getLogger(__name__)

GC_THRESHOLD = 100_000
"""Number of allocations between garbage collections. A reconcile pass allocates many objects but no cycles: with Python's default
of 700, collections take a third of the time and free nothing."""
MIN_LOST_S = 5.0
"""Lower bound for --lost-after."""
WRITES_PER_S = 100
"""Maximum number of status writes per second for progress, across all jobs."""


def identity(env: Mapping[str, str]) -> str:
    """Return the operator's identity for leader election: the pod's name, which survives container restarts, or else a random
    name."""
    return env.get(Env.POD) or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def port(env: Mapping[str, str]) -> int:
    """Return the port for probes and metrics. Raises OutlastError."""
    value = env.get(Env.PROBE_PORT, str(Pod.PROBE_PORT))
    if not value.isdecimal() or int(value) >= 2**16:
        raise OutlastError(f"{Env.PROBE_PORT} ({value}) is not a port; set it to one from 0 (any) to 65535")
    return int(value)


def limits(lost_after: str) -> Limits:
    """Return the operator's timeouts for a value of --lost-after. Raises OutlastError if the value is invalid."""
    try:
        lost_s = units.duration(lost_after).total_seconds()
    except ValueError as error:
        raise OutlastError(f"--lost-after {lost_after} {error}") from error
    if lost_s < MIN_LOST_S:
        raise OutlastError(
            f"--lost-after {lost_after} is below {MIN_LOST_S:g}s; a node whose kubelet only restarts would lose its workers: "
            f"give {MIN_LOST_S:g}s or more"
        )
    return Limits(lost_s=lost_s)


def clock(cluster: api.Cluster, wall: Callable[[], float] = time.time) -> Clock:
    """Return a steady clock. It starts at the API server's time if this machine's time differs much from it."""
    try:
        offset_s = cluster.time() - wall()
    except ClusterError as error:  # if the API server is unreachable, the watches report it
        log.warning("the API server's time is unknown, this machine's is used: %s", error)
        return Clock(wall)
    if abs(offset_s) <= BREAK_S:
        return Clock(wall)
    relation = "behind" if offset_s > 0 else "ahead of"
    log.warning("this machine's clock is %.0f s %s the API server's, whose time is used; set it", abs(offset_s), relation)
    return Clock(lambda: wall() + offset_s)


def own_image(cluster: api.Cluster, env: Mapping[str, str]) -> str:
    """Return this pod's image, which a kustomization may have changed. Outside of pods, return the image of this release. Raises
    ClusterError."""
    if Env.POD not in env:
        return OPERATOR_IMAGE
    pod = cluster.get(kinds.POD, env[Env.POD], namespace=env.get(Env.NAMESPACE) or contract.OPERATOR_NAMESPACE)
    return str(next(each["image"] for each in pod["spec"]["containers"] if each["name"] == operator_deployment.CONTAINER))


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


def main(limits: Limits, *, namespace: str | None, workers: int, text: bool, context: str | None) -> NoReturn:
    """Run the operator until SIGTERM or SIGINT, then exit the process. Raises OutlastError if the operator cannot start."""
    write_log(text=text)
    gc.set_threshold(GC_THRESHOLD)
    settings = Settings(namespace, workers, port=port(os.environ))
    cluster = api.connect(context)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    operator_namespace = os.environ.get(Env.NAMESPACE) or contract.OPERATOR_NAMESPACE
    leadership = Leadership(cluster, identity(os.environ), operator_namespace)
    by_kind = reconcilers(limits, functools.cache(functools.partial(own_image, cluster, os.environ)))
    left_over = functools.partial(orphans, limits)
    operator = Operator(cluster, by_kind, leadership, settings, orphans=left_over, clock=clock(cluster))
    code = operator.run(stop)
    cluster.close()
    logging.shutdown()
    os._exit(code)  # on a normal exit Python joins executor threads, and would wait for a write that hangs
