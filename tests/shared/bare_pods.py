"""Workers as in pods, but as local processes: no launcher exists, and only the test restarts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import machines
import ports
import waits
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.storage import runs

Final = Callable[..., dict[str, object]]


ARGS = ("--steps=60", "--pause=0.04", "--gate")


class Pods:
    def __init__(self, directory: Path, file: Path | None = None) -> None:
        self.directory, self.output, self._file = directory, directory / "out", file or directory / "job.yaml"
        self._port = ports.free()
        self.command, self.environ = [sys.executable, "-m", "outlast"], dict(os.environ)
        """The program `outlast` in the image of the pods, and the image's environment variables."""
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *indices: int, **more: str) -> None:
        for index in indices:
            state = self.directory / f"state-{index}"
            state.mkdir(exist_ok=True)
            environ = {
                **self.environ, Env.JOB: "job", Env.RUN: "job-1a2b3c4d", Env.WORKER: str(index), Env.JOB_FILE: str(self._file),
                Env.CODE: str(machines.PROGRAMS), Env.OUTPUT: str(self.output), Env.CACHE: str(self.directory / "cache"),
                Env.STATE: str(state), Env.LEDGER: str(self.output / contract.LEDGER), Env.NOTICE: str(state / contract.NOTICE),
                Env.CHECKPOINT_EVERY: "10 steps", Env.ADDRESS: "127.0.0.1", Env.RENDEZVOUS: f"c10d://localhost:{self._port}",
                "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **more,
            }  # fmt: skip
            self.run(index, environ)

    def run(self, index: int, environ: dict[str, str]) -> None:
        with (self.directory / f"pod-{index}.log").open("ab") as log:
            how = {"stdout": log, "stderr": log, "start_new_session": True}
            self.running[index] = subprocess.Popen([*self.command, "agent"], env=environ, **how)

    def mend(self, old: str, new: str) -> None:
        self._file.write_text(self._file.read_text().replace(old, new))

    def log(self, index: int) -> str:
        return (self.directory / f"pod-{index}.log").read_text()

    def wait(self, until: Callable[[], object], what: str, timeout_s: float = 180) -> None:
        logs = lambda: "\n".join(f"{i}: {self.log(i)}" for i in self.running)  # noqa: E731
        waits.until(until, timeout_s, lambda: f"{what} not within {timeout_s} s\n{logs()}", pause_s=0.02)

    def step(self, index: int = 0) -> int:
        record = progress_file.read(self.directory / f"state-{index}", 0)
        return record.step if record else 0

    def kill(self, index: int) -> None:
        pod = self.running.pop(index)
        if pod.poll() is None:
            os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()

    def close(self) -> None:
        for index in list(self.running):
            self.kill(index)

    def codes(self, *, hurry: bool = True, timeout_s: float = 180) -> dict[int, int]:
        """Wait until all agents have ended, and return their exit codes. With `hurry`, exact.py stops pausing and passes its
        gate."""
        if hurry:
            self.wait(self._claimed, "a run")  # which sets aside what it finds in the output
            (self.output / "hurry").touch()
        deadline = time.monotonic() + timeout_s
        return {i: pod.wait(max(0.1, deadline - time.monotonic())) for i, pod in self.running.items()}

    def _claimed(self) -> bool:
        return (self.output / runs.RUN).exists() and not self.record().aside

    def record(self) -> runs.Run:
        return runs.Run.parse((self.output / runs.RUN).read_bytes())

    def final(self) -> dict[str, object]:
        return dict(json.loads((self.output / "final.json").read_text()))


@pytest.fixture
def pods(machine) -> Iterator[Callable[..., Pods]]:
    made: list[Pods] = []

    def make(**fields: object) -> Pods:
        made.append(Pods(machine.directory, machine.job(**fields)))
        return made[-1]

    yield make
    for each in made:
        each.close()
