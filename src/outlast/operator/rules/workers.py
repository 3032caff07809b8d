"""Workers have ended, are silent, too many or too few. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from outlast import backoff, contract
from outlast.kube import ownership
from outlast.operator import desired, reconcile
from outlast.operator.job_status import Silent
from outlast.operator.plan import Note
from outlast.operator.reconcile import Look
from outlast.operator.rules import failures
from outlast.operator.rules.kueue import RECHECK_S as QUEUE_RECHECK_S
from outlast.operator.snapshot import Pod
from outlast.rendezvous.world import Standing
from outlast.status import End, Failure, FailureCause, State

FAST_LOSS_S = 10.0
"""A pause after a pod that was lost as soon as it was made: its node would refuse the next one as well."""
UNHEARD_RECHECK_S = 10.0
"""While most are unheard: how often it is looked whether they are heard again, which is no change."""
AVOID = 2
"""On a node with so many counted failures within the window pods of this job are put only if there is no other."""
_LONGEST_PAUSE_S = 60.0


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
                failure, generation = failures.of_pod(look, pod, end), look.generation_of(pod)
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
        if not counted and look.wanted and (rest := look.until(_lost_fast_at(pod, end.time), FAST_LOSS_S)) is not None:
            look.again(rest)  # its name is taken until then, so that the next one waits
            continue
        look.delete(pod, f"it has ended: {end.sentence}", grace_s=None if pod.lingers else 0)


def _lost_fast_at(pod: Pod, ended: float) -> float:
    """From when on there is a pause for a pod that has ended; none for one that lived for a while."""
    return ended if ended - pod.born < FAST_LOSS_S else float("-inf")


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
        if (end := look.silent_at(told)) is not None:
            look.again(min(end, look.now + UNHEARD_RECHECK_S) if look.unheard else end)  # to hear them again is no change
            continue
        generation = look.generation_of(pod)
        if pod.uid not in look.expected and not (generation and look.memory.judged >= generation):
            new.append(Silent(pod.uid, pod.index, pod.node, look.now, generation))
        look.delete(pod, f"worker {pod.index} has said nothing for {look.lease_s(told):g} s", grace_s=5)
    if new:
        look.know(silent=(*look.memory.silent, *new))


def unheard_workers(look: Look) -> None:
    """Nobody hears most of the workers, whose nodes are well: they train on, and their kubelets end whoever does not answer."""
    if look.missed() and look.memory.state is not None:
        silence_s, held_s = look.seen.limits.silence_s, look.seen.limits.held_s
        reason = (
            f"most of the {len(look.seen.told)} workers have said nothing for {silence_s:g} s though their nodes are well: the "
            f"path from them to the API server is taken for broken, and nobody for dead before {held_s:g} s are over"
        )
        look.say(look.memory.state, reason, reconcile.UNHEARD, note=True, warning=True)


def surplus_workers(look: Look) -> None:
    """Pods beyond what is wanted go as soon as no world needs them."""
    known = look.memory
    leaving = frozenset(known.called.leaving if known.called is not None and known.world is not None else ())
    for pod in _by_worth(look)[look.wanted :]:
        if pod.index in look.members and known.closed is None:
            continue  # the world is called together without it first
        if pod.index in leaving:
            continue
        look.expected[pod.uid] = None
        look.delete(pod, f"{look.wanted} workers are wanted, and worker {pod.index} is in no world")


def missing_workers(look: Look) -> None:
    """Pods are made for indices that have none, the smallest first; those that still go keep their name until they have."""
    alive = look.alive
    lacking = look.wanted - len(alive) - sum(pod.succeeded for pod in look.past)
    if lacking <= 0 or look.memory.closed is not None:
        return
    if (pause := backoff_until(look)) is not None:
        return look.again(pause)
    gone = {uid for uid, deletion in look.deletes.items() if deletion.grace_s == 0}
    taken = {contract.worker_name(look.seen.name, pod.index) for pod in look.seen.pods if pod.uid not in gone}
    taken |= {pod.name for pod in look.seen.others if _goes(look, pod)}  # of one that stays it is told when its name is asked for
    free = [index for index in range(look.wanted) if contract.worker_name(look.seen.name, index) not in taken][:lacking]
    generation = look.memory.generation + (look.memory.called is None)
    queue = look.seen.queue if look.seen.queue is not None and look.seen.queue.name else None
    room = queue.room(look.using) if queue is not None else {}
    for pod in desired.workers(look.seen, free, generation, _avoided(look)):
        placed = queue.place(pod, room) if queue is not None else pod
        if placed is None:
            return look.again(look.now + QUEUE_RECHECK_S)
        look.creates.append(placed)


def _by_worth(look: Look) -> list[Pod]:
    """The pods that are alive, first those that are to be kept: in the order of the world, then by index."""
    order = {id: rank for rank, id in enumerate(look.memory.world.members)} if look.memory.world else {}
    return sorted(look.alive, key=lambda pod: (order.get(pod.index, len(order)), pod.index))


def desired_indices(look: Look) -> Iterable[int]:
    """Indices that are to be members: of pods that are kept, or will be made."""
    kept = dict.fromkeys([pod.index for pod in _by_worth(look)][: look.wanted])
    return [*kept, *[index for index in range(look.wanted) if index not in kept][: look.wanted - len(kept)]]


def backoff_until(look: Look) -> float | None:
    """When the next pod may be made: at once (None) after the first failure, ever later while failures follow each other."""
    recent = [blame.record.time for blame in look.memory.blames if blame.record.committed_step >= look.committed]
    if len(recent) < 2:
        return None
    return look.until(max(recent), backoff.exponential(len(recent) - 1, 1.0, _LONGEST_PAUSE_S))


def _avoided(look: Look) -> tuple[str, ...]:
    """Nodes on which failures keep happening, and those that will be gone."""
    window = look.policy.window.total_seconds()
    counts: dict[str, int] = {}
    for blame in look.memory.blames:
        if blame.node and look.now - blame.record.time < window:
            counts[blame.node] = counts.get(blame.node, 0) + 1
    leaving = {pod.node for pod in look.seen.pods if pod.node_leaves}
    return tuple(sorted({*leaving, *(node for node, count in counts.items() if count >= AVOID)}))


def _goes(look: Look, pod: Pod) -> bool:
    """Whether a pod that is not of this job will go by itself: it terminates, or belongs to an earlier job of this name."""
    return pod.leaves or ownership.owned_by_predecessor(pod.document, look.seen.document)
