"""Messages for the user about a resumed run: the step it continues from, and what changed in its job.

Running a job again resumes its run from the newest checkpoint (decision 0021), unless the run has succeeded and the job does not
request more steps or epochs (`spec.version_differences.longer`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from outlast.base import units
from outlast.base.errors import OutlastError
from outlast.job import contract, spec
from outlast.job.shipping import code_files
from outlast.job.spec import version_differences
from outlast.job.status import JobStatus, SavedStatus, State
from outlast.job.workerfiles import guessed_progress
from outlast.storage import checkpoints
from outlast.storage.checkpoints import register
from outlast.storage.runs import Run
from outlast.storage.store import Store

_LEFT = {
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELLED: "was cancelled",
    State.INTERRUPTED: "was interrupted",
    State.SUSPENDED: "was suspended",
}
_LOCAL_FIELDS = ("code", "data", "env", "environment")
"""Fields that contain local paths, or that the job file in the output lacks."""


@dataclasses.dataclass(frozen=True)
class Resumption:
    state: State
    step: int
    """Step of the run's newest checkpoint; 0 if there is none."""
    ago_s: float | None = None
    """Seconds since the run ended; None if unknown."""
    where: str = ""
    """The output's URL if the run comes from a store; empty if it was on this machine."""
    saved: SavedStatus | None = None
    """The newest checkpoint of a plain script, guessed from file names."""

    @property
    def short(self) -> str:
        """Short message, such as `goes on from step 10`."""
        return f"goes on from step {self.step}" if self.step else f"goes on; {self._saved}"

    @property
    def _saved(self) -> str:
        return guessed_progress.sentence(self.saved, time.time()) if self.saved else "there is no checkpoint"

    @property
    def sentence(self) -> str:
        """Full message, such as `goes on from step 10 of the run that failed 3m00s ago; --fresh starts anew`."""
        ago = f" {units.human_seconds(self.ago_s)} ago" if self.ago_s is not None else ""
        where = f" in {self.where}" if self.where else ""
        run = f"the run{where} that {_LEFT.get(self.state, 'was stopped')}{ago}"
        if self.step:
            return f"goes on from step {self.step} of {run}; --fresh starts anew"
        saved = self._saved if self.saved else "it has no checkpoint, and keeps the files that it wrote"
        return f"goes on with {run}; {saved}; --fresh starts anew"


def find(output: Path, run: str, place: Store | None, status: JobStatus | None, elsewhere: Run | None = None) -> Resumption:
    """Find out how a run ended, on this machine (`status`) or `elsewhere`, and its newest checkpoint in `output` or `place`."""
    here = checkpoints.latest(checkpoints.list_(output / contract.CHECKPOINTS), run)
    remote = register.read(place, run) if place else None
    step = max(here.step if here else 0, remote.step if remote else 0)
    began = status or elsewhere
    saved = guessed_progress.newest(output, began.submitted) if began and not step else None
    if status is None:
        state = State(elsewhere.state if elsewhere else State.PENDING)
        return Resumption(state, step, where=place.url if place else "", saved=saved)
    ago_s = max(0.0, time.time() - status.finished) if status.finished else None
    return Resumption(status.state, step, ago_s, saved=saved)


def since(old: Path, job: spec.Job, files: Sequence[str], current: str, output: str) -> Iterator[str]:
    """Yield the changes to a job since its run was last submitted with the job file `old`. `files` are the code files that have
    changed. `current` is the output in which the run stays; empty if the run was on another machine, with other directories."""
    if current and files:
        yield f"changed since: {code_files.some(files)}"
    with contextlib.suppress(OSError, OutlastError):  # there is no file, or another version wrote it
        yield from version_differences.between(spec.load(old), job, but=("output",) if current else ("output", *_LOCAL_FIELDS))
    if current and output != current:
        yield f"output: the run stays where its checkpoints are, in {current}; --fresh starts anew in {output}"
