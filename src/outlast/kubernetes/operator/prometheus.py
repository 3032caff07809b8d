"""Computes the operator's metrics for Prometheus. `job.prometheus_metrics.TABLE` describes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outlast.job.failure import category
from outlast.job.prometheus_metrics import METRICS
from outlast.job.report.incidents import CAUSES
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator import elasticjob_status
from outlast.kubernetes.operator.plan import Event

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which no one reads

_INTERRUPTIONS = {"WorkerInterrupted": "told", "WorkerPreempted": "told", "NodeLost": "node-lost", "NodeLeaving": "node-leaving"}
"""Event reasons that report an interruption, each with its value for the label `cause`."""
_RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_RECOVERY_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


_TRAINING = ("Running", "Restarting")


@dataclass(frozen=True)
class _Job:
    state: str
    goodput: float | None
    step: int | None
    restarts: int
    progressed_at: float | None
    committed_at: float | None
    losses: elasticjob_status.Losses | None


class Metrics:
    """One operator's metrics, in a separate registry. Metrics of existing jobs are computed at each scrape. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: float | None = None
        self._jobs: dict[tuple[str, str, str], _Job] = {}
        """Existing jobs, keyed by kind, namespace and name."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._reconciles = Histogram(*_of("outlast_reconcile_seconds"), buckets=_RECONCILE_BUCKETS, registry=self.registry)
        self._restarts = Counter(*_of("outlast_restarts_total"), registry=self.registry)
        self._interruptions = Counter(*_of("outlast_interruptions_total"), registry=self.registry)
        self._recoveries = Histogram(*_of("outlast_recovery_seconds"), buckets=_RECOVERY_BUCKETS, registry=self.registry)
        self._writes = Counter(*_of("outlast_operator_writes_total"), registry=self.registry)
        self._errors = Counter(*_of("outlast_operator_errors_total"), registry=self.registry)
        self._leader = Gauge(*_of("outlast_operator_leader"), registry=self.registry)

    def count_write(self, kind: str, verb: str) -> None:
        self._writes.labels(kind, verb).inc()

    def count_error(self) -> None:
        self._errors.inc()

    def time_reconcile(self, seconds: float) -> None:
        self._reconciles.observe(seconds)

    def set_job(self, kind: str, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        goodput, at = status.get("goodput"), status.get("progressTime")
        job = _Job(
            str(status.get("state") or "Pending"),
            float(goodput) if isinstance(goodput, (int, float)) else None,
            int(status.get("step") or 0) if at else None,
            int(status.get("restarts") or 0),
            pod_status.timestamp(at) if at else None,
            (status.get("checkpoint") or {}).get("time"),
            elasticjob_status.losses(status),
        )
        with self._lock:
            self._jobs[kind, namespace, name] = job

    def remove_job(self, kind: str, namespace: str, name: str) -> None:
        with self._lock:
            self._jobs.pop((kind, namespace, name), None)

    def count_changes(self, old: Mapping[str, Any], new: Mapping[str, Any], events: Iterable[Event], now: float) -> None:
        """Count a job's restarts and recoveries between two statuses, and the interruptions that its Events report."""
        if (count := _increase(old, new, "restarts")) > 0:
            self._restarts.labels(failure_cause(new)).inc(count)
        for event in events:
            if event.reason in _INTERRUPTIONS:
                self._interruptions.labels(_INTERRUPTIONS[event.reason]).inc()
        if (since := _recovery_started_at(old, new)) is not None:
            failed = (new.get("lastFailure") or {}).get("generation") == old.get("generation")
            self._recoveries.labels(failure_cause(new) if failed else "lost").observe(max(0.0, now - since))

    def text(self, *, leads: bool, now: float | None = None) -> str:
        """Return all metrics in Prometheus' text format. `now` is in seconds since the epoch; without it, ages are omitted."""
        self._leader.set(leads)
        self._now = now
        return generate_latest(self.registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of existing jobs, for `prometheus_client.registry.Collector`."""
        with self._lock:
            jobs = sorted(self._jobs.items())
        states = [job.state for _, job in jobs]
        by_state = _family("outlast_jobs")
        for state in sorted(set(states)):
            by_state.add_metric((state,), states.count(state))
        yield by_state
        for metric, read in _PER_JOB.items():
            family = _family(metric)
            for (_, namespace, name), job in jobs:
                if (value := read(job, self._now)) is not None:
                    family.add_metric((namespace, name), value)
            yield family
        lost = _family("outlast_lost_seconds_total")
        for (_, namespace, name), job in jobs:
            if job.losses is not None:
                for cause in CAUSES:  # all of them: Prometheus does not see a series' first value as an increase
                    lost.add_metric((namespace, name, cause), job.losses.seconds.get(cause, 0.0))
        yield lost


def _of(name: str) -> tuple[str, str, tuple[str, ...]]:
    metric = METRICS[name]
    return metric.name, metric.help, metric.labels


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    name, help, labels = _of(name)
    family = CounterMetricFamily if METRICS[name].type == "counter" else GaugeMetricFamily
    return family(name, help, labels=labels)


def _age(job: _Job, since: float | None, now: float | None) -> float | None:
    """Return the seconds since `since` if the job should be making progress, otherwise None."""
    return max(0.0, now - since) if job.state in _TRAINING and since and now is not None else None


_PER_JOB: Mapping[str, Callable[[_Job, float | None], float | None]] = {
    "outlast_job_step": lambda job, _: job.step,
    "outlast_job_restarts": lambda job, _: job.restarts,
    "outlast_goodput_ratio": lambda job, _: job.goodput,
    "outlast_lost_steps_total": lambda job, _: job.losses.steps if job.losses else None,
    "outlast_progress_age_seconds": lambda job, now: _age(job, job.progressed_at, now),
    "outlast_commit_age_seconds": lambda job, now: _age(job, job.committed_at, now),
}


def failure_cause(status: Mapping[str, Any]) -> str:
    """Return the category of the last failure (`failure.CATEGORIES`)."""
    return category(status.get("lastFailure") or status.get("failure") or {})


def _increase(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> int:
    return int(new.get(name) or 0) - int(old.get(name) or 0)


def _recovery_started_at(old: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """Return when the previous world failed or was lost, if a new world has just replaced it; None if the change was planned. One
    pass may see both the failure and the new world."""
    if new.get("state") != "Running" or int(new.get("generation") or 0) <= int(old.get("generation") or 0):
        return None
    restarting, failure = old.get("state") == "Restarting", new.get("lastFailure") or {}
    times = [failure["time"]] if failure.get("generation") == old.get("generation") and "time" in failure else []
    if restarting:
        times.append(((old.get("rendezvous") or {}).get("called") or {}).get("at"))
    elif _increase(old, new, "restarts") <= 0:
        return None
    return min((float(time) for time in times if time is not None), default=None)
