"""A job's status, during and after its run: one document, written by the coordinator. On this machine it is `status.json`, on
Kubernetes the job's `.status`. Times are seconds since the epoch (UTC)."""

from __future__ import annotations

import dataclasses
import enum
import shlex
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from outlast.base import units
from outlast.job.contract import End
from outlast.job.failure import Failure


class State(enum.StrEnum):
    """A job's state. The last three states are final until the job is run again."""

    PENDING = "Pending"
    QUEUED = "Queued"
    """The job waits in a queue to be admitted. Any earlier training is saved."""
    RUNNING = "Running"
    RESIZING = "Resizing"
    """The world has saved its state after a planned change and forms again. No step is lost."""
    RESTARTING = "Restarting"
    """The world forms again after a failure, from the newest checkpoint."""
    SUSPENDED = "Suspended"
    INTERRUPTED = "Interrupted"
    """Training stopped early (Ctrl-C, a machine that goes away, a lost launcher). `outlast run` resumes it."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def final(self) -> bool:
        """True if the job has ended. Running an ended job again continues it, unless it has succeeded."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)

    @property
    def active(self) -> bool:
        """True if the job has not ended and is neither suspended nor interrupted. A process then drives the job."""
        return not self.final and self not in (State.SUSPENDED, State.INTERRUPTED)

    @property
    def trains(self) -> bool:
        """True if the job trains, and therefore has a rate."""
        return self in (State.RUNNING, State.RESIZING)


@dataclasses.dataclass(frozen=True)
class Ending:
    """A decision to end a run."""

    state: State
    reason: str
    code: int
    """Exit code of the job. If it is INTERRUPTED, workers are asked to save and leave; otherwise they are stopped at once."""
    end: End = End.UNKNOWN


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class RankStatus(_Model):
    """One training process."""

    rank: int
    local_rank: int
    pid: int | None = None
    step: int | None = None


class WorkerStatus(_Model):
    """One worker: an agent and its training processes."""

    index: int
    state: str = "starting"
    """starting | fetching | waiting | training | leaving | done | gone; pods can also be pending | running | failed"""
    pid: int | None = None
    ranks: list[RankStatus] = Field(default_factory=list)
    restarts: int = 0
    probes: str | None = None
    pod: str = ""
    node: str = ""
    step: int | None = None
    """Number of completed steps, if the steps of individual processes are unknown."""
    reason: str = ""
    """Why the worker waits, where it hangs, or how it ended."""
    slow: str = ""
    """A sentence about the worker's slowest rank, if that rank is slow (`job.slow_ranks`). It is also in the job's `warnings`."""
    differs: str = ""
    """A sentence about a rank whose copy of the common state differs from the other ranks' copies. It is also in the job's
    `warnings`."""
    replaced: int = 0
    """Number of times that the worker has started new processes, although its old ones could have stayed (`session.run`)."""

    @property
    def suspicions(self) -> list[str]:
        """Sentences about ranks that are slow or that differ, and about processes that could have stayed."""
        found = [sentence for sentence in (self.slow, self.differs) if sentence]
        if self.replaced:
            times = units.count(self.replaced, "time")
            found.append(
                f"worker {self.index} has replaced its processes {times}, although they could have stayed; its log says why"
            )
        return found


class BestStatus(_Model):
    """The best committed checkpoint, by the metric `by`."""

    step: int
    value: float
    by: str = ""


class CheckpointStatus(_Model):
    """The newest committed checkpoint."""

    step: int
    path: str
    time: float
    bytes: int = 0
    best: BestStatus | None = None
    """The best retained checkpoint, if the script logs the metric. Only set for jobs on this machine."""


class SnapshotStatus(_Model):
    """The newest complete snapshot in the workers' memory. Unlike a checkpoint, it is lost once all these workers are gone."""

    step: int
    every: int = 0
    """Number of steps between snapshots; 0 if unknown."""


class SavedStatus(_Model):
    """The newest file or directory that a plain script has written and that is named like a checkpoint."""

    name: str
    step: int | None = None
    time: float


class StoreStatus(_Model):
    """Progress of uploads to the output's store."""

    url: str
    step: int = 0
    pushed: float | None = None
    """When everything was last uploaded; None if it never was."""
    since: float | None = None
    """When uploads began to fail; None while they succeed."""
    error: str = ""
    backlog: int = 0
    doing: str = ""


class LostStatus(_Model):
    """Training time lost to failures: detecting them, re-forming the world, restoring, and repeating steps."""

    failures: int
    seconds: float
    last_s: float
    """Seconds that the last failure cost."""
    generation: int = -1
    up_to: bool = False
    """True if the costs are upper bounds, because the time of a fault is unknown."""


class JobStatus(_Model):
    """A job as `outlast status` shows it."""

    name: str
    namespace: str = ""
    run: str
    state: State = State.PENDING
    reason: str = ""
    """The last decision as a sentence, as in the log and the ledger."""
    waits: str = ""
    """While the job waits, `reason` without the remaining seconds, which change constantly."""
    end: End = End.UNKNOWN
    replicas: int = 0
    min: int = 0
    max: int = 0
    generation: int = 0
    world: list[int] = Field(default_factory=list)
    """Worker indices in rank order; empty while the job has no world."""
    processes: int = 1
    step: int = 0
    steps: int | None = None
    epoch: int | None = None
    """The epoch that `step` belongs to, if the log counts steps per epoch; -1 if the log does not name the epoch."""
    epoch_steps: int | None = None
    told: str = ""
    """Source of the step: `session`, `script` (`outlast.training.progress`), `log` (parsed from log lines), or empty if there is
    no step yet. `data` means that the job downloads data and has no steps."""
    rate: float | None = None
    restarts: int = 0
    """Number of counted failures since the start of the run."""
    interruptions: int = 0
    checkpoint: CheckpointStatus | None = None
    snapshot: SnapshotStatus | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """The last values passed to `run.log`, including their `step`. Only set for jobs on this machine."""
    saved: SavedStatus | None = None
    failure: Annotated[Failure | None, Field(validation_alias=AliasChoices("lastFailure", "failure"))] = None
    """The last failure. In an ElasticJob's status it is called `lastFailure`."""
    warnings: list[str] = Field(default_factory=list)
    """Problems that training survives, e.g. a save that found the disk full."""
    workers: list[WorkerStatus] = Field(default_factory=list)
    goodput: float | None = None
    """Share of the wall time spent on steps whose results were kept, from 0 to 1."""
    lost: LostStatus | None = None
    """Cost of failures so far; None before the first failure, and always for jobs in a cluster (use `outlast report`)."""
    output: str = ""
    file: str = ""
    """Path of the job file, for jobs on this machine; empty if the file is gone."""
    command: str = ""
    """The command that runs the job again, if it differs from `outlast run FILE`, as for a script on this machine."""
    store: StoreStatus | None = None
    launcher: int | None = None
    submitted: float = 0.0
    started: float | None = None
    finished: float | None = None
    exit_code: int | None = None

    @property
    def again(self) -> str:
        """The command that runs the job again, or continues it if it has not succeeded."""
        if self.command:
            return self.command
        return f"outlast run {shlex.quote(self.file)}" if self.file else "outlast run FILE"

    @property
    def from_step(self) -> str:
        """` from step 10` if the job has a checkpoint to continue from; otherwise empty."""
        return f" from step {self.checkpoint.step}" if self.checkpoint else ""

    @property
    def unsaved(self) -> str:
        """A warning that the last step of a succeeded job is not saved; empty if the step is saved, or if the job never saves."""
        last = self.checkpoint.step if self.checkpoint else 0
        saves = self.told in ("", "session") and (self.checkpoint or self.warnings)
        if self.state is not State.SUCCEEDED or not saves or last >= self.step:
            return ""
        newest = f"the newest checkpoint is that of step {last}" if last else "there is no checkpoint"
        return f"step {self.step} is not saved: {'; '.join([*self.warnings[:1], newest])}"

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last step, at the recent rate; None if the job does not train or the estimate is
        impossible."""
        if self.steps is None or not self.rate or not self.state.trains:
            return None
        return max(0.0, (self.steps - self.step) / self.rate)
