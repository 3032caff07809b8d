"""The rule for a job that waits in a Kueue queue. Pure."""

from __future__ import annotations

from outlast.job.status import State
from outlast.kubernetes.manifests.scheduling.kueue import Priority
from outlast.kubernetes.operator import desired
from outlast.kubernetes.operator.plan import Document
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import counted_failures

RECHECK_S = 10.0
"""Poll interval for missing Kueue objects, in seconds, as their creation triggers no reconcile pass."""


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
        rec.requeue_at(rec.now + RECHECK_S)
        if not has_world and rec.requested:
            rec.set_state(State.QUEUED, missing_object, "Queued", warning=True)
    if rec.requested and not rec.desired:  # all save and exit together, as on suspension
        return rec.set_state(State.QUEUED, queue.pending_reason(), "Evicted" if rec.alive else "Queued", warning=bool(rec.alive))
    for pod in rec.alive:
        if queue.rejects(pod.document):
            sentence = f"worker {pod.index} leaves: the queue {queue.name} takes its quota back"
            counted_failures.record_interruption(rec, pod, "WorkerPreempted", sentence)
            rec.delete(pod, sentence)
