"""The status of a job while it runs and after: one document, written by its coordinator.

On this machine the launcher writes it to `status.json`; on Kubernetes it is the job's `.status`. Times are seconds since the
epoch (UTC).
"""

from __future__ import annotations

import enum
import shlex
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from outlast.job.contract import End
from outlast.job.failure import Failure


class State(enum.StrEnum):
    """Where a job stands. The last three are final, unless the job is run again."""

    PENDING = "Pending"
    QUEUED = "Queued"
    """It waits in a queue to be admitted; what it had trained before is saved."""
    RUNNING = "Running"
    RESIZING = "Resizing"
    """A planned change: the world saves and is formed again; nothing is lost."""
    RESTARTING = "Restarting"
    """A failure: the world is formed again from the newest checkpoint."""
    SUSPENDED = "Suspended"
    INTERRUPTED = "Interrupted"
    """Saved and left (Ctrl-C, machine going away): `outlast run` goes on from here."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def final(self) -> bool:
        """Whether it has ended. One that has not succeeded goes on when its job is run again."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)

    @property
    def active(self) -> bool:
        """Whether something drives the job: it has not ended, and is neither suspended nor interrupted."""
        return not self.final and self not in (State.SUSPENDED, State.INTERRUPTED)

    @property
    def trains(self) -> bool:
        """Whether steps are being done, so that there is a rate."""
        return self in (State.RUNNING, State.RESIZING)


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
    """starting | fetching | waiting | training | leaving | done | gone; of pods also pending | running | failed"""
    pid: int | None = None
    ranks: list[RankStatus] = Field(default_factory=list)
    restarts: int = 0
    probes: str | None = None
    """Where `/healthz`, `/readyz` and `/metrics` are served."""
    pod: str = ""
    """Its pod, on Kubernetes."""
    node: str = ""
    """The pod's node."""
    step: int | None = None
    """Steps done, where single processes are not known."""
    reason: str = ""
    """Why it waits, where it stands still, or how it ended."""


class BestStatus(_Model):
    """The best of the committed checkpoints."""

    step: int
    value: float
    by: str = ""
    """What was measured."""


class CheckpointStatus(_Model):
    """The newest committed checkpoint."""

    step: int
    path: str
    time: float
    bytes: int = 0
    best: BestStatus | None = None
    """The best one that is kept, where the training measures them; of jobs of this machine."""


class SnapshotStatus(_Model):
    """The newest complete snapshot in the memory of the workers. It is no checkpoint: it is gone when all of them are."""

    step: int
    every: int = 0
    """Steps between two snapshots; 0: unknown."""


class SavedStatus(_Model):
    """The newest file or directory that looks like a checkpoint of a plain script, by its name."""

    name: str
    """Its path in the output."""
    step: int | None = None
    """The step that its name says."""
    time: float


class StoreStatus(_Model):
    """How far the output is in its store."""

    url: str
    step: int = 0
    """The newest checkpoint there."""
    pushed: float | None = None
    """When all that there was had been pushed, seconds since the epoch; none: not yet."""
    since: float | None = None
    """Since when pushing fails; none while it works."""
    error: str = ""
    """Why it fails."""
    backlog: int = 0
    """Bytes of checkpoints that are not there yet."""
    doing: str = ""
    """What is being pushed now."""


class LostStatus(_Model):
    """Training that failures have cost: detection, re-forming, restoring, and steps done again."""

    failures: int
    """Those that training has recovered from."""
    seconds: float
    """Of all of them."""
    last_s: float
    """Of the last one."""
    generation: int = -1
    """The world that the last one ended."""
    up_to: bool = False
    """Whether that is the most that it can have been: the moment of a fault is not always known."""


class JobStatus(_Model):
    """A job as `outlast status` shows it."""

    name: str
    run: str
    state: State = State.PENDING
    reason: str = ""
    """The sentence of the last decision; the same one stands in the log and the ledger."""
    waits: str = ""
    """While it waits: `reason` without the seconds that are left, which change all the time."""
    end: End = End.UNKNOWN
    """Why it ended for good, if it did."""
    replicas: int = 0
    min: int = 0
    max: int = 0
    generation: int = 0
    world: list[int] = Field(default_factory=list)
    """Worker indices in rank order; empty while there is no world."""
    processes: int = 1
    """Training processes per worker."""
    step: int = 0
    steps: int | None = None
    """Total steps of the run, when the training says so."""
    epoch: int | None = None
    """Of a log that counts the steps of each epoch: then `step` is such a count. -1: its lines do not name the epoch."""
    epoch_steps: int | None = None
    told: str = ""
    """Who tells the step: `session`, `script` (`outlast.training.progress`) or `log` (read from its lines); empty: nobody yet.
    `data`: it has no steps, for it brings data."""
    rate: float | None = None
    """Steps per second, recently."""
    restarts: int = 0
    """Failures that counted since the start of the run."""
    interruptions: int = 0
    checkpoint: CheckpointStatus | None = None
    snapshot: SnapshotStatus | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """What the training logged last by `run.log`, and its `step`; of jobs of this machine."""
    saved: SavedStatus | None = None
    """What a plain script has saved, as far as names tell."""
    failure: Annotated[Failure | None, Field(validation_alias=AliasChoices("lastFailure", "failure"))] = None
    """The last one; an ElasticJob's status calls it `lastFailure`."""
    warnings: list[str] = Field(default_factory=list)
    """What the user should know although training goes on, e.g. a save that found the disk full."""
    workers: list[WorkerStatus] = Field(default_factory=list)
    goodput: float | None = None
    """Share of the wall time spent on steps that were kept, 0 ... 1."""
    lost: LostStatus | None = None
    """What failures have cost so far; none before the first, and for jobs in a cluster, where `outlast report` knows."""
    output: str = ""
    file: str = ""
    """The job file, of a job of this machine; empty when it is not there any more."""
    command: str = ""
    """The command that runs it again, where that is not `outlast run FILE`: that of a script, on this machine."""
    store: StoreStatus | None = None
    """The output in its store, if it has one."""
    launcher: int | None = None
    """Process id of the launcher, on this machine."""
    submitted: float = 0.0
    started: float | None = None
    finished: float | None = None
    exit_code: int | None = None

    @property
    def again(self) -> str:
        """The command that runs the job again, which goes on with it unless it has succeeded."""
        if self.command:
            return self.command
        return f"outlast run {shlex.quote(self.file)}" if self.file else "outlast run FILE"

    @property
    def from_step(self) -> str:
        """` from step 10`, where it would go on; empty when it has no checkpoint."""
        return f" from step {self.checkpoint.step}" if self.checkpoint else ""

    @property
    def unsaved(self) -> str:
        """That the last step of a job that has succeeded is not saved; empty when it is, or nothing was ever to be saved."""
        last = self.checkpoint.step if self.checkpoint else 0
        saves = self.told in ("", "session") and (self.checkpoint or self.warnings)
        if self.state is not State.SUCCEEDED or not saves or last >= self.step:
            return ""
        newest = f"the newest checkpoint is that of step {last}" if last else "there is no checkpoint"
        return f"step {self.step} is not saved: {'; '.join([*self.warnings[:1], newest])}"

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the recent rate, while it trains and both are known."""
        if self.steps is None or not self.rate or not self.state.trains:
            return None
        return max(0.0, (self.steps - self.step) / self.rate)
