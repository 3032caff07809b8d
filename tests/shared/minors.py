"""The four minors of Kubernetes whose schemas are known: what is too new or gone shows in the first or the last of them."""

from __future__ import annotations

import pytest
from kubernetes_validate import utils as schemas

MINORS = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-4:]
NEWEST = MINORS[-1]

each_minor = pytest.mark.parametrize(
    "version", [pytest.param(version, marks=pytest.mark.slow if version in MINORS[1:-1] else ()) for version in MINORS]
)
"""Those between them are for `make test-slow`."""
