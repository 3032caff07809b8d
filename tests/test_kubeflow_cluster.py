"""`outlast kubeflow` against a real API server, with Kubeflow's published definitions and a web app made by hand.

There is no controller of Kubeflow and no mesh: what is tested is that a strict API server takes each document, that doing it
again changes nothing, and that the rights are those of Kubeflow's accounts.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast import kube
from outlast.cluster import installation
from outlast.kube import kinds, pods
from outlast.kubeflow import spawner
from test_kubeflow import NEW, PROFILE, ROOT, a_file
from test_kubeflow_applied import APP, DEFAULTS, FORM, IMAGE
from test_kubeflow_applied import kubeflow as a_kubeflow_by_hand

pytestmark = pytest.mark.cluster

Outlast = Callable[..., tuple[int, str, str]]
Document = dict[str, Any]
PUBLISHED = ROOT / "tests" / "published" / "kubeflow"
EDIT = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "kubeflow-edit"},
    "aggregationRule": {
        "clusterRoleSelectors": [{"matchLabels": {"rbac.authorization.kubeflow.org/aggregate-to-kubeflow-edit": "true"}}]
    },
}
"""As in Kubeflow's manifests."""


def pods_that_wait(document: Document) -> Document:
    """A workload of a test, completed so that an API server takes it."""
    if document["kind"] != "Deployment":
        return document
    made = copy.deepcopy(document)
    image = os.environ.get("OUTLAST_TEST_IMAGE", "docker.io/library/outlast:test")
    small = {"name": "c", "image": image, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "600"]}
    made["spec"]["selector"] = {"matchLabels": made["spec"]["template"]["metadata"]["labels"]}
    made["spec"] |= {"replicas": 0}  # the cluster is small, and their pods do nothing
    made["spec"]["template"]["spec"]["containers"] = [small]
    return made


def is_established(definition: Document) -> bool:
    return pods.condition(definition, "Established") is not None


def await_gone(cluster: kube.Cluster, *named: tuple[kinds.Kind, str]) -> None:
    """Wait until these are not there; at most three minutes."""
    with kube.within(180) as stop:
        while left := [name for kind, name in named if cluster.find(kind, name)]:
            assert not stop.wait(0.5), f"still there: {', '.join(left)}"


@pytest.fixture
def cluster() -> Iterator[kube.Cluster]:
    """A cluster with Kubeflow's definitions, its gateway's Service and its web app; all of it goes afterwards."""
    cluster = kube.connect()
    wanted = [yaml.safe_load((PUBLISHED / f"kubeflow.org_{name}.yaml").read_text()) for name in ("profiles", "poddefaults")]
    wanted += [EDIT, *map(pods_that_wait, a_kubeflow_by_hand())]
    wanted = [
        each | {"spec": {**each["spec"], "ports": [{"port": 80}]}} if each["kind"] == "Service" else each for each in wanted
    ]
    made = []
    for document in wanted:
        meta = document["metadata"]
        meta.pop("creationTimestamp", None)
        if cluster.find(kinds.kind_of(document), meta["name"], namespace=meta.get("namespace")) is None:
            made.append(document)
        cluster.apply(document)
        if document["kind"] == kinds.CRD.kind:
            served = installation.await_(cluster, kinds.CRD, meta["name"], is_established, timeout_s=60)
            assert served is not None
    with kube.within(60) as stop:  # an API server serves a kind a moment after it has said so
        while not all(map(cluster.serves, (kinds.PROFILE, kinds.POD_DEFAULT))):
            assert not stop.wait(0.5)
    yield cluster
    for name in ("outlast-kubeflow-view", "outlast-kubeflow-edit"):
        cluster.delete(kinds.CLUSTER_ROLE, name)
    ours = reversed([each for each in made if each["kind"] in ("Namespace", "ClusterRole", "CustomResourceDefinition")])
    gone = [(kinds.kind_of(document), document["metadata"]["name"]) for document in ours]
    for kind, name in gone:
        cluster.delete(kind, name)
    await_gone(cluster, *gone)  # what is on its way out cannot be used by the next test
    cluster.close()


@pytest.fixture
def profile(cluster: kube.Cluster) -> Iterator[str]:
    """A name for a profile; its namespace goes afterwards."""
    name = f"zip-{uuid.uuid4().hex[:8]}"
    yield name
    for kind in (kinds.PROFILE, kinds.NAMESPACE):
        if cluster.find(kind, name):
            cluster.delete(kind, name)
    await_gone(cluster, (kinds.PROFILE, name), (kinds.NAMESPACE, name))


def test_a_real_api_server_takes_it_all_once(cluster: kube.Cluster, profile: str, outlast: Outlast, tmp_path: Path) -> None:
    file = tmp_path / "kubeflow.yaml"
    mine = {**PROFILE, "name": profile, "podSecurity": "baseline", "labels": {"example.com/team": "ml"}}
    fields = {"profiles": [mine], "podDefaults": DEFAULTS, "spawner": {"images": [IMAGE]}}
    file.write_text(yaml.safe_dump(a_file(**fields)))

    code, dry, err = outlast("kubeflow", "apply", file, "--dry-run")
    assert (code, err) == (0, "")
    assert cluster.find(kinds.NAMESPACE, profile) is None
    code, out, err = outlast("kubeflow", "apply", file)
    assert (code, err, out) == (0, "", dry)
    assert {line.split()[0] for line in out.splitlines()} == {"created", "changed"}
    assert cluster.get(kinds.CONFIG_MAP, FORM[2], namespace="kubeflow")["data"][spawner.KEY] == spawner.added(
        NEW, {"image": [IMAGE]}
    )
    generation = cluster.get(kinds.DEPLOYMENT, APP[2], namespace="kubeflow")["metadata"]["generation"]
    assert generation == 2  # made by us, started again once

    code, out, err = outlast("kubeflow", "apply", file)
    assert (code, err, {line.split()[0] for line in out.splitlines()}) == (0, "", {"unchanged"})
    assert cluster.get(kinds.DEPLOYMENT, APP[2], namespace="kubeflow")["metadata"]["generation"] == generation
    labels = cluster.get(kinds.NAMESPACE, profile)["metadata"]["labels"]
    assert (labels["istio-injection"], labels["pod-security.kubernetes.io/enforce"], labels["example.com/team"]) == (
        "enabled",
        "baseline",
        "ml",
    )
    assert cluster.get(kinds.PROFILE, profile)["spec"]["resourceQuotaSpec"]["hard"] == {"cpu": "8"}

    # rights, as they add up
    def may(verb: str, what: str) -> str:
        account = f"--as=system:serviceaccount:{profile}:s3"
        asked = subprocess.run(["kubectl", "auth", "can-i", verb, what, account, "-n", profile], capture_output=True, text=True)
        return asked.stdout.strip()

    with kube.within(60) as stop:  # the controller adds them up
        while may("create", "elasticjobs.outlast.dev") != "yes" and not stop.wait(1):
            pass
    assert may("create", "elasticjobs.outlast.dev") == "yes"
    assert may("create", "namespaces") == "no"

    # the check
    code, out, _ = outlast("kubeflow", "check", file, "--no-aws")
    assert (code, out.partition(",")[0]) == (1, f"PodDefault {profile}/hf needs the Secret hf")
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf", "namespace": profile}})
    assert outlast("kubeflow", "check", file, "--no-aws") == (
        0,
        "",
        "outlast | no way to the dashboard without a login was found\n",
    )
    opened = json.dumps({"spec": {"type": "NodePort"}})
    subprocess.run(["kubectl", "-n", "istio-system", "patch", "service", "istio-ingressgateway", "-p", opened], check=True)
    code, out, _ = outlast("kubeflow", "check", file, "--no-aws")
    assert code == 1
    assert out.startswith(
        "Service istio-system/istio-ingressgateway opens the dashboard on a port of every node, past every login"
    )
