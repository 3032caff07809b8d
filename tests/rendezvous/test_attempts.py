"""Attempts: members start the processes of their world again by themselves, whatever happens to their messages."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.base.typed_json import decode
from outlast.job.status import State
from outlast.rendezvous import attempts, coordinator, restart_budget, root_cause, who_trains
from outlast.rendezvous.attempts import Go, No, Participant, Past, Ready, Stage, Stop
from outlast.rendezvous.mesh.mesh import Mesh
from outlast.rendezvous.messages import Gone, Report
from outlast.rendezvous.repairs import Repairs


def a_failure(worker: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "rank": worker,
        "code": 137,
        "reason": f"rank {worker} on worker {worker} was killed by SIGKILL",
        "time": 5.0,
        **fields,
    }


ECHO: dict[str, Any] = {"code": 1, "reason": "rank 0 on worker 0 lost its peer", "echo": True, "time": 1.0}


class Net:
    """Some members and their messages under way. `ranks` has the attempt whose processes run, None where they are gone."""

    def __init__(self, size: int, limit: int = 100) -> None:
        self.members = tuple(range(3, 3 + size))
        self.parties = {id: Participant(id, self.members, 7, limit) for id in self.members}
        self.ranks: dict[int, int | None] = dict.fromkeys(self.members, 0)
        self.underway: list[tuple[int, int, attempts.Message]] = []
        self.sent: list[tuple[int, int, attempts.Message]] = []
        self.addresses: dict[int, str] = {}
        self.made = 0
        self.now = 100.0

    def send(self, sender: int, messages: attempts.Messages) -> None:
        for to, message in messages:
            written = json.loads(json.dumps(attempts.written(message)))
            assert attempts.read(written) == message
            self.underway.append((sender, to, message))
            self.sent.append((sender, to, message))

    def crash(self, id: int, failure: dict[str, Any] | None = None) -> None:
        self.stop(id, failure or a_failure(id))

    def stop(self, id: int, failure: dict[str, Any] | None = None) -> None:
        if self.ranks[id] is None:
            return
        self.ranks[id] = None
        address = f"host-{id}:{self.made}"
        self.send(id, self.parties[id].stopped(address, 10 + self.made, failure, self.now))

    def deliver(self, index: int) -> None:
        self.bring(*self.underway.pop(index))

    def bring(self, sender: int, to: int, message: attempts.Message) -> None:
        self.send(to, self.parties[to].take(sender, message, self.now))

    def obey(self, id: int) -> None:
        party = self.parties[id]
        if party.stage is Stage.STOPPING:
            self.stop(id)
        elif party.stage is Stage.GOES and party.go:
            self.start(id, party.go)

    def start(self, id: int, go: Go) -> None:
        assert self.addresses.setdefault(go.attempt, go.address) == go.address, "an attempt has one store"
        assert go.attempt > self.parties[id].attempt, "attempts only grow"
        assert set(self.ranks.values()) <= {None, go.attempt}, "processes of an earlier attempt still run"
        self.parties[id].taken_up()
        self.ranks[id] = go.attempt
        self.made = max(self.made, go.attempt)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for id, party in self.parties.items():
            self.send(id, party.tick(self.now))

    def settle(self, rounds: int = 50) -> None:
        """Everything arrives from now on, and everybody does what it is asked."""
        for _ in range(rounds):
            while self.underway:
                self.deliver(0)
            for id in self.members:
                self.obey(id)
            self.tick(0.25)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("failed", ["first", "last"])
def test_members_agree_and_start_their_processes_again(size: int, failed: str) -> None:
    net = Net(size)
    id = net.members[0 if failed == "first" else -1]
    for attempt in (1, 2):
        net.crash(id)
        net.settle()
        assert net.ranks == dict.fromkeys(net.members, attempt)
        assert all(p.go and p.go.past == Past(7, attempt, id, a_failure(id)) for p in net.parties.values())


def test_the_cause_is_what_the_coordinator_would_judge_it_to_be() -> None:
    net = Net(3)
    net.crash(3, ECHO)
    net.crash(5)
    net.settle()
    assert net.parties[4].go
    assert net.parties[4].go.worker == 5


def test_a_cause_may_report_before_the_others_are_stopped_for_an_echo() -> None:
    net = Net(3)
    net.crash(4, ECHO)
    net.deliver(0)
    assert net.underway == []
    assert net.parties[3].stage is Stage.TRAINING
    net.tick(root_cause.COORDINATOR.cause - 0.1)
    assert net.parties[3].stage is Stage.TRAINING
    net.tick(0.2)
    assert net.parties[3].stage is Stage.STOPPING


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (a_failure(code=78), "; another attempt would not help"),
        (a_failure(code=75), "; another attempt would not help"),
        (a_failure(code=79), "; another attempt would not help"),
        (a_failure(code=1, early="NameError", step=3), " before its first step"),
        (a_failure(code=1), " at an unknown step"),
        (a_failure(code=1, step=0), " before its first step"),
    ],
)
def test_what_another_start_would_not_help_is_the_coordinators(failure: dict[str, Any], why: str) -> None:
    net = Net(2)
    net.crash(4, failure)
    net.settle()
    assert {party.stage for party in net.parties.values()} == {Stage.REFUSED}
    assert net.ranks == {3: None, 4: None}
    assert f"{failure['reason']}{why}" in net.parties[4].reason


@pytest.mark.parametrize(("code", "cause", "most"), [(1, "", 2), (137, "", 10), (137, "oom", 2)])
def test_attempts_without_progress_end(code: int, cause: str, most: int) -> None:
    net = Net(2)
    party = net.parties[3]
    for _ in range(most):
        net.made = 0  # which stands for the step
        net.crash(4, a_failure(code=code, cause=cause, step=10))
        net.settle()
        assert party.stage is Stage.TRAINING
    net.made = 0
    net.crash(4, a_failure(code=code, cause=cause, step=10))
    net.settle()
    assert party.stage is Stage.REFUSED
    assert party.reason == f"{most} attempts in a row made no progress"
    assert party.attempt == most


def test_a_repaired_failure_has_the_newest_checkpoint_that_any_member_knows_of() -> None:
    net = Net(2)
    net.crash(4, a_failure(4, committed=None))  # it died as it started
    net.stop(3, a_failure(3, echo=True, committed=5))
    net.settle()
    assert all(party.go and (party.go.worker, party.go.failure["committed"]) == (4, 5) for party in net.parties.values())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_members_make_no_attempt_that_the_budget_does_not_allow(limit: int) -> None:
    net = Net(2, limit)
    for _ in range(limit):
        net.crash(4, a_failure(committed=5))
        net.settle()
    if limit:
        net.crash(4, a_failure(committed=6))  # a save refunds the others
        net.settle()
    assert net.ranks == dict.fromkeys(net.members, limit + bool(limit))
    for _ in range(limit or 1):
        net.crash(4, a_failure(committed=6))
        net.settle()
    assert net.ranks == dict.fromkeys(net.members)
    assert net.parties[3].reason == f"restarts.limit ({limit}) is used up"


def test_whoever_waits_for_long_is_late() -> None:
    party = Participant(4, (3, 4), 7, 10)
    assert not party.late(1000.0)
    assert party.stopped("host:1", 5, None, 10.0) == [(3, Ready(7, 1, "host:1", 5))]
    assert not party.late(11.0)
    assert party.late(12.0)
    assert party.tick(12.5) == []
    assert party.tick(15.0) == [(3, Ready(7, 1, "host:1", 5))]


def test_members_are_told_once_to_stop_however_often_one_looks_and_however_long_it_takes() -> None:
    net = Net(50)
    net.crash(3)
    for _ in range(90):  # 4.5 s
        while net.underway:
            net.deliver(0)
        net.tick(0.05)
    assert len(net.sent) == 49
    net.settle()
    assert net.ranks == dict.fromkeys(net.members, 1)
    assert len(net.sent) <= 49 * 4, "told, told again after 5 s, ready, go"


def test_a_member_that_missed_an_attempt_takes_part_in_the_next() -> None:
    net = Net(3)
    net.crash(5)
    for id in (4, 3):
        while net.underway:
            net.deliver(0)
        net.obey(id)
    net.underway = [each for each in net.underway if each[1] != 4]  # it is lost on its way to one
    net.deliver(0)
    net.obey(3), net.obey(5)
    assert net.ranks == {3: 1, 4: None, 5: 1}
    assert net.parties[4].stage is Stage.READY
    net.crash(3)  # before that one has asked again
    net.settle()
    assert net.ranks == {3: 2, 4: 2, 5: 2}
    assert net.parties[4].go
    assert net.parties[4].go.worker == 3


def test_what_comes_late_changes_nothing() -> None:
    net = Net(3)
    for _ in range(2):
        net.crash(4)
        net.settle()
    late, now = list(net.sent), net.parties[3]
    for each in late:
        if isinstance(each[2], Stop | No):
            net.bring(*each)
    assert {party.stage for party in net.parties.values()} == {Stage.TRAINING}
    net.crash(4)
    net.deliver(0)
    net.stop(3)
    for each in late:
        net.bring(*each)
    assert now.stage is Stage.READY, "worker 5 still trains"
    net.settle()
    assert net.ranks == {3: 3, 4: 3, 5: 3}


def test_messages_of_other_worlds_and_of_strangers_are_ignored() -> None:
    party = Participant(4, (3, 4), 7, 10)
    for sender, message in [(3, Stop(6, 1)), (5, Stop(7, 1)), (4, Stop(7, 1)), (3, Stop(8, 1))]:
        assert party.take(sender, message, 0.0) == []
        assert party.stage is Stage.TRAINING


def test_a_report_lists_the_newest_attempts_and_few_words() -> None:
    words = a_failure(traceback="t" * 9000, log_tail="l" * 9000)
    said = attempts.listed(Past(7, attempt, 1, attempts.shortened(words)) for attempt in range(1, 40))
    assert [each["attempt"] for each in said] == list(range(20, 40))
    assert len(json.dumps(said)) < 12_000
    assert len(said[-1]["failure"]["log_tail"]) == 1000
    assert decode(Past, said[0]).failure == {**a_failure(), "traceback": "", "log_tail": ""}


ACTIONS = ("deliver", "deliver", "deliver", "obey", "obey", "crash", "late", "lose", "tick", "calm", "call")


@given(st.data())
def test_whatever_is_lost_doubled_or_late_no_processes_of_two_attempts_run(data: st.DataObject) -> None:
    net = Net(data.draw(st.integers(1, 4), label="members"))
    for _ in range(data.draw(st.integers(10, 60), label="steps")):
        id = data.draw(st.sampled_from(net.members))
        match data.draw(st.sampled_from(ACTIONS)):
            case "crash":
                net.crash(id, data.draw(st.sampled_from([None, ECHO])))
            case "obey":
                net.obey(id)
            case "tick":
                net.tick(data.draw(st.sampled_from([0.05, 0.3, 1.0])))
            case "calm":
                net.settle(3)
            case "late" if net.sent:
                net.bring(*data.draw(st.sampled_from(net.sent)))
            case "call":
                if data.draw(st.integers(0, 9)) == 9:  # rarely, or nothing else is tried
                    net.send(id, net.parties[id].refuse("the coordinator has called"))
            case "deliver" | "lose" as how if net.underway:
                index = data.draw(st.integers(0, len(net.underway) - 1))
                net.underway.pop(index) if how == "lose" else net.deliver(index)
    before = {id for id, party in net.parties.items() if party.stage is Stage.REFUSED}
    net.settle()
    after = {id for id, party in net.parties.items() if party.stage is Stage.REFUSED}
    assert before <= after, "who has refused never goes"
    if not after:
        assert set(net.ranks.values()) == {net.made}, "they come together again"


# Counted afterwards


class Counting:
    """A coordinator of the members 3 and 4, which train in generation 7; `new` is one that has no history."""

    def __init__(self, limit: int = 10, *, new: bool = False) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.said: list[str] = []
        self.now = 100.0
        policy = restart_budget.Policy(limit, timedelta(hours=1))
        self.settings = coordinator.Settings((1, 2), policy, who_trains.Timeouts())
        self.state = coordinator.CoordinatorState({})
        if new:
            return
        training = who_trains.World(7, (3, 4), "a:1", "training starts", 0.0)
        self.state = dataclasses.replace(self.state, world=training, followed=7)
        for id in (3, 4):
            self.hears(id)

    def say(self, text: str) -> None:
        self.said.append(text)

    def event(self, kind: str, **facts: Any) -> None:
        self.events.append((kind, facts))

    def finished(self, state: State, reason: str, code: int) -> None: ...

    def take(self, event: coordinator.Event) -> None:
        self.state, effects = coordinator.step(self.settings, self.state, event, self.now)
        for effect in effects:
            coordinator.show(effect, self)

    def hears(self, id: int, standing: str = "training", **fields: Any) -> None:
        report = {"run": "r", "id": id, "standing": standing, "generation": 7, "address": f"h-{id}:1", **fields}
        self.take(decode(Report, report))

    def tick(self, *expected: int) -> None:
        self.take(coordinator.Tick(frozenset(expected)))

    def goes_on(self, seconds: float = 2.0) -> None:
        self.now += seconds
        for _ in range(3):
            self.tick(3, 4)

    def counted_starts(self) -> list[tuple[int, int]]:
        return [(facts["generation"], facts["attempt"]) for kind, facts in self.events if kind == "failure"]


def the_past(*attempts: int, generation: int = 7, worker: int = 4, every_s: float = 0.0) -> list[dict[str, Any]]:
    """As a member tells it; the wall clock of each worker is wrong in its own way."""
    of, wrong = {"generation": generation, "worker": worker}, (1e6, -7e5, 0.0)
    return [
        {**of, "attempt": each, "failure": a_failure(worker, time=5.0 + wrong[each % 3]), "at": 5.0 + every_s * each}
        for each in attempts
    ]


def test_repaired_failures_are_counted_once_whoever_reports_them() -> None:
    run = Counting()
    run.hears(3, attempt=2, past=the_past(1, 2))
    run.hears(4, attempt=2, past=the_past(2, 1))
    run.hears(3, attempt=2, past=the_past(1, 2), unheard=[4])
    assert (run.counted_starts(), run.state.restarts, run.state.counted) == ([(7, 0), (7, 1)], 2, (7, 1))
    assert run.said[-1] == (
        "Running: repaired by its workers, attempt 2 of generation 7: rank 4 on worker 4 was killed by SIGKILL; restart 2 of 10"
    )
    assert run.state.called is None


def test_a_failure_that_is_reported_and_then_repaired_is_one() -> None:
    run = Counting()
    run.hears(4, "waiting", failed=True, failure=a_failure(4))
    run.hears(4, attempt=1, past=the_past(1))
    run.goes_on()
    assert (run.counted_starts(), run.state.called) == ([(7, 0)], None)
    run.hears(4, "waiting", attempt=1, failed=True, failure=a_failure(4))
    run.goes_on()
    assert run.counted_starts() == [(7, 0), (7, 1)]
    assert run.state.called is not None


def test_members_of_which_some_have_gone_are_called_together_for_one_failure() -> None:
    run = Counting()
    run.hears(4, "waiting", failed=True, failure=a_failure(4))
    run.goes_on(0.0)
    assert run.state.called is not None
    run.hears(3, attempt=1, past=the_past(1))
    run.hears(3, "waiting", attempt=1, failed=True, failure=ECHO)
    run.goes_on(0.0)
    assert run.state.world is not None
    assert (run.state.world.generation, run.state.restarts) == (8, 1)


def a_call_to_grow(run: Counting) -> None:
    run.settings = dataclasses.replace(run.settings, sizes=(1, 2, 3))
    run.hears(5, "waiting", generation=0)
    run.now += 10.0
    run.tick(3, 4, 5)
    assert run.state.called is not None
    assert run.state.called.cause is who_trains.Cause.GROW


def a_call_for_a_lost_worker(run: Counting) -> None:
    run.take(Gone(3))
    run.tick(3, 4)
    assert run.state.called is not None
    assert run.state.called.cause is who_trains.Cause.LOST


@pytest.mark.parametrize("call", [a_call_to_grow, a_call_for_a_lost_worker])
def test_a_crash_during_a_call_counts_although_an_earlier_one_was_repaired(call: Callable[[Counting], None]) -> None:
    run = Counting()
    for id in (3, 4):
        run.hears(id, attempt=1, past=the_past(1))
    call(run)
    run.hears(4, "waiting", attempt=1, past=the_past(1), failed=True, failure=a_failure(4))
    run.goes_on()
    assert (run.counted_starts(), run.state.restarts) == ([(7, 0), (7, 1)], 2)


class Silent:
    """A mesh whose peers acknowledge and say nothing."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[int, Mapping[str, Any]], None]] = {}
        self.sent: list[tuple[int, attempts.Message | None]] = []

    def send(self, to: int, message: Mapping[str, Any]) -> Future[None]:
        self.sent.append((to, attempts.read(message)))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_a_failure_of_a_high_rank_does_not_hide_what_was_repaired_before_it() -> None:
    """The report of rank 3 on attempt 1 comes before those of the others, of which the first three tell of attempt 0."""
    mesh, repairs = Silent(), Repairs(4, 10)
    repairs.enter(who_trains.World(7, (5, 6, 3, 4), "a:1", "training starts", 0.0), cast(Mesh, mesh))
    go = Go(7, 1, "a:2", 3, a_failure(3))
    mesh.handlers["attempt"](5, attempts.written(Stop(7, 1)))
    assert repairs.stop_requested()
    ready = lambda: mesh.handlers["attempt"](5, attempts.written(go)) or ""  # noqa: E731
    assert repairs.agree("h:1", 9, None, overruled=ready, late=lambda: None) == go
    repairs.taken_up()
    assert repairs.report() == {"attempt": 1}
    run = Counting()
    run.hears(4, "waiting", failed=True, failure=a_failure(4), **repairs.report(failed=True))
    run.goes_on()
    run.hears(3, "waiting", attempt=1, past=the_past(1, worker=3))
    assert run.counted_starts() == [(7, 0), (7, 1)]


def test_what_comes_before_a_member_is_where_it_is_meant_for_is_taken_when_it_is() -> None:
    """The mesh has acknowledged it, so nobody repeats it soon."""
    mesh, repairs = Silent(), Repairs(4, 10)
    first = who_trains.World(7, (4, 5), "a:1", "training starts", 0.0)
    repairs.enter(first, cast(Mesh, mesh))
    mesh.handlers["attempt"](5, attempts.written(Ready(8, 1, "h-5:1", 9, a_failure(5))))  # it is in the next world already
    assert not repairs.stop_requested()
    repairs.enter(dataclasses.replace(first, generation=8), cast(Mesh, mesh))
    assert repairs.stop_requested(), "it leads, and has a process to stop"
    assert repairs.agree("h-4:1", 9, None, overruled=lambda: "", late=lambda: None)
    mesh.handlers["attempt"](5, attempts.written(Ready(8, 2, "h-5:2", 9, a_failure(5))))  # it has gone, and failed again
    repairs.taken_up()
    assert repairs.stop_requested()
    assert repairs.agree("h-4:2", 9, None, overruled=lambda: "", late=lambda: None)
    gone = [Go(8, attempt, f"h-4:{attempt}", 5, a_failure(5)) for attempt in (1, 2)]
    assert mesh.sent == [(5, go) for go in gone]


def test_repaired_failures_use_up_the_budget() -> None:
    run = Counting(limit=2)
    run.hears(3, attempt=4, past=the_past(1, 2, 3, 4))
    assert (run.counted_starts(), run.state.closed is not None) == ([(7, 0), (7, 1), (7, 2)], True)


@pytest.mark.parametrize("hours", [0, 2])
def test_a_coordinator_that_was_away_counts_the_past_at_the_time_at_which_it_was(hours: int) -> None:
    run = Counting()
    run.hears(3, attempt=12, past=the_past(*range(1, 13), every_s=3600.0 * hours))
    assert (run.state.restarts, run.state.closed is None, run.state.counted) == (
        (12, True, (7, 11)) if hours else (10, False, (7, 10))
    )


def test_the_age_of_a_failure_is_that_by_the_clock_of_the_member_that_tells_it_first_hand() -> None:
    late, newest = the_past(1, 2, every_s=60), [{**each, "at": each["at"] + 1e5} for each in the_past(1, 2, 3, every_s=60)]
    older = [{key: value for key, value in each.items() if key != "at"} for each in newest]
    for reports in itertools.permutations([late, newest, older]):
        assert [(past.attempt, ago_s) for past, ago_s in attempts.uncounted(reports, (0, 0), 7)] == [(1, 120), (2, 60), (3, 0)]
    assert [ago_s for _, ago_s in attempts.uncounted([older], (0, 0), 7)] == [0, 0, 0], "of an earlier version"


def test_a_coordinator_without_a_history_counts_what_fails_from_now_on() -> None:
    """The one before has counted all of it, whenever it was; a failure that is reported now is of now."""
    run = Counting(new=True)
    past = [*the_past(*range(1, 9), generation=6), *the_past(*range(1, 13))]
    run.hears(5, generation=6, attempt=4)  # it was left out of the last world
    run.hears(4, "waiting", attempt=12, failed=True, failure=a_failure(4))
    run.hears(3, attempt=12, past=past)
    run.hears(4, attempt=12, past=past)
    assert (run.counted_starts(), run.state.closed) == ([], None)
    for attempt in range(13, 24):
        run.hears(3, attempt=attempt, past=[*past, *the_past(*range(13, attempt + 1))][-attempts.PAST :])
        assert run.state.closed is None or attempt == 23
    assert run.counted_starts() == [(7, attempt) for attempt in range(12, 23)]
    assert run.state.closed is not None
    assert run.state.closed.reason.endswith("restarts.limit (10 within 1h without a new checkpoint) is used up")


def test_saved_steps_refund_repaired_failures_as_they_do_others() -> None:
    run = Counting(limit=2)
    past = the_past(1, 2, 3, 4)
    for each in past:
        each["failure"] = {**each["failure"], "committed": 10 * each["attempt"]}
    run.hears(3, attempt=4, past=past)
    assert (run.state.restarts, run.state.closed) == (4, None)


@pytest.mark.parametrize("past", [[{}], [{"generation": 7}], [{**the_past(1)[0], "attempt": 0}], the_past(1, generation=99)])
def test_a_past_that_makes_no_sense_counts_nothing(past: list[dict[str, Any]]) -> None:
    run = Counting()
    run.hears(3, past=past)
    assert (run.counted_starts(), run.state.counted) == ([], (0, 0))
