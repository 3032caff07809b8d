"""A restricted namespace of a real cluster, and jobs in it. For tests marked `cluster`."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

import waits
from outlast.job import spec
from outlast.kubernetes import manifests
from outlast.kubernetes.api import kinds

Document = dict[str, Any]
STEPS = ("--epochs=250",)
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Namespace:
    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *words: str, given: object = None, fails: bool = False) -> str:
        text = json.dumps(given) if given is not None else None
        done = subprocess.run(["kubectl", "-n", self.name, *words], input=text, capture_output=True, text=True, check=False)
        assert fails or done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, documents: list[Document]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": documents}
        self.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", given=items)

    def run(self, name: str, topology: str, **fields: object) -> list[Document]:
        documents = manifests.render(a_job(name, **fields).in_namespace(self.name), topology)
        self.apply(documents)
        return documents

    def pods(self, job: str) -> list[Document]:
        return list(json.loads(self.kubectl("get", "pods", "-l", f"outlast.dev/job={job}", "-o", "json"))["items"])

    def logs(self, job: str) -> str:
        return self.kubectl("logs", "-l", f"outlast.dev/job={job}", "--tail=-1", "--prefix", fails=True)

    def wait(self, what: Callable[[], object], why: Callable[[], str], timeout_s: float = 240) -> Any:
        return waits.until(what, timeout_s, why, pause_s=1)

    def weights(self, job: str) -> str:

        def done() -> re.Match[str] | None:
            return re.search(r"\[DONE\].* ranks agree on weights (\w+)", self.logs(job))

        return str(self.wait(done, lambda: self.logs(job))[1])

    def at_epoch(self, job: str, epoch: int) -> None:

        def there() -> bool:
            return any(int(found) >= epoch for found in re.findall(r"\[EPOCH\] (\d+)/", self.logs(job)))

        self.wait(there, lambda: self.logs(job))

    def ended(self, job: Document, condition: str) -> Document:

        def found() -> Document | None:
            status = json.loads(self.kubectl("get", "job", job["metadata"]["name"], "-o", "json"))["status"]
            return next((c for c in status.get("conditions", ()) if c["type"] == condition and c["status"] == "True"), None)

        return dict(self.wait(found, lambda: self.logs(job["metadata"]["labels"]["outlast.dev/job"])))


def a_job(name: str, **fields: object) -> spec.Job:
    whole: Document = {
        "image": os.environ["OUTLAST_TEST_IMAGE"], "module": "outlast.recipes.smoke", "args": [*STEPS],
        "workers": {"replicas": 2}, "resources": {"cpu": "0.2", "memory": "700Mi"}, "checkpoint": {"every": "20 steps"},
        "interruption": {"grace": "20s"}, **fields,
    }  # fmt: skip
    return spec.parse(json.dumps(kinds.ELASTIC_JOB.document({"name": name}, spec=whole)))


def kind(documents: list[Document], wanted: str) -> Document:
    return next(each for each in documents if each["kind"] == wanted)


def a_server(namespace: str) -> list[Document]:
    """Run `rclone serve s3` in a pod, with a Service."""
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    command = "mkdir -p /buckets/bucket && exec rclone serve s3 --addr :8080 --auth-key key,secret --vfs-cache-mode=off /buckets"
    container = {
        "name": "s3",
        "image": os.environ["OUTLAST_TEST_IMAGE"],
        "command": ["sh", "-c", command],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": confined,
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "buckets", "mountPath": "/buckets"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    volumes = [{"name": "buckets", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    meta = {"name": "s3", "namespace": namespace}
    fields = {"securityContext": user, "containers": [container], "volumes": volumes}
    return [
        kinds.POD.document({**meta, "labels": {"app": "s3"}}, spec=fields),
        kinds.SERVICE.document(meta, spec={"selector": {"app": "s3"}, "ports": [{"port": 8080}]}),
    ]


@contextmanager
def made(prefix: str = "outlast", labels: Mapping[str, str] = RESTRICTED) -> Iterator[Namespace]:
    """Create a namespace for some tests, or skip them without an image."""
    if "OUTLAST_TEST_IMAGE" not in os.environ:
        pytest.skip("OUTLAST_TEST_IMAGE does not name an image that the cluster has")
    found = Namespace(f"{prefix}-{secrets.token_hex(3)}")
    found.apply([kinds.NAMESPACE.document({"name": found.name, "labels": dict(labels)})])
    try:
        yield found
    finally:
        found.kubectl("delete", "namespace", found.name, "--wait=false")
