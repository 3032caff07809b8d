"""A simulation agrees with what one can work out by hand, and its seconds and money add up."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import OutlastError
from outlast.simulation import choices, profile, traces
from outlast.simulation.profile import Profile
from outlast.simulation.run import Fleet, Job, Outcome, simulate
from outlast.simulation.traces import Trace

SECOND = Profile(fixed_s=0.0, shared_s=2.0, planned_s=5.0, failure_s=10.0, stall_s=1.0, snapshot_every=4)
"""A step takes one second on two workers."""
ALWAYS = Trace(((0.0, 99),), 1e6)


def a_fleet(spot: int = 2, on_demand: int = 0, **fields: float) -> Fleet:
    return Fleet(spot, on_demand, **{"spot_price": 1.0, "on_demand_price": 3.0, "boot_s": 60.0, "notice_s": 0.0, **fields})


def a_job(steps: int = 100, sizes: tuple[int, ...] = (1, 2), every_s: float = 1000.0, **fields: float) -> Job:
    return Job(steps, sizes, every_s, **fields)


def seconds(outcome: Outcome) -> tuple[float, ...]:
    return outcome.training_s, outcome.again_s, outcome.changing_s, outcome.saving_s, outcome.waiting_s


def test_an_undisturbed_run_takes_its_steps_its_start_and_its_checkpoints():
    outcome = simulate(a_job(every_s=40.0), SECOND, a_fleet(), ALWAYS)
    assert seconds(outcome) == (100, 0, 5, 2, 60), "two checkpoints: 40 s after the start, and 40 s later"
    assert (outcome.ended, outcome.wall_s, outcome.cost) == (True, 167, 2 * 167 / 3600)
    assert outcome.timeline == ((0.0, 0, 0), (60.0, 2, 0))


def test_a_loss_without_warning_goes_back_to_a_snapshot_or_to_the_checkpoint():
    lost = Trace(((0.0, 2), (115.5, 1)), 1e6)  # training began at 65: 50.5 steps are done
    kept = simulate(a_job(), SECOND, a_fleet(), lost)
    assert seconds(kept) == (48 + 2 * 52, 2.5, 5 + 10, 0, 60), "snapshots are taken every 4 steps; one worker takes twice as long"
    assert (kept.reclaims, kept.losses) == (1, 1)
    back = simulate(a_job(replicas=0), SECOND, a_fleet(), lost)
    assert seconds(back) == (2 * 100, 50.5, 15, 0, 60), "nothing was committed"
    told = simulate(a_job(), SECOND, a_fleet(notice_s=120.0), lost)
    assert seconds(told) == (50.5 + 2 * 49.5, 0, 10, 0, 60)
    assert told.losses == 0
    assert told.cost == pytest.approx((2 * 115.5 + 120 + told.wall_s - 115.5) / 3600), "paid until it was gone"


def test_machines_on_demand_fill_what_spot_lacks_and_stay():
    taken = Trace(((0.0, 2), (100.0, 0), (200.0, 2)), 1e6)
    outcome = simulate(a_job(1000), SECOND, a_fleet(2, 2), taken)
    assert outcome.timeline == ((0.0, 0, 0), (60.0, 2, 0), (100.0, 0, 0), (160.0, 0, 2))
    assert (outcome.again_s, outcome.waiting_s) == (35, 60 + 60 - 10), "nobody survived; what a loss takes passes meanwhile"
    assert outcome.cost == pytest.approx((2 * 100 + 3 * 2 * (outcome.wall_s - 100)) / 3600)


def test_a_job_that_never_gets_enough_machines_does_not_end():
    assert not simulate(a_job(sizes=(3,)), SECOND, a_fleet(2), ALWAYS).ended
    assert not simulate(a_job(), SECOND, a_fleet(2), Trace(((0.0, 0),), 1e7)).ended


@given(st.randoms(use_true_random=False), st.integers(0, 4), st.integers(0, 2), st.sampled_from([0.0, 120.0]), st.integers(0, 2))
def test_time_and_machines_add_up_whatever_happens(rng: random.Random, spot: int, on_demand: int, notice_s: float, replicas: int):
    trace = traces.made(spot, 6.0, 300.0, length_s=20_000.0, rng=rng)
    job = a_job(1000, (1, 2, 4), 150.0, replicas=replicas)
    outcome = simulate(job, SECOND, a_fleet(spot, on_demand, notice_s=notice_s), trace)
    assert outcome.ended == (spot + on_demand > 0)
    assert math.isclose(sum(seconds(outcome)), outcome.wall_s, rel_tol=1e-9)
    assert min(seconds(outcome)) >= -1e-6
    assert outcome.ended <= (outcome.training_s >= 1000 * SECOND.step_s(4) - 1e-6)
    assert all(ready <= spot and more <= on_demand for _, ready, more in outcome.timeline)
    assert outcome.losses <= outcome.reclaims
    assert notice_s == 0 or outcome.again_s == 0


def test_a_made_trace_has_the_machines_and_the_rate_that_it_was_asked_for():
    trace = traces.made(10, 0.5, 1800.0, length_s=3600.0 * 5000, rng=random.Random(1))
    ends = [*[at for at, _ in trace.changes[1:]], trace.length_s]
    held = sum(available * (end - at) for (at, available), end in zip(trace.changes, ends, strict=True)) / trace.length_s
    assert held == pytest.approx(8, rel=0.02), "there for 2 h, away for half an hour"
    assert {available for _, available in trace.changes} <= set(range(11))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("time,machines\n0,1\n", "t.csv needs a first line with the columns seconds and available, such as `seconds,available`"),
        ("seconds,available\n0,1\n", "t.csv needs two lines at least: the machines at the start, and when the trace ends"),
        ("seconds,available\n0,1\nnow,2\n", "t.csv, line 3: now,2 must be a time in seconds and a whole number of machines"),
        ("seconds,available\n5,1\n5,2\n", "t.csv, line 3: times must grow, and neither times nor machines may be negative"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(text: str, problem: str):
    with pytest.raises(OutlastError) as refused:
        traces.read(text, "t.csv")
    assert str(refused.value).startswith(problem)
    assert traces.read("seconds,available\n10,1\n20,2\n40,0\n", "t.csv") == Trace(((0.0, 1), (10.0, 2)), 30.0)


def a_report(workers: int, step: float, **fields: object) -> dict[str, object]:
    return json.loads(json.dumps({"name": "j", "workers": [workers], "step_median_s": step, **fields}))


def test_a_profile_is_measured_from_reports():
    lost = {"detection_s": 1.0, "reforming_s": 2.0, "restoring_s": 0.5, "again_s": 9.0}
    incidents = [{"kind": "failure", "lost": lost}, {"kind": "change", "lost": {**lost, "detection_s": 0.0}}, {"kind": "save"}]
    one = a_report(2, 0.6, incidents=incidents, saves=4, seconds={"checkpoint": 2.0}, snapshots={"every": 3})
    found = profile.measured([one, a_report(4, 0.4)])
    assert (found.fixed_s, found.shared_s) == (pytest.approx(0.2), pytest.approx(0.8))
    assert (found.planned_s, found.failure_s, found.stall_s, found.snapshot_every, found.assumed) == (2.5, 3.5, 0.5, 3, ())
    alone = profile.measured([a_report(2, 0.6)])
    assert (alone.fixed_s, alone.shared_s) == (0.0, 1.2)
    assert len(alone.assumed) == 4, "said, since nobody has measured it"
    assert profile.measured([a_report(1, 0.4), a_report(2, 0.5)]).step_s(9) == pytest.approx(0.45), "more workers do not help"
    with pytest.raises(OutlastError, match="has no steps"):
        profile.measured([{"name": "j", "workers": [2]}])


def test_the_cheapest_and_the_fastest_setting_are_found():
    given = choices.Choice("given", a_fleet(4, 0), a_job(2000, (1, 2, 3, 4), 100.0, replicas=0))
    lossy = [traces.made(4, 3.0, 600.0, length_s=1e6, rng=random.Random(seed)) for seed in range(3)]
    results = [choices.played(each, SECOND, lossy) for each in choices.settings(given)]
    asked, cheap, fast = choices.played(given, SECOND, lossy), choices.cheapest(results), choices.fastest(results)
    assert cheap
    assert fast
    assert fast.wall_s <= asked.wall_s <= max(each.wall_s for each in results)
    assert cheap.cost <= asked.cost
    assert fast.choice.job.sizes[-1] == 4, "all machines that there are"
    assert [each.name for each in choices.fleets(choices.Choice("given", a_fleet(2, 1), given.job))] == [
        "given",
        "spot only",
        "on-demand only",
    ]
