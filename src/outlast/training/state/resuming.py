"""Resumes a world from its newest reachable state, in memory, on a disk, or in a store.

All ranks exchange lists of the snapshots in memory, the checkpoints on disks and the newest checkpoint in the store, and load the
latest of these. If one rank cannot read it, all ranks try the next one, before any of the script's objects is changed. Damaged
copies are not read again; unreachable copies are retried for 20 seconds. No snapshot is dropped before another state is loaded.

A rank whose bits differ sends wrong gradients to all others, so all later states are wrong. `WayBack.go` records on every disk
that these states do not count, and ends that rank's worker, as if it had crashed. See docs/decisions/0069-the-way-back.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outlast.base.errors import NotRestored, OutlastError, StoreError, WrongBits
from outlast.job import differing_ranks
from outlast.job.differing_ranks import Difference
from outlast.storage import checkpoints
from outlast.storage.snapshots import newest_snapshot, part_format
from outlast.storage.snapshots.client import Client
from outlast.storage.snapshots.newest_snapshot import At, Candidate, Held
from outlast.storage.snapshots.part_format import Damaged, OutOfReach, Part
from outlast.training.state import checkpoint, newest_on_disks, snapshot_reader
from outlast.training.state.shared_disks import Disks
from outlast.training.state.snapshot_reader import Reader
from outlast.worker.hangs import deadlocks

log = logging.getLogger("outlast")


@dataclasses.dataclass(frozen=True)
class WayBack:
    """Takes a run back to an earlier step, at most once in a generation. `directory` contains the run's checkpoints."""

    directory: Path
    run: str
    generation: int
    disks: Disks

    def go(self, found: Sequence[Difference], step: int, agreed: int) -> None:
        """Go back to step `agreed`, because of the differences `found` at `step`. All ranks must call this. Raises WrongBits on
        the ranks that differ; on other ranks the collective fails, as after a crash. Raises OutlastError on all ranks if going
        back has not helped before. Returns if it is unclear which ranks differ, or if no disk can be written."""
        blamed = differing_ranks.blamed(found)
        if not blamed:
            return
        each = self.disks.gather(checkpoints.ways_back(self.directory, self.run))
        stuck = differing_ranks.stuck(agreed, {way for ways in each for way in ways})
        problem = withdraw(self.directory, self.run, [(self.generation, agreed)]) if self.disks.leader else ""
        problems = self.disks.gather(problem)
        if all(problems[rank] for rank in self.disks.leading):
            log.warning("outlast: the run cannot go back to step %d: %s", agreed, problems[0])
            return
        reason = next(
            (one.sentence(step, agreed) for one in found if one.ranks[0].rank == self.disks.rank), found[0].sentence(step, agreed)
        )
        if stuck:
            raise OutlastError(
                f"{reason}; going back to step {agreed} has not helped {differing_ranks.WAYS_BACK - 1} times, so the run ends: "
                "test the machines, or find what differs between ranks in the script; without checkpoint.goBack it goes on"
            )
        if self.disks.rank in blamed:
            raise WrongBits(f"{reason}; the run goes back to step {agreed}, and another worker takes the place of this one")
        self.disks.gather(None)  # fails once the ranks that differ have ended


def withdraw(directory: Path, run: str, ways_back: Sequence[tuple[int, int]]) -> str:
    """Withdraw the checkpoints on this disk that do not count after these `ways_back`. Returns the problem or an empty string."""
    try:
        checkpoints.withdraw(directory, run, ways_back)
    except OSError as error:
        return f"checkpoints with wrong bits cannot be renamed in {directory}: {error.strerror or error}"
    return ""


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Restored:
    """The loaded state, the same on every rank."""

    step: int = 0
    at: tuple[int, int] = (0, 0)
    """(generation, step) of the loaded snapshot; (0, 0) if the state was no snapshot."""
    committed: int = 0
    """The newest committed step up to `step`."""
    source: str = ""
    """`memory` if each rank read its own worker's memory, `peer` if any rank read another worker's, `disk`, `store`, or empty if
    training begins at step 0."""
    path: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    most: int = sys.maxsize
    """The last step that counts, if the run has gone back since this state was saved."""
    random: bool = False
    """True if the state had this rank's random number generators; may differ between ranks."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Data that rank 0's session added to the snapshot."""

    def event(self) -> dict[str, Any]:
        more = {"source": self.source, "bytes": self.bytes, "seconds": self.seconds} if self.source else {}
        return {"path": self.path, **more}

    def __str__(self) -> str:
        if self.source in ("memory", "peer"):
            peers = "" if self.source == "memory" else ", partly of other workers"
            return f"the memory of its workers{peers}: {self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
        return str(self.path)


def restore(
    state: Mapping[str, Any], search: newest_on_disks.Search, client: Client | None, generation: int, *, peek: bool = False
) -> Restored:
    """Load the newest reachable state into `state`. Raises OutlastError on all ranks. All ranks must call this. With `peek`,
    `state` is a part of the saved state, random numbers stay as they are, and no snapshot is given up."""
    begun = time.monotonic()
    restored = _restored(state, search, client, generation, peek=peek)
    return dataclasses.replace(restored, seconds=round(time.monotonic() - begun, 6))


def _restored(
    state: Mapping[str, Any], search: newest_on_disks.Search, client: Client | None, generation: int, *, peek: bool
) -> Restored:
    disks = search.disks
    rank = None if peek else disks.rank
    offered = newest_on_disks.Offered(search, _report(client, search))
    reports = [report for report in offered.payloads if report is not None]
    agents = client is not None and len(reports) == len(offered.payloads)
    held, stored, problem, ways = merged(reports)
    held, stored = _counted(held, stored, ways, search)
    elected = newest_snapshot.newest(held if agents else [], search.run, generation)
    warn = log.warning if disks.rank == 0 else log.debug
    for reason in elected.reasons:
        warn("outlast: %s", reason)
    committed = _Committed(search, client, offered, stored if agents else None)
    if held and not agents:
        warn("outlast: what is in memory is not used, and kept: the agent of another worker has no part in it")
    if agents and not elected.candidates:
        committed.fetch()
    elif problem and agents:
        warn("outlast: the state is chosen without the store: %s", problem)
    failed: list[OutlastError] = []
    chosen, loaded = None, None
    for candidate in elected.candidates:
        assert client is not None
        if chosen := committed.newest(candidate.at):
            break
        try:
            loaded = _from_memory(candidate, state, client, search, rank)
            break
        except (Damaged, OutOfReach) as problem:
            failed.append(problem)
            what = "cannot be used" if isinstance(problem, Damaged) else "is out of reach"
            warn("outlast: %s %s: %s", candidate, what, problem)
    if loaded is None:
        chosen = chosen or committed.newest()
        if failed and chosen is None:
            again = any(isinstance(problem, OutOfReach) for problem in failed)
            if client is not None and not again and not peek:
                client.forget()
            what = "tries again" if again else "begins anew"
            raise NotRestored(f"no snapshot in memory could be read, and there is no checkpoint; the next start {what}")
        if chosen is None:
            if unread := committed.offered.unread:
                raise NotRestored(f"{unread}, and there is no state elsewhere; the next start tries again")
            loaded = Restored()
        else:
            random = checkpoint.restore(chosen.path, state, rank)
            size = sum(path.stat().st_size for path in chosen.path.iterdir())
            loaded = Restored(chosen.step, source=committed.source, path=str(chosen.path), bytes=size, random=random)
        if agents:
            disks.gather(None)  # barrier: every rank has loaded it
    if failed:
        warn("outlast: training goes on from step %s instead of step %s", loaded.step, elected.candidates[0].at[1])
    if client is not None and agents and not peek:
        client.forget(loaded.at)
    since = chosen.generation if chosen else loaded.at[0]
    most = min((step for generation, step in ways if since <= generation), default=loaded.most)
    return dataclasses.replace(loaded, committed=committed.offered.committed(loaded.step), most=most)


def _counted(held: list[Held], stored: At | None, ways: list[At], search: newest_on_disks.Search) -> tuple[list[Held], At | None]:
    """Return the parts in memory and the store's newest checkpoint that count after these `ways` back. Withdraws all other
    checkpoints on this disk."""
    search.ways_back[:] = ways
    if ways and search.disks.leader and (problem := withdraw(search.directory, search.run, ways)):
        log.warning("outlast: %s", problem)
    held = [each for each in held if not checkpoints.withdrawn(*each.part.at, ways)]
    return held, None if stored and checkpoints.withdrawn(*stored, ways) else stored


class _Committed:
    """The checkpoints on all disks, and the newest checkpoint in the store."""

    def __init__(
        self, search: newest_on_disks.Search, client: Client | None, offered: newest_on_disks.Offered, stored: At | None
    ) -> None:
        self._search, self._client, self._stored = search, client, stored
        self.offered, self.source = offered, "disk"

    def newest(self, after: At = (0, 0)) -> checkpoints.Checkpoint | None:
        """Return the newest valid checkpoint after `after`, or None. May fetch it from the store. All ranks must call this."""
        valid = newest_on_disks.valid(self._search, self.offered, after)
        if self._stored is None or self._stored <= max(after, (valid.generation, valid.step) if valid else after):
            return valid
        step = self._stored[1]
        try:
            self.fetch()
        except (NotRestored, StoreError) as problem:
            if self._search.disks.rank == 0:
                log.warning("outlast: step %s is in the store and cannot be fetched, an older state counts: %s", step, problem)
            return valid
        return newest_on_disks.valid(self._search, self.offered, after)

    def fetch(self) -> None:
        """Have rank 0's agent fetch the store's newest checkpoint to its disk. All ranks must call this. Raises NotRestored on
        all ranks if a retry can help, otherwise StoreError."""
        disks, previous, self._stored = self._search.disks, self.offered.disks, None
        problem, retry = "", False
        if disks.rank == 0:
            assert self._client is not None
            try:
                with deadlocks.watch().alive():
                    self._client.restore()
            except StoreError as error:
                problem, retry = str(error), error.retry
        problem, retry = disks.gather((problem, retry))[0]
        if problem:
            raise NotRestored(problem) if retry else StoreError(problem)
        self.offered = newest_on_disks.Offered(self._search)
        self.source = "store" if self.offered.disks != previous else "disk"


def _report(client: Client | None, search: newest_on_disks.Search) -> bytes | None:
    """Return this rank's report to all ranks, or None if there is no agent. A worker's first rank reports the parts in memory,
    and rank 0 the store's newest checkpoint. Raises NotRestored if the agent does not answer, since its parts may be the newest
    state."""
    if client is None:
        return None
    try:
        held = client.catalog() if search.share[0] == 0 else []
    except (Damaged, OutOfReach) as error:
        raise NotRestored(f"the snapshots of this worker cannot be listed: {error}") from error
    stored, problem = None, ""
    try:
        stored = client.newest() if search.disks.rank == 0 else None
    except StoreError as error:
        problem = str(error)
    ways = checkpoints.ways_back(search.directory, search.run) if search.disks.leader else []
    return packed(client.address, held, stored, problem, ways)


def packed(
    address: str, held: Sequence[Part], stored: At | None = None, problem: str = "", ways_back: Sequence[At] = ()
) -> bytes:
    """Encode a rank's report as JSON, which other versions can read, too. It is compressed, since the exchange pads all reports
    to the longest."""
    report: dict[str, Any] = {"address": address, "parts": [part.json() for part in held], "stored": stored, "problem": problem}
    report |= {"ways_back": list(ways_back)} if ways_back else {}
    return zlib.compress(json.dumps(report).encode(), 1)


def merged(reports: Sequence[bytes]) -> tuple[list[Held], At | None, str, list[At]]:
    """Return all ranks' parts in memory, the store's newest checkpoint, the problem with the store, and the steps that the run
    went back to."""
    each = [json.loads(zlib.decompress(report)) for report in reports]
    held = [Held(part, one["address"]) for one in each for part in part_format.catalog(one["parts"])]
    ways = {(int(generation), int(step)) for one in each for generation, step in one.get("ways_back", ())}
    first: dict[str, Any] = each[0] if each else {"stored": None, "problem": ""}
    return held, tuple(first["stored"]) if first["stored"] else None, first["problem"], sorted(ways)


def _agreed(work: Callable[[], T], exchange: Callable[[Any], list[Any]]) -> list[T]:
    """Return the results of `work` on all ranks. If `work` raises Damaged or OutOfReach on one rank, all ranks do. All ranks must
    call this."""
    outcome: tuple[str, bool, T | None]
    try:
        outcome = "", False, work()
    except (Damaged, OutOfReach) as error:
        outcome = str(error), isinstance(error, OutOfReach), None
    every = exchange(outcome)
    failed = sorted((away, f"rank {rank}: {problem}") for rank, (problem, away, _) in enumerate(every) if problem)
    if failed:  # damage comes first: unlike an unreachable copy, it stays
        raise (OutOfReach if failed[0][0] else Damaged)(failed[0][1])
    return [value for _, _, value in every]


def _from_memory(
    candidate: Candidate, state: Mapping[str, Any], client: Client, search: newest_on_disks.Search, own: int | None
) -> Restored:
    """Load a snapshot, and rank `own`'s random numbers. Raises Damaged or OutOfReach on all ranks. All ranks must call this."""
    disks, rank = search.disks, search.disks.rank
    reader = Reader(candidate, client, rank, lambda sentence: log.warning("outlast: %s", sentence))
    targets: checkpoint.Flat = {}

    def covered() -> bool:
        reader.read_indices(broadcast)
        targets.update(checkpoint.targets_of(reader.read_metadata(), state, own))
        return reader.covers(targets)

    def read() -> tuple[int, int]:
        if tails:
            reader.add({number: tail for each in tails for number, tail in each.items()})
            targets.update(checkpoint.targets_of(reader.read_metadata(), state, own))
        checkpoint.load(reader, str(candidate), state, targets)
        return reader.own_bytes, reader.peer_bytes

    [broadcast] = _agreed(
        lambda: reader.read_indices() if rank == 0 else None, lambda outcome: [disks.broadcast(outcome, disks.group)]
    )
    enough = all(_agreed(covered, disks.gather))
    tails = [] if enough else disks.gather(snapshot_reader.tails(candidate, client, search.share))
    near, far = map(sum, zip(*_agreed(read, disks.gather), strict=True))
    random = checkpoint.put(state, targets, str(candidate), own)  # the script's `load_state_dict` may be a collective
    source, extra = "peer" if far else "memory", json.loads(reader.extra())
    return Restored(candidate.at[1], candidate.at, source=source, bytes=near + far, random=random, extra=extra)
