"""What the operator knows of a job from one look to the next: all of it is in the job's `.status`.

    memory.read(status)          -> Status
    memory.write(memory, ...)    -> the status to be

Readers (`outlast status`, kubectl) find the same fields as in `outlast.status.JobStatus`; `rendezvous` is what the agents of the
job watch. Times in it are seconds since the epoch, elsewhere they are as Kubernetes writes them. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from outlast import units
from outlast.kube import pods as podwords
from outlast.manifests import labels
from outlast.rendezvous.etcd.schema import Wanted
from outlast.rendezvous.restarts import History, Record
from outlast.rendezvous.world import Call, Cause, World
from outlast.report import goodput
from outlast.status import State

Document = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class CountedFailure:
    """A counted failure that may still matter."""

    record: Record
    node: str
    """Where it happened; empty when that is not known."""


@dataclass(frozen=True)
class Silent:
    """A pod that was told to go since nothing was heard of it; why, its node will tell."""

    uid: str
    worker: int
    node: str
    since: float
    generation: int = 0
    """Of the world that it was missed in; 0 for none."""
    echo: bool = False
    """Whether the failure that it shows is counted already."""


@dataclass(frozen=True)
class Progress:
    """How far training was when that was last written."""

    step: int = 0
    steps: int | None = None
    committed: int = 0
    committed_at: float = 0.0
    """When that step was first heard of as committed."""
    rate: float | None = None
    """Steps per second of the world that trains."""
    time: float = 0.0
    """Whole seconds, as it is read back."""
    mark: tuple[int, float] | None = None
    """The step and the time, by its own clock, that rank 0 of the world that trains had reported when `rate` was computed."""


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
    lived_s: float = 0.0
    """Wall time before `started`, which is when the job was resumed; what lies between counts nowhere."""


@dataclass(frozen=True)
class Status:
    """What is known of a job. The first of everything is what a job begins with."""

    state: State | None = None
    reason: str = ""
    blocked: int | None = None
    """The worker that `reason` names since it cannot begin."""
    run: str = ""
    world: World | None = None
    called: Call | None = None
    closed: tuple[str, int] | None = None
    """Reason and exit code that agents are told, when there is no further world."""
    judged: int = 0
    """The newest generation whose failure has been judged."""
    handled_pods: tuple[str, ...] = ()
    """Uids of pods whose end has been judged, and which may still be there."""
    silent: tuple[Silent, ...] = ()
    counted_failures: tuple[CountedFailure, ...] = ()
    restarts: int = 0
    interruptions: int = 0
    born: str = ""
    """Where others decide: their word for the run, see `rendezvous.etcd.schema.Said`."""
    elected: int = 0
    """Those of `restarts` that they have counted."""
    wanted: Wanted | None = None
    """What they are told."""
    failure: Mapping[str, Any] | None = None
    """The last failure, a `status.Failure` with the node and the tail of the log."""
    started: float | None = None
    """When it was first taken up, or resumed: deadlines begin there."""
    finished: float | None = None
    formed: bool = False
    """Whether there has been a world since `started`."""
    observed: int = 0
    """The `metadata.generation` that was acted on last."""
    queue: str = ""
    """The queue of Kueue that it waits in, or was admitted by."""
    gang: str = ""
    """Who starts its pods all or none, from the first to the last: who is installed later takes over none. Empty: nobody."""
    progress: Progress = Progress()
    account: Account = Account()
    conditions: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def generation(self) -> int:
        """The newest generation that there has been, or is called for."""
        return max(self.world.generation if self.world else 0, self.called.generation if self.called else 0)

    @property
    def silent_uids(self) -> set[str]:
        return {each.uid for each in self.silent}

    @property
    def history(self) -> History:
        return History(tuple(counted.record for counted in self.counted_failures))


def read(status: Mapping[str, Any]) -> Status:
    """The memory in a status, `{}` for a job that nobody has looked at yet. A part that makes no sense, as somebody else wrote
    there or an operator of another version, is as if it had never been written."""
    told = status.get("rendezvous") or {}
    judged, written, account = status.get("judged") or {}, status.get("checkpoint") or {}, status.get("accounting") or {}
    called = told.get("called")
    return Status(
        state=_sound(lambda: State(status["state"]), None) if status.get("state") else None,
        reason=status.get("reason", ""),
        blocked=status.get("blocked"),
        run=told.get("run", ""),
        world=_sound(lambda: _world(told["world"]), None) if told.get("world") else None,
        called=_sound(lambda: _call(called), None) if called else None,
        closed=_sound(lambda: (told["closed"]["reason"], told["closed"]["code"]), None) if told.get("closed") else None,
        judged=judged.get("generation", 0),
        handled_pods=tuple(judged.get("pods") or ()),
        silent=_all(_silent, judged.get("silent")),
        counted_failures=_all(
            lambda each: CountedFailure(
                Record(each["time"], each["committedStep"], each.get("failedStep")), each.get("node", "")
            ),
            status.get("failures"),
        ),
        restarts=status.get("restarts", 0),
        interruptions=status.get("interruptions", 0),
        born=told.get("born", ""),
        elected=judged.get("elected", 0),
        wanted=Wanted.of(told.get("wanted")),
        failure=status.get("lastFailure"),
        started=podwords.seconds(status.get("startTime")) or None,
        finished=podwords.seconds(status.get("completionTime")) or None,
        formed=bool(told.get("formed")),
        observed=status.get("observedGeneration", 0),
        queue=status.get("queue", ""),
        gang=status.get("gang", ""),
        progress=Progress(
            status.get("step", 0),
            status.get("steps"),
            written.get("step", 0),
            written.get("time", 0.0),
            status.get("rate"),
            podwords.seconds(status.get("progressTime")),
            _sound(lambda: (account["reported"]["step"], account["reported"]["time"]), None) if account.get("reported") else None,
        ),
        account=Account(
            account.get("trainedSeconds", 0.0),
            account.get("executedSteps", 0),
            account.get("since"),
            account.get("first", 0),
            account.get("livedSeconds", 0.0),
        ),
        conditions=tuple(status.get("conditions") or ()),
    )


def write(
    memory: Status, *, job: str, pods: int, inside: int, sizes: tuple[int, int], checkpoint: str, now: float, leave_s: float
) -> Document:
    """The status that holds this memory.

    `pods` is how many workers there are, `inside` how many of them are in the world; `sizes` are min and max; `checkpoint` is
    the URL above the checkpoints, if they are in a store; `leave_s` is how long a planned call waits for training to save.
    """
    low, high = sizes
    world, progress = memory.world, memory.progress
    good = goodput_until(memory, now)
    found: Document = {
        "observedGeneration": memory.observed,
        "state": str(memory.state) if memory.state else None,
        "reason": memory.reason,
        "blocked": memory.blocked,
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
        "checkpoint": {"step": progress.committed, "path": checkpoint, "time": _ms(progress.committed_at)}
        if progress.committed
        else None,
        "goodput": good,
        "goodputText": units.percent(good) if good is not None else None,
        "lastFailure": {**memory.failure, "time": _ms(memory.failure.get("time"))} if memory.failure else None,
        "startTime": text(memory.started) if memory.started is not None else None,
        "completionTime": text(memory.finished) if memory.finished is not None else None,
        "rendezvous": _rendezvous(memory, leave_s),
        "judged": {
            "generation": memory.judged,
            "pods": list(memory.handled_pods),
            "silent": [
                {**dataclasses.asdict(each), "since": _ms(each.since), "echo": each.echo or None} for each in memory.silent
            ]
            or None,
            "elected": memory.elected or None,
        },
        "failures": [
            {
                "time": _ms(counted.record.time),
                "committedStep": counted.record.committed_step,
                "failedStep": counted.record.failed_step,
                "node": counted.node,
            }
            for counted in memory.counted_failures
        ],
        "accounting": {
            "trainedSeconds": round(memory.account.trained_s, 3),
            "executedSteps": memory.account.executed,
            "since": _ms(memory.account.since),
            "first": memory.account.first,
            "livedSeconds": round(memory.account.lived_s, 3) or None,
            "reported": {"step": progress.mark[0], "time": _ms(progress.mark[1])} if progress.mark else None,
        },
        "queue": memory.queue or None,
        "gang": memory.gang or None,
        "conditions": list(memory.conditions),
    }
    return _without_nothing(found)


def goodput_until(memory: Status, now: float) -> float | None:
    """Share of the wall time in which steps were done that were kept; None before the first step. While a job is held, no time
    passes.

    What is not told by members, how long a step takes, is the mean over all that were done.
    """
    account, kept = memory.account, memory.progress.step
    if memory.started is None:
        return None
    end = float(int(memory.finished or memory.progress.time or now))  # as they are read back
    now_trained, now_executed = training(account, kept, end, memory.progress.rate)
    trained, executed = account.trained_s + now_trained, account.executed + now_executed
    wall = account.lived_s + max(0.0, end - int(memory.started))
    return goodput.estimated(trained, executed, kept, wall)


def training(account: Account, step: int, until: float, rate: float | None) -> tuple[float, int]:
    """Seconds and steps that the world of now has trained: what its steps took, if their rate is known; starting is none."""
    if account.since is None:
        return 0.0, 0
    whole, steps = max(0.0, until - account.since), max(0, step - account.first)
    return (min(whole, steps / rate) if rate else whole), steps


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


def since(conditions: Sequence[Mapping[str, Any]], types: Collection[str]) -> float | None:
    """Since when one of these conditions is true."""
    begun = [
        podwords.seconds(each["lastTransitionTime"]) for each in conditions if each["type"] in types and each["status"] == "True"
    ]
    return max(begun, default=None)


def why(conditions: Sequence[Mapping[str, Any]], type_: str) -> str:
    """The reason of a condition; empty when there is none of this type."""
    return next((str(each["reason"]) for each in conditions if each["type"] == type_), "")


def text(when: float) -> str:
    """A time as Kubernetes writes it, whole seconds."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _rendezvous(memory: Status, leave_s: float) -> Document:
    found: Document = {"run": memory.run}
    if memory.world is not None:
        formed = dataclasses.asdict(memory.world)
        found["world"] = {**formed, "members": list(memory.world.members), "at": _ms(memory.world.at)}
    if memory.called is not None:
        call = dataclasses.asdict(memory.called)
        at = memory.called.at
        found["called"] = {**call, "leaving": list(memory.called.leaving), "at": _ms(at), "deadline": _ms(at + leave_s)}
    if memory.closed is not None:
        found["closed"] = {"reason": memory.closed[0], "code": memory.closed[1]}
    if memory.formed:
        found["formed"] = True
    if memory.born:
        found["born"] = memory.born
    if memory.wanted is not None:
        found["wanted"] = dataclasses.asdict(memory.wanted)
    return found


def _ms(when: float | None) -> float | None:
    """A time as it is written: to the millisecond, which reads back as itself."""
    return None if when is None else round(when, 3)


def _world(fields: Mapping[str, Any]) -> World:
    if not fields["members"]:
        raise ValueError("a world has members")
    return World(fields["generation"], tuple(fields["members"]), fields["address"], fields["reason"], fields["at"])


def _call(fields: Mapping[str, Any]) -> Call:
    leaving, cause = tuple(fields.get("leaving") or ()), Cause(fields.get("cause") or "")
    return Call(fields["generation"], fields["reason"], fields["planned"], fields["at"], leaving, cause)


def _silent(fields: Mapping[str, Any]) -> Silent:
    generation, echo = int(fields.get("generation", 0)), bool(fields.get("echo"))
    return Silent(fields["uid"], fields["worker"], fields["node"], fields["since"], generation, echo)


def _sound(read: Callable[[], T], otherwise: T) -> T:
    """What is read, if it makes sense."""
    try:
        return read()
    except (KeyError, TypeError, ValueError):
        return otherwise


def _all(read: Callable[[Mapping[str, Any]], T], given: Sequence[Mapping[str, Any]] | None) -> tuple[T, ...]:
    """Those that make sense."""
    found = [_sound(functools.partial(read, each), None) for each in given or ()]
    return tuple(each for each in found if each is not None)


def _without_nothing(found: Document) -> Document:
    """Without what is None, at any depth: API servers leave that out, and what is read back is to be what was written."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cleaned(each) for key, each in value.items() if each is not None}
        return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value

    return dict(cleaned(found))
