"""Allocates in-memory files for snapshots, and computes how much of the machine's memory they may use.

A tenth of the memory always stays free, because a worker without snapshots is better than one that is OOM-killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

from outlast.base import machine_memory
from outlast.storage.snapshots import budget, part_format


class Machine(machine_memory.Machine):
    """The machine's memory, with a budget for snapshots."""

    def budget(self, requested: budget.Requested, workers: int) -> budget.Budget:
        """Return one worker's memory budget, if `workers` workers share this machine."""
        machine = self.machine()
        total, free = machine.get("MemTotal", 0), machine.get("MemAvailable", 0)
        shared = total // workers, max(0, total // workers - free // workers)
        limit, used = min([*self.groups(), shared])
        return budget.budget(requested, limit, used, free // workers)


_PIECE = 4 << 30
"""Number of bytes allocated at a time, which takes about a second."""


class File:
    """An in-memory file for one part: a header page, `size` bytes of data, and later a tail.

    The constructor allocates all pages, piece by piece, and calls `alive` between pieces. Raises OSError, and whatever `alive`
    raises.
    """

    def __init__(self, size: int, alive: Callable[[], None] = lambda: None) -> None:
        self.size = size
        self.fd = os.memfd_create("outlast-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            end = part_format.PAGE + size
            os.posix_fallocate(self.fd, 0, min(_PIECE, end))
            for at in range(_PIECE, end, _PIECE):
                alive()
                os.posix_fallocate(self.fd, at, min(_PIECE, end - at))
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # so that processes that map it get no SIGBUS
            self._whole = memoryview(mmap.mmap(self.fd, end))
            self.data = self._whole[part_format.PAGE :]
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def torn(self) -> bool:
        """True if the file holds no part, or a rank has begun to overwrite it."""
        return not self._whole[0]

    def clear(self) -> None:
        os.pwrite(self.fd, bytes(part_format.PAGE), 0)

    def finish(self, part: part_format.Part, tail: bytes) -> None:
        """Write the tail and then the header, which makes the part valid."""
        _write(self.fd, tail, part_format.PAGE + part.bytes)
        _write(self.fd, part_format.header(part, len(tail)), 0)

    def close(self) -> None:
        """Close the file. The kernel frees its memory once no process maps it."""
        self.data.release()
        self._whole.release()
        os.close(self.fd)


def _write(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written
