"""`outlast chaos`: in a cluster pods are deleted and evicted, processes are harmed by a program that runs in their pod."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import apiserver
from outlast.base.errors import Forbidden, NotFound, OutlastError, Refused
from outlast.job import faults
from outlast.job.status import JobStatus, State, WorkerStatus
from outlast.kubernetes import api as kube
from outlast.kubernetes.jobs import backend, fault_in_pod, fault_injection
from outlast.local import fault_injection as local
from waits import until

Document = dict[str, Any]
LABELS = {"outlast.dev/job": "train", "app.kubernetes.io/component": "worker"}


class Pod(kube.Cluster):
    """The part of a cluster that runs commands in a pod: this machine is the pod."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = {"PATH": os.environ["PATH"], **environ}

    def exec_(self, pod: str, command: Sequence[str], **how: Any) -> kube.Ended:  # type: ignore[override]
        done = subprocess.run(command, input=how["stdin"], env=self.environ, capture_output=True, check=False)
        return kube.Ended(done.returncode, done.stdout, done.stderr)


def a_pod(name: str = "train-1", index: int = 1) -> Document:
    meta = {"name": name, "namespace": "n", "uid": f"uid-{name}", "labels": {**LABELS, "outlast.dev/worker": str(index)}}
    status = {"phase": "Running", "containerStatuses": [{"name": "worker", "state": {"running": {}}}]}
    return kube.kinds.POD.document(meta, spec={"containers": [{"name": "worker"}]}, status=status)


@contextlib.contextmanager
def a_process() -> Iterator[psutil.Process]:
    """One that does nothing."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_reports_to_its_agent_is_harmed(tmp_path: Path) -> None:
    pod = Pod({"OUTLAST_WORKER_STATE": str(tmp_path)})
    with a_process() as one, a_process() as two:
        for local_rank, process in enumerate((one, two)):
            record = json.dumps({"rank": 2 + local_rank, "pid": process.pid})
            (tmp_path / f"progress-{local_rank}.json").write_text(record.ljust(512))
        (tmp_path / "progress-2.json").write_text(json.dumps({"rank": 4, "pid": 2**22 + 1}))  # of one that is gone
        said = fault_injection.inject(pod, a_pod(), "stop", random.Random(0))
        assert said == f"stopped rank 3 on worker 1 (pid {two.pid} in pod train-1)"
        until(lambda: (one.status(), two.status()) == (psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED))
        two.resume()
        fault_injection.inject(pod, a_pod(), "kill-process", random.Random(0))
        until(lambda: two.status() == psutil.STATUS_ZOMBIE)


def test_a_slow_rank_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SLOW", (3, 0.02, 0.01))
    with a_process() as process:
        (tmp_path / "progress-0.json").write_text(json.dumps({"rank": 7, "pid": process.pid}))
        said = fault_injection.inject(Pod({"OUTLAST_WORKER_STATE": str(tmp_path)}), a_pod(), "slow", random.Random(0))
        assert said == f"slowed down rank 7 on worker 1 (pid {process.pid} in pod train-1)"
        deadline, goes_on = time.monotonic() + 60, 0
        while goes_on < 20:  # for longer than a turn
            assert time.monotonic() < deadline
            time.sleep(0.01)
            goes_on = goes_on + 1 if process.status() == psutil.STATUS_SLEEPING else 0


def test_ranks_of_plain_torchrun_are_known_by_their_variables(tmp_path: Path) -> None:
    """Never looked for in the real /proc here: there may be others that train on this machine."""
    found = {1: (0, {}), 7: (1, {}), 8: (7, {"RANK": "2", "LOCAL_RANK": "0"}), 9: (7, {"RANK": "3", "LOCAL_RANK": "1"})}
    found[20] = (9, {"RANK": "3", "LOCAL_RANK": "1"})  # it reads data for rank 3
    for pid, (parent, environ) in found.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        (tmp_path / str(pid) / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))
    (tmp_path / "30").mkdir()
    (tmp_path / "self").mkdir()
    assert fault_in_pod.torchrun_pids(str(tmp_path)) == {2: 8, 3: 9}


def test_what_cannot_be_harmed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    pod = Pod({"PATH": str(tmp_path)})
    with pytest.raises(OutlastError, match="stop failed in pod train-1: it has no Python"):
        fault_injection.inject(pod, a_pod(), "stop", random.Random(0))
    monkeypatch.setattr(pod, "exec_", lambda *_, **__: kube.Ended(3, b"", b""))
    with pytest.raises(NotFound, match="worker 1 has no training process now; wait until it trains"):
        fault_injection.inject(pod, a_pod(), "kill-process", random.Random(0))


def test_on_this_machine_a_worker_that_cannot_be_harmed_is_named() -> None:
    def refused(worker: int | None, *workers: WorkerStatus) -> str:
        status = JobStatus(name="exact", run="r", state=State.RESTARTING, workers=list(workers))
        with pytest.raises(OutlastError) as problem:
            local._target(status, worker, random.Random(0), needs_process=True)
        return str(problem.value)

    starts = WorkerStatus(index=0, pid=7)
    assert refused(7, starts, WorkerStatus(index=1)) == "exact has no worker 7; there are 0, 1"
    assert refused(7) == "exact has no worker 7; no worker runs now"
    assert refused(0, starts) == "worker 0 has no training process now (exact is Restarting); wait until it trains"
    assert refused(None, starts) == "no worker has a training process now (exact is Restarting); wait until it trains"
    over = JobStatus(name="exact", run="r", state=State.FAILED, file="job.yaml")
    with pytest.raises(OutlastError, match=r"\(exact is Failed\); it has ended; start it with: outlast run job.yaml"):
        local._target(over, None, random.Random(0), needs_process=False)


# Requests

Team = tuple[apiserver.ApiServer, backend.KubernetesBackend]


@pytest.fixture
def team(team: apiserver.ApiServer) -> Iterator[Team]:
    spec = {"parallelism": 2, "template": {"spec": {"containers": []}}}
    team.put(kube.kinds.JOB.document({"name": "train", "namespace": "n", "labels": LABELS}, spec=spec))
    for index in range(2):
        team.put(a_pod(f"train-{index}", index))
    with contextlib.closing(kube.connect(namespace="n")) as cluster:
        yield team, backend.KubernetesBackend(cluster)


def asked(api: apiserver.ApiServer, verb: str) -> list[str]:
    return [path.split("?")[0].split("/pods/")[1] for path in api.asked if path.startswith(verb) and "/pods/" in path]


def test_pods_are_deleted_and_evicted(team: Team) -> None:
    api, place = team
    said = place.chaos("train", "kill-worker", worker=0, rng=random.Random(0))
    assert said == "killed worker 0: deleted pod train-0 without grace"
    assert place.chaos("train", "term", worker=1, rng=random.Random(0)) == "terminated worker 1: deleted pod train-1"
    assert asked(api, "DELETE") == ["train-0", "train-1"]
    with pytest.raises(NotFound, match="train has no running worker; wait until it runs"):
        place.chaos("train", "term", worker=None, rng=random.Random(0))
    api.put(a_pod())
    api.prescribe("POST .*/pods/train-1/eviction", (201, {"kind": "Status", "status": "Success"}))
    assert place.chaos("train", "evict", worker=None, rng=random.Random(0)) == "evicted worker 1: pod train-1"


def test_a_refusal_says_what_refuses(team: Team) -> None:
    api, place = team
    budget = "Cannot evict pod as it would violate the pod's disruption budget."
    api.prescribe("POST .*/eviction", apiserver.status(429, "TooManyRequests", budget))
    with pytest.raises(Refused, match=r"Pod train-1 in namespace n cannot be evicted: Cannot evict pod as it would violate"):
        place.chaos("train", "evict", worker=1, rng=random.Random(0))
    assert len(asked(api, "POST")) == 1, "it is not tried again and again"
    text = 'pods "train-1" is forbidden: User "ada" cannot create resource "pods/eviction" in API group "" in the namespace "n"'
    api.prescribe("POST .*/eviction", apiserver.status(403, "Forbidden", text))
    with pytest.raises(
        Forbidden, match=r'User "ada" cannot create resource "pods/eviction" .*; ask the cluster.s administrator for a role'
    ):
        place.chaos("train", "evict", worker=1, rng=random.Random(0))
    with pytest.raises(NotFound, match="train has no worker 7; there are 0, 1"):
        place.chaos("train", "term", worker=7, rng=random.Random(0))


def test_fault_injection_in_a_cluster_is_confirmed(team: Team, outlast, monkeypatch) -> None:
    api, place = team
    run = functools.partial(outlast, "chaos", "train", "term", backend=place)
    asks = "Error: term injects faults into train in namespace n of here; add --yes to confirm\n"
    assert run("--worker", "0") == (2, "", asks)
    monkeypatch.setattr(sys, "stdin", tty := io.StringIO("no\n"))
    monkeypatch.setattr(tty, "isatty", lambda: True)
    assert run()[2].endswith("Error: nothing was changed\n")
    assert not asked(api, "DELETE")
    assert run("--worker", "0", "--yes") == (0, "terminated worker 0: deleted pod train-0\n", "")
