"""Reads, changes and deletes jobs' objects in a cluster: workloads, pods, job files, and objects created along with a workload.

A job is represented by the newest workload (ElasticJob, Job or StatefulSet) with the name in the job file.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from outlast.base.errors import Absent, ClusterError, Forbidden, NotFound, NotServed, OutlastError, Unanswered
from outlast.job.contract import Label, Pod
from outlast.job.status import JobStatus, State
from outlast.kubernetes import api
from outlast.kubernetes.api import dropins, kinds, owner_references, pod_status, workload_template
from outlast.kubernetes.jobs import job_status
from outlast.kubernetes.manifests import evaluation_job

if TYPE_CHECKING:
    from outlast.job.spec import Job

Document = api.Document

KINDS = (*dropins.ELASTIC_JOBS, kinds.JOB, kinds.STATEFUL_SET)
COMPANIONS = (kinds.CONFIG_MAP, kinds.SERVICE, kinds.POD_GROUP, kinds.VOLCANO_GROUP)
"""Kinds of objects that are created and deleted with a workload. Claims are kept, because they hold data."""
_WORKER = "app.kubernetes.io/component=worker"
WORKERS = f"app.kubernetes.io/component!={evaluation_job.COMPONENT}"
"""Label selector for workers. It excludes evaluations instead of requiring a worker's labels, because the pods of a drop-in have
only the labels of their template."""
_AGENT_TIMEOUT_S = 3.0
_MAX_CONCURRENT = 16


class Workloads:
    """The workloads, pods and other objects of the jobs in one namespace."""

    def __init__(self, cluster: api.Cluster) -> None:
        self.cluster = cluster
        self._unserved: set[kinds.Kind] = set()

    def list_(
        self, name: str = "", of_kinds: Sequence[kinds.Kind] = KINDS, *, everywhere: bool = False, selector: str = ""
    ) -> list[Document]:
        """Return the workloads of one job or of all jobs. Raises Forbidden if no kind may be listed."""
        workloads: list[Document] = []
        denied: dict[kinds.Kind, Forbidden] = {}
        listed = 0
        for kind in of_kinds:
            if kind in self._unserved:
                continue
            try:  # a user who may create only some of these kinds has jobs of those kinds only
                if kind in dropins.ELASTIC_JOBS:
                    fields, own = f"metadata.name={name}" if name else "", ""
                else:
                    fields, own = "", f"{Label.JOB}{f'={name}' if name else ''},{_WORKER}"
                labels = ",".join(filter(None, (own, selector)))
                workloads += self.cluster.list_(kind, everywhere=everywhere, labels=labels, fields=fields)
                listed += 1
            except NotServed:
                self._unserved.add(kind)
            except Forbidden as error:
                denied[kind] = error
        if denied and not listed:
            raise denied.get(kinds.JOB) or next(iter(denied.values()))
        return workloads

    def of(self, name: str, of_kinds: Sequence[kinds.Kind] = KINDS) -> list[Document]:
        """Return a job's workloads, newest first."""
        return sorted(self.list_(name, of_kinds), key=lambda each: each["metadata"]["creationTimestamp"], reverse=True)

    def existing(self, name: str) -> list[Document]:
        if workloads := self.of(name):
            return workloads
        namespace = self.cluster.namespace
        if not self.cluster.has_namespace():
            raise self.no_namespace()
        existing = ", ".join(sorted({job_name(workload) for workload in self.list_()}))
        raise NotFound(
            f"there is no job {name} in namespace {namespace} of {self.cluster.context}; "
            + (f"there are {existing}" if existing else "there is none at all; choose another with -n, or submit one")
        )

    def no_namespace(self) -> Absent:
        """Return the error for a namespace that does not exist."""
        namespace, context = self.cluster.namespace, self.cluster.context
        instead = f"create it (kubectl create namespace {namespace}), or choose another with -n"
        return Absent(f"there is no namespace {namespace} in {context}; {instead}")

    def active(self, name: str) -> tuple[Document, kinds.Kind, str]:
        """Return a job's current workload. Raises OutlastError if the job has ended."""
        workload = self.existing(name)[0]
        if (state := job_status.final_state(workload)) is not None:
            more = "goes on with it" if state is State.FAILED else "--fresh runs it again"
            raise OutlastError(f"{name} has ended ({state}); outlast submit FILE {more}")
        return workload, kinds.kind_of(workload), workload["metadata"]["name"]

    def pods(self, name: str) -> list[Document]:
        return self.cluster.list_(kinds.POD, labels=f"{Label.JOB}={name},{WORKERS}")

    def own_pods(self, workload: Document) -> list[Document]:
        return [pod for pod in self.pods(job_name(workload)) if belongs_to(pod, workload)]

    def job(self, workload: Document) -> Job | None:
        """Return the job file that a workload's pods read; None if it cannot be read."""
        from outlast.job import spec

        try:
            if workload["kind"] == "ElasticJob":
                meta = {"name": workload["metadata"]["name"]}
                text = json.dumps({**{k: workload[k] for k in ("apiVersion", "kind", "spec")}, "metadata": meta})
                return spec.parse(text)
            volumes = workload_template.template(workload)["spec"].get("volumes") or ()
            name = next((v["configMap"]["name"] for v in volumes if v["name"] == "config" and "configMap" in v), "")
            return spec.parse(self.cluster.get(kinds.CONFIG_MAP, name)["data"]["job.yaml"]) if name else None
        except (OutlastError, KeyError):
            return None

    def size_range(self, workload: Document) -> tuple[int, int] | None:
        if (drop_in := dropins.of(workload)) is not None:
            low, _, high = drop_in.sizes(workload)
            return low, high
        job = self.job(workload)
        return job_sizes(job) if job else None

    def status(self, name: str) -> JobStatus:
        """Return a job's status, with the current step from its agents."""
        return job_status.status(self.snapshot(name, self.existing(name), self.pods(name), query_agents=True))

    def recorded(self, name: str) -> JobStatus:
        """Return a job's status from its workload alone."""
        return job_status.status(self.snapshot(name, self.existing(name), (), query_agents=False))

    def store_url(self, name: str) -> str:
        """Return the URL of a job's output; empty if the output is not in a store."""
        stored = self.recorded(name).store
        return stored.url if stored else ""

    def snapshot(
        self, name: str, workloads: Sequence[Document], documents: Sequence[Document], *, query_agents: bool
    ) -> job_status.Snapshot:
        """Return a snapshot of a job's newest workload and that workload's pods. With `query_agents`, the snapshot contains the
        agents' metrics."""
        current = max(workloads, key=lambda each: each["metadata"]["creationTimestamp"])
        own = [
            pod for pod in documents if (pod["metadata"].get("labels") or {}).get(Label.JOB) == name and belongs_to(pod, current)
        ]
        metrics, unknown = self._metrics(own) if query_agents and not dropins.has(current) else ({}, "")
        processes, allowed_sizes = 1, None
        if (drop_in := dropins.of(current)) is not None:
            low, _, high = drop_in.sizes(current)
            processes, allowed_sizes = drop_in.processes(current), (low, high)
        elif (query_agents or current["kind"] == "ElasticJob") and (job := self.job(current)):
            processes, allowed_sizes = job.spec.processes(), job_sizes(job)
        return job_status.Snapshot(name, current, own, metrics, allowed_sizes, processes, unknown, time.time())

    def _metrics(self, documents: Sequence[Document]) -> tuple[Mapping[str, job_status.Metrics], str]:
        """Return the agents' metrics, keyed by pod name, and an error message if access was denied."""
        names = [pod["metadata"]["name"] for pod in documents if pod_status.running(pod)]

        def query(name: str) -> job_status.Metrics | ClusterError:
            try:
                return job_status.metrics(self.cluster.proxy(name, Pod.PROBE_PORT, "/metrics", timeout_s=_AGENT_TIMEOUT_S))
            except ClusterError as error:
                return error

        if not names:
            return {}, ""
        with ThreadPoolExecutor(min(_MAX_CONCURRENT, len(names))) as pool:
            answers = dict(zip(names, pool.map(query, names), strict=True))
        denied = next((str(answer) for answer in answers.values() if isinstance(answer, Forbidden)), "")
        return {name: answer for name, answer in answers.items() if not isinstance(answer, ClusterError)}, denied

    def set_suspended(self, workload: Document, value: bool) -> None:
        """Suspend or resume a workload in the way its kind requires."""
        kind, title = kinds.kind_of(workload), workload["metadata"]["name"]
        if kind not in (kinds.STATEFUL_SET, *dropins.KINDS):
            self.cluster.patch(kind, title, {"spec": {"suspend": value}})
        elif not value:
            annotation = (workload["metadata"].get("annotations") or {}).get(job_status.REPLICAS)
            self.set_replicas(kind, title, None, int(annotation or (self.size_range(workload) or (1, 1))[1]))
        elif not job_status.is_suspended(workload):
            drop_in = dropins.of(workload)
            now = drop_in.sizes(workload)[1] if drop_in else workload["spec"].get("replicas", 1)
            self.set_replicas(kind, title, str(now), 0)

    def set_replicas(self, kind: kinds.Kind, title: str, former: str | None, replicas: int) -> None:
        """Set the number of pods of a workload whose kind has no field for suspension, and record `former` in an annotation."""
        drop_in = dropins.of({"apiVersion": kind.api_version, "kind": kind.kind})
        spec = drop_in.scale_patch(replicas) if drop_in else {"replicas": replicas}
        self.cluster.patch(kind, title, {"metadata": {"annotations": {job_status.REPLICAS: former}}, "spec": spec})

    def adopt(self, document: Document, workload: Document) -> None:
        """Make a workload an owner of an object, so that the object is deleted with its last owner."""
        meta, uid = document["metadata"], workload["metadata"]["uid"]
        owners = meta.get("ownerReferences") or []
        if uid not in [owner["uid"] for owner in owners]:
            owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": workload["metadata"]["name"]}
            change = {"metadata": {"ownerReferences": [*owners, {**owner, "uid": uid}]}}
            self.cluster.patch(kinds.kind_of(document), meta["name"], change, namespace=meta.get("namespace"))

    def remove(self, name: str, *, grace_s: float | None) -> None:
        workloads, companions = self.of(name), list(self.companions(name))
        for workload in workloads or (() if companions else self.existing(name)):
            self.delete(kinds.kind_of(workload), workload, grace_s=grace_s)
        for kind, document in companions:
            with contextlib.suppress(Absent):
                self.cluster.delete(kind, document["metadata"]["name"], uid=document["metadata"]["uid"])

    def companions(self, name: str) -> Iterator[tuple[kinds.Kind, Document]]:
        """Yield the kind and the document of each object that was created along with a job's workloads and may outlive them."""
        component = f"app.kubernetes.io/component={evaluation_job.COMPONENT}"
        for kind, labels in [*((kind, "") for kind in COMPANIONS), (kinds.JOB, f",{component}")]:
            with contextlib.suppress(NotServed, Forbidden):
                for document in self.cluster.list_(kind, labels=f"{Label.JOB}={name}{labels}"):
                    yield kind, document

    def delete(self, kind: kinds.Kind, workload: Document, *, grace_s: float | None) -> None:
        meta = workload["metadata"]
        with contextlib.suppress(Absent):
            self.cluster.delete(kind, meta["name"], uid=meta["uid"])
        if grace_s is not None:
            for pod in self.pods(job_name(workload)):
                with contextlib.suppress(Absent):
                    self.cluster.delete(kinds.POD, pod["metadata"]["name"], grace_s=grace_s)

    def wait_until_gone(self, kind: kinds.Kind, workload: Document) -> None:
        """Wait until a workload and its pods are gone. Raises Unanswered if they still exist a minute after the grace period."""
        meta = workload["metadata"]
        graces = (pod["spec"].get("terminationGracePeriodSeconds", 30) for pod in self.own_pods(workload))
        deadline = time.monotonic() + 60 + max(graces, default=0)
        while time.monotonic() < deadline:
            current = self.cluster.find(kind, meta["name"])
            if (current is None or current["metadata"]["uid"] != meta["uid"]) and not self.own_pods(workload):
                return
            time.sleep(1)
        title, remedy = f"{workload['kind']} {meta['name']}", f"outlast status {job_name(workload)}"
        raise Unanswered(f"{title} was deleted and is still there; look at it with: {remedy}")


def workload_in(documents: Sequence[Document]) -> Document:
    """Return the workload among a job's documents."""
    return next(document for document in documents if kinds.kind_of(document) in KINDS)


def has_claim(workload: Document) -> bool:
    """Return whether a workload's pods mount a claim, which may hold the output."""
    if workload["kind"] == "ElasticJob":
        return bool(workload["spec"].get("volumes"))
    volumes = workload_template.template(workload)["spec"].get("volumes") or ()
    return any("persistentVolumeClaim" in volume for volume in volumes)


def job_sizes(job: Job) -> tuple[int, int]:
    allowed = job.spec.workers.allowed()
    return allowed[0], allowed[-1]


def job_name(workload: Document) -> str:
    return str((workload["metadata"].get("labels") or {}).get(Label.JOB) or workload["metadata"]["name"])


def belongs_to(pod: Document, workload: Document) -> bool:
    return not owner_references.owners(pod) or owner_references.owned_by(pod, workload)
