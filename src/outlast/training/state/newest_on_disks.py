"""Finds the newest valid checkpoint on all disks, and copies it to the disks that lack it.

Disks may hold different checkpoints: a new worker's disk is empty, and rank 0 may run on that worker. So the leaders exchange
lists, the ranks of a worker share the verification, and one valid copy is enough.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from outlast.base.errors import NoRoom
from outlast.job import contract
from outlast.storage import checkpoints
from outlast.training.state.shared_disks import Disks, Part

Report = Callable[..., None]


@dataclass(frozen=True, order=True)
class _Offer:
    """A checkpoint on a disk. Equal offers from two disks are the same checkpoint."""

    step: int
    generation: int
    """If two worlds have saved the same step, the later generation wins."""
    digest: str
    """Checksum of COMMIT; empty if COMMIT cannot be read."""
    problem: str = ""


_UNREAD = -1
"""Marks the offer of a disk that cannot be read, in place of a step."""
_Offers = Mapping[int, _Offer]


@dataclass(frozen=True)
class Search:
    """Parameters and results of the search.

    `share` is this rank's index among the ranks of its worker, and the number of these ranks, which divide the files to verify.
    `held` protects checkpoints from removal until it is closed. Rank 0 calls `report(kind, **fields)` for checkpoints that are
    `damaged` or were `copied` to other disks.
    """

    directory: Path
    run: str
    disks: Disks
    share: tuple[int, int]
    held: contextlib.ExitStack
    report: Report
    verified: set[_Offer] = field(default_factory=set)
    ways_back: list[tuple[int, int]] = field(default_factory=list)
    """(generation, step) of each way back, as recorded on any disk; see `retention.withdrawn`."""


class Offered:
    """A run's checkpoints on all disks, valid or not. The constructor is a collective that also gathers `payload`."""

    def __init__(self, search: Search, payload: Any = None) -> None:
        offers = _offers(search.directory, search.run).values() if search.disks.leader else ()
        gathered = search.disks.gather(([astuple(offer) for offer in offers], payload))  # plain: other versions may add fields
        leaders = [[_Offer(*row[:4]) for row in gathered[rank][0]] for rank in search.disks.leading]
        self._every: list[_Offers] = [{offer.step: offer for offer in offers if offer.step != _UNREAD} for offers in leaders]
        self._ways_back = search.ways_back
        self.unread = next((offer.problem for offers in leaders for offer in offers if offer.step == _UNREAD), "")
        """Why a disk cannot be read, and therefore counts as empty. An empty string if all disks can be read."""
        self.payloads = [each for _, each in gathered]

    @property
    def disks(self) -> list[_Offers]:
        """The checkpoints on each disk, keyed by step, without withdrawn ones."""
        return [
            {step: each for step, each in disk.items() if not checkpoints.withdrawn(each.generation, step, self._ways_back)}
            for disk in self._every
        ]

    def committed(self, step: int) -> int:
        """Return the newest committed step up to `step`, or 0. Nothing is verified."""
        steps = (offer.step for disk in self.disks for offer in disk.values() if not offer.problem and offer.step <= step)
        return max(steps, default=0)


def valid(search: Search, offered: Offered, after: tuple[int, int] | None = None) -> checkpoints.Checkpoint | None:
    """Return the newest checkpoint that is valid on a disk, or None, and copy it to the other disks. All ranks must call this.
    With `after`, (generation, step), only later checkpoints count. Raises NoRoom on all ranks if a copy fails."""
    offers, disks, report, held = offered.disks, search.disks, search.report, search.held
    directory, run = search.directory, search.run
    for candidate in _candidates(offers):
        if after is not None and (candidate.generation, candidate.step) <= after:
            continue
        path = directory / contract.checkpoint_name(candidate.step)
        answers = disks.gather(_checked(path, candidate, offers[disks.here], search))
        problems = [
            next((answer for index, answer in zip(disks.by_rank, answers, strict=True) if index == disk and answer), "")
            for disk in range(len(offers))
        ]
        if disks.rank == 0:
            for leader, offer, problem in zip(disks.leading, offers, problems, strict=True):
                if problem and candidate.step in offer:
                    instead = "" if all(problems) else ", which gets a whole one"
                    where = f" (on the disk of rank {leader}{instead})" if disks.several else ""
                    report("damaged", path=str(path), reason=problem + where)
        if all(problems):
            continue
        if any(problems):
            _copy_to_disks(path, problems, disks, held, report)
        return checkpoints.Checkpoint(candidate.step, path, run, candidate.generation)
    return None


def _offers(directory: Path, run: str) -> _Offers:
    offers = {}
    try:
        for each in checkpoints.list_(directory):
            if each.problem:
                offers[each.step] = _Offer(each.step, 0, "", each.problem)
            elif each.run == run:
                with contextlib.suppress(FileNotFoundError):  # it is being removed
                    digest = f"{zlib.crc32((each.path / contract.COMMIT).read_bytes()):08x}"
                    offers[each.step] = _Offer(each.step, each.generation, digest)
    except OSError as error:
        return {_UNREAD: _Offer(_UNREAD, 0, "", f"{directory} cannot be read: {error.strerror or error}")}
    return offers


def _candidates(offers: list[_Offers]) -> list[_Offer]:
    """Return the candidates, newest first: by generation, then step. An unreadable checkpoint counts only if its step has no
    readable one, and is taken to have the highest generation at lower steps."""
    every = {offer for disk in offers for offer in disk.values()}
    readable = {offer.step for offer in every if not offer.problem}
    candidates = {offer for offer in every if not offer.problem or offer.step not in readable}

    def place(offer: _Offer) -> tuple[int, _Offer]:
        earlier = (other.generation for other in candidates if not other.problem and other.step < offer.step)
        return (max(earlier, default=0) if offer.problem else offer.generation), offer

    return sorted(candidates, key=place, reverse=True)


def _checked(path: Path, candidate: _Offer, offers: _Offers, search: Search) -> str:
    """Verify this rank's share of a checkpoint, and protect the checkpoint from removal. Returns the problem or an empty
    string."""
    offer = offers.get(candidate.step)
    if offer is None:
        return "it is not there"
    if offer.problem:
        return offer.problem
    if offer != candidate:
        return f"it is not the one that generation {candidate.generation} saved"
    if offer in search.verified:
        return ""
    try:
        search.held.enter_context(checkpoints.reading(path))
    except OSError as error:
        return f"{contract.COMMIT} cannot be read: {error.strerror}"
    if problem := checkpoints.verify(path, *search.share):
        return problem
    search.verified.add(offer)
    return ""


def _copy_to_disks(path: Path, problems: list[str], disks: Disks, held: contextlib.ExitStack, report: Report) -> None:
    """Copy a checkpoint from the first disk without a problem to the disks with a problem. All ranks must call this."""
    begun, source, missing = time.monotonic(), problems.index(""), bool(problems[disks.here])
    failed = _received(path, source, missing, disks) if disks.leader else ""
    failures = [(rank, failure) for rank, failure in enumerate(disks.gather(failed)) if failure]
    if failures:
        rank, failure = failures[0]
        raise NoRoom(
            f"{path.name} cannot be copied to the disk of rank {rank}: {failure}; make room there or take another worker for it"
        )
    if missing:
        held.enter_context(checkpoints.reading(path))
    if disks.rank == 0:
        ranks = [leader for leader, problem in zip(disks.leading, problems, strict=True) if problem]
        seconds = round(time.monotonic() - begun, 6)
        step, size = checkpoints.read(path).step, checkpoints.read(path).size
        report("copied", step=step, holder=disks.leading[source], ranks=ranks, bytes=size, seconds=seconds)


def _received(path: Path, source: int, missing: bool, disks: Disks) -> str:
    """Take part in the copy as a leader, even after a failure. Returns why this disk failed, or an empty string."""
    commit: checkpoints.Commit | str = ""
    if disks.here == source:
        try:
            commit = checkpoints.read(path)
        except (OSError, ValueError) as error:
            commit = f"{contract.COMMIT} cannot be read: {error}"
    commit = disks.broadcast(commit, disks.leaders, by=source)
    if isinstance(commit, str):
        return commit
    parts = [Part(name, file["size"], file["crc32"], source) for name, file in sorted(commit.files.items())]
    if not missing:
        return disks.exchange(parts, lambda name: path / name if disks.here == source else None, disks.leaders)
    with contextlib.ExitStack() as stack:
        into, problem = None, ""
        try:
            into = stack.enter_context(checkpoints.fetching(path.parent, commit.step))
        except OSError as error:
            problem = error.strerror or str(error)
        failed = disks.exchange(parts, lambda name: into / name if into else None, disks.leaders)
        problem = problem or failed
        if into and not problem:
            try:
                checkpoints.place(into, commit, instead=True)
            except OSError as error:
                problem = error.strerror or str(error)
        if into and problem:
            shutil.rmtree(into, ignore_errors=True)  # `sweep` removes leftovers later
    return problem
