"""The step of a pipeline in a real cluster: a pod with the account, the rights and the container of examples/pipelines.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/kubernetes/test_pipeline_cluster.py

Needs an operator (outlast install). The pods are as Argo's controller would make them, without its own containers; there is no
Argo.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from namespaces import Namespace
from outlast.kubernetes.jobs.outcome import OUTPUTS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
Document = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
ELASTIC = "elasticjobs.outlast.dev"
KILL = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) not in (1, os.getpid()):
        os.kill(int(pid), signal.SIGKILL)
"""
"""Kills the step, as a node without memory does."""


def template(namespace: Namespace, epochs: int) -> Document:
    """Apply the account and the ConfigMap with the job; the step that trains, as a pod."""
    fields = {
        "image": os.environ["OUTLAST_TEST_IMAGE"],
        "module": "outlast.recipes.smoke",
        "args": [f"--epochs={epochs}"],
        "workers": {"replicas": 1},
        "resources": {"cpu": "0.2", "memory": "700Mi"},
        "checkpoint": {"every": "20 steps"},
    }
    head = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "smoke"}}
    data = {"job.yaml": yaml.safe_dump({**head, "spec": fields})}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt-job"}, "data": data}
    account = (EXAMPLES / "account.yaml").read_text().replace("namespace: team-a", f"namespace: {namespace.name}")
    namespace.apply([*yaml.safe_load_all(account), config])
    spec = yaml.safe_load((EXAMPLES / "workflow.yaml").read_text())["spec"]
    (train,) = [each for each in spec["templates"] if each["name"] == "train"]
    container = {**train["container"], "image": os.environ["OUTLAST_TEST_IMAGE"], "imagePullPolicy": "IfNotPresent"}
    del container["envFrom"]  # there is no store
    values = {"restartPolicy": "Never", "containers": [container]}
    return {
        "metadata": spec["podMetadata"],
        "spec": {**values, **{key: spec[key] for key in ("serviceAccountName", "securityContext", "volumes")}},
    }


@pytest.fixture
def workflow(namespace: Namespace) -> Iterator[Document]:
    """A Workflow that nobody carries out, of a kind without a schema where Argo is not installed."""
    meta, names = {"name": "workflows.argoproj.io"}, {"plural": "workflows", "singular": "workflow", "kind": "Workflow"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema}
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": meta}
    absent = not namespace.kubectl("get", "crd", meta["name"], "--ignore-not-found")
    if absent:
        namespace.apply([{**crd, "spec": {"group": "argoproj.io", "scope": "Namespaced", "names": names, "versions": [version]}}])
    made = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "w"}, "spec": {}}
    namespace.wait(lambda: namespace.kubectl("create", "-f", "-", given=made, fails=True), lambda: "no Workflow")
    yield json.loads(namespace.kubectl("get", "workflow", "w", "-o", "json"))
    if absent:
        namespace.kubectl("delete", "crd", meta["name"], "--timeout=60s")


def pod(name: str, made: Document, key: str, after: str, owner: Document | None = None) -> Document:
    """A pod of the step, its parameters replaced. `after`: a shell command when the step has ended."""
    spec = copy.deepcopy(made["spec"])
    (container,) = spec["containers"]
    words: Sequence[str] = [*container["command"], *container.pop("args")]
    for parameter, value in (("workflow.uid", key), ("workflow.parameters.workers", "1")):
        words = [each.replace(f"{{{{{parameter}}}}}", value) for each in words]
    # `exec` for the step alone: SIGTERM is for process 1
    container |= {
        "name": "main",
        "command": list(words) if not after else ["sh", "-c", f'"$@"; code=$?; {after}; exit $code', "sh", *words],
    }
    meta = {"name": name, **made["metadata"]}
    if owner is not None:
        named = {key: owner[key] for key in ("apiVersion", "kind")}
        meta["ownerReferences"] = [{**named, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def jobs(namespace: Namespace) -> list[Document]:
    return list(json.loads(namespace.kubectl("get", ELASTIC, "-o", "json"))["items"])


def log(namespace: Namespace, name: str) -> str:
    return namespace.kubectl("logs", name, fails=True)


def ended(namespace: Namespace, name: str) -> int:
    """The exit code of a step's pod, once it has one."""

    def code() -> list[int]:
        statuses = json.loads(namespace.kubectl("get", "pod", name, "-o", "json"))["status"].get("containerStatuses", ())
        return [each["state"]["terminated"]["exitCode"] for each in statuses if "terminated" in each["state"]]

    return int(namespace.wait(code, lambda: log(namespace, name))[0])


def trains(namespace: Namespace, name: str) -> str:
    """The uid of the only job, once the step says that it trains."""
    namespace.wait(lambda: "Running" in log(namespace, name), lambda: log(namespace, name))
    (job,) = jobs(namespace)
    return str(job["metadata"]["uid"])


def test_a_step_trains_and_leaves_its_outputs(namespace: Namespace) -> None:
    made = template(namespace, epochs=3)
    namespace.apply([pod("short", made, "run-1", 'for each in /tmp/outputs/*; do echo; echo "== $each"; cat $each; done')])
    code = ended(namespace, "short")
    said = log(namespace, "short")
    assert code == 0, said
    found = dict(part.split("\n", 1) for part in said.split("== /tmp/outputs/")[1:])
    assert {name.strip() for name in found} == {*OUTPUTS, "outputs.json"}
    whole = json.loads(found["outputs.json"])
    (job,) = jobs(namespace)
    assert (whole["job"], whole["namespace"], whole["state"]) == (job["metadata"]["name"], namespace.name, "Succeeded")
    assert whole["run"] == job["status"]["run"]
    assert whole["step"] == whole["steps"] > 0
    assert (whole["restarts"], found["restarts"].strip()) == (0, "0")
    assert 0 < whole["seconds"] < 600
    assert whole["missing"]["checkpoint"].startswith("the output is in no store")
    assert "is forbidden" not in said, "its rights are enough"
    namespace.kubectl("delete", "pod", "short")
    namespace.apply([pod("short-again", made, "run-1", "true")])
    assert ended(namespace, "short-again") == 0
    assert [each["metadata"]["uid"] for each in jobs(namespace)] == [job["metadata"]["uid"]], (
        "what has succeeded is not run again"
    )
    namespace.kubectl("delete", "pod", "short-again")
    namespace.kubectl("delete", ELASTIC, "--all")


def test_a_step_that_is_lost_attaches_again_and_one_that_is_terminated_cancels(namespace: Namespace, workflow: Document) -> None:
    made = template(namespace, epochs=100_000)
    namespace.apply([pod("first", made, "run-2", "true")])
    uid = trains(namespace, "first")
    namespace.kubectl("exec", "first", "--", "python", "-c", KILL, fails=True)  # the container ends with it
    assert ended(namespace, "first") == 137
    namespace.apply([pod("second", made, "run-2", "")])
    assert trains(namespace, "second") == uid
    assert "unchanged" in log(namespace, "second")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "second", "namespace": namespace.name}}
    namespace.kubectl("create", "--raw", f"/api/v1/namespaces/{namespace.name}/pods/second/eviction", "-f", "-", given=eviction)
    namespace.wait(lambda: not namespace.kubectl("get", "pod", "second", "--ignore-not-found"), lambda: log(namespace, "second"))
    namespace.apply([pod("third", made, "run-2", "", owner=workflow)])
    assert trains(namespace, "third") == uid, "who is evicted leaves the job"
    namespace.kubectl("delete", "pod", "third")
    namespace.apply([pod("fourth", made, "run-2", "", owner=workflow)])
    assert trains(namespace, "fourth") == uid, "so does who is deleted while the Workflow goes on"
    namespace.kubectl("patch", "workflow", "w", "--type=merge", "-p", '{"spec": {"shutdown": "Terminate"}}')
    namespace.kubectl("delete", "pod", "fourth")
    assert jobs(namespace) == [], "who is terminated cancels it"
