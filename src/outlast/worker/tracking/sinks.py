"""The interface of a tracker, which trackers a run has, and what it tells them about itself.

The job file's `tracking` (`contract.Env`) wins. Without it, MLFLOW_TRACKING_URI turns MLflow on, and WANDB_API_KEY or WANDB_MODE
Weights & Biases, under plain python and torchrun, too.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outlast.job import contract
from outlast.job.contract import Env
from outlast.worker.tracking.lines import Point, Position


class Status(enum.StrEnum):
    """How a run has ended, by MLflow's names."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


@dataclass(frozen=True)
class Run:
    """The run that is tracked."""

    id: str
    """The same across kills and resizes, another one for every other run."""
    name: str
    """Of the job, or of the output directory where there is no job."""
    job: str
    """Name of the job; empty under plain python and torchrun."""
    output: Path
    place: str
    """Directory or URL of the output, for links."""

    @classmethod
    def of(cls, output: Path, id: str, environ: Mapping[str, str]) -> Run:
        """The run of a process with this environment."""
        job = environ.get(Env.JOB, "")
        place = environ.get(Env.STORE) or str(output.absolute())
        return cls(id, job or output.absolute().name, job, output, place.rstrip("/"))

    def checkpoints(self) -> dict[str, str]:
        """The committed checkpoints that are kept, by name, each with its place."""
        try:
            found = sorted((self.output / contract.CHECKPOINTS).glob(f"step-*/{contract.COMMIT}"))
        except OSError:
            return {}
        return {path.parent.name: f"{self.place}/{contract.CHECKPOINTS}/{path.parent.name}" for path in found}


class Sink(Protocol):
    """A tracker. Any method may raise any exception: then the sink is opened again, and what was not sent comes again.

    OutlastError means that another attempt cannot help.
    """

    title: str
    """For messages: `MLflow (http://mlflow:5000)`."""
    pause_s: float
    """Interval of sending."""

    def open(self) -> Position:
        """Find or make the run there; returns the last step that it has of each name."""

    def rename(self, name: str) -> str:
        """The name of a value there."""

    def send(self, points: Sequence[Point]) -> None:
        """Add values. They have arrived when this returns."""

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Show the settings of the run."""

    def checkpoints(self, places: Mapping[str, str]) -> None:
        """Show where the checkpoints are, by name, without copying them."""

    def end(self, status: Status | None) -> None:
        """Show how the run has ended; None: it goes on, or nobody knows."""


def text(value: Any) -> str:
    """A setting as text: words as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def read(path: Path) -> dict[str, Any]:
    """The parameters in a file; none if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


NONE = "none"
"""As `tracking.mlflow`: nothing goes to MLflow, even if MLFLOW_TRACKING_URI is set."""


@dataclass(frozen=True)
class Wanted:
    """Trackers of a run."""

    tensorboard: bool = False
    mlflow: str = ""
    """URI of a server or database, or an absolute path; empty: not wanted."""
    experiment: str = ""
    """Name of the experiment there; empty: that of the job."""
    wandb: bool = False
    project: str = ""
    """Its project; empty: the name of the job."""

    def __bool__(self) -> bool:
        return bool(self.tensorboard or self.mlflow or self.wandb)


def wanted(environ: Mapping[str, str]) -> Wanted:
    """What a process with this environment is to track."""
    uri = environ.get(Env.MLFLOW) or environ.get("MLFLOW_TRACKING_URI", "")
    mode = environ.get("WANDB_MODE", "").lower()
    off = mode == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes")
    return Wanted(
        tensorboard=environ.get(Env.TENSORBOARD) == "1",
        mlflow="" if uri.lower() == NONE else uri,
        experiment=environ.get(Env.EXPERIMENT) or environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        wandb=bool(mode or environ.get("WANDB_API_KEY")) and not off,
        project=environ.get(Env.EXPERIMENT) or environ.get("WANDB_PROJECT", ""),
    )
