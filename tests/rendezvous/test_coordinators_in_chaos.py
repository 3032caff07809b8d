"""Hypothesis plays the world around a coordinator, on each board: members come, die, stand still, are cut off, err, or have their
processes replaced; boards and coordinators are away, slow, or forget; messages are lost; clocks jump; users change their mind.

Whatever happens, what is published and every decision stay true to their promises, and at last everybody trains.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boards import BOARDS, Run
from outlast.job import contract
from outlast.rendezvous import who_trains
from outlast.rendezvous.coordinator import CoordinatorState
from outlast.rendezvous.partition import LONGEST_HELD_S
from outlast.rendezvous.who_trains import MemberState

LONGEST_S = 2 * LONGEST_HELD_S
"""The longest time after which a coordinator looks again."""
SIZES = [(1, 3), (2, 3), (3, 3), (2, 5), (1, 1)]


def says(**fields: Any) -> Callable[[Run, int, float], None]:
    """A member says something else; a field may be a function of the seconds of the event."""

    def say(run: Run, id: int, seconds: float) -> None:
        if process := run.members.get(id):
            said = {name: value(process, seconds) if callable(value) else value for name, value in fields.items()}
            process.report = replace(process.report, **said)

    return say


def hangs(run: Run, id: int, seconds: float) -> None:
    """Its training does not stop when it is told to."""
    if process := run.members.get(id):
        process.hangs = not process.hangs


def an_old_report_arrives(run: Run, id: int, seconds: float) -> None:
    owner, process = getattr(run, "owner", None), run.members.get(id)
    if owner and process and process.reads:
        owner._take(replace(process.line, generation=max(0, process.line.generation - 1)))


def forget(run: Run) -> None:
    """All that was written is lost while a member trains in the newest world, and says so: else it would be a new run."""
    run.heal()
    run.forget()
    run.passes(6.0)


HARMS: dict[str, Callable[[Run, int, float], object]] = {
    "nothing": lambda run, id, seconds: None,
    "it dies": lambda run, id, seconds: run.die(id),
    "it fails": lambda run, id, seconds: run.fail(id),
    "it leaves": lambda run, id, seconds: run.leave(id),
    "its process is repaired": lambda run, id, seconds: run.repair(id),
    "it stands still": lambda run, id, seconds: run.freeze(id),
    "it goes on": lambda run, id, seconds: run.freeze(id, False),
    "it does not reach the board": lambda run, id, seconds: run.detach(id),
    "it reaches the board": lambda run, id, seconds: run.detach(id, False),
    "it hangs": hangs,
    "it waits untold": says(standing=MemberState.WAITING),
    "it holds a step": says(held=lambda process, seconds: int(seconds)),
    "it owes nothing": says(owes=False),
    "its batch is known": says(batch=lambda process, seconds: (process.report.generation, 0, int(2 * seconds))),
    "another process has its index": lambda run, id, seconds: run.start(id),
    "an old report of it arrives": an_old_report_arrives,
    "the others do not hear it": lambda run, id, seconds: run.cut(id),
    "two do not hear the others": lambda run, id, seconds: run.cut(id, (id + 1) % run.workers),
    "all hear each other": lambda run, id, seconds: run.cut(),
    "it errs about others": lambda run, id, seconds: run.lies.update({id: tuple(range(id, int(id + seconds)))}),
    "the coordinator is lost": lambda run, id, seconds: run.away(seconds),
    "the board is away": lambda run, id, seconds: run.outage(seconds),
    "the coordinator stands still": lambda run, id, seconds: run.stall(seconds),
    "all that was written is lost": lambda run, id, seconds: run.is_known() and forget(run),
    "messages are lost": lambda run, id, seconds: run.lose_messages(seconds / 40),
    "none are lost": lambda run, id, seconds: run.lose_messages(0.0),
    "a clock is set forward": lambda run, id, seconds: run.disturb(wall_s=100 * seconds),
    "a clock is set back": lambda run, id, seconds: run.disturb(wall_s=-100 * seconds),
    "all machines sleep": lambda run, id, seconds: run.disturb(slept_s=10 * seconds),
    "others are wanted": lambda run, id, seconds: run.scale(max(run.least, id)),
}
"""What happens to a run and one of its members."""


def check(run: Run, before: CoordinatorState, after: CoordinatorState) -> None:
    """Check a decision of a coordinator."""
    members, now, timeouts = before.members, run.clock(), who_trains.Timeouts()
    ranks, generation = (before.world.members, before.world.generation) if before.world else ((), 0)
    pending = before.called if before.called and before.called.generation > generation else None
    new, call = after.world, after.called
    if new is not None and new is not before.world:
        now = new.at  # by the coordinator's clock, which goes on steadily when the machine's is set
        assert pending is None or new.generation == pending.generation
        assert before.world is None or pending is not None, "a running world is not replaced without a call"
        assert len(new.members) in who_trains.allowed(run.sizes, members.values())
        assert all(members[id].standing is MemberState.WAITING for id in new.members)
        assert new.address == members[new.members[0]].address
        assert not {*who_trains.lost(before, now).out} & {*new.members}
        # No step was made in a world that one who holds the state has never taken up.
        out = {id for id, loss in before.lost.items() if now < loss.at + loss.held_s}
        late = [members[id] for id in ranks if id in members.keys() - out and members[id].generation < generation]
        stepped = min([generation or math.inf, *(m.generation for m in late if m.held)])  # without a world, members are believed
        survivors = [id for id in ranks if id in new.members and members[id].generation >= stepped]
        assert list(new.members[: len(survivors)]) == survivors
        newest = max((min(members[id].generation, stepped), members[id].held) for id in new.members)
        leaves = [m for m in members.values() if m.standing is MemberState.LEAVING and m.owes and (m.generation, m.held) > newest]
        begun = pending.at if pending else -math.inf
        assert not any(now < max(begun, m.since) + timeouts.leave for m in leaves), "what is saved is lost"
    elif call is not None and call is not before.called:
        assert call.reason
        assert call.generation > max([generation, *(m.generation for m in members.values())])
        if pending is not None and call.generation == pending.generation:
            more = {*call.lost} > {*pending.lost}
            assert pending.planned or more
            assert not call.planned or more or {*call.leaving} > {*pending.leaving}
    elif after.ending and not before.ending and after.ending.code == contract.Exit.DONE:
        assert {(members[id].standing, members[id].generation) for id in ranks} == {(MemberState.DONE, generation)}
    for expected in (None, frozenset(range(run.workers))):
        match who_trains.decide(after, who_trains.Desired(run.workers, run.sizes, expected), timeouts, now):
            case who_trains.Wait(reason, look_again):
                assert reason
                assert look_again is None or now < look_again <= now + LONGEST_S


EVENT = st.tuples(st.sampled_from(sorted(HARMS)), st.integers(0, 4), st.sampled_from([0.5, 0.5, 1.0, 3.0, 6.0, 12.0]))
CHAOS = {"sizes": st.sampled_from(SIZES), "events": st.lists(EVENT, min_size=30, max_size=60)}


def play(board: str, sizes: tuple[int, int], events: list[tuple[str, int, float]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = BOARDS[board](Path(directory), sizes[1], least=sizes[0], limit=10**6)
        run.check = functools.partial(check, run)
        run.train()
        for what, index, seconds in events:
            id = index % run.workers
            if run.has(id):
                HARMS[what](run, id, seconds)
            run.passes(seconds)
        run.heal()
        run.scale(run.workers)
        kinds = {what for what, *_ in events}
        shared = "its batch is known" in kinds  # not every size may share it
        run.until(lambda: run.training() and (shared or len(run.training()) == run.workers), 700.0)
        run.passes(20.0)
        run.until(run.training)
        assert not run.state.closed
        if not any("hear" in what or "err" in what for what in kinds):  # who is needed and unheard is ended again and again
            assert run.state.restarts <= len(events)


@pytest.mark.parametrize("schedules", [3, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("board", BOARDS)
def test_no_two_worlds_of_one_generation_and_all_train_in_the_end(board: str, schedules: int) -> None:
    chaos = given(**CHAOS)(lambda sizes, events: play(board, sizes, events))
    settings(max_examples=schedules, derandomize=schedules < 1000, print_blob=True)(chaos)()


PEACEFUL = st.tuples(
    st.sampled_from(["nothing", "it leaves", "others are wanted"]), st.integers(1, 3), st.sampled_from([0.5, 6.0, 12.0])
)


@pytest.mark.parametrize("board", BOARDS)
@settings(max_examples=3)
@given(events=st.lists(PEACEFUL, min_size=8, max_size=16))
def test_nobody_is_stopped_without_saving_while_nobody_fails(board: str, events: list[tuple[str, int, float]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = BOARDS[board](Path(directory), 4)
        generation = run.train()
        for what, id, seconds in events:
            if id in run.training():
                HARMS[what](run, id, seconds)
            run.passes(seconds)
        run.scale(4)
        run.train()
        assert [call for call in run.calls.values() if call.generation > generation and not call.planned] == []
        assert run.state.restarts == 0
