"""Reads and follows workers' log files on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 20


def logs(directory: Path) -> dict[int, Path]:
    """Return the paths of the workers' logs in a directory, keyed by worker index."""
    matches = (re.fullmatch(r"worker-(\d+)\.log", path.name) for path in directory.glob("worker-*.log"))
    return {int(match[1]): directory / match[0] for match in matches if match}


class Tail:
    """Reads a log, or only its `last` lines, and then the lines appended later."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        self._begun: list[bytes] = []
        if last is not None:
            self._file.seek(self._offset_of(last))

    def lines(self, *, rest: bool) -> Iterator[str]:
        """Yield the new complete lines and, if `rest` is set, also an unfinished last line."""
        while piece := self._file.read(_CHUNK):
            first, *others = piece.split(b"\n")
            self._begun.append(first)
            if others:
                for line in (b"".join(self._begun), *others[:-1]):
                    yield line.decode(errors="replace")
                self._begun = others[-1:]
        if rest and (line := b"".join(self._begun)):
            self._begun = []
            yield line.decode(errors="replace")

    def _offset_of(self, last: int) -> int:
        start = end = self._file.seek(0, os.SEEK_END)
        count = 0
        while start and last:
            start, cut = max(0, start - _CHUNK), min(start, _CHUNK)
            self._file.seek(start)
            piece = self._file.read(cut)
            while (cut := piece.rfind(b"\n", 0, cut)) >= 0:
                count += start + cut + 1 < end  # text after the last newline is also a line
                if count == last:
                    return start + cut + 1
        return start if last else end

    def close(self) -> None:
        self._file.close()
