"""Failures of workers and of their processes, judged once for each cause; what is remembered of them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outlast import contract
from outlast.kube import pods
from outlast.operator import desired
from outlast.operator.job_status import Blame
from outlast.operator.plan import Document, Note
from outlast.operator.reconcile import Look
from outlast.operator.snapshot import Pod
from outlast.rendezvous import failures as judging
from outlast.rendezvous import restarts, world
from outlast.rendezvous.failures import Pending
from outlast.rendezvous.world import Standing
from outlast.status import Failure, FailureCause, State


def reported(look: Look) -> list[Pending]:
    """What members say has failed in the world that is there, each with whether it only echoes another; not yet judged."""
    known = look.memory
    if known.world is None or known.judged >= known.world.generation:
        return []
    found = []
    for told in look.seen.told.values():
        if told.member.failed and (failure := told.failure) and told.member.generation == known.world.generation:
            if failure.time > look.now:  # its node's clock is ahead of ours: then it was when we heard of it
                failure = failure.model_copy(update={"time": told.beat})
            found.append(Pending(told.echo, failure))
    return found


def explained(look: Look) -> bool:
    """Whether a member of the world is gone, or is another by now: what the others say is its echo."""
    known = look.memory.world
    here = {pod.index for pod in look.alive}
    members = {id for id, told in look.seen.told.items() if known and told.member.generation >= known.generation}
    return known is not None and not set(known.members) <= here & members


def unanswered(look: Look) -> bool:
    """Whether a member of the world still says that it trains when others have failed: it may be why, and be gone."""
    known = look.memory.world
    said = [told.member for id, told in look.seen.told.items() if id in look.members]
    return any(m.standing is Standing.TRAINING and m.generation == known.generation for m in said if known is not None)


def judge_processes(look: Look, pending: list[Pending], new: world.World | None = None) -> None:
    """Judge the failures of one generation by the first that is no echo. A member that the new world lacks explains echoes."""
    echo, failure = judging.cause(pending)
    generation = failure.generation
    before = look.memory.world
    without = new is not None and before is not None and not set(before.members) <= set(new.members)
    if not (echo and (without or explained(look))):
        pod = look.pod(failure.worker)
        judge(look, failure, raised=None if echo else failure.step, node=pod.node if pod else "", pending=pending)
        stands_for_all(look, generation)
    look.know(judged=max(look.memory.judged, generation))


def of_pod(look: Look, pod: Pod, end: pods.End) -> Failure:
    return Failure(
        worker=pod.index,
        code=end.code,
        reason=f"worker {pod.index} {end.sentence}",
        cause=FailureCause.OUT_OF_MEMORY if end.out_of_memory else FailureCause.UNKNOWN,
        generation=look.memory.world.generation if look.memory.world else 0,
        time=end.time or look.now,
    )


def judge(look: Look, failure: Failure, *, raised: int | None, node: str, pending: Sequence[Pending] = ()) -> None:
    """Count a failure, and end the job if that was one too many."""
    known = look.memory
    budget = judging.Budget(known.history, look.policy, look.committed)
    members = known.world.members if known.world else ()
    failure, verdict = judging.judge(failure, raised, budget, look.now, pending=pending, members=members)
    look.know(failure=kept(look, failure, node))
    if isinstance(verdict, restarts.Stop):
        code = contract.Exit.MISCONFIGURED if verdict.code == contract.Exit.MISCONFIGURED else contract.Exit.GIVEN_UP
        return look.finish(State.FAILED, verdict.reason, code, verdict.kind)
    nodes = {blame.record: blame.node for blame in known.blames}
    blames = tuple(Blame(record, nodes.get(record, node)) for record in verdict.history.failures)
    look.know(blames=blames, restarts=known.restarts + verdict.counted)
    look.setup = desired.setup(look.seen)  # somebody may have deleted what workers need to be heard, or to find each other
    look.say(State.RESTARTING, verdict.reason, "WorkerFailed", note=True, warning=True)


def kept(look: Look, failure: Failure, node: str) -> Document:
    """A failure as the status keeps it, with the last lines of its worker's log: as its agent says, else as its pod ended."""
    pod = look.pod(failure.worker)
    words = failure.log_tail or (pod.last_words if pod is not None else "")
    kept = failure.model_dump(exclude_none=True, exclude={"log_tail"} if failure.cause else {"log_tail", "cause"})
    return {**kept, "node": node, **({"logTail": words} if words else {})}


def stands_for_all(look: Look, generation: int) -> None:
    """A failure was counted: it stands for whatever else the workers of its world show. One outside of every world (0) stands for
    all workers that are outside with it, until they are in one."""
    silent = (dataclasses.replace(each, echo=each.echo or each.generation == generation) for each in look.memory.silent)
    look.know(judged=max(look.memory.judged, generation), silent=tuple(silent))
    if not generation:
        look.expected.update(dict.fromkeys(pod.uid for pod in look.seen.pods if not look.inside(pod)))


def went(look: Look, pod: Pod) -> None:
    """A worker has gone for no failure of its own; with it is explained what the others of its world say."""
    look.expected[pod.uid] = None
    known = look.memory
    if known.world and look.inside(pod) and known.called is None:
        look.know(judged=known.world.generation)


def interrupted(look: Look, pod: Pod, what: str, sentence: str) -> None:
    """Count and tell, once, that a worker that was well has to go."""
    if pod.uid not in look.expected:
        look.notes.append(Note("Normal", what, sentence))
        look.know(interruptions=look.memory.interruptions + 1)
        look.expected[pod.uid] = None
