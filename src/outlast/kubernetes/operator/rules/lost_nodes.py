"""Rules for nodes that are unreachable, gone, or about to be terminated. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator.elasticjob_status import Leaving, Lost
from outlast.kubernetes.operator.plan import Event
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import counted_failures
from outlast.kubernetes.operator.rules.replaced_workers import FAST_LOSS_S
from outlast.rendezvous.partition import FORGIVEN_S, Loss

_EARLIER_S = 2.0
"""A deletion that has begun is shortened only if it would end more than this many seconds after the deadline, because API servers
store times in whole seconds."""


def unreachable_workers(rec: ReconcilePass) -> None:
    """Force-delete pods whose node is unreachable or gone."""
    explained = set()
    silent = rec.status.silent_uids
    for pod in rec.snapshot.pods:
        if pod.node_lost_at is None or pod.uid in rec.pod_ends or pod.uid in rec.deletes:
            continue
        gone = pod.node not in rec.snapshot.nodes
        report = rec.snapshot.reports.get(pod.index)
        silent_since = (
            rec.last_seen(report) if report and not gone else max(pod.node_lost_at, pod.created, rec.snapshot.observed_since)
        )
        # A worker in a mesh renews its Lease rarely, as its peers report when they cannot reach it.
        limit_s = rec.lease_s(report) if report and report.report.mesh and not gone else rec.snapshot.limits.lost_s
        if (end := rec.end_of_wait(silent_since, limit_s)) is not None:
            rec.requeue_at(end)
            continue
        how = "is gone" if gone else f"has not answered for {limit_s:g} s"
        sentence = f"worker {pod.index} was lost: its node {pod.node} {how}"
        if pod.uid in silent or (not pod.terminating and pod.uid not in rec.handled_uids):
            rec.update(interruptions=rec.status.interruptions + 1)
            explained.add(pod.uid)
            rec.events.append(Event("Warning", "NodeLost", sentence))
            rec.record("failure", generation=rec.generation_of(pod), worker=pod.index, reason=sentence, counted=False)
            counted_failures.expect_others(rec, pod)
        rec.delete(pod, sentence, grace_s=0)
    if explained & silent:
        rec.update(silent=tuple(each for each in rec.status.silent if each.uid not in explained))


def record_losses(rec: ReconcilePass, losses: Mapping[int, Loss]) -> None:
    """Record the workers that their peers cannot reach, and delete their pods. Each loss is an interruption, like a lost node,
    and is forgotten after FORGIVEN_S."""
    recorded = {each.worker: each for each in rec.status.lost}
    lost = []
    for id, loss in sorted(losses.items()):
        record, pod = recorded.get(id), rec.pod(id)
        if record is None or record.at != loss.at:
            if pod and pod.alive and pod.uid not in rec.handled_uids:
                rec.update(interruptions=rec.status.interruptions + 1)
                counted_failures.expect_others(rec, pod)
            record = Lost(id, pod.uid if pod else "", pod.node if pod else "", loss.at)
        if rec.end_of_wait(loss.at, FORGIVEN_S) is not None:
            lost.append(replace(record, times=loss.times, held=loss.held))
    if tuple(lost) != rec.status.lost:
        rec.update(lost=tuple(lost))
    cut_off_workers(rec)


def cut_off_workers(rec: ReconcilePass) -> None:
    """Force-delete the pods of workers that their peers could not reach."""
    lost = {each.uid for each in rec.status.lost}
    for pod in rec.alive:
        if pod.uid in lost:
            rec.delete(pod, f"worker {pod.index} was lost: its peers could not reach it", grace_s=0)


def leaving_nodes(rec: ReconcilePass) -> None:
    """Let workers save and exit in time if they must leave, usually because their node is about to be terminated. The deadline is
    published before the pod is deleted. If somebody else has already requested the deletion, it is shortened to meet the
    deadline."""
    leaves = {each.uid: each for each in rec.status.leaves}
    for pod in rec.snapshot.pods:
        departure = pod.departure
        if departure is None or pod.ended or pod.uid in rec.deletes:
            continue
        if pod.alive and (retry_at := rec.end_of_wait(pod.created, FAST_LOSS_S)) is not None:
            rec.requeue_at(retry_at)  # it was scheduled there despite the taint, and so would be the next pod
            continue
        if departure.deadline is not None and not (pod.uid in leaves and leaves[pod.uid].deadline <= departure.deadline):
            leaves[pod.uid] = Leaving(pod.index, pod.uid, departure.deadline, departure.sentence(pod.node))
        if pod.alive:
            by = f", by {pod_status.rfc3339(departure.deadline)}" if departure.deadline is not None else ""
            sentence = f"worker {pod.index} leaves: its node {pod.node} is about to be terminated ({departure.cause}{by})"
            counted_failures.record_interruption(rec, pod, "NodeLeaving", sentence)
            rec.delete(pod, sentence, grace_s=departure.grace_s(pod.document, rec.now))
        elif departure.deadline is not None and pod.killed_by > departure.deadline + _EARLIER_S:
            by = pod_status.rfc3339(departure.deadline)
            sentence = f"worker {pod.index}, which leaves already, has less time: until {by}"
            rec.delete(pod, sentence, grace_s=departure.grace_s(pod.document, rec.now))
    existing = {pod.uid for pod in rec.snapshot.pods}
    rec.update(leaves=tuple(each for each in leaves.values() if each.uid in existing))
