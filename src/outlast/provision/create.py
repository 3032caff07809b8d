"""Carries out the plan of a cluster, step by step. Called again after anything, it goes on with what is not done."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from outlast import units
from outlast.cloud.clusters import Found
from outlast.errors import OutlastError
from outlast.fleet import Plan, Step
from outlast.provision.tools import Ran, Tell

WAIT_S = 15.0
"""Interval of looks at a cluster that somebody else's call is making; it takes ten minutes."""
LONGEST_S = 2400.0
"""How long AWS may take for what a command has begun; a node group takes five minutes."""
Stage = Literal["absent", "making", "made"]


class Runs(Protocol):
    """`tools.Tools`, or what a test puts in its place."""

    def ask(self, command: tuple[str, ...], /) -> Ran: ...
    def run(self, command: tuple[str, ...], /) -> Ran: ...


def stage(found: Found, name: str) -> Stage:
    """How far the creation of a cluster is. Raises OutlastError if it is not ours, has failed, or is being deleted. Pure."""
    if (found.status or found.stack) and not found.ours:
        raise OutlastError(f"there is a cluster {name} already, and Outlast has not made it; give yours another name")
    if found.status == "DELETING" or found.stack.startswith("DELETE_"):
        raise OutlastError(f"cluster {name} is being deleted ({found.stack or found.status}); wait until that is over")
    if found.status == "FAILED" or re.search(r"ROLLBACK|FAILED", found.stack):
        why = f" ({found.why.rstrip('.')})" if found.why else ""
        failed = f"the creation of cluster {name} has failed: {found.stack or found.status}{why}"
        raise OutlastError(f"{failed}; run outlast cluster delete, then this again")
    if found.status in ("ACTIVE", "UPDATING") and not found.stack.endswith("CREATE_IN_PROGRESS"):
        return "made"
    return "making" if found.status or found.stack else "absent"


def is_done(step: Step, runs: Runs) -> bool:
    """Whether a step is done; one that cannot be asked is not."""
    if step.check is None:
        return False
    answer = runs.ask(step.check.command)
    return answer.code == 0 and all(re.search(pattern, answer.output, re.DOTALL) for pattern in step.check.expects)


@dataclass(frozen=True)
class World:
    """What the creation of a cluster needs of the world."""

    runs: Runs
    find: Callable[[], Found]
    tell: Tell
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def create(plan: Plan, world: World) -> int:
    """Carry out the steps that are not done, and return how many that were. Raises OutlastError at the first that fails."""
    made = 0
    for number, step in enumerate(plan.steps, 1):
        head = f"[{number}/{len(plan.steps)}] {step.sentence}"
        begun = world.clock()
        if not _needed(step, plan, world):
            world.tell(f"{head}: is done")
            continue
        world.tell(head)
        ended = world.runs.run(step.command)
        if ended.code != 0:
            raise OutlastError(
                f"{step.command[0]} exited with {ended.code} at step {number} of {len(plan.steps)}, {step.key}{ended.why}; "
                f"{_remedy(step, ended.output)} and run the same command again, which goes on from there"
            )
        _wait(step, world)
        made += 1
        world.tell(f"[{number}/{len(plan.steps)}] done in {units.human_seconds(world.clock() - begun)}")
    return made


def _remedy(step: Step, output: str) -> str:
    """What to do about a step that has failed. A helm that was killed leaves its release locked, and no other one unlocks it."""
    if step.kind != "helm" or "another operation" not in output:
        return "mend it"
    at = step.command.index("--namespace")
    release = " ".join((step.key.partition("/")[2], *step.command[at : at + 2]))
    return f"if no other helm is at it, `helm rollback {release}`, or `helm uninstall {release}` if it has never been there,"


def _wait(step: Step, world: World) -> None:
    """Wait for what eksctl leaves to AWS: it skips a group that an earlier call began, and ends at once. Raises OutlastError."""
    if step.kind != "eksctl" or step.check is None:
        return
    begun = world.clock()
    while not is_done(step, world.runs):
        if world.clock() - begun > LONGEST_S:
            raise OutlastError(
                f"step {step.key} has ended, but after {units.human_seconds(LONGEST_S)} it is still not done; look at it with "
                f"`{' '.join(step.check.command)}`, and run the same command again"
            )
        world.sleep(WAIT_S)


def _needed(step: Step, plan: Plan, world: World) -> bool:
    """Whether a step is to be carried out. AWS is asked about what must not be repeated: an earlier call may have begun it."""
    if step.repeatable:
        return not is_done(step, world.runs)
    told = False
    while (found := stage(world.find(), plan.cluster)) == "making":
        if not told:
            world.tell(f"cluster {plan.cluster} is being made by an earlier call: waiting for it")
        told = True
        world.sleep(WAIT_S)
    return found == "absent"


def states(plan: Plan, runs: Runs) -> Iterator[tuple[Step, bool | None]]:
    """Every step, and whether it is done; None if that cannot be asked."""
    for step in plan.steps:
        yield step, None if step.check is None else is_done(step, runs)
