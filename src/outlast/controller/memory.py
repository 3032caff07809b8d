"""What the operator knows of a job from one look to the next: all of it is in the job's `.status`.

    memory.read(status)          -> Memory
    memory.write(memory, ...)    -> the status to be

Readers (`outlast status`, kubectl) find the same fields as in `outlast.status.JobStatus`; `rendezvous` is what the agents of the
job watch. Times in it are seconds since the epoch, elsewhere they are as Kubernetes writes them. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from outlast.manifests import labels
from outlast.rendezvous.world import Call, World
from outlast.restarts import History, Record
from outlast.status import State

Document = dict[str, Any]


@dataclass(frozen=True)
class Blame:
    """A counted failure that may still matter."""

    record: Record
    node: str
    """Where it happened; empty when that is not known."""


@dataclass(frozen=True)
class Progress:
    """How far training was when that was last written."""

    step: int = 0
    steps: int | None = None
    committed: int = 0
    rate: float | None = None
    time: float = 0.0


@dataclass(frozen=True)
class Account:
    """What goodput is computed from."""

    trained_s: float = 0.0
    """Seconds that worlds have trained, up to `since`."""
    executed: int = 0
    """Steps that were done in them, those that were done again included."""
    since: float | None = None
    """When the world that trains now was formed."""
    first: int = 0
    """The step that it began from."""


@dataclass(frozen=True)
class Memory:
    """What is known of a job. The first of everything is what a job begins with."""

    state: State | None = None
    reason: str = ""
    run: str = ""
    world: World | None = None
    called: Call | None = None
    closed: tuple[str, int] | None = None
    """Reason and exit code that agents are told, when there is no further world."""
    judged: int = 0
    """The newest generation whose failure has been judged."""
    judged_pods: tuple[str, ...] = ()
    """Uids of pods whose end has been judged, and which may still be there."""
    blames: tuple[Blame, ...] = ()
    restarts: int = 0
    interruptions: int = 0
    failure: Mapping[str, Any] | None = None
    """The last failure, a `status.Failure` with the node and the tail of the log."""
    started: float | None = None
    """When it was first taken up, or resumed: deadlines begin there."""
    finished: float | None = None
    formed: bool = False
    """Whether there has been a world since `started`."""
    observed: int = 0
    """The `metadata.generation` that was acted on last."""
    progress: Progress = Progress()
    account: Account = Account()
    conditions: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def generation(self) -> int:
        """The newest generation that there has been, or is called for."""
        return max(self.world.generation if self.world else 0, self.called.generation if self.called else 0)

    @property
    def history(self) -> History:
        return History(tuple(blame.record for blame in self.blames))


def read(status: Mapping[str, Any]) -> Memory:
    """The memory in a status, `{}` for a job that nobody has looked at yet."""
    told = status.get("rendezvous") or {}
    judged, written, account = status.get("judged") or {}, status.get("checkpoint") or {}, status.get("accounting") or {}
    called = told.get("called")
    return Memory(
        state=State(status["state"]) if status.get("state") else None,
        reason=status.get("reason", ""),
        run=told.get("run", ""),
        world=_world(told["world"]) if told.get("world") else None,
        called=Call(called["generation"], called["reason"], called["planned"], called["at"], tuple(called.get("leaving") or ()))
        if called
        else None,
        closed=(told["closed"]["reason"], told["closed"]["code"]) if told.get("closed") else None,
        judged=judged.get("generation", 0),
        judged_pods=tuple(judged.get("pods") or ()),
        blames=tuple(
            Blame(Record(each["time"], each["committedStep"], each.get("failedStep")), each.get("node", ""))
            for each in status.get("failures") or ()
        ),
        restarts=status.get("restarts", 0),
        interruptions=status.get("interruptions", 0),
        failure=status.get("lastFailure"),
        started=seconds(status.get("startTime")),
        finished=seconds(status.get("completionTime")),
        formed=bool(told.get("formed")),
        observed=status.get("observedGeneration", 0),
        progress=Progress(
            status.get("step", 0),
            status.get("steps"),
            written.get("step", 0),
            status.get("rate"),
            seconds(status.get("progressTime")) or 0.0,
        ),
        account=Account(
            account.get("trainedSeconds", 0.0), account.get("executedSteps", 0), account.get("since"), account.get("first", 0)
        ),
        conditions=tuple(status.get("conditions") or ()),
    )


def write(
    memory: Memory, *, job: str, pods: int, inside: int, sizes: tuple[int, int], checkpoint: str, now: float, leave_s: float
) -> Document:
    """The status that holds this memory.

    `pods` is how many workers there are, `inside` how many of them are in the world; `sizes` are min and max; `checkpoint` is
    the URL above the checkpoints, if they are in a store; `leave_s` is how long a planned call waits for training to save.
    """
    low, high = sizes
    world, progress = memory.world, memory.progress
    good = goodput(memory, now)
    found: Document = {
        "observedGeneration": memory.observed,
        "state": str(memory.state) if memory.state else None,
        "reason": memory.reason,
        "replicas": pods,
        "selector": ",".join(f"{key}={value}" for key, value in labels.selector(job).items()),
        "workersText": f"{inside}/{low}-{high}" if low != high else f"{inside}/{low}",
        "run": memory.run,
        "generation": world.generation if world else 0,
        "world": list(world.members) if world and memory.called is None and memory.closed is None else [],
        "step": progress.step,
        "steps": progress.steps,
        "progress": f"{100 * progress.step / progress.steps:.0f} %" if progress.steps else None,
        "rate": progress.rate,
        "progressTime": text(progress.time) if progress.time else None,
        "restarts": memory.restarts,
        "interruptions": memory.interruptions,
        "checkpoint": {"step": progress.committed, "path": checkpoint, "time": progress.time} if progress.committed else None,
        "goodput": good,
        "goodputText": f"{100 * good:.1f} %" if good is not None else None,
        "lastFailure": dict(memory.failure) if memory.failure else None,
        "startTime": text(memory.started) if memory.started is not None else None,
        "completionTime": text(memory.finished) if memory.finished is not None else None,
        "rendezvous": _rendezvous(memory, leave_s),
        "judged": {"generation": memory.judged, "pods": list(memory.judged_pods)},
        "failures": [
            {
                "time": blame.record.time,
                "committedStep": blame.record.committed_step,
                "failedStep": blame.record.failed_step,
                "node": blame.node,
            }
            for blame in memory.blames
        ],
        "accounting": {
            "trainedSeconds": round(memory.account.trained_s, 3),
            "executedSteps": memory.account.executed,
            "since": memory.account.since,
            "first": memory.account.first,
        },
        "conditions": list(memory.conditions),
    }
    return _without_nothing(found)


def goodput(memory: Memory, now: float) -> float | None:
    """Share of the wall time since the start in which steps were done that were kept; None before the first step.

    What is not told by members, how long a step takes, is the mean over all that were done.
    """
    account, kept = memory.account, memory.progress.step
    if memory.started is None:
        return None
    end = memory.finished or memory.progress.time or now
    trained = account.trained_s + (max(0.0, end - account.since) if account.since is not None else 0.0)
    executed = account.executed + (max(0, kept - account.first) if account.since is not None else 0)
    wall = end - memory.started
    if executed <= 0 or wall <= 0:
        return None
    return round(min(1.0, trained * min(1.0, kept / executed) / wall), 4)


def conditioned(
    conditions: Sequence[Mapping[str, Any]], type_: str, reason: str, message: str, generation: int, now: float
) -> tuple[Document, ...]:
    """The conditions when this one has become true: the others, but `Created`, are false; those that never were are absent."""
    known = {each["type"]: dict(each) for each in conditions}
    if type_ not in known:
        known[type_] = {"type": type_, "status": "False", "lastTransitionTime": text(now), "reason": reason, "message": message}
    found = []
    for name, each in known.items():
        state = "True" if name in (type_, "Created") else "False"
        if each["status"] != state:
            each |= {"status": state, "lastTransitionTime": text(now)}
        if name == type_:
            each |= {"reason": reason, "message": message}
        found.append({**each, "observedGeneration": generation})
    return tuple(found)


def seconds(when: str | None) -> float | None:
    """Seconds since the epoch of a time as Kubernetes writes it."""
    return datetime.fromisoformat(when).timestamp() if when else None


def text(when: float) -> str:
    """A time as Kubernetes writes it, whole seconds."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _rendezvous(memory: Memory, leave_s: float) -> Document:
    found: Document = {"run": memory.run}
    if memory.world is not None:
        found["world"] = {**dataclasses.asdict(memory.world), "members": list(memory.world.members)}
    if memory.called is not None:
        call = dataclasses.asdict(memory.called)
        found["called"] = {**call, "leaving": list(memory.called.leaving), "deadline": memory.called.at + leave_s}
    if memory.closed is not None:
        found["closed"] = {"reason": memory.closed[0], "code": memory.closed[1]}
    if memory.formed:
        found["formed"] = True
    return found


def _world(fields: Mapping[str, Any]) -> World:
    return World(fields["generation"], tuple(fields["members"]), fields["address"], fields["reason"], fields["at"])


def _without_nothing(found: Document) -> Document:
    """Without what is None, at any depth: API servers leave that out, and what is read back is to be what was written."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cleaned(each) for key, each in value.items() if each is not None}
        return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value

    return dict(cleaned(found))
