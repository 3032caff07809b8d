"""Finds out why a job on this machine does not train, from its status and its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from outlast.base import units
from outlast.job import contract
from outlast.job.contract import End, FailureCause
from outlast.job.failure import Failure
from outlast.job.ledger import Event
from outlast.job.status import JobStatus, State
from outlast.kubernetes.diagnosis.finding import Finding, passed, repeated_failures, warned

_MAX_INCIDENTS = 3
_SLOW_START_S = 120.0
_KINDS = ("launcher", "submitted", "resumed", "hang", "failure", "committed")


def causes(status: JobStatus, events: Iterable[Event], now: float) -> list[Finding]:
    """Return findings about what keeps the job from training, the most important first. If nothing does, one finding says so."""
    relevant = [event for event in events if event["kind"] in _KINDS]
    findings = [each for rule in (_state, _store, _warnings) for each in rule(status, relevant, now)]
    return sorted(findings, key=lambda each: not each.failed)


def _state(status: JobStatus, events: Sequence[Event], now: float) -> Iterator[Finding]:
    name, reason = status.name, status.reason
    match status.state:
        case State.SUCCEEDED if status.unsaved:
            yield Finding("unsaved", f"it is finished, but {status.unsaved}")
        case State.SUCCEEDED:
            yield passed("finished", f"it is finished{'' if status.warnings else ', and all is well'}: {reason}")
        case State.CANCELLED:
            yield passed("cancelled", reason or "it was cancelled", _resume_hint(status))
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
            started = next(
                (event["t"] for event in reversed(events) if event["kind"] in ("launcher", "submitted", "resumed")), now
            )
            slow = now - started > _SLOW_START_S
            workers = "; ".join(f"worker {each.index} is {each.state}" for each in status.workers)
            what = f"it has been starting for {units.human_seconds(now - started)}: {reason}"
            remedy = f"see what it does with: outlast logs -f {name}" if slow else "wait"
            yield Finding("starting", what, remedy, (workers,) if workers else (), "fail" if slow else "pass")
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
            if stall := next((worker.reason for worker in status.workers if worker.reason), ""):
                remedy = "wait; after hang.limit it is a hang, and the training restarts"
                yield Finding("still", f"{train}, and it {stall}", remedy)
                return
            what = f"{'' if status.warnings else 'nothing is wrong: '}{train}{restarts}"
            yield passed("training", what, "", _evidence(status.failure, events) if status.restarts else ())


def _resume_hint(status: JobStatus) -> str:
    suffix = "" if status.file or status.command else " (its job file)"
    return f"go on{status.from_step} with: {status.again}{suffix}"


def _failed(status: JobStatus, events: Sequence[Event]) -> Finding:
    failure, hint = status.failure, _resume_hint(status)
    code = status.exit_code if failure is None or failure.code < 0 else failure.code
    default_remedy = f"`outlast logs {status.name}` shows all; correct it and {hint}"
    name, remedy = "failing-script", default_remedy
    if code == contract.Exit.MISCONFIGURED:
        name, remedy = "configuration", f"correct the job file or the script as it says, and {hint}"
    elif failure is not None and failure.cause is FailureCause.HANG and any(event["kind"] == "hang" for event in events):
        advice = "ranks that wait for each other must make the same collective calls in the same order"
        name, remedy = "hang", f"see what it waits for; {advice}{_stacks(events)}; {default_remedy}"
    elif code == 137:
        cause = "unless you killed it, the machine had no memory left (see dmesg): lower the batch or processesPerWorker"
        name, remedy = "killed", f"{cause}, and {hint}"
    elif status.end in (End.DEADLINE, End.STARTUP_DEADLINE):
        name, remedy = "deadline", f"raise the deadline and {hint}"
    return Finding(name, f"it has failed: {status.reason}", remedy, _evidence(failure, events))


def _repeated(status: JobStatus, events: Sequence[Event], now: float) -> str:
    relevant = [
        event for event in events if event["kind"] == "committed" or (event["kind"] == "failure" and event.get("counted"))
    ]
    failures = list(takewhile(lambda event: event["kind"] == "failure", reversed(relevant)))
    steps = [event.get("step") or 0 for event in failures]
    if len(failures) < 2 or status.step > max(steps):
        return ""
    if status.steps is None and not status.step and now - failures[0]["t"] > failures[0]["t"] - failures[1]["t"]:
        return ""  # the job reports no steps, and has run longer than before the last failure
    return repeated_failures(
        list(takewhile(lambda step: step == steps[0], steps)), len(failures), str(failures[0].get("cause", ""))
    )


def _stacks(events: Sequence[Event]) -> str:
    files = [event["stacks"] for event in events if event["kind"] == "hang" and event.get("stacks")]
    return f"; the stacks are in {files[-1]}" if files else ""


def _evidence(failure: Failure | None, events: Sequence[Event]) -> tuple[str, ...]:
    if failure is not None:
        step = f" at step {failure.step}" if failure.step is not None and failure.cause is not FailureCause.HANG else ""
        return (f"{failure.reason}{step}", *(f"    {line}" for line in failure.traceback.rstrip().splitlines()))
    return tuple(str(event.get("reason", "")) for event in events if event["kind"] == "failure")[-_MAX_INCIDENTS:]


def _store(status: JobStatus, _: Sequence[Event], now: float) -> Iterator[Finding]:
    store = status.store
    if store is not None and store.since is not None:
        backlog = f", {units.human_bytes(store.backlog)} of checkpoints wait" if store.backlog else ""
        what = f"its output cannot be uploaded to {store.url} since {units.human_seconds(now - store.since)}{backlog}"
        yield Finding("store", what, "fix what the store reports; training continues, and the upload is retried", (store.error,))


def suspicious_ranks(status: JobStatus) -> Iterator[Finding]:
    """Find ranks that are slower than the other ranks, or whose weights differ."""
    for worker in status.workers:
        machine = worker.node or "this machine"
        if worker.slow:
            remedy = f"see what else runs on {machine} and whether it is throttled, or replace it"
            yield warned("slow-rank", f"all ranks wait for one: {worker.slow}", remedy)
        if worker.differs:
            remedy = f"test the memory and the accelerators of {machine}; a restart takes the bits that most ranks have"
            yield Finding("differing-rank", worker.differs, remedy)


def _warnings(status: JobStatus, _: Sequence[Event], __: float) -> Iterator[Finding]:
    yield from suspicious_ranks(status)
    told = [sentence for worker in status.workers for sentence in worker.suspicions]
    for warning in status.warnings:
        if warning not in status.unsaved and warning not in told:
            yield Finding("warning", warning)
