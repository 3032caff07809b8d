"""The backend that runs jobs on a cluster.

`job_documents` finds and deletes a job's objects, `submission` applies them, `logs` reads the logs of pods, and `job_status`
computes a job's status.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base import backoff
from outlast.base.errors import NotFound, OutlastError
from outlast.job import faults
from outlast.job.backend import not_ended
from outlast.job.contract import Label
from outlast.job.logs import LogLine
from outlast.job.status import JobStatus, State
from outlast.kubernetes import api
from outlast.kubernetes.api import dropins, kinds, pod_status
from outlast.kubernetes.jobs import evaluation, fault_injection, job_status
from outlast.kubernetes.jobs import logs as podlogs
from outlast.kubernetes.jobs.job_documents import KINDS, WORKERS, Workloads, job_name
from outlast.kubernetes.jobs.submission import Submission
from outlast.storage.runs import output as stored

if TYPE_CHECKING:
    from outlast.job.ledger import Events
    from outlast.job.spec import Job

Document = api.Document

_AGENT_POLL_S = 5.0
"""Interval between queries of the agents while logs are followed, in seconds."""


class KubernetesBackend:
    """The backend for the jobs in one namespace. It submits jobs with this topology, and calls `say` with a sentence about where
    code is shipped. `list` returns only jobs that `selector` matches, and searches all namespaces if `everywhere` is true."""

    poll_s = 2.0

    def __init__(
        self,
        cluster: api.Cluster,
        *,
        topology: str = "elasticjob",
        say: Callable[[str], None] = lambda _: None,
        everywhere: bool = False,
        selector: str = "",
    ) -> None:
        self.cluster = cluster
        self.everywhere, self.selector = everywhere, selector
        self.workloads = Workloads(cluster)
        self.submission = Submission(self.workloads, topology, say)
        self.notices: list[str] = []

    # Reading jobs

    def list(self) -> Sequence[JobStatus]:
        """Return the jobs, oldest first. Agents are not queried, so a job's step is the one that the operator last recorded."""
        by_name: dict[tuple[str, str], list[Document]] = {}
        for workload in self.workloads.list_(everywhere=self.everywhere, selector=self.selector):
            by_name.setdefault((workload["metadata"].get("namespace", ""), job_name(workload)), []).append(workload)
        pods: dict[str, list[Document]] = {}
        labels = f"{Label.JOB},{WORKERS}"
        for pod in self.cluster.list_(kinds.POD, everywhere=self.everywhere, labels=labels) if by_name else ():
            pods.setdefault(pod["metadata"].get("namespace", ""), []).append(pod)
        statuses = [
            job_status.status(self.workloads.snapshot(name, each, pods.get(namespace, ()), query_agents=False))
            for (namespace, name), each in by_name.items()
        ]
        return sorted(statuses, key=lambda status: status.submitted)

    def status(self, name: str) -> JobStatus:
        """Return a job's status, with the current step from its agents."""
        return self.workloads.status(name)

    def output(self, name: str) -> str:
        return self.workloads.recorded(name).output

    def events(self, name: str) -> Events:
        """Return the events of the ledger in the job's store, and events that only the cluster has recorded. Raises NotFound if
        the job has no store."""
        workloads = self.workloads.existing(name)
        status = job_status.status(self.workloads.snapshot(name, workloads, (), query_agents=False))
        if not status.store:
            raise NotFound(f"the ledger of {name} is in its pods only; give the job an output in a store to read it from here")
        from outlast.storage import store

        return stored.events(store.open_(status.store.url)).merged(job_status.cluster_events(workloads[0], status))

    def metrics(self, name: str) -> Iterator[bytes]:
        if "://" in (url := self.output(name)):
            from outlast.storage import store

            yield from stored.metrics(store.open_(url))

    def job_file(self, name: str) -> str:
        """Return the job file without secrets; empty if it cannot be read."""
        from outlast.job import spec

        job = self.workloads.job(self.workloads.existing(name)[0])
        return spec.dump(spec.without_secrets(job)) if job else ""

    def pods(self, name: str) -> Sequence[Document]:
        """Return a job's worker pods, sorted by index."""
        self.workloads.existing(name)
        return sorted(self.workloads.pods(name), key=lambda pod: (pod_status.index(pod), pod_status.created_at(pod)))

    def pod(self, name: str, worker: int) -> Document:
        """Return a worker's running pod. Raises NotFound if there is none."""
        candidates = [pod for pod in self.pods(name) if pod_status.index(pod) == worker]
        running = [pod for pod in candidates if pod_status.running(pod)]
        if running:
            return running[-1]
        if candidates:
            end = pod_status.end(candidates[-1])
            why = pod_status.waiting_reason(candidates[-1]) or (end.sentence if end else "does not run")
            raise NotFound(f"worker {worker} of {name} does not run: it {why}")
        raise self._unknown_worker(name, worker, self.pods(name))

    def reader(self, name: str) -> Callable[[str, int], bytes]:
        """Return a function that reads a file of the output in rank 0's pod. The function takes the file's path and the offset of
        the first byte to read, and returns no bytes if the file is missing. The image must have a shell and `tail`, and the user
        must have the right to run commands in pods. Raises NotFound if the pod does not run."""
        world = self.status(name).world
        pod = self.pod(name, world[0] if world else 0)
        meta, script = pod["metadata"], 'f="$OUTLAST_OUTPUT/$1"; if [ -f "$f" ]; then exec tail -c "+$2" "$f"; fi'

        def read(path: str, start: int) -> bytes:
            command = ["sh", "-c", script, "sh", path, str(start + 1)]
            ended = self.cluster.exec_(
                meta["name"], command, namespace=meta["namespace"], container=pod_status.container_name(pod)
            )
            if ended.code:
                raise OutlastError(f"{path} cannot be read in pod {meta['name']}: {ended.error_line}")
            return ended.output

        return read

    def logs(
        self,
        name: str,
        *,
        worker: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since_s: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of the workers' pods, or those in the store if no pod has a log. Raises NotFound if there are no
        logs."""

        def selected(pod: Document) -> bool:
            return worker is None or pod_status.index(pod) == worker

        if follow:
            if not (workloads := self.workloads.of(name)):
                if not self.cluster.has_namespace():
                    raise self.workloads.no_namespace()
                say(f"waiting for {name}: there is no such job in namespace {self.cluster.namespace} yet")
                while not (workloads := backoff.until_answered(lambda: self.workloads.of(name), say, every_s=self.poll_s)):
                    time.sleep(self.poll_s)
            all_pods = backoff.until_answered(lambda: self.workloads.pods(name), say, every_s=self.poll_s)
        else:
            workloads, all_pods = self.workloads.existing(name), self.workloads.pods(name)
        selected_pods = [pod for pod in all_pods if selected(pod)]
        began = any(pod_status.has_started(pod) for pod in selected_pods)
        if follow and (began or job_status.final_state(workloads[0]) is None):
            poll = _JobPoll(self.workloads, name)
            follower = podlogs.Follower(
                self.cluster,
                f"{Label.JOB}={name},{WORKERS}",
                poll.is_over,
                selected=selected,
                is_finished=poll.finished_pods.__contains__,
                no_pods_reason=poll.no_pods_reason,
                tail=tail,
                since_s=since_s,
                say=say,
            )
            yield from follower.lines()
        elif began:
            yield from podlogs.merge(self.cluster, selected_pods, tail=tail, since_s=since_s, say=say)
        elif url := self.workloads.store_url(name):
            say(f"no pod of {name} has a log; these lines are from {url}")
            yield from stored.logs(url, worker=worker, tail=tail)
        elif selected_pods:
            raise NotFound(
                f"worker {pod_status.index(selected_pods[0])} of {name} has no log yet: it "
                f"{pod_status.waiting_reason(selected_pods[0])}; wait with -f"
            )
        elif all_pods and worker is not None:
            raise self._unknown_worker(name, worker, all_pods)
        else:
            raise NotFound(f"{name} has no pods now, and its output is in no store: there are no logs to be had")

    # Changing jobs

    def submit(
        self,
        job: Job,
        *,
        source: Path,
        chaos: Path | None = None,
        fresh: bool = False,
        take_over: bool = False,
        command: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Apply a job's documents, and return the run's id. With `fresh`, an existing job is ended first. Raises AlreadyRunning
        if a job of this name is already running from another file."""
        if chaos is not None:
            raise OutlastError(f"`outlast submit` carries out no schedule of faults; submit, then: outlast chaos NAME {chaos}")
        for sentence in self.submission.apply(job, source=source, fresh=fresh, take_over=take_over):
            say(sentence)
        workload = self.workloads.of(job.metadata.name)[0]
        return str((workload["metadata"].get("labels") or {}).get(Label.RUN, workload["metadata"]["name"]))

    def ensure(self, name: str) -> bool:
        """Return False, because controllers in the cluster drive the job. Raises NotFound."""
        self.workloads.existing(name)
        return False

    def scale(self, name: str, replicas: int) -> None:
        workload, kind, title = self.workloads.active(name)
        low, high = self.workloads.size_range(workload) or (1, replicas)
        if not replicas and kind not in dropins.ELASTIC_JOBS:
            raise OutlastError(f"0 workers train nothing; outlast suspend {name} saves, and holds the job until outlast resume")
        if replicas and not low <= replicas <= high:
            raise OutlastError(
                f"{replicas} workers are not between workers.min ({low}) and max ({high}) of {name}; choose another"
            )
        if kind in dropins.KINDS:
            self.workloads.set_replicas(kind, title, None, replicas)
        elif kind is kinds.STATEFUL_SET and job_status.is_suspended(workload):
            self.cluster.patch(kind, title, {"metadata": {"annotations": {job_status.REPLICAS: str(replicas)}}})
        elif kind in (kinds.ELASTIC_JOB, kinds.STATEFUL_SET):
            self.cluster.patch(kind, title, {"spec": {"replicas": replicas}}, subresource="scale")
        elif workload["spec"].get("completionMode") == "Indexed":
            self.cluster.patch(kind, title, {"spec": {"parallelism": replicas, "completions": replicas}})
        else:
            raise OutlastError(f"{name} is one pod (topology job) and cannot be scaled; submit it as indexed-job or elasticjob")

    def steer(self, name: str, verb: str) -> None:
        """Call the method that `verb` names, except that `interrupt` calls `suspend`."""
        getattr(self, "suspend" if verb == "interrupt" else verb)(name)

    def suspend(self, name: str) -> None:
        """Suspend a job until `resume`. The workers save their state before their pods are deleted."""
        self.workloads.set_suspended(self.workloads.active(name)[0], True)

    def resume(self, name: str) -> None:
        workload, kind, _ = self.workloads.active(name)
        if not job_status.is_suspended(workload):
            raise OutlastError(
                f"{name} is not suspended ({self.status(name).state}); outlast status {name} shows where it stands"
            )
        if kind is kinds.ELASTIC_JOB and not workload["spec"].get("suspend"):
            low, _ = self.workloads.size_range(workload) or (1, 1)
            raise OutlastError(f"{name} is to have 0 workers, which suspends it; go on with: outlast scale {name} {low}")
        self.workloads.set_suspended(workload, False)

    def cancel(self, name: str) -> None:
        """End the job for good. Its claims and output are kept."""
        self.workloads.remove(name, grace_s=None)

    def kill(self, name: str) -> None:
        """End the job at once, without saving."""
        self.workloads.remove(name, grace_s=0)

    def forget(self, name: str, *, output: bool = False) -> None:
        """Remove an ended job's objects. Raises OutlastError if the job has not ended."""
        if output:
            raise OutlastError("--output is for jobs of this machine; outlast forget URL removes one in a store")
        if not (status := self.status(name)).state.final:
            raise not_ended(status)
        self.cancel(name)

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        """Inject a fault into the pod of this worker, or of a random worker if `worker` is None; see `fault_injection`."""
        faults.check(action)
        if worker is not None:
            return fault_injection.inject(self.cluster, self.pod(name, worker), action, rng)
        running = [pod for pod in self.pods(name) if pod_status.running(pod) and not pod_status.terminating(pod)]
        if not running:
            raise NotFound(f"{name} has no running worker; wait until it runs")
        return fault_injection.inject(self.cluster, rng.choice(running), action, rng)

    def evaluate(
        self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda line: print(line.text, flush=True)
    ) -> int:
        """Run the job's module with `--evaluate` in a separate pod, show the pod's log, and return its exit code."""
        return evaluation.evaluate(self.workloads, name, args, show=show)

    # Internal

    def _unknown_worker(self, name: str, worker: int, workers: Sequence[Document]) -> NotFound:
        indices = ", ".join(str(index) for index in sorted({pod_status.index(pod) for pod in workers}))
        return NotFound(f"{name} has no worker {worker}; {f'there are {indices}' if indices else 'it has no pods now'}")


class _JobPoll:
    """Polls whether a job is over, with few requests to the cluster."""

    def __init__(self, workloads: Workloads, name: str) -> None:
        self._workloads, self._name = workloads, name
        self._kinds: Sequence[kinds.Kind] = KINDS
        self._queried_at = -_AGENT_POLL_S
        self._workload: Document = {}
        self.finished_pods: set[str] = set()
        """Names of a StatefulSet's pods whose workers have ended. Such pods keep running."""

    def is_over(self) -> bool:
        """Return whether the job's log is complete. It may still grow if the job is resumed or submitted again."""
        workloads = self._workloads.of(self._name, self._kinds) or self._workloads.of(self._name)
        if not workloads or job_status.final_state(workloads[0]) is not None:
            return True
        self._workload, self._kinds = workloads[0], [kinds.kind_of(workloads[0])]
        if job_status.is_suspended(workloads[0]):
            return not any(pod_status.running(pod) for pod in self._workloads.pods(self._name))
        if self._kinds != [kinds.STATEFUL_SET] or time.monotonic() - self._queried_at < _AGENT_POLL_S:
            return False
        status = self._workloads.status(self._name)
        self._queried_at = time.monotonic()
        self.finished_pods.update(worker.pod for worker in status.workers if worker.state in ("done", "failed"))
        return status.state in (State.SUCCEEDED, State.FAILED)

    def no_pods_reason(self) -> str:
        return job_status.status(self._workloads.snapshot(self._name, [self._workload], (), query_agents=False)).reason
