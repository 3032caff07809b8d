"""Which trackers a run has, from its environment: the job file's `tracking` (`contract.Env`) and the trackers' own variables.

The job file wins. Without it, MLFLOW_TRACKING_URI turns MLflow on, and WANDB_API_KEY or WANDB_MODE Weights & Biases, under
plain python and torchrun, too. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outlast.job.contract import Env

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
