"""Decides what to do about a job, by an ordered table of rules that are applied to one snapshot of the job. Pure.

Each rule is named after a situation and writes a sentence for the status, the Event and the log line. If several rules set the
state in one pass, the first wins, unless a later rule forms a world or ends the job. `rendezvous.coordinator.step` decides which
workers train together, as it does for jobs on one machine.

Invariants: no pod is created beyond the desired number, nor with the index of an existing pod. No failure is counted twice.
Nothing is deleted before the status says why.
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.job import contract
from outlast.kubernetes.operator.observed_job import JobSnapshot
from outlast.kubernetes.operator.plan import Plan
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import (
    counted_failures,
    job_end,
    job_start,
    lost_nodes,
    plain_torchrun,
    rendezvous_calls,
    replaced_workers,
    status_progress,
)


def decide(snapshot: JobSnapshot) -> Plan:
    """Return the plan for one reconcile pass."""
    if snapshot.document["spec"].get("managedBy", contract.MANAGED_BY) != contract.MANAGED_BY:
        return Plan()  # another controller runs this job
    if snapshot.document["metadata"].get("deletionTimestamp"):
        return job_end.orphans(snapshot.pods, snapshot.now, snapshot.observed_since, snapshot.limits)
    rec = ReconcilePass(snapshot)
    for rule in RULES if snapshot.plain is None else PLAIN_RULES:
        rule(rec)
        if rec.skip_rest:
            break
    if snapshot.job is not None:
        status_progress.update_progress(rec)
    return rec.plan()


RULES: tuple[Callable[[ReconcilePass], None], ...] = (
    job_end.finished,
    job_start.unreadable,
    job_start.new_or_changed,
    job_start.queued,
    job_end.workers_done,
    counted_failures.repaired_failures,
    replaced_workers.ended_workers,
    lost_nodes.unreachable_workers,
    job_start.elected_through_etcd,
    lost_nodes.cut_off_workers,
    replaced_workers.silent_workers,
    lost_nodes.leaving_nodes,
    rendezvous_calls.resumed,
    job_end.deadline_exceeded,
    rendezvous_calls.world_decided,
    replaced_workers.mass_silence,
    replaced_workers.surplus_workers,
    replaced_workers.missing_workers,
)
"""Rules that observe pods come before the decision about the world, and pods are created last."""
PLAIN_RULES: tuple[Callable[[ReconcilePass], None], ...] = (
    job_end.finished,
    plain_torchrun.start_time,
    job_end.deadline_exceeded,
    plain_torchrun.restarted_containers,
    plain_torchrun.ended_workers,
    plain_torchrun.done_workers,
    lost_nodes.unreachable_workers,
    plain_torchrun.overdue_workers,
    lost_nodes.leaving_nodes,
    plain_torchrun.needless_workers,
    plain_torchrun.missing_workers,
    plain_torchrun.pods_observed,
)
"""Rules for a job whose workers have no agent: torchrun decides which workers train together."""
