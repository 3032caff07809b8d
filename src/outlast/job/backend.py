"""The interface to the places where jobs run, used by `outlast run`, `status`, `scale` and the other verbs.

`outlast.local.backend` runs workers as child processes on this machine, `outlast.kubernetes.jobs.backend` as pods in a cluster.
Every method may raise `OutlastError`: `NotFound` for an unknown name, `AlreadyRunning` for a job that is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outlast.base.errors import OutlastError
from outlast.job.logs import LogLine

if TYPE_CHECKING:
    import random

    from outlast.job.ledger import Event
    from outlast.job.spec import Job
    from outlast.job.status import JobStatus


def not_ended(status: JobStatus, options: str = "") -> OutlastError:
    """Return the error for removing a job that has not ended. `options` are appended to the suggested command."""
    return OutlastError(f"job {status.name} has not ended ({status.state}); outlast cancel {status.name}{options} ends it")


class Backend(Protocol):
    """A place that runs jobs. `submit`, `scale` and `steer` return once the request is recorded."""

    poll_s: float
    notices: list[str]
    """Notes for the user about the most recently submitted or resumed job."""

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
        """Start a job, or continue its run if the run is incomplete, and return the run's id.

        `source` is the job file or script; relative paths in the job start from its directory. With `fresh`, the run starts from
        the beginning. With `take_over`, this machine takes the run over from another machine that is training it. Without
        `take_over`, if that machine may be dead, the call waits until that is certain, and passes a message to `say`. `command`
        is the command that runs the job again, if it is not `outlast run SOURCE`. `chaos` is a schedule of faults to inject (see
        `outlast.job.faults`). Raises AlreadyRunning.
        """

    def ensure(self, name: str) -> bool:
        """Restart the process that drives an active job if it is gone, and return whether it was gone. Does nothing in a
        cluster."""

    def list(self) -> Sequence[JobStatus]:
        """Return the status of every job, newest last."""

    def status(self, name: str) -> JobStatus:
        """Return a job's current status."""

    def scale(self, name: str, replicas: int) -> None:
        """Change the number of workers. Training saves its state, and a new world forms."""

    def steer(self, name: str, verb: str) -> None:
        """Carry out a verb that takes no parameters.

        `suspend` saves the state and releases the workers. `resume` continues any job that has not succeeded, with the job file
        as it was submitted. `cancel` ends the run but keeps its checkpoints, from which `submit` continues. `interrupt` saves the
        state and stops the run. `kill` ends all processes of the run at once.
        """

    def forget(self, name: str, *, output: bool = False) -> None:
        """Remove a job that has ended, so that it cannot resume. With `output`, also remove its output on this machine; output in
        a store or a claim is kept. Raises OutlastError if the job has not ended."""

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
        """Return the log lines of one worker, or the merged log lines of all workers.

        `tail` limits the existing lines per worker; 0 returns only new lines. `since_s` skips lines with timestamps older than
        this many seconds. `follow` waits for a job that has not started, calling `say`, and ends when the job ends.
        """

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        """Inject one of `faults.ACTIONS` into a worker, and return a sentence about the fault. `rng` picks the worker if `worker`
        is None."""

    def output(self, name: str) -> Path | str:
        """Return where the job's output is: a directory on this machine, or a description such as a store URL."""

    def events(self, name: str) -> Iterable[Event]:
        """Return the ledger of the job's run in chronological order. It can be iterated over more than once."""

    def metrics(self, name: str) -> Iterable[bytes]:
        """Return the lines of the job's metrics.jsonl; none if nothing was logged, or if only the job's pods have the file."""

    def job_file(self, name: str) -> str:
        """Return the text of the job file, without secrets; empty if the job file cannot be read."""

    def evaluate(self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda _: None) -> int:
        """Run the job's module with `--evaluate` and `args` in one foreground process, and return its exit code."""
