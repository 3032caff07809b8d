"""Which memory a new part gets: one complete snapshot at any time, and memory for two."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.storage.snapshots import rooms as rules
from outlast.storage.snapshots.rooms import Choice, View


class Worker:
    """Memory of a worker, as `server` manages it."""

    def __init__(self, budget: int) -> None:
        self.budget, self.rooms, self._next = budget, list[View](), 0

    def take(self, size: int, at: rules.At, complete: rules.At, *, replica: bool = False) -> int | None:
        choice = rules.choose(self.rooms, size, self.budget, at, complete, replica=replica)
        if choice.problem:
            return None
        held = {room.id: room for room in self.rooms}
        overwritten = [held[id] for id in (*choice.drop, *([] if choice.reuse is None else [choice.reuse]))]
        assert not any(room.at == complete or room.busy for room in overwritten if not room.replica)
        self.rooms = [room for room in self.rooms if room not in overwritten]
        if choice.reuse is None:
            self._next += 1
            room = View(self._next, size)
        else:
            room = held[choice.reuse]
        self.rooms.append(dataclasses.replace(room, at=at, busy=False, replica=replica))
        assert sum(room.size for room in self.rooms) <= self.budget
        return room.id

    def holds(self, at: rules.At) -> list[int]:
        return sorted(room.size for room in self.rooms if room.at == at)


@given(
    own=st.lists(st.integers(1, 1000), min_size=1, max_size=3),
    others=st.lists(st.integers(1, 1000), max_size=3),
    history=st.lists(st.tuples(st.booleans(), st.booleans(), st.randoms(use_true_random=False)), max_size=12),
)
def test_memory_for_two_snapshots_always_suffices_and_the_newest_complete_one_stays(
    own: list[int], others: list[int], history: list[tuple[bool, bool, object]]
) -> None:
    """Each snapshot ends complete or given up; now and then a failure begins another generation."""
    worker = Worker(int(2 * rules._WASTE * (sum(own) + sum(others))) + 8)
    complete, generation = (0, 0), 1
    for step, (succeeds, fails, rng) in enumerate(history, start=1):
        at = (generation, step)
        wanted = [(size, False) for size in own] + [(size, True) for size in others]
        rng.shuffle(wanted)  # type: ignore[attr-defined]
        before = worker.holds(complete)
        assert all(worker.take(size, at, complete, replica=replica) for size, replica in wanted)
        assert worker.holds(complete) == before
        assert len(worker.holds(at)) == len(wanted)
        if succeeds:
            complete = at
        generation += fails


def test_replicas_leave_room_for_two_snapshots_of_the_workers_own() -> None:
    worker = Worker(250)
    assert worker.take(100, (1, 1), (0, 0))
    assert worker.take(60, (1, 1), (0, 0), replica=True) is None
    assert worker.take(50, (1, 1), (0, 0), replica=True)
    assert worker.take(100, (1, 2), (1, 1))
    assert worker.take(100, (1, 3), (1, 2))


def test_a_workers_own_part_displaces_a_replica_that_came_first() -> None:
    rooms = [View(1, 80, (1, 1), replica=True), View(2, 20, (1, 1), busy=True, replica=True)]
    assert rules.choose(rooms, 50, 110, (1, 1), (0, 0)) == Choice(drop=(1,))


def test_memory_that_somebody_uses_is_not_overwritten() -> None:
    rooms = [View(1, 100, (1, 1), busy=True), View(2, 100, (1, 1)), View(3, 100, (1, 2))]
    assert rules.choose(rooms, 100, 300, (1, 3), (1, 2)) == Choice(reuse=2)
    choice = rules.choose([rooms[0], rooms[2]], 100, 250, (1, 3), (1, 2))
    assert choice.problem == (
        "0.0 MB of the 0.0 MB for snapshots in the memory of this worker are in use, 0.0 MB more are needed;"
        " raise checkpoint.memory, or lower checkpoint.replicas"
    )


@pytest.mark.parametrize(
    ("at", "free"), [((1, 100), False), ((1, 99), True), ((1, 101), True), ((2, 101), False), ((2, 102), False), (None, True)]
)
def test_what_is_neither_complete_nor_being_made_is_free(at: rules.At | None, free: bool) -> None:
    """Generation 2 went on from step 100 of generation 1, whose step 101 some rank had not finished."""
    assert rules.free(View(1, 1, at), (2, 101), (1, 100)) is free
