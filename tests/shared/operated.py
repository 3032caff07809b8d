"""ElasticJobs under the operator of a real cluster. For tests marked `cluster`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from machines import PROGRAMS
from namespaces import Document, Namespace
from outlast.kubernetes.api import kinds

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
