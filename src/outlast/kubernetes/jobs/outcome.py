"""A job's outcome as named values: the outputs of a pipeline step that trains.

`outcome` is a pure function of the job's status and the outputs from its store, which `read` fetches.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.base.errors import Missing, StoreError
from outlast.job import contract
from outlast.job.status import JobStatus

OUTPUTS = (
    *("job", "namespace", "run", "state", "reason"),
    *("step", "steps", "restarts", "interruptions", "seconds", "goodput", "output"),
    *("checkpoint", "checkpoint_step", "best_checkpoint", "best_step", "best_metric", "best_by"),
    *("loss", "accuracy", "metrics"),
)
"""Names of the outputs; docs/guide/pipelines.md explains each."""
FILE = "outputs.json"
"""The file with all outputs. Each output also has a file of its own."""
_LINES = 500
"""Number of lines to read from the end of the metrics. Not every line contains a loss."""
_EVALUATIONS = ("evaluation.json", "final.json")
"""Metrics files that the recipes write, in order of precedence."""
_ACCURACY = ("accuracy", "val_accuracy", "acc@1", "val_acc@1")


@dataclass(frozen=True)
class Outcome:
    """The values of the outputs, and the reasons why some are unknown."""

    values: Mapping[str, str | int | float]
    missing: Mapping[str, str] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """Return the text of every output, keyed by name. The text is empty if the value is unknown."""
        return {name: str(self.values.get(name, "")) for name in OUTPUTS}

    def json(self) -> str:
        """Return the outputs as JSON; unknown values and non-finite numbers are null."""
        document = {**{name: self.values.get(name) for name in OUTPUTS}, "missing": dict(self.missing)}
        return json.dumps(_finite(document), indent=2) + "\n"

    def write(self, directory: Path) -> None:
        """Write a file for each output, and one with all outputs. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts().items():
            files.replace(directory / name, text)
        files.replace(directory / FILE, self.json())


def outcome(status: JobStatus, namespace: str, stored: Mapping[str, Any] | str, now: float) -> Outcome:
    """Return an ended job's outputs. `stored` is the result of `read`."""
    values_by_name: dict[str, Any] = {
        "job": status.name,
        "namespace": namespace,
        "run": status.run or None,
        "state": str(status.state),
        "reason": status.reason,
        "step": status.step,
        "steps": status.steps,
        "restarts": status.restarts,
        "interruptions": status.interruptions,
        "seconds": round(max(0.0, (status.finished or now) - status.submitted), 3) if status.submitted else None,
        "goodput": status.goodput,
        "output": status.output or None,
        "checkpoint_step": status.checkpoint.step if status.checkpoint else None,
    }
    reasons = {"steps": "the training does not tell how many"}
    reasons |= dict.fromkeys(("run", "seconds"), "the job was gone before its status could be read")
    default_reason = "not known"
    if isinstance(stored, str):
        default_reason = stored
    else:
        values_by_name |= stored
        reasons |= dict.fromkeys(("checkpoint", "checkpoint_step"), "the register in the store has none")
        reasons |= dict.fromkeys(("best_checkpoint", "best_step", "best_metric", "best_by"), "no checkpoint has a metric")
        reasons |= dict.fromkeys(("loss", "accuracy", "metrics"), "the training has logged none")
        reasons["goodput"] = "the store has no ledger of the run"
    values = {name: value for name, value in values_by_name.items() if value is not None}
    return Outcome(values, {name: reasons.get(name, default_reason) for name in OUTPUTS if name not in values})


def metric_outputs(evaluations: Sequence[Mapping[str, Any]], logged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outputs `loss`, `accuracy` and `metrics`. The loss and the accuracy come from `evaluations`, which are in order
    of precedence, or else from the newest lines of `logged`."""
    newest = [*evaluations, *reversed(logged)]
    values = {"loss": _first_number(newest, ("loss", "val_loss")), "accuracy": _first_number(newest, _ACCURACY)}
    return {**values, "metrics": json.dumps(_finite(logged[-1])) if logged else None}


def _finite(document: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinite numbers and NaN, which JSON lacks, with null."""
    return {name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in document.items()}


def _first_number(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> float | None:
    for document in documents:
        for name in names:
            if isinstance(value := document.get(name), int | float) and not isinstance(value, bool):
                return value
    return None


def read(status: JobStatus) -> dict[str, Any] | str:
    """Return the outputs that are known from a job's store, or why the store cannot be read."""
    if status.store is None:
        where = status.output or "wherever its script writes"
        return f"the output is in no store ({where}), and this step does not see it"
    from outlast.storage import store

    try:
        return _read(store.open_(status.store.url), status)
    except StoreError as error:
        return f"{status.store.url} cannot be read: {error}"


def _read(place: Any, status: JobStatus) -> dict[str, Any]:
    from outlast.job.report import goodput
    from outlast.storage import runs
    from outlast.storage.checkpoints import in_store, ranked
    from outlast.storage.runs import output
    from outlast.storage.sync import growing_files

    record = runs.read(place)
    run = record.run if record else status.run
    checkpoints = [each for each in in_store.Checkpoints(place, run).list_() if not each.problem]

    def url(checkpoint: in_store.Checkpoint) -> str:
        return f"{place.url}/{contract.CHECKPOINTS}/{checkpoint.place.key}"

    logged = [each for line in growing_files.tail(place, contract.METRICS, _LINES) if (each := _parsed(line))]
    evaluations = [each for name in _EVALUATIONS if (each := _document(place, name))]
    values = {"output": place.url, "run": run or None, **metric_outputs(evaluations, logged)}
    if checkpoints:
        values |= {"checkpoint": url(checkpoints[-1]), "checkpoint_step": checkpoints[-1].step}
    best = next((each for each in ranked(checkpoints) if each.metric), None)
    if best and (metric := best.metric):
        values |= {"best_checkpoint": url(best), "best_step": best.step, "best_metric": metric.value, "best_by": metric.by}
    buckets = goodput.buckets(output.events(place), None)
    return values | ({"goodput": buckets.goodput} if buckets.worlds else {})


def _document(place: Any, name: str) -> Mapping[str, Any]:
    with contextlib.suppress(Missing):
        return _parsed(place.get(name))
    return {}


def _parsed(text: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}
