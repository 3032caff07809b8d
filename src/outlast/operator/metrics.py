"""What the operator counts, and Prometheus' text format for it.

https://prometheus.io/docs/instrumenting/exposition_formats/. The format is a page of text; a client library would be one more
dependency of the image for it. Times are arguments.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from outlast import contract
from outlast.operator.plan import Note

_INTERRUPTIONS = {
    "WorkerInterrupted": "told",
    "WorkerPreempted": "told",
    "NodeLost": "node-lost",
    "NodeLeaving": "node-leaving",
}
"""What notes say of interruptions, and what Prometheus calls it."""

Labels = tuple[tuple[str, str], ...]


@dataclass
class Metric:
    """One number for each set of labels."""

    name: str
    help: str
    type: Literal["counter", "gauge"]
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Count."""
        key = tuple(labels.items())
        self.values[key] = self.values.get(key, 0.0) + amount

    def lines(self) -> Iterator[str]:
        """In the text format."""
        yield from _head(self.name, self.help, self.type)
        for labels, value in sorted(self.values.items()):
            yield f"{self.name}{_braced(labels)} {_number(value)}"


@dataclass
class Histogram:
    """How often something took how long."""

    name: str
    help: str
    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """It took so long."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> Iterator[str]:
        """In the text format."""
        yield from _head(self.name, self.help, "histogram")
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], accumulate(self.counts), strict=True):
            yield f'{self.name}_bucket{{le="{bound}"}} {count}'
        yield f"{self.name}_sum {_number(self.total)}"
        yield f"{self.name}_count {sum(self.counts)}"


@dataclass(frozen=True)
class _Job:
    state: str
    goodput: float | None


class Telemetry:
    """All that the operator counts. May be called from several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._jobs: dict[tuple[str, str, str], _Job] = {}
        self._restarts = Metric("outlast_restarts_total", "Failures that were restarted after, by cause", "counter")
        self._interruptions = Metric("outlast_interruptions_total", "Workers that left without a fault, by cause", "counter")
        self._writes = Metric("outlast_operator_writes_total", "Requests that change something", "counter")
        self._errors = Metric("outlast_operator_errors_total", "Looks at a job or at a kind that ended in an error", "counter")
        self._errors.values[()] = 0.0
        self._looks = Histogram(
            "outlast_reconcile_seconds",
            "Time of one look at a job, its writes included",
            (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
        )
        self._recoveries = Histogram(
            "outlast_recovery_seconds",
            "Time from the failure or the loss of a world until the next one trains",
            (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
        )

    def wrote(self, kind: str, verb: str) -> None:
        """A request that changes something was made."""
        with self._guard:
            self._writes.add(kind=kind, verb=verb)

    def failed(self) -> None:
        """A look ended in an error."""
        with self._guard:
            self._errors.add()

    def looked(self, seconds: float) -> None:
        """A look has taken so long."""
        with self._guard:
            self._looks.add(seconds)

    def knows(self, kind: str, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """The status of a job now."""
        goodput = status.get("goodput")
        job = _Job(str(status.get("state") or "Pending"), float(goodput) if isinstance(goodput, (int, float)) else None)
        with self._guard:
            self._jobs[kind, namespace, name] = job

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """A job is gone."""
        with self._guard:
            self._jobs.pop((kind, namespace, name), None)

    def changed(self, old: Mapping[str, Any], new: Mapping[str, Any], notes: Iterable[Note], now: float) -> None:
        """The status of a job was written: what has happened to it in between, and what was noted of it."""
        with self._guard:
            if (count := _more(old, new, "restarts")) > 0:
                self._restarts.add(count, cause=cause(new))
            for note in notes:
                if note.reason in _INTERRUPTIONS:
                    self._interruptions.add(cause=_INTERRUPTIONS[note.reason])
            if (since := _broken_since(old, new)) is not None:
                self._recoveries.add(max(0.0, now - since))

    def writes(self) -> dict[str, int]:
        """Requests that changed something so far, `create Pod`."""
        with self._guard:
            return {f"{dict(labels)['verb']} {dict(labels)['kind']}": int(n) for labels, n in self._writes.values.items()}

    def looks(self) -> int:
        """How many looks there were so far."""
        with self._guard:
            return sum(self._looks.counts)

    def text(self, *, leads: bool) -> str:
        """Everything, as Prometheus reads it."""
        with self._guard:
            jobs = Metric("outlast_jobs", "Jobs by state", "gauge")
            goodput = Metric("outlast_goodput_ratio", "Share of the wall time spent on steps that were kept", "gauge")
            for (_, namespace, name), job in self._jobs.items():
                jobs.add(state=job.state)
                if job.goodput is not None:
                    goodput.values[("namespace", namespace), ("job", name)] = job.goodput
            leader = Metric("outlast_operator_leader", "1 for the operator that acts", "gauge", {(): float(leads)})
            counted = (jobs, self._looks, self._restarts, self._interruptions, self._recoveries, goodput)
            every = (*counted, self._writes, self._errors, leader)
            return "".join(f"{line}\n" for metric in every for line in metric.lines())


def cause(status: Mapping[str, Any]) -> str:
    """Of what the last failure was one: `oom`, `hang`, `killed` or `error`. Few words: each is a series."""
    failure = status.get("lastFailure") or status.get("failure") or {}
    reason, code = str(failure.get("reason") or ""), failure.get("code")
    if "OOMKilled" in reason or "out of memory" in reason:
        return "oom"
    if "hung: " in reason or "has said nothing" in reason:
        return "hang"
    return "killed" if isinstance(code, int) and contract.killed(contract.exit_code(code)) else "error"


def _more(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> int:
    return int(new.get(name) or 0) - int(old.get(name) or 0)


def _broken_since(old: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """When the world failed, or was lost, in whose place another one trains now; None when none does, or it was left as planned.
    A failure and the next world may come in one look."""
    if new.get("state") != "Running" or int(new.get("generation") or 0) <= int(old.get("generation") or 0):
        return None
    restarting, failure = old.get("state") == "Restarting", new.get("lastFailure") or {}
    times = [failure["time"]] if failure.get("generation") == old.get("generation") and "time" in failure else []
    if restarting:
        times.append(((old.get("rendezvous") or {}).get("called") or {}).get("at"))
    elif _more(old, new, "restarts") <= 0:
        return None
    return min((float(time) for time in times if time is not None), default=None)


def _head(name: str, help: str, type_: str) -> tuple[str, str]:
    return f"# HELP {name} {help}.", f"# TYPE {name} {type_}"


def _braced(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
