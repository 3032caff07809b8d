"""Rules that decide, with `rendezvous.coordinator`, which workers train together. Pure."""

from __future__ import annotations

from outlast.job import contract
from outlast.job.status import State
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator import desired, elasticjob_status, reconcile_pass
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import coordination, counted_failures, lost_nodes
from outlast.kubernetes.operator.rules.replaced_workers import desired_indices
from outlast.rendezvous import who_trains
from outlast.rendezvous.coordinator import Record, Tick
from outlast.rendezvous.who_trains import Call, Cause

ARRIVE_S = 2.0
"""Missing workers are reported once no worker has joined for this many seconds."""
_SUSPENDED_STATES = (State.SUSPENDED, State.QUEUED)


def world_decided(rec: ReconcilePass) -> None:
    """Decide which workers train together, and publish the world for the agents."""
    tick = Tick(frozenset(desired_indices(rec)), rec.desired)
    for _ in range(4):
        state, effects = coordination.step(rec, tick)
        lost_nodes.record_losses(rec, state.lost)
        coordination.perform(rec, state, effects)
        for effect in effects:
            match effect:
                case Record("failure", {"generation": generation}) if not rec.skip_rest:
                    counted_failures.cover_others(rec, generation)
                case who_trains.Closed(reason):
                    _suspended(rec, reason)
                case who_trains.Wait():
                    _report_waiting(rec, effect)
                    rec.requeue_at(effect.look_again)
        if rec.skip_rest or not effects or any(isinstance(effect, who_trains.Wait | who_trains.Closed) for effect in effects):
            return


def _report_waiting(rec: ReconcilePass, wait: who_trains.Wait) -> None:
    """Set the state while the coordinator waits. If pods cannot start, the state's reason says why."""
    reason = wait.steady
    if rec.status.world is not None and rec.status.called is None:
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
    if blocked_worker not in stuck:  # otherwise the same worker is named again, which saves writes
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
    """Delete the pods, as no workers are desired, and publish that the world has ended."""
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
    """Resume a suspended job: withdraw the published result, and let its deadlines start over."""
    if rec.desired and rec.status.result is not None:
        if any(pod.uid not in rec.pod_ends for pod in rec.snapshot.pods):  # these pods have read the published result, and exit
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
