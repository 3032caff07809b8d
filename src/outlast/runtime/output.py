"""A worker's output on its way to its log: through a pipe of the agent's, so that a full disk costs log lines and not the
training. Whoever writes to the log itself dies of ENOSPC in the middle of a print.
"""

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

_EARLY = 1 << 20
"""Bytes that are kept for `keep`."""


class Output:
    """Stands between this process, with all that it starts, and its log: that which is standard output now.

    In pods that is the runtime's, and the log of the job's output is a copy: `keep` says where, once that is known.
    """

    def __init__(self) -> None:
        self._early: bytearray | None = bytearray()
        """What was written before `keep`."""
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
                if self._early is not None:
                    self._early += data[: _EARLY - len(self._early)]
                for file in (self._log, self._copy_to):
                    if file is not None:
                        with contextlib.suppress(OSError):
                            _write(file, data)

    def keep(self, path: Path | None) -> None:
        """Append everything to this file, too; None: nowhere."""
        with self._copying:
            early, self._early = self._early, None
            if path is None:
                return
            with contextlib.suppress(OSError):  # a full disk
                path.parent.mkdir(parents=True, exist_ok=True)
                self._copy_to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                _write(self._copy_to, bytes(early or b""))

    def drain(self, timeout_s: float = 5.0) -> None:
        """Wait until what has been written is in the log."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._copying:
                left = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4))[0]
            if not left:
                return
            time.sleep(0.01)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let go of the pipe, and wait until what has been written reached the log."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        self._thread.join(timeout_s)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
