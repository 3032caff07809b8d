"""Our documents at a real API server: schemas, the cost of rules in CEL, and the objects that it stores.

Changes nothing in the cluster but for the definition of ElasticJob, and a job that is suspended and deleted again:

KUBECONFIG=... pytest -m cluster tests/kubernetes/test_manifests_cluster.py
"""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outlast.job import spec
from outlast.kubernetes import manifests
from outlast.kubernetes.api import kinds

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
GOLDEN = runpy.run_path(str(ROOT / "tests" / "shared" / "golden" / "render.py"))


def kubectl(*words: str, documents: list[dict[str, Any]] | None = None) -> subprocess.CompletedProcess[str]:
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}) if documents is not None else None
    return subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)


def a_job(name: str, **fields: Any) -> dict[str, Any]:
    return kinds.ELASTIC_JOB.document({"name": name, "namespace": "default"}, spec={"module": "m", **fields})


@pytest.fixture(scope="module", autouse=True)
def definition() -> None:
    applied = kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "deploy" / "crd.yaml"))
    assert applied.returncode == 0, applied.stderr
    kubectl("wait", "--for=condition=established", "crd/elasticjobs.outlast.dev", "--timeout=30s")


@pytest.mark.parametrize("name", GOLDEN["JOBS"])
@pytest.mark.parametrize("topology", manifests.TOPOLOGIES)
def test_the_api_server_takes_the_documents(topology: str, name: str) -> None:
    documents = manifests.render(GOLDEN["job"](name).in_namespace("default"), topology)
    known = [each for each in documents if "volcano" not in each["apiVersion"] and each["kind"] != "PodGroup"]
    made = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", documents=known)
    assert made.returncode == 0, made.stderr
    assert "would violate PodSecurity" not in made.stderr


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"workers": {"replicas": 9, "max": 2}}, "workers.replicas is above workers.max; lower replicas or raise max"),
        ({"processesPerWorker": 4, "resources": {"gpu": 2}}, "processesPerWorker is above resources.gpu"),
        ({"rendezvous": {"endpoint": "etcd:2379"}}, "rendezvous.endpoint has no effect with backend auto"),
    ],
)
def test_the_api_server_says_what_the_job_file_says(fields: dict[str, Any], sentence: str) -> None:
    said = kubectl("create", "--dry-run=server", "-f", "-", documents=[a_job("a", **fields)])
    assert said.returncode != 0
    assert sentence in said.stderr


def test_a_name_that_is_too_long_is_said_plainly() -> None:
    said = kubectl("create", "--dry-run=server", "-f", "-", documents=[a_job("j" * 60)])
    assert "metadata.name is longer than 51 characters; shorten it" in said.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"nodeName": "b"}},
        {"spec": {"nodeName": None, "subdomain": "a"}},
        {"spec": {"nodeName": None}},
        {"spec": {"containers": [{"name": "worker", "tty": True}]}},
        {"metadata": {"labels": {"a": None, "b": "a"}}},
        {"metadata": {"labels": None, "finalizers": ["a"]}},
    ],
    ids=str,
)
def test_nothing_in_the_template_of_a_job_can_change(change: dict[str, Any]) -> None:
    pod = {"nodeName": "a", "containers": [{"name": "worker", "stdin": True}]}
    name, template = "a-job-whose-template-is-fixed", {"metadata": {"labels": {"a": "a"}}, "spec": pod}
    # suspended, so that an operator makes nothing of it
    made = kubectl("create", "-f", "-", documents=[a_job(name, image="i", suspend=True, template=template)])
    assert made.returncode == 0, made.stderr
    try:
        patch = json.dumps({"spec": {"template": change}})
        said = kubectl("-n", "default", "patch", "elasticjobs.outlast.dev", name, "--type=merge", "--dry-run=server", "-p", patch)
        assert "template of a job cannot change" in said.stderr
    finally:
        kubectl("-n", "default", "delete", "elasticjobs.outlast.dev", name)


def test_what_the_api_server_stores_is_the_job() -> None:
    job = GOLDEN["job"]("gpu")
    (wanted,) = manifests.render(job.in_namespace("default"))
    stored = json.loads(kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", documents=[wanted]).stdout)
    read = {**stored, "metadata": {"name": stored["metadata"]["name"]}}
    assert spec.parse(json.dumps(read)).spec == job.spec
