"""Restarts: what a job survives, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from outlast.job import contract
from outlast.job.failure import Failure
from outlast.rendezvous import restart_budget
from outlast.rendezvous import root_cause as failures
from outlast.rendezvous.restart_budget import History, Kills, Policy, Record, Restart, Stop, judge
from outlast.rendezvous.root_cause import Pending

NOW = 10_000.0


def a_failure(code=1, *, reason="rank 1 on worker 1 raised ValueError", step=40, **fields):
    return Failure(worker=1, rank=1, code=code, reason=reason, step=step, **fields)


def a_kill(step=40):
    return a_failure(137, reason="rank 1 on worker 1 was killed by SIGKILL", step=step)


def a_policy(limit=10, window=timedelta(hours=1)):
    return Policy(limit, window)


def a_history(*failures):
    return tuple(Record(*failure) for failure in failures)


def judged(failure, *failures, committed=20, now=NOW, policy=None):
    return judge(a_history(*failures), failure, committed, now, policy or a_policy())


def test_a_failure_costs_one_restart():
    assert judged(a_kill()) == Restart(
        a_history((NOW, 20, None)), 1, "rank 1 on worker 1 was killed by SIGKILL at step 40; restart 1 of 10"
    )


def test_failures_without_progress_add_up():
    assert judged(a_kill(), (NOW - 60, 20, None)) == Restart(
        a_history((NOW - 60, 20, None), (NOW, 20, None)),
        2,
        "rank 1 on worker 1 was killed by SIGKILL at step 40; restart 2 of 10",
    )


def test_a_step_that_runs_out_of_memory_three_times_in_a_row_ends_the_job_like_one_that_raises():
    starved = replace(a_kill(), cause=contract.FailureCause.OUT_OF_MEMORY, reason="rank 1 on worker 1 was killed")
    once = judged(starved)
    assert once == Restart(a_history((NOW, 20, 40)), 1, "rank 1 on worker 1 was killed; restart 1 of 10")
    again = "it has run out of memory at step 40 3 times in a row"
    assert judged(starved, *once.history, (NOW, 20, 40)) == Stop(
        f"rank 1 on worker 1 was killed; {again}", 137, contract.End.NO_PROGRESS
    )
    assert isinstance(judged(starved, (NOW, 20, 39), (NOW, 20, 40)), Restart)
    assert isinstance(judged(a_kill(), (NOW, 20, 40), (NOW, 20, 40)), Restart), "a kill says nothing of its step"
    full = a_failure(cause=contract.FailureCause.DISK_FULL)
    assert isinstance(judged(full, *[(NOW, 20, 40)] * 8, policy=a_policy(limit=99)), Restart), "somebody may make room"
    assert isinstance(judged(full, *[(NOW, 20, 40)] * 9, policy=a_policy(limit=99)), Stop)


def test_processes_that_are_killed_again_and_again_without_progress_wait_ever_longer():
    kills, pauses = Kills(), []
    for code, step, lived_s in [(137, 7, 1), *[(137, 7, 1)] * 8, (137, 8, 1), (1, 8, 1), *[(137, None, 1)] * 3, (137, None, 60)]:
        kills = kills.after(contract.killed(code), step, lived_s)
        pauses.append(kills.pause_s)
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 30, 30, 0, 0, 0, 1, 2, 0]
    assert Kills().after(True, 0, 1).after(True, 0, 1).after(True, 0, 1) == Kills(2, 0), "step 0 is a step"


def test_a_failure_before_the_first_step_names_no_step():
    assert judged(a_failure(step=None)) == Restart(
        a_history((NOW, 20, None)), 1, "rank 1 on worker 1 raised ValueError; restart 1 of 10"
    )


def test_the_job_stops_when_the_limit_is_used_up():
    before = [(NOW - 3, 20, None), (NOW - 2, 20, None)]
    assert judged(a_kill(), *before, policy=a_policy(limit=2)) == Stop(
        "rank 1 on worker 1 was killed by SIGKILL at step 40; restarts.limit (2 within 1h without a new checkpoint) is used up",
        137,
        contract.End.LIMIT,
    )


def test_a_limit_of_zero_stops_at_the_first_failure():
    assert judged(a_failure(3), policy=a_policy(limit=0, window=timedelta(minutes=90))) == Stop(
        "rank 1 on worker 1 raised ValueError at step 40; restarts.limit (0 within 1h30m without a new checkpoint) is used up",
        3,
        contract.End.LIMIT,
    )


def test_a_new_checkpoint_refunds_the_failures_before_it():
    before = [(NOW - 3, 20, None), (NOW - 2, 20, None)]
    assert judged(a_kill(), *before, committed=21, policy=a_policy(limit=2)) == Restart(
        a_history(*before, (NOW, 21, None)),
        1,
        "rank 1 on worker 1 was killed by SIGKILL at step 40; restart 1 of 2",
    )


def test_failures_outside_the_window_are_forgiven():
    before = [(NOW - 3601, 20, None), (NOW - 3599, 20, None)]
    assert judged(a_kill(), *before, policy=a_policy(limit=2)) == Restart(
        a_history(before[1], (NOW, 20, None)), 2, "rank 1 on worker 1 was killed by SIGKILL at step 40; restart 2 of 2"
    )


def test_a_job_that_may_fail_a_million_times_keeps_what_matters():
    history: History = ()
    for n in range(3000):
        verdict = judge(history, a_kill() if n % 3 else a_failure(step=n), n, 60.0 * n, a_policy(10**6))
        assert isinstance(verdict, Restart)
        history = verdict.history
    assert len(history) <= 60 + 3, "its status would grow too large to be written"


def test_an_interruption_costs_nothing():
    failure = a_failure(75, reason="worker 1 was told to leave")
    assert judged(failure, (NOW - 5, 20, 40), policy=a_policy(limit=1)) == Restart(
        a_history((NOW - 5, 20, 40)), 1, "worker 1 was told to leave at step 40; interruptions do not count", counted=False
    )


def test_a_failure_that_is_marked_as_not_counted_costs_nothing():
    assert judged(a_failure(counted=False), policy=a_policy(limit=0)) == Restart(
        (), 0, "rank 1 on worker 1 raised ValueError at step 40; interruptions do not count", counted=False
    )


def test_a_wrong_configuration_stops_at_once():
    assert judged(a_failure(78, reason="worker 1: no such file: train.py", step=None)) == Stop(
        "worker 1: no such file: train.py; a restart would not help",
        78,
        contract.End.MISCONFIGURED,
    )


def test_a_step_that_raises_three_times_stops_the_job():
    assert judged(a_failure(), (NOW - 9, 20, 40), (NOW - 5, 20, 40)) == Stop(
        "rank 1 on worker 1 raised ValueError at step 40; this step has failed 3 times in a row", 1, contract.End.NO_PROGRESS
    )


def test_a_script_that_reports_no_steps_and_fails_soon_three_times_is_not_said_to_fail_at_step_0():
    assert judged(a_failure(step=0), (NOW - 9, 0, 0), (NOW - 5, 0, 0)) == Stop(
        "rank 1 on worker 1 raised ValueError; it has failed soon after its start 3 times in a row", 1, contract.End.NO_PROGRESS
    )


def test_neither_age_nor_a_checkpoint_before_it_saves_a_step_that_always_raises():
    assert judged(a_failure(), (NOW - 9000, 20, 40), (NOW - 5000, 30, 40), committed=40) == Stop(
        "rank 1 on worker 1 raised ValueError at step 40; this step has failed 3 times in a row", 1, contract.End.NO_PROGRESS
    )


def test_errors_at_different_steps_are_only_counted():
    assert judged(a_failure(), (NOW - 9, 20, 40), (NOW - 5, 20, 39)) == Restart(
        a_history((NOW - 9, 20, 40), (NOW - 5, 20, 39), (NOW, 20, 40)),
        3,
        "rank 1 on worker 1 raised ValueError at step 40; restart 3 of 10",
    )


def test_kills_say_nothing_of_the_step():
    assert judged(a_kill(), (NOW - 9, 20, 40), (NOW - 5, 20, 40)) == Restart(
        a_history((NOW - 9, 20, 40), (NOW - 5, 20, 40), (NOW, 20, None)),
        3,
        "rank 1 on worker 1 was killed by SIGKILL at step 40; restart 3 of 10",
    )


def a_hang(step=40):
    return a_failure(137, reason="rank 1 on worker 1 hung: no progress for 750 s after step 40", step=step, hung=True)


def test_a_step_that_hangs_three_times_stops_the_job():
    assert judged(a_hang(), (NOW - 1600, 20, 40)) == Restart(
        a_history((NOW - 1600, 20, 40), (NOW, 20, 40)),
        2,
        "rank 1 on worker 1 hung: no progress for 750 s after step 40; restart 2 of 10",
    )
    assert judged(a_hang(), (NOW - 5400, 20, 40), (NOW - 1600, 20, 40)) == Stop(
        "rank 1 on worker 1 hung: no progress for 750 s after step 40; it has hung here 3 times in a row",
        137,
        contract.End.NO_PROGRESS,
    )


def test_hangs_at_different_steps_are_only_counted():
    assert judged(a_hang(), (NOW - 5400, 20, 40), (NOW - 1600, 20, 39)).number == 2


def test_an_error_of_the_script_on_every_rank_before_the_first_step_stops_the_job():
    first, other = a_failure(step=0, early="ImportError"), replace(a_failure(step=0, early="ImportError"), worker=0)
    assert failures.raised_everywhere(first, [Pending(False, first), Pending(False, other)], [0, 1])
    assert judge((), first, 0, NOW, a_policy(), everywhere=True) == Stop(
        "rank 1 on worker 1 raised ValueError; every rank raises it before the first step, a restart would not help",
        78,
        contract.End.MISCONFIGURED,
    )


def test_a_script_that_does_not_take_its_arguments_is_started_once():
    first = replace(a_failure(step=0, early="SystemExit"), reason="rank 0 on worker 0 exited with code 2", code=2)
    assert judge((), first, 0, NOW, a_policy(), everywhere=True) == Stop(
        "rank 0 on worker 0 exited with code 2; every rank does so before the first step, a restart would not help",
        78,
        contract.End.MISCONFIGURED,
    )


def test_an_error_that_not_every_worker_raised_before_its_first_step_is_tried_again():
    first = a_failure(step=0, early="ImportError")
    ok, echo = (
        replace(a_failure(early=""), worker=0),
        replace(a_failure(early="ImportError"), worker=0),
    )
    assert not failures.raised_everywhere(first, [Pending(False, first)], [0, 1])
    assert not failures.raised_everywhere(first, [Pending(False, first), Pending(False, ok)], [0, 1])
    assert not failures.raised_everywhere(first, [Pending(False, first), Pending(True, echo)], [0, 1])
    assert not failures.raised_everywhere(ok, [Pending(False, ok)], [0])


def test_a_kill_between_errors_does_not_hide_the_step():
    assert judged(a_failure(), (NOW - 9, 20, 40), (NOW - 7, 20, None), (NOW - 5, 20, 40)) == Stop(
        "rank 1 on worker 1 raised ValueError at step 40; this step has failed 3 times in a row", 1, contract.End.NO_PROGRESS
    )


def test_a_clock_that_went_back_does_not_make_failures_last_longer():
    assert judged(a_kill(), (NOW + 86_400, 20, None)) == Restart(
        a_history((NOW, 20, None), (NOW, 20, None)), 2, "rank 1 on worker 1 was killed by SIGKILL at step 40; restart 2 of 10"
    )


FAILURES = st.lists(
    st.tuples(st.sampled_from([1, 3, 75, 137, 143]), st.none() | st.integers(0, 50), st.integers(0, 3), st.integers(-4000, 4000))
)


@given(failures=FAILURES, limit=st.integers(0, 4))
def test_a_job_is_restarted_at_most_limit_times_without_progress(failures, limit):
    policy, history, now, committed = a_policy(limit), (), NOW, 0
    without_progress: list[float] = []
    for code, step, progress, seconds in failures:
        now += seconds
        if progress:
            committed += progress
            without_progress = []
        verdict = judge(history, a_failure(code, step=step), committed, now, policy)
        if code == 75:
            assert isinstance(verdict, Restart)
            assert not verdict.counted
        if isinstance(verdict, Stop):
            assert verdict.code == code
            break
        history = verdict.history
        assert len(history) <= max(limit, restart_budget.FULL_DISK)
        without_progress = [min(time, now) for time in without_progress if now - time < 3600]
        if verdict.counted:
            without_progress.append(now)
            assert verdict.number == len(without_progress) <= limit


@given(limit=st.integers(1, 20), extra=st.integers(0, 5))
def test_a_job_that_advances_between_failures_runs_for_ever(limit, extra):
    history: History = ()
    for step in range(limit + extra + 1):
        verdict = judge(history, a_failure(step=step), step, NOW + step, a_policy(limit))
        assert isinstance(verdict, Restart)
        assert verdict.number == 1
        history = verdict.history
