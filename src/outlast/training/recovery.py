"""Where a world goes on: from the newest state that can be reached, in memory, on a disk, or in a store.

All ranks exchange which parts of snapshots are in their workers' memory and which checkpoints are on their disks. The later of
the newest whole snapshot and the newest valid checkpoint is loaded; if a rank cannot load it, all ranks together try the next. A
store is asked only where nobody has a snapshot: what is in memory is newer than anything that is committed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from outlast.errors import NotRestored, StoreError
from outlast.hangs import stall
from outlast.snapshots import election
from outlast.snapshots.client import Client
from outlast.snapshots.election import Candidate, Held
from outlast.snapshots.parts import Damaged, Part
from outlast.training import checkpoint, newest
from outlast.training.disks import Disks
from outlast.training.memory_reader import Reader

log = logging.getLogger("outlast")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was loaded; the same on every rank."""

    step: int = 0
    at: tuple[int, int] = (0, 0)
    """(generation, step) of the snapshot; (0, 0) when it was none."""
    committed: int = 0
    """The newest committed step up to it."""
    source: str = ""
    """`memory` of our own workers, `peer` if something came from others', `disk`, `store`; empty: from the beginning."""
    path: str | None = None
    """Of the checkpoint."""
    bytes: int = 0
    seconds: float = 0.0
    random: bool = False
    """Whether it had this rank's random numbers. Differs between ranks."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What rank 0's session had added to a snapshot."""

    def event(self) -> dict[str, Any]:
        """For the ledger."""
        more = {"source": self.source, "bytes": self.bytes, "seconds": self.seconds} if self.source else {}
        return {"path": self.path, **more}

    def __str__(self) -> str:
        if self.source in ("memory", "peer"):
            of = "" if self.source == "memory" else ", partly of other workers"
            return f"the memory of its workers{of}: {self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
        return str(self.path)


def restore(state: Mapping[str, Any], search: newest.Search, client: Client | None, generation: int) -> Restored:
    """Load the newest state that can be reached into `state`. Raises OutlastError on all ranks. A collective."""
    begun = time.monotonic()
    found = _restored(state, search, client, generation)
    return dataclasses.replace(found, seconds=round(time.monotonic() - begun, 6))


def _restored(state: Mapping[str, Any], search: newest.Search, client: Client | None, generation: int) -> Restored:
    """`restore`, without its time."""
    disks = search.disks
    offered = newest.Offered(search, _catalog(client, first=search.share[0] == 0))
    held = [Held(part, address) for there in offered.beside if there for address, part in there]
    everybody = all(there is not None for there in offered.beside)
    elected = election.newest(held, search.run, generation)
    if disks.rank == 0:
        for reason in elected.reasons:
            log.warning("outlast: %s", reason)
    source = "disk"
    if client is not None and everybody and not elected.candidates:
        there = offered.disks
        _fetch(client, disks)
        offered = newest.Offered(search)
        source = "store" if offered.disks != there else "disk"
    chosen = None
    for candidate in elected.candidates if everybody else ():
        assert client is not None
        if chosen := newest.valid(search, offered, candidate.at):
            break
        if found := _from_memory(candidate, state, client, disks):
            client.forget(candidate.at)
            return dataclasses.replace(found, committed=offered.committed(found.step))
    chosen = chosen or newest.valid(search, offered)
    if client is not None:
        client.forget()
    if chosen is None:
        if everybody and elected.candidates:
            raise NotRestored("no snapshot in memory could be read, and there is no checkpoint; the next start begins anew")
        return Restored()
    random = checkpoint.restore(chosen.path, state, disks.rank)
    size = sum(path.stat().st_size for path in chosen.path.iterdir())
    return Restored(chosen.step, committed=chosen.step, source=source, path=str(chosen.path), bytes=size, random=random)


def _catalog(client: Client | None, *, first: bool) -> list[tuple[str, Part]] | None:
    """The parts in the memory of this worker, each with the address of its agent, from its `first` rank; None without one."""
    if client is None:
        return None
    try:
        return [(client.address, part) for part in client.catalog()] if first else []
    except Damaged as problem:
        log.warning("outlast: the snapshots of this worker are left out: %s", problem)
        return []


def _fetch(client: Client, disks: Disks) -> None:
    """Have rank 0's agent bring the newest checkpoint of the store to its disk. A collective.

    Raises on all ranks NotRestored if a retry can help, else StoreError.
    """
    problem, retry = "", False
    if disks.rank == 0:
        try:
            with stall.watch().alive():
                client.restore()
        except StoreError as error:
            problem, retry = str(error), error.retry
    problem, retry = disks.gather((problem, retry))[0]
    if problem:
        raise NotRestored(problem) if retry else StoreError(problem)


def _from_memory(candidate: Candidate, state: Mapping[str, Any], client: Client, disks: Disks) -> Restored | None:
    """Load a snapshot; None if one of the ranks cannot. A collective."""

    def say(sentence: str) -> None:
        log.warning("outlast: %s", sentence)

    problem, random, extra, near, far = "", False, b"{}", 0, 0
    try:
        reader = Reader(candidate, client, disks.rank, say)
        try:
            random = checkpoint.load(reader, str(candidate), state, disks.rank)
            extra, near, far = reader.extra(), reader.near, reader.far
        finally:
            reader.close()
    except Damaged as error:
        problem = str(error)
    said = disks.gather((problem, near, far))
    if problems := [f"rank {rank}: {problem}" for rank, (problem, _, _) in enumerate(said) if problem]:
        if disks.rank == 0:
            log.warning("outlast: %s cannot be used: %s", candidate, problems[0])
        return None
    size, came = (sum(each[place] for each in said) for place in (1, 2))
    source = "peer" if came else "memory"
    return Restored(candidate.at[1], candidate.at, source=source, bytes=size + came, random=random, extra=json.loads(extra))
