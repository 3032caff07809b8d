"""Compares snapshot checksums to find ranks whose copy of the common state differs from the others'. Pure.

Under DDP all ranks have the same parameters and the same optimizer state, bit for bit. A worker's ranks share the work
of copying and checksumming them, so there is one copy for each worker.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from outlast.job import slow_ranks

FEWEST = 3
"""Minimum number of workers needed to tell which one is wrong."""
WAYS_BACK = 3
"""A run that would have to go back to about the same step this many times ends instead."""
_KEYS = 20
"""Maximum number of tensor names that are recorded."""


def share(local_rank: int, turn: int, local_ranks: int) -> int:
    """Return which share a worker's rank takes in the `turn`-th snapshot.

    After as many snapshots as the worker has ranks, each rank has taken each share once.
    """
    return (local_rank + turn) % local_ranks


def weight(worker: int, workers: int) -> int:
    """Return the factor for a worker's checksum in the sum over all workers, which is 0 if all checksums are equal.

    If one differs, the sum is not 0; if several do, it is 0 by chance once in 2**32. `worker` is the worker's position.
    """
    return 1 if worker < workers - 1 else 1 - workers


@dataclasses.dataclass(frozen=True)
class Copy:
    """One rank's copy of one share of the state common to all ranks."""

    rank: int
    worker: int
    node: str
    share: int
    checksums: Mapping[str, int]
    """Checksums by tensor name; empty if they could not be read."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Ranks that differ from the others."""

    ranks: tuple[Copy, ...]
    """The copy that differs, if most others agree; otherwise all copies, since any may be the right one."""
    tensors: tuple[str, ...]
    copies: int

    def event(self, step: int, agreed: int) -> dict[str, object]:
        """Return the ledger's fields. `agreed` is the step of the last snapshot in which all were equal, or 0 if unknown."""
        who = {"rank": self.ranks[0].rank, "worker": self.ranks[0].worker, "node": self.ranks[0].node}
        everybody = who if len(self.ranks) == 1 else {"ranks": [each.rank for each in self.ranks]}
        about = {"tensors": self.tensors[:_KEYS], "copies": self.copies, "agreed": agreed}
        return {**everybody, **about, "reason": self.sentence(step, agreed)}

    def sentence(self, step: int, agreed: int) -> str:
        more = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
        what = f"in {self.tensors[0]}{more} at step {step}" + (f" (all were equal at step {agreed})" if agreed else "")
        places = [f"rank {each.rank} ({slow_ranks.place(each.worker, each.node)})" for each in self.ranks]
        if len(places) == 1:
            return (
                f"{places[0]} has other bits than the {self.copies - 1} others {what}; its memory or its processor may be faulty"
            )
        return f"{' and '.join(places)} have different bits {what}; with {self.copies} copies it cannot be told which is right"


def differing(copies: Sequence[Copy]) -> list[Difference]:
    """Return the differences between the copies of each share. Tensors of modules are listed before those of optimizers."""
    found: dict[tuple[int | None, int], list[str]] = {}
    """Tensor names, by the rank that differs (None if unknown) and the share."""
    groups: dict[int, list[Copy]] = {}
    for each in copies:
        if each.checksums:
            groups.setdefault(each.share, []).append(each)
    for number, group in groups.items():
        for name in sorted(group[0].checksums, key=lambda name: ("/state/" in name, name)):
            counts = Counter(each.checksums.get(name) for each in group)
            usual, times = counts.most_common(1)[0]
            if 2 * times <= len(group):
                found.setdefault((None, number), []).append(name)
            for each in group if len(counts) > 1 and 2 * times > len(group) else ():
                if each.checksums.get(name) != usual:
                    found.setdefault((each.rank, number), []).append(name)
    return [
        Difference(tuple(each for each in groups[number] if rank in (None, each.rank)), tuple(names), len(groups[number]))
        for (rank, number), names in found.items()
    ]


def blamed(found: Sequence[Difference]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority; none unless every difference has a clear majority."""
    return () if any(len(each.ranks) > 1 for each in found) else tuple(sorted({each.ranks[0].rank for each in found}))


def stuck(agreed: int, earlier: Iterable[tuple[int, int]]) -> bool:
    """Return whether going back to step `agreed` again would not help, because the run has gone back to that step or a later one
    too often. `earlier` lists where it went back to, as (generation, step)."""
    return sum(step >= agreed for _, step in earlier) >= WAYS_BACK - 1


def notice(rank: int, step: int, where: str) -> str:
    """Return a sentence for a job's status. `where` is the rank's location, such as `worker 1, node a`."""
    return (
        f"rank {rank} ({where}) has other bits than other ranks since step {step}; `outlast report` and its log name the tensors"
    )
