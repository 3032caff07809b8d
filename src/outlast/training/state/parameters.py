"""`parameters.json`: a run's settings, under the script's names. Rank 0 writes the file, and logs changes when a run resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.training.collective_calls import place

Scalar = str | int | float | bool | None


def plain(values: Any) -> dict[str, Any]:
    """Convert settings to JSON values, with nested mappings as `outer.inner`. Raises OutlastError for values of other types."""
    if not isinstance(values, Mapping):
        raise OutlastError(
            f"run.parameters() got {_kind(values)} and needs names ({place()}); write run.parameters({{'lr': 0.1}}), "
            "or for a dataclass run.parameters(dataclasses.asdict(settings))"
        )
    return dict(_flat("", values))


def _flat(above: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _flat(f"{key}.", value)
        elif isinstance(value, list | tuple):
            yield key, [_scalar(key, each) for each in value]
        else:
            yield key, _scalar(key, value)


def _scalar(name: str, value: Any) -> Scalar:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if value is None or isinstance(value, str | int | float):
        return value
    raise OutlastError(
        f"parameter {name} ({_kind(value)}) must be a number, a text, true, false, null or a list of these ({place()}); "
        f"give its value or its name, e.g. str({name})"
    )


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.40}"


def write(path: Path, values: Mapping[str, Any]) -> str:
    """Replace the file if it has other values. Returns a readable list of the changes. Raises OSError."""
    old = files.mapping(path)
    if old == values:
        return ""
    files.replace(path, json.dumps(values, indent=2) + "\n")
    return ", ".join(
        f"{name} {json.dumps(old[name])} → {json.dumps(new)}" for name, new in values.items() if name in old and old[name] != new
    )
