"""Fixtures of tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import apiserver
from apiserver import again_soon  # noqa: F401
from outlast.kubernetes.api import kinds


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    """A cluster with a namespace `n`, which a kubeconfig names, and no job on this machine."""
    api = apiserver.ApiServer(unserved=())
    with apiserver.entered(api, tmp_path, monkeypatch):
        monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
        api.put(kinds.NAMESPACE.document({"name": "n"}))
        yield api
