"""How much memory there is for snapshots, and files in memory that are touched before they are used.

`budget` says how much a worker may keep. Whatever that is, a tenth of the memory stays free: a worker that is killed for its
memory is worse than one without snapshots.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from outlast.snapshots import budget, parts

_RESERVE = 10
"""This part stays free."""
_UNLIMITED = 1 << 60
"""cgroup v1 writes nearly 2^63 where there is no limit."""


class Machine:
    """What the kernel says of memory. The directories are for tests."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups

    def budget(self, asked: budget.Asked, workers: int) -> budget.Budget:
        """What snapshots of one of so many workers of this machine may use."""
        machine = self._machine()
        total, free = machine.get("MemTotal", 0), machine.get("MemAvailable", 0)
        shared = total // workers, max(0, total // workers - free // workers)
        limit, used = min([*self._groups(), shared])
        return budget.budget(asked, limit, used, free // workers)

    @property
    def headroom(self) -> int:
        """Bytes that can be taken now so that a tenth stays free, of the machine and of each cgroup; not negative."""
        machine = self._machine()
        free = [machine.get("MemAvailable", 0) - machine.get("MemTotal", 0) // _RESERVE]
        free += [limit - used - limit // _RESERVE for limit, used in self._groups()]
        return max(0, min(free))

    def _machine(self) -> dict[str, int]:
        try:
            lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
        except (OSError, ValueError):
            return {}

    def _groups(self) -> list[tuple[int, int]]:
        """(limit, used) in bytes of our cgroup and of those above it, where there is a limit. Cached files count as free,
        those in active use, too: the kernel reclaims them before it kills anybody (MemAvailable counts them as well)."""
        found = []
        for directory, limit, used, *cached in self._places():
            try:
                most = (directory / limit).read_text().strip()
                if most == "max" or int(most) >= _UNLIMITED:
                    continue
                stat = dict(line.split()[:2] for line in (directory / "memory.stat").read_text().splitlines())
                found.append((int(most), int((directory / used).read_text()) - sum(int(stat.get(each, 0)) for each in cached)))
            except (OSError, ValueError):
                continue
        return found

    def _places(self) -> list[tuple[Path, str, str, str, str]]:
        """Directories and file names of cgroup v2 and v1. In a container the path is often `/`, or one that is not there."""
        try:
            lines = (self._proc / "self/cgroup").read_text().splitlines()
        except OSError:
            return []
        found = []
        for _number, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
            if kinds == "":
                root, names = self._cgroups, ("memory.max", "memory.current", "inactive_file", "active_file")
            elif "memory" in kinds.split(","):
                root = self._cgroups / "memory"
                cached = "total_inactive_file", "total_active_file"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", *cached)
            else:
                continue
            own = root / path.lstrip("/")
            found += [(place, *names) for place in (own, *own.parents) if place == root or root in place.parents]
        return found


class File:
    """A file in memory for one part: its header page and `size` bytes of data, touched; a tail may be written behind them.

    Raises OSError when there is not so much memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("outlast-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, parts.PAGE + size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # so nobody who maps it ever gets SIGBUS
            self.data = memoryview(mmap.mmap(self.fd, parts.PAGE + size))[parts.PAGE :]
        except OSError:
            os.close(self.fd)
            raise

    def clear(self) -> None:
        """Whatever it held is no part any more."""
        os.pwrite(self.fd, bytes(parts.PAGE), 0)

    def finish(self, part: parts.Part, tail: bytes) -> None:
        """Write the tail, then the header: from here on it holds a part."""
        _write(self.fd, tail, parts.PAGE + part.bytes)
        _write(self.fd, parts.header(part, len(tail)), 0)

    def close(self) -> None:
        """Free the memory, once nobody maps it: a thread that has just finished may still hold a slice of `data`."""
        self.data.release()
        os.close(self.fd)


def _write(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written
