"""Rules for a job that is new, has a changed specification, or cannot be read. Pure."""

from __future__ import annotations

from outlast.base.errors import InvalidJob
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import document_parsing, pod_status
from outlast.kubernetes.manifests.scheduling import gang
from outlast.kubernetes.operator import desired
from outlast.kubernetes.operator.reconcile_pass import Reconcile
from outlast.rendezvous.world import Call, Cause


def unreadable(rec: Reconcile) -> None:
    """Handle an invalid job that the API server has admitted: it can be corrected as long as nothing runs. A job that cannot even
    be parsed has failed, unless it has pods, so that it could be parsed when they were created."""
    if rec.snapshot.job is not None:
        return
    if document_parsing.UNREADABLE in rec.snapshot.document and rec.status.started is None and not rec.snapshot.pods:
        rec.update(observed=rec.snapshot.generation)
        reason = f"the job cannot be read: {rec.snapshot.problem}"
        return rec.finish(State.FAILED, reason, contract.Exit.MISCONFIGURED, End.INVALID)
    rec.done = True
    rec.set_state(State.PENDING, f"the job cannot be understood: {rec.snapshot.problem}", "InvalidJob", warning=True)
    rec.update(observed=rec.snapshot.generation)


def once_elected(rec: Reconcile) -> None:
    """Move a job off etcd: an operator of the previous version had the agents decide through etcd (`rendezvous.backend: etcd`).
    Its workers follow only etcd, so all of them save and are replaced."""
    if not rec.status.elected or rec.status.result is not None:
        return
    newest = max([rec.status.generation, *(report.member.generation for report in rec.snapshot.reports.values())])
    if newest > rec.status.generation:  # the operator does not know of this world: the next one must be newer
        rec.update(called=Call(newest, "the run goes on", False, rec.now, cause=Cause.RESUME))
    if any(pod.uid not in rec.ends for pod in rec.snapshot.pods):
        for pod in rec.alive:
            rec.handled[pod.uid] = None
            rec.delete(pod, "it leaves for a worker that hears the operator, and no etcd")
        rec.done = True
        return rec.set_state(State.RESTARTING, "the operator decides from now on; workers that met at an etcd leave", "Resuming")
    call = Call(rec.status.generation + 1, "the run goes on", False, rec.now, cause=Cause.RESUME)
    rec.update(elected=False, world=None, called=call)


def changed_or_new(rec: Reconcile) -> None:
    """Create the objects that the pods of a new job need, and update those of a changed job. For a job that cannot be rendered as
    pods, report why."""
    status, generation = rec.status, rec.snapshot.generation
    if status.observed == generation and status.started is not None:
        return
    rec.update(observed=generation)
    try:
        if status.started is None:
            if rec.snapshot.refused and rec.snapshot.refused != status.reason:  # retried once that is in the status
                rec.done = True
                return rec.set_state(State.PENDING, rec.snapshot.refused, "FailedCreate", warning=True)
            if no_gang := gang.missing(rec.snapshot.gang, rec.snapshot.features.groups):
                rec.done = True
                return rec.set_state(State.PENDING, f"no pods can be created: {no_gang}", "NoGang", warning=True)
            rec.prerequisites = desired.prerequisites(rec.snapshot)
            low, high = rec.spec.workers.min, rec.spec.workers.max
            created = pod_status.created_at(rec.snapshot.document) or rec.now
            rec.note("submitted", created, run=rec.status.run, job=rec.snapshot.name, min=low, max=high)
            rec.update(started=rec.now, formed=False, gang="" if rec.snapshot.gang == "none" else rec.snapshot.gang)
        else:
            rec.apply = desired.updated(rec.snapshot)
    except InvalidJob as error:
        rec.done = True
        rec.set_state(State.PENDING, f"no pods can be created: {error}", "InvalidJob", warning=True)
