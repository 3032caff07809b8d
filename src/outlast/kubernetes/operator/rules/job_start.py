"""Rules for a job that is new, has a changed specification, or cannot be read. Pure."""

from __future__ import annotations

from outlast.base.errors import InvalidJob
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import document_parsing, pod_status
from outlast.kubernetes.manifests.scheduling import gang
from outlast.kubernetes.operator import desired
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.rendezvous.who_trains import Call, Cause


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
