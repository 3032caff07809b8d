"""Reads and writes a job's `.status`, in which the operator keeps its state between reconcile passes. Pure.

`outlast status` and kubectl read the fields of `outlast.job.status.JobStatus`, and the job's agents watch the field `rendezvous`.
`startTime`, `completionTime`, `progressTime` and the times of conditions are in Kubernetes' format; all others are seconds since
the epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outlast.base import units
from outlast.base.typed_json import decode
from outlast.job.contract import LEASE_S
from outlast.job.report import ledger_events
from outlast.job.status import State
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.manifests import labels
from outlast.rendezvous.restart_budget import History, Record
from outlast.rendezvous.who_trains import Call, World

Document = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class CountedFailure:
    """A failure that counts against the restart budget."""

    record: Record
    node: str
    cause: str = ""
    """A `contract.FailureCause`; empty if unknown."""


@dataclass(frozen=True)
class Silent:
    """A pod that was deleted because its worker was silent. Once the pod is gone, it is known whether the worker hung or its node
    was lost."""

    uid: str
    worker: int
    node: str
    since: float
    generation: int = 0
    """Generation of the worker's world; 0 if it was in none."""
    echo: bool = False
    """True if the silence follows from a failure that is already counted."""
    after_s: float = LEASE_S
    """How long the worker was silent."""


@dataclass(frozen=True)
class Lost:
    """A worker that its peers could not reach and that is therefore kept out of worlds for a while; see
    `rendezvous.partition.Loss`."""

    worker: int
    uid: str
    node: str
    at: float
    times: int = 1
    held: bool = True


@dataclass(frozen=True)
class Leaving:
    """A worker that must leave by `deadline`, in seconds since the epoch. The status publishes this for the worker's agent."""

    worker: int
    uid: str
    deadline: float
    reason: str = ""


@dataclass(frozen=True)
class Losses:
    """Lost training time, in seconds for each cause (`report.incidents.CAUSES`), and the number of lost steps."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0

    def grown(self, newer: Losses) -> Losses:
        """Return the maximum of the old and the newer value of each counter: counters must not fall, even if the newer values are
        more accurate."""
        causes = sorted({*self.seconds, *newer.seconds})
        seconds = {cause: max(self.seconds.get(cause, 0.0), newer.seconds.get(cause, 0.0)) for cause in causes}
        return Losses(seconds, max(self.steps, newer.steps))


@dataclass(frozen=True)
class Progress:
    step: int = 0
    steps: int | None = None
    committed: int = 0
    committed_at: float = 0.0
    """When the commit at step `committed` was first reported."""
    rate: float | None = None
    """The current world's steps per second."""
    time: float = 0.0
    """When the progress was written, in whole seconds."""
    mark: tuple[int, float] | None = None
    """The step from which the next rate is measured, and when rank 0 completed it, by rank 0's clock."""
    snapshot: tuple[int, int] = (0, 0)
    """Step of the newest complete snapshot, and the number of steps between snapshots; 0 if unknown."""
    bytes: int = 0
    goodput: float | None = None
    """The goodput that rank 0's worker reported; that of the whole run once the run has ended."""
    losses: Losses | None = None
    """Reported together with `goodput`. While nothing trains, `goodput` is None, but the losses are kept."""


@dataclass(frozen=True)
class Result:
    reason: str
    code: int


@dataclass(frozen=True)
class Status:
    """The operator's state for a job. The defaults are those of a new job."""

    state: State | None = None
    reason: str = ""
    blocked_worker: int | None = None
    """The worker that `reason` names because it cannot start."""
    run: str = ""
    world: World | None = None
    called: Call | None = None
    result: Result | None = None
    """Set once no further world will form, unless the job is resumed."""
    counted: tuple[int, int] = (0, 0)
    """The newest (generation, attempt) whose failure is already counted."""
    handled_pods: tuple[str, ...] = ()
    """Uids of pods whose end is already counted or was expected."""
    restarted: Mapping[str, int] = field(default_factory=dict)
    """Number of container restarts already counted, keyed by pod uid. Used only for workers without an agent."""
    silent: tuple[Silent, ...] = ()
    lost: tuple[Lost, ...] = ()
    leaves: tuple[Leaving, ...] = ()
    counted_failures: tuple[CountedFailure, ...] = ()
    restarts: int = 0
    interruptions: int = 0
    uses_etcd: bool = False
    """True if an operator of the previous version had agents elect a coordinator in etcd."""
    failure: Mapping[str, Any] | None = None
    """The last failure: the fields of a `failure.Failure`, the failed worker's node and the end of its log."""
    started: float | None = None
    resumed: float | None = None
    """When the job was last resumed. Its deadlines count from then on."""
    finished: float | None = None
    has_formed_world: bool = False
    """True if a world has formed since the job was started or resumed."""
    observed_generation: int = 0
    queue: str = ""
    """The Kueue queue in which the job waits or which has admitted it."""
    gang: str = ""
    """The gang scheduler for the job's pods. It is kept even if another one is installed later."""
    progress: Progress = Progress()
    ledger: tuple[Mapping[str, Any], ...] = ()
    """The operator's decisions as ledger events: the first one and the newest ones."""
    conditions: tuple[Mapping[str, Any], ...] = ()

    @property
    def generation(self) -> int:
        """The newest generation that has existed or was called for."""
        return max(self.world.generation if self.world else 0, self.called.generation if self.called else 0)

    @property
    def silent_uids(self) -> set[str]:
        return {each.uid for each in self.silent}

    @property
    def history(self) -> History:
        return tuple(counted.record for counted in self.counted_failures)


MAX_LEDGER_EVENTS = 32
"""Maximum number of ledger events in the status. Rank 0's worker copies them into the run's own ledger."""


def with_event(ledger: tuple[Mapping[str, Any], ...], t: float, kind: str, **fields: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the ledger with this event appended, unless it is already there. Beyond MAX_LEDGER_EVENTS, the oldest events are
    dropped, but never the first one, which records the submission."""
    entry = _without_none({"t": _ms(t), "kind": kind, "source": "operator", **fields})
    return ledger if entry in ledger else (*ledger[:1], *(*ledger[1:], entry)[1 - MAX_LEDGER_EVENTS :]) if ledger else (entry,)


def read(status: Mapping[str, Any]) -> Status:
    """Parse a job's status, which is `{}` for a new job. Ignores invalid parts, such as those written by another version."""
    rendezvous, counted = status.get("rendezvous") or {}, status.get("judged") or {}
    account = status.get("accounting") or {}
    return Status(
        state=_valid(State, status.get("state")),
        reason=status.get("reason", ""),
        blocked_worker=status.get("blocked"),
        run=rendezvous.get("run", ""),
        world=_valid(World, rendezvous.get("world")),
        called=_valid(Call, rendezvous.get("called")),
        result=_valid(Result, rendezvous.get("closed")),
        counted=(counted.get("generation", 0), counted.get("attempt") or 0),
        handled_pods=tuple(counted.get("pods") or ()),
        restarted=counted.get("restarted") or {},
        silent=_all_valid(Silent, counted.get("silent")),
        lost=_all_valid(Lost, counted.get("lost")),
        leaves=_all_valid(Leaving, rendezvous.get("leaving")),
        counted_failures=tuple(failure.counted for failure in _all_valid(_Failure, status.get("failures"))),
        restarts=status.get("restarts", 0),
        interruptions=status.get("interruptions", 0),
        uses_etcd=bool(rendezvous.get("wanted")),
        failure=status.get("lastFailure"),
        started=pod_status.timestamp(status.get("startTime")) or None,
        resumed=rendezvous.get("resumed"),
        finished=pod_status.timestamp(status.get("completionTime")) or None,
        has_formed_world=bool(rendezvous.get("formed")),
        observed_generation=status.get("observedGeneration", 0),
        queue=status.get("queue", ""),
        gang=status.get("gang", ""),
        progress=_read_progress(status, account),
        ledger=tuple(each for each in status.get("ledger") or () if isinstance(each, Mapping) and ledger_events.usable(each)),
        conditions=tuple(status.get("conditions") or ()),
    )


@dataclass(frozen=True)
class _Failure:
    time: float
    committedStep: int
    failedStep: int | None = None
    node: str = ""
    cause: str = ""

    @property
    def counted(self) -> CountedFailure:
        return CountedFailure(Record(self.time, self.committedStep, self.failedStep), self.node, self.cause)


@dataclass(frozen=True)
class _Mark:
    step: int
    time: float


@dataclass(frozen=True)
class _Snapshot:
    step: int
    every: int = 0


def _read_progress(status: Mapping[str, Any], account: Mapping[str, Any]) -> Progress:
    commit, mark = status.get("checkpoint") or {}, _valid(_Mark, account.get("reported"))
    memory = _valid(_Snapshot, status.get("snapshot"))
    return Progress(
        status.get("step", 0),
        status.get("steps"),
        commit.get("step", 0),
        commit.get("time", 0.0),
        status.get("rate"),
        pod_status.timestamp(status.get("progressTime")),
        (mark.step, mark.time) if mark else None,
        (memory.step, memory.every) if memory else (0, 0),
        commit.get("bytes", 0),
        status.get("goodput"),
        losses(status),
    )


def losses(status: Mapping[str, Any]) -> Losses | None:
    """Return the losses in a status, or None if they were never reported."""
    return _valid(Losses, (status.get("accounting") or {}).get("lost"))


def _valid(type_: type[T], fields: object) -> T | None:
    with contextlib.suppress(ValueError):
        return None if fields is None else decode(type_, fields)
    return None


def _all_valid(type_: type[T], items: Sequence[object] | None) -> tuple[T, ...]:
    return tuple(each for fields in items or () if (each := _valid(type_, fields)) is not None)


def write(
    status: Status, *, job: str, pods: int, world_size: int, size_range: tuple[int, int], checkpoints: str, grace_s: float
) -> Document:
    """Return the status as a document. `world_size` is the current world's number of workers, `size_range` the allowed range, and
    `checkpoints` the URL of the checkpoints in the store. A planned re-rendezvous waits `grace_s` seconds for workers to save."""
    low, high = size_range
    world, progress = status.world, status.progress
    goodput = progress.goodput
    trains = world is not None and status.called is None and status.result is None
    committed = {"step": progress.committed, "path": checkpoints, "time": _ms(progress.committed_at)}
    checkpoint = {**committed, "bytes": progress.bytes or None}
    fields: Document = {
        "observedGeneration": status.observed_generation,
        "state": str(status.state) if status.state else None,
        "reason": status.reason,
        "blocked": status.blocked_worker,
        "replicas": pods,
        "selector": ",".join(f"{key}={value}" for key, value in labels.selector(job).items()),
        "workersText": f"{world_size}/{low}-{high}" if low != high else f"{world_size}/{low}",
        "run": status.run,
        "generation": world.generation if world else 0,
        "world": list(world.members) if world and trains else [],
        "step": progress.step,
        "steps": progress.steps,
        "progress": f"{100 * progress.step / progress.steps:.0f} %" if progress.steps else None,
        "rate": progress.rate,
        "progressTime": pod_status.rfc3339(progress.time) if progress.time else None,
        "restarts": status.restarts,
        "interruptions": status.interruptions,
        "checkpoint": checkpoint if progress.committed else None,
        "snapshot": dict(zip(("step", "every"), progress.snapshot, strict=True)) if progress.snapshot[0] else None,
        "goodput": goodput,
        "goodputText": units.percent(goodput) if goodput is not None else None,
        "lastFailure": {**status.failure, "time": _ms(status.failure.get("time"))} if status.failure else None,
        "startTime": pod_status.rfc3339(status.started) if status.started is not None else None,
        "completionTime": pod_status.rfc3339(status.finished) if status.finished is not None else None,
        "rendezvous": _rendezvous_document(status, grace_s),
        "judged": _counted_document(status),
        "failures": [_failure_document(counted) for counted in status.counted_failures],
        "accounting": _accounting_document(progress),
        "ledger": status.ledger or None,
        "queue": status.queue or None,
        "gang": status.gang or None,
        "conditions": status.conditions,
    }
    return dict(_without_none(fields))


def with_condition(
    conditions: Sequence[Mapping[str, Any]], type_: str, reason: str, message: str, generation: int, now: float
) -> tuple[Document, ...]:
    """Return the conditions with the one of type `type_` set to true and all others except `Created` set to false. Conditions
    that were never true stay absent."""
    by_type = {each["type"]: dict(each) for each in conditions}
    by_type[type_] = {"type": type_, "status": "False", **by_type.get(type_, {}), "reason": reason, "message": message}
    for name, each in by_type.items():
        state = "True" if name in (type_, "Created") else "False"
        if each["status"] != state:
            each |= {"status": state, "lastTransitionTime": pod_status.rfc3339(now)}
        each["observedGeneration"] = generation
    return tuple(by_type.values())


def condition_reason(conditions: Sequence[Mapping[str, Any]], type_: str) -> str:
    """Return a condition's reason, or an empty string if there is no such condition."""
    return next((str(each["reason"]) for each in conditions if each["type"] == type_), "")


def _accounting_document(progress: Progress) -> Document | None:
    mark = {"step": progress.mark[0], "time": _ms(progress.mark[1])} if progress.mark else None
    lost = dataclasses.asdict(progress.losses) if progress.losses else None
    return {"reported": mark, "lost": lost} if mark or lost else None


def _counted_document(status: Status) -> Document:
    silent = [{**dataclasses.asdict(each), "since": _ms(each.since), "echo": each.echo or None} for each in status.silent]
    silent = [{**each, "after_s": None if each["after_s"] == LEASE_S else each["after_s"]} for each in silent]
    return {
        "generation": status.counted[0],
        "attempt": status.counted[1] or None,
        "pods": status.handled_pods,
        "restarted": dict(status.restarted) or None,
        "silent": silent or None,
        "lost": [{**dataclasses.asdict(each), "at": _ms(each.at)} for each in status.lost] or None,
    }


def _failure_document(counted: CountedFailure) -> Document:
    record = counted.record
    steps = {"committedStep": record.committed_step, "failedStep": record.failed_step}
    return {"time": _ms(record.time), **steps, "node": counted.node, **({"cause": counted.cause} if counted.cause else {})}


def _rendezvous_document(status: Status, grace_s: float) -> Document:
    world, call = status.world, status.called
    called = None
    if call is not None:
        times = {"at": _ms(call.at), "deadline": _ms(call.at + grace_s)}
        called = {**dataclasses.asdict(call), "lost": call.lost or None, **times}
    return {
        "run": status.run,
        "world": {**dataclasses.asdict(world), "at": _ms(world.at)} if world is not None else None,
        "called": called,
        "closed": dataclasses.asdict(status.result) if status.result else None,
        "formed": status.has_formed_world or None,
        "resumed": _ms(status.resumed),
        "wanted": {"number": 1} if status.uses_etcd else None,
        "leaving": [{**dataclasses.asdict(each), "deadline": _ms(each.deadline)} for each in status.leaves] or None,
    }


def _ms(when: float | None) -> float | None:
    """Round a time to milliseconds, so that reading it back yields exactly the value that was written."""
    return None if when is None else round(when, 3)


def _without_none(value: Any) -> Any:
    """Drop entries that are None and make lists of tuples at any depth, as API servers do: a status is read as it was written."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value
