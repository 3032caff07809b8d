"""Finds out which ranks share a disk, and copies files from one disk to all others.

Workers may write into one directory (this machine's, or a network volume) or into separate directories (pods). A session detects
this when it starts, and again before each save until all ranks can write. The lowest rank on a disk is its *leader*, which
commits, sweeps and receives. With one disk, nothing is sent. A failing disk takes part in a collective to the end, because other
disks would wait for it. See docs/decisions/0010-workers-without-a-common-disk.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import torch
import torch.distributed as dist

from outlast.base import crc32
from outlast.base.errors import OutlastError
from outlast.storage import checkpoints
from outlast.worker.hangs import deadlocks

BLOCK = 8 << 20
_MARK = ".disk-"
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class Part:
    """A file to be copied from one disk to all others."""

    name: str
    size: int
    crc32: int
    disk: int


@dataclass
class Disks:
    """A world's disks, in order of their leaders' ranks. The first disk is rank 0's."""

    by_rank: Sequence[int]
    rank: int
    group: dist.ProcessGroup | None
    leaders: dist.ProcessGroup | None = None
    """The leaders' group for the training thread; None if there is only one disk."""
    savers: dist.ProcessGroup | None = None
    """The leaders' group for the saving thread; None if there is only one disk."""
    certain: bool = True
    """False if a rank could not write. Two of these disks may then be the same."""

    @classmethod
    def find(cls, directory: Path, group: dist.ProcessGroup | None) -> Self:
        """Detect which ranks see the same `directory`. All ranks must call this."""
        disks = cls([0] * dist.get_world_size(), dist.get_rank(), group, certain=dist.get_world_size() == 1)
        disks.ascertain(directory)
        return disks

    def ascertain(self, directory: Path) -> None:
        """Repeat the detection, as a collective, unless its result is certain. No save may be in progress."""
        if self.certain:
            return
        makers, previous = _makers(directory, self.rank, len(self.by_rank), self.group), self.by_rank
        order = list(dict.fromkeys(makers))
        self.by_rank, self.certain = [order.index(maker) for maker in makers], min(makers) >= 0
        if self.by_rank != previous:
            self.connect()

    def connect(self) -> None:
        """Create new process groups for the leaders of the disks. All ranks must call this."""
        if self.several:
            own = deadlocks.watch().own
            self.leaders, self.savers = (own(dist.new_group(self.leading, backend="gloo")) for _ in range(2))

    @property
    def leading(self) -> list[int]:
        """The leaders' ranks, in order of their disks."""
        return [self.by_rank.index(disk) for disk in range(max(self.by_rank) + 1)]

    @property
    def several(self) -> bool:
        return max(self.by_rank) > 0

    @property
    def here(self) -> int:
        return self.by_rank[self.rank]

    @property
    def leader(self) -> bool:
        return self.leading[self.here] == self.rank

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. All ranks must call this, in the training thread."""
        if len(self.by_rank) == 1:
            return [value]
        values: list[Any] = [None] * len(self.by_rank)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def fence(self, output: Path, directory: Path, run: str, generation: int | None) -> tuple[int, str]:
        """Fence earlier generations on every writable disk, and take the next generation unless one is given. All ranks must call
        this. Returns the generation, and why this rank's output directory could not be fenced (an empty string if it was). Raises
        Superseded, and OutlastError on rank 0 if a run without an agent cannot write its output directory."""
        own, unwritten = generation, ""
        if own is None and self.several:
            own = 1 + max(self.gather(checkpoints.generation(directory, run)))
        number = torch.tensor(generation or 0)
        if self.leader:
            for again in (True, False):  # unfinished checkpoints of dead generations may fill the disk
                try:
                    number.fill_(checkpoints.acquire(directory, run, own, first=self.rank == 0))
                    unwritten = ""
                except OSError as error:
                    unwritten = f"output {output} cannot be written: {error.strerror or error}"
                    if not again and generation is None and self.rank == 0:
                        raise OutlastError(f"{unwritten}; make room or name another directory") from error
                with contextlib.suppress(OSError):  # leftovers only waste disk space
                    checkpoints.abandon(directory, own or int(number))
                if not unwritten:
                    break
        if generation is None:
            dist.broadcast(number, 0, group=self.group)
            return int(number), unwritten
        return generation, unwritten

    def close(self) -> None:
        """Release the groups. No collective may be in progress."""
        self.group = self.leaders = self.savers = None

    # Collectives of several disks' leaders; `group` is `leaders` or `savers`

    def each(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """Return every leader's value, in order of their disks. All leaders must call this."""
        values: list[Any] = [None] * len(self.leading)
        dist.all_gather_object(values, value, group=group)
        return values

    def broadcast(self, value: Any, group: dist.ProcessGroup | None, *, by: int = 0) -> Any:
        """Return the `value` of the leader of disk `by`. All ranks of the group must call this."""
        if len(self.by_rank) == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.leading[by], group=group)
        return values[0]

    def exchange(self, parts: Sequence[Part], path: Callable[[str], Path | None], group: dist.ProcessGroup | None) -> str:
        """Copy every file to all disks. All leaders must call this. `path` returns where to read or write a file, or None if this
        disk only takes part in the collective. Written files are durable and verified. Returns why the copy failed on this disk,
        or an empty string."""
        leading, problem = self.leading, ""
        memory = torch.empty(min(BLOCK, max((part.size for part in parts), default=0)), dtype=torch.uint8)
        for part in parts:
            writes = part.disk != self.here
            end = _End(None if problem and writes else path(part.name), part, writes=writes)
            try:
                for start in range(0, part.size, BLOCK):
                    block = memory[: min(BLOCK, part.size - start)]
                    end.before(block)
                    dist.broadcast(block, leading[part.disk], group=group)
                    end.after(block)
            finally:
                failed = end.close()
            problem = problem or failed
        return problem


class _End:
    def __init__(self, path: Path | None, part: Part, *, writes: bool) -> None:
        self._part, self._writes = part, writes
        self._file: IO[bytes] | None = None
        self._crc32, self._problem = 0, ""
        if path is not None:
            with self._noted():
                self._file = path.open("wb" if writes else "rb", buffering=0)

    def before(self, block: torch.Tensor) -> None:
        if not self._writes and self._file is not None and not self._problem:
            with self._noted():
                memory = _bytes(block)
                while memory and (count := self._file.readinto(memory)):  # type: ignore[attr-defined] # a raw file
                    memory = memory[count:]
                if memory:
                    self._problem = f"{self._part.name} has become shorter than {self._part.size} bytes"

    def after(self, block: torch.Tensor) -> None:
        if self._writes and self._file is not None and not self._problem:
            with self._noted():
                memory = _bytes(block)
                self._crc32 = crc32.update(memory, self._crc32)
                while memory:
                    memory = memory[self._file.write(memory) :]

    def close(self) -> str:
        """Make the file durable and verify it. Returns the error, or an empty string."""
        if self._file is not None:
            with self._noted():
                if self._writes and not self._problem:
                    os.fsync(self._file.fileno())
            with self._noted():
                self._file.close()
            if self._writes and not self._problem and self._crc32 != self._part.crc32:
                self._problem = f"{self._part.name} arrived with crc32 {self._crc32} instead of {self._part.crc32}"
        return self._problem

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problem = self._problem or error.strerror or str(error)


def _bytes(block: torch.Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _makers(directory: Path, rank: int, ranks: int, group: dist.ProcessGroup | None) -> list[int]:
    """Return, for every rank, the first rank that left a mark in its directory: equal results mean a shared directory.

    Ranks that cannot write get a negative number, which differs between workers. A mark's name is new each time, so a copied
    directory counts as another one. The file system decides which rank is first. After a barrier all marks are complete, on
    network volumes, too. On a full disk, a mark's size encodes its rank, which needs no space.
    """
    word = torch.tensor(secrets.randbits(62))
    dist.broadcast(word, 0, group=group)
    mark = directory / f"{_MARK}{int(word):016x}"
    with contextlib.suppress(OSError), mark.open("xb", buffering=0) as file:
        try:
            file.write(str(rank).encode())
        except OSError:
            file.truncate(rank + 1)
    dist.barrier(group=group)
    maker = -1 - int(os.environ.get("GROUP_RANK", rank))
    with contextlib.suppress(OSError):
        text, now = mark.read_bytes(), mark.stat().st_mtime
        maker = int(text) if text.strip(b"\0") else len(text) - 1 if text else maker
    makers: list[torch.Tensor] = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(makers, torch.tensor([maker]), group=group)
    if maker == rank:  # all ranks have read the mark
        for path in directory.glob(f"{_MARK}*"):
            with contextlib.suppress(OSError):
                if path == mark or path.stat().st_mtime < now - _ABANDONED_S:
                    path.unlink()
    return [int(each) for each in makers]
