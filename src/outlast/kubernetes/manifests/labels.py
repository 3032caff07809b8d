"""Labels of a job's objects. They name the origin, the job, the run and the training settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from outlast.job import contract, spec
from outlast.job.contract import Label
from outlast.kubernetes.manifests import names
from outlast.kubernetes.manifests.render_request import Document, Request, invalid_job

NO_SIDECAR = {"sidecar.istio.io/inject": "false"}
"""Label that keeps Istio from adding a proxy to pods. The proxy would outlive the training and reject other workers' connections.
https://istio.io/latest/docs/setup/additional-setup/sidecar-injection/"""
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_OPTION = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)=(.+)")

_RESERVED = ("job-name", "controller-uid", "controller-revision-hash", "pod-template-hash")
_RESERVED_GROUPS = ("batch.kubernetes.io", "apps.kubernetes.io", "statefulset.kubernetes.io")
"""Prefixes of labels that Kubernetes' controllers set. The API server rejects a Job that sets them to other values.
https://kubernetes.io/docs/reference/labels-annotations-taints/"""

_SECRET = re.compile(r"token|key|secret|passw|credential", re.IGNORECASE)
"""Matches names of arguments that may be secrets, which must not become labels."""


def selector(job: str) -> dict[str, str]:
    """Return the selector for a job's workers. It is the same in all runs, because a workload's selector is immutable."""
    return {"app.kubernetes.io/instance": job, "app.kubernetes.io/component": "worker", Label.JOB: job}


def common(job: spec.Job) -> dict[str, str]:
    """Return the labels of all of a job's objects. Raises InvalidJob if the user's labels are invalid."""
    return {
        **_user_labels(job),
        "app.kubernetes.io/name": "outlast",
        "app.kubernetes.io/instance": job.metadata.name,
        "app.kubernetes.io/managed-by": "outlast",
        "app.kubernetes.io/part-of": "outlast",
        Label.JOB: job.metadata.name,
    }


def worker(request: Request) -> dict[str, str]:
    return {
        **common(request.job),
        "app.kubernetes.io/component": "worker",
        Label.RUN: names.fit(request.run),
        **settings(request.spec.args),
    }


def settings(args: Sequence[str]) -> dict[str, str]:
    """Return the arguments as labels, such as `args.outlast.dev/batch: "128"`, without possible secrets and invalid labels."""
    options = {f"{Label.SETTING}{name}": value for name, value in _options(args) if not _SECRET.search(name)}
    return {name: value for name, value in options.items() if _NAME.fullmatch(name) and _VALUE.fullmatch(value)}


def metadata(request: Request, name: str) -> Document:
    meta: Document = {"name": name}
    if request.job.metadata.namespace:
        meta["namespace"] = request.job.metadata.namespace
    return {**meta, "labels": common(request.job)}


def workload(request: Request, name: str, *, annotations: Mapping[str, str] | None = None) -> Document:
    """Return the metadata of a job's workload, with the user's annotations and Kueue's queue."""
    meta = metadata(request, name)
    meta["labels"] |= {"app.kubernetes.io/component": "worker", Label.RUN: names.fit(request.run), **queue_label(request.spec)}
    if more := {**request.job.metadata.annotations, **(annotations or {})}:
        meta["annotations"] = more
    return meta


def queue_label(fields: spec.Spec) -> dict[str, str]:
    """Return the label that names Kueue's queue (https://kueue.sigs.k8s.io/docs/reference/labels-and-annotations/); empty if
    there is no queue or the queue is Volcano's."""
    if not fields.scheduling.queue or fields.scheduling.gang == "volcano":
        return {}
    return {"kueue.x-k8s.io/queue-name": fields.scheduling.queue}


def _user_labels(job: spec.Job) -> dict[str, str]:
    problems = [
        f'metadata.labels.{name} ("{value}") cannot be a label; '
        f"at most {names.MAX_LENGTH} letters, digits, -, _ and . are allowed"
        for name, value in job.metadata.labels.items()
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value))
    ]
    problems += [
        f"metadata.labels.{name} is set by Outlast itself; remove it"
        for name in job.metadata.labels
        if name.partition("/")[0].endswith(("app.kubernetes.io", contract.GROUP)) and "/" in name
    ]
    problems += [
        f"metadata.labels.{name} is reserved by Kubernetes, which writes it on pods itself; choose another name"
        for name in job.metadata.labels
        if name in _RESERVED or name.partition("/")[0] in _RESERVED_GROUPS
    ]
    if problems:
        raise invalid_job(job, *problems)
    return dict(job.metadata.labels)


def _options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for arg, following in itertools.pairwise([*args, "--"]):
        if found := _OPTION.fullmatch(arg):
            yield found[1], found[2]
        elif re.fullmatch(r"--[A-Za-z][A-Za-z0-9_-]*", arg) and not following.startswith("-"):
            yield arg.removeprefix("--"), following
