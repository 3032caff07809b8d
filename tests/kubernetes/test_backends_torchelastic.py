"""Jobs of elastic.pytorch.org are steered by the same commands as all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
from elastic_jobs import a_job
from outlast import cli
from outlast.base.errors import AlreadyRunning, OutlastError
from outlast.job.status import State
from outlast.kubernetes import api as kube
from outlast.kubernetes.jobs import backend, logs
from outlast.kubernetes.torchelastic import torchrun_pod

Document = dict[str, Any]


class Team:
    """A namespace with the job `cifar` of two workers that run."""

    def __init__(self, api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
        self.api, self.cluster = api, cluster
        self.place = backend.KubernetesBackend(cluster)
        self.job = a_job(worker={"template": {"spec": {"containers": [*CONTAINERS]}}})
        self.job["status"] = {"state": "Running", "restarts": 3, "startTime": "2027-01-15T08:00:05Z"}
        api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        api.put(self.job)
        for index in range(2):
            api.put(self.pod(index, {"running": {}}))
            api.logs[f"cifar-worker-{index}"] = [f"2027-01-15T08:00:1{index}Z here is {index}"]

    def pod(self, index: int, state: Document, phase: str = "Running") -> Document:
        names = ("proxy", torchrun_pod.CONTAINER)
        statuses = [{"name": name, "ready": True, "restartCount": 0, "state": state} for name in names]
        pod = torchrun_pod.pod(self.job, index)
        pod["spec"]["nodeName"] = "node-a"
        return {**pod, "status": {"phase": phase, "containerStatuses": statuses}}

    def written(self) -> Document:
        return self.cluster.get(kube.kinds.LEGACY_JOB, "cifar")


CONTAINERS = (
    {"name": "proxy"},
    {"name": torchrun_pod.CONTAINER, "args": ["--nproc-per-node=gpu", "a.py"], "resources": {"limits": {"nvidia.com/gpu": 8}}},
)


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    api = apiserver.ApiServer()
    with apiserver.connected(api, tmp_path, monkeypatch, "team") as cluster:
        yield Team(api, cluster)


def test_it_is_listed_and_its_status_is_what_its_operator_and_its_pods_say(team: Team) -> None:
    (listed,) = team.place.list()
    assert (listed.name, listed.state, listed.replicas, listed.min, listed.max) == ("cifar", State.RUNNING, 2, 1, 128)
    found = team.place.status("cifar")
    assert (found.state, found.reason, found.restarts, found.processes) == (State.RUNNING, "all 2 workers train", 3, 8)
    workers = [(each.index, each.state, each.pod) for each in found.workers]
    assert workers == [(index, "training", f"cifar-worker-{index}") for index in (0, 1)]
    assert not [path for path in team.api.asked if "/proxy/" in path], "it has no agents"


def test_its_logs_are_those_of_the_container_with_torchrun(team: Team) -> None:
    assert [line.text for line in team.place.logs("cifar")] == ["here is 0", "here is 1"]
    assert any(f"container={torchrun_pod.CONTAINER}" in path for path in team.api.asked)
    assert team.place.pod("cifar", 1)["metadata"]["name"] == "cifar-worker-1"


def test_it_is_scaled_suspended_resumed_and_cancelled(team: Team) -> None:
    with pytest.raises(OutlastError, match=r"200 workers are not between workers.min \(1\) and max \(128\) of cifar"):
        team.place.scale("cifar", 200)
    team.place.scale("cifar", 4)
    assert torchrun_pod.worker(team.written())["replicas"] == 4
    team.place.suspend("cifar")
    assert torchrun_pod.worker(team.written())["replicas"] == 0
    assert team.place.status("cifar").replicas == 4
    team.api.remove("pods", "cifar-worker-0", "team")
    team.api.remove("pods", "cifar-worker-1", "team")
    assert team.place.status("cifar").state is State.SUSPENDED
    team.place.resume("cifar")
    assert torchrun_pod.worker(team.written())["replicas"] == 4
    with pytest.raises(OutlastError, match="cifar is not suspended"):
        team.place.resume("cifar")
    with pytest.raises(OutlastError, match=r"cifar is of elastic.pytorch.org/v1alpha1 and has a script of its own"):
        team.place.evaluate("cifar", ())
    team.place.cancel("cifar")
    assert team.place.list() == []


def test_a_job_of_ours_is_not_taken_for_it(team: Team) -> None:
    ours = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "cifar"}, "spec": {}}
    with pytest.raises(AlreadyRunning, match="cifar is there already, as ElasticJob cifar of another file"):
        team.place.submission.make_room("cifar", [ours], fresh=False)


@pytest.mark.parametrize(
    "status",
    [{"state": "Failed"}, {"conditions": [{"type": "Succeeded", "status": "True"}]}],
    ids=["by the operator", "by the archived controller"],
)
def test_following_ends_with_the_job_whatever_becomes_of_its_pods(team, monkeypatch, status: Document) -> None:
    """A pod may be told to run for ever: its node is lost, or nobody is there to delete it."""
    monkeypatch.setattr(logs, "_QUIET_S", 0.3)
    monkeypatch.setattr(logs, "_POLL_S", 0.05)
    team.api.prescribe("cifar-worker-1/log.*follow=true", *[apiserver.goes_on()] * 50)
    ended = {**team.job, "status": status}
    lines = team.place.logs("cifar", follow=True)
    assert next(iter(lines)).text == "here is 0"
    team.api.put(ended)
    team.api.put(team.pod(0, {"terminated": {"exitCode": 1}}, "Failed"))
    assert "here is 1" in [line.text for line in lines]


@pytest.mark.parametrize(
    ("status", "replicas", "said"),
    [
        ({}, 2, "No operator has taken up the job: its status is empty"),
        ({"conditions": [{"type": "Failed", "status": "True", "message": "worker 1 left"}]}, 2, "It has failed: worker 1 left"),
        ({"conditions": [{"type": "Succeeded", "status": "True", "reason": "x"}]}, 2, "It is finished, and all is well"),
        ({"state": "Suspended"}, 0, "Its number of workers is 0\n  → go on with: outlast resume cifar"),
    ],
    ids=["nobody", "failed", "succeeded", "suspended"],
)
def test_why_knows_it(team: Team, capsys: pytest.CaptureFixture[str], status: Document, replicas: int, said: str) -> None:
    for index in range(2):
        team.api.remove("pods", f"cifar-worker-{index}", "team")
    torchrun_pod.worker(team.job)["replicas"] = replicas
    team.api.put({**team.job, "status": status})
    with pytest.raises(SystemExit):
        cli.main(["why", "cifar"], backend=team.place)
    assert capsys.readouterr().out.startswith(said)
