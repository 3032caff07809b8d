"""Sends metrics to Weights & Biases, as one run that is resumed by its id. The client's own variables (WANDB_API_KEY, WANDB_MODE)
configure it. The client has its own process and buffer, and a kill may lose part of the buffer. So the position is the smaller of
the server's last step and the step in `.tracking/wandb.json`, a file that is written once the client has accepted the values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.worker.tracking.missing_points import Point, Position, PositionFile, same
from outlast.worker.tracking.tracker_interface import Run, Status


class WandB:
    """A sink that writes to Weights & Biases."""

    title = "Weights & Biases"
    pause_s = 3.0

    def __init__(self, project: str, run: Run) -> None:
        self._project, self._run = project or run.name, run
        self._position = PositionFile(run.output / contract.TRACKING / "wandb.json")
        self._remote: Any = None

    def open(self) -> Position:
        if self._remote is None:
            try:
                import wandb
            except ImportError as error:
                raise OutlastError(f"{error}; pip install wandb") from error
            environ = os.environ
            self._remote = wandb.init(
                id=environ.get("WANDB_RUN_ID") or self._run.id,
                resume="allow",
                project=self._project,
                name=environ.get("WANDB_NAME") or self._run.name,
                config={"outlast.output": self._run.place},
                dir=environ.get("WANDB_DIR") or str(self._run.output),
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True),
            )
        accepted = self._position.read()
        if self._remote.offline:
            return accepted
        # The client itself skips repeated steps.
        return {name: min(step, self._remote.starting_step - 1) for name, step in accepted.items()}

    rename = staticmethod(same)

    def send(self, points: Sequence[Point]) -> None:
        for (step, time), values in groupby(points, key=lambda point: (point.step, point.time)):
            self._remote.log({**{point.name: point.value for point in values}, "_timestamp": time}, step=step)
        self._position.advance(points)

    def parameters(self, values: Mapping[str, Any]) -> None:
        self._remote.config.update(dict(values), allow_val_change=True)

    def end(self, status: Status | None) -> None:
        if status is None:
            self._remote.mark_preempting()  # with an exit code, the run's state becomes "preempted" before it is resumed
        self._remote.finish(exit_code=0 if status is Status.FINISHED else 1)
        self._remote = None
