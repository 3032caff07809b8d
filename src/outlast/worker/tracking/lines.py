"""What a tracker still lacks of `metrics.jsonl`, given what it has.

A tracker's *position* is the last step that it has of each name. A value is new if its step is above that, so a tracker sees
steps increase, whatever happens to the file: steps that come again after a resume are skipped (they have equal bits), a file
that was cut back and has grown again is read again from its beginning, and so is a copy on another disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from outlast.base import files

Position = dict[str, int]
"""The last step sent, by name."""
BLOCK = 1 << 20
"""Bytes read at a time."""


class Point(NamedTuple):
    """One value of one step."""

    step: int
    time: float
    """Seconds since the epoch."""
    name: str
    value: float


_OWN = ("step", "time", "generation")


def same(name: str) -> str:
    """The name itself."""
    return name


def points(lines: bytes, position: Mapping[str, int], rename: Callable[[str], str] = same) -> list[Point]:
    """The values in `lines` that are new at `position`, in order; each step of a name once. `rename` makes a name that the
    tracker accepts."""
    last = dict(position)
    found = []
    for line in lines.splitlines():
        try:
            values = json.loads(line)
            step, time = int(values["step"]), float(values.get("time", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # no line of ours
        for given, value in values.items():
            if given in _OWN or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            name = rename(given)
            if step > last.get(name, -1):
                last[name] = step
                found.append(Point(step, time, name, float(value)))
    return found


def advanced(position: Mapping[str, int], sent: Iterable[Point]) -> Position:
    """The position once `sent` has arrived."""
    return {**position, **{point.name: point.step for point in sent}}


class Kept:
    """A position in a file of ours, for a tracker that cannot say what it has. Written after its values, some of which come again
    after a kill."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position: Position = {}

    def position(self) -> Position:
        """What is in the file; nothing if it is not there, or damaged."""
        try:
            self._position = dict(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):
            self._position = {}
        return dict(self._position)

    def advance(self, sent: Iterable[Point]) -> None:
        """Note that these have arrived. Raises OSError."""
        self._position = advanced(self._position, sent)
        files.replace(self._path, json.dumps(self._position))


class Reader:
    """Reads whole lines of a file that grows, and that may be cut back or replaced at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._next = 0
        self._mark = self._next_mark = b""
        """The last line before the offset. Lines have the time in them, so another history has another line there."""

    def read(self) -> bytes:
        """The next whole lines, at most about `BLOCK` bytes; empty when there are no more. The same again until `commit`. Raises
        OSError."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return b""
        with file:
            start = self._offset - len(self._mark)
            file.seek(start)
            found = file.read(len(self._mark) + BLOCK)
            if not found.startswith(self._mark):
                self.rewind()
                file.seek(0)
                found = file.read(BLOCK)
            found = found[len(self._mark) :]
            while len(found) >= BLOCK and b"\n" not in found and (more := file.read(BLOCK)):  # a line that long is hardly ours
                found += more
        lines = found[: found.rfind(b"\n") + 1]
        self._next = self._offset + len(lines)
        self._next_mark = lines[lines.rfind(b"\n", 0, len(lines) - 1) + 1 :] if lines else self._mark
        return lines

    def commit(self) -> None:
        """Go on after what was read last."""
        self._offset, self._mark = self._next, self._next_mark

    def rewind(self) -> None:
        """Begin again at the beginning."""
        self._offset = self._next = 0
        self._mark = self._next_mark = b""
