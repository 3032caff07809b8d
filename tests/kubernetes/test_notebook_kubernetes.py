"""The files of a notebook in a cluster: a StatefulSet, a Notebook of Kubeflow, and the rights of their commands."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import apiserver
from outlast.cli import commands
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import volumes, worker_pod
from outlast.kubernetes.manifests.scheduling import placement
from outlast.local import jupyter
from published_schemas import ACCOUNT, KUBEFLOW, STATEFUL_SET, validate
from rights import needed, rights

Document = dict[str, Any]
Outlast = Callable[..., tuple[int, str, str]]
TO_FOLLOW = {("get", "", "pods"), ("watch", "", "pods")}
"""For `outlast logs -f` and `--follow`; the version before watched the pods."""


def documents(file: Path) -> list[Document]:
    return list(yaml.safe_load_all(file.read_text()))


def pod_of(file: Path) -> Document:
    return dict(documents(file)[-1]["spec"]["template"]["spec"])


def test_its_objects_are_valid_and_its_pod_is_restricted_and_on_no_spot_machine() -> None:
    for file in (ACCOUNT, STATEFUL_SET, KUBEFLOW):
        for document in documents(file):
            validate(document)
            assert document["metadata"]["namespace"] == "zip"
    claim, service, stateful_set = documents(STATEFUL_SET)
    pod = pod_of(STATEFUL_SET)
    (container,) = pod["containers"]
    assert pod["securityContext"] == volumes.pod_security()
    assert container["securityContext"] == volumes.container_security()
    assert pod["affinity"] == placement.avoid_spot({})
    template = stateful_set["spec"]["template"]["metadata"]
    assert template["annotations"] == worker_pod.DO_NOT_DISRUPT
    assert service["spec"]["selector"] == template["labels"] == stateful_set["spec"]["selector"]["matchLabels"]
    assert service["metadata"]["name"] == stateful_set["spec"]["serviceName"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_kubeflows_notebook_is_the_same_pod_served_below_its_prefix() -> None:
    claim, own = documents(KUBEFLOW)
    assert claim == documents(STATEFUL_SET)[0]
    pod, there = copy.deepcopy(pod_of(STATEFUL_SET)), copy.deepcopy(pod_of(KUBEFLOW))
    name, namespace = own["metadata"]["name"], own["metadata"]["namespace"]
    (container,), (container_there,) = pod["containers"], there["containers"]
    assert container_there["name"] == name, "Kubeflow shows the state of that container"
    assert container_there["args"].pop(0) == "--kubeflow"
    assert container_there["readinessProbe"].pop("httpGet")["path"] == f"/notebook/{namespace}/{name}/api"
    assert container["readinessProbe"].pop("httpGet")["path"] == "/api"
    assert "NB_PREFIX" not in {each["name"] for each in container["env"]}, "Kubeflow leaves one that is there as it is"
    assert (pod.pop("serviceAccountName"), there.pop("serviceAccountName")) == ("notebook", "default-editor")
    pod.pop("automountServiceAccountToken")
    assert pod == there
    assert own["metadata"]["annotations"] == {"notebooks.kubeflow.org/server-type": "jupyter", **worker_pod.DO_NOT_DISRUPT}


@pytest.mark.parametrize("file", [STATEFUL_SET, KUBEFLOW], ids=["StatefulSet", "Notebook"])
def test_its_command_is_one_of_ours_and_takes_the_token_from_a_file_alone(file: Path) -> None:
    (container,) = pod_of(file)["containers"]
    program, verb, *words = [*container["command"], *container["args"]]
    given = get_command(commands.app).commands[verb].make_context(verb, words).params  # type: ignore[attr-defined]
    assert program == "outlast"
    assert (str(given["directory"]), given["bind"], given["port"]) == ("/home/jovyan", "0.0.0.0", jupyter.PORT)
    assert given["kubeflow"] is (file == KUBEFLOW)
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (volume,) = [each for each in pod_of(file)["volumes"] if each["name"] == mounted[str(given["token_file"].parent)]]
    create = next(line for line in file.read_text().splitlines() if "create secret" in line)
    words = shlex.split(create.removeprefix("#"))
    assert volume["secret"]["secretName"] in words
    assert f"--from-file={given['token_file'].name}=/dev/stdin" in words, "on no command line, which others can list"
    assert "secretKeyRef" not in file.read_text(), "in no variable, which kernels would inherit"


def test_its_account_reads_no_secret_and_gives_no_rights() -> None:
    account, role, binding = documents(ACCOUNT)
    allowed = rights(role["rules"])
    assert {(verb, group) for verb, group, what in allowed if what == "secrets"} == {("create", "")}
    assert allowed >= TO_FOLLOW
    assert not {what for _, _, what in allowed} & {"roles", "rolebindings", "serviceaccounts", "pods/exec", "*"}
    assert not {verb for verb, _, _ in allowed} & {"*", "escalate", "bind", "impersonate"}
    assert role["kind"] == "Role", "in its namespace alone"
    names = {account["metadata"]["name"], binding["roleRef"]["name"], binding["subjects"][0]["name"]}
    assert names == {pod_of(STATEFUL_SET)["serviceAccountName"]}


JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec:
  image: example.org/outlast:1
  module: outlast.recipes.smoke
  code: .
  workers: {replicas: 2, min: 1, max: 3}
  volumes: [{claim: disk, to: /data, size: 1Gi}]
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    """A cluster with the operator's definition, and a namespace `team` in it."""
    api = apiserver.ApiServer(unserved=("scheduling.x-k8s.io", "scheduling.volcano.sh"))
    monkeypatch.chdir(tmp_path)
    api.put(kinds.NAMESPACE.document({"name": "team"}))
    with apiserver.entered(api, tmp_path, monkeypatch):
        monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
        yield api


@pytest.mark.slow
def test_the_rights_of_a_notebook_are_those_that_its_commands_use(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path
) -> None:
    _, role, _ = documents(ACCOUNT)
    allowed = rights(role["rules"])
    used: set[tuple[str, str, str]] = set()

    def may(asked: str) -> bool:
        if (found := needed(asked)) is None or found[0][2] == "namespaces":
            return True
        right, _, name = found
        asks = {right, ("create", *right[1:])} if "force=true" in asked else {right}  # an apply may have to create
        if not asks <= rights(role["rules"], name or None):
            return False
        used.update(asks)
        return True

    def do(*words: str) -> str:
        code, out, err = outlast(*words, "-n", "team")
        assert code == 0, f"{words}: {err}"
        return out

    api.may, api.forbids = may, 'User "me" cannot send resource "{asked}"'
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "main.py").write_text("")
    assert "ElasticJob train created" in do("submit", "job.yaml")
    job = api.documents["elasticjobs.outlast.dev", "team", "train"]
    labels = {"outlast.dev/job": "train", "app.kubernetes.io/component": "worker"}
    running = {"name": "worker", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    meta = {"name": "train-worker-0", "namespace": "team", "labels": {**labels, "outlast.dev/worker": "0"}}
    spec = {"containers": [{"name": "worker"}], "nodeName": "a"}
    api.put(kinds.POD.document(meta, spec=spec, status={"phase": "Running", "containerStatuses": [running]}))
    api.logs["train-worker-0"] = ["2026-01-01T00:00:00Z begun"]
    api.metrics["train-worker-0"] = "outlast_step 7\n"
    assert "7" in do("status", "train")
    assert "begun" in do("logs", "train")
    do("why", "train")
    do("scale", "train", "3")
    do("chaos", "train", "kill-worker", "--yes")
    do("cancel", "train")
    assert job["metadata"]["name"] not in [name for _, _, name in api.documents]
    do("submit", "job.yaml", "--as", "indexed-job", "--name", "plain")
    assert ("secrets", "team", "plain-rdzv") in api.documents, "made, although none may be read"
    do("cancel", "plain")
    do("data", "get", "cifar10", "--on", "kubernetes", "--claim", "disk:/data")
    do("cancel", "data-cifar10")
    assert allowed - used == TO_FOLLOW
