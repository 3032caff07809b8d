"""Rules that decide, with `rendezvous.who_trains`, which workers train together. Pure."""

from __future__ import annotations

import dataclasses

from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator import desired, elasticjob_status, reconcile_pass
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import counted_failures, lost_nodes
from outlast.kubernetes.operator.rules.replaced_workers import desired_indices
from outlast.rendezvous import root_cause, who_trains
from outlast.rendezvous.who_trains import Call, Cause, MemberState

ARRIVE_S = 2.0
"""Debounce: missing workers are reported only once no worker has joined for this many seconds."""
_SUSPENDED_STATES = (State.SUSPENDED, State.QUEUED)


def world_decided(rec: ReconcilePass) -> None:
    """Decide which workers train together, and publish the world for the agents."""
    state = _state(rec)
    request = who_trains.Desired(rec.desired, rec.spec.workers.allowed(), frozenset(desired_indices(rec)))
    pending = counted_failures.uncounted(rec)
    since = min((each.failure.time for each in pending), default=rec.now)
    explained = counted_failures.member_is_missing(rec) or bool(who_trains.lost(state, rec.now).out)
    if not explained and (end := root_cause.held_until(pending, since, rec.now, root_cause.OPERATOR)) is not None:
        return rec.requeue_at(end)
    for _ in range(4):
        decision = who_trains.decide(state, request, rec.timeouts, rec.now)
        if isinstance(decision, who_trains.World) and pending:
            counted_failures.count_reported(rec, pending, decision)
            if rec.skip_rest:
                return
            pending = []
        state = state.after(decision)
        lost_nodes.record_losses(rec, state.lost)
        match decision:
            case who_trains.Call():
                _called(rec, decision)
            case who_trains.World():
                _formed(rec, decision)
            case who_trains.Closed(reason, True):
                return rec.finish(State.SUCCEEDED, reason, contract.Exit.DONE, End.SUCCEEDED)
            case who_trains.Closed(reason):
                return _suspended(rec, reason)
            case who_trains.Wait() as wait:
                _report_waiting(rec, state, wait)
                rec.requeue_at(wait.look_again)
                break
    if pending:
        settled = root_cause.settled_at(
            pending, since, rec.now, root_cause.OPERATOR, unanswered=counted_failures.member_has_not_failed(rec)
        )
        if settled is None:
            counted_failures.count_reported(rec, pending)
        rec.requeue_at(settled)


def _state(rec: ReconcilePass) -> who_trains.State:
    """Return the input of `who_trains.decide`. The newest saved step is capped at the current world's newest step, as that world
    may have resumed from an earlier step than its predecessor had reached."""
    status = rec.status
    members = {}
    for id, report in rec.snapshot.reports.items():
        done = report.member.standing is MemberState.DONE and status.world and report.member.generation >= status.world.generation
        pod = rec.pod(id)
        cut = pod is not None and pod.uid in rec.deletes and rec.deletes[pod.uid].grace_s == 0
        gone = pod is None or pod.uid in rec.pod_ends or cut or rec.presumed_dead_at(report) is None
        if done or not gone:
            members[id] = report.member
    called = status.called
    if called is not None:  # a lost watch or a clock change must not shorten the time to save
        called = dataclasses.replace(called, at=min(max(called.at, rec.snapshot.observed_since), rec.now))
    held = max([rec.committed, *(report.progress.snapshot for report in rec.snapshot.reports.values())])
    return who_trains.State(members, status.world, called, lost=lost_nodes.excluded(rec), held=min(held, rec.step))


def _called(rec: ReconcilePass, call: Call) -> None:
    rec.stop_training()
    rec.update(called=call)
    rec.record("called", generation=call.generation, planned=call.planned, reason=call.reason)
    state = State.RESIZING if call.planned else State.RESTARTING
    what = "Resizing" if call.planned else "WorkerLost" if call.cause is Cause.LOST else "WorkerFailed"
    rec.set_state(state, call.reason, what, event=True, warning=not call.planned)


def _formed(rec: ReconcilePass, new: who_trains.World) -> None:
    size = len(new.members)
    few = size <= elasticjob_status.MAX_LEDGER_EVENTS  # a status is small
    members = {"workers": list(new.members)} if few else {"size": size}
    rec.record("world", generation=new.generation, **members, reason=new.reason)
    rec.update(world=new, called=None, result=None, has_formed_world=True, blocked_worker=None)
    for pod in rec.alive:
        if pod.index in rec.members:
            rec.handled_uids.pop(pod.uid, None)  # from now on its end counts again
    rec.state_set = False  # takes precedence over what led to it
    rec.set_state(State.RUNNING, new.reason, "Training", event=True)


def _report_waiting(rec: ReconcilePass, state: who_trains.State, wait: who_trains.Wait) -> None:
    """Report the state while there is no decision, and why pods cannot start, if that is the reason."""
    reason = wait.steady
    if state.world is not None and state.called is None:
        silence_over = (
            elasticjob_status.condition_reason(rec.status.conditions, State.RUNNING) == reconcile_pass.UNREACHABLE
            and not rec.is_mass_silence()
        )
        if rec.status.state is not State.RUNNING or silence_over or wait.idle not in rec.status.reason:
            rec.set_state(State.RUNNING, reason, "Training")
        return
    if rec.desired == 0:
        return rec.set_state(State.SUSPENDED, reason, "Suspending")
    ended_pods = [
        (pod, rec.pod_ends[pod.uid]) for pod in rec.ended_pods if pod.uid in rec.pod_ends and pod.uid not in rec.deletes
    ]
    ended = [(pod.index, f"worker {pod.index} {pod.finalizer_problem or end.sentence}") for pod, end in ended_pods]
    obstacles = ((pod.index, pod_status.blocking_reason(pod.document)) for pod in rec.alive)
    stuck = dict([*((index, f"worker {index} {obstacle}") for index, obstacle in obstacles if obstacle), *ended])
    blocked_worker = rec.status.blocked_worker
    if blocked_worker not in stuck:  # otherwise it stays, for fewer writes
        blocked_worker = next(iter(stuck), None)
    blocked = rec.snapshot.refusal if blocked_worker is None else stuck[blocked_worker]
    previous = rec.status.state
    in_transition = previous in (State.RESIZING, State.RESTARTING)
    if in_transition and not blocked:
        return  # the reason is in the status already
    state_now = previous if in_transition and previous else State.PENDING
    last_joined_at = max((report.member.since for report in rec.snapshot.reports.values()), default=0.0)
    if previous is state_now and not blocked and (settled := rec.end_of_wait(last_joined_at, ARRIVE_S)) is not None:
        return rec.requeue_at(settled)
    if not rec.state_set:
        rec.update(blocked_worker=blocked_worker)
    rec.set_state(state_now, f"{reason}; {blocked}" if blocked else reason, "WorkersPending" if blocked else "WaitingForWorkers")


def _suspended(rec: ReconcilePass, reason: str) -> None:
    """Delete the pods, as no workers are desired. A later world gets a later generation."""
    for pod in rec.alive:
        rec.handled_uids[pod.uid] = None
        rec.delete(pod, reason)
    rec.stop_training()
    state = str(State.QUEUED if rec.requested else State.SUSPENDED)
    if rec.status.result is None:
        rec.update(result=elasticjob_status.Result(reason, contract.Exit.INTERRUPTED.value))
        if rec.snapshot.pods:
            rec.record("called", generation=rec.status.generation + 1, planned=True, suspends=state, reason=reason)
    if not rec.snapshot.pods:
        if not rec.status.ledger or rec.status.ledger[-1]["kind"] != "finished":
            rec.record("finished", state=state, reason=reason, code=contract.Exit.INTERRUPTED.value)
        generation = rec.status.generation
        if rec.status.world is not None:
            rec.update(world=None, called=Call(generation + 1, "the run goes on", False, rec.now, cause=Cause.RESUME))
    rec.set_state(State.SUSPENDED, reason if rec.snapshot.pods else "suspended", "Suspended")


def resumed(rec: ReconcilePass) -> None:
    """Resume a suspended job: deadlines start again, and the published result is withdrawn."""
    if rec.desired and rec.status.result is not None:
        if any(pod.uid not in rec.pod_ends for pod in rec.snapshot.pods):  # they have read the published result
            for pod in rec.alive:
                rec.delete(pod, "it leaves, as the job was suspended")
            rec.skip_rest = True
            held = rec.status.state if rec.status.state in _SUSPENDED_STATES else State.SUSPENDED
            return rec.set_state(held, "resumed; waits for the workers that are still leaving", "Resuming")
        rec.record("resumed")
        generation = rec.status.generation
        call = rec.status.called
        if rec.status.world:
            call = Call(generation + 1, "the run goes on", False, rec.now, cause=Cause.RESUME)
        rec.update(result=None, world=None, called=call, resumed=rec.now, has_formed_world=False)
        rec.prerequisites = desired.prerequisites(rec.snapshot)
