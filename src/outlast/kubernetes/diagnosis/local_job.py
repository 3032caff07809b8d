"""Why a job on this machine does not train, according to its status and its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from outlast.base import units
from outlast.job import contract
from outlast.job.contract import End, FailureCause
from outlast.job.failure import Failure
from outlast.job.ledger import Event
from outlast.job.status import JobStatus, State
from outlast.kubernetes.diagnosis.finding import Finding, passed, repeated_failures

_LAST = 3
"""Number of the newest incidents that are given as evidence."""
_SLOW_START_S = 120.0
_USED = ("launcher", "submitted", "resumed", "hang", "failure", "committed")
"""Kinds of events that the rules use; a ledger has many other kinds."""


def causes(status: JobStatus, events: Iterable[Event], now: float) -> list[Finding]:
    """Causes that keep the job from training, the most important first. For a job that trains, a finding says so."""
    told = [event for event in events if event["kind"] in _USED]
    found = [each for rule in (_state, _store, _warnings) for each in rule(status, told, now)]
    return sorted(found, key=lambda each: not each.wrong)


def _state(status: JobStatus, events: Sequence[Event], now: float) -> Iterator[Finding]:
    name, reason = status.name, status.reason
    match status.state:
        case State.SUCCEEDED if status.unsaved:
            yield Finding("unsaved", f"it is finished, but {status.unsaved}")
        case State.SUCCEEDED:
            yield passed("finished", f"it is finished{'' if status.warnings else ', and all is well'}: {reason}")
        case State.CANCELLED:
            yield passed("cancelled", reason or "it was cancelled", _go_on(status))
        case State.SUSPENDED:
            yield passed("suspended", f"it is suspended: {reason}", f"go on with: outlast resume {name}")
        case State.INTERRUPTED:
            yield Finding("interrupted", f"it has left: {reason}", f"go on with: outlast resume {name}")
        case State.FAILED:
            yield _failed(status, events)
        case State.RESTARTING:
            remedy = f"wait; `outlast logs -f {name}` shows what the workers do"
            yield Finding("restarting", f"it forms a new world: {reason}", remedy, _evidence(status.failure, events))
        case State.PENDING:
            since = next((event["t"] for event in reversed(events) if event["kind"] in ("launcher", "submitted", "resumed")), now)
            late = now - since > _SLOW_START_S
            doing = "; ".join(f"worker {each.index} is {each.state}" for each in status.workers)
            what = f"it has been starting for {units.human_seconds(now - since)}: {reason}"
            remedy = f"see what it does with: outlast logs -f {name}" if late else "wait"
            yield Finding("starting", what, remedy, (doing,) if doing else (), "fail" if late else "pass")
        case _ if status.launcher is None:
            what = f"its launcher is gone, so nothing drives it ({reason})"
            yield Finding("launcher", what, f"go on with: outlast resume {name}")
        case _:
            epoch = f"epoch {status.epoch}, " if (status.epoch or -1) >= 0 else ""
            at = f"at {epoch}step {status.step}" + (f" of {status.steps}" if status.steps else "")
            restarts = f", after {status.restarts} failure{'s' * (status.restarts > 1)}" if status.restarts else ""
            train = f"{len(status.world)} of {status.replicas} workers train, {at}"
            if (repeated := _repeated(status, events, now)) and status.failure:
                stacks = _stacks(events) if status.failure.cause is FailureCause.HANG else ""
                remedy = f"correct it{stacks}; `outlast logs {name}` shows all"
                yield Finding("failing", f"{train}, but {repeated}", remedy, _evidence(status.failure, events))
                return
            if still := next((worker.reason for worker in status.workers if worker.reason), ""):
                remedy = "wait; after hang.limit it is a hang, and the training restarts"
                yield Finding("still", f"{train}, and it {still}", remedy)
                return
            what = f"{'' if status.warnings else 'nothing is wrong: '}{train}{restarts}"
            yield passed("training", what, "", _evidence(status.failure, events) if status.restarts else ())


def _go_on(status: JobStatus) -> str:
    which = "" if status.file or status.command else " (its job file)"
    return f"go on{status.from_step} with: {status.again}{which}"


def _failed(status: JobStatus, events: Sequence[Event]) -> Finding:
    failure, again = status.failure, _go_on(status)
    code = status.exit_code if failure is None or failure.code < 0 else failure.code
    tried = f"`outlast logs {status.name}` shows all; correct it and {again}"
    name, remedy = "failing-script", tried
    if code == contract.Exit.MISCONFIGURED:
        name, remedy = "configuration", f"correct the job file or the script as it says, and {again}"
    elif failure is not None and failure.cause is FailureCause.HANG and any(event["kind"] == "hang" for event in events):
        same = "ranks that wait for each other must make the same collective calls in the same order"
        name, remedy = "hang", f"see what it waits for; {same}{_stacks(events)}; {tried}"
    elif code == 137:
        memory = "unless you killed it, the machine had no memory left (see dmesg): lower the batch or processesPerWorker"
        name, remedy = "killed", f"{memory}, and {again}"
    elif status.end in (End.DEADLINE, End.STARTUP_DEADLINE):
        name, remedy = "deadline", f"raise the deadline and {again}"
    return Finding(name, f"it has failed: {status.reason}", remedy, _evidence(failure, events))


def _repeated(status: JobStatus, events: Sequence[Event], now: float) -> str:
    """A sentence if the job has failed several times without progress; otherwise empty."""
    told = [event for event in events if event["kind"] == "committed" or (event["kind"] == "failure" and event.get("counted"))]
    since = list(takewhile(lambda event: event["kind"] == "failure", reversed(told)))
    last = [event.get("step") or 0 for event in since]
    if len(since) < 2 or status.step > max(last):
        return ""
    if status.steps is None and not status.step and now - since[0]["t"] > since[0]["t"] - since[1]["t"]:
        return ""  # reports no steps, and has run for longer than before the last failure
    return repeated_failures(list(takewhile(lambda step: step == last[0], last)), len(since), str(since[0].get("cause", "")))


def _stacks(events: Sequence[Event]) -> str:
    found = [event["stacks"] for event in events if event["kind"] == "hang" and event.get("stacks")]
    return f"; the stacks are in {found[-1]}" if found else ""


def _evidence(failure: Failure | None, events: Sequence[Event]) -> tuple[str, ...]:
    """The first failing rank with its traceback, or else the newest failures in the ledger."""
    if failure is not None:
        at = f" at step {failure.step}" if failure.step is not None and failure.cause is not FailureCause.HANG else ""
        return (f"{failure.reason}{at}", *(f"    {line}" for line in failure.traceback.rstrip().splitlines()))
    return tuple(str(event.get("reason", "")) for event in events if event["kind"] == "failure")[-_LAST:]


def _store(status: JobStatus, _: Sequence[Event], now: float) -> Iterator[Finding]:
    there = status.store
    if there is not None and there.since is not None:
        held = f", {units.human_bytes(there.backlog)} of checkpoints wait" if there.backlog else ""
        what = f"its output cannot be uploaded to {there.url} since {units.human_seconds(now - there.since)}{held}"
        yield Finding("store", what, "fix what the store reports; training continues, and the upload is retried", (there.error,))


def _warnings(status: JobStatus, _: Sequence[Event], __: float) -> Iterator[Finding]:
    for warning in status.warnings:
        if warning not in status.unsaved:
            yield Finding("warning", warning)
