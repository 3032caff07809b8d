"""One job's state directory on this machine: its paths, and the files that the command line and the launcher share.

The command line writes `job.yaml`, `run.json`, `wanted.json` and `package`; the launcher writes `launcher.json`, `status.json`
and `rendezvous.key`; each worker's agent writes `workers/<index>/`. Files are replaced as a whole, and all but `package` and
`status.json` survive a power loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any, TypeVar

import psutil

from outlast.base import file_locks, files
from outlast.base.errors import OutlastError
from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.job.status import Ending, State

_Kind = TypeVar("_Kind", "Run", "Request")
VARIABLE = "OUTLAST_STATE_DIR"
"""Environment variable for the parent directory of all state directories. Default: `.outlast`."""


def root() -> Path:
    """Return the parent directory of all state directories on this machine."""
    return Path(os.environ.get(VARIABLE) or ".outlast").absolute()


class StateDir:
    """Paths in one job's state directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.yaml"
        """The job file as submitted, with absolute paths."""
        self.run = path / "run.json"
        """File with a `Run`. Submission writes it last, since the run exists once this file exists."""
        self.request = path / "wanted.json"
        self.status = path / "status.json"
        self.recovery = path / "launcher.json"
        """File with the launcher's state, for its successor."""
        self.package = path / "package"
        """File with the path of the run's copy of Outlast (`worker.launch.package_copy`); empty without a copy."""
        self.lock = path / "launcher.lock"
        self.key = path / "rendezvous.key"
        """File with the workers' authentication key, readable only by this user."""
        self.socket = path / "launcher.sock"
        self.log = path / "launcher.log"

    def worker(self, index: int) -> Path:
        return self.path / "workers" / str(index)

    def has_launcher(self) -> bool:
        try:
            with open(self.lock) as lock:
                return not file_locks.acquire(lock.fileno(), share=True)
        except FileNotFoundError:
            return False

    def secret(self) -> str:
        """Return the run's key, generating it if it does not exist. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return self.key.read_text()
        partial = self.key.with_name(f".{self.key.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        partial.replace(self.key)
        return self.key.read_text()

    def started_at(self) -> float:
        return self.run.stat().st_mtime

    def owns(self, index: int, pid: int) -> bool:
        """Return whether a process is a worker's agent or training process, and not just another process that reuses its pid."""
        try:
            process = psutil.Process(pid)
            for _ in range(20):
                if environ := process.environ():  # raises for a zombie
                    break
                time.sleep(0.01)  # the environment is empty during exec
        except psutil.Error:
            return False
        state = environ.get(contract.Env.STATE)
        return state is not None and os.path.realpath(state) == os.path.realpath(self.worker(index))


@dataclasses.dataclass(frozen=True)
class Run:
    run: str
    submitted: float
    file: str
    output: str
    code: str
    """Working directory of the training processes."""
    store: str = ""
    """The output's URL in a store; empty if the output is the directory `output`."""
    generation: int = 0
    """The run's newest generation when it was submitted or resumed."""
    owner: str = ""
    command: str = ""

    @classmethod
    def read(cls, state_dir: StateDir) -> Run:
        """Read the job's run. Raises OutlastError."""
        return _read(cls, state_dir.run, "remove it and `outlast run` starts anew; what was saved is kept in `previous/`")

    def write(self, state_dir: StateDir) -> None:
        """Record that the run was submitted or resumed now. From then on, the run exists."""
        files.replace(state_dir.run, json.dumps(dataclasses.asdict(self)), durable=True)


@dataclasses.dataclass(frozen=True)
class Request:
    replicas: int
    end: str = ""
    """`interrupt`, `suspend`, `cancel` or `kill`; empty to train to the end."""

    @classmethod
    def read(cls, state_dir: StateDir) -> Request:
        """Read the newest request. Raises OutlastError."""
        return _read(cls, state_dir.request, "`outlast run` with the job file writes it anew")

    def write(self, state_dir: StateDir) -> None:
        """Record the request. The launcher looks for new requests several times a second."""
        files.replace(state_dir.request, json.dumps(dataclasses.asdict(self)), durable=True)

    def replaced(self, state_dir: StateDir, **changes: Any) -> None:
        dataclasses.replace(self, **changes).write(state_dir)


def _read(kind: type[_Kind], path: Path, remedy: str) -> _Kind:
    try:
        return decode(kind, json.loads(path.read_bytes()))
    except (OSError, ValueError) as problem:
        raise OutlastError(f"{path} is empty, damaged or may not be read; {remedy}") from problem


ENDINGS = {
    "interrupt": Ending(State.INTERRUPTED, "stopped by the user", contract.Exit.INTERRUPTED),
    "suspend": Ending(State.SUSPENDED, "stopped by the user; `outlast resume` continues it", contract.Exit.INTERRUPTED),
    "cancel": Ending(State.CANCELLED, "cancelled by the user", contract.Exit.FAILED),
    "kill": Ending(State.INTERRUPTED, "killed by the user", contract.Exit.FAILED),
}


_TAIL = 8192
"""Bytes to read at the end of `metrics.jsonl`. Arbitrary, but longer than a line."""


def newest_metrics(output: Path) -> dict[str, float]:
    """Return the step and the values in the newest line of `metrics.jsonl`; empty if there is none or the file is unreadable."""
    try:
        with (output / contract.METRICS).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().rpartition(b"\n")[0].splitlines()
        newest = json.loads(lines[-1])
        return {name: float(value) for name, value in newest.items() if name not in ("time", "generation")}
    except (OSError, ValueError, TypeError, AttributeError, IndexError):
        return {}
