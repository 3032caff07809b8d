"""The world of a job some of whose members do not hear others: what is decided in which situation, word for word."""

from __future__ import annotations

from dataclasses import replace

from outlast.rendezvous import who_trains
from outlast.rendezvous.partition import Loss
from outlast.rendezvous.who_trains import Call, Cause, Decision, Desired, Member, MemberState, State, Timeouts, Wait, World

WAITING, TRAINING, DONE = MemberState.WAITING, MemberState.TRAINING, MemberState.DONE
TIMEOUTS = Timeouts(start=30, recovery=1, growth=5, leave=120, answer=10)
NOW = 1000.0
THREE = Desired(3, (1, 2, 3), frozenset({0, 1, 2}))


def a_worker(id: int, standing=TRAINING, generation=4, **fields) -> Member:
    return Member(id, f"host-{id}:29500", standing, generation, NOW, **{"noticed": NOW, **fields})


def a_state(*members: Member, called: Call | None = None, lost=None, ranks=(0, 1, 2)) -> State:
    before = World(4, ranks, "host-0:29500", "it was so", 900.0)
    return State({m.id: m for m in members}, before, called, lost=lost or {})


def decide(state: State, now=NOW, wanted=THREE) -> Decision:
    return who_trains.decide(state, wanted, TIMEOUTS, now)


def a_silent_worker(*, refused=()) -> State:
    """Workers 0 and 1 do not hear worker 2, which is still known to train."""
    return a_state(*(a_worker(id, unheard=(2,), refused=refused) for id in (0, 1)), a_worker(2))


def stopped(state: State, *ids: int) -> State:
    """These have put down what they did."""
    for id in ids:
        state = state.reported(replace(state.members[id], standing=WAITING))
    return state


def test_survivors_wait_neither_for_a_silent_worker_to_stop_nor_for_it_to_come_back():
    state = a_silent_worker()
    call = decide(state)
    assert call == Call(5, "lost worker 2: workers 0 and 1 do not hear it", False, NOW, cause=Cause.LOST, lost=(2,))
    state = state.after(call)
    assert decide(state) == Wait("waiting for workers 0 and 1 to stop (10 s left)", NOW + 10)
    state = stopped(state, 0, 1)
    assert decide(state) == World(5, (0, 1), "host-0:29500", f"{call.reason}; training goes on with 2 of 3", NOW)


def test_a_process_that_is_gone_is_lost_at_once_and_may_come_back_in_time():
    state = a_silent_worker(refused=(2,))
    call = decide(state)
    assert call == Call(5, "lost worker 2: it refuses connections", False, NOW, cause=Cause.LOST)
    state = stopped(state.after(call), 0, 1)
    assert decide(state) == Wait("waiting for worker 2 (1 s left), then training goes on with 2 of 3", NOW + 1)
    assert decide(state.reported(a_worker(2, WAITING, 0))) == World(
        5, (0, 1, 2), "host-0:29500", f"{call.reason}; training goes on with all 3", NOW
    )


def test_who_was_lost_is_named_apart_from_who_went():
    state = a_state(a_worker(0, unheard=(2,)), a_worker(1, unheard=(2,)), a_worker(2), ranks=(0, 1, 2, 3))
    assert decide(state, wanted=Desired(4, (1, 2, 3, 4))) == Call(
        5, "lost workers 2 and 3: workers 0 and 1 do not hear worker 2", False, NOW, cause=Cause.LOST, lost=(2,)
    )


def test_a_pending_call_hears_of_workers_that_are_lost():
    state = replace(a_silent_worker(), called=Call(5, "worker 0 failed", False, NOW - 1, cause=Cause.FAILED))
    assert decide(state) == Call(5, "lost worker 2: workers 0 and 1 do not hear it", False, NOW - 1, cause=Cause.LOST, lost=(2,))
    planned = replace(state, called=Call(5, "growing from 3 to 4 with worker 3", True, NOW - 1, cause=Cause.GROW))
    assert decide(planned) == Call(5, "lost worker 2: workers 0 and 1 do not hear it", False, NOW, cause=Cause.LOST, lost=(2,))


def test_reports_of_an_older_world_say_nothing_of_this_one():
    members = [a_worker(id, generation=3, unheard=(0, 1, 2)) for id in range(3)]
    assert decide(a_state(*(replace(m, generation=4, unheard=()) for m in members))) == Wait("3 workers train in generation 4")
    late = a_state(*members, called=None)
    assert decide(replace(late, since=NOW)) == Wait("waiting for workers 0, 1 and 2 to join generation 4 (10 s left)", NOW + 10)


def test_a_worker_that_has_yet_to_report_is_not_waited_for_when_its_peers_do_not_hear_it():
    state = replace(a_state(a_worker(0), a_worker(1)), since=NOW)
    assert decide(state) == Wait("waiting for worker 2 to report (10 s left)", NOW + 10)
    state = state.reported(a_worker(0, unheard=(2,), refused=(2,)))
    assert decide(state) == Call(5, "lost worker 2", False, NOW, cause=Cause.LOST)


def test_a_worker_that_is_done_needs_nobody():
    members = [a_worker(0, unheard=(2,)), a_worker(1, unheard=(2,)), a_worker(2, DONE)]
    assert decide(a_state(*members)) == Wait("worker 2 is done; waiting for workers 0 and 1 to finish")


def test_a_worker_that_hears_nobody_costs_nothing_before_its_call_is_answered():
    state = a_state(a_worker(0), a_worker(1), a_worker(2, unheard=(0, 1)))
    assert decide(state) == Wait("3 workers train in generation 4", NOW + 1)
    call = decide(state, NOW + 1)
    assert call == Call(
        5, "worker 2 does not hear workers 0 and 1: call all, to find out which are alive", False, NOW + 1, cause=Cause.LOST
    )
    state = stopped(state.after(call), 0, 1)
    again = decide(state, NOW + 1.5)
    assert again == Call(5, "lost worker 2: it does not hear the others", False, NOW + 1, cause=Cause.LOST, lost=(2,))
    assert decide(state.after(again), NOW + 1.5) == World(
        5, (0, 1), "host-0:29500", f"{again.reason}; training goes on with 2 of 3", NOW + 1.5
    )


def test_a_worker_that_was_lost_is_kept_out_for_a_while_and_longer_each_time():
    state = a_silent_worker()
    for held_s, generation in ((10, 5), (20, 7)):
        state = state.after(decide(state))
        state = stopped(state, 0, 1)
        formed = decide(state)
        assert isinstance(formed, World)
        assert (formed.generation, formed.members) == (generation, (0, 1))
        state = state.after(formed)
        for id in (0, 1):
            state = state.reported(Member(id, f"host-{id}:1", TRAINING, generation, NOW))
        state = state.reported(Member(2, "host-2:1", WAITING, 0, NOW))
        until = NOW + held_s
        assert decide(state, until - 1) == Wait(
            f"2 workers train in generation {generation}; worker 2 was lost and may join again (1 s left)",
            until,
            f"2 workers train in generation {generation}; worker 2 was lost and may join again",
        )
        call = decide(state, until)
        assert call == Call(generation + 1, "growing from 2 to 3 with worker 2", True, until, cause=Cause.GROW)
        members = [Member(id, f"host-{id}:1", WAITING, generation, NOW) for id in (0, 1)]
        for member in members:
            state = state.after(call).reported(member)
        formed = decide(state, until)
        assert isinstance(formed, World)
        state = state.after(formed)
        for id in (0, 1, 2):
            unheard = (2,) if id < 2 else ()
            member = Member(id, f"host-{id}:1", TRAINING, generation + 1, NOW, unheard=unheard, noticed=NOW)
            state = state.reported(member)
    assert state.lost[2].times == 2


def test_a_worker_that_the_smallest_world_needs_is_not_kept_out():
    lost = {2: Loss(NOW)}
    state = a_state(
        a_worker(0, WAITING), a_worker(1, WAITING), a_worker(2, WAITING, 0), called=Call(5, "so", False, NOW), lost=lost
    )
    formed = decide(state, wanted=Desired(3, (3,)))
    assert formed == World(5, (0, 1, 2), "host-0:29500", "so; training goes on with all 3", NOW)
    state = state.after(formed)
    for id in range(4):
        state = state.reported(a_worker(id, TRAINING if id < 3 else WAITING, 5))
    assert decide(state, wanted=Desired(3, (3,))) == Wait("3 workers train in generation 5")


def test_what_is_said_of_peers_changes_no_standing():
    state = State({}).reported(Member(0, "host-0:1", WAITING, 4, NOW))
    state = state.reported(Member(0, "host-0:1", WAITING, 4, NOW + 5, unheard=(1,), noticed=NOW + 5))
    assert state.members[0] == Member(0, "host-0:1", WAITING, 4, NOW, unheard=(1,), noticed=NOW + 5)
    same = state.reported(Member(0, "host-0:1", WAITING, 4, NOW + 9, unheard=(1,), noticed=NOW + 9))
    assert same is state
    more = state.reported(Member(0, "host-0:1", WAITING, 4, NOW + 9, unheard=(1, 2), noticed=NOW + 9))
    assert more.members[0].noticed == NOW + 9
