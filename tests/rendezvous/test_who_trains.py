"""The world of a job: what is decided in which situation, word for word, and what holds in every situation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outlast.rendezvous import who_trains
from outlast.rendezvous.partition import Loss
from outlast.rendezvous.who_trains import (
    Call,
    Cause,
    Closed,
    Decision,
    Desired,
    Member,
    MemberState,
    State,
    Timeouts,
    Wait,
    World,
)

WAITING, TRAINING, LEAVING, DONE = MemberState.WAITING, MemberState.TRAINING, MemberState.LEAVING, MemberState.DONE
TIMEOUTS = Timeouts(start=30, recovery=1, growth=5, leave=120, answer=10)
NOW = 1000.0


def a_worker(id, standing=WAITING, generation=0, *, since=NOW, failed=False, why=""):
    return Member(id, f"host-{id}:29500", standing, generation, since, failed, why)


def a_world(*members, generation=4, at=900.0):
    return World(generation, members, f"host-{members[0]}:29500", "it was so", at)


def a_call(generation=5, *, planned=False, at=NOW, leaving=()):
    return Call(generation, "there was a reason", planned, at, leaving)


def wanted(replicas=3, *, min=1, max=4, sizes=None, expected=None):
    return Desired(replicas, sizes or tuple(range(min, max + 1)), None if expected is None else frozenset(expected))


def given(*members, world=None, called=None, want=None, now=NOW, since=-math.inf) -> tuple[State, Desired, float]:
    return State({m.id: m for m in members}, world, called, since), want or wanted(), now


def decided(*members, **how) -> Decision:
    return decide(*given(*members, **how))


def decide(state, want, now) -> Decision:
    return who_trains.decide(state, want, TIMEOUTS, now)


def training(*ids, generation=4):
    return [a_worker(id, TRAINING, generation) for id in ids]


def waiting(*ids):
    return [a_worker(id, WAITING, 4) for id in ids]


def knows(member, batch, *, start=(1, 0)):
    return replace(member, batch=(*start, batch))


def starts(*members, reason, at=NOW):
    return World(1, members, f"host-{members[0]}:29500", f"training starts with {reason}", at)


def goes_on(*members, reason, at=NOW, held=0):
    reason = f"there was a reason; training goes on with {reason}"
    return World(5, members, f"host-{members[0]}:29500", reason, at, held)


SITUATIONS: dict[str, tuple[tuple[State, Desired, float], Decision]] = {
    # The start
    "the first world closes at once when all wanted workers wait": (
        given(a_worker(2), a_worker(0), a_worker(1)),
        starts(0, 1, 2, reason="all 3"),
    ),
    "nobody is there yet": (given(), Wait("waiting for 3 more workers: 0 of at least 1 worker is here")),
    "the start waits for the workers that are being started": (
        given(a_worker(1), want=wanted(expected={0, 1, 2}), now=NOW + 10),
        Wait("waiting for workers 0 and 2 (20 s left), then training starts with 1 of 3", NOW + 30),
    ),
    "the start waits for anybody when nobody is expected by name": (
        given(a_worker(1), a_worker(5)),
        Wait("waiting for 1 more worker (30 s left), then training starts with 2 of 3", NOW + 30),
    ),
    "the start goes on with fewer when patience is over": (
        given(a_worker(1), a_worker(5), want=wanted(expected={0, 1, 5}), now=NOW + 30),
        starts(1, 5, reason="2 of 3", at=NOW + 30),
    ),
    "patience runs from the moment the smallest world could be formed": (
        given(a_worker(0, since=NOW - 300), a_worker(1, since=NOW - 1), want=wanted(min=2)),
        Wait("waiting for 1 more worker (29 s left), then training starts with 2 of 3", NOW + 29),
    ),
    "the start never goes below the smallest size": (
        given(a_worker(1), want=wanted(min=2, expected={0, 1, 2}), now=NOW + 1000),
        Wait("waiting for workers 0 and 2: 1 of at least 2 workers is here"),
    ),
    "the smallest size is not awaited when nobody else is expected": (
        given(a_worker(1), want=wanted(min=2, expected={1})),
        Wait("1 of at least 2 workers is here, and no other is starting"),
    ),
    "a worker that cannot enlarge the world is not awaited": (
        given(a_worker(0), a_worker(1), want=wanted(4, sizes=(2, 4), expected={0, 1, 2})),
        starts(0, 1, reason="2 of 4"),
    ),
    "a world closes without those nobody expects": (
        given(a_worker(0), a_worker(1), want=wanted(3, expected={0, 1})),
        starts(0, 1, reason="2 of 3"),
    ),
    "more workers than wanted do not enlarge the world": (
        given(*map(a_worker, range(4)), want=wanted(2)),
        starts(0, 1, reason="all 2"),
    ),
    "fewer wanted than the smallest size means the smallest size": (
        given(*map(a_worker, range(3)), want=wanted(1, min=2)),
        starts(0, 1, reason="all 2"),
    ),
    "only allowed sizes are formed": (
        given(*map(a_worker, range(6)), want=wanted(7, sizes=(1, 2, 4, 8))),
        starts(0, 1, 2, 3, reason="all 4"),
    ),
    # A batch that a world must be able to share
    "a world that refused its size is followed by one that can share the batch": (
        given(*[knows(a_worker(id, WAITING, 4), 8) for id in (0, 1, 2)], world=a_world(0, 1, 2), called=a_call()),
        goes_on(0, 1, reason="2 of 3: the batch cannot be shared equally among 3 workers"),
    ),
    # A running world
    "a running world is left alone": (given(*training(0, 1, 2), world=a_world(0, 1, 2)), Wait("3 workers train in generation 4")),
    "losing a worker calls the others at once": (
        given(*training(0, 1), world=a_world(0, 1, 2)),
        Call(5, "lost worker 2", False, NOW, cause=Cause.LOST),
    ),
    "losing every worker calls for the next generation": (
        given(world=a_world(0, 1, 2)),
        Call(5, "lost workers 0, 1 and 2", False, NOW, cause=Cause.LOST),
    ),
    "failed processes call the others at once": (
        given(*training(0, 1), a_worker(2, TRAINING, 4, failed=True), world=a_world(0, 1, 2)),
        Call(5, "worker 2 failed", False, NOW, cause=Cause.FAILED),
    ),
    "failed processes of a worker that waits already call the others": (
        given(*training(0, 1), a_worker(2, WAITING, 4, failed=True), world=a_world(0, 1, 2)),
        Call(5, "worker 2 failed", False, NOW, cause=Cause.FAILED),
    ),
    "a failure of an older generation is history": (
        given(*training(0, 1), a_worker(2, WAITING, 3, failed=True), world=a_world(0, 1), want=wanted(2)),
        Wait("2 workers train in generation 4"),
    ),
    "a worker that waits though its world trains brings all together": (
        given(*training(0, 1), *waiting(2), world=a_world(0, 1, 2)),
        Call(5, "worker 2 left generation 4 without a call", False, NOW, cause=Cause.LEFT),
    ),
    "workers that stopped with one that leaves have saved as planned": (
        given(*waiting(0), a_worker(1, TRAINING, 4), a_worker(2, LEAVING, 4), world=a_world(0, 1, 2)),
        Call(5, "worker 2 is leaving", True, NOW, (2,), cause=Cause.LEAVING),
    ),
    "members get time to take up their world": (
        given(*training(0, 1), a_worker(2, WAITING, 3), world=a_world(0, 1, 2, at=NOW)),
        Wait("waiting for worker 2 to join generation 4 (10 s left)", NOW + 10),
    ),
    "a member that does not take up its world brings all together": (
        given(*training(0, 1), a_worker(2, WAITING, 0), world=a_world(0, 1, 2, at=NOW), now=NOW + 10),
        Call(5, "worker 2 did not join generation 4 within 10 s", False, NOW + 10, cause=Cause.LATE),
    ),
    "a zombie of an older world disturbs nobody": (
        given(*training(0, 1), a_worker(2, TRAINING, 3, failed=True), world=a_world(0, 1)),
        Wait("2 workers train in generation 4"),
    ),
    # Recovery
    "survivors wait a moment for the lost one to come back": (
        given(*waiting(0, 1), world=a_world(0, 1, 2), called=a_call(), want=wanted(expected={0, 1, 2})),
        Wait("waiting for worker 2 (1 s left), then training goes on with 2 of 3", NOW + 1),
    ),
    "a worker that comes back in time rejoins behind the survivors": (
        given(a_worker(0), *waiting(1, 2), world=a_world(0, 2, 1), called=a_call()),
        goes_on(2, 1, 0, reason="all 3"),
    ),
    "survivors go on alone when patience is over": (
        given(*waiting(0, 1), world=a_world(2, 1, 0), called=a_call(), want=wanted(expected={0, 1, 2}), now=NOW + 1),
        goes_on(1, 0, reason="2 of 3", at=NOW + 1),
    ),
    "survivors go on at once when nobody else is expected": (
        given(*waiting(0, 1), world=a_world(2, 1, 0), called=a_call(), want=wanted(expected={0, 1})),
        goes_on(1, 0, reason="2 of 3"),
    ),
    "a survivor that still stops comes before a spare that waits": (
        given(*waiting(0), a_worker(1, TRAINING, 4), a_worker(3), world=a_world(0, 1), called=a_call(), want=wanted(2)),
        Wait("waiting for worker 1 to stop (10 s left)", NOW + 10),
    ),
    "a spare takes the place of the lost one at once": (
        given(*waiting(0), a_worker(3), world=a_world(0, 1), called=a_call(), want=wanted(2, expected={0, 1, 3})),
        goes_on(0, 3, reason="all 2"),
    ),
    "recovery stays above the smallest size": (
        given(*waiting(0, 1), world=a_world(0, 1, 2), called=a_call(), want=wanted(min=3, expected={0, 1, 2}), now=NOW + 60),
        Wait("waiting for worker 2: 2 of at least 3 workers are here"),
    ),
    "recovery goes on with the largest allowed size": (
        given(*waiting(0, 1, 2), world=a_world(3, 2, 1, 0), called=a_call(), want=wanted(4, sizes=(1, 2, 4)), now=NOW + 1),
        goes_on(2, 1, reason="2 of 4", at=NOW + 1),
    ),
    "when all were lost the next world starts like the first": (
        given(a_worker(1), world=a_world(0, 1, 2), called=a_call(at=NOW - 20), want=wanted(expected={0, 1, 2})),
        Wait("waiting for workers 0 and 2 (30 s left), then training goes on with 1 of 3", NOW + 30),
    ),
    "one survivor is enough for a short wait": (
        given(*waiting(0), a_worker(1), world=a_world(0, 1, 2), called=a_call(), want=wanted(expected={0, 1, 2})),
        Wait("waiting for worker 2 (1 s left), then training goes on with 2 of 3", NOW + 1),
    ),
    "a second loss does not call twice": (
        given(*waiting(0), world=a_world(0, 1, 2), called=a_call(), want=wanted(expected={0})),
        goes_on(0, reason="1 of 3"),
    ),
    "a leaving worker is no part of the next world": (
        given(
            *waiting(0),
            a_worker(1, LEAVING, 4),
            world=a_world(0, 1),
            called=a_call(planned=True, leaving=(1,)),
            want=wanted(2, expected={0, 1}),
        ),
        goes_on(0, reason="1 of 2"),
    ),
    "a worker that is asked to leave long after the call has its time to save": (
        given(
            a_worker(0, LEAVING, 4, since=NOW),
            a_worker(1, since=NOW - 40),
            world=a_world(0),
            called=a_call(planned=True, at=NOW - 1000),
            want=wanted(2, expected={1}),
        ),
        Wait("waiting for worker 0 to save and leave (120 s left)", NOW + 120),
    ),
    # Planned changes
    "a newcomer waits until the world is old enough to grow": (
        given(*training(0, 1), a_worker(2, since=NOW), world=a_world(0, 1, at=NOW - 2)),
        Wait("2 workers train in generation 4; worker 2 may join soon (3 s left)", NOW + 3),
    ),
    "a newcomer calls for a planned change": (
        given(*training(0, 1), a_worker(2), world=a_world(0, 1)),
        Call(5, "growing from 2 to 3 with worker 2", True, NOW, cause=Cause.GROW),
    ),
    "all expected newcomers join at once": (
        given(*training(0, 1), a_worker(3), a_worker(2), world=a_world(0, 1), want=wanted(4, expected={0, 1, 2, 3})),
        Call(5, "growing from 2 to 4 with workers 2 and 3", True, NOW, cause=Cause.GROW),
    ),
    "a newcomer that fits no allowed size is a spare": (
        given(*training(0, 1), a_worker(2), world=a_world(0, 1), want=wanted(4, sizes=(2, 4))),
        Wait("2 workers train in generation 4"),
    ),
    "a newcomer beyond the wanted number is a spare": (
        given(*training(0, 1), a_worker(2), world=a_world(0, 1), want=wanted(2)),
        Wait("2 workers train in generation 4"),
    ),
    "a planned call waits until all have saved": (
        given(*waiting(0), a_worker(1, TRAINING, 4), a_worker(2), world=a_world(0, 1), called=a_call(planned=True)),
        Wait("waiting for worker 1 to save (120 s left)", NOW + 120),
    ),
    "a planned call closes when all have saved": (
        given(*waiting(0, 1), a_worker(2), world=a_world(1, 0), called=a_call(planned=True, at=NOW - 60)),
        goes_on(1, 0, 2, reason="all 3"),
    ),
    "a newcomer that went again is not missed": (
        given(a_worker(0, WAITING, 4, since=NOW - 1), *waiting(1), world=a_world(0, 1), called=a_call(planned=True, at=NOW - 60)),
        goes_on(0, 1, reason="2 of 3"),
    ),
    "a smaller target calls for a planned change and says who leaves": (
        given(*training(0, 1, 2), world=a_world(2, 0, 1), want=wanted(2)),
        Call(5, "shrinking from 3 to 2", True, NOW, (1,), cause=Cause.SHRINK),
    ),
    "shrinking keeps the first ranks": (
        given(*waiting(0, 1, 2), world=a_world(2, 0, 1), called=a_call(planned=True, leaving=(1,)), want=wanted(2)),
        goes_on(2, 0, reason="all 2"),
    ),
    "shrinking drops those that leave anyway": (
        given(
            a_worker(0, LEAVING, 4),
            *waiting(1, 2),
            world=a_world(2, 0, 1),
            called=a_call(planned=True, leaving=(1,)),
            want=wanted(2),
        ),
        goes_on(2, 1, reason="all 2"),
    ),
    "a target between allowed sizes shrinks to the smaller one": (
        given(*training(0, 1, 2, 3), world=a_world(0, 1, 2, 3), want=wanted(3, sizes=(1, 2, 4))),
        Call(5, "shrinking from 4 to 2", True, NOW, (2, 3), cause=Cause.SHRINK),
    ),
    "a leaving worker calls for a planned change": (
        given(*training(0, 2), a_worker(1, LEAVING, 4), world=a_world(0, 1, 2)),
        Call(5, "worker 1 is leaving", True, NOW, (1,), cause=Cause.LEAVING),
    ),
    "another leaving worker joins the pending call": (
        given(
            *training(0),
            a_worker(1, LEAVING, 4),
            a_worker(2, LEAVING, 4),
            world=a_world(0, 1, 2),
            called=a_call(planned=True, at=NOW - 1, leaving=(2,)),
        ),
        Call(5, "workers 1 and 2 are leaving", True, NOW - 1, (1, 2), cause=Cause.LEAVING),
    ),
    "a leaving worker that has gone is no failure": (
        given(*training(0, 2), world=a_world(0, 1, 2), called=a_call(planned=True, leaving=(1,))),
        Wait("waiting for workers 0 and 2 to save (120 s left)", NOW + 120),
    ),
    "a worker lost while others save makes the call unplanned": (
        given(*training(0, 2), world=a_world(0, 1, 2), called=a_call(planned=True, at=NOW - 5)),
        Call(5, "lost worker 1", False, NOW, cause=Cause.LOST),
    ),
    "a worker that fails while others save makes the call unplanned": (
        given(
            *training(0),
            a_worker(1, WAITING, 4, failed=True),
            world=a_world(0, 1),
            called=a_call(planned=True, at=NOW - 5, leaving=(7,)),
        ),
        Call(5, "worker 1 failed", False, NOW, (7,), cause=Cause.FAILED),
    ),
    "a worker lost after all have saved changes nothing but the size": (
        given(*waiting(0, 2), world=a_world(0, 1, 2), called=a_call(planned=True), want=wanted(expected={0, 2})),
        goes_on(0, 2, reason="2 of 3"),
    ),
    "a planned call becomes unplanned when grace runs out": (
        given(*waiting(0), a_worker(1, TRAINING, 4), world=a_world(0, 1), called=a_call(planned=True), now=NOW + 120),
        Call(5, "worker 1 did not save within 120 s", False, NOW + 120, cause=Cause.LATE),
    ),
    "no planned change disturbs a world that begins": (
        given(a_worker(0, TRAINING, 4), a_worker(1, WAITING, 3), a_worker(2), world=a_world(0, 1, at=NOW), want=wanted(1)),
        Wait("waiting for worker 1 to join generation 4 (10 s left)", NOW + 10),
    ),
    # The end
    "the job is done when all are": (
        given(*[a_worker(id, DONE, 4) for id in (0, 1)], world=a_world(1, 0)),
        Closed("workers 1 and 0 are done", done=True),
    ),
    "a newcomer does not delay the end": (
        given(a_worker(0, DONE, 4), a_worker(1), world=a_world(0)),
        Closed("worker 0 is done", done=True),
    ),
    "a call names the cause and not its echo": (
        given(
            a_worker(0, WAITING, 4, failed=True),
            a_worker(1, WAITING, 4, failed=True, why="rank 1 on worker 1 raised ValueError"),
            world=a_world(0, 1),
        ),
        Call(5, "rank 1 on worker 1 raised ValueError", False, NOW, cause=Cause.FAILED),
    ),
    "a planned call at the end is over when all are done": (
        given(a_worker(0, DONE, 4), a_worker(1, DONE, 4), world=a_world(0, 1), called=a_call(planned=True)),
        Closed("workers 0 and 1 are done", done=True),
    ),
    "some done and some saved train the last steps again": (
        given(a_worker(0, DONE, 4), *waiting(1), world=a_world(0, 1), called=a_call(planned=True)),
        Call(5, "only worker 0 is done", False, NOW, cause=Cause.PARTLY_DONE),
    ),
    # Suspending
    "suspending lets all save": (
        given(*training(0, 1), world=a_world(0, 1), want=wanted(0)),
        Call(5, "suspended: no workers are wanted", True, NOW, (0, 1), cause=Cause.SUSPEND),
    ),
    "suspending waits for the saving": (
        given(*waiting(0), *training(1), world=a_world(0, 1), called=a_call(planned=True, leaving=(0, 1)), want=wanted(0)),
        Wait("waiting for worker 1 to save (120 s left), then the job is suspended", NOW + 120),
    ),
    "a suspended job is closed even if a worker does not stop": (
        given(*training(1), world=a_world(0, 1), called=a_call(), want=wanted(0), now=NOW + 10),
        Closed("suspended: no workers are wanted", done=False),
    ),
    # A decider that was started again
    "a member that does not report to the new decider is lost": (
        given(*training(1), world=a_world(0, 1), since=NOW - 10),
        Call(5, "lost worker 0", False, NOW, cause=Cause.LOST),
    ),
    "a failure is not kept waiting by members that have yet to report": (
        given(a_worker(1, TRAINING, 4, failed=True), world=a_world(0, 1), since=NOW),
        Call(5, "worker 1 failed", False, NOW, cause=Cause.FAILED),
    ),
    "a decider that knows no world goes beyond what it hears of": (
        given(*training(0, 1, generation=7)),
        Call(8, "generation 7 of workers 0 and 1 was not decided here", True, NOW, cause=Cause.FOREIGN),
    ),
    "a generation from elsewhere is passed by a pending call": (
        given(*training(0), a_worker(1, TRAINING, 6), world=a_world(0, 1), called=a_call(planned=True, leaving=(3,))),
        Call(7, "generation 6 of worker 1 was not decided here", True, NOW, (3,), cause=Cause.FOREIGN),
    ),
    "the first world is newer than any that was": (
        given(a_worker(0), a_worker(1, WAITING, 6), want=wanted(2)),
        World(7, (1, 0), "host-1:29500", "training starts with all 2", NOW),
    ),
    "those that hold the newest state come first even without a known world": (
        given(a_worker(0), a_worker(1, WAITING, 7), a_worker(2, WAITING, 7), called=a_call(8)),
        World(8, (1, 2, 0), "host-1:29500", "there was a reason; training goes on with all 3", NOW),
    ),
    # Clocks
    "a small step back of the clock counts as no time": (
        given(a_worker(0), a_worker(1), now=NOW - 20),
        Wait("waiting for 1 more worker (50 s left), then training starts with 2 of 3", NOW + 30),
    ),
    "a large step back of the clock ends the wait": (
        given(a_worker(0), a_worker(1), now=NOW - 3600),
        starts(0, 1, reason="2 of 3", at=NOW - 3600),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_is_decided_in_a_situation(situation):
    given, decision = SITUATIONS[situation]
    assert decide(*given) == decision


# A batch that a world must be able to share


@pytest.mark.parametrize(
    ("sizes", "batches", "expected"),
    [
        ((1, 2, 3, 4), [], (1, 2, 3, 4)),
        ((1, 2, 3, 4), [(1, 0, 8)], (1, 2, 4)),
        ((3, 6), [(1, 0, 8)], (3, 6)),
        ((1, 2, 3, 4), [(1, 0, 0)], (1, 2, 3, 4)),
        ((1, 2, 3, 4), [(2, 0, 9), (), (1, 7, 8)], (1, 3)),
        ((1, 2, 3, 4), [(2, 0, 9), (2, 1, 8)], (1, 2, 4)),
        ((2, 3), [(3, 0, 0), (1, 0, 8)], (2, 3)),
    ],
    ids=["unknown", "divides", "no size does", "no size can", "newest start", "newest attempt", "newest start has none"],
)
def test_the_newest_batch_says_which_sizes_are_allowed(sizes, batches, expected):
    members = [replace(a_worker(id), batch=batch) for id, batch in enumerate(batches)]
    assert who_trains.allowed(sizes, members) == expected
    assert who_trains.allowed(sizes, reversed(members)) == expected


def test_one_member_that_knows_the_batch_is_enough():
    members = [a_worker(0, WAITING, 4), a_worker(1), knows(a_worker(3, LEAVING, 4), 8), a_worker(2)]
    formed = decided(*members, world=a_world(0, 3), called=a_call(), now=NOW + 1000)
    assert isinstance(formed, World)
    assert formed.members == (0, 1)


def test_workers_wait_until_enough_are_there_to_share_the_batch():
    two = [knows(each, 8) for each in training(0, 1)]
    assert decided(*two, a_worker(2), world=a_world(0, 1)) == Wait(
        "2 of 3 workers train in generation 4: the batch cannot be shared equally among 3 workers"
    )
    grown = decided(*two, a_worker(2), a_worker(3), world=a_world(0, 1), want=wanted(4))
    assert grown == Call(5, "growing from 2 to 4 with workers 2 and 3", True, NOW, cause=Cause.GROW)
    one = [knows(each, 5) for each in training(0)]
    assert decided(*one, a_worker(1), world=a_world(0)) == Wait(
        "1 of 3 workers trains in generation 4: the batch cannot be shared equally among 3 workers"
    )


def test_a_batch_that_comes_to_be_known_ends_no_world():
    three = [knows(each, 8) for each in training(0, 1, 2)]
    assert decided(*three, world=a_world(0, 1, 2)) == Wait("3 workers train in generation 4")
    four = [knows(each, 8) for each in training(0, 1, 2, 3)]
    assert decided(*four, world=a_world(0, 1, 2, 3), want=wanted(3)) == Call(
        5, "shrinking from 4 to 2", True, NOW, (2, 3), cause=Cause.SHRINK
    )


# A running world


def test_a_late_message_does_not_call_a_world_together():
    state = State({m.id: m for m in training(0, 1)}, a_world(0, 1, at=NOW))
    late = state.reported(a_worker(1, WAITING, 3))
    assert isinstance(decide(late, wanted(2), NOW), Wait)
    assert decide(late.reported(a_worker(1, TRAINING, 4)), wanted(2), NOW + 1) == Wait("2 workers train in generation 4")


# Recovery


def test_survivors_that_still_stop_are_awaited_longer_than_the_lost():
    members = [a_worker(0, WAITING, 4), a_worker(1, TRAINING, 4)]
    world, called, want = a_world(0, 1, 2), a_call(), wanted(expected={0, 1, 2})
    assert decided(*members, world=world, called=called, want=want) == Wait("waiting for worker 1 to stop (10 s left)", NOW + 1)
    assert decided(*members, world=world, called=called, want=want, now=NOW + 1) == Wait(
        "waiting for worker 1 to stop (9 s left)", NOW + 10
    )
    assert decided(*members, world=world, called=called, want=want, now=NOW + 10) == goes_on(0, reason="1 of 3", at=NOW + 10)


def test_a_newcomer_waits_for_the_save_of_a_worker_that_leaves_with_the_newest_state():
    members, known = [a_worker(0, LEAVING, 4), a_worker(1)], {"world": a_world(0), "called": a_call(planned=True, leaving=(0,))}
    assert decided(*members, **known, want=wanted(2, expected={1}), now=NOW + 20) == Wait(
        "waiting for worker 0 to save and leave (100 s left)", NOW + 120
    )
    alone = goes_on(1, reason="1 of 2", at=NOW + 20)
    assert decided(members[1], **known, want=wanted(2, expected={1}), now=NOW + 20) == alone, "it has saved"
    joined = replace(members[1], generation=4)
    assert isinstance(decided(replace(members[0], held=19), joined, **known, want=wanted(2, expected={1}), now=NOW + 20), Wait)
    late = replace(alone, at=NOW + 120)
    assert decided(*members, **known, want=wanted(2, expected={1}), now=NOW + 120) == late, "its time is over"
    reached = replace(members[0], held=19, owes=False)
    assert decided(reached, members[1], **known, want=wanted(2, expected={1}), now=NOW + 20) == alone, "it has it in the store"


def test_who_took_up_a_world_that_never_came_to_be_has_no_newer_state_than_a_holder_that_did_not():
    holder, joined = replace(a_worker(0, LEAVING, 4), held=19), replace(a_worker(1, WAITING, 5), failed=True)
    known = {"world": a_world(0, 1, generation=5), "called": a_call(6)}
    assert decided(holder, joined, **known, want=wanted(2), now=NOW + 20) == Wait(
        "waiting for worker 0 to save and leave (100 s left)", NOW + 120
    )
    trained = replace(joined, held=20)
    assert isinstance(decided(holder, trained, **known, want=wanted(2), now=NOW + 20), World), "it has a later step"
    waits = replace(holder, standing=WAITING)
    assert decided(waits, joined, **known, want=wanted(1)) == World(
        6, (0,), "host-0:29500", "there was a reason; training goes on with 1 worker", NOW
    ), "whoever has the state trains"


def test_a_worker_that_has_restored_nothing_waits_for_the_holder_of_the_state_as_long_as_a_start():
    held = replace(a_world(0, 1, generation=6), held=104)
    joined = a_worker(1, WAITING, 6)
    known = {"world": held, "called": a_call(7), "want": wanted(2, expected={0, 1})}
    assert isinstance(decided(joined, **known, now=NOW + 2), Wait)
    assert isinstance(decided(replace(joined, held=104), **known, now=NOW + 2), World)
    assert isinstance(decided(joined, **known, now=NOW + 31), World)


def test_a_world_says_which_step_its_workers_have_had():
    state = State({}, a_world(0, 1), a_call()).reported(replace(a_worker(0, WAITING, 4), held=19)).gone(0).reported(a_worker(1))
    formed = decide(state, wanted(2), NOW + 100)
    assert formed == goes_on(1, reason="1 of 2", at=NOW + 100, held=19)
    assert state.after(formed).held == 0, "who trains in it tells anew"


# Planned changes


def test_a_newcomer_waits_for_the_others_that_are_expected():
    members, want = [*training(0, 1), a_worker(3)], wanted(4, expected={0, 1, 2, 3})
    assert decided(*members, world=a_world(0, 1), want=want, now=NOW + 1) == Wait(
        "2 workers train in generation 4; worker 3 may join soon (4 s left)", NOW + 5
    )
    assert decided(*members, world=a_world(0, 1), want=want, now=NOW + 5) == Call(
        5, "growing from 2 to 3 with worker 3", True, NOW + 5, cause=Cause.GROW
    )


def test_a_worker_started_again_unseen_makes_the_call_unplanned_after_a_while():
    members, called = [*training(0), a_worker(1, WAITING, 0)], a_call(planned=True)
    assert decided(*members, world=a_world(0, 1), called=called, now=NOW + 9) == Wait(
        "waiting for worker 0 to save (111 s left)", NOW + 10
    )
    assert decided(*members, world=a_world(0, 1), called=called, now=NOW + 10) == Call(
        5, "worker 1 did not join generation 4 within 10 s", False, NOW + 10, cause=Cause.LATE
    )


# The end


def test_a_worker_that_was_done_may_go():
    state = State({0: a_worker(0, DONE, 4), 1: a_worker(1, TRAINING, 4)}, a_world(0, 1))
    assert state.gone(0) == state
    assert decide(state.gone(0).reported(a_worker(1, DONE, 4)), wanted(), NOW) == Closed("workers 0 and 1 are done", done=True)


def test_a_world_that_ends_is_not_disturbed():
    members = [a_worker(0, DONE, 4), a_worker(1, TRAINING, 4), a_worker(2, LEAVING, 4), a_worker(3)]
    for want in (wanted(4), wanted(1), wanted(0)):
        assert decided(*members, world=a_world(0, 1, 2), want=want) == Wait(
            "worker 0 is done; waiting for workers 1 and 2 to finish"
        )


def test_a_failure_at_the_end_calls_those_that_are_done_too():
    members = [a_worker(0, DONE, 4), a_worker(1, TRAINING, 4, failed=True)]
    called = Call(5, "worker 1 failed", False, NOW, cause=Cause.FAILED)
    assert decided(*members, world=a_world(0, 1)) == called
    members = [a_worker(0, DONE, 4), a_worker(1, WAITING, 4, failed=True)]
    assert decided(*members, world=a_world(0, 1), called=called, want=wanted(2)) == Wait(
        "waiting for worker 0 to stop (10 s left)", NOW + 10
    )
    members = [a_worker(0, WAITING, 4), a_worker(1, WAITING, 4, failed=True)]
    assert decided(*members, world=a_world(0, 1), called=called, want=wanted(2)) == World(
        5, (0, 1), "host-0:29500", "worker 1 failed; training goes on with all 2", NOW
    )


def test_one_that_was_done_and_has_gone_is_not_awaited_for_long():
    state = State({0: a_worker(0, DONE, 4), 1: a_worker(1, WAITING, 4)}, a_world(0, 1), a_call()).gone(0)
    assert decide(state, wanted(2, expected={1}), NOW + 10) == goes_on(1, reason="1 of 2", at=NOW + 10)
    assert decide(state, wanted(2, min=2, expected={0, 1}), NOW + 10) == Wait(
        "waiting for worker 0: 1 of at least 2 workers is here"
    )


def test_a_done_of_an_older_world_is_forgotten():
    state = State({0: a_worker(0, DONE, 4), 1: a_worker(1, WAITING, 4)}, a_world(0, 1), a_call())
    after = state.after(World(5, (1,), "host-1:29500", "so it is"))
    assert after == State({1: a_worker(1, WAITING, 4)}, World(5, (1,), "host-1:29500", "so it is"))
    assert after.reported(a_worker(0, DONE, 4)).gone(0) == after


# Suspending


def test_workers_that_failed_save_what_is_in_their_memory_before_the_job_is_suspended():
    members, called = [replace(a_worker(id, WAITING, 4), held=19) for id in (0, 1)], a_call()
    formed = decided(*members, world=a_world(0, 1), called=called, want=wanted(0, min=2))
    assert formed == goes_on(0, 1, reason="all 2")
    saving = decided(*training(0, 1, generation=5), world=formed, want=wanted(0, min=2))
    assert saving == Call(6, "suspended: no workers are wanted", True, NOW, (0, 1), cause=Cause.SUSPEND)
    suspended = Closed("suspended: no workers are wanted", done=False)
    failed = replace(saving, planned=False, cause=Cause.FAILED)
    assert decided(*members, world=formed, called=failed, want=wanted(0, min=2)) == suspended, "it was tried once"
    assert decided(members[0], world=a_world(0, 1), called=called, want=wanted(0, min=2)) == suspended, "they are too few"
    saved = [replace(each, owes=False) for each in members]
    assert decided(*saved, world=a_world(0, 1), called=called, want=wanted(0, min=2)) == suspended, "it is committed"
    assert decided(saved[0], members[1], world=a_world(0, 1), called=called, want=wanted(0, min=2)) == formed


def test_a_suspended_job_is_closed_when_nobody_trains():
    closed = Closed("suspended: no workers are wanted", done=False)
    assert decided(a_worker(0, WAITING, 4), world=a_world(0, 1), called=a_call(planned=True), want=wanted(0)) == closed
    assert decided(world=a_world(0, 1), called=a_call(planned=True), want=wanted(0)) == closed
    assert decided(a_worker(0), want=wanted(0)) == closed


def test_a_resumed_job_waits_for_its_workers_like_at_the_start():
    suspended = State({}, a_world(0, 1), a_call(planned=True, at=NOW - 3600))
    assert decide(suspended.reported(a_worker(1)), wanted(2, expected={0, 1}), NOW) == Wait(
        "waiting for worker 0 (30 s left), then training goes on with 1 of 2", NOW + 30
    )
    assert decide(suspended.reported(a_worker(1)).reported(a_worker(0)), wanted(2, expected={0, 1}), NOW) == goes_on(
        0, 1, reason="all 2"
    )


# A decider that was started again


def test_a_decider_started_again_lets_training_go_on_while_members_report():
    members = training(1)
    assert decided(*members, world=a_world(0, 1), since=NOW - 2) == Wait("waiting for worker 0 to report (8 s left)", NOW + 8)
    assert decided(*training(0, 1), world=a_world(0, 1), since=NOW - 2, want=wanted(2)) == Wait("2 workers train in generation 4")


# Reports


@pytest.mark.parametrize("told", [{"batch": (1, 0, 8)}, {"held": 10}, {"held": 10, "owes": False}, {"unheard": (1,)}])
def test_what_else_a_worker_tells_is_no_change_of_what_it_does(told):
    state = State({0: a_worker(0, LEAVING, 4)}).reported(replace(a_worker(0, LEAVING, 4, since=NOW + 70), **told))
    assert state.members[0] == replace(a_worker(0, LEAVING, 4), **told)


def test_repeating_a_report_changes_nothing():
    state = State({}).reported(a_worker(0, since=NOW))
    assert state.reported(a_worker(0, since=NOW + 50)) is state
    assert state.reported(a_worker(0, LEAVING, since=NOW + 50)).members == {0: a_worker(0, LEAVING, since=NOW + 50)}


def test_a_worker_that_is_gone_is_forgotten():
    assert State({0: a_worker(0, TRAINING, 4)}, a_world(0)).gone(0) == State({}, a_world(0), departed=frozenset({0}))
    assert State({0: a_worker(0, WAITING, 3)}, a_world(0)).gone(0) == State({}, a_world(0)), "it had not joined"
    assert State({}).gone(7) == State({})


# Members that do not hear others


THREE = Desired(3, (1, 2, 3), frozenset({0, 1, 2}))


def a_peer(id: int, standing=TRAINING, generation=4, **fields) -> Member:
    return replace(a_worker(id, standing, generation), **{"noticed": NOW, **fields})


def a_state(*members: Member, called: Call | None = None, lost=None, ranks=(0, 1, 2)) -> State:
    return State({m.id: m for m in members}, a_world(*ranks), called, lost=lost or {})


def found(state: State, now=NOW, wanted=THREE) -> Decision:
    return decide(state, wanted, now)


def a_silent_worker(*, refused=()) -> State:
    """Workers 0 and 1 do not hear worker 2, which is still known to train."""
    return a_state(*(a_peer(id, unheard=(2,), refused=refused) for id in (0, 1)), a_peer(2))


def stopped(state: State, *ids: int) -> State:
    """These have put down what they did."""
    for id in ids:
        state = state.reported(replace(state.members[id], standing=WAITING))
    return state


def test_survivors_wait_neither_for_a_silent_worker_to_stop_nor_for_it_to_come_back():
    state = a_silent_worker()
    call = found(state)
    assert call == Call(5, "lost worker 2: workers 0 and 1 do not hear it", False, NOW, cause=Cause.LOST, lost=(2,))
    state = state.after(call)
    assert found(state) == Wait("waiting for workers 0 and 1 to stop (10 s left)", NOW + 10)
    state = stopped(state, 0, 1)
    assert found(state) == World(5, (0, 1), "host-0:29500", f"{call.reason}; training goes on with 2 of 3", NOW)


def test_a_process_that_is_gone_is_lost_at_once_and_may_come_back_in_time():
    state = a_silent_worker(refused=(2,))
    call = found(state)
    assert call == Call(5, "lost worker 2: it refuses connections", False, NOW, cause=Cause.LOST)
    state = stopped(state.after(call), 0, 1)
    assert found(state) == Wait("waiting for worker 2 (1 s left), then training goes on with 2 of 3", NOW + 1)
    assert found(state.reported(a_peer(2, WAITING, 0))) == World(
        5, (0, 1, 2), "host-0:29500", f"{call.reason}; training goes on with all 3", NOW
    )


def test_who_was_lost_is_named_apart_from_who_went():
    state = a_state(a_peer(0, unheard=(2,)), a_peer(1, unheard=(2,)), a_peer(2), ranks=(0, 1, 2, 3))
    assert found(state, wanted=Desired(4, (1, 2, 3, 4))) == Call(
        5, "lost workers 2 and 3: workers 0 and 1 do not hear worker 2", False, NOW, cause=Cause.LOST, lost=(2,)
    )


def test_a_pending_call_hears_of_workers_that_are_lost():
    state = replace(a_silent_worker(), called=Call(5, "worker 0 failed", False, NOW - 1, cause=Cause.FAILED))
    assert found(state) == Call(5, "lost worker 2: workers 0 and 1 do not hear it", False, NOW - 1, cause=Cause.LOST, lost=(2,))
    planned = replace(state, called=Call(5, "growing from 3 to 4 with worker 3", True, NOW - 1, cause=Cause.GROW))
    assert found(planned) == Call(5, "lost worker 2: workers 0 and 1 do not hear it", False, NOW, cause=Cause.LOST, lost=(2,))


def test_reports_of_an_older_world_say_nothing_of_this_one():
    members = [a_peer(id, generation=3, unheard=(0, 1, 2)) for id in range(3)]
    assert found(a_state(*(replace(m, generation=4, unheard=()) for m in members))) == Wait("3 workers train in generation 4")
    late = a_state(*members, called=None)
    assert found(replace(late, since=NOW)) == Wait("waiting for workers 0, 1 and 2 to join generation 4 (10 s left)", NOW + 10)


def test_a_worker_that_has_yet_to_report_is_not_waited_for_when_its_peers_do_not_hear_it():
    state = replace(a_state(a_peer(0), a_peer(1)), since=NOW)
    assert found(state) == Wait("waiting for worker 2 to report (10 s left)", NOW + 10)
    state = state.reported(a_peer(0, unheard=(2,), refused=(2,)))
    assert found(state) == Call(5, "lost worker 2", False, NOW, cause=Cause.LOST)


def test_a_worker_that_is_done_needs_nobody():
    members = [a_peer(0, unheard=(2,)), a_peer(1, unheard=(2,)), a_peer(2, DONE)]
    assert found(a_state(*members)) == Wait("worker 2 is done; waiting for workers 0 and 1 to finish")


def test_a_worker_that_hears_nobody_costs_nothing_before_its_call_is_answered():
    state = a_state(a_peer(0), a_peer(1), a_peer(2, unheard=(0, 1)))
    assert found(state) == Wait("3 workers train in generation 4", NOW + 1)
    call = found(state, NOW + 1)
    assert call == Call(
        5, "worker 2 does not hear workers 0 and 1: call all, to find out which are alive", False, NOW + 1, cause=Cause.LOST
    )
    state = stopped(state.after(call), 0, 1)
    again = found(state, NOW + 1.5)
    assert again == Call(5, "lost worker 2: it does not hear the others", False, NOW + 1, cause=Cause.LOST, lost=(2,))
    assert found(state.after(again), NOW + 1.5) == World(
        5, (0, 1), "host-0:29500", f"{again.reason}; training goes on with 2 of 3", NOW + 1.5
    )


def test_a_worker_that_was_lost_is_kept_out_for_a_while_and_longer_each_time():
    state = a_silent_worker()
    for held_s, generation in ((10, 5), (20, 7)):
        state = state.after(found(state))
        state = stopped(state, 0, 1)
        formed = found(state)
        assert isinstance(formed, World)
        assert (formed.generation, formed.members) == (generation, (0, 1))
        state = state.after(formed)
        for id in (0, 1):
            state = state.reported(Member(id, f"host-{id}:1", TRAINING, generation, NOW))
        state = state.reported(Member(2, "host-2:1", WAITING, 0, NOW))
        until = NOW + held_s
        assert found(state, until - 1) == Wait(
            f"2 workers train in generation {generation}; worker 2 was lost and may join again (1 s left)",
            until,
            f"2 workers train in generation {generation}; worker 2 was lost and may join again",
        )
        call = found(state, until)
        assert call == Call(generation + 1, "growing from 2 to 3 with worker 2", True, until, cause=Cause.GROW)
        members = [Member(id, f"host-{id}:1", WAITING, generation, NOW) for id in (0, 1)]
        for member in members:
            state = state.after(call).reported(member)
        formed = found(state, until)
        assert isinstance(formed, World)
        state = state.after(formed)
        for id in (0, 1, 2):
            unheard = (2,) if id < 2 else ()
            member = Member(id, f"host-{id}:1", TRAINING, generation + 1, NOW, unheard=unheard, noticed=NOW)
            state = state.reported(member)
    assert state.lost[2].times == 2


def test_a_worker_that_the_smallest_world_needs_is_not_kept_out():
    lost = {2: Loss(NOW)}
    state = a_state(a_peer(0, WAITING), a_peer(1, WAITING), a_peer(2, WAITING, 0), called=Call(5, "so", False, NOW), lost=lost)
    formed = found(state, wanted=Desired(3, (3,)))
    assert formed == World(5, (0, 1, 2), "host-0:29500", "so; training goes on with all 3", NOW)
    state = state.after(formed)
    for id in range(4):
        state = state.reported(a_peer(id, TRAINING if id < 3 else WAITING, 5))
    assert found(state, wanted=Desired(3, (3,))) == Wait("3 workers train in generation 5")


def test_what_is_said_of_peers_changes_no_standing():
    state = State({}).reported(Member(0, "host-0:1", WAITING, 4, NOW))
    state = state.reported(Member(0, "host-0:1", WAITING, 4, NOW + 5, unheard=(1,), noticed=NOW + 5))
    assert state.members[0] == Member(0, "host-0:1", WAITING, 4, NOW, unheard=(1,), noticed=NOW + 5)
    same = state.reported(Member(0, "host-0:1", WAITING, 4, NOW + 9, unheard=(1,), noticed=NOW + 9))
    assert same is state
    more = state.reported(Member(0, "host-0:1", WAITING, 4, NOW + 9, unheard=(1, 2), noticed=NOW + 9))
    assert more.members[0].noticed == NOW + 9
