"""Whole runs whose metrics go to trackers: what TensorBoard, MLflow and Weights & Biases see of runs that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ports
import processes
from outlast.job import contract
from outlast.job.contract import Env
from tracked import shown
from waits import until

TRAIN = """
import os, sys, time, torch
from outlast.training import session
steps = int(sys.argv[1])
with session.open(quiet=True) as run:
    step = run.resume({"net": torch.nn.Linear(2, 2)})
    run.parameters({"steps": 60})
    while step < steps:
        step += 1
        time.sleep(float(os.environ.get("PAUSE", "0")))
        run.log(step, loss=1 / step)
        if step % 5 == 0:
            run.log(step, val=2 / step)
            run.save(step)
"""
WAITS = "; training goes on, what is logged waits in metrics.jsonl"


class Script:
    """A plain script and its output."""

    def __init__(self, directory: Path, **environ: str) -> None:
        (directory / "train.py").write_text(TRAIN)
        self.directory, self.output = directory, directory / "out"
        self.environ = {**os.environ, "OUTLAST_OUTPUT": str(self.output), "OMP_NUM_THREADS": "1", **environ}

    @contextlib.contextmanager
    def training(self, steps: int, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        """The running script; what it prints is in `log`."""
        with (self.directory / "log").open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "train.py", str(steps)], cwd=self.directory, env={**self.environ, **environ}, stderr=log
            )
            try:
                yield started
            finally:
                processes.kill(started)

    def reach(self, step: int) -> None:
        """Wait until a step has been logged."""
        while True:
            with contextlib.suppress(OSError, IndexError, ValueError):
                last = (self.output / "metrics.jsonl").read_bytes().splitlines()[-1]
                if json.loads(last)["step"] >= step:
                    return
            time.sleep(0.01)


@pytest.mark.slow
def test_a_job_has_one_run_in_mlflow_over_a_kill_and_says_how_it_has_ended(machine, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    flow = machine.directory / "mlruns"
    path = machine.job(
        args=("--steps=200", "--pause=0.02", "--gate"),
        workers={"replicas": 1},
        tracking={"mlflow": str(flow), "tensorboard": True},
    )
    name = machine.submit(path)
    machine.at_step(name, 12)
    machine.backend.chaos(name, "kill-process", worker=0, rng=machine.rng)
    machine.wait(name, lambda status: status.restarts == 1 and status.step > 25)
    machine.backend.steer(name, "cancel")
    status = machine.wait(name, lambda status: status.state.final)
    assert status.warnings == []
    [run] = runs(flow.as_uri(), "job")
    assert (run.info.status, run.data.tags["outlast.run"]) == ("KILLED", status.run)
    last = [json.loads(line)["step"] for line in (machine.backend.output(name) / "metrics.jsonl").read_text().splitlines()][-1]
    assert steps(flow.as_uri(), run, "loss") == list(range(1, last + 1))
    assert [step for step, _ in shown(machine.backend.output(name) / "tensorboard/metrics")["loss"]] == list(range(1, last + 1))


@pytest.mark.slow
def test_a_job_whose_tracker_is_away_succeeds_and_its_status_says_what_is_not_there(machine):
    uri = f"http://127.0.0.1:{ports.free()}"
    path = machine.job(args=("--steps=40", "--pause=0.02"), workers={"replicas": 1}, tracking={"mlflow": uri})
    status = machine.run(path, timeout_s=300)
    assert status.state == "Succeeded"
    [warning] = status.warnings
    assert warning.startswith(f"MLflow ({uri}): has the metrics up to step 0 only (")
    assert "Connection refused" in warning
    assert warning.endswith("; metrics.jsonl has all, and the next start sends it")


@pytest.mark.slow
def test_pods_tell_the_trackers_that_their_run_has_failed(pods, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    two = pods(args=("--fail-at=15",), restarts={"limit": 1})
    flow = two.directory / "mlruns"
    two.start(0, 1, **{Env.MLFLOW: str(flow), Env.TENSORBOARD: "1"})
    assert set(two.codes(hurry=False, timeout_s=300).values()) == {contract.Exit.GIVEN_UP}
    [run] = runs(flow.as_uri(), "job")
    assert run.info.status == "FAILED", two.log(0)
    last = [json.loads(line)["step"] for line in (two.output / "metrics.jsonl").read_text().splitlines()][-1]
    assert steps(flow.as_uri(), run, "loss") == list(range(1, last + 1))
    assert [step for step, _ in shown(two.output / "tensorboard/metrics")["loss"]] == list(range(1, last + 1))


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def runs(uri: str, experiment: str) -> list[Any]:
    there = client(uri)
    return list(there.search_runs([there.get_experiment_by_name(experiment).experiment_id]))


def steps(uri: str, run: Any, name: str) -> list[int]:
    """The steps of a metric, in the order in which they arrived as far as MLflow knows."""
    return [metric.step for metric in client(uri).get_metric_history(run.info.run_id, name)]


@contextlib.contextmanager
def server(directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real MLflow server on SQLite, which answers."""
    command = [str(Path(sys.executable).with_name("mlflow")), "server", "--backend-store-uri", f"sqlite:///{directory}/mlflow.db"]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (directory / "server.log").open("ab") as log:
        started = subprocess.Popen(
            [*command, "--port", str(port), "--workers", "1"], env=environ, cwd=directory, stdout=log, stderr=log
        )
        try:
            while True:
                assert started.poll() is None, (directory / "server.log").read_text()
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
                time.sleep(0.1)
            yield started
        finally:
            processes.kill(started)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_and_tensorboard_see_one_run_across_three_kills(tmp_path: Path):
    """Rank 0 and its follower are killed three times; the server is stopped, killed and started again meanwhile."""
    port = ports.free()
    uri = f"http://127.0.0.1:{port}"
    script = Script(tmp_path, **{Env.TENSORBOARD: "1"}, MLFLOW_TRACKING_URI=uri, WANDB_MODE="offline")
    with server(tmp_path, port) as first:
        for life in (1, 2, 3):
            with script.training(10_000, PAUSE="0.02") as one:
                script.reach(150 * life)
                if life == 2:
                    for process in (psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)):
                        process.send_signal(signal.SIGSTOP)
                    script.reach(150 * life + 50)
                    for process in (psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)):
                        process.send_signal(signal.SIGCONT)
                if life == 3:
                    processes.kill(first)
                    until(lambda: WAITS in (tmp_path / "log").read_text())
                processes.kill(one)  # and the follower
    done = [json.loads(line)["step"] for line in (script.output / "metrics.jsonl").read_text().splitlines()][-1] + 100
    with server(tmp_path, port), script.training(done) as last:
        assert last.wait() == 0
        [run] = runs(uri, "out")
        assert (run.info.status, run.data.params) == ("FINISHED", {"steps": "60"})
        assert steps(uri, run, "loss") == list(range(1, done + 1))
        assert steps(uri, run, "val") == list(range(5, done + 1, 5))
    found = shown(script.output / "tensorboard/metrics")
    assert [step for step, _ in found["loss"]] == list(range(1, done + 1))
    assert [step for step, _ in found["val"]] == list(range(5, done + 1, 5))
    assert all(path.stat().st_size > 1000 for path in script.output.glob("wandb/offline-run-*/*.wandb"))
    assert len(list(script.output.glob("wandb/offline-run-*"))) == 4, "one for each start"
