"""Sends metrics to MLflow. Each run becomes an MLflow run with an identifying tag. This works with any server, database or
directory that MLflow's client supports. Needs `mlflow-skinny`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outlast.base.errors import OutlastError
from outlast.job import url_logins
from outlast.worker.tracking.missing_points import Point, Position
from outlast.worker.tracking.tracker_interface import Run, Status

RUN, OUTPUT = "outlast.run", "outlast.output"
MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""Limits per request; see https://mlflow.org/docs/latest/rest-api.html#request-limits"""
MOST_TEXT = 500
"""Length of a parameter value that any server accepts."""
_REFUSED = re.compile(r"[^\w\-. /]")

DEFAULTS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Variables for MLflow's client, unless the user has set them. They allow directories, and turn off telemetry and the client's
own retries, since `follower` retries."""


class MLflow:
    """A sink that writes to MLflow at `uri`."""

    pause_s = 5.0

    def __init__(self, uri: str, experiment: str, run: Run) -> None:
        self._shown = url_logins.hidden(uri)
        self.title = f"MLflow ({self._shown})"
        self._uri = Path(uri).as_uri() if uri.startswith("/") else uri
        files = urlsplit(self._uri).scheme in ("", "file")
        self._between = "." if files else "/"  # in a directory `loss` is a file, so it cannot contain `loss/main`
        self._experiment, self._run = experiment or run.name, run
        self._id = ""

    def open(self) -> Position:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
        except ImportError as error:
            raise OutlastError(f"{error}; pip install 'outlast[tracking]'") from error
        except MlflowException as error:  # raised before it connects
            remedy = "set tracking.mlflow, e.g. to http://mlflow:5000"
            raise OutlastError(f"MLflow does not support the URI {self._shown}; {remedy}") from error
        self._metric, self._param = Metric, Param
        self._id = self._run_id(self._experiment_id())
        self._client.update_run(self._id, status="RUNNING")
        metrics = self._client.get_run(self._id).to_proto().data.metrics
        return {metric.key: int(metric.step) for metric in metrics}

    def _experiment_id(self) -> str:
        if existing := self._client.get_experiment_by_name(self._experiment):
            if existing.lifecycle_stage != "active":
                raise RuntimeError(f"experiment {self._experiment} is deleted there; restore it, or set tracking.experiment")
            return str(existing.experiment_id)
        return str(self._client.create_experiment(self._experiment))

    def _run_id(self, experiment: str) -> str:
        """Return the id of our run, creating it if missing. One request creates both run and tag, so the tag is unique."""
        if runs := self._client.search_runs([experiment], f"tags.`{RUN}` = '{self._run.id}'", max_results=1):
            return str(runs[0].info.run_id)
        tags = {RUN: self._run.id, OUTPUT: self._run.place}
        return str(self._client.create_run(experiment, run_name=self._run.name, tags=tags).info.run_id)

    def rename(self, name: str) -> str:
        parts = (part for part in _REFUSED.sub("_", name)[:250].split("/") if part not in ("", "."))
        return self._between.join("_" if part == ".." else part for part in parts) or "_"  # MLflow refuses other paths

    def send(self, points: Sequence[Point]) -> None:
        metrics = [self._metric(point.name, point.value, int(point.time * 1000), point.step) for point in points]
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + MOST_METRICS])

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Show those settings that the run does not have yet, since MLflow cannot change a parameter."""
        known = self._client.get_run(self._id).data.params
        texts = {self.rename(name): value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        new = [self._param(name, text[:MOST_TEXT]) for name, text in texts.items() if name not in known]
        for at in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[at : at + MOST_PARAMETERS])

    def end(self, status: Status | None) -> None:
        if status is not None:
            self._client.set_terminated(self._id, str(status))
