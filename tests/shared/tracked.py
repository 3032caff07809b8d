"""Metrics of a run, and the values that TensorBoard shows."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path


def line(step: int, **values: float) -> bytes:
    return json.dumps({"step": step, "time": 1000.0 + step, "generation": 1, **values}).encode() + b"\n"


def append(output: Path, *steps: int, **values: float) -> None:
    with (output / "metrics.jsonl").open("ab") as file:
        file.writelines(line(step, **(values or {"loss": 1 / step})) for step in steps)


def shown(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files open
        found = EventAccumulator(str(directory), size_guidance={"scalars": 0})
        found.Reload()
        made = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
        del found
        gc.collect()
    return made
