"""The newest valid checkpoint, from which all ranks resume: found on any disk, copied to those that lack it.

Disks may hold different checkpoints: that of a new worker is empty, and rank 0 may be there. So the leaders exchange lists, the
ranks of a worker share the verification, and one valid copy is enough. It is copied to all disks, so that all ranks read the same
checkpoint, and the next loss finds as many copies as there are disks.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from outlast.base.errors import NoRoom
from outlast.job import contract
from outlast.storage import checkpoints
from outlast.training.state.disks import Disks, Part

Report = Callable[..., None]


@dataclass(frozen=True, order=True)
class _Offer:
    """A checkpoint on a disk. Equal offers of two disks are the same checkpoint."""

    step: int
    generation: int
    """If two worlds have saved the same step, the later one's is used."""
    digest: str
    """Checksum of its COMMIT; "" if that cannot be read."""
    problem: str = ""


_UNREAD = -1
"""The step of what a disk offers that cannot be read."""
_Offers = Mapping[int, _Offer]
"""Checkpoints of a disk, by step."""


@dataclass(frozen=True)
class Search:
    """Where to look, and how.

    `share`: which part of how many this rank verifies; the ranks of a worker divide the files. `held` protects what is found from
    removal until it is closed. `report(kind, **fields)` is called on rank 0 for `damaged` checkpoints and those `copied` to other
    disks.
    """

    directory: Path
    run: str
    disks: Disks
    share: tuple[int, int]
    held: contextlib.ExitStack
    report: Report


class Offered:
    """The checkpoints of `run` on all disks, valid or not. To make one is a collective, which carries `beside`, too."""

    def __init__(self, search: Search, beside: Any = None) -> None:
        offers = _offers(search.directory, search.run).values() if search.disks.leader else ()
        said = search.disks.gather(([astuple(offer) for offer in offers], beside))  # plain: other versions may add fields
        leaders = [[_Offer(*row[:4]) for row in said[rank][0]] for rank in search.disks.leading]
        self.disks: list[_Offers] = [{offer.step: offer for offer in offers if offer.step != _UNREAD} for offers in leaders]
        self.unread = next((offer.problem for offers in leaders for offer in offers if offer.step == _UNREAD), "")
        """Why a disk cannot be read, which counts as empty."""
        self.beside = [each for _, each in said]
        """Every rank's, in rank order."""

    def committed(self, step: int) -> int:
        """The newest step up to `step` that is committed, 0 if none is; nothing is verified."""
        found = (offer.step for disk in self.disks for offer in disk.values() if not offer.problem and offer.step <= step)
        return max(found, default=0)


def valid(search: Search, offered: Offered, after: tuple[int, int] | None = None) -> checkpoints.Checkpoint | None:
    """The newest checkpoint that is valid on a disk at least, here in `search.directory`; None when there is none.

    With `after`, (generation, step), only later ones count. Raises NoRoom on all ranks when a disk has no room for it. A
    collective.
    """
    offers, disks, report, held, share = offered.disks, search.disks, search.report, search.held, search.share
    directory, run = search.directory, search.run
    for wanted in _candidates(offers):
        if after is not None and (wanted.generation, wanted.step) <= after:
            continue
        path = directory / contract.checkpoint_name(wanted.step)
        answers = disks.gather(_checked(path, wanted, offers[disks.here], share, held))
        problems = [
            next((said for of, said in zip(disks.of, answers, strict=True) if of == disk and said), "")
            for disk in range(len(offers))
        ]
        if disks.rank == 0:
            for leader, offer, problem in zip(disks.leading, offers, problems, strict=True):
                if problem and wanted.step in offer:
                    instead = "" if all(problems) else ", which gets a whole one"
                    where = f" (on the disk of rank {leader}{instead})" if disks.several else ""
                    report("damaged", path=str(path), reason=problem + where)
        if all(problems):
            continue
        if any(problems):
            _bring(path, problems, disks, held, report)
        return checkpoints.Checkpoint(wanted.step, path, run, wanted.generation)
    return None


def _offers(directory: Path, run: str) -> _Offers:
    """Checkpoints of the run on this disk, and those whose run is unknown."""
    offers = {}
    try:
        for found in checkpoints.list_(directory):
            if found.problem:
                offers[found.step] = _Offer(found.step, 0, "", found.problem)
            elif found.run == run:
                with contextlib.suppress(FileNotFoundError):  # it is being removed
                    digest = f"{zlib.crc32((found.path / contract.COMMIT).read_bytes()):08x}"
                    offers[found.step] = _Offer(found.step, found.generation, digest)
    except OSError as error:
        return {_UNREAD: _Offer(_UNREAD, 0, "", f"{directory} cannot be read: {error.strerror or error}")}
    return offers


def _candidates(offers: list[_Offers]) -> list[_Offer]:
    """Candidates, newest first: of the newest world, its last. An unreadable one is a candidate only if it is the only one of its
    step, and counts as of the world of those before it."""
    known = {offer for disk in offers for offer in disk.values()}
    readable = {offer.step for offer in known if not offer.problem}
    candidates = {offer for offer in known if not offer.problem or offer.step not in readable}

    def place(offer: _Offer) -> tuple[int, _Offer]:
        before = (other.generation for other in candidates if not other.problem and other.step < offer.step)
        return (max(before, default=0) if offer.problem else offer.generation), offer

    return sorted(candidates, key=place, reverse=True)


def _checked(path: Path, wanted: _Offer, offers: _Offers, share: tuple[int, int], held: contextlib.ExitStack) -> str:
    """The problem of this rank's share of a checkpoint on its disk, which is protected from removal; empty if it is valid."""
    offer = offers.get(wanted.step)
    if offer is None:
        return "it is not there"
    if offer.problem:
        return offer.problem
    if offer != wanted:
        return f"it is not the one that generation {wanted.generation} saved"
    try:
        held.enter_context(checkpoints.reading(path))
    except OSError as error:
        return f"{contract.COMMIT} cannot be read: {error.strerror}"
    return checkpoints.verify(path, *share) or ""


def _bring(path: Path, problems: list[str], disks: Disks, held: contextlib.ExitStack, report: Report) -> None:
    """Copy the checkpoint at `path` from the first disk without a problem to those with one. A collective."""
    begun, source, lacking = time.monotonic(), problems.index(""), bool(problems[disks.here])
    failed = _received(path, source, lacking, disks) if disks.leader else ""
    failures = [(rank, said) for rank, said in enumerate(disks.gather(failed)) if said]
    if failures:
        rank, said = failures[0]
        raise NoRoom(
            f"{path.name} cannot be brought to the disk of rank {rank}: {said}; make room there or take another worker for it"
        )
    if lacking:
        held.enter_context(checkpoints.reading(path))
    if disks.rank == 0:
        ranks = [leader for leader, problem in zip(disks.leading, problems, strict=True) if problem]
        seconds = round(time.monotonic() - begun, 6)
        step, size = checkpoints.read(path).step, checkpoints.read(path).size
        report("copied", step=step, holder=disks.leading[source], ranks=ranks, bytes=size, seconds=seconds)


def _received(path: Path, source: int, lacking: bool, disks: Disks) -> str:
    """Take part in the copy as a leader, to the end whatever fails. Returns why it failed here, or an empty text."""
    said: checkpoints.Commit | str = ""
    if disks.here == source:
        try:
            said = checkpoints.read(path)
        except (OSError, ValueError) as error:
            said = f"{contract.COMMIT} cannot be read: {error}"
    said = disks.broadcast(said, disks.leaders, by=source)
    if isinstance(said, str):
        return said
    parts = [Part(name, file["size"], file["crc32"], source) for name, file in sorted(said.files.items())]
    if not lacking:
        return disks.exchange(parts, lambda name: path / name if disks.here == source else None, disks.leaders)
    with contextlib.ExitStack() as stack:
        into, problem = None, ""
        try:
            into = stack.enter_context(checkpoints.fetching(path.parent, said.step))
        except OSError as error:
            problem = error.strerror or str(error)
        came = disks.exchange(parts, lambda name: into / name if into else None, disks.leaders)
        problem = problem or came
        if into and not problem:
            try:
                checkpoints.place(into, said, instead=True)
            except OSError as error:
                problem = error.strerror or str(error)
        if into and problem:
            shutil.rmtree(into, ignore_errors=True)  # what cannot be removed now is swept later
    return problem
