"""Which checkpoints in a store count, may be added and may go: rules about plain values.

`Latest` is the content of a run's register (`register`): which generation owns the run, and which checkpoints are committed. Its
parts lie in directories that are named after their content, so no two writers ever write different things to one name; what is
here decides only which of those directories count. Docs: docs/decisions/0007-commits-in-a-store.md.

    passed     a later generation went back before it, so it was skipped as damaged when that one began
    counted    committed and not passed
    expired    enough counted ones are above it, and it is none of the best: it goes
    obsolete   two committed ones of its own generation or later are above it: it may never be added (again), so its files may go

What is expired is obsolete, and what is obsolete stays so, whatever happens next: a process may delete such files however late it
comes to it, even as a zombie. That is the reason why both rules look as they do.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.storage.checkpoints import disk
from outlast.storage.checkpoints.retention import C, Committed, Metric, Retention

_VERSION = 1


@dataclass(frozen=True, order=True)
class Place:
    """Where a checkpoint lies: `step-00001200/<run>-g4-5f3a9c01/`, the files that generation 4 of a run wrote for a step."""

    step: int
    generation: int
    parts: str
    """Name of the directory that holds the files, unique to their contents."""
    metric: Metric | None = field(default=None, compare=False)
    """A copy of what its COMMIT says; None where the register does not say it, then COMMIT may."""

    @property
    def key(self) -> str:
        """Its name below `checkpoints/`."""
        return f"{contract.checkpoint_name(self.step)}/{self.parts}"

    @classmethod
    def of(cls, commit: disk.Commit) -> Place:
        """Where the checkpoint belongs that a COMMIT describes."""
        files = [(name, file["size"], file["crc32"]) for name, file in sorted(commit.files.items())]
        digest = zlib.crc32(json.dumps(files).encode())
        return cls(commit.step, commit.generation, f"{commit.run}-g{commit.generation}-{digest:08x}", commit.metric)

    @classmethod
    def parse(cls, key: str, run: str) -> Place | None:
        """The place of `run` that a key below `checkpoints/` is, or lies in."""
        step, _, rest = key.partition("/")
        parts = rest.partition("/")[0]
        number = disk.step_of(step)
        writer = re.fullmatch(rf"{re.escape(run)}-g(\d+)-[0-9a-f]{{8}}", parts)
        return cls(number, int(writer[1]), parts) if number is not None and writer else None


@dataclass(frozen=True)
class Latest:
    """The content of a run's register: who may commit, and what is committed."""

    run: str
    generation: int
    """Earlier ones can no longer commit."""
    places: tuple[Place, ...] = ()
    """The committed checkpoints, one a step, lowest first."""

    @property
    def step(self) -> int:
        """That of the newest checkpoint; 0 when there is none."""
        return self.places[-1].step if self.places else 0

    def at(self, step: int) -> Place | None:
        """The checkpoint of a step."""
        return next((place for place in self.places if place.step == step), None)

    def added(self, place: Place) -> Latest:
        """The same with one more, instead of the one of that step if there is one."""
        return replace(self, places=tuple(sorted([*(p for p in self.places if p.step != place.step), place])))

    def without(self, places: Collection[Place]) -> Latest:
        """The same with fewer."""
        return replace(self, places=tuple(place for place in self.places if place not in places))

    def text(self, time: float) -> bytes:
        """As it is written; `parse` reads it back. `step`, `name` and `time` are for people and scripts."""
        newest = self.places[-1].key if self.places else ""
        document = {"version": _VERSION, "run": self.run, "generation": self.generation, "step": self.step, "name": newest}
        committed = [
            {"step": place.step, "generation": place.generation, "parts": place.parts}
            | ({"metric": place.metric.plain()} if place.metric else {})
            for place in self.places
        ]
        return json.dumps({**document, "time": round(time, 3), "checkpoints": committed}, indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, text: bytes) -> Latest:
        """The register in a text; raises ValueError if it is damaged, OutlastError if a later Outlast wrote it."""
        document = json.loads(text.decode())
        try:
            if document["version"] > _VERSION:
                raise OutlastError(
                    f"run {document['run']} was saved by a later Outlast (its register is of version {document['version']}, "
                    f"this one reads up to {_VERSION}); install that one"
                )
            places = [
                Place(int(each["step"]), int(each["generation"]), str(each["parts"]), Metric.of(each.get("metric")))
                for each in document["checkpoints"]
            ]
            return cls(str(document["run"]), int(document["generation"]), tuple(sorted(places)))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is damaged ({error})") from error


def superseded(latest: Latest | None, run: str, generation: int) -> str:
    """Why `generation` of `run` may no longer commit, or nothing."""
    if latest and latest.run != run:
        return f"run {run} no longer owns its output in the store: run {latest.run} does"
    if latest and latest.generation > generation:
        return f"generation {generation} of run {run} has been replaced by generation {latest.generation}; this process must stop"
    return ""


def pressing(latest: Latest, waiting: Sequence[C], retention: Retention) -> C:
    """Which of the checkpoints on a disk to add to the register next: the newest, so that little is lost.

    But a best one that one more above it would make `obsolete` goes first; of several the lowest, as each is above those below.
    """
    waiting = sorted(waiting, key=lambda each: each.step)
    here = {each.step for each in waiting}
    known: list[Committed] = [*waiting, *(place for place in latest.places if place.step not in here)]
    best = {each.step for each in retention.best_of(known)}
    last = (each for each in waiting[:-1] if each.step in best and _above(latest, each) == OBSOLETE - 1)
    return next(last, waiting[-1])


def obsolete(latest: Latest, place: Place) -> bool:
    """Whether a checkpoint is so old that it is never to be added (again), and its files may go."""
    return _above(latest, place) >= OBSOLETE


OBSOLETE = 2
"""So many above a checkpoint make it obsolete."""


def _above(latest: Latest, checkpoint: Committed) -> int:
    return sum(other.step > checkpoint.step and other.generation >= checkpoint.generation for other in latest.places)


def refused(latest: Latest, place: Place) -> str:
    """Why a checkpoint is not to be added, or nothing. One of the same step may stand in its way, too: look at that one."""
    if obsolete(latest, place):
        above = ", ".join(str(other.step) for other in latest.places if other.step > place.step)
        return f"step {place.step} is older than what the store keeps (steps {above})"
    there = latest.at(place.step)
    if there and there.generation > place.generation:
        return f"step {place.step} is in the store as generation {there.generation} wrote it"
    return ""


def acquired(latest: Latest, generation: int, finished: Iterable[Place]) -> Latest:
    """The register when `generation` begins. `finished` have all their files and a COMMIT.

    Those of the generation before that did not get into the register, because their writer died a moment too early, get in now.
    Those of earlier ones are zombies'.
    """
    ours = (place for place in finished if place.generation == latest.generation)
    return replace(completed(latest, ours), generation=generation)


def completed(latest: Latest, places: Iterable[Place]) -> Latest:
    """The register with checkpoints that were about to get in; they do unless a later generation has written that step."""
    for place in sorted(places):
        there = latest.at(place.step)
        if not obsolete(latest, place) and (there is None or there.generation < place.generation):
            latest = latest.added(place)
    return latest


def rebuilt(run: str, finished: Iterable[Place]) -> Latest | None:
    """A register that was lost, from what is in the store: of each step what the latest generation wrote; None: nothing."""
    places = {place.step: place for place in sorted(finished)}
    if not places:
        return None
    return Latest(run, max(place.generation for place in places.values()), tuple(places[step] for step in sorted(places)))


# A register for stores that cannot replace an object on a condition: a set of names, each written by one generation only


@dataclass(frozen=True)
class Names:
    """What the names of such a register say. They lie below `checkpoints/latest.<run>/`:

    g0000000005                                          generation 5 has announced itself
    g0000000005.step-00001200.<parts>.proposed           ... would like to commit this
    g0000000005.step-00001200.<parts>                    ... has committed this
    g0000000005.taken                                    ... has copied what the one before it had: it is the owner
    """

    announced: int
    """The highest generation that has announced itself; 0: none."""
    latest: Latest | None
    """The content of the highest generation that owns the run; None before there is one."""
    proposed: tuple[Place, ...] = ()
    """What that generation has proposed or committed."""

    @classmethod
    def read(cls, names: Iterable[str], run: str) -> Names:
        """The register that these names make."""
        announced, owners = 0, [0]
        committed: dict[int, list[Place]] = {}
        proposed: dict[int, list[Place]] = {}
        for name in names:
            prefix, _, rest = name.partition(".")
            if not re.fullmatch(r"g\d+", prefix):
                continue
            generation = int(prefix[1:])
            announced = max(announced, generation)
            if rest == "taken":
                owners.append(generation)
                continue
            parts = rest.removesuffix(".proposed")
            if place := Place.parse(parts.replace(".", "/", 1), run):
                (committed if parts == rest else proposed).setdefault(generation, []).append(place)
        owner = max(owners)
        if not owner:
            return cls(announced, None)
        latest = Latest(run, owner)
        for place in sorted(committed.get(owner, [])):
            latest = latest.added(place)
        return cls(announced, latest, tuple(sorted(proposed.get(owner, []))))


def announcement(generation: int) -> str:
    """The name that says that a generation begins."""
    return f"g{generation:010d}"


def ownership(generation: int) -> str:
    """The name that says that a generation has copied what the one before it had."""
    return f"g{generation:010d}.taken"


def commitment(generation: int, place: Place, *, proposed: bool = False) -> str:
    """The name that says that a generation has committed, or would like to commit, a checkpoint."""
    return f"g{generation:010d}.{contract.checkpoint_name(place.step)}.{place.parts}{'.proposed' if proposed else ''}"


def generation_of(name: str) -> int | None:
    """The generation whose name it is."""
    found = re.match(r"g(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


# Readers


LEASE_S = 300.0
"""TTL of a reader's lease on a checkpoint."""
RENEW_S = 60.0
"""Interval at which readers renew their lease."""


def being_read(readers: Sequence[float], now: float) -> bool:
    """Whether any lease on a checkpoint is valid, given when each was renewed and the time, by the store's clock."""
    return any(now - since < LEASE_S for since in readers)
