"""The examples of a step that trains, for Argo Workflows and Kubeflow Pipelines, and the rights of its account."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import apiserver
from outlast.job import spec
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.jobs import waiting
from outlast.kubernetes.jobs.outcome import OUTPUTS
from outlast.kubernetes.manifests import labels, volumes
from pages import mistake
from published_schemas import ROOT, validate
from rights import Right, needed, rights

EXAMPLES = ROOT / "examples" / "pipelines"
Document = dict[str, Any]
Outlast = Callable[..., tuple[int, str, str]]


class Ending(apiserver.ApiServer):
    """A cluster whose operator ends every job at once."""

    def __init__(self) -> None:
        super().__init__(unserved=("scheduling.x-k8s.io",))

    def put(self, document: Document) -> Document:
        if document["kind"] == kinds.ELASTIC_JOB.kind and "status" not in document:
            ended = {"state": "Succeeded", "run": "gpt-1", "step": 8, "finished": pod_status.timestamp(apiserver.NOW) + 2.5}
            document = {**document, "status": ended}
        return super().put(document)

    def jobs(self) -> list[Document]:
        return self.objects(kinds.ELASTIC_JOB.resource)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ending]:
    """That cluster, and the job of the examples without its store."""
    document = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    document["spec"] = {key: value for key, value in document["spec"].items() if key not in ("data", "output")}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    api = Ending()
    with apiserver.entered(api, tmp_path, monkeypatch):
        yield api


def submitted(api: Ending) -> spec.Job:
    """The only job, which has a name of its own."""
    (job,) = api.jobs()
    meta = {"name": job["metadata"]["name"]}
    assert re.fullmatch(r"gpt-[0-9a-f]{12}", meta["name"]), "one job for each key"
    return spec.parse(json.dumps({**{key: job[key] for key in ("apiVersion", "kind", "spec")}, "metadata": meta}))


# Argo Workflows


@functools.cache
def workflow() -> Document:
    return dict(yaml.safe_load((EXAMPLES / "workflow.yaml").read_text()))


def template(name: str) -> Document:
    (found,) = [each for each in workflow()["spec"]["templates"] if each["name"] == name]
    return dict(found)


def test_the_workflow_is_valid_by_argos_schema_and_its_pods_are_restricted() -> None:
    validate({**workflow(), "kind": "WorkflowTemplate"})  # whose `spec` is that of a Workflow
    assert workflow()["spec"]["podMetadata"]["labels"] == labels.NO_SIDECAR
    for each in workflow()["spec"]["templates"]:
        if "container" in each:
            container = {"name": "main", **each["container"]}
            assert container["securityContext"] == volumes.container_security()
            pod = {"securityContext": workflow()["spec"]["securityContext"], "containers": [container]}
            pod |= {"volumes": workflow()["spec"]["volumes"]}
            validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod})
            if container["command"][0] == "sh":
                assert not any("{{" in word for word in container["command"]), "a shell would parse the values"


def test_argos_step_submits_the_job_once_for_each_workflow_and_leaves_its_outputs(api: Ending, outlast: Outlast) -> None:
    step = template("train")
    values = {"workflow.uid": "run-1", "workflow.parameters.workers": "3", "/job/job.yaml": "job.yaml", "/tmp/outputs": "out"}
    words = [*step["container"]["command"], *step["container"]["args"]]
    for name, value in values.items():
        words = [word.replace(f"{{{{{name}}}}}" if "." in name and "/" not in name else name, value) for word in words]
    assert not any("{{" in word for word in words)
    for _ in range(2):
        assert outlast(*words[1:])[0] == 0
    job = submitted(api)
    assert (job.spec.workers.replicas, str(job.spec.checkpoint.every)) == (3, "50 steps")
    for each in step["outputs"]["parameters"]:
        path = each["valueFrom"]["path"].replace("/tmp/outputs", "out")
        assert Path(path).is_file(), "what is not known is an empty file"
    assert Path("out/job").read_text() == job.metadata.name
    used = re.findall(r"\{\{tasks\.train\.outputs\.parameters\.(\w+)\}\}", (EXAMPLES / "workflow.yaml").read_text())
    assert set(used) <= {each["name"] for each in step["outputs"]["parameters"]} <= set(OUTPUTS)
    mounts = {each["mountPath"]: each["name"] for each in step["container"]["volumeMounts"]}
    assert {"name": mounts["/job"], "configMap": {"name": "gpt-job"}} in workflow()["spec"]["volumes"]
    assert "create configmap gpt-job --from-file=examples/pipelines/job.yaml" in (EXAMPLES / "workflow.yaml").read_text()


# Kubeflow Pipelines


def test_the_steps_of_kubeflow_pipelines_run_commands_that_there_are() -> None:
    commands = re.findall(r"^outlast (.*)$", (EXAMPLES / "pipeline.py").read_text(), re.M)
    assert len(commands) == 3
    assert [said for words in commands if (said := mistake(shlex.split(words)))] == []


# The account


def test_the_role_allows_what_a_step_does_and_nothing_else(api: Ending, outlast: Outlast) -> None:
    """Submitting, waiting, the outputs, why it failed, SIGTERM. What is listed although it may not be is of no importance."""
    account, role, binding = yaml.safe_load_all((EXAMPLES / "account.yaml").read_text())
    for document in (account, role, binding):
        validate(document)
        assert document["metadata"]["namespace"] == workflow()["metadata"]["namespace"]
    names = {account["metadata"]["name"], binding["subjects"][0]["name"], workflow()["spec"]["serviceAccountName"]}
    assert names == {"outlast-pipeline"}
    allowed = rights(role["rules"])
    refused: set[Right] = set()

    def may(asked: str) -> bool:
        if (found := needed(asked)) is None or found[0] in allowed:
            return True
        refused.add(found[0])
        return False

    api.may = may
    api.forbids = 'things is forbidden: User "s" cannot use resource "things" in API group "" in the namespace "default"'
    code, _, err = outlast("submit", "job.yaml", "--wait")
    assert code == 0, err
    cluster = kube.connect()
    waiter = waiting.Waiter(waiting.Workloads(cluster), "gpt", lambda _: None)
    waiter.submit(lambda: iter(()))
    (job,) = api.jobs()
    api.put({**copy.deepcopy(job), "status": {"state": "Failed", "reason": "a bug"}})
    assert waiter.wait().sentence.startswith("gpt has failed")
    api.put({**copy.deepcopy(job), "status": {"state": "Running"}})
    look = functools.partial(waiting.own_pod, cluster, {})
    assert waiter.on_sigterm("cancel", look).sentence == "SIGTERM: gpt is cancelled; what it has saved stays"
    cluster.close()
    assert {right for right in refused if right[0] not in ("list", "get")} == set()
    assert {right for right in refused if right[0] == "get"} <= {("get", "", "namespaces")}
