"""ElasticJobs that the operator of a real cluster looks after. For tests marked `cluster`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from namespaces import Document, Namespace

ELASTIC = "elasticjobs.outlast.dev"


def status(namespace: Namespace, name: str) -> Document:
    return dict(json.loads(namespace.kubectl("get", ELASTIC, name, "-o", "json")).get("status") or {})


def until(namespace: Namespace, name: str, what: Callable[[Document], object], timeout_s: float = 240) -> Document:
    """The job's status once something is true of it."""
    deadline = time.monotonic() + timeout_s
    while not what(found := status(namespace, name)):
        assert time.monotonic() < deadline, (found, namespace.kubectl("get", "pods", "-o", "wide"))
        time.sleep(0.5)
    return found


def trains(workers: int) -> Callable[[Document], object]:
    return lambda found: found.get("state") == "Running" and len(found.get("world", ())) == workers


def begun(namespace: Namespace, name: str, workers: Document, **fields: Any) -> int:
    """Begin a job, and wait until it has trained for a while; the newest generation."""
    namespace.run(name, "elasticjob", workers=workers, **fields)
    until(namespace, name, trains(workers["replicas"]))
    namespace.at_epoch(name, 20)
    return int(status(namespace, name)["generation"])


def live(namespace: Namespace, name: str) -> list[str]:
    """The pods that are neither over nor on their way out."""
    return sorted(
        pod["metadata"]["name"]
        for pod in namespace.pods(name)
        if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
    )


@pytest.fixture(scope="module")
def undisturbed_pods(namespace: Namespace) -> str:
    """The weights of two workers that nothing happened to."""
    namespace.run("undisturbed", "elasticjob", workers={"replicas": 2, "min": 2})
    until(namespace, "undisturbed", lambda found: found.get("state") == "Succeeded")
    return namespace.weights("undisturbed")
