"""Selects the values in `metrics.jsonl` that a tracker lacks.

A tracker's *position* is the last step that it received for each name. Only values with a greater step are new: steps repeated
after a resume have bit-identical values. A file that was truncated and has grown since is read again from its beginning.
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
    """Reads complete lines from a growing file, which may be truncated or replaced at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._next = 0
        self._mark = self._next_mark = b""
        """The last line before the offset. It contains the time, so it differs in a replaced file."""

    def read(self) -> bytes:
        """Return the next complete lines, about `BLOCK` bytes at most. Until `commit` is called, returns the same lines again.
        Raises OSError."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return b""
        with file:
            start = self._offset - len(self._mark)
            file.seek(start)
            data = file.read(len(self._mark) + BLOCK)
            if not data.startswith(self._mark):
                self.rewind()
                file.seek(0)
                data = file.read(BLOCK)
            data = data[len(self._mark) :]
            while len(data) >= BLOCK and b"\n" not in data and (more := file.read(BLOCK)):  # such a long line is hardly ours
                data += more
        lines = data[: data.rfind(b"\n") + 1]
        self._next = self._offset + len(lines)
        self._next_mark = lines[lines.rfind(b"\n", 0, len(lines) - 1) + 1 :] if lines else self._mark
        return lines

    def commit(self) -> None:
        """Continue after the lines returned last."""
        self._offset, self._mark = self._next, self._next_mark

    def rewind(self) -> None:
        """Continue from the beginning of the file."""
        self._offset = self._next = 0
        self._mark = self._next_mark = b""
