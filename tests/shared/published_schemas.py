"""Documents against the schemas that Kubernetes, in its last four minor versions, and other projects have published."""

from __future__ import annotations

import functools
import gzip
import json
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
def published(kind: str, group: str, version: str) -> jsonschema.Draft7Validator | None:
    """Return the schema that a project other than Kubernetes has published of a kind, if it is here."""
    for file in (ROOT / "tests/shared/published").rglob(f"{group}_{kind.lower()}*"):
        if file.suffix == ".gz":
            schema = json.loads(gzip.decompress(file.read_bytes()))
        else:
            definition = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            (found,) = [each for each in definition["spec"]["versions"] if (each["name"], each["served"]) == (version, True)]
            schema = found["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {"type": "object"}
        return jsonschema.Draft7Validator(closed(schema))
    return None


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
    """Validate a document against Kubernetes' schemas, or the published schema of another project's definition."""
    group, _, version = document["apiVersion"].rpartition("/")
    if schema := published(document["kind"], group, version):
        return schema.validate(document)
    return schemas.validate(document, NEWEST, strict=True)


MINORS = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-4:]
NEWEST = MINORS[-1]

each_minor = pytest.mark.parametrize(
    "version", [pytest.param(version, marks=pytest.mark.slow if version in MINORS[1:-1] else ()) for version in MINORS]
)
"""The versions in the middle run only with `make test-slow`."""
