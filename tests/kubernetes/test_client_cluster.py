"""The Python API on a real cluster: a `Run` there is the same object as here.

The image is as for test_pods_cluster.py, with the packages of the extra `notebook` for a function that is sent by value.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import outlast
from namespaces import Namespace
from outlast.base.errors import NotFound

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PROGRAMS = Path(__file__).parents[1] / "shared" / "programs"


def counted(steps: int) -> None:
    print(f"the function has counted to {sum(1 for _ in range(steps))}", flush=True)


def test_a_run_in_pods_answers_as_one_of_this_machine(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROGRAMS)
    more = {"image": os.environ["OUTLAST_TEST_IMAGE"], "resources": {"cpu": "0.2", "memory": "2Gi"}}
    job = outlast.Job(script="exact.py", args=["--steps=3000", "--print"], workers=(2, 1, 2), **more)
    run = job.submit(namespace=namespace.name)
    assert run.wait(step=30, timeout="4m").state == "Running"
    assert "killed" in run.chaos("kill-process", worker=1)
    run.scale(1)
    run.wait(until=lambda status: status.state == "Running" and len(status.world) == 1, timeout="2m")
    run.suspend()
    run.wait(until="Suspended", timeout="2m")
    outlast.find("exact", namespace=namespace.name).resume()
    run.wait(until="Running", timeout="2m")
    assert run.wait(timeout="5m").step == 3000
    assert any("rank 0 step 3000" in line.text for line in run.logs())
    assert [each.name for each in outlast.runs(namespace=namespace.name)] == ["exact"]
    with pytest.raises(NotFound, match="in its pods only"):
        run.report()
    run.cancel()
    with pytest.raises(NotFound):
        run.status  # noqa: B018


def test_a_function_of_no_module_runs_in_a_pod(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(counted, "__module__", "__main__")
    more = {"image": os.environ["OUTLAST_TEST_IMAGE"], "resources": {"cpu": "0.2", "memory": "1Gi"}}
    run = outlast.Job(counted, 7, **more).submit(namespace=namespace.name)
    run.wait(timeout="4m")
    assert "the function has counted to 7" in [line.text for line in run.logs()]
