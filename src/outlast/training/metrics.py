"""`metrics.jsonl`: the values that a run logs, one JSON object per line, with each step only once.

A run that resumes from an earlier step removes the lines of later steps, because it repeats these steps. If workers have separate
disks, every disk has the lines up to its newest checkpoint, so rank 0 may run on any worker after a restart.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.base import crc32
from outlast.job import contract
from outlast.training.state.shared_disks import Disks, Part

log = logging.getLogger("outlast")


def append(path: Path, line: dict[str, Any]) -> None:
    """Append one line, completely or not at all. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        text = json.dumps(line).encode() + b"\n"
        if (written := file.write(text)) < len(text):
            file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines after `step`, and any partial line left by a killed process."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = len(text)
            while end and not _is_up_to(text[(start := text.rfind(b"\n", 0, end - 1) + 1) : end], step):
                end = start
        file.truncate(end)


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def last(path: Path, name: str, step: int) -> float | None:
    """Return the newest value of `name` logged up to `step`, or None."""
    if not path.exists() or not path.stat().st_size:
        return None
    key = json.dumps(name).encode() + b":"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = len(text)
        while (at := text.rfind(key, 0, end)) >= 0:
            end = text.rfind(b"\n", 0, at) + 1
            line = text[end : max(text.find(b"\n", at), end)]
            with contextlib.suppress(ValueError, KeyError, TypeError):
                document = json.loads(line)
                if document["step"] <= step:
                    return float(document[name])
    return None


_BLOCK = 1 << 20
_MOST_RECENT = 1 << 20
_MOST = 64 << 20


@dataclass(frozen=True)
class News:
    """Lines from rank 0's disk, and their byte offset in the file."""

    start: int
    lines: bytes


class Copy:
    """`metrics.jsonl` on one of several disks, kept equal to rank 0's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.same = 0
        """Number of leading bytes known to equal those of rank 0's file."""
        self.everywhere = 0
        """On rank 0, the number of leading bytes known to be on all disks."""

    def even_out(self, disks: Disks, step: int) -> str:
        """Remove the lines after `step`, and copy the file with the most remaining steps to all disks. Returns why this failed on
        this rank, or an empty string. All leaders must call this, in the training thread."""
        problem, own = "", (-1, 0, 0)
        try:
            truncate_after(self.path, step)
            own = self._summary()
        except OSError as error:
            problem = error.strerror or str(error)
        summaries = disks.each(own, disks.leaders)
        most = max(summaries, key=lambda summary: summary[:2])
        lacks = own != most
        if any(summary != most for summary in summaries):
            new = self.path.with_name(f".{self.path.name}.fetching")
            part = Part(self.path.name, most[1], most[2], summaries.index(most))
            failed = disks.exchange([part], lambda name: None if problem else new if lacks else self.path, disks.leaders)
            problem = problem or failed
            if lacks and not problem:
                try:
                    new.rename(self.path)
                except OSError as error:
                    problem = error.strerror or str(error)
            if lacks and problem:
                with contextlib.suppress(OSError):
                    new.unlink()
        self.same = self.everywhere = 0 if problem else most[1]
        return problem

    def recent(self) -> str:
        """Return the lines that other disks may lack, to be kept in a snapshot; empty if they are unreadable or too long."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.everywhere)
                lines = file.read(_MOST_RECENT + 1)
        except OSError:
            return ""
        return lines.decode(errors="replace") if len(lines) <= _MOST_RECENT else ""

    def add(self, lines: str, step: int) -> None:
        """Remove the lines after `step`, and append those of `lines` up to `step` that this disk lacks. Raises OSError."""
        truncate_after(self.path, step)
        last = self._summary()[0]
        for line in lines.splitlines(keepends=True):
            if _is_up_to(line.encode(), step) and not _is_up_to(line.encode(), last):
                append(self.path, json.loads(line))

    def _summary(self) -> tuple[int, int, int]:
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return 0, 0, 0
        with file:
            size, crc = 0, 0
            while block := file.read(_BLOCK):
                size, crc = size + len(block), crc32.update(block, crc)
            if not size:
                return 0, 0, 0
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as text:
                step = json.loads(text[text.rfind(b"\n", 0, size - 1) + 1 :])["step"]
        return step, size, crc

    def resumed(self, step: int, disks: Disks, lines: str) -> None:
        """Remove the lines after `step`, add the `lines` of a snapshot, and make the files on all disks equal. All leaders must
        call this."""
        if not disks.several and disks.rank == 0:
            with contextlib.suppress(OSError):  # the file may then have some steps twice
                truncate_after(self.path, step)
        elif disks.several and disks.leader:
            try:
                self.add(lines, step)
            except OSError as error:
                log.warning("outlast: %s on this disk cannot be written: %s", contract.METRICS, error.strerror)
            if problem := self.even_out(disks, step):
                log.warning("outlast: %s on this disk is not complete: %s", contract.METRICS, problem)

    def news(self, start: int) -> News:
        """Return the whole lines from byte `start` on, which the other disks may lack, up to 64 MiB. Raises OSError."""
        self.everywhere = start
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                lines = file.read(_MOST)
        except FileNotFoundError:
            lines = b""
        return News(start, lines[: lines.rfind(b"\n") + 1])

    def take(self, news: News) -> None:
        """Write lines from rank 0's disk. Raises OSError; the next save then sends the whole file."""
        self.same, end = 0, news.start + len(news.lines)
        with self.path.open("r+b" if self.path.exists() else "w+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < news.start:
                raise OSError(None, f"{self.path.name} has become shorter than {news.start} bytes")
            file.truncate(news.start)
            file.seek(news.start)
            lines = memoryview(news.lines)
            while lines:
                lines = lines[file.write(lines) :]
        self.same = end


class Screen:
    """Prints logged values at most every 10 seconds: `outlast: step 40 of 1280: loss 0.693`."""

    EVERY_S = 10.0

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._step = 0
        self._steps: Callable[[], int | None] = lambda: None
        self._values: dict[str, float] = {}
        self._shown = float("-inf")

    def show(self, step: int, values: Mapping[str, float], steps: Callable[[], int | None]) -> None:
        """Add `values` to the next line, and print the line if it is due. `steps` returns the run's number of steps."""
        if self._quiet:
            return
        self._step, self._steps = step, steps
        self._values |= values
        if time.monotonic() - self._shown >= self.EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._values:
            total = f" of {steps}" if (steps := self._steps()) else ""
            self.say(f"step {self._step}{total}: " + ", ".join(f"{name} {value:.4g}" for name, value in self._values.items()))
            self._values, self._shown = {}, time.monotonic()

    def say(self, sentence: str) -> None:
        """Print a sentence to stderr, since a program may read the script's stdout."""
        if not self._quiet:
            print(f"outlast: {sentence}", file=sys.stderr, flush=True)
