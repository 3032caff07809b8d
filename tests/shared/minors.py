"""The four minor versions of Kubernetes with known schemas; fields that are too new or removed fail in the first or the last."""

from __future__ import annotations

import pytest
from kubernetes_validate import utils as schemas

MINORS = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-4:]
NEWEST = MINORS[-1]

each_minor = pytest.mark.parametrize(
    "version", [pytest.param(version, marks=pytest.mark.slow if version in MINORS[1:-1] else ()) for version in MINORS]
)
"""The versions in the middle run only with `make test-slow`."""
