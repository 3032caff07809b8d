"""Runs the coordinator's steps in the operator. The coordinator's state is restored from the job's status. Pure."""

from __future__ import annotations

import dataclasses

from outlast.job.failure import Failure
from outlast.job.status import Ending, State
from outlast.kubernetes.operator import desired, elasticjob_status
from outlast.kubernetes.operator.elasticjob_status import CountedFailure
from outlast.kubernetes.operator.plan import Document
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.rendezvous import coordinator, root_cause
from outlast.rendezvous.attempts import Repaired
from outlast.rendezvous.coordinator import CoordinatorState, Effect, Record
from outlast.rendezvous.partition import Loss
from outlast.rendezvous.root_cause import Pending
from outlast.rendezvous.who_trains import Call, Cause, World


def take(rec: ReconcilePass, event: coordinator.Event) -> None:
    """Run a coordinator step for an event, and write the result into the status."""
    perform(rec, *step(rec, event))


def step(rec: ReconcilePass, event: coordinator.Event) -> tuple[CoordinatorState, list[Effect]]:
    """Return the coordinator's state after an event, and the effects. The debounce is longer than in other coordinators, because
    kubelets report late."""
    settings = coordinator.Settings.of(rec.spec)
    settings = dataclasses.replace(settings, fences=False, counts_ends=True, debounce=root_cause.OPERATOR)
    return coordinator.step(settings, _restored(rec, event), event, rec.now)


def _restored(rec: ReconcilePass, event: coordinator.Event) -> CoordinatorState:
    """Restore the coordinator's state from the status and the members' reports. The newest saved step is capped at the current
    world's step, as the world may have resumed from an earlier step."""
    status, reports, gone = rec.status, rec.snapshot.reports, []
    for id, report in reports.items():
        pod = rec.pod(id)
        cut = pod is not None and pod.uid in rec.deletes and rec.deletes[pod.uid].grace_s == 0
        if pod is None or pod.uid in rec.pod_ends or cut or rec.presumed_dead_at(report) is None:
            gone.append(id)
    called = status.called
    if called is not None:  # a lost watch or a clock change must not shorten the time to save
        called = dataclasses.replace(called, at=min(max(called.at, rec.snapshot.observed_since), rec.now))
    committed = rec.committed
    if isinstance(event, Repaired) and root_cause.committed(event.past.failure):
        # The failure itself names the newest commit of that time, but a process that died as it started knows of none.
        committed = max((record.committed_step for record in status.history), default=0)
    held = max([rec.committed, *(report.progress.snapshot for report in reports.values())])
    state = CoordinatorState(
        {id: report.member for id, report in reports.items()},
        status.world,
        called,
        lost={each.worker: Loss(each.at, each.times, held=each.held) for each in status.lost},
        held=min(held, rec.step),
        counted=status.counted,
        committed=committed,
        history=status.history,
        restarts=status.restarts,
    ).gone(*gone)
    if not isinstance(event, coordinator.Tick):
        return state
    pending = tuple(state.uncounted(_reported(rec)))
    since = min((each.failure.time for each in pending), default=rec.now)
    return dataclasses.replace(state, pending=pending, pending_since=since)


def _reported(rec: ReconcilePass) -> list[tuple[Pending, bool]]:
    """Return the failures that members report now, for `CoordinatorState.uncounted`."""
    reported, generation = [], rec.status.world.generation if rec.status.world else 0
    for report in rec.snapshot.reports.values():
        failure, again, pod = report.failure, report.member.again, rec.pod(report.member.id)
        handled = again and (pod is None or pod.uid in rec.handled_uids)
        if failure is None or not report.member.failed or (handled and failure.generation < generation):
            continue
        if failure.time > rec.now:  # its node's clock is ahead of ours
            failure = dataclasses.replace(failure, time=report.renewed)
        reported.append((Pending(report.echo, failure), again))
    return reported


def perform(rec: ReconcilePass, state: CoordinatorState, effects: list[Effect]) -> None:
    """Write a step's result into the status, the ledger and the Events."""
    rec.update(counted=max(rec.status.counted, state.counted), restarts=state.restarts)
    for wait_s in (root_cause.OPERATOR.cause, root_cause.OPERATOR.settle) if state.pending else ():
        rec.requeue_at(rec.end_of_wait(state.pending_since, wait_s))
    for effect in effects:
        match effect:
            case Record(failure=Failure() as failure):
                _failed(rec, state, effect, failure)
            case Record("called") if state.called is not None:
                _called(rec, effect, state.called)
            case World():
                _formed(rec, effect)
            case Ending(ended, reason, code, end):
                rec.finish(ended, reason, code, end)


def _failed(rec: ReconcilePass, state: CoordinatorState, record: Record, failure: Failure) -> None:
    document = failure_document(rec, failure)
    facts = {name: value for name, value in record.facts.items() if name not in ("traceback", "log_tail", "attempt")}
    rec.record(record.kind, **{**facts, "cause": facts["cause"] or None})
    known = {counted.record: counted for counted in rec.status.counted_failures}
    new = (CountedFailure(each, document["node"], str(failure.cause)) for each in state.history)
    rec.update(failure=document, counted_failures=tuple(known.get(each.record, each) for each in new))
    if record.state is None:
        return  # the job ends
    repaired = "repaired" in facts
    if not repaired:
        rec.prerequisites = desired.prerequisites(rec.snapshot)  # if some of these were deleted, workers could not report or meet
    state_now = record.state if repaired else State.RESTARTING
    rec.set_state(state_now, record.reason, "WorkerFailed", event=True, warning=True)


def failure_document(rec: ReconcilePass, failure: Failure) -> Document:
    """Return a failure as it is stored in the status, with the node and the end of the log of the failed worker."""
    pod = rec.pod(failure.worker)
    node, log_tail = failure.node or (pod.node if pod else ""), failure.log_tail or (pod.log_tail if pod else "")
    empty = {name for name in ("cause", "attempt") if not getattr(failure, name)}
    fields = {**failure.document(but={"log_tail", *empty}), "time": min(failure.time, rec.now), "node": node}
    return {**fields, **({"logTail": log_tail} if log_tail else {})}


def _called(rec: ReconcilePass, record: Record, call: Call) -> None:
    rec.stop_training()
    rec.update(called=call)
    rec.record(record.kind, **record.facts)
    what = "Resizing" if call.planned else "WorkerLost" if call.cause is Cause.LOST else "WorkerFailed"
    rec.set_state(record.state or State.RESTARTING, call.reason, what, event=True, warning=not call.planned)


def _formed(rec: ReconcilePass, new: World) -> None:
    size = len(new.members)
    few = size <= elasticjob_status.MAX_LEDGER_EVENTS  # a status must stay small
    members = {"workers": list(new.members)} if few else {"size": size}
    rec.record("world", generation=new.generation, **members, reason=new.reason)
    rec.update(world=new, called=None, result=None, has_formed_world=True, blocked_worker=None)
    for pod in rec.alive:
        if pod.index in rec.members:
            rec.handled_uids.pop(pod.uid, None)  # from now on its end counts again
    rec.state_set = False  # the new world takes precedence over the failure that led to it
    rec.set_state(State.RUNNING, new.reason, "Training", event=True)
