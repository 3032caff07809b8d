"""Where jobs run: one Protocol of few verbs, and the lookup that finds its implementation.

The command line and `outlast.chaos` know only this Protocol. `outlast.local.backend` runs workers as child processes of this
machine, `outlast.cluster.backend` as pods of a cluster. A backend says what went wrong as an `OutlastError`: `NotFound` for a
name it does not know, `AlreadyRunning` for a run that is on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random

    from outlast.ledger import Event
    from outlast.spec import Job
    from outlast.status import JobStatus


@dataclasses.dataclass(frozen=True)
class LogLine:
    """One line that a worker wrote, without its newline."""

    worker: int
    text: str


class Backend(Protocol):
    """A place that runs jobs. Every verb but `logs`, `chaos` and `evaluate` returns as soon as the wish is recorded."""

    look_s: float
    """How often it is worth looking how a job does, in seconds."""
    notices: list[str]
    """What people should know of the job that was submitted last, beside that it runs."""

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
        """Start a job, or go on with its run unless that has succeeded or this one is to be `fresh`; the run's id.

        `source` is the job file, or the script that takes its place: relative paths in the job start from its directory.
        `command` is what to give to run it again, where that is not `outlast run SOURCE`. `chaos` is a schedule (see
        `outlast.chaos`) that is carried out during the run. `take_over`: also from another machine that trains the run now; else
        we wait for as long as that one may be dead, and `say` so. When this returns, `status` tells of this run and no longer of
        how the last one ended.
        Raises AlreadyRunning when the job is running.
        """

    def ensure(self, name: str) -> bool:
        """Start what drives an unfinished run if that is gone; say whether it was. A cluster's controllers see to that."""

    def list(self) -> Sequence[JobStatus]:
        """All jobs known here, the newest last."""

    def status(self, name: str) -> JobStatus:
        """Where a job stands now."""

    def scale(self, name: str, replicas: int) -> None:
        """Wish for another number of workers; the world saves first and forms anew."""

    def suspend(self, name: str) -> None:
        """Save and give the workers back until `resume`."""

    def resume(self, name: str) -> None:
        """Go on with a job that was suspended, interrupted or cancelled, or that failed, as it was submitted."""

    def cancel(self, name: str) -> None:
        """End the run; what is saved stays, and `submit` goes on from there."""

    def interrupt(self, name: str) -> None:
        """Save and leave; the state becomes Interrupted and `submit` goes on from there."""

    def kill(self, name: str) -> None:
        """End every process of the job now; nothing is saved."""

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
        """The workers' log lines, merged, or those of one worker.

        `tail` begins with the last so many lines of each worker, 0 with what is written from now on; `since_s` with what is no
        older than so many seconds, where the times of lines are known. `follow` waits for a job that has not started, and ends
        when the job does; `say` is told what is being waited for.
        """

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        """Do one of `chaos.ACTIONS` to a worker (None: one that `rng` chooses); return the sentence that says what was done."""

    def output(self, name: str) -> Path | str:
        """Where the job's output is (checkpoints, logs, ledger): a directory of this machine, or words for a place
        elsewhere, such as the URL of one in a store."""

    def events(self, name: str) -> Iterable[Event]:
        """The ledger of the job's run, in the order of time; to be gone through as often as one likes."""

    def evaluate(self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda _: None) -> int:
        """Run the job's module with `--evaluate` and `args` in one process, in the foreground; return its exit code."""
