"""A job is over: it has ended, its time is up, or it was deleted. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from outlast import contract
from outlast.kube import kinds
from outlast.operator.plan import Deletion, Plan
from outlast.operator.reconcile import Look
from outlast.operator.snapshot import Limits, Pod
from outlast.rendezvous import world
from outlast.status import End, State

LEAVE_S = 60.0
"""How long workers may take to push the rest and end, once the job has."""
_FINAL = (State.SUCCEEDED, State.FAILED)


def finished(look: Look) -> None:
    """The job is over: its pods go as `cleanPodPolicy` says, and after its time the job itself."""
    known = look.memory
    if known.state not in _FINAL or known.finished is None:
        return
    look.over = True
    look.know(observed=look.seen.generation)
    if look.seen.queue is not None:
        if look.using and look.now < known.finished + LEAVE_S:
            look.again(known.finished + LEAVE_S)
        else:
            look.statuses = look.seen.queue.ended(known.state is State.SUCCEEDED, known.reason, look.now)
    policy = look.fields.clean_pod_policy if look.seen.job else "Running"
    for pod in look.seen.pods:
        if pod.leaves:
            force(look, pod)
        elif policy == "All" and pod.uid in look.ends:
            look.delete(pod, "the job is over, cleanPodPolicy is All")
        elif policy != "None" and (pod.alive or pod.lingers):
            # Its agent has been told, and pushes what is left; the last line of its log is worth a moment.
            if look.now >= known.finished + LEAVE_S:
                look.delete(pod, f"the job is over, cleanPodPolicy is {policy}")
            look.again(known.finished + LEAVE_S)
    ttl = look.fields.ttl_seconds_after_finished if look.seen.job else None
    if ttl is not None:
        if look.now >= known.finished + ttl:
            look.remove = Deletion(
                look.seen.name, look.seen.uid, f"ttlSecondsAfterFinished ({ttl}) has passed", kind=kinds.ELASTIC_JOB
            )
        look.again(known.finished + ttl)


def workers_done(look: Look) -> None:
    """All that are wanted have ended with success although nobody has said that it is over: an earlier run was complete."""
    done = {pod.index for pod in look.past if pod.succeeded}
    if look.wanted and done and len(done) >= look.wanted and not look.alive:
        look.finish(State.SUCCEEDED, "all workers are done", contract.Exit.DONE, End.SUCCEEDED)


def too_late(look: Look) -> None:
    """A deadline has passed."""
    started = look.memory.started
    if started is None or not look.wanted:
        return
    whole, first = look.fields.active_deadline_seconds, look.fields.startup_deadline_seconds
    if whole is not None:
        if look.now >= started + whole:
            sentence = f"the job has run for activeDeadlineSeconds ({whole:g})"
            return look.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, End.DEADLINE)
        look.again(started + whole)
    if first is not None and not look.memory.formed:
        if look.now >= started + first:
            pending = next((f": worker {pod.index} {pod.waits}" for pod in look.alive if pod.waits), "")
            sentence = f"no world was formed within startupDeadlineSeconds ({first:g}){pending}"
            return look.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, End.STARTUP_DEADLINE)
        look.again(started + first)


def force(look: Look, pod: Pod) -> None:
    """Delete a pod that goes and is on a node that does not answer, at once."""
    plan = orphans([pod], look.now, look.seen.since, look.seen.limits)
    for deletion in plan.deletes:
        look.deletes.setdefault(pod.uid, deletion)
    look.again(plan.look_again)


def orphans(pods: Iterable[Pod], now: float, since: float, limits: Limits) -> Plan:
    """What pods need that go with their job: nothing, but for those on nodes that do not answer."""
    going = [(pod, max(pod.node_lost, since)) for pod in pods if pod.leaves and pod.node_lost is not None]
    ends = [(pod, world.until(quiet, limits.lost_s, now)) for pod, quiet in going]
    deletes = tuple(
        Deletion(pod.name, pod.uid, f"it goes, and its node {pod.node} does not answer", grace_s=0)
        for pod, end in ends
        if end is None
    )
    return Plan(deletes=deletes, look_again=min((end for _, end in ends if end is not None), default=None))
