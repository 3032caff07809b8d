"""Measures free memory, of the machine and within the limits of this process's cgroups (for example, a container's)."""

from __future__ import annotations

import contextlib
from pathlib import Path

_RESERVE = 10
"""Divisor of the memory: one tenth stays free."""
_UNLIMITED = 1 << 60
"""A limit of at least this many bytes counts as none, because cgroup v1 reports nearly 2^63 if there is no limit."""


class Machine:
    """Reads the kernel's memory counters. Tests pass other directories."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups

    @property
    def headroom(self) -> int:
        """Bytes that can be allocated now. Leaves a tenth of the machine's memory and of each cgroup's limit free."""
        machine = self.machine()
        free = [machine.get("MemAvailable", 0) - machine.get("MemTotal", 0) // _RESERVE]
        free += [limit - used - limit // _RESERVE for limit, used in self.groups()]
        return max(0, min(free))

    def machine(self) -> dict[str, int]:
        """Return /proc/meminfo in bytes; empty if it does not exist."""
        try:
            lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
        except (OSError, ValueError):
            return {}

    def groups(self) -> list[tuple[int, int]]:
        """Return (limit, used) in bytes for this cgroup and its parents. Cached files count as free, as in MemAvailable."""
        groups = []
        for directory, limit, used, *cached in self._places():
            try:
                most = (directory / limit).read_text().strip()
                if most == "max" or int(most) >= _UNLIMITED:
                    continue
                stat = dict(line.split()[:2] for line in (directory / "memory.stat").read_text().splitlines())
                groups.append((int(most), int((directory / used).read_text()) - sum(int(stat.get(each, 0)) for each in cached)))
            except (OSError, ValueError):
                continue
        return groups

    def oom_kills(self) -> int:
        """Return the number of processes in this cgroup that the OOM killer has killed; 0 if unknown."""
        for directory, *_ in self._places():
            for name in ("memory.events", "memory.oom_control"):  # in cgroup v2 and v1
                with contextlib.suppress(OSError, ValueError, StopIteration):
                    lines = (line.split() for line in (directory / name).read_text().splitlines())
                    return next(int(words[1]) for words in lines if words[0] == "oom_kill")
        return 0

    def _places(self) -> list[tuple[Path, str, str, str, str]]:
        """Return the directories of this cgroup and its parents, each with the names of its counters in cgroup v2 or v1.

        In a container, the path in `/proc` is often `/` or missing.
        """
        try:
            lines = (self._proc / "self/cgroup").read_text().splitlines()
        except OSError:
            return []
        places = []
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
            places += [(place, *names) for place in (own, *own.parents) if place == root or root in place.parents]
        return places
