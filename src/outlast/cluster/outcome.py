"""The outcome of a job as named values: the outputs of a step that trains.

`outcome` is pure: a function of the job's status and of what its store says, which `read` brings. What is not known has a reason
in its place.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast import contract, files
from outlast.errors import Missing, StoreError
from outlast.status import JobStatus

OUTPUTS = (
    *("job", "namespace", "run", "state", "reason"),
    *("step", "steps", "restarts", "interruptions", "seconds", "goodput", "output"),
    *("checkpoint", "checkpoint_step", "best_checkpoint", "best_step", "best_metric", "best_by"),
    *("loss", "accuracy", "metrics"),
)
"""Their names; docs/guide/pipelines.md says what each means."""
FILE = "outputs.json"
"""All outputs in one file, beside those with one each."""
_LINES = 500
"""Last lines of the metrics that are read: not every line has a loss."""
_EVALUATIONS = ("evaluation.json", "final.json")
"""Documents with metrics that the recipes write into their output, those that count more first."""
_ACCURACY = ("accuracy", "val_accuracy", "acc@1", "val_acc@1")


@dataclass(frozen=True)
class Stored:
    """What the store of a job says about its run."""

    url: str
    run: str = ""
    checkpoint: tuple[str, int] | None = None
    """URL and step of the newest one."""
    best: tuple[str, int, float, str] | None = None
    """URL, step, metric, and the name of the metric."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """In the order of `_EVALUATIONS`."""
    logged: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl, the newest last."""
    goodput: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The values of outputs, and why some are not known."""

    values: Mapping[str, str | int | float]
    missing: Mapping[str, str] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """Every output as text; empty where it is not known."""
        return {name: str(self.values.get(name, "")) for name in OUTPUTS}

    def json(self) -> str:
        """All of it; what is not known or no finite number is null."""
        document = {**{name: self.values.get(name) for name in OUTPUTS}, "missing": dict(self.missing)}
        return json.dumps(_finite(document), indent=2) + "\n"

    def write(self, directory: Path) -> None:
        """A file for each output, and all in one. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts().items():
            files.replace(directory / name, text)
        files.replace(directory / FILE, self.json())


def outcome(status: JobStatus, namespace: str, stored: Stored | str, now: float) -> Outcome:
    """The outputs of a job that has ended. `stored` is what its store says, or why that is not known."""
    there = stored if isinstance(stored, Stored) else None
    unread = stored if isinstance(stored, str) else ""
    found: dict[str, Any] = {
        "job": status.name,
        "namespace": namespace,
        "run": (there.run if there else "") or status.run or None,
        "state": str(status.state),
        "reason": status.reason,
        "step": status.step,
        "steps": status.steps,
        "restarts": status.restarts,
        "interruptions": status.interruptions,
        "seconds": round(max(0.0, (status.finished or now) - status.submitted), 3) if status.submitted else None,
        "goodput": status.goodput if there is None or there.goodput is None else there.goodput,
        "output": there.url if there else status.output or None,
        "checkpoint_step": status.checkpoint.step if status.checkpoint else None,
    }
    reasons = {"steps": "the training does not tell how many"}
    reasons |= dict.fromkeys(("run", "seconds"), "the job was gone before its status could be read")
    if there:
        found |= _of_store(there)
        reasons |= dict.fromkeys(("checkpoint", "checkpoint_step"), "the register in the store has none")
        reasons |= dict.fromkeys(("best_checkpoint", "best_step", "best_metric", "best_by"), "no checkpoint has a metric")
        reasons |= dict.fromkeys(("loss", "accuracy", "metrics"), "the training has logged none")
        reasons["goodput"] = "the store has no ledger of the run"
    values = {name: value for name, value in found.items() if value is not None}
    return Outcome(values, {name: reasons.get(name) or unread or "not known" for name in OUTPUTS if name not in values})


def _of_store(there: Stored) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if there.checkpoint:
        found |= dict(zip(("checkpoint", "checkpoint_step"), there.checkpoint, strict=True))
    if there.best:
        found |= dict(zip(("best_checkpoint", "best_step", "best_metric", "best_by"), there.best, strict=True))
    newest = [*there.evaluations, *reversed(there.logged)]
    found["loss"] = _first(newest, ("loss", "val_loss"))
    found["accuracy"] = _first(newest, _ACCURACY)
    if there.logged:
        found["metrics"] = json.dumps(_finite(there.logged[-1]))
    return found


def _finite(document: Mapping[str, Any]) -> dict[str, Any]:
    """With null in place of infinite numbers and NaN, which JSON has not."""
    return {name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in document.items()}


def _first(documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> float | None:
    """The first number under one of these names."""
    for document in documents:
        for name in names:
            if isinstance(value := document.get(name), int | float) and not isinstance(value, bool):
                return value
    return None


def read(status: JobStatus) -> Stored | str:
    """What the store of a job says, or why it cannot be asked."""
    if status.store is None:
        where = status.output or "wherever its script writes"
        return f"the output is in no store ({where}), and this step does not see it"
    from outlast import store

    try:
        return _read(store.open_(status.store.url), status)
    except StoreError as error:
        return f"{status.store.url} cannot be read: {error}"


def _read(place: Any, status: JobStatus) -> Stored:
    from outlast import runs
    from outlast.checkpoints import ranked, remote
    from outlast.report import goodput
    from outlast.runs import output
    from outlast.sync import growing

    record = runs.read(place)
    run = record.run if record else status.run
    kept = [each for each in remote.Checkpoints(place, run).list_() if not each.problem]

    def url(checkpoint: remote.Checkpoint) -> str:
        return f"{place.url}/{contract.CHECKPOINTS}/{checkpoint.place.key}"

    best = next(((url(c), c.step, c.metric.value, c.metric.by) for c in ranked(kept) if c.metric), None)
    lines = growing.tail(place, contract.METRICS, _LINES)
    account = goodput.buckets(output.events(place), None)
    return Stored(
        place.url,
        run,
        (url(kept[-1]), kept[-1].step) if kept else None,
        best,
        tuple(filter(None, (_document(place, name) for name in _EVALUATIONS))),
        tuple(filter(None, map(_parsed, lines))),
        account.goodput if account.worlds else None,
    )


def _document(place: Any, name: str) -> Mapping[str, Any]:
    with contextlib.suppress(Missing):
        return _parsed(place.get(name))
    return {}


def _parsed(text: bytes) -> Mapping[str, Any]:
    """A JSON object; empty for anything else."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}
