"""A notebook in a cluster: one pod with JupyterLab, restarted when it fails, whose home directory is a claim.

    documents(wanted, kubeflow=False)   the claim, a Service, a StatefulSet
    documents(wanted, kubeflow=True)    the claim, a Notebook of Kubeflow, whose controller makes the other two

Both have the same pod, under the same name: `NAME-0`. A StatefulSet never runs two pods of one name, so the claim has one writer,
also when a node is lost. Its token is in a Secret that `secret` makes, and comes as a file.
Docs: docs/guide/notebooks.md.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from outlast import accelerators, units
from outlast.contract import Env, Pod
from outlast.errors import OutlastError
from outlast.kube.kinds import NOTEBOOK
from outlast.manifests import disruption, pods, rbac, scheduling, volumes
from outlast.manifests.request import Document

IMAGE = "ghcr.io/outlast/outlast:0.1-notebook"
IMAGE_CUDA = f"{IMAGE}-cuda"
"""For notebooks with GPUs."""
COMPONENT = "notebook"
"""Value of the label `app.kubernetes.io/component` of a notebook's objects."""
PORT = 8888
"""Kubeflow's."""
HOME = "/home/jovyan"
"""Home and working directory, where Kubeflow mounts the volume of its notebooks, too."""
TOKEN = "token"
"""The key in the Secret."""
TOKEN_DIRECTORY = "/etc/outlast-notebook"
STOPPED = "kubeflow-resource-stopped"
"""Annotation of a Notebook whose pod Kubeflow has removed, because it was idle or somebody stopped it."""
LONGEST = 52
"""Longest name: a StatefulSet's pods have a label with its name and a hash."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class Wanted:
    """A notebook as it is asked for."""

    name: str
    namespace: str
    image: str = ""
    """Default: IMAGE, or IMAGE_CUDA."""
    size: str = "10Gi"
    """Of the claim."""
    storage_class: str = ""
    """Default: the cluster's."""
    shared: bool = False
    """Whether pods on other nodes may mount the claim, too."""
    cpu: float = 1.0
    """Cores that are requested; it may use more."""
    memory: str = "4Gi"
    gpus: int = 0
    accelerator: str = "nvidia"
    account: str = rbac.NOTEBOOK
    secrets: Sequence[str] = ()
    """Names of Secrets whose keys are variables, above all the credentials of a store."""

    @property
    def claim(self) -> str:
        """The name of the claim."""
        return claim_name(self.name)

    @property
    def prefix(self) -> str:
        """The path below which Kubeflow serves it."""
        return prefix(self.namespace, self.name)


def checked(name: str) -> str:
    """The name, if a notebook may have it. Raises OutlastError."""
    if len(name) > LONGEST or not _NAME.fullmatch(name):
        raise OutlastError(
            f"{name} cannot name a notebook; at most {LONGEST} lower-case letters, digits and dashes, a letter first"
        )
    return name


def claim_name(name: str) -> str:
    """The claim of a notebook."""
    return f"{name}-work"


def secret_name(name: str) -> str:
    """The Secret with the token of a notebook."""
    return f"{name}-token"


def pod_name(name: str) -> str:
    """The pod of a notebook."""
    return f"{name}-0"


def prefix(namespace: str, name: str) -> str:
    """The path below which Kubeflow serves a notebook; its controller gives the pod the same as NB_PREFIX."""
    return f"/notebook/{namespace}/{name}"


def selector(name: str) -> dict[str, str]:
    """The labels of a notebook's pod that never change."""
    return {"app.kubernetes.io/instance": name, "app.kubernetes.io/component": COMPONENT}


def documents(wanted: Wanted, *, kubeflow: bool) -> list[Document]:
    """All but the Secret and the account, in the order of creation. Raises OutlastError for values that cannot be."""
    pod = _pod(wanted, wanted.prefix if kubeflow else "")
    if not kubeflow:
        return [_claim(wanted), _service(wanted), _stateful_set(wanted, pod)]
    meta = _meta(wanted, wanted.name)
    meta["labels"]["app"] = wanted.name  # as Kubeflow's own form sets it
    # Kubeflow copies labels and annotations to the pod, except annotations of its own.
    meta["annotations"] = {"notebooks.kubeflow.org/server-type": "jupyter", **disruption.UNDISTURBED}
    spec = {"template": {"spec": pod}}
    return [_claim(wanted), {"apiVersion": NOTEBOOK.api_version, "kind": NOTEBOOK.kind, "metadata": meta, "spec": spec}]


def secret(name: str, namespace: str, token: str) -> Document:
    """The Secret with the token; it never changes."""
    meta: Document = {"name": secret_name(name), "namespace": namespace, "labels": _labels(name)}
    data = {TOKEN: base64.b64encode(token.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "immutable": True, "type": "Opaque", "data": data}


def shared_labels() -> dict[str, str]:
    """Labels of what all notebooks of a namespace have in common."""
    return {
        "app.kubernetes.io/name": "outlast",
        "app.kubernetes.io/component": COMPONENT,
        "app.kubernetes.io/managed-by": "outlast",
        "app.kubernetes.io/part-of": "outlast",
    }


def _labels(name: str) -> dict[str, str]:
    return {**shared_labels(), **selector(name)}


def _meta(wanted: Wanted, name: str) -> Document:
    return {"name": name, "namespace": wanted.namespace, "labels": _labels(wanted.name)}


def _claim(wanted: Wanted) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(wanted, wanted.claim),
        "spec": {
            "accessModes": ["ReadWriteMany" if wanted.shared else "ReadWriteOnce"],
            **({"storageClassName": wanted.storage_class} if wanted.storage_class else {}),
            "resources": {"requests": {"storage": _memory("--size", wanted.size)}},
        },
    }


def _service(wanted: Wanted) -> Document:
    port = {"name": "http-notebook", "port": 80, "targetPort": "notebook"}
    spec = {"selector": selector(wanted.name), "ports": [port]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(wanted, wanted.name), "spec": spec}


def _stateful_set(wanted: Wanted, pod: Document) -> Document:
    meta = {"labels": _labels(wanted.name), "annotations": dict(disruption.UNDISTURBED)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(wanted, wanted.name),
        "spec": {
            "replicas": 1,
            "serviceName": wanted.name,
            "selector": {"matchLabels": selector(wanted.name)},
            "template": {"metadata": meta, "spec": pod},
        },
    }


def _pod(wanted: Wanted, served_below: str) -> Document:
    device = accelerators.resource(wanted.accelerator) if wanted.gpus else ""
    tolerations = scheduling.tolerated([device] if device else [], spot=False)
    scratch = {"/tmp": "tmp", Pod.CACHE: "cache"}
    found: list[tuple[Document, Document]] = [
        ({"name": "work", "persistentVolumeClaim": {"claimName": wanted.claim}}, {"name": "work", "mountPath": HOME}),
        (
            {"name": "token", "secret": {"secretName": secret_name(wanted.name), "defaultMode": 0o440}},
            {"name": "token", "mountPath": TOKEN_DIRECTORY, "readOnly": True},
        ),
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}),
        *(({"name": name, "emptyDir": {}}, {"name": name, "mountPath": place}) for place, name in scratch.items()),
    ]
    return {
        "serviceAccountName": wanted.account,
        "automountServiceAccountToken": True,  # the commands of Outlast in it use the API server
        "enableServiceLinks": False,  # a Service called jupyter would set JUPYTER_PORT
        "securityContext": volumes.security(),
        "affinity": scheduling.off_spot({}),  # its kernels would be lost with the machine
        **({"tolerations": tolerations} if tolerations else {}),
        "containers": [_container(wanted, device, served_below, [mount for _, mount in found])],
        "volumes": [volume for volume, _ in found],
    }


def _container(wanted: Wanted, device: str, served_below: str, mounts: list[Document]) -> Document:
    firm: dict[str, str | int] = {"memory": _memory("--memory", wanted.memory), **({device: wanted.gpus} if device else {})}
    arguments = ["--kubeflow"] if served_below else []
    variables = {
        "HOME": HOME,
        "USER": "outlast",
        Env.CACHE: Pod.CACHE,
        "PYTHONUNBUFFERED": "1",
        "JUPYTER_RUNTIME_DIR": "/tmp/jupyter",
    }
    return {
        "name": wanted.name,  # Kubeflow shows the state of the container with the name of the Notebook
        "image": wanted.image or (IMAGE_CUDA if wanted.gpus else IMAGE),
        "command": ["outlast", "notebook", HOME],
        "args": [*arguments, "--bind", "0.0.0.0", "--port", str(PORT), "--token-file", f"{TOKEN_DIRECTORY}/{TOKEN}"],
        "workingDir": HOME,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        **({"envFrom": [{"secretRef": {"name": secret}} for secret in wanted.secrets]} if wanted.secrets else {}),
        "ports": [{"name": "notebook", "containerPort": PORT}],
        "resources": {"requests": {"cpu": units.cores_text(wanted.cpu), **firm}, "limits": firm},
        # No liveness probe: a server that is busy for minutes would be restarted, and its kernels lost.
        "readinessProbe": pods.probe(f"{served_below}/api", every=5, tries=3, port="notebook"),
        "securityContext": volumes.confined(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _memory(option: str, value: str) -> str:
    try:
        return units.memory_text(units.memory(value))
    except ValueError as error:
        raise OutlastError(f"{option} {value}: {error}") from error
