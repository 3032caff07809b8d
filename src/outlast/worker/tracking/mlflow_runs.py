"""Sends metrics to MLflow. Each run becomes an MLflow run with an identifying tag, as a child of an MLflow run for the job. This
works with any server, database or directory that MLflow's client supports. Tags contain the checkpoints' locations. Needs
`mlflow-skinny`."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from outlast.base.errors import OutlastError
from outlast.job import url_logins
from outlast.worker.tracking.missing_points import Point, Position
from outlast.worker.tracking.tracker_interface import Run, Status, text

T = TypeVar("T")

RUN, JOB, PARENT, NAME = "outlast.run", "outlast.job", "mlflow.parentRunId", "mlflow.runName"
CHECKPOINT, CHANGED = "checkpoint.", "changed."
"""Prefixes of tags for checkpoint locations, and for changed parameters, since MLflow cannot change a parameter."""
MOST_METRICS, MOST_OTHERS = 1000, 100
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
own retries, since `forwarding` retries."""


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
        self._id = self._parent = ""
        self._places: dict[str, str] = {}

    def open(self) -> Position:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
        except ImportError as error:
            raise OutlastError(f"{error}; pip install 'outlast[tracking]'") from error
        except MlflowException as error:  # raised before it connects
            problem = (
                f"MLflow does not support the URI {self._shown}" if self._uri in str(error) else str(error).partition(". ")[0]
            )
            raise OutlastError(f"{problem}; set tracking.mlflow, e.g. to http://mlflow:5000") from error
        self._metric, self._param, self._tag = Metric, Param, RunTag
        experiment = self._experiment_id()
        self._parent = self._ensure_run(experiment, JOB, self._run.job, {}) if self._run.job else ""
        self._id = self._ensure_run(experiment, RUN, self._run.id, {PARENT: self._parent} if self._parent else {})
        for id in filter(None, (self._parent, self._id)):
            self._client.update_run(id, status="RUNNING")
        run = self._client.get_run(self._id)
        self._places = {
            name.removeprefix(CHECKPOINT): place for name, place in run.data.tags.items() if name.startswith(CHECKPOINT)
        }
        return {metric.key: int(metric.step) for metric in run.to_proto().data.metrics}

    def _experiment_id(self) -> str:
        if existing := self._client.get_experiment_by_name(self._experiment):
            if existing.lifecycle_stage != "active":
                raise RuntimeError(f"experiment {self._experiment} is deleted there; restore it, or set tracking.experiment")
            return str(existing.experiment_id)
        return str(self._client.create_experiment(self._experiment))

    def _ensure_run(self, experiment: str, tag: str, value: str, tags: Mapping[str, str]) -> str:
        """Return the id of the run with this tag, creating it if missing. One request creates both, so the tag is unique."""
        if runs := self._client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1):
            return str(runs[0].info.run_id)
        return str(self._client.create_run(experiment, run_name=self._run.name, tags={tag: value, **tags}).info.run_id)

    def rename(self, name: str) -> str:
        parts = (part for part in _REFUSED.sub("_", name)[:250].split("/") if part not in ("", "."))
        return self._between.join("_" if part == ".." else part for part in parts) or "_"

    def send(self, points: Sequence[Point]) -> None:
        metrics = [self._metric(point.name, point.value, int(point.time * 1000), point.step) for point in points]
        for batch in batched(metrics, MOST_METRICS):
            self._client.log_batch(self._id, metrics=batch)

    def parameters(self, values: Mapping[str, Any]) -> None:
        current = self._client.get_run(self._id).data
        parameters = {self.rename(name): text(value)[:MOST_TEXT] for name, value in values.items()}
        new = [self._param(name, value) for name, value in parameters.items() if name not in current.params]
        changed = [
            self._tag(CHANGED + name, value)
            for name, value in parameters.items()
            if name in current.params and value != current.tags.get(CHANGED + name, current.params[name])
        ]
        for params in batched(new, MOST_OTHERS):
            self._client.log_batch(self._id, params=params)
        for tags in batched(changed, MOST_OTHERS):
            self._client.log_batch(self._id, tags=tags)

    def checkpoints(self, places: Mapping[str, str]) -> None:
        new = [self._tag(CHECKPOINT + name, place) for name, place in places.items() if self._places.get(name) != place]
        for tags in batched(new, MOST_OTHERS):
            self._client.log_batch(self._id, tags=tags)
        for name in self._places.keys() - places.keys():
            self._client.delete_tag(self._id, CHECKPOINT + name)
        self._places = dict(places)

    def end(self, status: Status | None) -> None:
        if status is not None:
            for id in filter(None, (self._id, self._parent)):
                self._client.set_terminated(id, str(status))


def batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(things)
    while batch := list(itertools.islice(rest, size)):
        yield batch
