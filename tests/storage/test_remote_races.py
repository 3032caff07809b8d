"""Zombies and owners commit at the same time, die, and lose answers; after every single write the store tells the truth.

A scheduler lets the requests of all happen one at a time, in an order that a seed decides: what fails once fails again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import local_checkpoints
from outlast.base.errors import Superseded, Unreachable
from outlast.job import contract
from outlast.storage import checkpoints, store
from outlast.storage.checkpoints import in_store, on_disk, register, register_rules
from outlast.storage.checkpoints.register_rules import Place
from outlast.storage.store import Store
from watched import Hand, Killed, Turns, Watched, each_register, hand_over

RUN = "run-1"
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp")
STEPS = 12


def content(step: int, generation: int, name: str) -> bytes:
    """What a generation writes: as long as what others write."""
    return f"{name} of step {step:8} by generation {generation:8}".encode()


Saved = dict[tuple[int, int], checkpoints.Checkpoint]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Local checkpoints by (generation, step), each generation on a machine of its own."""
    found = {}
    for generation in range(1, 6):
        directory = tmp_path_factory.mktemp(f"machine-{generation}")
        for step in range(1, STEPS + 1):
            files = {name: content(step, generation, name) for name in FILES}
            metric = checkpoints.Metric(float((5 * step + generation) % 7))
            saved = local_checkpoints.written(directory, step, files, run=RUN, generation=generation, metric=metric)
            found[generation, step] = saved
    return found


class Truth:
    """What must be true of a store at any moment."""

    def __init__(self, raw: Store, best: int = 0) -> None:
        self.raw, self.best = raw, best
        self.latest = register_rules.Latest(RUN, 0)
        """What the register said last."""
        self.history: list[Place] = []
        """What has been the newest."""
        self._read: set[tuple[str, str]] = set()
        """Versions of objects that have been read and found right."""

    def __call__(self) -> None:
        """Look: whatever has a COMMIT is whole and of one writer; what counts has one; nothing has gone back."""
        objects = {entry.key: entry.etag for entry in self.raw.entries(contract.CHECKPOINTS)}
        commit = f"/{contract.COMMIT}"
        found = (Place.parse(key.removeprefix(f"{contract.CHECKPOINTS}/"), RUN) for key in objects if key.endswith(commit))
        finished = set(filter(None, found))
        for place in finished:
            self.whole(place, objects)
        latest = register.read(self.raw, RUN)
        if latest is None:
            assert not self.latest.generation, "the register is gone"
            return
        before, self.latest = self.latest, latest
        best = checkpoints.Retention(2, self.best).best_of(latest.places)  # not known where the register is a set of names
        for place in latest.places:
            if register_rules.obsolete(latest, place) and place not in best:  # a new owner may have copied it while it went
                continue
            assert place in finished, f"{place} counts and is not there"
            assert place in before.places or place.generation >= before.generation, f"{place} is a zombie's, after {before}"
        assert latest.generation >= before.generation, f"a generation is back: {latest} after {before}"
        assert latest.step >= before.step, f"latest went back: {latest} after {before}"
        assert set(before.places[-2:]) <= set(latest.places) or len(latest.places) >= 2, f"one of the last two went: {latest}"
        if latest.step > before.step:
            self.history.append(latest.places[-1])

    def whole(self, place: Place, objects: dict[str, str]) -> None:
        """A place has all files, and they are of one writer."""
        for name in (*FILES, contract.COMMIT):
            key = f"{contract.CHECKPOINTS}/{place.key}/{name}"
            assert key in objects, f"{place} has a COMMIT and lacks {name}"
            if (key, objects[key]) in self._read:
                continue
            found = self.raw.get(key)
            if name == contract.COMMIT:
                said = checkpoints.Commit.parse(found)
                assert (said.step, said.generation, set(said.files)) == (place.step, place.generation, set(FILES))
            else:
                assert found == content(place.step, place.generation, name), f"{place} is mixed"
            self._read.add((key, objects[key]))


class Writer:
    """A generation of the run: takes the store over, and pushes steps: those given, or the next three."""

    def __init__(
        self, place: Any, generation: int, saved: Saved, journals: Path, *, steps: Any = None, wait: int = 0, best: int = 0
    ) -> None:
        self.place, self.generation, self.saved, self.journals = place, generation, saved, journals
        self.steps, self.wait, self.best = steps, wait, best
        self.committed: list[int] = []

    def __call__(self) -> None:
        there = in_store.Checkpoints(self.place, RUN)
        for _ in range(self.wait):
            self.again(lambda: self.place.names("nothing"))
        try:
            newest = self.again(lambda: there.acquire(self.generation)).step
            for step in self.steps or range(newest + 1, min(newest + 4, STEPS + 1)):
                local = self.saved[self.generation, step]
                if self.again(lambda local=local: there.push(local, journals=self.journals)).kind == "committed":
                    self.committed.append(step)
                self.again(lambda: there.prune(checkpoints.Retention(2, self.best)))
        except Superseded:
            return

    def again(self, act: Callable[[], Any]) -> Any:
        """Try until it succeeds."""
        while True:
            try:
                return act()
            except Unreachable:
                continue


def fate(hand: Hand, rng: random.Random, *, dies: float = 0.0, fails: float = 0.0) -> Hand:
    """A hand in which a process may die, and a request fail, before or after it is made."""
    dead = threading.Event()

    def fated(request: str, key: str, act: Callable[[], Any]) -> Any:
        def attempt() -> Any:
            if dead.is_set():
                raise Killed
            harm, early = rng.random(), rng.random() < 0.5
            if harm < dies:
                dead.set()
            elif harm < dies + fails and not early:
                act()
            elif harm >= dies + fails:
                return act()
            if dead.is_set() and not early:
                act()
            raise Killed if dead.is_set() else Unreachable("the answer is lost")

        return hand(request, key, attempt)

    return fated


def race(seed: int, saved: Saved, tmp_path: Path, raw: Store, *, conditional: bool) -> list[Place]:
    """A zombie and its successors, all at once; what has been the newest."""
    rng, best = random.Random(seed), seed % 3
    truth = Truth(raw, best)
    turns = Turns(rng, truth)
    harm = rng.choice([{}, {}, {"fails": 0.1}, {"dies": 0.02}, {"dies": 0.02, "fails": 0.05}])
    writers = []
    for generation in range(1, rng.choice([2, 3, 3]) + 1):
        place = Watched(raw, fate(turns.hand(f"g{generation}"), rng, **harm), conditional=conditional)
        steps = rng.choice([None, range(1, 5), range(2, 7)])
        writers.append(
            Writer(place, generation, saved, tmp_path, steps=steps, wait=rng.randrange(0, 40) * (generation - 1), best=best)
        )
    turns.run(**{f"g{writer.generation}": writer for writer in writers})
    # Whoever comes last, alone, restores the newest that was ever seen, and goes on from there.
    there = in_store.Checkpoints(Watched(raw, hand_over, conditional=conditional), RUN)
    newest = there.acquire(5)
    truth()
    assert newest.step == truth.latest.step >= max((step for writer in writers for step in writer.committed), default=0)
    if newest.step:
        told: list[str] = []
        restored = there.restore(tmp_path / f"restored-{seed}", say=told.append)
        assert (restored.step, len(told)) == (newest.step, 1)
        for name in FILES:
            assert (restored.path / name).read_bytes() == content(restored.step, restored.generation, name)
    for step in range(newest.step + 1, newest.step + 4):
        assert there.push(saved[5, step], journals=tmp_path).kind == "committed"
        there.prune(checkpoints.Retention(2, best))
        truth()
    found = there.list_()
    kept = {newest.step + 2, newest.step + 3} | {each.step for each in checkpoints.ranked(found)[:best]}
    steps = {on_disk.step_of(name) for name in raw.names(contract.CHECKPOINTS)} - {None}
    assert steps == kept == {each.step for each in found}, "all but the last two and the best was swept"
    assert all(there.verify(each, deep=True) is None for each in found)
    return truth.history


@each_register
def test_racing_generations_mix_nothing_and_never_go_back(saved: Saved, tmp_path: Path, conditional: bool):
    raw = store.open_(f"memory://races-{conditional}")
    winners = set()
    for seed in range(20):
        history = race(seed, saved, tmp_path, raw.child(str(seed)), conditional=conditional)
        winners |= {each.generation for each in history}
    assert winners >= {1, 2, 3}  # each has come first some time
