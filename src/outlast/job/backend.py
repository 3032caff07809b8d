"""The interface to the places where jobs run, behind `outlast run`, `status`, `scale` and the other verbs.

The command line and `outlast.job.chaos` know only this Protocol; `cli.which` finds the implementation. `outlast.local.backend`
runs workers as child processes of this machine, `outlast.kubernetes.jobs.backend` as pods of a cluster. Every method raises
`OutlastError`: `NotFound` for an unknown name, `AlreadyRunning` for a job that is running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random

    from outlast.job.ledger import Event
    from outlast.job.spec import Job
    from outlast.job.status import JobStatus


@dataclasses.dataclass(frozen=True)
class LogLine:
    """One line of a worker's log, without its newline."""

    worker: int
    text: str


class Backend(Protocol):
    """A place that runs jobs. `submit`, `scale` and `steer` return once the request is recorded."""

    poll_s: float
    """Poll interval for the status of a job, in seconds."""
    notices: list[str]
    """Notes for the user about the job that was submitted or resumed last."""

    def submit(
        self,
        job: Job,
        *,
        source: Path,
        chaos: Path | None = None,
        fresh: bool = False,
        take_over: bool = False,
        command: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Start a job, or continue its run unless that is complete; returns the run's id.

        `source` is the job file, or the script given instead of one; relative paths in the job start from its directory. With
        `fresh` the run starts from the beginning. With `take_over` it is taken over from a machine that trains it now;
        otherwise, if that machine may be dead, the call waits to find out and reports this to `say`. `command` is the command
        that runs the job again, unless that is `outlast run SOURCE`. `chaos` is a schedule of faults to inject (see
        `outlast.job.chaos`). From now on, `status` returns the status of this run. Raises AlreadyRunning.
        """

    def ensure(self, name: str) -> bool:
        """Restart the process that drives an active job if that process is gone; returns whether it was gone. In a cluster,
        controllers drive the job, and nothing is done."""

    def list(self) -> Sequence[JobStatus]:
        """Return all jobs, the newest last."""

    def status(self, name: str) -> JobStatus:
        """Return the current status of a job."""

    def scale(self, name: str, replicas: int) -> None:
        """Change the number of workers; training saves, and a new world forms."""

    def steer(self, name: str, verb: str) -> None:
        """Carry out a verb without parameters.

        `suspend` saves and releases the workers until `resume`, which continues any job that has not succeeded, as it was
        submitted. `cancel` ends the run; its checkpoints stay, and `submit` continues from them. `interrupt` saves and stops the
        run, `kill` ends all its processes at once.
        """

    def logs(
        self,
        name: str,
        *,
        worker: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since_s: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Return the log lines of one worker, or of all workers, merged.

        `tail` is the number of lines of each worker to begin with, counted from the end: with 0, only lines written from now on.
        `since_s` leaves out lines older than this many seconds, if lines have times. `follow` waits for a job that has not
        started, calling `say`, and ends when the job does.
        """

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        """Inject one of `chaos.ACTIONS` into a worker (None: one that `rng` picks); returns a sentence about it."""

    def output(self, name: str) -> Path | str:
        """Return the place of the job's output (checkpoints, logs, ledger): a directory on this machine, or a description of
        another place, such as the URL of a store."""

    def events(self, name: str) -> Iterable[Event]:
        """Return the ledger of the job's run in order of time; may be iterated more than once."""

    def evaluate(self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda _: None) -> int:
        """Run the job's module with `--evaluate` and `args` in one process, in the foreground; returns its exit code."""
