"""Local backend that starts no processes."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import local_checkpoints
from outlast import cli
from outlast.base import files
from outlast.job import contract, spec
from outlast.job.status import JobStatus, State
from outlast.local.backend import LocalBackend
from outlast.local.state_dir import StateDir

LONG_AGO, SOON = time.time() - 1e6, time.time() + 1e6


class Here:
    """Local backend in a temporary directory, with the code `src/train.py` and a job `job` that runs it."""

    def __init__(self, directory: Path) -> None:
        self.started: list[list[str]] = []
        self.environ: Mapping[str, str] = {}
        self.backend = LocalBackend(directory / "state", start=self._start)
        self.state_dir = StateDir(directory / "state" / "jobs" / "job")
        self.output = directory / "state" / "runs" / "job"
        self.source = directory / "src"
        self.source.mkdir()
        self.write("train.py", "v1")

    def _start(self, argv: Sequence[str], log: Path, *, env: Mapping[str, str]) -> None:
        self.started.append([*argv])
        self.environ = env

    def write(self, name: str, text: str, *, at: float = LONG_AGO) -> None:
        """Write a file of the code, by default with a time before any run."""
        path = self.source / name
        path.write_text(text)
        os.utime(path, (at, at))

    def submit(self, *, fresh: bool = False, name: str = "job", **fields: object) -> str:
        path = self.source.parent / "job.yaml"
        whole = {"script": "train.py", "code": str(self.source), "workers": {"replicas": 2}, **fields}
        document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": name}, "spec": whole}
        path.write_text(json.dumps(document))
        return self.backend.submit(spec.load(path), source=path, fresh=fresh)

    def leave(self, state: State, **fields: object) -> None:
        """Write the status that the launcher writes when it leaves."""
        status = JobStatus.model_validate_json(self.state_dir.status.read_bytes())
        last = status.model_copy(update={"state": state, "reason": "as told", "finished": time.time(), "exit_code": 75, **fields})
        files.replace(self.state_dir.status, last.model_dump_json())

    def save(self, step: int, run: str, generation: int = 3) -> None:
        """Write a checkpoint, as the run would commit it."""
        local_checkpoints.written(self.output / contract.CHECKPOINTS, step, {}, run=run, generation=generation)

    @contextlib.contextmanager
    def launcher(self, **fields: object) -> Iterator[None]:
        """Simulate a live launcher that has written this status."""
        with open(self.state_dir.lock, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.leave(State.RUNNING, **{"finished": None, "exit_code": None, **fields})
            yield

    def code(self) -> dict[str, str]:
        """Return the files of the copy that the job runs in; a link is shown by its target."""
        work = self.output / "work"
        found = (path for path in work.rglob("*") if path.is_symlink() or path.is_file())
        paths = sorted(path for path in found if path.name != ".outlast-files")
        name = lambda path: str(path.relative_to(work))  # noqa: E731
        return {name(path): f"-> {path.readlink()}" if path.is_symlink() else path.read_text() for path in paths}


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def outlast(here: Here, *words: object) -> tuple[int, str]:
    """Run a command on this backend. Returns the exit code and the output."""
    done = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(done), contextlib.redirect_stderr(done):
        cli.main([str(word) for word in words], backend=here.backend)
    return int(ended.value.code or 0), done.getvalue()
