"""What pods have come to: they ended, their node is lost or will be, nothing is heard of them any more. Rules of `decide`."""

from __future__ import annotations

from collections.abc import Iterable

from outlast import contract
from outlast.operator import reconcile
from outlast.operator.job_status import Silent
from outlast.operator.plan import Deletion, Note, Plan
from outlast.operator.reconcile import Look
from outlast.operator.rules import failures
from outlast.operator.snapshot import Limits, Pod
from outlast.rendezvous import world
from outlast.rendezvous.world import Standing
from outlast.status import End, Failure, FailureCause, State

BREATH_S = 10.0
"""A pause after a pod that was lost as soon as it was made: its node would refuse the next one as well."""
AGAIN_S = 10.0
"""While most are unheard: how often it is looked whether they are heard again, which is no change."""


def workers_done(look: Look) -> None:
    """All that are wanted have ended with success although nobody has said that it is over: an earlier run was complete."""
    done = {pod.index for pod in look.past if pod.succeeded}
    if look.wanted and done and len(done) >= look.wanted and not look.alive:
        look.finish(State.SUCCEEDED, "all workers are done", contract.Exit.DONE, End.SUCCEEDED)


def ended_workers(look: Look) -> None:
    """Pods that have failed go, and are made anew; what is to be learned from them is learned once."""
    silent = look.memory.silent_uids
    for pod in look.past:
        end = look.ends.get(pod.uid)
        if end is None or pod.succeeded:
            continue
        counted = end.counted and not (pod.leaves and contract.killed(end.code))  # killed, because somebody has deleted it
        if pod.uid not in look.expected and pod.uid not in silent:
            if end.code == contract.Exit.GIVEN_UP:  # who counts processes has counted enough of them
                look.know(failure=failures.kept(look, failures.of_pod(look, pod, end), pod.node))
                reason = f"worker {pod.index} says that the run is given up"
                return look.finish(State.FAILED, reason, contract.Exit.GIVEN_UP, End.LIMIT)
            if counted:
                failure, generation = failures.of_pod(look, pod, end), reconcile.generation_of(look, pod)
                if generation and look.memory.judged >= generation:
                    look.know(failure=failures.kept(look, failure, pod.node))
                else:
                    failures.judge(look, failure, raised=None, node=pod.node)
                    if look.over:
                        return
                    failures.stands_for_all(look, generation)
                look.expected[pod.uid] = None
            else:
                if look.wanted:
                    look.know(interruptions=look.memory.interruptions + 1)
                    sentence = f"worker {pod.index} {end.sentence}; it is made anew"
                    look.notes.append(Note("Normal", "WorkerInterrupted", sentence))
                failures.went(look, pod)
        if not counted and look.wanted and (rest := look.until(_breath(pod, end.time), BREATH_S)) is not None:
            look.again(rest)  # its name is taken until then, so that the next one waits
            continue
        look.delete(pod, f"it has ended: {end.sentence}", grace_s=None if pod.lingers else 0)


def _breath(pod: Pod, ended: float) -> float:
    """From when on there is a pause for a pod that has ended; none for one that lived for a while."""
    return ended if ended - pod.born < BREATH_S else float("-inf")


def lost_workers(look: Look) -> None:
    """Pods on nodes that do not answer, or are gone: they are deleted whatever their node says."""
    explained = set()
    silent = look.memory.silent_uids
    for pod in look.seen.pods:
        if pod.node_lost is None or pod.uid in look.ends or pod.uid in look.deletes:
            continue
        gone = pod.node not in look.seen.nodes
        told = look.seen.told.get(pod.index)
        quiet = reconcile.heard(look, told) if told and not gone else max(pod.node_lost, pod.born, look.seen.since)
        if (end := look.until(quiet, look.seen.limits.lost_s)) is not None:
            look.again(end)
            continue
        how = "is gone" if gone else f"has not answered for {look.seen.limits.lost_s:g} s"
        sentence = f"worker {pod.index} was lost: its node {pod.node} {how}"
        if pod.uid in silent or (not pod.leaves and pod.uid not in look.expected):
            look.know(interruptions=look.memory.interruptions + 1)
            explained.add(pod.uid)
            look.notes.append(Note("Warning", "NodeLost", sentence))
            failures.went(look, pod)
        look.delete(pod, sentence, grace_s=0)
    if explained & silent:
        look.know(silent=tuple(each for each in look.memory.silent if each.uid not in explained))


def silent_workers(look: Look) -> None:
    """A worker that says nothing any more is told to go, and what becomes of it tells why: a node that is well ends it, so it was
    stopped or hung, which counts; one that does not answer has lost it, see `lost_workers`. Those that fell silent in one world
    did so for one cause."""
    there = {pod.uid for pod in look.seen.pods}
    gone = [each for each in look.memory.silent if each.uid not in there]
    if gone:
        look.know(silent=tuple(each for each in look.memory.silent if each.uid in there))
    counted = set()
    for each in gone:
        if each.echo or each.generation in counted:
            continue
        counted.add(each.generation)
        reason = f"worker {each.worker} has said nothing for {look.seen.limits.silence_s:g} s"
        failure = Failure(
            worker=each.worker,
            code=137,
            reason=reason,
            cause=FailureCause.HANG,
            generation=each.generation,
            time=each.since,
        )
        failures.judge(look, failure, raised=None, node=each.node)
        if look.over:
            return
        failures.stands_for_all(look, each.generation)
    new = []
    for pod in look.alive:
        told = look.seen.told.get(pod.index)
        if told is None or told.member.standing is Standing.DONE:
            continue
        if (end := reconcile.silent_at(look, told)) is not None:
            look.again(min(end, look.now + AGAIN_S) if look.unheard else end)  # to hear them again is no change
            continue
        generation = reconcile.generation_of(look, pod)
        if pod.uid not in look.expected and not (generation and look.memory.judged >= generation):
            new.append(Silent(pod.uid, pod.index, pod.node, look.now, generation))
        look.delete(pod, f"worker {pod.index} has said nothing for {reconcile.lease_s(look, told):g} s", grace_s=5)
    if new:
        look.know(silent=(*look.memory.silent, *new))


def unheard_workers(look: Look) -> None:
    """Nobody hears most of the workers, whose nodes are well: they train on, and their kubelets end whoever does not answer."""
    if reconcile.missed(look) and look.memory.state is not None:
        silence_s, held_s = look.seen.limits.silence_s, look.seen.limits.held_s
        reason = (
            f"most of the {len(look.seen.told)} workers have said nothing for {silence_s:g} s though their nodes are well: the "
            f"path from them to the API server is taken for broken, and nobody for dead before {held_s:g} s are over"
        )
        look.say(look.memory.state, reason, reconcile.UNHEARD, note=True, warning=True)


def leaving_nodes(look: Look) -> None:
    """A node has been told that it will be gone: its workers save and leave while there is time."""
    for pod in look.alive:
        if pod.node_leaves:
            if (rest := look.until(pod.born, BREATH_S)) is not None:
                look.again(rest)  # it was put there all the same; the next one would be, too
                continue
            sentence = f"worker {pod.index} leaves: its node {pod.node} is going away ({pod.node_leaves})"
            failures.interrupted(look, pod, "NodeLeaving", sentence)
            look.delete(pod, sentence)


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
