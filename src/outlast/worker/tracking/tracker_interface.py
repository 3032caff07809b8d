"""Defines a tracker's interface, the settings for a run's trackers, and how the run identifies itself. The job file's `tracking`
takes precedence. Otherwise MLFLOW_TRACKING_URI enables MLflow, and WANDB_API_KEY or WANDB_MODE enables Weights & Biases."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outlast.job.contract import Env
from outlast.worker.tracking.missing_points import Point, Position


class Status(enum.StrEnum):
    """A run's final status, with MLflow's names."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


@dataclass(frozen=True)
class Run:
    """A run as shown in trackers."""

    id: str
    """The run's unique id, which stays the same across kills and resizes."""
    name: str
    """The job's name, or the output directory's name if there is no job."""
    output: Path
    place: str
    """The output's directory or URL, as shown in trackers."""

    @classmethod
    def of(cls, output: Path, id: str, environ: Mapping[str, str]) -> Run:
        """Return the run of a process with this environment."""
        place = environ.get(Env.STORE) or str(output.absolute())
        return cls(id, environ.get(Env.JOB) or output.absolute().name, output, place.rstrip("/"))


class Sink(Protocol):
    """A connection to a tracker. After any exception, it is opened again, and all values that have not arrived are sent again. An
    OutlastError means that this cannot help before the user has changed something."""

    title: str
    """The name in messages, such as `MLflow (http://mlflow:5000)`."""
    pause_s: float

    def open(self) -> Position:
        """Find or create the run in the tracker. Returns, for each metric, the last step that the tracker has received."""

    def rename(self, name: str) -> str:
        """Return the name under which the tracker stores a value."""

    def send(self, points: Sequence[Point]) -> None:
        """Send values, and return once they have arrived in the tracker."""

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Show the run's settings in the tracker."""

    def end(self, status: Status | None) -> None:
        """Show the run's final status; None if the run continues or its end is unknown."""


NONE = "none"
"""Value of `tracking.mlflow` that turns MLflow off, even if MLFLOW_TRACKING_URI is set."""


@dataclass(frozen=True)
class Settings:
    """The trackers that a run requests, and their settings."""

    tensorboard: bool = False
    mlflow: str = ""
    """URI of a server or database, or an absolute path; empty to disable MLflow."""
    experiment: str = ""
    """The experiment's name; empty to use the job's name."""
    wandb: bool = False
    project: str = ""
    """The Weights & Biases project; empty to use the job's name."""

    def __bool__(self) -> bool:
        return bool(self.tensorboard or self.mlflow or self.wandb)


def settings(environ: Mapping[str, str]) -> Settings:
    uri = environ.get(Env.MLFLOW) or environ.get("MLFLOW_TRACKING_URI", "")
    mode = environ.get("WANDB_MODE", "").lower()
    off = mode == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes")
    return Settings(
        tensorboard=environ.get(Env.TENSORBOARD) == "1",
        mlflow="" if uri.lower() == NONE else uri,
        experiment=environ.get(Env.EXPERIMENT) or environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        wandb=bool(mode or environ.get("WANDB_API_KEY")) and not off,
        project=environ.get(Env.EXPERIMENT) or environ.get("WANDB_PROJECT", ""),
    )
