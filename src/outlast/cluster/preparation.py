"""Preparing data with Spark on a cluster: the driver's Job is submitted, and the driver learns why it has no executors.

A dry run of a pod shows what the API server would answer: nothing else does, since Spark makes executors itself and writes no
events when they are refused.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from outlast import foreign, kube
from outlast.cluster import job_status
from outlast.cluster.workloads import Workloads
from outlast.contract import Annotation, Label, Pod
from outlast.diagnosis import admission
from outlast.diagnosis.snapshot import Snapshot
from outlast.errors import Absent, ClusterError, Forbidden, OutlastError, Refused, Taken
from outlast.kube import kinds, pods
from outlast.manifests import spark, spark_conf
from outlast.status import State

Document = kube.Document
Say = Callable[[str], None]
_EVERY_S = 15.0
"""Interval at which a driver without executors asks why it has none."""
_IN_PODS = ("kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
"""Names of the API server that lead to the cluster's own in each cluster."""


# ---- on the user's machine


def submit(workloads: Workloads, wanted: spark.Wanted, say: Say) -> str:
    """Create account and Job; returns what was done, as a sentence. A Job that has failed is replaced. Raises OutlastError."""
    cluster, document = workloads.cluster, spark.job(wanted)
    if not cluster.has_namespace():
        raise workloads.nowhere()
    for claim in wanted.claims:
        if cluster.find(kube.CLAIM, claim) is None:
            raise Absent(
                f"there is no claim {claim} in namespace {cluster.namespace}; create it, or choose another (--claim NAME:/PATH)"
            )
    for secret in wanted.secrets:
        with suppress(Forbidden):  # who may not read it finds out when the driver starts
            if cluster.find(kube.SECRET, secret) is None:
                raise Absent(
                    f"there is no Secret {secret} in namespace {cluster.namespace}; create it, or choose another (--secret NAME)"
                )
    there = cluster.find(kube.JOB, wanted.name)
    foreign.check(
        there,
        {Label.SPARK_ROLE: "driver"},
        instead="prepare into a directory of another name, or in another namespace (-n)",
    )
    if there is not None:
        state = job_status.over(there)
        if _same(there, document) and state is None:
            return f"Job {wanted.name} prepares it already"
        if _same(there, document) and state is State.SUCCEEDED:
            return f"already there: Job {wanted.name} has made {wanted.to}; outlast cancel {wanted.name} forgets it"
        if state is None:
            raise OutlastError(
                f"Job {wanted.name} runs with other words, another image or other settings, and makes {_target(there)}; "
                f"wait for its end, or: outlast cancel {wanted.name}"
            )
    ensure_account(cluster, wanted.namespace)
    _try(cluster, document, say)
    if there is not None:
        workloads.delete(kube.JOB, there, grace_s=None)
        workloads.wait_until_gone(kube.JOB, there)
    try:
        cluster.create(document)
    except Taken:  # by the same command, at the same time
        if not _same(cluster.get(kube.JOB, wanted.name), document):
            raise
        return f"Job {wanted.name} prepares it already"
    return f"Job {wanted.name} prepares {wanted.to} with Spark"


def check_master(master: str, cluster: kube.Cluster) -> None:
    """Raise OutlastError if `k8s://URL` is not the cluster of the kubeconfig context."""
    given = master.removeprefix("k8s://")
    asked, known = _address(given), _address(cluster.server)
    if asked is None:
        raise OutlastError(f"--master {master} has no address; write k8s://https://HOST:PORT")
    if asked[1] not in _IN_PODS and asked != known:
        raise OutlastError(
            f"--master {master} is not the cluster of {cluster.context}, which is {cluster.server}; "
            f"give k8s://{cluster.server}, or another --context"
        )


def _address(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; Spark takes https where there is none."""
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname and parts.scheme in ("http", "https") else None


def _target(job: Document) -> str:
    """What a driver's Job makes."""
    return str((job["metadata"].get("annotations") or {}).get(Annotation.SPARK_TARGET, "another dataset"))


def _same(there: Document, document: Document) -> bool:
    """Whether two Jobs run the same command in the same image, with the same configuration, claims, Secrets and variables: the
    template of the executors has these as we wrote them, without what the API server adds."""
    one, other = (each["spec"]["template"] for each in (there, document))
    containers = (each["spec"]["containers"][0] for each in (one, other))
    annotations = (each["metadata"].get("annotations") or {} for each in (one, other))
    keys = ("command", "image", Annotation.SPARK_DEFAULTS, Annotation.SPARK_EXECUTOR)
    mine, theirs = ([(c | a).get(key) for key in keys] for c, a in zip(containers, annotations, strict=True))
    return mine == theirs


def ensure_account(cluster: kube.Cluster, namespace: str) -> None:
    """Create what there is not of the account of drivers, and its rights. Raises Forbidden when somebody else has to."""
    missing: list[str] = []
    known = False
    documents = spark.account(namespace)
    for document in documents:  # before anything is made
        with suppress(Forbidden):
            _there(cluster, document)
    for document in documents:
        kind, name = kube.kind_of(document), document["metadata"]["name"]
        try:
            old = _there(cluster, document)
            if old is None or not _allows(old, document):
                cluster.apply(document)
            known = known or old is not None
        except Forbidden:
            if kind is kinds.SERVICE_ACCOUNT or not known:  # who may not read Roles finds out when the driver runs
                missing.append(f"{kind} {name}")
    if missing:
        raise Forbidden(
            f"you may not create {' and '.join(missing)} in namespace {namespace}, which Spark's driver needs; have an "
            "administrator apply what the same command with --print writes"
        )


def _there(cluster: kube.Cluster, document: Document) -> Document | None:
    """The object of this document's name. Raises OutlastError when it is not ours and does not allow what ours would."""
    old = cluster.find(kube.kind_of(document), document["metadata"]["name"])
    if old is not None and not _allows(old, document):
        foreign.check(
            old,
            instead="it does not allow what Spark's driver needs: have it changed to what the same command with --print writes, "
            "or prepare in another namespace (-n)",
        )
    return old


def _allows(old: Document, wanted: Document) -> bool:
    """Whether a document of the account that exists does what ours would."""
    if old["kind"] == "Role":
        given = _rights(old)
        return all(any(_covers(each, needed) for each in given) for needed in _rights(wanted))
    if old["kind"] == "RoleBinding":
        subjects = [(each.get("kind"), each.get("name")) for each in old.get("subjects") or ()]
        return ("ServiceAccount", spark_conf.ACCOUNT) in subjects
    return True


def _rights(role: Document) -> set[tuple[str, str, str]]:
    rules = role.get("rules") or ()
    return {
        (group, resource, verb)
        for rule in rules
        if not rule.get("resourceNames")
        for group in rule.get("apiGroups") or ()
        for resource in rule.get("resources") or ()
        for verb in rule["verbs"]
    }


def _covers(given: tuple[str, str, str], needed: tuple[str, str, str]) -> bool:
    return all(one in ("*", other) for one, other in zip(given, needed, strict=True))


def _try(cluster: kube.Cluster, document: Document, say: Say) -> None:
    """Raise OutlastError if the API server would never let in the pods of driver or executors; say if it would not now."""
    template = document["spec"]["template"]
    driver = {"apiVersion": "v1", "kind": "Pod", "metadata": dict(template["metadata"]), "spec": template["spec"]}
    for who, pod in (("the driver", driver), ("executors", spark.executor_of(document))):
        try:
            sentence = refused(cluster, pod, who)
        except Forbidden:  # who may create Jobs need not have the right to create pods
            continue
        if sentence:
            say(sentence)


# ---- a dry run


def refused(cluster: kube.Cluster, pod: Document, who: str) -> str:
    """Why the API server would not let in a pod now, as a sentence; empty if it would. `who` has it: `executors`.

    Raises OutlastError if it never would, Forbidden if we may not create pods.
    """
    tried = copy.deepcopy(dict(pod))
    tried["metadata"] = {**tried["metadata"], "name": "outlast-dry-run", "namespace": cluster.namespace}
    try:
        cluster.create(tried, dry_run=True)
    except Refused as error:
        if "does not support dry run" in str(error):  # a webhook of somebody else
            return ""
        cause = admission.refusal(Snapshot("", cluster.namespace), str(error))
        sentence = f"{who} cannot be created now: {cause.what}"
        if admission.may_pass(str(error)):
            return f"{sentence}; {cause.remedy}"
        raise OutlastError(f"{who} cannot be created: {cause.what}; {cause.remedy}") from error
    return ""


# ---- in the driver's pod


@contextmanager
def watched(say: Say) -> Iterator[None]:
    """While Spark works: say why there are no executors, as often as the reason changes. Raises OutlastError before, where it is
    certain that there would never be any."""
    own = kube.connect(None, None, own=True)
    try:
        template = json.loads((Path(Pod.CONFIG) / spark_conf.TEMPLATE).read_text())
        watch = _Watch(own, template, say)
        try:
            watch.look(first=True)
        except Forbidden as error:
            raise OutlastError(
                f"Spark's driver cannot make executors: {error}; submit again, which gives its account the rights"
            ) from error
        thread = threading.Thread(target=watch.run, name="executors", daemon=True)
        thread.start()
        try:
            yield
        except OutlastError as error:
            if said := watch.last_failure():
                raise OutlastError(f"{error}; {said}") from error
            raise
        finally:
            watch.stop.set()
            thread.join()
    finally:
        own.close()


class _Watch:
    """Looks whether a driver has executors."""

    def __init__(self, cluster: kube.Cluster, template: Document, say: Say) -> None:
        self.cluster, self.template, self.say = cluster, template, say
        self.stop = threading.Event()
        self.said = ""

    def run(self) -> None:
        while not self.stop.wait(_EVERY_S):
            try:
                self.look()
            except ClusterError:  # the API server is away; Spark waits for it, too
                continue
            except OutlastError as error:  # what was possible at first has become impossible, and may become possible again
                self.tell(str(error))

    def look(self, *, first: bool = False) -> None:
        """Say why there is none, unless that was said last. Raises OutlastError, Forbidden."""
        found = [] if first else self._executors()
        self.tell(why_none(found) or (refused(self.cluster, self.template, "executors") if not _alive(found) else ""))

    def _executors(self) -> list[Document]:
        job = self.template["metadata"]["labels"][Label.JOB]
        return self.cluster.list_(kube.POD, labels=f"{Label.JOB}={job},{Label.SPARK_ROLE}={spark.EXECUTOR}")

    def last_failure(self) -> str:
        """How the executor that failed last ended; empty if none is there, or nobody says. Spark removes those that it knows of,
        so it is one of those for which it has given up."""
        with suppress(OutlastError):
            ends = [(end, pod) for pod in self._executors() if (end := pods.end(pod)) and end.counted]
            if ends:
                end, pod = max(ends, key=lambda each: each[0].time)
                return f"its executor {pods.name(pod)} {end.sentence} (kubectl logs -n {self.cluster.namespace} {pods.name(pod)})"
        return ""

    def tell(self, sentence: str) -> None:
        if sentence and sentence != self.said:
            self.say(sentence)
        self.said = sentence


def _alive(found: list[Document]) -> list[Document]:
    return [pod for pod in found if pods.phase(pod) in ("Pending", "Running")]


def why_none(found: list[Document]) -> str:
    """Why none of these executors runs; empty if one does, or there is none."""
    alive = _alive(found)
    if not alive or any(pods.running(pod) for pod in alive):
        return ""
    reason = next((reason for pod in alive if (reason := pods.waits(pod))), "")
    return f"no executor runs yet, {len(alive)} wait: the first {reason}" if reason else ""
