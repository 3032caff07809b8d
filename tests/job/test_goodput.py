"""Where the time goes: the account of `report.goodput`, and the report made of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounts import KILLED, Story, training
from outlast.job.report import goodput, incidents, ledger_events, printed, timeline
from outlast.job.report.incidents import Incident, Lost
from outlast.job.report.steps import Bucket


def spent(account: goodput.Goodput) -> dict[str, float]:
    """Seconds of the buckets that took any."""
    return {bucket.value: seconds for bucket, seconds in account.seconds.items() if seconds}


def test_an_undisturbed_run_trains_all_the_time_but_for_its_start_and_end():
    account = training().steps(10).say("scaled", replicas=2).finished(0.5).account()
    assert spent(account) == {"queue": 1, "startup": 2.5, "training": 10}
    assert account.wall_s == 13.5
    assert account.goodput == pytest.approx(10 / 13.5)
    assert (account.state, account.worlds, account.steps_kept, account.steps_replayed) == ("Succeeded", 1, 10, 0)
    assert printed.counts(account)["worlds"] == "1"
    assert (account.step_median_s, account.step_mean_s, account.failures, account.restarts) == (1, 1, 0, 0)
    assert account.incidents == ()
    assert [(s.start, s.end, s.bucket.value) for s in account.segments] == [
        (0, 1, "queue"),
        (1, 3, "startup"),
        (3, 13, "training"),
        (13, 13.5, "startup"),
    ]


def test_steps_after_the_restored_one_were_lost_with_the_step_under_way():
    story = training().steps(4).save(0.1, 0.2).steps(3).failure(0.5)
    story.world(0.25).session(1).restored(4, after=0.5).steps(5).finished()
    account = story.account()
    # the save stalls 0.1 s; training goes on while it becomes durable
    recovery = {"replayed": 3.5 + 0.2, "rendezvous": 0.25, "restore": 0.5}
    assert spent(account) == {"queue": 1, "startup": 3, "training": 9, "checkpoint": 0.1, **recovery}
    assert (account.steps_kept, account.steps_replayed) == (9, 3)
    assert (account.worlds, account.failures, account.restarts, account.saves) == (2, 1, 1, 1)
    assert printed.counts(account)["worlds"] == "2 (1 failure, 1 restart)"
    lost = Lost(500_000, 1_250_000, 500_000, 3_200_000, up_to=True)
    assert account.incidents == (Incident(10.8, "failure", KILLED, 1, 1, pytest.approx(2.75), 3, lost=lost, cause="killed"),)


def test_what_the_others_die_of_when_a_worker_is_lost_is_not_another_incident():
    story = training().steps(2)
    story.say("called", generation=2, reason="lost worker 1", planned=False)
    story.failure().say("failure", 0.1, generation=1, worker=0, rank=0, code=1, reason="rank 0 raised", counted=False)
    story.say("exited", 0.1, worker=0, code=1, reason="", interrupted=False).world(0.3).session().restored().steps(1)
    account = story.account()
    assert [(i.kind, i.text, i.worker, i.recovery_s) for i in account.incidents] == [("failure", KILLED, 1, 1.5)]
    assert spent(account)["rendezvous"] == 0.5
    assert (account.failures, account.restarts) == (1, 1)


def test_a_world_that_fails_before_its_first_step_prolongs_the_same_recovery():
    story = training().steps(2).failure().world(1).session(1).failure(1, worker=0, reason="again")
    account = story.world(1).session(1).restored(0).steps(2).account()
    assert [(i.text, i.recovery_s, i.replayed) for i in account.incidents] == [(KILLED, 6, 2), ("again", 3, 0)]
    assert spent(account) == {"queue": 1, "startup": 2 + 2 + 1, "rendezvous": 2, "replayed": 2, "training": 2}
    assert account.restarts == 2


def test_a_planned_change_loses_no_step():
    story = training().steps(3).say("scaled", replicas=3).say("called", generation=2, reason="scale to 3", planned=True).steps(1)
    story.save(0.1, 0.4).say("interrupted", 0.1, step=4, reason="saved step 4")
    story.say("exited", 0.2, worker=0, code=75, interrupted=True).world(0.3, (0, 1, 2)).session(1).restored(4, 0.5)
    account = story.steps(6).finished().account()
    # leaving waits until the save is durable: all of it is the checkpoint's
    assert spent(account) == {"queue": 1, "startup": 3, "training": 10, "checkpoint": 0.6, "rendezvous": 0.5, "restore": 0.5}
    assert (account.steps_kept, account.steps_replayed) == (10, 0)
    assert (account.interruptions, account.failures, account.restarts) == (1, 0, 0)
    ours = {"lost": Lost(reforming_us=1_500_000, restoring_us=500_000), "cause": "interruption"}
    said = "scale to 3; saved step 4"
    assert account.incidents == (Incident(7.6, "interruption", said, None, 1, pytest.approx(3.0), 0, **ours),)


@pytest.mark.parametrize(
    ("kind", "fields", "cause"),
    [
        ("failure", {"code": 137}, "killed"),
        ("failure", {"code": 137, "cause": "oom"}, "oom"),
        ("failure", {"code": 1, "cause": "disk"}, "disk"),
        ("failure", {"code": 1}, "error"),
        ("failure", {"code": 143, "counted": False}, "interruption"),
        ("attempt", {"attempt": 1, "code": 1, "cause": "oom"}, "oom"),
        ("hang", {"silent_s": 0.5, "rank": 1}, "hang"),
        ("called", {"generation": 2, "planned": False}, "lost"),
        ("interrupted", {"step": 3}, "interruption"),
        ("unheard", {"workers": [1]}, "lost"),
    ],
)
def test_lost_training_time_has_one_of_few_causes(kind: str, fields: dict[str, Any], cause: str):
    story = training().steps(3)
    story.say(kind, 0.25, **{"generation": 1, "worker": 1, "reason": "so it was", **fields})
    story.say("called", generation=2, reason="lost worker 1", planned=False).world(0.25).session().restored(3)
    seconds = incidents.seconds_by_cause(story.account().incidents)
    assert set(seconds) == set(incidents.CAUSES)
    assert sum(seconds.values()) == 0, "it is counted after recovery, since a counter must not fall"
    seconds = incidents.seconds_by_cause(story.steps(2).account().incidents)
    assert [name for name, lost in seconds.items() if lost] == [cause]


def test_a_hang_begins_with_the_last_step():
    hung = "hung: stopped (SIGSTOP) for 8 s at step 3"
    story = training().steps(3).say("hang", 8, worker=1, rank=1, pid=8, silent_s=7.9, reason=hung)
    story.say("hang", worker=0, rank=0, pid=7, silent_s=7.9, reason="hung").failure(0.5, reason="rank 1 hung")
    account = story.world(0.5).session().restored(0).steps(4).account()
    assert spent(account) == {"queue": 1, "startup": 2, "replayed": 3, "hang": 8, "rendezvous": 1, "training": 4}
    assert (account.hangs, account.failures, account.restarts) == (2, 1, 1)
    assert [(i.kind, i.text, i.worker, i.recovery_s, i.replayed) for i in account.incidents] == [
        ("hang", f"rank 1 on worker 1 {hung}", 1, 2, 3)
    ]


def test_a_hang_before_the_first_step_lasts_as_long_as_the_process_was_silent():
    story = Story().submitted().world(1).session(1).say("restoring", generation=1)
    account = story.say("hang", 9, worker=0, rank=0, silent_s=6.0, reason="hung").account()
    assert spent(account) == {"queue": 1, "startup": 2, "restore": 3, "hang": 6}


def test_a_hang_that_passes_costs_the_step_its_time_and_nothing_else():
    account = training().steps(1).say("hang", 3, worker=0, rank=0, silent_s=3, reason="hung").steps(1).account()
    assert spent(account) == {"queue": 1, "startup": 2, "training": 5}


def test_time_in_which_a_job_was_suspended_is_its_own_and_does_not_count_against_goodput():
    story = training().steps(3).save(0.5).say("called", generation=2, planned=True, reason="suspended")
    story.say("interrupted", step=3, reason="saved step 3")
    story.say("called", generation=3, planned=True, suspends="Suspended", reason="suspended")  # the operator, after the workers
    story.say("exited", 1, worker=0, code=75, interrupted=True)
    story.finished(state="Suspended")
    before = story.account()
    assert (before.state, before.goodput) == ("Suspended", pytest.approx(3 / 6.5))
    story.say("resumed", 60).say("asked", 1, workers=[0, 1]).say("worker", 2, worker=0).world(1).session().restored(3).steps(1)
    account = story.account()
    expected = {"queue": 1 + 1, "pod start": 2, "startup": 2 + 1, "training": 4, "checkpoint": 0.5, "suspended": 1 + 60}
    assert spent(account) == expected
    assert account.goodput == pytest.approx(4 / (account.wall_s - 61))
    assert [(i.text, i.recovery_s) for i in account.incidents] == [("suspended; saved step 3", None)]


def test_a_job_whose_queue_takes_the_quota_back_waits_in_the_queue_again():
    story = training().steps(3).save().say("called", generation=2, planned=True, suspends="Queued", reason="evicted")
    story.say("interrupted", step=3, reason="saved step 3").finished(state="Queued")
    assert spent(story.account(now=story.at + 5)) == {"queue": 1 + 5, "startup": 2, "training": 3}
    story.say("resumed", 7).say("asked", workers=[0, 1]).say("worker", 2, worker=0).world(1).session().restored(3).steps(1)
    assert spent(story.account()) == {"queue": 1 + 7, "pod start": 2, "startup": 2 + 1, "training": 4}


def test_an_interrupted_run_that_goes_on_was_idle_in_between():
    story = training().steps(2).save().say("interrupted", step=2, reason="Ctrl-C").finished(0.5, "Interrupted")
    assert spent(story.account(now=1e6)) == {"queue": 1, "startup": 2, "training": 2, "rendezvous": 0.5}
    story.say("launcher", 100, pid=2, adopted=0).say("worker", 1, worker=0).world(1).session().restored(2).steps(2).finished()
    account = story.account()
    assert spent(account) == {"queue": 2, "startup": 3, "training": 4, "rendezvous": 0.5, "idle": 100}
    assert (account.state, account.steps_kept, account.restarts) == ("Succeeded", 4, 0)


def test_a_launcher_that_takes_over_living_workers_costs_nothing():
    account = training().steps(2).say("launcher", 0.5, pid=2, adopted=2).steps(1, 0.5).account()
    assert spent(account) == {"queue": 1, "startup": 2, "training": 3}
    assert [(i.kind, i.recovery_s) for i in account.incidents] == [("launcher", None)]


def test_a_launcher_that_died_with_its_workers_left_the_job_idle():
    story = training().steps(2).save(durable=0.25).steps(2)
    story.say("resumed", 49.5).say("launcher", 0.5, pid=2, adopted=0).say("worker", 1, worker=0)
    account = story.world(1).session().restored(2).steps(2).account()
    assert spent(account) == {"queue": 2.5, "startup": 3, "training": 4, "replayed": 2.25, "idle": 49.5}
    assert [(i.kind, i.time, i.recovery_s, i.replayed) for i in account.incidents] == [("launcher", 7.25, 53, 2)]


def test_a_script_that_reports_nothing_trains_while_it_is_in_a_world():
    story = Story().submitted().world(1).failure(10).say("worker", 0.5, worker=1).world(0.5).finished(20)
    account = story.account()
    assert spent(account) == {"queue": 1, "startup": 1, "training": 30, "rendezvous": 1}
    assert [(i.text, i.recovery_s) for i in account.incidents] == [(KILLED, 1)]
    assert (account.steps_kept, account.step_mean_s) == (0, None)
    story = Story().submitted().world(1).say("called", 5, generation=2, reason="scale to 3", planned=True)
    planned = story.world(2).finished(5).account()
    assert spent(planned) == {"queue": 1, "startup": 1, "training": 10, "rendezvous": 2}
    assert [(i.kind, i.text, i.recovery_s) for i in planned.incidents] == [("change", "scale to 3", 2)]


def test_a_script_that_reports_nothing_trains_again_once_its_members_have_repaired_a_failure():
    story = Story().submitted().world(1).say("attempt", 10, generation=1, attempt=1, worker=1, reason=KILLED)
    account = story.say("finished", 20, state="Succeeded", code=0).account()
    assert (account.seconds[Bucket.RENDEZVOUS], account.seconds[Bucket.TRAINING], account.restarts) == (0, 30, 1)
    assert [incident.recovery_s for incident in account.incidents] == [0]
    report = printed.plain(account, "job", width=160)
    assert report.startswith("job  Succeeded  32s  goodput at most 93.8 %\n")
    assert "exact with: from outlast.training import progress; progress(step, total)\n" in report


def test_processes_that_never_reach_a_step_are_start_up():
    story = Story().submitted().world(1).session(1)
    for _ in range(3):
        story.failure(1).world(1).session(1)
    assert spent(story.failure(1).finished(0.5, "Failed").account()) == {"queue": 1, "startup": 9, "rendezvous": 3.5}


def test_a_failure_outside_the_world_does_not_stop_training():
    story = training().steps(1).say("failure", 0.5, generation=0, worker=5, code=1, reason="no GPU", counted=True).steps(1, 0.5)
    account = story.account()
    assert spent(account) == {"queue": 1, "startup": 2, "training": 2}
    assert [(i.text, i.recovery_s) for i in account.incidents] == [("no GPU", None)]
    assert account.failures == 1


def test_what_a_first_step_takes_longer_than_others_is_start_up():
    account = training().steps(1, 31.0).steps(4, 1.0).account()
    assert spent(account) == {"queue": 1, "startup": 32, "training": 5}
    assert account.step_mean_s == 1
    without_restore = Story().submitted().world(1).session(1).steps(1, 31.0).steps(4, 1.0).account()
    assert spent(without_restore) == spent(account)


def test_the_time_a_step_waited_for_data_is_a_data_stall_unless_the_step_was_lost():
    story = training().steps(1, 7, waited=4).steps(2, 1).steps(2, 1.5, waited=0.5).save().steps(2, 2, waited=1).failure()
    story.world(1).session().restored(5).steps(2, 1, waited=9)
    # the first step: 4 s of data, 1.5 s as ordinary, the rest is start-up; the last ones have said more than they took
    expected = {"queue": 1, "startup": 3.5, "data stall": 7, "training": 5.5, "replayed": 4, "rendezvous": 1}
    assert spent(story.account()) == expected
    assert "  data stall             7.00s" in printed.plain(story.account())
    half = training().say("step", 1, generation=1, step=1).say("step", 4, generation=1, step=5, steps=4, waited_s=2.0)
    half.failure().world(1).session().restored(3).say("step", 1, generation=2, step=4)
    assert spent(half.account()) == {"queue": 1, "startup": 2, "training": 3, "data stall": 1, "replayed": 2, "rendezvous": 1}


def test_a_save_in_the_middle_of_a_step_takes_only_its_stall_from_it():
    story = training().steps(4).say("saving", 0.25, step=4).say("staged", 0.5, step=4, stall_s=0.5).steps(1, 0.25)
    assert spent(story.account()) == {"queue": 1, "startup": 2, "training": 4.5, "checkpoint": 0.5}


def test_after_the_last_step_the_run_waits_for_its_save_and_leaves():
    story = training().steps(2).say("saving", step=2).say("staged", 0.5, step=2).say("committed", 2, step=2).finished(1)
    assert spent(story.account()) == {"queue": 1, "startup": 3, "training": 2, "checkpoint": 2.5}


def test_a_failed_save_costs_its_stall_and_is_reported():
    story = training().steps(1).say("saving", step=1).say("save_failed", 0.25, step=1, reason="no space left on device")
    story.say("staged", 0.25, step=1, stall_s=0.5).steps(1)
    account = story.account()
    assert spent(account) == {"queue": 1, "startup": 2, "training": 2, "checkpoint": 0.5}
    assert account.saves_failed == 1
    assert [(i.kind, i.text) for i in account.incidents] == [("save", "step 1 could not be saved: no space left on device")]


def test_a_running_job_is_accounted_for_until_now():
    story = training().steps(2)
    assert spent(story.account(now=5.5)) == {"queue": 1, "startup": 2, "training": 2.5}
    assert story.account(now=5.5).state is None
    assert goodput.buckets([], 7.0).wall_s == 0
    assert goodput.buckets([], 7.0).goodput == 0


def test_small_differences_between_clocks_change_small_amounts():
    story = training().steps(2)
    story.events[4]["t"] += 1.01  # the world, by a launcher whose clock is ahead of the session of its own training
    story.failure(-0.05)  # the failure, by a launcher whose clock is behind the last step
    account = story.world(0.15).session().restored(2).steps(1).say("finished", -0.02, state="Succeeded").account()
    assert spent(account) == pytest.approx({"queue": 1, "startup": 2, "training": 2.98, "rendezvous": 0.1})
    assert account.steps_kept == 3
    assert [(i.text, i.recovery_s) for i in account.incidents] == [(KILLED, pytest.approx(1.13))]


def test_steps_of_a_replaced_world_count_for_nothing():
    story = training().steps(3).failure().world().session().restored(1).steps(1)
    story.say("step", generation=1, step=4).say("restored", generation=1, step=0).say("session", generation=1, rank=0).steps(1)
    account = story.account()
    assert (account.steps_kept, account.steps_replayed) == (3, 2)
    assert spent(account) == {"queue": 1, "startup": 2, "training": 3, "replayed": 2}


def test_the_training_alone_is_enough_under_plain_torchrun():
    story = Story().session(0).restored(0, 0.5).steps(3)
    account = story.session(5).restored(2, 0.5).steps(2).account()
    assert spent(account) == {"restore": 1, "training": 4, "replayed": 1, "rendezvous": 5}
    assert (account.steps_kept, account.steps_replayed) == (4, 1)


def test_a_step_that_comes_again_without_a_word_of_a_restore_was_lost():
    story = training().steps(3).failure().world().session()
    story.step = 1
    account = story.steps(3).account()
    assert (account.steps_kept, account.steps_replayed) == (4, 2)
    assert spent(account) == {"queue": 1, "startup": 2, "training": 4, "replayed": 2}


# What failures cost


def costs(account: goodput.Goodput) -> list[tuple[object, ...]]:
    """Of every incident what it was, and its four parts in seconds."""
    return [
        (i.kind, i.text, *((us / 1e6 for us in dataclasses.astuple(i.lost)[:4]) if i.lost else ()), i.replayed)
        for i in account.incidents
    ]


def test_detection_begins_with_the_fault_where_the_ledger_has_its_moment():
    story = training().steps(4).say("chaos", 0.5, action="kill", worker=1).failure(0.25)
    account = story.world(1).session(2).restored(2, 0.5).steps(3).account()
    assert costs(account) == [("failure", KILLED, 0.25, 3, 0.5, 2.5, 2)]  # two steps again, and half of the one cut short
    (incident,) = account.incidents
    assert incident.lost
    assert not incident.lost.up_to


def test_processes_started_again_by_the_members_of_a_world_are_a_failure_of_that_world_which_is_counted_later():
    story = training().steps(4).say("attempt", 0.5, generation=1, attempt=1, worker=1, rank=1, reason=KILLED)
    story.say("attempt", generation=1, attempt=1, worker=0, rank=1, reason=KILLED).session(0.75)
    story.say("restoring", generation=1).say("restored", 0.25, generation=1, step=4, path=None, source="memory").steps(3)
    story.say("failure", generation=1, repaired=0, worker=1, rank=1, code=137, reason=KILLED, counted=True).steps(1)
    account = story.account()
    assert costs(account) == [("failure", KILLED, 0.5, 0.75, 0.25, 0, 0)]
    assert (account.failures, account.restarts, account.worlds, account.steps_kept) == (1, 1, 1, 8)
    expected = {"queue": 1, "startup": 2, "training": 8, "replayed": 0.5, "rendezvous": 0.75, "restore": 0.25}
    assert spent(account) == expected
    shown = printed.plain(account)
    assert "… lost up to 1.50s: 0.50s detection + 0.75s re-forming + 0.25s restoring from memory\n" in shown
    again = story.failure(1, reason="the second").world(1).session().restored(8).steps(1).account()
    assert costs(again)[1:] == [("failure", "the second", 1, 1, 0, 0, 0)]
    assert "\n  lost     2 failures cost up to 3.50s of training, 1.75s each\n" in printed.plain(again)


def test_an_event_that_lacks_what_the_account_needs_is_left_out():
    story = training().steps(3)
    lacking = [{"t": story.at, "kind": kind, "source": "another version"} for kind in ALWAYS]
    typed = FIELDS.keys() - {"planned", "counted", "adopted", "interrupted", "reason", "state"}
    fields = {**dict.fromkeys(FIELDS, 1), "workers": [0], "path": "p", "suspends": "", "t": story.at, "source": "s"}
    odd = [{**fields, "kind": kind, name: {"no": "value"}} for kind in sorted(ledger_events.KINDS) for name in sorted(typed)]
    assert goodput.buckets([*story.events, *lacking, *odd], story.at) == story.account()


def test_a_silent_worker_is_noticed_when_its_peers_say_so():
    story = training().steps(3).say("unheard", 3, generation=1, workers=[1], by=0, reason="worker 0 does not hear worker 1")
    story.failure(0.5, reason="lost worker 1")
    account = story.world(0.25, (0,)).session(0.25).restored(3).steps(1).account()
    assert costs(account) == [("failure", "lost worker 1", 3, 1, 0, 0, 0)]
    heard = training().steps(1).say("unheard", 3, generation=1, workers=[1], by=0, reason="flapping").steps(2)
    assert costs(heard.account()) == [("unheard", "flapping", 0)]
    assert spent(heard.account()) == {"queue": 1, "startup": 2, "training": 6}


def test_steps_that_are_in_memory_but_not_in_the_ledger_were_not_lost():
    story = training().steps(5, 0.25).failure(0.75).world(1).session().say("restoring", generation=2)
    story.step = 7
    account = story.say("restored", 0.5, generation=2, step=7, source="peer").steps(3, 0.25).account()
    assert costs(account) == [("failure", KILLED, 0.25, 1, 0.5, 0, 0)]
    assert (account.steps_kept, account.steps_replayed) == (10, 0)
    assert spent(account) == {"queue": 1, "startup": 2, "training": 2.5, "replayed": 0.25, "rendezvous": 1, "restore": 0.5}


def test_what_snapshots_take_from_steps_is_their_own():
    story = training().say("snapshots", generation=1, every=2, step=1, copied_s=0.1, bytes=3 << 20, replicas=1, reason="1 %")
    account = story.steps(1).say("step", 1, generation=1, step=2, waited_s=0.25, copied_s=0.5).account()
    assert spent(account) == {"queue": 1, "startup": 2, "training": 1.25, "data stall": 0.25, "snapshot stall": 0.5}
    assert "\n  snapshots every 2 steps, 3.0 MiB, 1 replica\n" in printed.plain(account)


# Any ledger at all

TIMES = st.one_of(st.integers(0, 200).map(lambda n: n / 8), st.integers(0, 25).map(float))
FLAGS, COUNTS = st.booleans(), st.integers(0, 4)
FIELDS: dict[str, st.SearchStrategy[object]] = {
    **dict.fromkeys(("planned", "counted", "adopted", "interrupted"), FLAGS),
    **dict.fromkeys(("generation", "rank", "worker", "code", "silent_s", "waited_s", "copied_s", "attempt", "repaired"), COUNTS),
    **dict.fromkeys(("every", "bytes", "replicas"), COUNTS),
    "step": st.integers(0, 12),
    "steps": st.integers(1, 4),
    "workers": st.lists(st.integers(0, 2), min_size=1, max_size=3),
    **dict.fromkeys(("state", "suspends"), st.sampled_from(["Succeeded", "Failed", "Interrupted", "Suspended", "Queued", "T"])),
    **dict.fromkeys(("reason", "path"), st.just("why")),
}
ALWAYS = {
    "called": "generation planned reason",
    "world": "generation",
    "exited": "worker code interrupted",
    "finished": "state",
    "attempt": "generation attempt reason",
    "unheard": "generation workers reason",
    "hang": "worker rank silent_s reason",
    "restored": "generation step",
    "step": "generation step",
    "snapshots": "generation every bytes replicas reason",
    "save_failed": "step reason",
    "not_copied": "step reason",
    "damaged": "path reason",
}
"""The fields that every event of a kind has; any other may be there."""


def an_event(kind: str) -> st.SearchStrategy[dict]:
    needed = {name: FIELDS[name] for name in ALWAYS.get(kind, "").split()}
    fixed = {"t": TIMES, "kind": st.just(kind), "source": st.just("s"), **needed}
    return st.fixed_dictionaries(fixed, optional={name: of for name, of in FIELDS.items() if name not in needed})


EVENTS = st.lists(st.sampled_from([*sorted(ledger_events.KINDS), "unheard-of"]).flatmap(an_event), max_size=60)


def accounted(account: goodput.Goodput) -> None:
    """What holds of every account."""
    assert all(us >= 0 for us in account.microseconds.values())
    assert sum(account.microseconds.values()) == round(account.end * 1e6) - round(account.start * 1e6)
    edges = [account.start, *(segment.end for segment in account.segments)]
    assert [segment.start for segment in account.segments] == edges[:-1]
    assert edges[-1] == account.end
    assert all(segment.start < segment.end for segment in account.segments)
    assert all(a.bucket is not b.bucket for a, b in zip(account.segments, account.segments[1:], strict=False))
    assert 0 <= account.goodput <= 1
    assert account.steps_kept >= 0
    assert account.steps_replayed >= 0
    assert all(i.recovery_s is None or i.recovery_s >= 0 for i in account.incidents)
    costs = [cost for i in account.incidents if i.lost for cost in dataclasses.astuple(i.lost)[:4]]
    assert all(cost >= 0 for cost in costs)
    assert sum(costs) <= sum(account.microseconds.values())
    assert account.steps_replayed >= sum(i.replayed for i in account.incidents)


@given(EVENTS, st.floats(0, 50))
def test_any_events_sum_to_the_wall_time(events, now):
    account = goodput.buckets(events, now)
    accounted(account)
    assert printed.plain(account, "job")
    json.dumps(printed.as_json(account), allow_nan=False)


@given(EVENTS, st.floats(25, 50), st.floats(0, 50))
def test_no_bucket_shrinks_while_time_passes(events, now, longer):
    before, after = goodput.buckets(events, now), goodput.buckets(events, now + longer)
    assert all(after.microseconds[bucket] >= before.microseconds[bucket] for bucket in Bucket)


@given(EVENTS, st.randoms(use_true_random=False))
def test_the_order_of_the_lines_does_not_matter(events, rng):
    distinct = [event | {"t": i * 0.25} for i, event in enumerate(events)]
    shuffled = list(distinct)
    rng.shuffle(shuffled)
    assert goodput.buckets(shuffled, 50) == goodput.buckets(distinct, 50)


@given(EVENTS)
def test_events_that_are_reported_twice_count_once(events):
    assert goodput.buckets([event for event in events for _ in (1, 2)], 50) == goodput.buckets(events, 50)


def told_together(events: list[dict], most: int) -> list[dict]:
    """The same ledger, with up to `most` steps in one event; a save, a failure and a new world end a batch."""
    told: list[dict] = []
    for event in events:
        last = told[-1] if told else {}
        follows = event["kind"] == last.get("kind") == "step" and last["step"] == event["step"] - 1 and last.get("first") is None
        if follows and last.get("steps", 1) < most:
            waited = round(last.get("waited_s", 0) + event.get("waited_s", 0), 6)
            told[-1] = {**event, "steps": last.get("steps", 1) + 1, "waited_s": waited}
        else:
            told.append({**event, "first": True} if event["kind"] == "step" and last.get("kind") != "step" else dict(event))
    return told


def long_story(worlds: int, steps: int) -> Story:
    """World after world, each of which fails between two saves."""
    story = training()
    for _ in range(worlds):
        story.steps(steps, 0.1, waited=0.03).save(0.02, 0.05).steps(steps // 2, 0.1).failure(0.05)
        story.world(0.5).session(1).restored(story.step - steps // 2, 0.5)
    return story.steps(steps, 0.1).finished(0.5)


def test_steps_that_are_told_together_are_accounted_for_like_single_ones():
    story = long_story(3, 20)
    single = story.account()
    together = goodput.buckets(told_together(story.events, 10), story.at)
    assert together.microseconds == single.microseconds
    assert (together.steps_kept, together.steps_replayed) == (single.steps_kept, single.steps_replayed)
    assert together.step_median_s == pytest.approx(single.step_median_s)


def test_a_restore_to_the_middle_of_steps_that_were_told_together_keeps_the_first_ones():
    story = training().say("step", 1, generation=1, step=1).say("step", 4, generation=1, step=5, steps=4)
    account = story.failure().world(1).session().restored(3).say("step", 1, generation=2, step=4).account()
    assert spent(account) == {"queue": 1, "startup": 2, "training": 4, "replayed": 2, "rendezvous": 1}
    assert (account.steps_kept, account.steps_replayed) == (4, 2)


def test_a_long_run_is_accounted_for_in_bounded_memory(monkeypatch):
    story = long_story(20, 200)
    exact = story.account()
    monkeypatch.setattr(timeline, "_SPANS", 400)
    known = ledger_events.survey(ledger_events.in_order(story.events))
    fold, most = timeline.Timeline(0, known), 0
    for t, event in ledger_events.in_order(story.events):
        fold.feed(t, event)
        most = max(most, len(fold.spans), len(fold.kept))
    assert most < 900 < exact.steps_kept
    assert dataclasses.replace(story.account(), segments=()) == dataclasses.replace(exact, segments=())


MS = st.integers(1, 5000).map(lambda ms: ms / 1000)


@given(st.data())
def test_a_told_story_is_accounted_for_to_the_microsecond(data):
    """A job lives through anything that happens to jobs; the account is what was told, bucket by bucket."""
    story, truth, kept = Story(), dict.fromkeys(Bucket, 0.0), []
    each = data.draw(MS)  # every step takes as long, so that warming up is nothing
    waited = round(each * data.draw(st.sampled_from([0.0, 0.25, 1.0])), 6)

    def spend(bucket: Bucket, most: float = 5.0) -> float:
        seconds = min(most, data.draw(MS))
        truth[bucket] += seconds
        return seconds

    def start(committed: int, waiting: Bucket = Bucket.RENDEZVOUS) -> None:
        story.world(spend(waiting)).session(spend(Bucket.STARTUP)).restored(committed, spend(Bucket.RESTORE))
        while kept and kept[-1] > committed:
            kept.pop()
            truth[Bucket.TRAINING] -= each - waited
            truth[Bucket.DATA] -= waited
            truth[Bucket.REPLAYED] += each

    def pods() -> None:
        story.say("asked", spend(Bucket.QUEUE), workers=[0, 1]).say("worker", spend(Bucket.PODS), worker=0)

    story.say("submitted")
    pods()
    story.world(spend(Bucket.STARTUP)).session(spend(Bucket.STARTUP)).restored(0, spend(Bucket.RESTORE))
    story.steps(2, each, waited)
    kept += [1, 2]
    truth[Bucket.TRAINING] += 2 * (each - waited)
    truth[Bucket.DATA] += 2 * waited
    committed, left, at_first = 0, False, truth[Bucket.STARTUP] + truth[Bucket.RESTORE]
    acts = data.draw(
        st.lists(st.sampled_from(["train", "save", "kill", "hang", "delete", "resize", "suspend", "queue", "stop"]), max_size=12)
    )
    recovering = False
    for act in acts:
        left = left or (recovering and act in ("resize", "suspend", "queue", "stop"))  # to wait for a save is a loss, too
        recovering = act in ("kill", "hang", "delete", "resize") or (recovering and act != "train")
        if act == "train":
            count = data.draw(st.integers(1, 5))
            story.steps(count, each, waited)
            kept += range(story.step - count + 1, story.step + 1)
            truth[Bucket.TRAINING] += count * (each - waited)
            truth[Bucket.DATA] += count * waited
        elif act == "save":
            story.save(spend(Bucket.CHECKPOINT))
            committed = story.step
        elif act == "kill":
            story.failure(spend(Bucket.REPLAYED, most=each))
            start(committed)
        elif act == "delete":  # by force: nothing is heard of its worker, but for the call of who decides
            cut = spend(Bucket.REPLAYED, most=each)
            story.say("called", cut, generation=story.generation + 1, planned=False, reason="lost worker 1")
            start(committed)
        elif act == "hang":
            silent_s = spend(Bucket.HANG)
            story.say("hang", silent_s, worker=0, rank=0, silent_s=silent_s, reason="hung").failure(spend(Bucket.RENDEZVOUS), 0)
            start(committed)
        else:
            story.save(spend(Bucket.CHECKPOINT))
            if act in ("suspend", "queue"):
                suspends = {"suspend": "Suspended", "queue": "Queued"}[act]
                story.say("called", generation=story.generation + 1, planned=True, suspends=suspends, reason=act)
            story.say("interrupted", spend(Bucket.CHECKPOINT), step=story.step, reason=act)
            committed = story.step
            if act == "resize":
                start(committed)
            else:
                left = True
                queued, suspended = ("Queued", *[Bucket.QUEUE] * 2), ("Suspended", *[Bucket.SUSPENDED] * 2)
                interrupted = ("Interrupted", Bucket.RENDEZVOUS, Bucket.IDLE)
                state, leaves, waits = {"suspend": suspended, "queue": queued}.get(act, interrupted)
                story.finished(spend(leaves), state).say("resumed", spend(waits))
                pods()
                start(committed, waiting=Bucket.STARTUP)
    stopped = (Bucket.REPLAYED, Bucket.HANG, Bucket.RENDEZVOUS, Bucket.STARTUP, Bucket.RESTORE)
    lost = sum(truth[bucket] for bucket in stopped) - at_first
    story.finished(spend(Bucket.STARTUP))
    account = story.account()
    accounted(account)
    if acts[-1:] == ["train"] and not left:  # training has recovered from all of it
        cost = sum(incident.lost.seconds for incident in account.incidents if incident.lost)
        assert cost == pytest.approx(lost, abs=1e-6 * len(story.events))
    assert account.seconds == pytest.approx(truth, abs=1e-6 * len(story.events))
    assert account.steps_kept == len(kept)


# The report


def a_report() -> goodput.Goodput:
    story = training().steps(40, 0.5).save(0.1).steps(6, 0.5).failure(0.25)
    return story.world(0.2).session(1).restored(40, 0.3).steps(60, 0.5).finished(0.4).account()


PLAIN = """\
cifar10  Succeeded  58s  goodput 85.8 %

  training              50.00s   85.8 %  ██████████████████████████
  start-up               3.40s    5.8 %  ██
  replayed steps         3.25s    5.6 %  ██
  queue                  1.00s    1.7 %  █
  restore                0.30s    0.5 %  ▏
  rendezvous             0.20s    0.3 %  ▏
  checkpoint stall       0.10s    0.2 %  ▏

"""


def test_the_report_shows_where_the_time_went():
    report = printed.plain(a_report(), "cifar10", width=80)
    assert report.startswith(PLAIN)
    assert report.endswith(
        f"  0:26  {KILLED}\n        … lost up to 4.75s: 0.25s detection + 1.20s re-forming + 0.30s restoring\n"
        "          + 3.00s for 6 steps again\n"
    )
    assert "\n  lost     1 failure cost up to 4.75s of training\n" in report
    assert max(len(line) for line in report.splitlines()) <= 80


def test_a_long_sentence_takes_two_lines_at_most():
    report = printed.plain(training().steps(1).failure(reason="it is a long story " * 30).account(), width=80)
    assert max(len(line) for line in report.splitlines()) <= 80
    assert report.count("long story") == 6
    assert report.endswith(" …\n")


def test_many_incidents_are_cut_short():
    story = training()
    for n in range(30):
        story.steps(1).say("damaged", path=f"/out/step-{n}", reason="COMMIT is torn")
    report = printed.plain(story.account())
    assert "10 earlier incidents are in the JSON" in report
    assert report.count(" is damaged and was skipped: COMMIT is torn\n") == 20


def test_the_json_holds_the_whole_account():
    account = a_report()
    document = json.loads(json.dumps(printed.as_json(account)))
    assert document["wall_s"] == account.wall_s
    assert document["goodput"] == account.goodput
    assert document["seconds"] == {bucket.value: seconds for bucket, seconds in account.seconds.items()}
    assert (document["seconds"].keys(), document["seconds"]["replayed"]) == ({bucket.value for bucket in Bucket}, 3.25)
    assert document["incidents"][0]["text"] == KILLED
    parts = {"detection_s": 0.25, "reforming_s": 1.2, "restoring_s": 0.3, "again_s": 3.0}
    assert document["incidents"][0]["lost"] == {"seconds": 4.75, **parts, "up_to": True, "source": ""}
    assert document["lost"]["failures"] == {"count": 1, "seconds": 4.75, "up_to": True}
    assert document["segments"][0] == {"start": 0, "end": 1, "bucket": "queue"}
    assert document["steps_kept"] == 100
