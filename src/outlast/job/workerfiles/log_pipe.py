"""A worker's output, which the agent copies from a pipe to the log. A full disk costs log lines but does not stop training: if a
process wrote to the log itself, its prints would fail with ENOSPC."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
import time
from pathlib import Path

_RECENT = 4096
_EARLY = 1 << 20
TAIL_LINES = 20
TAIL_BYTES = 2048
"""Maximum size of a tail in reports, in bytes; equal to Kubernetes' limit for a termination message taken from a log."""
_TAIL_WITHIN = 1 << 18
"""Number of bytes at the end of a log that are searched for a tail. The value is arbitrary, but leaves room for the output of
ranks that fail later."""
_TAIL_S = 0.5
"""Seconds to wait for a line to reach the log. The value is arbitrary: a line takes a millisecond, or never arrives if the disk
is full."""


class Output:
    """Copies the output of this process and its children to the log, which is the process's original standard output. In a pod,
    that is the container's log, and a second copy goes to the log in the job's output, at the path passed to `keep`."""

    def __init__(self) -> None:
        self._early: bytearray | None = bytearray()
        self.written = 0
        self.recent = b""
        """The latest part of the output (see `guessed_progress.last_step`)."""
        self._copy_to: int | None = None
        self._log = os.dup(1)
        self._pipe, write = os.pipe()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        self._copying = threading.Lock()
        self._thread = threading.Thread(target=self._copy, name="outlast-output", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while True:
            select.select([self._pipe], [], [])
            with self._copying:
                data = os.read(self._pipe, 65536)
                if not data:
                    return
                self.written += len(data)
                self.recent = (self.recent + data)[-_RECENT:]
                if self._early is not None:
                    self._early += data[: _EARLY - len(self._early)]
                for file in (self._log, self._copy_to):
                    if file is not None:
                        with contextlib.suppress(OSError):
                            _write(file, data)

    def keep(self, path: Path | None) -> None:
        """Also append all output, including the output so far, to this file, or to no file if `path` is None."""
        with self._copying:
            early, self._early = self._early, None
            if path is None:
                return
            with contextlib.suppress(OSError):  # a full disk
                path.parent.mkdir(parents=True, exist_ok=True)
                self._copy_to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                _write(self._copy_to, bytes(early or b""))

    def drain(self, timeout_s: float = 5.0) -> None:
        """Wait until all output so far has reached the log."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._copying:
                left = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4))[0]
            if not left:
                return
            time.sleep(0.01)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the pipe, and wait until all output is in the log."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        self._thread.join(timeout_s)


def size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def tail(log: Path, line: str, *, since: int = 0, prefix: str = "") -> str:
    """Return the last lines of a log from byte `since` to `line`, which has just been written to standard error. The tail has at
    most TAIL_LINES lines and TAIL_BYTES bytes, and only lines that begin with `prefix`. It is empty if the log cannot be read.

    Waits for `line`, which passes through the pipe after all earlier output. If `line` does not arrive, the tail ends where the
    log ends.
    """
    deadline = time.monotonic() + _TAIL_S
    while True:
        text = _end(log, since)
        before, match, _ = text.rpartition(line.encode(errors="backslashreplace"))
        if match or time.monotonic() > deadline:
            text = before if match else text
            lines = [each for each in text.splitlines() if each.startswith(prefix.encode())][-TAIL_LINES:]
            return b"\n".join(lines)[-TAIL_BYTES:].decode(errors="ignore")  # the first character may be cut off
        time.sleep(0.005)


def _end(log: Path, since: int) -> bytes:
    try:
        with open(log, "rb") as file:
            file.seek(max(since, size(log) - _TAIL_WITHIN))
            return file.read()
    except OSError:
        return b""


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
