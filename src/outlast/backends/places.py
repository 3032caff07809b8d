"""The state of one local job on disk: where each file is, and the two that the command line and the launcher share.

Every file is replaced as a whole, so whoever is killed half-way leaves the old truth. Written by: job, run, wanted: the command
line; memory, status: the launcher; workers/<index>: that worker's agent.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


@dataclasses.dataclass(frozen=True)
class Places:
    """Paths below one job's state directory."""

    state: Path

    @property
    def job(self) -> Path:
        """The job file as submitted, with absolute paths."""
        return self.state / "job.yaml"

    @property
    def run(self) -> Path:
        """`{run, submitted, file, output, code}`; written last at submission: a run exists from then on."""
        return self.state / "run.json"

    @property
    def wanted(self) -> Path:
        """See `Wanted`."""
        return self.state / "wanted.json"

    @property
    def status(self) -> Path:
        """A `status.JobStatus`."""
        return self.state / "status.json"

    @property
    def memory(self) -> Path:
        """What a launcher must know to take over from one that died."""
        return self.state / "launcher.json"

    @property
    def lock(self) -> Path:
        """Held by the launcher as long as it lives."""
        return self.state / "launcher.lock"

    @property
    def socket(self) -> Path:
        """Where workers find the launcher."""
        return self.state / "launcher.sock"

    @property
    def log(self) -> Path:
        """What the launcher decided, for people."""
        return self.state / "launcher.log"

    def worker(self, index: int) -> Path:
        """State directory of a worker."""
        return self.state / "workers" / str(index)

    def launched(self) -> bool:
        """Whether a launcher holds the lock."""
        try:
            with open(self.lock) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the user wants of a running job."""

    replicas: int
    end: str = ""
    """`interrupt`, `suspend`, `cancel` or `kill`; empty: train to the end."""

    @classmethod
    def read(cls, places: Places) -> Wanted:
        """The newest wish."""
        return cls(**json.loads(places.wanted.read_text()))

    def write(self, places: Places) -> None:
        """Record the wish; the launcher looks several times a second."""
        replace_text(places.wanted, json.dumps(dataclasses.asdict(self)))
