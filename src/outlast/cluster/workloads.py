"""The documents of jobs on a cluster: the workload of each, its pods, its job file, and what was created beside it.

A job is the newest workload (ElasticJob, Job, StatefulSet, Job of Volcano) that carries its name; `name` is always that of the
job file. Nothing is remembered here: any machine with the right to it may steer any job.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from outlast import kube
from outlast.cluster import job_status
from outlast.contract import Label
from outlast.errors import Absent, Forbidden, NotFound, NotServed, OutlastError, Unanswered
from outlast.kube import dropins, ownership
from outlast.manifests import evaluation
from outlast.status import State

if TYPE_CHECKING:
    from outlast.spec import Job

Document = kube.Document

KINDS = (kube.ELASTIC_JOB, kube.LEGACY_JOB, kube.JOB, kube.STATEFUL_SET, kube.VOLCANO_JOB)
"""Kinds of workloads that a job can be made as."""
BESIDE = (kube.CONFIG_MAP, kube.SERVICE, kube.POD_GROUP, kube.VOLCANO_GROUP)
"""Kinds of documents that are created beside a workload and go with it. Claims stay: they hold data and output."""
NAMED = (kube.ELASTIC_JOB, kube.LEGACY_JOB)
"""Kinds of workloads that have the name of their job; the others carry its label."""
_WORKER = "app.kubernetes.io/component=worker"
WORKERS = f"app.kubernetes.io/component!={evaluation.COMPONENT}"
"""Selects the workers among the pods with a job's label. Pods of `elastic.pytorch.org` have the labels of their template."""


class Workloads:
    """The documents of the jobs in one namespace."""

    def __init__(self, cluster: kube.Cluster) -> None:
        self.cluster = cluster
        self._unserved: set[kube.Kind] = set()

    def list_(self, name: str = "", kinds: Sequence[kube.Kind] = KINDS) -> list[Document]:
        """The workloads of one job, or of all jobs."""
        found: list[Document] = []
        denied: dict[kube.Kind, Forbidden] = {}
        listed = 0
        for kind in kinds:
            if kind in self._unserved:
                continue
            try:  # a user who may create only some of these kinds has jobs of those kinds only
                if kind in NAMED:
                    fields = f"metadata.name={name}" if name else ""
                    found += self.cluster.list_(kind, fields=fields)
                else:
                    found += self.cluster.list_(kind, labels=f"{Label.JOB}{f'={name}' if name else ''},{_WORKER}")
                listed += 1
            except NotServed:
                self._unserved.add(kind)
            except Forbidden as error:
                denied[kind] = error
        if denied and not listed:
            raise denied.get(kube.JOB) or next(iter(denied.values()))
        return found

    def of(self, name: str, kinds: Sequence[kube.Kind] = KINDS) -> list[Document]:
        """The workloads of a job, the newest first."""
        return sorted(self.list_(name, kinds), key=lambda each: each["metadata"]["creationTimestamp"], reverse=True)

    def known(self, name: str) -> list[Document]:
        if found := self.of(name):
            return found
        here = self.cluster.namespace
        if not self.cluster.has_namespace():
            raise self.nowhere()
        known = ", ".join(sorted({job_name(workload) for workload in self.list_()}))
        raise NotFound(
            f"there is no job {name} in namespace {here} of {self.cluster.context}; "
            + (f"there are {known}" if known else "there is none at all; choose another with -n, or submit one")
        )

    def nowhere(self) -> Absent:
        """The error that its namespace does not exist."""
        here, there = self.cluster.namespace, self.cluster.context
        return Absent(f"there is no namespace {here} in {there}; create it, or choose another with -n")

    def active(self, name: str) -> tuple[Document, kube.Kind, str]:
        """The current workload of a job that has not ended. Raises OutlastError for one that has."""
        workload = self.known(name)[0]
        if (state := job_status.over(workload)) is not None:
            more = "goes on with it" if state is State.FAILED else "--fresh runs it again"
            raise OutlastError(f"{name} has ended ({state}); outlast submit FILE {more}")
        return workload, kube.kind_of(workload), workload["metadata"]["name"]

    def pods(self, name: str) -> list[Document]:
        return self.cluster.list_(kube.POD, labels=f"{Label.JOB}={name},{WORKERS}")

    def own_pods(self, workload: Document) -> list[Document]:
        return [pod for pod in self.pods(job_name(workload)) if part_of(pod, workload)]

    def job(self, workload: Document) -> Job | None:
        """The job file of a workload, as its pods read it; None when we may not read it, or it is of another version."""
        from outlast import spec

        try:
            if workload["kind"] == "ElasticJob":
                meta = {"name": workload["metadata"]["name"]}
                text = json.dumps({**{k: workload[k] for k in ("apiVersion", "kind", "spec")}, "metadata": meta})
                return spec.parse(text)
            tasks = workload["spec"].get("tasks") or [workload["spec"]]
            volumes = tasks[0]["template"]["spec"].get("volumes") or ()
            name = next((v["configMap"]["name"] for v in volumes if v["name"] == "config" and "configMap" in v), "")
            return spec.parse(self.cluster.get(kube.CONFIG_MAP, name)["data"]["job.yaml"]) if name else None
        except (OutlastError, KeyError):
            return None

    def allowed(self, workload: Document) -> tuple[int, int] | None:
        if (drop_in := dropins.of(workload)) is not None:
            low, _, high = drop_in.sizes(workload)
            return low, high
        job = self.job(workload)
        return sizes(job) if job else None

    def adopt(self, document: Document, workload: Document) -> None:
        """Make a workload an owner of a document beside it, which is deleted with the last of its owners."""
        meta, uid = document["metadata"], workload["metadata"]["uid"]
        owners = meta.get("ownerReferences") or []
        if uid not in [owner["uid"] for owner in owners]:
            named = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": workload["metadata"]["name"]}
            change = {"metadata": {"ownerReferences": [*owners, {**named, "uid": uid}]}}
            self.cluster.patch(kube.kind_of(document), meta["name"], change, namespace=meta.get("namespace"))

    def remove(self, name: str, *, grace_s: float | None) -> None:
        workloads, beside = self.of(name), list(self.beside(name))
        for workload in workloads or (() if beside else self.known(name)):
            self.delete(kube.kind_of(workload), workload, grace_s=grace_s)
        for kind, document in beside:
            with contextlib.suppress(Absent):
                self.cluster.delete(kind, document["metadata"]["name"], uid=document["metadata"]["uid"])

    def beside(self, name: str) -> Iterator[tuple[kube.Kind, Document]]:
        """The documents beside the workloads of a job, which may outlive them."""
        component = f"app.kubernetes.io/component={evaluation.COMPONENT}"
        for kind, labels in [*((kind, "") for kind in BESIDE), (kube.JOB, f",{component}")]:
            with contextlib.suppress(NotServed, Forbidden):
                for document in self.cluster.list_(kind, labels=f"{Label.JOB}={name}{labels}"):
                    yield kind, document

    def delete(self, kind: kube.Kind, workload: Document, *, grace_s: float | None) -> None:
        meta = workload["metadata"]
        with contextlib.suppress(Absent):
            self.cluster.delete(kind, meta["name"], uid=meta["uid"])
        if grace_s is not None:
            for pod in self.pods(job_name(workload)):
                with contextlib.suppress(Absent):
                    self.cluster.delete(kube.POD, pod["metadata"]["name"], grace_s=grace_s)

    def wait_until_gone(self, kind: kube.Kind, workload: Document) -> None:
        """Wait until a workload and its pods are gone, for at most their grace period and a minute."""
        meta = workload["metadata"]
        deadline = (
            time.monotonic()
            + 60
            + max((p["spec"].get("terminationGracePeriodSeconds", 30) for p in self.own_pods(workload)), default=0)
        )
        while time.monotonic() < deadline:
            try:
                same = self.cluster.get(kind, meta["name"])["metadata"]["uid"] == meta["uid"]
            except Absent:
                same = False
            if not same and not self.own_pods(workload):
                return
            time.sleep(1)
        title, remedy = f"{workload['kind']} {meta['name']}", f"outlast status {job_name(workload)}"
        raise Unanswered(f"{title} was deleted and is still there; look at it with: {remedy}")


def workload_in(documents: Sequence[Document]) -> Document:
    """The workload among the documents of a job."""
    return next(document for document in documents if kube.kind_of(document) in KINDS)


def has_claim(workload: Document) -> bool:
    """Whether the workload's pods have a claim, where the output may be."""
    spec = workload["spec"]
    if workload["kind"] == "ElasticJob":
        return bool(spec.get("volumes"))
    volumes = (spec.get("tasks") or [spec])[0]["template"]["spec"].get("volumes") or ()
    return any("persistentVolumeClaim" in volume for volume in volumes)


def sizes(job: Job) -> tuple[int, int]:
    """The fewest and the most workers that a job may have."""
    allowed = job.spec.workers.allowed()
    return allowed[0], allowed[-1]


def job_name(workload: Document) -> str:
    """The name of the job that a workload is."""
    return str((workload["metadata"].get("labels") or {}).get(Label.JOB) or workload["metadata"]["name"])


def part_of(pod: Document, workload: Document) -> bool:
    """Whether a pod is one of this workload's."""
    return not ownership.owners(pod) or ownership.owned_by(pod, workload)
