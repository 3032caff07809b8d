"""The agent's decisions: lifecycle and hang detection, as plain values."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.job.contract import Exit
from outlast.job.workerfiles.progress_file import Progress
from outlast.worker.agent import lifecycle
from outlast.worker.agent.lifecycle import Phase, Worker
from outlast.worker.hangs import hang_limit


def after(*events: lifecycle.Event, worker: Worker | None = None) -> tuple[Worker, tuple[lifecycle.Effect, ...]]:
    worker, effects = worker or Worker(), ()
    for event in events:
        worker, effects = lifecycle.step(worker, event)
    return worker, effects


PREPARED = tuple(lifecycle.Prepared(phase) for phase in lifecycle.PREPARATION)
TRAINING = (lifecycle.Started(), *PREPARED)


def test_a_worker_prepares_in_order_and_then_trains():
    worker, effects = after(lifecycle.Started())
    assert effects == (lifecycle.Prepare(Phase.RUN),)
    for phase, following in zip(lifecycle.PREPARATION, [*lifecycle.PREPARATION[1:], None], strict=True):
        worker, effects = lifecycle.step(worker, lifecycle.Prepared(phase))
        assert effects == ((lifecycle.Prepare(following),) if following else (lifecycle.Train(),))
    assert worker == Worker(Phase.TRAINING)


@pytest.mark.parametrize("code", [0, 1, 75, 78, 137])
def test_however_training_ends_what_is_left_is_pushed_and_the_code_is_kept(code: int):
    worker, effects = after(*TRAINING, lifecycle.Trained(code))
    assert (worker.phase, worker.code, effects) == (Phase.FLUSHING, code, (lifecycle.Flush(),))
    _, effects = lifecycle.step(worker, lifecycle.Flushed())
    assert effects == (lifecycle.Exit(code, worker.reason),)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (1, lifecycle.Exit(1, "training failed with exit code 1; the store is away")),
        (0, lifecycle.Exit(75, "training is done; the store is away")),
    ],
)
def test_a_push_that_fails_is_said_and_who_is_done_but_for_it_is_to_be_started_again(code: int, end: lifecycle.Exit):
    assert after(*TRAINING, lifecycle.Trained(code), lifecycle.Flushed("the store is away"))[1] == (end,)


@pytest.mark.parametrize("events", [TRAINING, (*TRAINING, lifecycle.Trained(0)), TRAINING[:2]])
def test_a_zombie_ends_at_once_and_is_not_started_again(events: tuple[lifecycle.Event, ...]):
    _, effects = after(*events, lifecycle.Superseded("generation 4 owns it"))
    assert effects == (lifecycle.Kill(), lifecycle.Exit(78, "generation 4 owns it"))


def test_a_worker_told_to_leave_saves_and_exits_with_75():
    told = lifecycle.Interrupted("drain", now=100.0, grace_s=20.0)
    worker, effects = after(*TRAINING, told)
    assert effects == (lifecycle.Notify("drain", 120.0),)
    _, effects = after(lifecycle.Trained(75), lifecycle.Flushed(), worker=worker)
    assert effects == (lifecycle.Exit(75, "drain"),)


def test_of_several_notices_the_earliest_time_counts():
    signal = lifecycle.Interrupted("received SIGTERM", now=100.0, grace_s=75.0)
    notice = lifecycle.Interrupted("told to leave", now=101.0, grace_s=7.0, ends_s=14.0)
    for events in [(signal, notice), (notice, signal)]:
        worker, _ = after(*TRAINING, *events)
        assert (worker.leaving, worker.leave_by, worker.gone_by) == ("told to leave", 108.0, 115.0)
    _, effects = after(*TRAINING, signal, notice)
    assert effects == (lifecycle.Notify("told to leave", 108.0),), "the training is told that it has less"
    assert after(*TRAINING, notice, signal)[1] == ()


@pytest.mark.parametrize(
    ("code", "worker", "timeout_s"),
    [
        (0, Worker(), 1800.0),
        (1, Worker(), 10.0),
        (75, Worker(leave_by=160.0), 60.0),
        (75, Worker(leave_by=90.0), 10.0),
        (75, Worker(leave_by=105.0, gone_by=120.0), 19.0),
        (75, Worker(leave_by=90.0, gone_by=99.0), 1.0),
        (0, Worker(leave_by=105.0, gone_by=120.0), 19.0),
        (1, Worker(leave_by=105.0, gone_by=1000.0), 10.0),
    ],
)
def test_the_last_upload_ends_before_the_machine_does(code: int, worker: Worker, timeout_s: float):
    assert lifecycle.flush_timeout_s(code, worker, 100.0) == timeout_s


def test_a_worker_that_finishes_while_it_is_told_to_leave_is_done():
    worker, _ = after(*TRAINING, lifecycle.Interrupted("drain", 0.0, 20.0), lifecycle.Trained(0))
    assert worker.code == Exit.DONE


def test_training_that_does_not_leave_in_time_is_ended_and_still_exits_with_75():
    worker, effects = after(*TRAINING, lifecycle.Interrupted("drain", 0.0, 20.0), lifecycle.GraceOver())
    assert effects == (lifecycle.Kill(),)
    assert after(lifecycle.Trained(137), worker=worker)[0].code == Exit.INTERRUPTED


@pytest.mark.parametrize("done", range(len(PREPARED)))
def test_told_to_leave_while_preparing_it_leaves_at_once(done: int):
    worker, effects = after(lifecycle.Started(), *PREPARED[:done], lifecycle.Interrupted("drain", 0.0, 20.0))
    assert effects == (lifecycle.Flush(),)
    assert lifecycle.step(worker, lifecycle.Flushed())[1] == (lifecycle.Exit(75, "left before training: drain"),)
    assert lifecycle.step(worker, lifecycle.Prepared(lifecycle.PREPARATION[done])) == (worker, ())


@pytest.mark.parametrize(("retry", "code"), [(True, Exit.FAILED), (False, Exit.MISCONFIGURED)])
def test_what_cannot_be_prepared_ends_the_worker_with_the_reason(retry: bool, code: int):
    worker, effects = after(
        lifecycle.Started(), lifecycle.Prepared(Phase.RUN), lifecycle.PreparationFailed(Phase.CODE, "no such script", retry)
    )
    assert effects == (lifecycle.Flush(),)
    assert lifecycle.step(worker, lifecycle.Flushed())[1] == (lifecycle.Exit(code, "no such script"),)


EVENTS = st.sampled_from(
    [
        *TRAINING,
        lifecycle.PreparationFailed(Phase.DATA, "gone", retry=True),
        lifecycle.Trained(0),
        lifecycle.Trained(1),
        lifecycle.Trained(75),
        lifecycle.Trained(137),
        lifecycle.Interrupted("drain", 0.0, 1.0),
        lifecycle.GraceOver(),
        lifecycle.Flushed(),
        lifecycle.Superseded("generation 4 owns it"),
    ]
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_a_worker_trains_and_exits_once_and_pushes_whatever_it_trained(events: list[lifecycle.Event]):
    worker, effects = Worker(), []
    for event in events:
        worker, done = lifecycle.step(worker, event)
        effects += done
    kinds = [type(effect) for effect in effects]
    assert kinds.count(lifecycle.Train) <= 1
    assert kinds.count(lifecycle.Exit) <= 1
    assert lifecycle.Exit not in kinds[:-1]
    if lifecycle.Train in kinds and lifecycle.Exit in kinds and not any(isinstance(e, lifecycle.Superseded) for e in events):
        assert lifecycle.Flush in kinds


def a_process(silent_s: float = 0.0, *, stopped: bool = False, phase: str = "train", local_rank: int = 0) -> hang_limit.Process:
    return hang_limit.Process(local_rank, Progress(generation=1, rank=local_rank, phase=phase, step=7), stopped, silent_s)


STOPPED = a_process(10.5, stopped=True, local_rank=1)
FROZEN = dataclasses.replace(a_process(10.5, local_rank=1), frozen=True)


@pytest.mark.parametrize(
    ("processes", "hangs"),
    [
        ([a_process(9.0)], []),
        ([a_process(10.5), STOPPED], [(STOPPED, "hung: stopped (SIGSTOP) for 10 s after step 7")]),
        ([a_process(1.0), FROZEN], [(FROZEN, "hung: unable to run Python for 10 s after step 7")]),
        ([a_process(11.0)], []),
        ([a_process(13.0)], [(a_process(13.0), "hung: no progress for 13 s after step 7")]),
        ([a_process(50.0), a_process(1.0, local_rank=1)], []),
    ],
    ids=[
        *("training advances", "one is stopped", "one cannot run Python", "others may be the cause", "none was the cause"),
        "a neighbour advances",
    ],
)
def test_who_hangs_with_a_limit_of_ten_seconds(processes: list[hang_limit.Process], hangs: list[object]):
    """The neighbours of a culprit are spared, and a worker without one waits a little longer for the others."""
    assert hang_limit.hung(processes, limit_s=10.0) == hangs


@pytest.mark.parametrize("phase", ["open", "restore", "first step"])
def test_before_the_first_step_there_is_more_time(phase: str):
    assert hang_limit.hung([a_process(100.0, phase=phase)], limit_s=10.0) == []
    assert hang_limit.hung([a_process(900.0, phase=phase)], limit_s=10.0) != []


def test_a_plain_script_hangs_like_any_other_unless_it_has_become_another_program():
    stuck = a_process(900.0, phase="started")
    stuck = dataclasses.replace(
        stuck, progress=dataclasses.replace(stuck.progress, step=0), where="rank 0 is in time.sleep(9) (train.py:9)"
    )
    said = "hung: no progress for 900 s: rank 0 is in time.sleep(9) (train.py:9)"
    assert hang_limit.hung([stuck], limit_s=10.0) == [(stuck, said)]
    assert hang_limit.hung([dataclasses.replace(stuck, watched=False)], limit_s=10.0) == []
    assert hang_limit.hung([a_process(900.0, phase="started", stopped=True)], limit_s=10.0) != []


@pytest.mark.parametrize(("age_s", "early"), [(1100.0, True), (1300.0, False)])
def test_a_process_hangs_early_when_it_has_stood_still_for_longer_than_it_had_moved(age_s: float, early: bool):
    assert dataclasses.replace(a_process(600.0), age_s=age_s).early is early


def test_a_worker_whose_run_has_ended_before_ends_at_once_and_pushes_nothing():
    worker, effects = after(lifecycle.Started(), lifecycle.Over(0, "run x has ended before"))
    assert (worker.phase, effects) == (Phase.ENDED, (lifecycle.Exit(0, "run x has ended before"),))
