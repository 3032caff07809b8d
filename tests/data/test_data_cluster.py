"""`outlast data get --on kubernetes`: a Job of one pod, which the commands for jobs know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_validate import utils as schemas

import apiserver
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import dataset_job
from outlast.kubernetes.manifests.dataset_job import Download

Outlast = Callable[..., tuple[int, str, str]]
NEWEST = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-1]
JOB = (kinds.JOB.resource, "n", "data-cifar10")


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    """A namespace `n` with a claim, and no job on this machine."""
    api = apiserver.ApiServer()
    with apiserver.entered(api, tmp_path, monkeypatch):
        monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
        api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
        api.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "efs-pvc", "namespace": "n"}})
        yield api


GET = ("data", "get", "cifar10", "--on", "kubernetes", "-n", "n", "--claim", "efs-pvc:/efs")


@pytest.mark.parametrize(
    "wanted",
    [
        Download("cifar10", "cifar10", claim="efs-pvc:/efs-shared"),
        Download("https://h/A_b.zip#sha256=" + "0" * 64, "A_b" * 40, to="s3://bucket/x", secrets=("aws",), image="mine:1"),
    ],
)
def test_the_job_is_valid_and_restricted(wanted: Download) -> None:
    document = dataset_job.document(wanted)
    schemas.validate(document, NEWEST, strict=True)
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:4] == ["outlast", "data", "get", wanted.dataset]
    assert container["command"][5] == (wanted.to or "/efs-shared/cifar10")
    assert pod["securityContext"]["runAsNonRoot"] is container["securityContext"]["readOnlyRootFilesystem"] is True
    assert len(document["metadata"]["name"]) <= 57
    assert ("envFrom" in container) == bool(wanted.secrets)


def test_it_is_created_and_seen_by_the_commands_for_jobs(team: apiserver.ApiServer, outlast: Outlast) -> None:
    assert outlast(*GET) == (
        0,
        "Job data-cifar10 brings cifar10 to /efs/cifar10\nlook at it with: outlast logs -f data-cifar10 -n n\n",
        "",
    )
    assert outlast(*GET)[1].startswith("Job data-cifar10 brings it already\n")
    assert "brings it to another place (/efs/cifar10); wait for its end" in outlast(*GET, "--to", "/efs/c10")[2]
    job = team.documents[JOB]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "data-cifar10-x", "namespace": "n", "labels": job["metadata"]["labels"]},
        "spec": job["spec"]["template"]["spec"],
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "worker", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}],
        },
    }
    team.put(pod)
    page = outlast("status", "data-cifar10", "-n", "n")[1]
    assert page.startswith("data-cifar10: Running: brings the data; its log says how far it is\n")
    assert "/efs/cifar10" in page
    assert not re.search(r"^(world|step|checkpoint) ", page, re.MULTILINE), "it trains nothing"
    team.put(
        {**job, "status": {"conditions": [{"type": "Complete", "status": "True"}], "completionTime": "2026-01-01T00:01:00Z"}}
    )
    assert "data-cifar10: Succeeded: the data are complete\n" in outlast("status", "data-cifar10", "-n", "n")[1]
    listed = json.loads(outlast("list", "-n", "n", "-o", "json")[1])
    assert [(each["name"], each["state"]) for each in listed] == [("data-cifar10", "Succeeded")]
    team.remove(kinds.POD.resource, "data-cifar10-x", "n")
    assert outlast(*GET, "--to", "/efs/c10")[1].startswith("Job data-cifar10 brings cifar10 to /efs/c10\n"), "it is run again"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--on", "kubernetes"), "in a cluster the data need a place that stays: --claim NAME:/PATH for a volume, or --to s3://"),
        (("--on", "kubernetes", "--to", "data/x"), "in a cluster the data need a place that stays"),
        (("--on", "kubernetes", "--claim", "efs-pvc"), "--claim efs-pvc is no claim with a path; write --claim NAME:/PATH"),
        (("--on", "kubernetes", "--claim", "efs-pvc:/e", "--to", "/f"), "--to /f is not on the claim, which is at /e; give a "),
        (("--on", "kubernetes", "--claim", "other:/e"), "there is no claim other in namespace n; create it, or choose another"),
        (("--on", "kubernetes", "--claim", "efs-pvc:/e", "--from", "x.tgz"), "--from is a file of this machine, which "),
        (("--on", "cluster"), "no place to do it cluster; there is kubernetes"),
        (("--claim", "efs-pvc:/e"), "--claim, --secret, --image, --namespace and --context are for a pod; add --on kubernetes"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    team: apiserver.ApiServer, outlast: Outlast, options: tuple[str, ...], sentence: str
) -> None:
    code, out, err = outlast("data", "get", "cifar10", "-n", "n", *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {sentence}"), err
    assert JOB not in team.documents
