"""Selects the values in `metrics.jsonl` that a tracker lacks.

A tracker's *position* is the last step that it received for each name. Only values with a greater step are new: steps repeated
after a resume have bit-identical values. So a file that was truncated may be read again from its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from outlast.base import files

Position = dict[str, int]
"""For each metric, the last step that the tracker has received."""
BLOCK = 1 << 20


class Point(NamedTuple):
    """A single value of a metric."""

    step: int
    time: float
    name: str
    value: float


_OWN = ("step", "time", "generation")


def same(name: str) -> str:
    return name


def points(lines: bytes, position: Mapping[str, int], rename: Callable[[str], str] = same) -> list[Point]:
    """Return the values in `lines` that are later than `position`, in order, and only one value for each name and step. `rename`
    maps names to those that the tracker accepts."""
    last = dict(position)
    new = []
    for line in lines.splitlines():
        try:
            values = json.loads(line)
            step, time = int(values["step"]), float(values.get("time", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # not our line
        for key, value in values.items():
            if key in _OWN or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            name = rename(key)
            if step > last.get(name, -1):
                last[name] = step
                new.append(Point(step, time, name, float(value)))
    return new


def advanced(position: Mapping[str, int], sent: Iterable[Point]) -> Position:
    return {**position, **{point.name: point.step for point in sent}}


class PositionFile:
    """A stored position, for a tracker that cannot report its own. It is written after the values are sent, so after a kill some
    values may be sent again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position: Position = {}

    def read(self) -> Position:
        """Read the position from the file. Returns an empty position if the file is missing or damaged."""
        self._position = files.mapping(self._path)
        return dict(self._position)

    def advance(self, sent: Iterable[Point]) -> None:
        """Record that these points have arrived. Raises OSError."""
        self._position = advanced(self._position, sent)
        files.replace(self._path, json.dumps(self._position))


class Reader:
    """Reads complete lines from a growing file, which may be truncated at any time."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        """Where the next line begins. The caller advances it by the lines that it no longer needs."""

    def read(self) -> bytes:
        """Return the next complete lines, about `BLOCK` bytes. Raises OSError."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(max(0, self.offset - 1))
            if self.offset and file.read(1) != b"\n":  # truncated, and grown again if it is as long
                self.offset = file.seek(0)
            return b"".join(line for line in file.readlines(BLOCK) if line.endswith(b"\n"))
