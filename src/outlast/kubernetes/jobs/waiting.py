"""Waits for a job in a cluster to end, as a pipeline step does. See docs/decisions/0054-a-step-of-a-pipeline.md.

    waiter = Waiter(workloads, "digits", say=print)
    waiter.submit(lambda: backend.submission.apply(job, source=file))
    result = waiter.wait()

The wait continues while the API server is unavailable or the job is suspended or queued.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outlast.base import backoff
from outlast.base.errors import Absent, ClusterError, Forbidden, NotFound, NotServed, OutlastError, StoreError, Unanswered
from outlast.job.contract import Env
from outlast.job.status import JobStatus, State
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds, kubeconfig, pod_status
from outlast.kubernetes.jobs import job_status
from outlast.kubernetes.jobs.job_documents import Workloads
from outlast.worker.agent.lifecycle import DONE_FLUSH_S

T = TypeVar("T")

POLL_S = 5.0
PROGRESS_S = 60.0
"""Interval between reports, in seconds. A change of state is reported at once."""
_SUBMIT_S = 600.0
_UNSERVED_S = 300.0
"""How long the API server may fail to serve the job's kind, in seconds. A server that has just started may not serve it yet."""
_CANCEL_S = 15.0
"""How long to retry the cancellation, in seconds. A pod is killed 30 s after SIGTERM."""

ReadStep = Callable[[], tuple[api.Document | None, api.Document | None]]
"""A function that returns the pipeline step's pod and the Workflow that owns the pod, for `reason_to_continue`."""


class Code(enum.IntEnum):
    """Exit codes of a wait. In addition, the code is 1 for a refused request and 2 for a wrong command line."""

    SUCCEEDED = 0
    FAILED = 3
    GONE = 4
    """Somebody else has cancelled or replaced the job."""
    TERMINATED = 143


@dataclass(frozen=True)
class WaitResult:
    code: Code
    sentence: str
    status: JobStatus


@dataclass
class Waiter:
    """Submits one job and waits for its end."""

    workloads: Workloads
    name: str
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    may_cancel: bool = False
    """Whether the job may be cancelled, because it was submitted here or nobody else uses its name."""
    defer_sigterm: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Returns a context manager that defers SIGTERM, so that `may_cancel` is set for every submitted job."""
    _kind: kinds.Kind = kinds.ELASTIC_JOB
    _title: str = ""
    _uid: str = ""
    _upload_by: float | None = None

    def submit(self, apply: Callable[[], Iterator[str]]) -> None:
        """Submit the job, or attach to it if it has already been submitted, and report each step. Raises OutlastError."""

        def attempt() -> None:
            with self.defer_sigterm():
                for sentence in apply():
                    self.say(sentence)
                for workload in self.workloads.of(self.name)[:1]:  # none: somebody has already removed it
                    meta = workload["metadata"]
                    self._kind, self._title, self._uid = kinds.kind_of(workload), meta["name"], meta["uid"]
                self.may_cancel = True

        self._retry(attempt, _SUBMIT_S)

    def wait(self) -> WaitResult:
        last: JobStatus | None = None
        reported_s = self.now()
        while self._uid:
            due = last is None or self.now() - reported_s >= PROGRESS_S
            status = self._retry(lambda due=due: self._request_status(query_agents=due))  # type: ignore[misc]
            if status is None:
                return self._ended_elsewhere(last)
            if status.state.final and not self._uploads(status):
                return self._result(status)
            if due or last is None or status.state is not last.state:
                self.say(progress(status))
                reported_s = self.now()
            last = status
            self.sleep(POLL_S)
        return self._ended_elsewhere(None)

    def _uploads(self, status: JobStatus) -> bool:
        """Return whether workers of a job that has succeeded still upload its results."""
        if status.state is not State.SUCCEEDED or self._kind is not kinds.ELASTIC_JOB:
            return False  # other kinds end with their pods
        if self._upload_by is None:
            self._upload_by = self.now() + DONE_FLUSH_S
        running = any(map(pod_status.running, self._retry(lambda: self.workloads.pods(self.name))))
        return running and self.now() < self._upload_by

    def on_sigterm(self, mode: str, read_step: ReadStep) -> WaitResult:
        """Cancel the job after SIGTERM, unless `mode` is `leave`."""
        reason = "--on-terminate is leave" if mode == "leave" else "" if self.may_cancel else "it was not submitted yet"
        try:
            outcome = f"is not cancelled: {reason}" if reason else self._retry(lambda: self._cancel(read_step), _CANCEL_S)
        except NotFound:
            outcome = "is gone already" if self._uid else "is not cancelled: it was not submitted yet"
        except ClusterError as error:
            outcome = f"could not be cancelled: {error}; do it with: outlast cancel {self.name}"
        return WaitResult(Code.TERMINATED, f"SIGTERM: {self.name} {outcome}", JobStatus(name=self.name, run=""))

    def _cancel(self, read_step: ReadStep) -> str:
        """Cancel the job, unless it has ended or should continue, and return a phrase that says what was done. Raises
        ClusterError."""
        if reason := reason_to_continue(*read_step()):
            return f"is not cancelled: {reason}"
        if self._uid:
            workload = self.workloads.cluster.get(self._kind, self._title)
            if workload["metadata"]["uid"] != self._uid:
                return "is not cancelled: somebody else has submitted it again"
            if (state := job_status.final_state(workload)) is not None:
                return f"has ended already ({state})"
        self.workloads.remove(self.name, grace_s=None)
        return "is cancelled; what it has saved stays"

    def _request_status(self, *, query_agents: bool) -> JobStatus | None:
        workload = self.workloads.cluster.find(self._kind, self._title)
        if workload is None or workload["metadata"]["uid"] != self._uid:
            return None
        ended = job_status.final_state(workload) is not None
        query_agents = query_agents or ended or self._kind is kinds.STATEFUL_SET  # only its agents know its end
        snapshot = self.workloads.snapshot(self.name, [workload], self.workloads.pods(self.name), query_agents=query_agents)
        return job_status.status(snapshot)

    def _retry(self, request: Callable[[], T], timeout_s: float = float("inf")) -> T:
        since = self.now()
        unserved: float | None = None

        def hopeless(error: ClusterError) -> bool:
            nonlocal unserved
            now = self.now()
            if isinstance(error, NotServed):
                unserved = now if unserved is None else unserved
                return not self._uid or now - since > timeout_s or now - unserved > _UNSERVED_S
            unserved = None
            return not isinstance(error, Unanswered) or now - since > timeout_s

        return backoff.until_answered(request, self.say, every_s=POLL_S, sleep=self.sleep, hopeless=hopeless)

    def _result(self, status: JobStatus) -> WaitResult:
        if status.state is State.SUCCEEDED:
            return WaitResult(Code.SUCCEEDED, f"{self.name} has succeeded", status)
        if status.state is State.FAILED:
            return WaitResult(Code.FAILED, f"{self.name} has failed: {self._failure_reason(status)}", status)
        return self._ended_elsewhere(status)

    def _failure_reason(self, status: JobStatus) -> str:
        from outlast.kubernetes import diagnosis
        from outlast.kubernetes.diagnosis import gather_evidence

        try:
            causes = diagnosis.causes(gather_evidence.job(self.workloads.cluster, self.name), time.time())
        except OutlastError:  # fall back to the status
            causes = []
        return next((cause.what for cause in causes if cause.failed), status.reason)

    def _ended_elsewhere(self, last: JobStatus | None) -> WaitResult:
        """Return the result for a job that is gone from the cluster. The run's record in the store may show that the job had
        ended before."""
        status = last or JobStatus(name=self.name, run="")
        if (recorded := _status_from_store(status)) is not None:
            return self._result(recorded)
        status = status.model_copy(update={"state": State.CANCELLED})
        existing = self._retry(lambda: self.workloads.of(self.name))
        if existing and existing[0]["metadata"]["uid"] != self._uid:
            return WaitResult(Code.GONE, f"{self.name} was submitted again by somebody else, and this run of it is over", status)
        return WaitResult(
            Code.GONE, f"{self.name} was cancelled or deleted by somebody else; submitted again, it goes on", status
        )


def _status_from_store(status: JobStatus) -> JobStatus | None:
    """Return `status` updated from the run's record in the store, which has the end only once the results are there; None unless
    the run has succeeded or failed. Without a store that can be read, success counts from `status`."""
    seen = status if status.state is State.SUCCEEDED else None
    if status.store is None or not status.run:
        return seen
    from outlast.storage import runs, store

    try:
        record = runs.read(store.open_(status.store.url))
    except StoreError:
        return seen
    if record is None or status.run not in (record.run, record.owner) or record.state not in (State.SUCCEEDED, State.FAILED):
        return None
    return status.model_copy(update={"state": State(record.state), "reason": record.reason, "exit_code": record.exit_code})


def progress(status: JobStatus) -> str:
    """Format progress, such as `digits: Running: all 2 workers train; step 120 of 400, checkpoint of step 100`."""
    facts = []
    if status.step or status.steps:
        facts.append(f"step {status.step}" + (f" of {status.steps}" if status.steps else ""))
    if status.checkpoint:
        facts.append(f"checkpoint of step {status.checkpoint.step}")
    state = f"{status.state}: {status.reason}" if status.reason else str(status.state)
    return f"{status.name}: {state}{'; ' if facts else ''}{', '.join(facts)}"


def reason_to_continue(pod: api.Document | None, owner: api.Document | None) -> str:
    """Return why a job should continue although its step received SIGTERM; empty if the job should be cancelled. `pod` is the
    step's pod, or None if it cannot be read. `owner` is the Workflow that owns the pod, or None if the Workflow is gone."""
    spec = (owner or {}).get("spec") or {}
    deleting = owner is not None and "deletionTimestamp" in owner["metadata"]
    terminated = spec.get("shutdown") or spec.get("activeDeadlineSeconds") == 0  # Kubeflow Pipelines sets 0
    if pod is None or deleting or terminated:
        return ""
    if disruption := pod_status.disruption(pod):
        return f"the step's pod is evicted ({disruption.get('reason')}), and the step is to be run again"
    if "deletionTimestamp" not in pod["metadata"] or owner is None:
        return ""
    return f"the step's pod is deleted, and Workflow {owner['metadata']['name']} goes on"


def own_pod(
    cluster: api.Cluster, environ: Mapping[str, str] = os.environ, *, last: api.Document | None = None
) -> tuple[api.Document | None, api.Document | None]:
    """Return this process's pod and the Workflow that owns it, if they can be read. After a forced deletion, the pod may be gone
    before its processes end; then `last`, the pod as it was read before, is returned and marked as being deleted. Raises
    Unanswered."""
    name = next((environ[key] for key in (Env.POD, "KFP_POD_NAME", "HOSTNAME") if environ.get(key)), "")
    if not name or not kubeconfig.in_pod(environ):
        return None, None
    unknown = (OSError, Absent, Forbidden, NotServed)
    try:
        namespace = Path(kubeconfig.ACCOUNT, "namespace").read_text().strip()
        pod = cluster.find(kinds.POD, name, namespace=namespace)
    except unknown:
        return None, None
    if pod is None:
        if last is None:
            return None, None
        pod = {**last, "metadata": {"deletionTimestamp": "", **last["metadata"]}}
    owners = pod["metadata"].get("ownerReferences") or ()
    try:
        workflow = next(each["name"] for each in owners if each["kind"] == kinds.WORKFLOW.kind)
        return pod, cluster.get(kinds.WORKFLOW, workflow, namespace=namespace)
    except (StopIteration, *unknown):
        return pod, None
