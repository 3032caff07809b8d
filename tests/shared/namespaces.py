"""A restricted namespace of a real cluster, and jobs in it, with or without the operator. For tests marked `cluster`."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import waits
from machines import PROGRAMS
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


# ElasticJobs


ELASTIC = "elasticjobs.outlast.dev"
KILL_RANKS = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/environ | grep -q ' LOCAL_RANK=' && kill -9 ${p#/proc/}; done"
"""Kills the training processes of a pod, for `sh -c` in it."""
OUTLAST = str(Path(sys.executable).with_name("outlast"))


def for_ranks(action: str) -> str:
    """Return a command for `sh -c` in a pod that does this for each training process `$p`, found by its title."""
    return f"for p in /proc/[0-9]*; do grep -q '^outlast: [r]ank' $p/cmdline && {action}; done; true"


def weights(logs: str) -> str:
    return str(re.findall(r"weights (\w{64})", logs)[-1])


def submit_exact(namespace: Namespace, directory: Path, name: str, *args: str, **fields: object) -> None:
    """Submit a job of two workers that trains exact.py, which prints each step and waits at its end for `hurried`."""
    whole = {
        "image": os.environ["OUTLAST_TEST_IMAGE"], "script": "exact.py", "code": str(PROGRAMS),
        "args": ["--gate", "--print", *args], "workers": {"replicas": 2, "min": 1, "max": 3},
        "resources": {"cpu": "0.2", "memory": "2Gi"}, **fields,
    }  # fmt: skip
    (directory / "job.yaml").write_text(json.dumps(kinds.ELASTIC_JOB.document({"name": name}, spec=whole)))
    command = [OUTLAST, "submit", "job.yaml", "-n", namespace.name]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def both_train(namespace: Namespace, name: str) -> None:
    """Wait until the second rank has trained a few steps."""
    namespace.wait(lambda: namespace.logs(name).count("rank 1 step ") >= 8, lambda: namespace.logs(name), 400)


def hurried(namespace: Namespace, name: str) -> Document:
    """Let exact.py in all pods pass its gate without pauses, and return the job's final status."""

    def over(found: Document) -> bool:
        for pod in live(namespace, name):
            namespace.kubectl("exec", pod, "--", "sh", "-c", 'touch "$OUTLAST_OUTPUT/hurry"', fails=True)
        return found.get("state") in ("Succeeded", "Failed")

    return until(namespace, name, over, 400)


def status(namespace: Namespace, name: str) -> Document:
    return dict(json.loads(namespace.kubectl("get", ELASTIC, name, "-o", "json")).get("status") or {})


def until(namespace: Namespace, name: str, what: Callable[[Document], object], timeout_s: float = 240) -> Document:
    def found() -> Document | None:
        now = status(namespace, name)
        return now if what(now) else None

    why = lambda: f"{status(namespace, name)}\n{namespace.kubectl('get', 'pods', '-o', 'wide')}"  # noqa: E731
    return dict(namespace.wait(found, why, timeout_s))


def trains(workers: int) -> Callable[[Document], object]:
    return lambda found: found.get("state") == "Running" and len(found.get("world", ())) == workers


def begun(namespace: Namespace, name: str, workers: Document, **fields: Any) -> int:
    namespace.run(name, "elasticjob", workers=workers, **fields)
    until(namespace, name, trains(workers["replicas"]))
    namespace.at_epoch(name, 20)
    return int(status(namespace, name)["generation"])


def live(namespace: Namespace, name: str) -> list[str]:
    return sorted(
        pod["metadata"]["name"]
        for pod in namespace.pods(name)
        if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
    )


@pytest.fixture(scope="module")
def undisturbed_pods(namespace: Namespace) -> str:
    namespace.run("undisturbed", "elasticjob", workers={"replicas": 2, "min": 2})
    until(namespace, "undisturbed", lambda found: found.get("state") == "Succeeded")
    return namespace.weights("undisturbed")
