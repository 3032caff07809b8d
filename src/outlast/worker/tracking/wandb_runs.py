"""Weights & Biases: one run, resumed by its id, configured by its own variables (WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT ...).

Its client has a process and a buffer of its own, of which a kill may take some. The position is in a file of ours,
`.tracking/wandb.json`, written once the client has accepted the values, but no further than the last step that the server has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.worker.tracking.lines import Kept, Point, Position, same
from outlast.worker.tracking.sinks import Run, Status


class WandB:
    """A sink that writes into Weights & Biases."""

    title = "Weights & Biases"
    pause_s = 3.0

    def __init__(self, project: str, run: Run) -> None:
        self._project, self._run = project or run.name, run
        self._kept = Kept(run.output / contract.TRACKING / "wandb.json")
        self._there: Any = None

    def open(self) -> Position:
        if self._there is None:
            try:
                import wandb
            except ImportError as error:
                raise OutlastError(f"{error}; pip install wandb") from error
            environ = os.environ
            self._there = wandb.init(
                id=environ.get("WANDB_RUN_ID") or self._run.id,
                resume="allow",
                project=self._project,
                name=environ.get("WANDB_NAME") or self._run.name,
                dir=environ.get("WANDB_DIR") or str(self._run.output),
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True),
            )
        accepted = self._kept.position()
        if self._there.offline:
            return accepted
        # Steps that come again the client skips itself.
        return {name: min(step, self._there.starting_step - 1) for name, step in accepted.items()}

    rename = staticmethod(same)

    def send(self, points: Sequence[Point]) -> None:
        for (step, time), values in groupby(points, key=lambda point: (point.step, point.time)):
            self._there.log({**{point.name: point.value for point in values}, "_timestamp": time}, step=step)
        self._kept.advance(points)

    def parameters(self, values: Mapping[str, Any]) -> None:
        self._there.config.update(dict(values), allow_val_change=True)

    def checkpoints(self, places: Mapping[str, str]) -> None:
        self._there.summary["checkpoints"] = dict(places)

    def end(self, status: Status | None) -> None:
        if status is None:
            self._there.mark_preempting()  # with an exit code, its state becomes "preempted", until it is resumed
        self._there.finish(exit_code=0 if status is Status.FINISHED else 1)
        self._there = None
