"""What every coordinator does with its members, whichever board they meet on: the launcher, worker 0, an etcd, the operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from boards import BOARDS, KILLED, OnEtcd, Run
from outlast.job import contract

Start = Callable[..., Run]


@pytest.fixture(params=BOARDS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Starts a run of three workers, which train when it returns."""

    def make(workers: int = 3, **fields: int) -> Run:
        run = BOARDS[request.param](tmp_path, workers, **fields)
        run.train()
        run.passes(6.0)  # a world that has just begun does not grow
        return run

    return make


def counts(run: Run) -> tuple[int, int]:
    """The newest generation, and how many failures are counted."""
    assert run.state.world
    return run.state.world.generation, run.state.restarts


def next_world(run: Run) -> tuple[int, int]:
    generation = max(run.worlds)
    run.until(lambda: max(run.worlds) > generation)
    run.until(run.training)
    return counts(run)


def test_a_run_goes_from_its_first_world_to_the_end_that_each_hears_of(start: Start) -> None:
    run = start()
    assert (counts(run), sorted(run.worlds[1].members), run.pending) == ((1, 0), [0, 1, 2], None)
    run.finish()
    run.until(lambda: run.state.closed)
    assert run.state.closed
    assert (run.state.closed.code, run.state.closed.reason) == (contract.Exit.DONE, "workers 0, 1 and 2 are done")
    run.passes(5.0)
    assert run.training() == [], "nobody begins anew"


def test_a_failure_costs_one_restart_and_its_cause_is_who_failed_first_of_all(start: Start) -> None:
    run = start()
    run.fail(2)
    assert next_world(run) == (2, 1)
    failure = run.state.failure
    assert failure
    assert (failure["worker"], failure["reason"], failure["counted"]) == (2, KILLED["reason"], True)


def test_a_failure_that_cannot_be_read_counts_and_is_decided_on(start: Start) -> None:
    run = start()
    run.fail(0, {"code": "of another version"})
    assert next_world(run) == (2, 1)
    assert run.state.failure
    assert run.state.failure["reason"] == "worker 0 failed, and its report cannot be read: its agent is of another version"


def test_failures_use_up_the_budget_whoever_counts_them(start: Start) -> None:
    run = start(limit=2)
    for generation in (2, 3):
        run.fail(1)
        assert next_world(run) == (generation, generation - 1)
        run.away()
        run.passes(8.0)
        if not run.remembers:
            assert (run.train(), run.state.restarts) == (3, 0), "it was a member, which is back"
            return
        assert (run.train(), run.pending, run.state.restarts) == (generation, None, generation - 1)
    run.fail(1)
    run.until(lambda: run.state.closed)
    assert run.state.closed
    reason = f"{KILLED['reason']}; restarts.limit (2 within 1h without a new checkpoint) is used up"
    assert (run.state.closed.reason, run.state.closed.code != 0) == (reason, True)


@pytest.mark.parametrize("how", ["away", "outage"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_happens_while_nobody_is_reached_is_decided_once_and_nobody_is_taken_for_lost(
    start: Start, how: str, fails: bool
) -> None:
    run = start()
    getattr(run, how)(20.0)
    if fails and run.remembers:
        run.fail(1)
    run.passes(18.0)
    assert run.worlds.keys() == {1}
    if fails or not run.remembers:
        assert next_world(run) == (2, int(run.remembers))
    else:
        run.passes(20.0)
        assert (run.training(), run.worlds.keys(), run.state.restarts) == ([0, 1, 2], {1}, 0)


@pytest.mark.parametrize("start", ["launcher", "worker 0", "etcd", "torchrun"], indirect=True)
def test_no_generation_is_made_twice_by_one_that_has_lost_everything(start: Start) -> None:
    run = start()
    run.fail(1)
    next_world(run)
    run.forget()  # type: ignore[attr-defined]
    run.passes(15.0)
    run.die(1)
    run.train()
    assert list(run.worlds) == sorted(run.worlds)
    assert len(run.worlds) >= 3, "each was seen to be newer, and only one of its generation"


def test_what_members_repair_is_counted_once_and_in_order_whoever_coordinates(start: Start) -> None:
    run = start()

    def counted() -> tuple[tuple[int, int], tuple[int, int]]:
        run.passes(35.0)  # leases of members that watch one another are renewed rarely
        return counts(run), (run.state.counted, run.state.attempt)

    run.repair(1)
    run.repair(0)
    assert counted() == ((1, 2), (1, 1))
    if not run.remembers:
        return
    run.away()
    assert counted() == ((1, 2), (1, 1))
    run.away(10.0)
    run.repair(2)
    assert counted() == ((1, 3), (1, 2))
    assert run.state.failure
    assert run.state.failure["worker"] == 2
    assert run.training() == [0, 1, 2]


@pytest.mark.parametrize("again", [False, True])
def test_who_is_not_heard_ends_and_comes_back_after_a_while_also_to_another_coordinator(start: Start, again: bool) -> None:
    run = start()
    run.cut(2)
    began = run.now
    run.until(lambda: run.state.world and run.state.world.generation == 2)
    assert run.worlds[2].members == (0, 1)
    assert run.now - began <= 4
    run.broken.clear()
    run.cut()
    if again and run.remembers:
        run.away()
    run.train()
    assert run.now - began >= 10
    assert (len(run.worlds), run.state.restarts) == (3, int(run.name == "launcher")), "there its process was killed"


@pytest.mark.parametrize("wall_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_nothing(start: Start, wall_s: float) -> None:
    run = start()
    run.disturb(wall_s=wall_s)
    run.passes(30.0)
    assert (run.training(), counts(run), run.pending) == ([0, 1, 2], (1, 0), None)
    run.fail(1)
    run.disturb(wall_s=-wall_s)
    began = run.now
    assert next_world(run) == (2, 1)
    assert run.now - began < 10


def test_machines_that_sleep_cost_nothing(start: Start) -> None:
    run = start()
    run.disturb(slept_s=700.0 if isinstance(run, OnEtcd) else 120.0)
    run.passes(160.0)  # after which the lease of what is published is renewed
    assert (run.training(), counts(run), run.pending) == ([0, 1, 2], (1, 0), None)


def test_who_leaves_is_waited_for_and_has_not_failed(start: Start) -> None:
    run = start()
    run.leave(1)
    assert next_world(run) == (2, 0)
    assert run.calls[2].planned
    run.train()
    assert run.state.restarts == 0


@pytest.mark.parametrize("silent", [False, True])
def test_who_dies_or_says_nothing_more_is_lost_and_the_others_do_not_save_first(start: Start, silent: bool) -> None:
    run = start()
    run.freeze(1) if silent else run.die(1)
    run.until(lambda: 2 in run.calls)
    assert not run.calls[2].planned
    run.until(run.training)
    if silent:
        run.freeze(1, False)
    run.train()
    assert run.state.restarts == int(run.counts_deaths or not silent), "errors of the others are a failure"


def test_a_run_of_which_nobody_is_left_begins_anew_with_the_next_generation(start: Start) -> None:
    run = start()
    for id in range(3):
        run.die(id)
    run.away(15.0)
    run.passes(20.0)
    assert run.train() >= 2


@pytest.mark.parametrize("start", ["launcher", "worker 0", "etcd", "torchrun"], indirect=True)
def test_a_later_process_of_an_index_is_no_member_of_an_earlier_world(start: Start) -> None:
    run = start()
    run.passes(6.0)  # on sockets it is taken before for a member that has still to join that world
    run.start(1)
    assert next_world(run) == (2, 0)
