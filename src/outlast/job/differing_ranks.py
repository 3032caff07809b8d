"""Compares snapshot checksums to find ranks whose copy of the common state differs from the other ranks' copies. Pure.

Under DDP all ranks have the same parameters and optimizer state, bit for bit. Each worker has one copy of this state in its
snapshot, and the worker's ranks share the work of copying it and computing its checksums.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from outlast.job import slow_ranks

FEWEST = 3
"""Minimum number of workers needed to tell which copy is wrong."""
WAYS_BACK = 3
"""A run ends instead of going back to about the same step for the third time."""
_KEYS = 20


def share(local_rank: int, turn: int, local_ranks: int) -> int:
    """Return which share of the state a worker's rank takes in the `turn`-th snapshot. Each rank takes each share in turn."""
    return (local_rank + turn) % local_ranks


def weight(worker: int, workers: int) -> int:
    """Return the factor for a worker's checksum in a weighted sum over all workers. The sum is 0 if all checksums are equal, and
    not 0 if one checksum differs. If several differ, it is 0 by chance once in 2**32. `worker` is the worker's position."""
    return 1 if worker < workers - 1 else 1 - workers


@dataclasses.dataclass(frozen=True)
class Copy:
    """One rank's copy of one share of the state that all ranks have in common."""

    rank: int
    worker: int
    node: str
    share: int
    checksums: Mapping[str, int]
    """Checksums, keyed by tensor name; empty if they could not be read."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Ranks whose copies of a share differ from the other ranks' copies."""

    ranks: tuple[Copy, ...]
    """The copy that differs, if most others agree; otherwise all copies, because any of them may be right."""
    tensors: tuple[str, ...]
    copies: int

    def event(self, step: int, agreed: int) -> dict[str, object]:
        """Return the fields of a ledger event. `agreed` is the step of the last snapshot with equal copies, or 0 if unknown."""
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
    """Return the differences between the copies of each share. Tensors of modules come before those of optimizers."""
    found: dict[tuple[int | None, int], list[str]] = {}
    """Tensor names, keyed by the rank that differs (None if unknown) and the share."""
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
    """Return the ranks that differ from the majority. The result is empty unless every difference has a clear majority."""
    return () if any(len(each.ranks) > 1 for each in found) else tuple(sorted({each.ranks[0].rank for each in found}))


def stuck(agreed: int, earlier: Iterable[tuple[int, int]]) -> bool:
    """Return whether the run has gone back to step `agreed` or a later step too often. `earlier` lists the points to which the
    run has gone back, as (generation, step)."""
    return sum(step >= agreed for _, step in earlier) >= WAYS_BACK - 1


def notice(rank: int, step: int, where: str) -> str:
    """Return a sentence for a job's status. `where` is the rank's location, such as `worker 1, node a`."""
    return (
        f"rank {rank} ({where}) has other bits than other ranks since step {step}; `outlast report` and its log name the tensors"
    )
