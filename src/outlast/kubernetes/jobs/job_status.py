"""Computes a job's status on a cluster from its workload, its pods and its agents' metrics. Pure.

`KubernetesBackend` reads these objects and metrics. An ElasticJob's status is mostly the one that its operator has written; a few
fields, such as `workers`, come from the pods.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.job import differing_ranks, slow_ranks
from outlast.job.contract import Env, Label
from outlast.job.failure import Failure
from outlast.job.ledger import Event
from outlast.job.status import CheckpointStatus, JobStatus, SnapshotStatus, State, StoreStatus, WorkerStatus
from outlast.kubernetes.api import document_parsing, dropins, workload_template
from outlast.kubernetes.api import pod_status as pods

Document = Mapping[str, Any]
Metrics = Mapping[str, float]

REPLICAS = "outlast.dev/replicas"
"""Annotation with a suspended workload's former number of workers."""

RECONCILED_WITHIN_S = 15.0
"""Maximum time until an operator reconciles a new job, in seconds. Reconciling takes this long if the operator's leader has just
failed."""


@dataclass(frozen=True)
class Snapshot:
    """A job's Kubernetes objects and its agents' metrics at one moment."""

    name: str
    workload: Document
    pods: Sequence[Document] = ()
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    """The agents' metrics, keyed by pod name."""
    allowed_sizes: tuple[int, int] | None = None
    """`workers.min` and `workers.max`, or None if the job file was not read."""
    processes: int = 1
    query_error: str = ""
    now: float = float("inf")
    """The current time, in seconds since the epoch."""


def metrics(exposition: str) -> dict[str, float]:
    """Parse an agent's metrics into a dictionary keyed by metric name, without the prefix `outlast_`. The key of a per-rank
    metric has the form `name/rank`."""
    samples = re.findall(r'^outlast_(\w+)(?:\{(?:[^}]*\brank="(\d+)")?[^}]*\})? (\S+)', exposition, re.MULTILINE)
    return {f"{name}/{rank}" if rank else name: float(value) for name, rank, value in samples}


def status(snapshot: Snapshot) -> JobStatus:
    meta = snapshot.workload["metadata"]
    newest = _newest_pods(snapshot.pods)
    workers = [_worker(pod, snapshot.metrics.get(pod["metadata"]["name"]), snapshot.pods) for _, pod in sorted(newest.items())]
    desired = _desired_workers(snapshot.workload)
    low, high = snapshot.allowed_sizes or (desired, desired)
    reported = snapshot.metrics.values()
    ends = [end for pod in snapshot.pods if (end := pods.end(pod)) is not None and end.code != 0]
    # `ends` already has the end before each pod's last restart.
    earlier_restarts = sum(max(0, int(pods.container_status(pod).get("restartCount", 0)) - 1) for pod in snapshot.pods)
    state, reason = _state(snapshot, newest, desired)
    unknown = snapshot.query_error if any(map(pods.running, snapshot.pods)) else ""
    warnings = [f"steps are not known: {unknown}"] if unknown else []
    committed = round(max((m.get("committed_step", 0) for m in reported), default=0))
    result = JobStatus(
        name=snapshot.name,
        namespace=meta.get("namespace", ""),
        run=(meta.get("labels") or {}).get(Label.RUN, meta["name"]),
        state=state,
        reason=reason,
        replicas=desired,
        min=low,
        max=high,
        processes=snapshot.processes,
        generation=round(max((m.get("generation", 0) for m in reported), default=0)),
        world=[pods.index(pod) for _, pod in sorted(newest.items()) if pods.ready(pod)],
        step=round(max((m.get("step", 0) for m in reported), default=0)),
        steps=round(max((m.get("target_step", 0) for m in reported), default=0)) or None,
        told="data" if _is_download(snapshot.workload) else "log" if any(m.get("step_logged") for m in reported) else "",
        restarts=sum(end.counted for end in ends) + earlier_restarts,
        interruptions=sum(not end.counted for end in ends),
        checkpoint=CheckpointStatus(step=committed, path="", time=0.0) if committed else None,
        snapshot=_snapshot(reported),
        failure=_failure(snapshot.pods),
        workers=workers,
        warnings=[*warnings, *(sentence for worker in workers for sentence in worker.suspicions)],
        output=_output(snapshot),
        store=_store(snapshot),
        submitted=pods.timestamp(meta.get("creationTimestamp")),
        started=min(
            (t for pod in snapshot.pods if (t := pods.timestamp((pod.get("status") or {}).get("startTime")))), default=None
        ),
        finished=_finished(snapshot.workload, ends) if state.final else None,
    )
    if state is State.FAILED:
        result.exit_code = result.failure.code if result.failure and result.failure.code > 0 else 1
    if state is State.SUCCEEDED:
        result.exit_code = 0
    return _with_operator_status(result, snapshot.workload)


def _with_operator_status(observed: JobStatus, workload: Document) -> JobStatus:
    written = workload.get("status") or {}
    if dropins.has(workload):
        fields_ = {"restarts": written.get("restarts"), "started": pods.timestamp(written.get("startTime")) or None}
        return observed.model_copy(update={key: value for key, value in fields_.items() if value is not None})
    if workload.get("kind") != "ElasticJob" or not written.get("state"):
        return observed
    fields = {**observed.model_dump(), **{key: value for key, value in written.items() if value is not None}}
    if observed.told == "log":  # an operator does not read logs
        fields |= {"step": observed.step, "steps": observed.steps}
    if observed.workers:  # the operator's status may be older than the pods
        fields["workers"] = [each.model_dump() for each in observed.workers]
    fields |= {name: getattr(observed, name) for name in ("name", "replicas", "min", "max", "submitted")}
    fields["warnings"] = [*dict.fromkeys([*(written.get("warnings") or []), *observed.warnings])]
    return JobStatus.model_validate(fields)


def cluster_events(workload: Document, status: JobStatus) -> list[Event]:
    """Return the events that only the cluster has recorded. These are the operator's ledger entries, plus the submission and the
    end if the entries lack them."""
    events = [dict(each) for each in (workload.get("status") or {}).get("ledger") or ()]
    kinds = {each.get("kind") for each in events}
    if "submitted" not in kinds and status.submitted:
        events.append({"t": status.submitted, "kind": "submitted", "source": "cluster", "job": status.name})
    if "finished" not in kinds and status.state.final and status.finished:
        end = {"state": str(status.state), "reason": status.reason, "step": status.step, "code": status.exit_code}
        events.append({"t": status.finished, "kind": "finished", "source": "cluster", **end})
    return events


def _newest_pods(documents: Sequence[Document]) -> dict[int, Document]:
    """Return each worker's newest pod, preferring pods that are not being deleted."""
    return {pods.index(pod): pod for pod in sorted(documents, key=lambda pod: (not pods.terminating(pod), pods.created_at(pod)))}


def _desired_workers(workload: Document) -> int:
    """Return the desired number of workers; for a suspended workload, the number before the suspension."""
    annotation = (workload["metadata"].get("annotations") or {}).get(REPLICAS)
    return workload_template.replicas(workload) or int(annotation or 0)


def is_suspended(workload: Document) -> bool:
    """Return whether a workload is suspended or scaled to zero, and should therefore have no pods."""
    spec = workload.get("spec") or {}
    if workload.get("kind") == "StatefulSet":
        return spec.get("replicas") == 0
    if dropins.has(workload):
        return workload_template.replicas(workload) == 0
    return bool(spec.get("suspend")) or (workload.get("kind") == "ElasticJob" and _desired_workers(workload) == 0)


def final_state(workload: Document) -> State | None:
    """Return a workload's final state, or None while it has not ended."""
    if (drop_in := dropins.of(workload)) is not None:
        return State(end) if (end := drop_in.final_state(workload)) else None
    written = str((workload.get("status") or {}).get("state") or "")
    if workload.get("kind") == "ElasticJob":
        return State(written) if written in {str(s) for s in State if s.final} else None
    if pods.condition(workload, "Complete"):
        return State.SUCCEEDED
    return State.FAILED if pods.condition(workload, "Failed") else None


def _state(snapshot: Snapshot, newest: Mapping[int, Document], desired: int) -> tuple[State, str]:
    if (ended := final_state(snapshot.workload)) is not None:
        return ended, _end_reason(snapshot, ended)
    if (ended := _statefulset_state(snapshot, newest, desired)) is not None:
        return ended, "all workers are done" if ended is State.SUCCEEDED else "workers have failed for good; their logs say why"
    if is_suspended(snapshot.workload):
        leaving = sum(not pods.finished(pod) for pod in newest.values())
        queue = (snapshot.workload["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
        if queue and not snapshot.pods:
            return State.PENDING, f"waits in the queue {queue} to be admitted"
        return State.SUSPENDED, f"suspended; workers that still save and leave: {leaving}" if leaving else "suspended"
    if snapshot.workload["metadata"].get("deletionTimestamp"):
        return State.CANCELLED, "it is being deleted"
    alive = [index for index, pod in newest.items() if pods.running(pod) and not pods.terminating(pod)]
    for index, pod in sorted(newest.items()):
        if problem := pods.unreachable_reason(pod):
            return State.RESTARTING, f"worker {index} {problem}"
    not_running = [(index, pod) for index, pod in sorted(newest.items()) if index not in alive and pods.phase(pod) != "Succeeded"]
    if len(alive) + sum(pods.phase(pod) == "Succeeded" for pod in newest.values()) >= desired:
        if _is_download(snapshot.workload):
            return State.RUNNING, "brings the data; its log says how far it is"
        ready = sum(pods.ready(pod) for pod in newest.values())
        in_world = f"{ready} of {desired} workers are in a world" if ready < desired else f"all {desired} workers train"
        return State.RUNNING, in_world
    began = any(pods.has_started(pod) for pod in snapshot.pods)
    if not_running:
        index, pod = not_running[0]
        end = pods.end(pod)
        sentence = pods.waiting_reason(pod) or (end.sentence if end else "begins")
        sentence = "leaves, and is being replaced" if pods.terminating(pod) else sentence
        return (State.RESTARTING if began else State.PENDING), f"worker {index} {sentence}"
    if began:
        return State.RESTARTING, f"{len(alive)} of {desired} workers are there; the others are being replaced"
    return State.PENDING, _no_pods_reason(snapshot)


def _is_download(workload: Document) -> bool:
    return Label.DATASET in (workload["metadata"].get("labels") or {})


def _no_pods_reason(snapshot: Snapshot) -> str:
    if condition := pods.condition(snapshot.workload, "FailedCreate") or pods.condition(snapshot.workload, "ReplicaFailure"):
        return f"its pods cannot be created: {condition.get('message')}"
    if parse_error := snapshot.workload.get(document_parsing.UNREADABLE):
        return f"it cannot be read: {parse_error}"
    if snapshot.workload.get("kind") == "ElasticJob" and not snapshot.workload.get("status"):
        if snapshot.now - pods.created_at(snapshot.workload) < RECONCILED_WITHIN_S:
            return "it was submitted a moment ago, and its operator is to take it up"
        return "no operator has taken it up yet; is one installed? (outlast install)"
    return f"its pods are not created yet; if it stays so, outlast why {snapshot.name} says why"


def _statefulset_state(snapshot: Snapshot, newest: Mapping[int, Document], desired: int) -> State | None:
    """Return a StatefulSet's final state; None if it has not ended, or for any other kind. The pods keep running after the end,
    so only the agents' metrics show it."""
    if snapshot.workload.get("kind") != "StatefulSet" or len(newest) < desired or not newest:
        return None
    reported = [snapshot.metrics.get(pod["metadata"]["name"], {}) for pod in newest.values()]
    if not all(each.get("done") or each.get("failed") for each in reported):
        return None
    return State.FAILED if any(each.get("failed") for each in reported) else State.SUCCEEDED


def _end_reason(snapshot: Snapshot, state: State) -> str:
    if state is State.SUCCEEDED:
        return "the data are complete" if _is_download(snapshot.workload) else "all workers are done"
    if _is_download(snapshot.workload):
        for pod in sorted(snapshot.pods, key=pods.created_at, reverse=True):
            if error := pods.last_error(pod):
                return error
    failure = _failure(snapshot.pods)
    condition = pods.condition(snapshot.workload, "Failed") or {}
    message = f"{condition.get('message') or condition.get('reason') or ''}".rstrip(".")
    return "; ".join(filter(None, (failure.reason if failure else "", message))) or "it failed"


def _failure(documents: Sequence[Document]) -> Failure | None:
    failures = [(end.time, pods.index(pod), end) for pod in documents if (end := pods.end(pod)) is not None and end.counted]
    if not failures:
        return None
    when, index, end = max(failures, key=lambda each: each[:2])
    return Failure(worker=index, code=end.code, reason=f"worker {index} {end.sentence}", time=when)


def _snapshot(reported: Collection[Metrics]) -> SnapshotStatus | None:
    newest: Metrics = max(reported, key=lambda m: (m.get("generation", 0), m.get("snapshot_step", 0)), default={})
    step = round(newest.get("snapshot_step", 0))
    return SnapshotStatus(step=step, every=round(newest.get("snapshot_every", 0))) if step else None


def _worker(pod: Document, reported: Metrics | None, documents: Sequence[Document]) -> WorkerStatus:
    index, end = pods.index(pod), pods.end(pod)
    others = [other for other in documents if pods.index(other) == index and other is not pod]
    restarts = sum((e := pods.end(other)) is not None and e.counted for other in others)
    reason = pods.unreachable_reason(pod) or pods.waiting_reason(pod)
    if pods.finished(pod) and end is not None:
        state, reason = ("done" if end.code == 0 else "failed"), "" if end.code == 0 else end.sentence
    elif pods.terminating(pod):
        state, reason = "leaving", "is being deleted"
    elif not pods.running(pod):
        state = "pending"
    elif reported and reported.get("leaving"):
        state = "leaving"
    elif reported and (reported.get("done") or reported.get("failed")):
        state = "failed" if reported.get("failed") else "done"
    else:
        state = "training" if pods.ready(pod) else "starting"
    told, node = reported or {}, pod["spec"].get("nodeName", "")
    (slow, slowest), (step, odd) = _largest(told, "slow_ratio"), _largest(told, "differing_step")
    where = slow_ranks.place(index, node)
    return WorkerStatus(
        index=index,
        state=state,
        restarts=restarts + int(pods.container_status(pod).get("restartCount", 0)),
        pod=pod["metadata"]["name"],
        node=node,
        step=round(reported["step"]) if reported and "step" in reported else None,
        reason=reason,
        slow=slow_ranks.sentence(slowest, slow, where) if slow else "",
        differs=differing_ranks.notice(odd, round(step), where) if step else "",
        replaced=round(told.get("processes_replaced_total", 0)),
    )


def _largest(told: Metrics, name: str) -> tuple[float, int]:
    """Return the largest value of a per-rank metric and the rank that it belongs to; (0, 0) if no rank has the metric."""
    values = ((value, key.rpartition("/")) for key, value in told.items())
    return max(((value, int(rank)) for value, (of, _, rank) in values if of == name), default=(0.0, 0))


def _environment(workload: Document) -> dict[str, str]:
    containers = (workload_template.template(workload).get("spec") or {}).get("containers") or ()
    return {each["name"]: each["value"] for c in containers for each in c.get("env") or () if "value" in each}


def _url(snapshot: Snapshot) -> str:
    if dropins.has(snapshot.workload):
        return ""
    if snapshot.workload.get("kind") == "ElasticJob":
        place = str((snapshot.workload.get("spec") or {}).get("output") or "")
        return f"{place.rstrip('/')}/{snapshot.name}" if "://" in place and not place.startswith("file:") else ""
    return _environment(snapshot.workload).get(Env.STORE, "")


def _output(snapshot: Snapshot) -> str:
    if _is_download(snapshot.workload):
        return str((workload_template.template(snapshot.workload)["spec"]["containers"][0].get("command") or [""])[-1])
    if dropins.has(snapshot.workload):
        return ""  # only its script knows the output
    return _url(snapshot) or f"{_environment(snapshot.workload).get(Env.OUTPUT, f'/out/{snapshot.name}')} in its pods"


def _store(snapshot: Snapshot) -> StoreStatus | None:
    if not (url := _url(snapshot)):
        return None
    step = round(max((m.get("sync_step", 0) for m in snapshot.metrics.values()), default=0))
    return StoreStatus(url=url, step=step)


def _finished(workload: Document, ends: Sequence[pods.End]) -> float | None:
    condition = pods.condition(workload, "Complete") or pods.condition(workload, "Failed") or {}
    completed = (workload.get("status") or {}).get("completionTime")
    return (
        pods.timestamp(completed or condition.get("lastTransitionTime")) or max((end.time for end in ends), default=0.0) or None
    )
