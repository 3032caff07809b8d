"""The files of examples/kubeflow: valid by Kubeflow's definitions, with a login on every way that they open."""

from __future__ import annotations

import json

import yaml

from outlast.kubernetes.manifests.installed import operator_deployment
from published_schemas import ROOT, Document, validate

KUBEFLOW = ROOT / "examples" / "kubeflow"
PAGE = (ROOT / "docs" / "guide" / "kubeflow.md").read_text()
ALB = "alb.ingress.kubernetes.io/"


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((KUBEFLOW / f"{name}.yaml").read_text()))


APPLIED = ["ingress", "profile", "pod-defaults", "rights", "notebook"]


def test_every_document_is_valid_by_published_schemas() -> None:
    for name in APPLIED:
        for document in documents(name):
            validate(document)


def test_the_way_in_asks_cognito_on_every_path_and_port() -> None:
    (ingress,) = documents("ingress")
    said = {name.removeprefix(ALB): value for name, value in ingress["metadata"]["annotations"].items()}
    assert (said["auth-type"], said["auth-on-unauthenticated-request"]) == ("cognito", "authenticate")
    assert (json.loads(said["listen-ports"]), said["ssl-redirect"]) == ([{"HTTP": 80}, {"HTTPS": 443}], "443")
    assert said["target-type"] == "ip", "instance would open a port of every node"
    (rule,) = ingress["spec"]["rules"]
    assert "defaultBackend" not in ingress["spec"]
    assert [each["path"] for each in rule["http"]["paths"]] == ["/"]
    assert rule["host"] in PAGE


def test_owners_of_profiles_may_what_viewers_and_editors_of_namespaces_may() -> None:
    roles = documents("rights")
    installed = {each["metadata"]["name"]: each for each in operator_deployment.files()["rbac.yaml"]}
    assert [each["rules"] for each in roles] == [installed[name]["rules"] for name in operator_deployment.USER_ROLES]
    labels = [label for each in roles for label in each["metadata"]["labels"]]
    assert labels == [f"rbac.authorization.kubeflow.org/aggregate-to-kubeflow-{role}" for role in ("view", "edit")]
