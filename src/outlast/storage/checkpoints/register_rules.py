"""Pure rules for a run's register (`register`): which checkpoints in a store count, and which may be added or removed.

The name of a checkpoint's directory contains a digest of its files, so two writers never write different content under one name.
A checkpoint is

    passed     if a later generation skipped it as damaged, and resumed from an earlier step
    counted    if it is committed and not passed
    expired    if enough counted checkpoints have higher steps, and it is not one of the best: it will be removed
    obsolete   if two committed checkpoints of its own or a later generation have higher steps: it may never be added (again)

Every expired checkpoint is and stays obsolete, so any process, even a superseded one, may delete its files at any time. See
docs/decisions/0007-commits-in-a-store.md.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.storage.checkpoints import on_disk
from outlast.storage.checkpoints.retention import C, Committed, Metric, Retention

_VERSION = 1


@dataclass(frozen=True, order=True)
class Place:
    """A checkpoint's location, such as `step-00001200/<run>-g4-5f3a9c01/` for the files that generation 4 of a run wrote."""

    step: int
    generation: int
    parts: str
    """Name of the directory that holds the files."""
    metric: Metric | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Path of the checkpoint's directory below `checkpoints/`."""
        return f"{contract.checkpoint_name(self.step)}/{self.parts}"

    @classmethod
    def of(cls, commit: on_disk.Commit) -> Place:
        """Return the place of the checkpoint that a COMMIT describes."""
        files = [(name, file["size"], file["crc32"]) for name, file in sorted(commit.files.items())]
        digest = zlib.crc32(json.dumps(files).encode())
        return cls(commit.step, commit.generation, f"{commit.run}-g{commit.generation}-{digest:08x}", commit.metric)

    @classmethod
    def parse(cls, key: str, run: str) -> Place | None:
        """Return the place of the checkpoint of `run` to which a key below `checkpoints/` belongs, or None."""
        step, _, rest = key.partition("/")
        parts = rest.partition("/")[0]
        number = on_disk.step_of(step)
        writer = re.fullmatch(rf"{re.escape(run)}-g(\d+)-[0-9a-f]{{8}}", parts)
        return cls(number, int(writer[1]), parts) if number is not None and writer else None


@dataclass(frozen=True)
class Latest:
    """The content of a run's register."""

    run: str
    generation: int
    """The generation that owns the register. Earlier ones can no longer commit."""
    places: tuple[Place, ...] = ()
    """The committed checkpoints in order of step, one per step."""

    @property
    def step(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return self.places[-1].step if self.places else 0

    def at(self, step: int) -> Place | None:
        return next((place for place in self.places if place.step == step), None)

    def added(self, place: Place) -> Latest:
        """Return a copy with one more checkpoint, which replaces any other one at the same step."""
        return replace(self, places=tuple(sorted([*(p for p in self.places if p.step != place.step), place])))

    def without(self, places: Collection[Place]) -> Latest:
        """Return a copy without `places`."""
        return replace(self, places=tuple(place for place in self.places if place not in places))

    def text(self, time: float) -> bytes:
        """Return the register as JSON. `step`, `name` and `time` are for people: `parse` ignores them."""
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
        """Parse a register. Raises ValueError if it is damaged, OutlastError if a later version wrote it."""
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
    """Return why `generation` of `run` may no longer commit, or an empty string."""
    if latest and latest.run != run:
        return f"run {run} no longer owns its output in the store: run {latest.run} does"
    if latest and latest.generation > generation:
        return f"generation {generation} of run {run} has been replaced by generation {latest.generation}; this process must stop"
    return ""


def pressing(stored: Sequence[Committed], waiting: Sequence[C], retention: Retention) -> C:
    """Return the local checkpoint to push next: the newest, or one of the best, if one more commit would make it obsolete."""
    waiting = sorted(waiting, key=lambda each: each.step)
    here = {each.step for each in waiting}
    committed: list[Committed] = [*waiting, *(each for each in stored if each.step not in here)]
    best = {each.step for each in retention.best_of(committed)}
    last = (each for each in waiting[:-1] if each.step in best and _above(stored, each) == OBSOLETE - 1)
    return next(last, waiting[-1])


def obsolete(latest: Latest, place: Place) -> bool:
    """Return whether a checkpoint is so old that it may never be added (again), and its files may be deleted."""
    return _above(latest.places, place) >= OBSOLETE


OBSOLETE = 2
"""Number of newer committed checkpoints of the same or a later generation that make a checkpoint obsolete."""


def _above(stored: Sequence[Committed], checkpoint: Committed) -> int:
    return sum(other.step > checkpoint.step and other.generation >= checkpoint.generation for other in stored)


def refused(latest: Latest, place: Place) -> str:
    """Return why a checkpoint must not be added, or an empty string.

    Callers must also check whether another checkpoint is registered at the same step.
    """
    if obsolete(latest, place):
        above = ", ".join(str(other.step) for other in latest.places if other.step > place.step)
        return f"step {place.step} is older than what the store keeps (steps {above})"
    existing = latest.at(place.step)
    if existing and existing.generation > place.generation:
        return f"step {place.step} is in the store as generation {existing.generation} wrote it"
    return ""


def acquired(latest: Latest, generation: int, finished: Iterable[Place]) -> Latest:
    """Return the register as it is after `generation` has begun.

    `finished` are the checkpoints that have a COMMIT and all their files. Those of the previous generation are added, because
    their writers may have died before registering them.
    """
    previous = (place for place in finished if place.generation == latest.generation)
    return replace(completed(latest, previous), generation=generation)


def completed(latest: Latest, places: Iterable[Place]) -> Latest:
    """Return the register with `places` added, except for steps that a later generation has written."""
    for place in sorted(places):
        existing = latest.at(place.step)
        if not obsolete(latest, place) and (existing is None or existing.generation < place.generation):
            latest = latest.added(place)
    return latest


def rebuilt(run: str, finished: Iterable[Place]) -> Latest | None:
    """Rebuild a lost register from finished checkpoints, or return None if there are none.

    If several are at the same step, that of the latest generation counts.
    """
    places = {place.step: place for place in sorted(finished)}
    if not places:
        return None
    return Latest(run, max(place.generation for place in places.values()), tuple(places[step] for step in sorted(places)))


# A register for stores without conditional replacement of objects: a set of names, each written by one generation only


@dataclass(frozen=True)
class Names:
    """The content of a register that consists of names below `checkpoints/latest.<run>/`.

    g0000000005                                          generation 5 has announced itself
    g0000000005.step-00001200.<parts>.proposed           ... proposes to commit this checkpoint
    g0000000005.step-00001200.<parts>                    ... has committed this checkpoint
    g0000000005.taken                                    ... has copied its predecessor's commits: it is the owner
    """

    announced: int
    latest: Latest | None
    """None if there is no owner yet."""
    proposed: tuple[Place, ...] = ()

    @classmethod
    def read(cls, names: Iterable[str], run: str) -> Names:
        """Parse the names of a register."""
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
    """Return the name that announces a generation."""
    return f"g{generation:010d}"


def ownership(generation: int) -> str:
    """Return the name that makes a generation the owner."""
    return f"g{generation:010d}.taken"


def commitment(generation: int, place: Place, *, proposed: bool = False) -> str:
    """Return the name that commits a checkpoint, or proposes the commit."""
    return f"g{generation:010d}.{contract.checkpoint_name(place.step)}.{place.parts}{'.proposed' if proposed else ''}"


def generation_of(name: str) -> int | None:
    """Return the generation that wrote a name of the register; None for other names."""
    match = re.match(r"g(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


LEASE_S = 300.0
"""How long a reader's lease is valid, in seconds."""
RENEW_S = 60.0
"""Interval at which a reader renews its lease, in seconds."""


def being_read(readers: Sequence[float], now: float) -> bool:
    """Return whether any lease is still valid.

    `readers` are the times at which leases were last renewed. These and `now` are by the store's clock.
    """
    return any(now - since < LEASE_S for since in readers)
