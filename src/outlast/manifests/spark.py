"""Preparing data with Spark on Kubernetes: the Job whose pod is Spark's driver, the template of its executors, and their account.

The Job has the labels of a job, so that `outlast list`, `status`, `logs`, `why` and `cancel` know it. Its pod carries Spark's
configuration and the template as annotations, which it reads as files. Executors are made by Spark and owned by that pod.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from outlast import spec
from outlast.contract import Annotation, Env, Exit, Label, Pod
from outlast.errors import OutlastError
from outlast.manifests import dataset, labels, names, pods, rbac, scheduling, spark_conf, variables, volumes
from outlast.manifests.request import Document

IMAGE = "ghcr.io/outlast/outlast:0.1-spark"
"""Outlast with Spark and a Java, without torch."""
ROLE = Label.SPARK_ROLE
EXECUTOR = "executor"
"""Component and role of the executors' pods."""
_TRIES = 6
"""Drivers that may fail; each goes on with what those before have done."""
_UNMESHED = labels.UNMESHED
"""Also as an annotation, which Istio before 1.10 reads."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be prepared where."""

    words: Sequence[str]
    """The command's words behind `outlast data prepare`, without those that only choose where it runs."""
    source: str
    to: str
    """A directory on a claim, or a place in a store."""
    work: str
    """With a store: the directory on a claim where the dataset is made first."""
    job: spec.Job
    """Image, variables, Secrets, volumes, resources, scheduling and template."""
    namespace: str
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The user's configuration of Spark."""

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.job.metadata.name

    @property
    def claims(self) -> list[str]:
        """The claims that driver and executors mount."""
        return list(dict.fromkeys(volume.claim for volume in self.job.spec.volumes))

    @property
    def secrets(self) -> list[str]:
        """The Secrets that driver and executors need."""
        return list(dict.fromkeys(secret.name for secret in self.job.spec.secrets))


def name(to: str) -> str:
    """The name of the job that prepares data in this place."""
    last = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(to.rstrip("/")).name.lower()).strip("-")
    return names.fit(f"prepare-{last or 'data'}", names.LONGEST - 6)


def described(given: spec.Job | None, title: str, *, image: str, claim: str, secrets: Sequence[str]) -> spec.Job:
    """The job file that describes the pods: the user's, if there is one, with what the options add. Raises OutlastError."""
    if given is None:
        whole: Document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "spec": {"module": "outlast"}}
    else:
        whole = given.model_dump(mode="json", by_alias=True, exclude_unset=True)
    fields = whole["spec"]
    fields["image"] = image or fields.get("image") or IMAGE
    if claim:
        claimed, path = dataset.claimed(claim)
        here = [each for each in fields.get("volumes", ()) if each["to"] != path]
        fields["volumes"] = [*here, {"claim": claimed, "to": path}]
    fields["secrets"] = [*fields.get("secrets", ()), *({"name": each} for each in secrets)]
    job = spec.parse(json.dumps({**whole, "metadata": {**whole.get("metadata", {}), "name": "prepare"}}))
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": title})})


def check_places(wanted: Wanted) -> None:
    """Raise OutlastError where driver and executors would not find the source, or not keep what they write."""
    mounted = [(volume.to, volume.read_only) for volume in wanted.job.spec.volumes]
    if not mounted:
        raise OutlastError(
            "on Kubernetes the source and the work have to be on a volume that driver and executors mount; "
            "give --claim NAME:/PATH, or volumes in a job file (--job FILE)"
        )
    writes = wanted.work if "://" in wanted.to else wanted.to
    if not writes:
        raise OutlastError(f"--to {wanted.to} is in a store; give --work DIRECTORY on a claim, where it is made first")
    option = "--work" if "://" in wanted.to else "--to"
    for word, path, write in (("SOURCE", wanted.source, False), (option, writes, True)):
        above = (PurePosixPath(path), *PurePosixPath(path).parents)
        on = [read_only for to, read_only in mounted if PurePosixPath(to) in above]
        places = ", ".join(to for to, _ in mounted)
        if not on:
            raise OutlastError(
                f"{word} {path} is not on a claim of driver and executors, which are at {places}; give a path there"
            )
        if write and all(on):
            raise OutlastError(f"{option} {path} is on a claim that is mounted read-only; give a path on another one")


def documents(wanted: Wanted) -> list[Document]:
    """Account, Role, RoleBinding and Job. Raises OutlastError."""
    return [*account(wanted.namespace), job(wanted)]


def account(namespace: str) -> list[Document]:
    """The account of all drivers of a namespace, with exactly the rights that Spark 3.5 and 4 use in client mode."""
    meta = {"name": spark_conf.ACCOUNT, "namespace": namespace, "labels": {**_common(), "app.kubernetes.io/component": "spark"}}
    return rbac.spark(meta, spark_conf.ACCOUNT)


def job(wanted: Wanted) -> Document:
    """The Job of the driver. Raises OutlastError for configuration that cannot be, and for places that are on no claim."""
    check_places(wanted)
    fields = wanted.job.spec
    ours = spark_conf.defaults(fields, wanted.conf, wanted.namespace)
    spark_conf.checked(wanted.conf, ours)
    conf = {**ours, **wanted.conf}
    executors = executor(wanted, conf)
    meta = {
        "labels": {
            **_common(),
            **spark_conf.of_pods(wanted.conf, "driver", "label"),
            **labels.selector(wanted.name),
            Label.DATASET: names.fit(wanted.name, 63),
            ROLE: "driver",
        },
        "annotations": {
            **_UNMESHED,
            **spark_conf.of_pods(wanted.conf, "driver", "annotation"),
            Annotation.SPARK_DEFAULTS: spark_conf.text(ours),
            Annotation.SPARK_EXECUTOR: json.dumps(executors, separators=(",", ":")),
        },
    }
    command = ["outlast", "data", "prepare", *wanted.words, "--master", spark_conf.MASTER]
    pod = _pod(wanted, on_demand=True)
    container = pod["containers"][0]
    container["command"] = [variables.literal(word) for word in command]
    container["env"] += [
        *_variables({Env.SPARK_DRIVER: variables.plain("1"), "SPARK_CONF_DIR": variables.plain(Pod.CONFIG)}),
        *_variables({Env.POD: variables.of_field("metadata.name"), Env.ADDRESS: variables.of_field("status.podIP")}),
    ]
    container["resources"] = spark_conf.driver(conf)
    carried = {
        "spark-defaults.conf": Annotation.SPARK_DEFAULTS,
        PurePosixPath(spark_conf.TEMPLATE).name: Annotation.SPARK_EXECUTOR,
    }
    items = [{"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}} for path, key in carried.items()]
    pod["volumes"].append({"name": "config", "downwardAPI": {"items": items}})
    container["volumeMounts"].append({"name": "config", "mountPath": Pod.CONFIG})
    pod |= {"restartPolicy": "Never", "serviceAccountName": spark_conf.ACCOUNT, "automountServiceAccountToken": True}
    made = pods.overlaid(wanted.job, {"metadata": meta, "spec": pod}, {**labels.selector(wanted.name), ROLE: "driver"})
    found = dataset.job(wanted.name, made["metadata"], made["spec"], tries=_TRIES, mistakes=(2, Exit.MISCONFIGURED.value))
    found["metadata"] |= {"namespace": wanted.namespace, "annotations": {Annotation.SPARK_TARGET: wanted.to}}
    return found


def executor(wanted: Wanted, conf: Mapping[str, str]) -> Document:
    """The template of the executors' pods. Spark adds names, owner, variables, a disk for shuffles and the word `executor`."""
    own = {
        "app.kubernetes.io/instance": wanted.name,
        "app.kubernetes.io/component": EXECUTOR,
        Label.JOB: wanted.name,
        ROLE: EXECUTOR,
    }
    pod = _pod(wanted, on_demand=False)
    asks = spark_conf.executor(conf)
    container = pod["containers"][0]
    container["command"] = ["python", "-P", "-m", "outlast.spark_entrypoint"]
    container["resources"] = {"requests": asks.requests, "limits": asks.limits}
    pod |= {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": pods.grace_s(wanted.job.spec),  # the time for decommissioning
        "topologySpreadConstraints": [scheduling.spread({Label.JOB: wanted.name, ROLE: EXECUTOR})],
    }
    of_user = {what: spark_conf.of_pods(wanted.conf, EXECUTOR, what) for what in ("label", "annotation")}
    meta = {
        "labels": {**_common(), **_UNMESHED, **of_user["label"], **own},
        "annotations": {**_UNMESHED, **of_user["annotation"]},
    }
    made = pods.overlaid(wanted.job, {"metadata": meta, "spec": pod}, own)
    return {"apiVersion": "v1", "kind": "Pod", **made}


def executor_of(job: Document) -> Document:
    """The executors' template that a driver's Job carries."""
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    return dict(json.loads(annotations[Annotation.SPARK_EXECUTOR]))


def _common() -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "outlast",
        "app.kubernetes.io/managed-by": "outlast",
        "app.kubernetes.io/part-of": "outlast",
    }


def _pod(wanted: Wanted, *, on_demand: bool) -> Document:
    """What the pods of driver and executors have in common: image, variables, claims, security, scheduling."""
    fields = wanted.job.spec
    scratch = {Pod.CACHE: "cache", Pod.HOME: "home", "/tmp": "tmp"}
    found: dict[str, tuple[Document, Document]] = {
        place: ({"name": title, "emptyDir": {}}, {"name": title, "mountPath": place}) for place, title in scratch.items()
    }
    for place, volume, mount in volumes.users(fields):
        found[place] = volume, {**mount, "mountPath": place}
    own = {Env.CACHE: Pod.CACHE, "HOME": Pod.HOME, "USER": "outlast", "PYTHONUNBUFFERED": "1"}
    secrets = variables.from_secrets(fields)
    container: Document = {
        "name": Pod.CONTAINER,
        "image": fields.image,
        "workingDir": Pod.HOME,
        "env": _variables({**{title: variables.plain(value) for title, value in own.items()}, **variables.own(fields, own)}),
        **({"envFrom": secrets} if secrets else {}),
        "securityContext": volumes.confined(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount for _, mount in found.values()],
    }
    sources = {volume["name"]: volume for volume, _ in found.values()}
    return {
        "enableServiceLinks": False,
        "securityContext": volumes.security(),
        **scheduling.pod(wanted.job, several=False, on_demand=on_demand),
        "containers": [container],
        "volumes": list(sources.values()),
    }


def _variables(sources: Mapping[str, variables.Source]) -> list[Document]:
    return [{"name": title, **source} for title, source in sources.items()]
