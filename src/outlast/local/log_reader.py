"""Reads and follows workers' log files on this machine."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator
from pathlib import Path


def logs(directory: Path) -> dict[int, Path]:
    matches = (re.fullmatch(r"worker-(\d+)\.log", path.name) for path in directory.glob("worker-*.log"))
    return {int(match[1]): directory / match[0] for match in matches if match}


class Tail:
    """Reads a log, or only its `last` lines, and then the lines appended later."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._file = path.open("rb")
        self._read = [] if last is None else [*collections.deque(self._file, last)]
        self._begun = b""

    def lines(self, *, rest: bool) -> Iterator[str]:
        """Yield the new complete lines and, if `rest` is set, also an unfinished last line."""
        read, self._read = self._read, []
        for piece in itertools.chain(read, self._file):
            self._begun += piece
            if self._begun.endswith(b"\n"):
                line, self._begun = self._begun[:-1], b""
                yield line.decode(errors="replace")
        if rest and self._begun:
            line, self._begun = self._begun, b""
            yield line.decode(errors="replace")

    def close(self) -> None:
        self._file.close()
