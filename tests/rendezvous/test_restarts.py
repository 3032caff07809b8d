"""Restarts: what a job survives, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.job import contract
from outlast.job.contract import End, FailureCause
from outlast.job.failure import Failure
from outlast.rendezvous import restart_budget
from outlast.rendezvous import root_cause as failures
from outlast.rendezvous.restart_budget import History, Kills, Policy, Record, Restart, Stop, judge
from outlast.rendezvous.root_cause import Pending

NOW = 10_000.0
KILLED, RAISED = "rank 1 on worker 1 was killed by SIGKILL", "rank 1 on worker 1 raised ValueError"
HUNG = "rank 1 on worker 1 hung: no progress for 750 s after step 40"


def a_failure(code=1, *, reason=RAISED, step=40, **fields):
    return Failure(worker=1, rank=1, code=code, reason=reason, step=step, **fields)


def a_kill():
    return a_failure(137, reason=KILLED)


def a_hang():
    return a_failure(137, reason=HUNG, hung=True)


def a_policy(limit=10, window=timedelta(hours=1)):
    return Policy(limit, window)


def a_history(*failures):
    """Their times are seconds from now."""
    return tuple(Record(NOW + seconds, *others) for seconds, *others in failures)


def failing(failure, *failures, committed=20, policy=None):
    """After these failures. The arguments of `judge`."""
    return a_history(*failures), failure, committed, NOW, policy or a_policy()


def judged(*failures, **how):
    return judge(*failing(*failures, **how))


SITUATIONS: dict[str, tuple[tuple[Any, ...], Restart | Stop]] = {
    "a failure costs one restart": (
        failing(a_kill()),
        Restart(a_history((0, 20, None)), 1, f"{KILLED} at step 40; restart 1 of 10"),
    ),
    "failures without progress add up": (
        failing(a_kill(), (-60, 20, None)),
        Restart(a_history((-60, 20, None), (0, 20, None)), 2, f"{KILLED} at step 40; restart 2 of 10"),
    ),
    "a failure before the first step names no step": (
        failing(a_failure(step=None)),
        Restart(a_history((0, 20, None)), 1, f"{RAISED}; restart 1 of 10"),
    ),
    "the job stops when the limit is used up": (
        failing(a_kill(), (-3, 20, None), (-2, 20, None), policy=a_policy(limit=2)),
        Stop(f"{KILLED} at step 40; restarts.limit (2 within 1h without a new checkpoint) is used up", 137, End.LIMIT),
    ),
    "a limit of zero stops at the first failure": (
        failing(a_failure(3), policy=a_policy(limit=0, window=timedelta(minutes=90))),
        Stop(f"{RAISED} at step 40; restarts.limit (0 within 1h30m without a new checkpoint) is used up", 3, End.LIMIT),
    ),
    "a new checkpoint refunds the failures before it": (
        failing(a_kill(), (-3, 20, None), (-2, 20, None), committed=21, policy=a_policy(limit=2)),
        Restart(a_history((-3, 20, None), (-2, 20, None), (0, 21, None)), 1, f"{KILLED} at step 40; restart 1 of 2"),
    ),
    "failures outside the window are forgiven": (
        failing(a_kill(), (-3601, 20, None), (-3599, 20, None), policy=a_policy(limit=2)),
        Restart(a_history((-3599, 20, None), (0, 20, None)), 2, f"{KILLED} at step 40; restart 2 of 2"),
    ),
    "an interruption costs nothing": (
        failing(a_failure(75, reason="worker 1 was told to leave"), (-5, 20, 40), policy=a_policy(limit=1)),
        Restart(a_history((-5, 20, 40)), 1, "worker 1 was told to leave at step 40; interruptions do not count", counted=False),
    ),
    "a failure that is marked as not counted costs nothing": (
        failing(a_failure(counted=False), policy=a_policy(limit=0)),
        Restart((), 0, f"{RAISED} at step 40; interruptions do not count", counted=False),
    ),
    "a wrong configuration stops at once": (
        failing(a_failure(78, reason="worker 1: no such file: train.py", step=None)),
        Stop("worker 1: no such file: train.py; a restart would not help", 78, End.MISCONFIGURED),
    ),
    "a step that raises three times stops the job": (
        failing(a_failure(), (-9, 20, 40), (-5, 20, 40)),
        Stop(f"{RAISED} at step 40; this step has failed 3 times in a row", 1, End.NO_PROGRESS),
    ),
    "a script that reports no steps and fails soon three times is not said to fail at step 0": (
        failing(a_failure(step=0), (-9, 0, 0), (-5, 0, 0)),
        Stop(f"{RAISED}; it has failed soon after its start 3 times in a row", 1, End.NO_PROGRESS),
    ),
    "neither age nor a checkpoint before it saves a step that always raises": (
        failing(a_failure(), (-9000, 20, 40), (-5000, 30, 40), committed=40),
        Stop(f"{RAISED} at step 40; this step has failed 3 times in a row", 1, End.NO_PROGRESS),
    ),
    "errors at different steps are only counted": (
        failing(a_failure(), (-9, 20, 40), (-5, 20, 39)),
        Restart(a_history((-9, 20, 40), (-5, 20, 39), (0, 20, 40)), 3, f"{RAISED} at step 40; restart 3 of 10"),
    ),
    "kills say nothing of the step": (
        failing(a_kill(), (-9, 20, 40), (-5, 20, 40)),
        Restart(a_history((-9, 20, 40), (-5, 20, 40), (0, 20, None)), 3, f"{KILLED} at step 40; restart 3 of 10"),
    ),
    "a kill between errors does not hide the step": (
        failing(a_failure(), (-9, 20, 40), (-7, 20, None), (-5, 20, 40)),
        Stop(f"{RAISED} at step 40; this step has failed 3 times in a row", 1, End.NO_PROGRESS),
    ),
    "a clock that went back does not make failures last longer": (
        failing(a_kill(), (86_400, 20, None)),
        Restart(a_history((0, 20, None), (0, 20, None)), 2, f"{KILLED} at step 40; restart 2 of 10"),
    ),
    "a step that hangs is tried again": (
        failing(a_hang(), (-1600, 20, 40)),
        Restart(a_history((-1600, 20, 40), (0, 20, 40)), 2, f"{HUNG}; restart 2 of 10"),
    ),
    "a step that hangs three times stops the job": (
        failing(a_hang(), (-5400, 20, 40), (-1600, 20, 40)),
        Stop(f"{HUNG}; it has hung here 3 times in a row", 137, End.NO_PROGRESS),
    ),
    "hangs at different steps are only counted": (
        failing(a_hang(), (-3000, 20, 40), (-1600, 20, 39)),
        Restart(a_history((-3000, 20, 40), (-1600, 20, 39), (0, 20, 40)), 3, f"{HUNG}; restart 3 of 10"),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_is_judged_in_a_situation(situation):
    failure, verdict = SITUATIONS[situation]
    assert judge(*failure) == verdict


def test_a_step_that_runs_out_of_memory_three_times_in_a_row_ends_the_job_like_one_that_raises():
    starved = replace(a_kill(), cause=FailureCause.OUT_OF_MEMORY, reason="rank 1 on worker 1 was killed")
    once = judged(starved)
    assert once == Restart(a_history((0, 20, 40)), 1, "rank 1 on worker 1 was killed; restart 1 of 10")
    again = "it has run out of memory at step 40 3 times in a row"
    assert judged(starved, (0, 20, 40), (0, 20, 40)) == Stop(f"rank 1 on worker 1 was killed; {again}", 137, End.NO_PROGRESS)
    assert isinstance(judged(starved, (0, 20, 39), (0, 20, 40)), Restart)
    assert isinstance(judged(a_kill(), (0, 20, 40), (0, 20, 40)), Restart), "a kill says nothing of its step"
    full = a_failure(cause=FailureCause.DISK_FULL)
    assert isinstance(judged(full, *[(0, 20, 40)] * 8, policy=a_policy(limit=99)), Restart), "somebody may make room"
    assert isinstance(judged(full, *[(0, 20, 40)] * 9, policy=a_policy(limit=99)), Stop)


def test_processes_that_are_killed_again_and_again_without_progress_wait_ever_longer():
    kills, pauses = Kills(), []
    for code, step, lived_s in [(137, 7, 1), *[(137, 7, 1)] * 8, (137, 8, 1), (1, 8, 1), *[(137, None, 1)] * 3, (137, None, 60)]:
        kills = kills.after(contract.killed(code), step, lived_s)
        pauses.append(kills.pause_s)
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 30, 30, 0, 0, 0, 1, 2, 0]
    assert Kills().after(True, 0, 1).after(True, 0, 1).after(True, 0, 1) == Kills(2, 0), "step 0 is a step"


def test_a_job_that_may_fail_a_million_times_keeps_what_matters():
    history: History = ()
    for n in range(3000):
        verdict = judge(history, a_kill() if n % 3 else a_failure(step=n), n, 60.0 * n, a_policy(10**6))
        assert isinstance(verdict, Restart)
        history = verdict.history
    assert len(history) <= 60 + 3, "its status would grow too large to be written"


@pytest.mark.parametrize(
    ("early", "code", "said"), [("ImportError", 1, "every rank raises it"), ("SystemExit", 2, "every rank does so")]
)
def test_an_error_of_the_script_on_every_rank_before_the_first_step_stops_the_job(early, code, said):
    first = a_failure(code, step=0, early=early)
    assert failures.raised_everywhere(first, [Pending(False, first), Pending(False, replace(first, worker=0))], [0, 1])
    assert judge((), first, 0, NOW, a_policy(), everywhere=True) == Stop(
        f"{RAISED}; {said} before the first step, a restart would not help", 78, End.MISCONFIGURED
    )


def test_an_error_that_not_every_worker_raised_before_its_first_step_is_tried_again():
    first = a_failure(step=0, early="ImportError")
    ok, echo = replace(first, worker=0, step=40, early=""), replace(first, worker=0, step=40)
    assert not failures.raised_everywhere(first, [Pending(False, first)], [0, 1])
    assert not failures.raised_everywhere(first, [Pending(False, first), Pending(False, ok)], [0, 1])
    assert not failures.raised_everywhere(first, [Pending(False, first), Pending(True, echo)], [0, 1])
    assert not failures.raised_everywhere(ok, [Pending(False, ok)], [0])


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
