"""What every backend does alike, held against each: processes of this machine, a small API server, a real cluster."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
from outlast.base.errors import NotFound, OutlastError
from outlast.job import spec
from outlast.job.backend import Backend
from outlast.job.status import JobStatus, State
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds
from outlast.kubernetes.jobs import backend as kubernetes
from outlast.local import backend as local

COMMAND = ["sh", "-c", "trap 'exit 75' TERM; echo here is $OUTLAST_WORKER; while :; do sleep 0.1; done"]


def a_file(directory: Path, *, image: str) -> Path:
    """A job that runs until it is told to leave."""
    template = {"spec": {"containers": [{"name": "worker", "imagePullPolicy": "IfNotPresent", "command": COMMAND}]}}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        template["spec"]["containers"][0][probe] = None  # type: ignore[assignment]
    path = directory / "job.yaml"
    fields: dict[str, Any] = {
        "image": image,
        "module": "outlast.recipes.smoke",
        "args": ["--epochs=100000"],
        "workers": {"replicas": 2, "min": 1, "max": 2},
        "resources": {"cpu": "50m", "memory": "64Mi"},
        "interruption": {"grace": "1s"},
        "template": template,
    }
    job = spec.Job.model_validate(
        {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "job"}, "spec": fields}
    )
    path.write_text(spec.dump(job))
    return path


class Place:
    """A backend, and what a test has to know of it."""

    def __init__(self, backend: Backend, file: Path, settle: Callable[[], None]) -> None:
        self.backend, self.file, self._settle = backend, file, settle

    def submit(self) -> str:
        return self.backend.submit(spec.load(self.file), source=self.file)

    def wait(self, until: Callable[[JobStatus], bool]) -> JobStatus:
        deadline = time.monotonic() + 90
        while not until(status := self.backend.status("job")):
            self._settle()
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        return status


def controller(api: apiserver.ApiServer) -> None:
    """What the controllers and nodes of a cluster would do now: pods for Jobs, which run at once, and none for suspended ones."""
    with api.lock:
        for (resource, _, _), job in list(api.documents.items()):
            if resource != "jobs.batch":
                continue
            wanted = 0 if job["spec"].get("suspend") else job["spec"]["parallelism"]
            owner = {"uid": job["metadata"]["uid"], "kind": "Job", "name": job["metadata"]["name"]}
            for index in range(2):
                name = f"{job['metadata']['name']}-{index}-x"
                there = ("pods", "default", name) in api.documents
                if index < wanted and not there:
                    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
                    meta = {"labels": job["spec"]["template"]["metadata"]["labels"], "annotations": annotations}
                    state = {"name": "worker", "ready": True, "restartCount": 0, "state": {"running": {}}}
                    api.logs[name] = [f"2026-01-01T00:00:0{index}Z here is {index}"]
                    api.put(
                        {
                            "apiVersion": "v1",
                            "kind": "Pod",
                            "metadata": {"name": name, "ownerReferences": [owner], **meta},
                            "spec": job["spec"]["template"]["spec"],
                            "status": {"phase": "Running", "containerStatuses": [state]},
                        }
                    )
                elif index >= wanted and there:
                    api.remove("pods", name)


CLUSTERS = ["api", pytest.param("cluster", marks=pytest.mark.cluster)]
JOBS = pytest.param("local", marks=[pytest.mark.jobs, pytest.mark.slow])  # in make test, tests/local/test_run_*.py do this


@pytest.fixture(params=["local", *CLUSTERS])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    image = os.environ.get("OUTLAST_TEST_IMAGE", "docker.io/library/outlast:test")
    file = a_file(tmp_path, image=image)
    if request.param == "local":
        job = spec.load(file)
        (tmp_path / "here.yaml").write_text(
            spec.dump(job.model_copy(update={"spec": job.spec.model_copy(update={"template": {}})}))
        )
        backend = local.LocalBackend(tmp_path / "state")
        yield Place(backend, tmp_path / "here.yaml", lambda: None)
        if backend.list() and not backend.status("job").state.final:
            backend.steer("job", "kill")
    elif request.param == "api":
        api = apiserver.ApiServer()
        with apiserver.connected(api, tmp_path, monkeypatch) as cluster:
            yield Place(kubernetes.KubernetesBackend(cluster, topology="indexed-job"), file, lambda: controller(api))
    else:
        namespace = f"kube-{uuid.uuid4().hex[:8]}"
        cluster = kube.connect(namespace=namespace)
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        yield Place(kubernetes.KubernetesBackend(cluster, topology="indexed-job"), file, lambda: None)
        cluster.delete(kinds.NAMESPACE, namespace)
        cluster.close()


def test_a_job_that_nobody_knows_is_not_found(place: Place) -> None:
    backend = place.backend
    assert list(backend.list()) == []
    for read in (backend.status, backend.output, backend.events):
        with pytest.raises(NotFound, match="none"):
            read("none")
    for verb in ("suspend", "resume", "cancel", "kill"):
        with pytest.raises(NotFound, match="none"):
            backend.steer("none", verb)
    with pytest.raises(NotFound):
        backend.scale("none", 1)
    with pytest.raises(NotFound):
        list(backend.logs("none"))


@pytest.mark.parametrize("place", [JOBS, *CLUSTERS], indirect=True)
def test_a_job_is_submitted_looked_at_scaled_suspended_resumed_and_cancelled(place: Place) -> None:
    backend = place.backend
    run = place.submit()
    assert backend.ensure("job") is False, "its launcher still starts"
    status = place.wait(lambda s: s.state is State.RUNNING and len(s.workers) == 2)
    assert (status.name, status.run, status.replicas, status.min, status.max) == ("job", run, 2, 1, 2)
    assert [listed.name for listed in backend.list()] == ["job"]
    assert backend.ensure("job") is False
    assert str(backend.output("job"))

    with pytest.raises(OutlastError, match="no-such-harm"):
        backend.chaos("job", "no-such-harm", worker=None, rng=random.Random(0))
    with pytest.raises(NotFound, match="job has no worker -1; there are 0, 1"):
        backend.chaos("job", "kill-worker", worker=-1, rng=random.Random(0))
    with pytest.raises(OutlastError, match=r"3 .*max"):
        backend.scale("job", 3)
    with pytest.raises(OutlastError, match="0 workers train nothing; outlast suspend job"):
        backend.scale("job", 0)
    backend.scale("job", 1)
    place.wait(lambda s: s.replicas == 1 and s.state is State.RUNNING and len(s.world) == 1)

    backend.steer("job", "suspend")
    place.wait(lambda s: s.state is State.SUSPENDED)
    backend.steer("job", "resume")
    place.wait(lambda s: s.state is State.RUNNING)

    backend.steer("job", "cancel")
    try:
        place.wait(lambda s: s.state is State.CANCELLED)
    except NotFound:  # nothing is left of it, which is as good
        assert list(backend.list()) == []
    with pytest.raises(OutlastError):
        backend.steer("job", "suspend")


@pytest.mark.parametrize("place", CLUSTERS, indirect=True)  # tests/local/test_local.py reads the logs of processes
def test_logs_are_all_lines_of_all_workers_or_of_one(place: Place) -> None:
    place.submit()
    place.wait(lambda s: s.state is State.RUNNING and len(s.world) == 2)
    lines = list(place.backend.logs("job"))
    assert sorted((line.worker, line.text) for line in lines) == [(0, "here is 0"), (1, "here is 1")]
    assert [line.text for line in place.backend.logs("job", worker=1, tail=1)] == ["here is 1"]
    place.backend.steer("job", "kill")
