"""What a coordinator does with members that others do not hear, step by step, without a transport."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from outlast.job import contract
from outlast.job.contract import End
from outlast.job.failure import Failure
from outlast.job.status import Ending, State
from outlast.rendezvous import restart_budget, root_cause, who_trains
from outlast.rendezvous.coordinator import CoordinatorState, Effect, Event, Record, Send, Settings, Tick, step
from outlast.rendezvous.messages import Called, Closed, Gone, Report
from outlast.rendezvous.who_trains import MemberState, World


class Coordinating:
    """One that notes what it would send, say and record."""

    def __init__(self, workers: int = 3) -> None:
        self.now, self.workers = 1000.0, workers
        policy = restart_budget.Policy(9, timedelta(hours=1))
        self.settings = Settings(tuple(range(1, workers + 1)), policy, who_trains.Timeouts(start=0.0))
        self.state = CoordinatorState({})
        self.told: dict[int, list[object]] = {id: [] for id in range(workers)}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[tuple[State, str]] = []
        for id in range(workers):
            self.report(id, "waiting")
        self.look()
        self.train(1)

    def take(self, event: Event) -> list[Effect]:
        self.state, effects = step(self.settings, self.state, event, self.now)
        for effect in effects:
            match effect:
                case Send(to, _, message):
                    for id in to:
                        self.told[id].append(message)
                case Record(kind, facts, state, reason):
                    self.events.append((kind, dict(facts)))
                    if state:
                        self.said.append((state, reason))
        return effects

    def report(self, id: int, standing: str, generation: int = 0, **fields: Any) -> None:
        self.take(Report("run", id, MemberState(standing), generation, self.now, f"10.0.0.{id}:1", **fields))

    def others_report(self, standing: str, generation: int = 0, **fields: Any) -> None:
        for id in (0, 1):
            self.report(id, standing, generation, **fields)

    def train(self, generation: int, *ids: int) -> None:
        for id in ids or range(self.workers):
            self.report(id, "training", generation, mesh=True)

    def tick(self) -> list[Effect]:
        return self.take(Tick(frozenset(range(self.workers))))

    def look(self) -> who_trains.Wait:
        """What it waits for once it has nothing more to decide."""
        for _ in range(10):
            if wait := next((effect for effect in self.tick() if isinstance(effect, who_trains.Wait)), None):
                return wait
        raise AssertionError("it decides for ever")

    def settle(self) -> None:
        """Failures are judged, whatever else may happen."""
        self.now += root_cause.COORDINATOR.answer
        self.tick()

    def newest(self) -> World:
        assert self.state.world is not None
        return self.state.world


LOST = "lost worker 2: workers 0 and 1 do not hear it"
ECHO = {"rank": 0, "code": 1, "reason": "connection reset", "echo": True, "time": 0.0}


def test_a_process_that_was_fenced_is_told_so_as_often_as_it_reports_and_its_successor_joins_later() -> None:
    run = Coordinating()
    run.others_report("training", 1, unheard=(2,))
    run.look()
    unheard = {"generation": 1, "workers": [2], "by": [0, 1], "reason": LOST}
    assert run.events[-2:] == [("unheard", unheard), ("called", {"generation": 2, "reason": LOST, "planned": False})]
    run.take(Gone(2))
    run.report(2, "training", 1)
    run.report(2, "waiting", 1)
    assert run.told[2][-2:] == [Closed(LOST, 75), Closed(LOST, 75)]
    assert 2 not in run.state.members
    run.others_report("waiting", 1)
    run.look()
    run.train(2, 0, 1)
    run.report(2, "waiting")
    run.now += 9.5
    assert run.look().reason == "2 workers train in generation 2; worker 2 was lost and may join again (1 s left)"
    run.now += 0.5
    run.look()
    assert run.state.called is not None
    assert run.state.called.reason == "growing from 2 to 3 with worker 2"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (
            Report("run", 1, MemberState.TRAINING, 1, mesh=True, unheard=(2,), refused=(2,)),
            "lost worker 2: it refuses connections",
        ),
        (Gone(2), "lost worker 2"),
    ],
)
def test_echoes_are_not_waited_out_when_it_is_known_whose_death_they_echo(event: Event, reason: str) -> None:
    run = Coordinating()
    run.report(0, "waiting", 1, failed=True, failure=ECHO)
    assert run.tick() == []
    run.take(event)
    run.tick()
    assert run.state.called is not None
    assert (run.state.called.reason, run.state.fenced) == (reason, {})


def test_a_worker_that_errs_costs_a_start_of_processes_at_most() -> None:
    run = Coordinating()
    run.report(2, "training", 1, unheard=(0, 1))
    run.look()
    assert run.state.called is None
    run.now += 1
    run.tick()
    run.others_report("waiting", 1)
    run.look()
    assert run.newest().members == (0, 1)
    assert run.told[2][-1] == Closed("lost worker 2: it does not hear the others", 75)


@pytest.mark.parametrize("index", [0, 2])
def test_a_new_process_gets_no_place_in_a_world_that_its_predecessor_had_joined(index: int) -> None:
    run = Coordinating()
    run.take(Gone(index))
    run.report(index, "waiting")  # before the next decision: it has connected in the place of a process that is cut off
    assert run.told[index][1:] == []
    run.tick()
    assert run.told[index][-1] == Called(2, f"lost worker {index}", False, run.now + 75, leave_s=75.0)
    peers = [id for id in range(3) if id != index]
    for id in peers:
        run.report(id, "waiting", 1, unheard=(index,))
    run.look()
    assert (run.newest().generation, run.newest().members[-1], run.state.fenced) == (2, index, {})
    run.take(Gone(peers[0]))
    run.report(peers[0], "waiting", 1)  # its connection was broken before it could join
    assert run.told[peers[0]][-1] == run.newest()


def test_a_process_of_the_previous_version_in_the_place_of_one_that_was_fenced_is_not_fenced_forever() -> None:
    run = Coordinating()
    run.others_report("training", 1, unheard=(2,))
    run.look()
    told = len(run.told[2])
    run.report(2, "waiting", 1, again=True)
    assert (run.told[2][told:], run.state.fenced) == ([Called(2, LOST, False, run.now + 75, leave_s=75.0)], {})
    run.others_report("waiting", 1)
    run.now += 10.0
    run.look()
    assert (run.newest().generation, 2 in run.newest().members) == (2, True)


KILLED = {"rank": None, "code": 137, "reason": "the elastic agent of worker 2 was killed by SIGKILL", "time": 0.0}


@pytest.mark.parametrize("noticed", [True, False])
def test_a_process_in_the_place_of_one_that_was_killed_is_no_side_of_a_partition_and_counts_once(noticed: bool) -> None:
    run = Coordinating()
    if noticed:
        run.take(Gone(2))
        run.look()
    run.report(2, "waiting", 1, failed=True, failure=KILLED, again=True)
    run.others_report("training", 1, mesh=True, unheard=(2,), refused=(2,))
    run.look()
    assert run.state.called is not None
    run.now += 5.0
    run.others_report("waiting", 1, unheard=(2,), refused=(2,))
    run.look()
    assert (run.newest().generation, run.newest().members, run.state.fenced) == (2, (0, 1, 2), {})
    run.train(2)
    assert [facts["reason"] for kind, facts in run.events if kind == "failure"] == [KILLED["reason"]]


def test_a_process_without_which_the_others_went_on_still_tells_what_happened_to_the_one_before_it() -> None:
    run = Coordinating()
    run.take(Gone(2))
    run.look()
    run.others_report("waiting", 1)
    run.now += 2.0
    run.look()
    run.train(2, 0, 1)
    for _ in range(2):
        run.report(2, "waiting", 1, failed=True, failure=KILLED, again=True)
        run.now += 2.0
        run.look()
    assert (run.state.restarts, run.said[-1][0], run.state.called) == (1, State.RUNNING, None)
    assert run.said[-1][1] == f"{KILLED['reason']}; restart 1 of 9"


def ended(rank: int, reason: str, **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "code": 1, "reason": reason, "time": 0.0, "step": None, **fields}


def counted(run: Coordinating) -> list[str]:
    return [facts["reason"] for kind, facts in run.events if kind == "failure"]


def test_a_worker_that_had_finished_when_the_others_broke_is_the_cause_and_counts_as_one() -> None:
    run = Coordinating(2)
    run.report(1, "done", 1)
    run.report(0, "waiting", 1, failed=True, failure=ended(0, "connection closed", echo=True, step=0))
    run.now += 0.6
    run.look()
    assert run.state.called is not None
    run.report(1, "waiting", 1, failed=True, failure=ended(1, "rank 1 on worker 1", echo=True, left=True))
    run.look()
    assert run.newest().generation == 2
    (reason,) = counted(run)
    assert reason.startswith(
        "rank 1 on worker 1 exited with 0, as if done, while rank 0 trained: all ranks must do as many steps"
    )
    assert [record.failed_step for record in run.state.history] == [0]


def test_a_worker_that_had_finished_when_another_was_lost_has_failed_in_nothing() -> None:
    run = Coordinating(2)
    run.report(1, "done", 1)
    run.take(Gone(0))
    run.look()
    run.report(1, "waiting", 1, failed=True, failure=ended(1, "rank 1 on worker 1", echo=True, left=True))
    run.report(0, "waiting", 0)
    run.look()
    assert (run.newest().generation, counted(run)) == (2, [])


def test_a_rank_that_left_the_others_of_its_own_worker_is_counted_each_time() -> None:
    run = Coordinating(1)
    for generation in (1, 2, 3):
        run.train(generation)
        run.report(0, "waiting", generation, failed=True, failure=ended(1, "rank 1 exited with 0", left=True, step=0))
        run.look() if generation < 3 else run.settle()
    assert (len(counted(run)), run.state.closed is not None) == (3, True)


MISFIT = ended(0, "rank 0 on worker 0: 8 samples cannot be shared among 3 ranks", code=contract.Exit.MISCONFIGURED)


@pytest.mark.parametrize(("batch", "ends"), [((1, 0, 8), False), ((1, 0, 0), True), ((), True)])
def test_a_script_that_refuses_the_size_of_its_world_gets_another_one_for_nothing(batch: tuple[int, ...], ends: bool) -> None:
    """Unless no size helps: then it is a mistake like any other."""
    run = Coordinating()
    run.report(0, "waiting", 1, failed=True, failure=MISFIT, batch=batch)
    for id in (1, 2):
        run.report(id, "waiting", 1, failed=True, failure=ended(id, "it was stopped", echo=True))
    if ends:
        run.tick()
        run.settle()
        assert run.state.closed is not None
        assert (run.state.closed.code, run.state.closed.reason) == (78, f"{MISFIT['reason']}; a restart would not help")
        return
    run.look()
    assert (run.newest().members, run.state.restarts, run.state.history, run.state.closed) == ((0, 1), 0, (), None)
    assert (State.RESTARTING, f"{MISFIT['reason']}; the next world has another size") in run.said
    run.train(2, 0, 1)
    run.report(0, "waiting", 2, failed=True, failure=MISFIT, batch=batch)
    run.report(1, "waiting", 2)
    run.settle()
    assert run.state.closed is not None, "2 workers can share the batch: the cause is another one"


@pytest.mark.parametrize("counts_ends", [False, True])
def test_the_end_of_a_worker_counts_once_whether_it_is_noticed_or_only_its_echoes_are(counts_ends: bool) -> None:
    run = Coordinating()
    run.settings = dataclasses.replace(run.settings, counts_ends=counts_ends)
    run.take(Gone(2))
    run.others_report("waiting", 1, failed=True, failure=ECHO)
    run.settle()
    assert (counted(run), run.state.counted) == ([] if counts_ends else [ECHO["reason"]], (1, 0))
    if counts_ends:
        died = Failure(worker=2, code=137, reason="worker 2 was killed", generation=1)
        failure, *rest = run.take(root_cause.Known(died, None, 5))
        assert isinstance(failure, Record)
        assert (failure.failure, failure.reason, rest) == (died, "worker 2 was killed; restart 1 of 9", [])
        assert run.state.history == (restart_budget.Record(run.now, 5, None),)
    assert run.state.restarts == 1


def test_echoes_count_nothing_while_the_member_that_the_next_world_leaves_out_may_report_the_cause() -> None:
    run = Coordinating()
    run.settings = dataclasses.replace(run.settings, counts_ends=True, debounce=root_cause.OPERATOR)
    run.others_report("waiting", 1, failed=True, failure=ECHO)
    run.now += root_cause.OPERATOR.cause
    run.tick()
    run.now += run.settings.timeouts.answer
    run.look()
    assert (run.newest().members, counted(run), run.state.counted, run.state.pending) == ((0, 1), [], (0, 0), ())


def test_effects_are_in_the_order_in_which_they_are_performed() -> None:
    """The ledger and people learn of a thing before the members do, and of a failure before what follows from it."""
    run = Coordinating(2)
    run.report(0, "waiting", 1, failed=True, failure=KILLED)
    before = run.state
    reason = KILLED["reason"]
    (called, to_all) = run.tick()
    assert called == Record("called", {"generation": 2, "reason": reason, "planned": False}, State.RESTARTING, reason)
    assert to_all == Send((0, 1), "called", Called(2, reason, False, run.now + 75, leave_s=75.0))
    assert before.called is None, "a state never changes"
    run.report(1, "waiting", 1)
    failure, began, new, to_members = run.tick()
    assert isinstance(failure, Record)
    assert (failure.kind, failure.state, failure.reason) == ("failure", State.RESTARTING, f"{reason}; restart 1 of 9")
    facts = {"generation": 2, "workers": [0, 1], "reason": f"{reason}; training goes on with all 2"}
    assert began == Record("world", facts, State.RUNNING, facts["reason"])
    assert (new, to_members) == (run.newest(), Send((0, 1), "world", run.newest()))
    ending = Ending(State.FAILED, "it has run for too long", contract.Exit.FAILED, End.DEADLINE)
    given_up = dataclasses.replace(ending, code=contract.Exit.GIVEN_UP)
    assert run.take(ending) == [given_up, Send((0, 1), "closed", Closed(ending.reason, contract.Exit.GIVEN_UP, End.DEADLINE))]
    assert run.take(dataclasses.replace(ending, reason="it ends again")) == []


def test_workers_that_are_asked_to_leave_are_sent_no_end() -> None:
    run = Coordinating(1)
    interrupted = Ending(State.INTERRUPTED, "stopped by the user", contract.Exit.INTERRUPTED)
    assert (run.take(interrupted), run.state.closed) == ([interrupted], None)


def test_a_successor_continues_with_what_is_persisted_on_another_clock() -> None:
    run = Coordinating()
    run.report(0, "waiting", 1, failed=True, failure=KILLED)
    for id in (1, 2):
        run.report(id, "waiting", 1, unheard=(0,) if id == 1 else ())
    run.look()
    persisted = run.state.persisted(run.now + 5)
    successor = persisted.restored(50.0, ago_s=20.0)
    assert (successor.counted, successor.restarts, successor.followed) == ((1, 0), 1, 2)
    assert [record.time for record in successor.history] == [25.0], "it was counted 5 seconds before this was written"
    assert successor.world == dataclasses.replace(run.newest(), at=50.0)
    assert successor.persisted(50.0 - 20.0) == dataclasses.replace(persisted, world=successor.world)
