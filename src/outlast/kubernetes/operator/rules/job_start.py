"""Rules for a job that is new, has a changed specification, cannot be read, or waits in a Kueue queue. Pure."""

from __future__ import annotations

from outlast.base.errors import InvalidJob
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import document_parsing, pod_status
from outlast.kubernetes.manifests.scheduling import gang
from outlast.kubernetes.manifests.scheduling.kueue import Priority
from outlast.kubernetes.operator import desired
from outlast.kubernetes.operator.plan import Document
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import counted_failures
from outlast.rendezvous.who_trains import Call, Cause

QUEUE_RECHECK_S = 10.0
"""Poll interval for missing Kueue objects, in seconds, as their creation triggers no reconcile pass."""


def unreadable(rec: ReconcilePass) -> None:
    """Handle an invalid job. It waits to be corrected, but fails if it cannot even be read, has not started and has no pods."""
    if rec.snapshot.job is not None:
        return
    if document_parsing.UNREADABLE in rec.snapshot.document and rec.status.started is None and not rec.snapshot.pods:
        rec.update(observed_generation=rec.snapshot.generation)
        reason = f"the job cannot be read: {rec.snapshot.parse_error}"
        return rec.finish(State.FAILED, reason, contract.Exit.MISCONFIGURED, End.INVALID)
    rec.skip_rest = True
    rec.set_state(State.PENDING, f"the job cannot be understood: {rec.snapshot.parse_error}", "InvalidJob", warning=True)
    rec.update(observed_generation=rec.snapshot.generation)


def elected_through_etcd(rec: ReconcilePass) -> None:
    """Move a job off etcd, through which its agents elected a coordinator under an operator of the previous version. These
    workers follow only etcd, so all of them save and are replaced."""
    if not rec.status.uses_etcd or rec.status.result is not None:
        return
    newest = max([rec.status.generation, *(report.member.generation for report in rec.snapshot.reports.values())])
    if newest > rec.status.generation:  # the operator does not know the newest world, and the next must be newer
        rec.update(called=Call(newest, "the run goes on", False, rec.now, cause=Cause.RESUME))
    if any(pod.uid not in rec.pod_ends for pod in rec.snapshot.pods):
        for pod in rec.alive:
            rec.handled_uids[pod.uid] = None
            rec.delete(pod, "it is replaced by a worker that follows the operator instead of etcd")
        rec.skip_rest = True
        return rec.set_state(
            State.RESTARTING, "the operator decides from now on; workers that met through etcd are replaced", "Resuming"
        )
    call = Call(rec.status.generation + 1, "the run goes on", False, rec.now, cause=Cause.RESUME)
    rec.update(uses_etcd=False, world=None, called=call)


def new_or_changed(rec: ReconcilePass) -> None:
    """Create the objects that a new job's pods need, or update those of a changed job. Report a job that cannot be rendered as
    pods."""
    status, generation = rec.status, rec.snapshot.generation
    if status.observed_generation == generation and status.started is not None:
        return
    rec.update(observed_generation=generation)
    try:
        if status.started is None:
            if rec.snapshot.refusal and rec.snapshot.refusal != status.reason:  # retried once the status shows the refusal
                rec.skip_rest = True
                return rec.set_state(State.PENDING, rec.snapshot.refusal, "FailedCreate", warning=True)
            if no_gang := gang.missing(rec.snapshot.gang, rec.snapshot.features.groups):
                rec.skip_rest = True
                return rec.set_state(State.PENDING, f"no pods can be created: {no_gang}", "NoGang", warning=True)
            rec.prerequisites = desired.prerequisites(rec.snapshot)
            low, high = rec.spec.workers.min, rec.spec.workers.max
            created = pod_status.created_at(rec.snapshot.document) or rec.now
            rec.record("submitted", created, run=rec.status.run, job=rec.snapshot.name, min=low, max=high)
            rec.update(started=rec.now, has_formed_world=False, gang="" if rec.snapshot.gang == "none" else rec.snapshot.gang)
        else:
            rec.apply = desired.updated_prerequisites(rec.snapshot)
    except InvalidJob as error:
        rec.skip_rest = True
        rec.set_state(State.PENDING, f"no pods can be created: {error}", "InvalidJob", warning=True)


def queued(rec: ReconcilePass) -> None:
    """Handle a job whose queue has not admitted enough workers or takes quota back."""
    queue, status = rec.snapshot.queue, rec.status
    if queue is None:
        if rec.requested and not rec.desired:
            rec.set_state(State.QUEUED, "waiting for the first list of Kueue's objects", "Queued")
        return rec.update(queue="")
    sizes, has_world = rec.spec.workers.allowed(), status.world is not None and status.called is None and status.result is None

    def make_workload(name: str, count: int, min_count: int, priority: Priority) -> Document:
        return desired.workload(rec.snapshot, queue.objects.kind, name, count, min_count, priority)

    changes = queue.changes(rec.requested, sizes, rec.resource_pods, has_world, make_workload, rec.now)
    rec.apply, rec.statuses = (*rec.apply, *changes.apply), changes.statuses
    for deletion in changes.deletes:
        rec.deletes[deletion.uid] = deletion
    rec.update(queue=queue.name)
    if missing_object := queue.missing_object():
        rec.requeue_at(rec.now + QUEUE_RECHECK_S)
        if not has_world and rec.requested:
            rec.set_state(State.QUEUED, missing_object, "Queued", warning=True)
    if rec.requested and not rec.desired:  # all save and exit together, as on suspension
        return rec.set_state(State.QUEUED, queue.pending_reason(), "Evicted" if rec.alive else "Queued", warning=bool(rec.alive))
    for pod in rec.alive:
        if queue.rejects(pod.document):
            sentence = f"worker {pod.index} leaves: the queue {queue.name} takes its quota back"
            counted_failures.record_interruption(rec, pod, "WorkerPreempted", sentence)
            rec.delete(pod, sentence)
