"""Which snapshot a world goes on from: the newest of which every part can be reached. Pure.

Each worker says which parts are in its memory, its own and replicas of others (`Held`). A snapshot counts if the unique part of
every rank of its world is there, and of one worker the shared parts of all its ranks. It must be of this run, and of this
generation or an earlier one. Parts of two snapshots never count together, whatever their step: that would be a state that
training never had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from outlast.storage.snapshots.parts import Part

At = tuple[int, int]
"""(generation, step): the order of snapshots, and of checkpoints beside them."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A part in the memory of a worker."""

    part: Part
    address: str
    """Of the worker's agent."""


Holders = tuple[Held, ...]
"""Who has the same part."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A snapshot of which every part can be reached."""

    at: At
    unique: tuple[Holders, ...]
    """By rank of the world that made it."""
    shared: tuple[tuple[Holders, ...], ...]
    """Whole sets of shared parts, in a set by local rank. Any one will do; workers that have dealt alike hold the same set."""

    @property
    def parts(self) -> list[Part]:
        """Each part that is read, once."""
        return [holders[0].part for holders in (*self.unique, *self.shared[0])]

    def __str__(self) -> str:
        return f"the snapshot of step {self.at[1]} (generation {self.at[0]})"


@dataclasses.dataclass(frozen=True)
class Election:
    """What there is, and why the rest does not count."""

    candidates: tuple[Candidate, ...]
    """Newest first."""
    reasons: tuple[str, ...]
    """A sentence for each snapshot that is newer than the newest candidate and does not count."""


def newest(held: Iterable[Held], run: str, generation: int) -> Election:
    """The snapshots of `run` that a world of `generation` may go on from."""
    groups: dict[tuple[At, str, int], list[Held]] = {}
    foreign: set[str] = set()
    for each in held:
        part = each.part
        if part.run != run:
            foreign.add(f"run {part.run} is another run than {run}: its snapshot of step {part.step} does not count")
        elif part.generation > generation:
            foreign.add(f"generation {part.generation} is not over: its snapshot of step {part.step} is not for {generation}")
        else:
            groups.setdefault((part.at, part.session, part.world), []).append(each)
    candidates: list[Candidate] = []
    reasons = sorted(foreign)
    for (at, _, world), those in sorted(groups.items(), key=lambda group: group[0], reverse=True):
        found = _candidate(at, world, those)
        if isinstance(found, Candidate):
            candidates.append(found)
        elif not candidates:
            reasons.append(found)
    return Election(tuple(candidates), tuple(reasons))


def _candidate(at: At, world: int, held: Sequence[Held]) -> Candidate | str:
    """The snapshot that these parts make, or why they make none."""
    of = f"the snapshot of step {at[1]} (generation {at[0]})"
    by_rank: dict[int, list[Held]] = {}
    by_worker: dict[int, dict[int, list[Held]]] = {}
    for each in held:
        part = each.part
        if part.kind == "unique":
            by_rank.setdefault(part.rank, []).append(each)
        else:
            by_worker.setdefault(part.worker, {}).setdefault(part.local_rank, []).append(each)
    unique: list[Holders] = []
    for rank in range(world):
        if rank not in by_rank:
            return f"{of} lacks what rank {rank} of {world} alone had"
        same = _same(by_rank[rank])
        if not same:
            return f"{of} is there in two versions of what rank {rank} alone had"
        unique.append(same)
    whole: dict[tuple[str, ...], list[list[Held]]] = {}
    for _, there in sorted(by_worker.items()):
        if found := _set(there):
            known = whole.setdefault(tuple(holders[0].part.digest for holders in found), [[] for _ in found])
            for those, more in zip(known, found, strict=True):
                those += more
    shared = tuple(tuple(tuple(those) for those in known) for known in whole.values())
    return Candidate(at, tuple(unique), shared) if shared else f"{of} lacks a whole set of what all ranks had"


def _set(there: Mapping[int, Sequence[Held]]) -> tuple[Holders, ...]:
    """A worker's shared parts by local rank; empty unless all are there."""
    ranks = next(iter(there.values()))[0].part.local_ranks
    found = tuple(_same(there.get(local, ())) for local in range(ranks)) if len(there) >= ranks else ()
    return found if all(found) else ()


def _same(held: Sequence[Held]) -> Holders:
    """Who holds the same: if they differ, the worker that wrote the part is right; without it nobody is."""
    originals = {each.part.digest for each in held if not each.part.replica}
    digests = originals or {each.part.digest for each in held}
    if len(digests) != 1:
        return ()
    [digest] = digests
    return tuple(
        sorted((each for each in held if each.part.digest == digest), key=lambda each: (each.part.replica, each.address))
    )
