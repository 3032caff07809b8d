"""Local backend in a temporary directory, for tests of running jobs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from outlast.job import spec
from outlast.job.status import JobStatus
from outlast.local.backend import LocalBackend

PROGRAMS = Path(__file__).parent / "programs"


class Machine:
    """Local backend of one test, with methods that wait for its jobs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend = LocalBackend(directory / "state")
        self.rng = random.Random(0)

    def job(self, name: str = "job", *, args: tuple[str, ...] = (), **fields: object) -> Path:
        """Write a job file, by default of programs/exact.py with two workers and a save every 10 steps."""
        usual = {"script": "exact.py", "code": str(PROGRAMS), "args": list(args), "workers": {"replicas": 2}}
        whole = {**usual, "checkpoint": {"every": "10 steps"}, "hang": {"limit": "3s"}, **fields}
        document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}, "spec": whole}
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps({**document, "spec": {key: value for key, value in whole.items() if value is not None}}))
        return path

    def submit(self, path: Path, **how: bool) -> str:
        job = spec.load(path)
        self.backend.submit(job, source=path, **how)
        return job.metadata.name

    def run(self, path: Path, *, timeout_s: float = 180) -> JobStatus:
        return self.end(self.submit(path), timeout_s=timeout_s)

    def wait(self, name: str, until: Callable[[JobStatus], bool], *, timeout_s: float = 180) -> JobStatus:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.backend.status(name)
            if until(status):
                return status
            over = status.state.final and status.launcher is None and not until(self.backend.status(name))
            if over or time.monotonic() > deadline:
                log = (self.directory / "state" / "jobs" / name / "launcher.log").read_text()
                pytest.fail(f"within {timeout_s} s {name} is {status.state}: {status.reason}\n{log}")
            time.sleep(0.05)

    def at_step(self, name: str, step: int) -> JobStatus:
        """Wait until the job has trained beyond `step`, with all its processes known."""
        return self.wait(name, lambda s: s.step >= step and bool(s.world) and all(w.ranks for w in s.workers))

    def end(self, name: str, *, hurry: bool = False, timeout_s: float = 180) -> JobStatus:
        """Wait until the run is over, or has left with its state saved. With `hurry`, exact.py passes its gate."""

        def over(status: JobStatus) -> bool:
            if hurry and (output := Path(self.backend.output(name))).is_dir():
                (output / "hurry").touch()
            return status.finished is not None and status.launcher is None

        return self.wait(name, over, timeout_s=timeout_s)

    def final(self, name: str) -> dict[str, object]:
        """Return the final output of exact.py: step and hash of the weights. No loss, because a resume after the last step has
        none."""
        return dict(json.loads((self.backend.output(name) / "final.json").read_text()))

    def kill_everything(self) -> None:
        """SIGKILL every process that runs a job of this machine, and then what workers had just started, such as a launcher."""
        mine = str(self.directory)
        for process in (*psutil.process_iter(), *psutil.process_iter()):
            with contextlib.suppress(psutil.Error):
                state = process.environ().get("OUTLAST_WORKER_STATE", "")
                if process.pid != os.getpid() and (state.startswith(mine) or any(mine in part for part in process.cmdline())):
                    process.send_signal(signal.SIGKILL)
