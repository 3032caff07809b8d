"""How much memory there is: of the machine, and within the limits of its cgroups, those of containers among them."""

from __future__ import annotations

import contextlib
from pathlib import Path

_RESERVE = 10
"""This part stays free."""
_UNLIMITED = 1 << 60
"""cgroup v1 writes nearly 2^63 where there is no limit."""


class Machine:
    """What the kernel says of memory. The directories are for tests."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups

    @property
    def headroom(self) -> int:
        """Bytes that can be taken now so that a tenth stays free, of the machine and of each cgroup; not negative."""
        machine = self.machine()
        free = [machine.get("MemAvailable", 0) - machine.get("MemTotal", 0) // _RESERVE]
        free += [limit - used - limit // _RESERVE for limit, used in self.groups()]
        return max(0, min(free))

    def machine(self) -> dict[str, int]:
        """/proc/meminfo, in bytes; empty where there is none."""
        try:
            lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
        except (OSError, ValueError):
            return {}

    def groups(self) -> list[tuple[int, int]]:
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

    def oom_kills(self) -> int:
        """How many processes of our cgroup the kernel has killed for want of memory; 0 where it does not say."""
        for directory, *_ in self._places():
            for name in ("memory.events", "memory.oom_control"):  # of cgroup v2 and v1
                with contextlib.suppress(OSError, ValueError, StopIteration):
                    lines = (line.split() for line in (directory / name).read_text().splitlines())
                    return next(int(words[1]) for words in lines if words[0] == "oom_kill")
        return 0

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
