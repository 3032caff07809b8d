"""Decides which snapshot a world resumes from: the newest complete one. Pure.

A snapshot is complete if workers hold the unique part of every rank of its world, and all shared parts of some worker. It must be
of this run, and not of a later generation. Parts of different snapshots are never combined, because training was never in such a
state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from outlast.storage.snapshots.part_format import Part

At = tuple[int, int]
"""(generation, step), which orders snapshots and checkpoints."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A part in a worker's memory."""

    part: Part
    address: str


Holders = tuple[Held, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A complete snapshot."""

    at: At
    unique: tuple[Holders, ...]
    """Holders of each unique part, in order of rank."""
    shared: tuple[tuple[Holders, ...], ...]
    """Complete sets of shared parts, each in order of local rank. Any set is enough; the one that most workers hold comes first.
    """

    @property
    def parts(self) -> list[Part]:
        return [holders[0].part for holders in (*self.unique, *self.shared[0])]

    def __str__(self) -> str:
        return f"the snapshot of step {self.at[1]} (generation {self.at[0]})"


@dataclasses.dataclass(frozen=True)
class Election:
    """The snapshots from which a world may resume."""

    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    """Why snapshots newer than the first candidate were rejected."""


def newest(held: Iterable[Held], run: str, generation: int) -> Election:
    """Return the snapshots of `run` from which a world of `generation` may resume."""
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
    for (at, _, world), group in sorted(groups.items(), key=lambda group: group[0], reverse=True):
        candidate = _candidate(at, world, group)
        if isinstance(candidate, Candidate):
            candidates.append(candidate)
        elif not candidates:
            reasons.append(candidate)
    return Election(tuple(candidates), tuple(reasons))


def _candidate(at: At, world: int, held: Sequence[Held]) -> Candidate | str:
    name = f"the snapshot of step {at[1]} (generation {at[0]})"
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
            return f"{name} lacks what rank {rank} of {world} alone had"
        same = _same(by_rank[rank])
        if not same:
            return f"{name} is there in two versions of what rank {rank} alone had"
        unique.append(same)
    whole: dict[tuple[str, ...], list[list[Held]]] = {}
    for _, by_local_rank in sorted(by_worker.items()):
        if complete := _whole(by_local_rank):
            merged = whole.setdefault(tuple(holders[0].part.digest for holders in complete), [[] for _ in complete])
            for holders, more in zip(merged, complete, strict=True):
                holders += more
    common = sorted(whole.values(), key=lambda merged: -len(merged[0]))
    shared = tuple(tuple(tuple(holders) for holders in merged) for merged in common)
    return Candidate(at, tuple(unique), shared) if shared else f"{name} lacks a whole set of what all ranks had"


def _whole(by_local_rank: Mapping[int, Sequence[Held]]) -> tuple[Holders, ...]:
    """Return the holders of a worker's shared parts, in order of local rank; empty if a part is missing."""
    ranks = next(iter(by_local_rank.values()))[0].part.local_ranks
    shared = tuple(_same(by_local_rank.get(local, ())) for local in range(ranks)) if len(by_local_rank) >= ranks else ()
    return shared if all(shared) else ()


def _same(held: Sequence[Held]) -> Holders:
    """Return the holders of a part's valid copies. If copies differ, only those that equal the writer's own copy are valid."""
    originals = {each.part.digest for each in held if not each.part.replica}
    digests = originals or {each.part.digest for each in held}
    if len(digests) != 1:
        return ()
    [digest] = digests
    return tuple(
        sorted((each for each in held if each.part.digest == digest), key=lambda each: (each.part.replica, each.address))
    )
