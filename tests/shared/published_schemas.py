"""Documents against the schemas that Kubernetes, in its last four minor versions, and other projects have published."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

ROOT = Path(__file__).parents[2]
ACCOUNT, STATEFUL_SET, KUBEFLOW = (
    ROOT / "examples" / name for name in ("notebook/account.yaml", "notebook/statefulset.yaml", "kubeflow/notebook.yaml")
)
"""Manifests of a notebook in a cluster."""


Document = dict[str, Any]


@functools.cache
def published(kind: str, api_version: str) -> jsonschema.Draft7Validator:
    """Return the schema of one of Kubeflow's kinds."""
    text = (ROOT / f"tests/shared/published/kubeflow/kubeflow.org_{kind.lower()}s.yaml").read_text()
    definition = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [each for each in definition["spec"]["versions"] if f"kubeflow.org/{each['name']}" == api_version]
    assert version["served"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    return jsonschema.Draft7Validator({**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}})


def closed(schema: Any) -> Any:
    """Return a schema in which an unknown field is an error, as for a strict API server."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    if "properties" in found and "additionalProperties" not in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def validate(document: Document) -> None:
    """Validate a document against Kubernetes' schemas, or the published schema of a Kubeflow definition."""
    if not document["apiVersion"].startswith("kubeflow.org/"):
        return schemas.validate(document, NEWEST, strict=True)
    return published(document["kind"], document["apiVersion"]).validate(document)


MINORS = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-4:]
NEWEST = MINORS[-1]

each_minor = pytest.mark.parametrize(
    "version", [pytest.param(version, marks=pytest.mark.slow if version in MINORS[1:-1] else ()) for version in MINORS]
)
"""The versions in the middle run only with `make test-slow`."""
