"""The comparison of resilience: its trace, its accounting, its page."""

from __future__ import annotations

import collections
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from bench.resilience import account, page, systems, trace
from bench.resilience.account import Cost, Event, Line

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "resilience.jsonl"


# The trace


@pytest.mark.parametrize(
    ("plan", "kinds", "minutes"),
    [
        (trace.short, {"process": 1, "worker": 1, "hang": 1, "silent": 1, "notice": 1, "resize": 2}, 1.5),
        (trace.full, {"process": 10, "worker": 3, "hang": 1, "silent": 1, "notice": 1, "resize": 2}, 30),
    ],
)
def test_a_trace_has_its_faults_in_its_time(plan: Any, kinds: dict[str, int], minutes: float) -> None:
    for seed in range(50):
        found = plan(seed)
        faults = [fault for leg in found.legs for fault in leg.faults]
        assert collections.Counter(fault.kind for fault in faults) == kinds
        trained = sum(leg.steps for leg in found.legs if leg.name != "calm") * trace.STEP_S / 60
        assert trained == pytest.approx(minutes, rel=0.2)
        for leg in found.legs:
            steps = [fault.step for fault in leg.faults]
            assert all(b - a >= 20 for a, b in itertools.pairwise([*steps, leg.steps]))
            assert not steps or steps[0] > trace.SAVED_EVERY
        assert all(0 < fault.worker < 3 for fault in faults)
        assert [fault.size for fault in faults if fault.kind == "resize"] == [2, 3]
        assert found == plan(seed) != plan(seed + 1)


def test_one_worker_has_only_faults_that_leave_it() -> None:
    assert {fault.kind for leg in trace.short(workers=1).legs for fault in leg.faults} == {"process", "hang"}


# The account


def lines(world: int, steps: range, at: float, pids: int) -> list[Line]:
    """The lines of a world whose first step ends at a time; a rank's process is `pids` + rank."""
    return [
        Line(at + i + rank / 1000, pids + rank, rank, world, step, (step,), f"w{step}" if step % 2 == 0 else "")
        for i, step in enumerate(steps)
        for rank in range(world)
    ]


BEFORE = lines(3, range(1, 11), 1.0, 100)
"""Ten steps that end at 1 s, 2 s ... 10 s."""


@pytest.mark.parametrize(
    ("after", "event", "cost"),
    [
        pytest.param(lines(3, range(11, 16), 11.0, 100), {}, Cost(0, 0, 0), id="nothing happened"),
        pytest.param(lines(3, range(11, 16), 14.0, 200), {}, Cost(3, 3, 0), id="from memory"),
        pytest.param(lines(3, range(6, 16), 14.0, 200), {}, Cost(8, 8, 5), id="five steps again"),
        pytest.param(lines(2, range(11, 16), 14.0, 200), {}, Cost(3, None, 0), id="one stays away"),
        pytest.param(
            lines(2, range(11, 14), 14.0, 200) + lines(3, range(14, 16), 20.0, 300), {}, Cost(3, 6, 0), id="one comes later"
        ),
        pytest.param(lines(3, range(11, 13), 14.0, 200), {}, Cost(None, 3, 0), id="not three steps further yet"),
        pytest.param([], {}, Cost(None, None, 0), id="never"),
        pytest.param(lines(3, range(11, 20), 11.0, 100), {"gone": frozenset({100, 101, 102})}, Cost(None), id="only who is gone"),
        pytest.param(
            lines(3, range(11, 14), 11.0, 100) + lines(2, range(14, 16), 16.0, 200),
            {"kind": "resize", "size": 2},
            Cost(2, 2, 0),
            id="a resize costs when it comes",
        ),
    ],
)
def test_what_a_fault_costs(after: list[Line], event: dict[str, Any], cost: Cost) -> None:
    found = account.cost(BEFORE + after, Event(**{"kind": "process", "time": 10.5, "size": 3, **event}), step_s=1.0)
    for name, value in vars(cost).items():
        assert getattr(found, name) == (value if value is None else pytest.approx(value, abs=0.01)), name


def test_a_step_that_is_done_again_counts_once_in_its_last_world() -> None:
    steps = account.final(BEFORE + lines(2, range(9, 13), 15.0, 200))
    assert {step: [line.pid for line in ranks] for step, ranks in steps.items() if step > 7} == {
        8: [100, 101, 102],
        **{step: [200, 201] for step in range(9, 13)},
    }


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        pytest.param([0, 1, 2, 3, 0, 1], (0, 0), id="in the second epoch"),
        pytest.param([0, 1, 2, 3, 0, 1, 0], (1, 0), id="one three times"),
        pytest.param([0, 1, 2, 0, 1, 2], (0, 1), id="one never"),
        pytest.param([0, 0, 1, 1], (2, 2), id="two twice"),
        pytest.param([], (0, 0), id="none yet"),
    ],
)
def test_samples_are_counted_by_visits(seen: list[int], wrong: tuple[int, int]) -> None:
    assert account.samples({1: [Line(0, 0, 0, 1, 1, tuple(seen))]}, 4) == wrong


def test_weights_are_compared_until_the_number_of_ranks_changes() -> None:
    calm = account.final(lines(3, range(1, 21), 0, 1))
    resumed = lines(3, range(9, 13), 20.0, 200)
    other = [Line(**{**vars(line), "digest": "other"}) for line in resumed if line.step % 2 == 0]
    two = [Line(**{**vars(line), "digest": "other"}) for line in lines(2, range(13, 15), 30.0, 300)]
    assert account.same(calm, account.final(BEFORE + resumed + two), 3, since=8) is True
    assert account.same(calm, account.final(BEFORE + other), 3, since=8) is False
    assert account.same(calm, account.final(BEFORE + two), 3, since=10) is None


def test_lines_are_read_as_they_are_written() -> None:
    assert account.read('[1.5, 7, 0, 3, 10, [4, 5], "ab"]\n') == [Line(1.5, 7, 0, 3, 10, (4, 5), "ab")]
    assert account.pace(BEFORE) == pytest.approx(1)
    assert math.isnan(account.pace([]))
    assert account.curve(BEFORE + lines(3, range(6, 9), 15.0, 200), every=5) == [(0, 1), (5, 6), (9, 10), (14, 6)]


# The page


def record(system: str, lost: float | None, **more: Any) -> dict[str, Any]:
    faults = [{"kind": "process", "step": 50, "lost_s": lost, "whole_s": lost, "again": 2}]
    leg = {"name": "machine", "start_s": 5.0, "by_hand": 0, "faults": faults, "steps": 101, "wall_s": 50.0, "repeated": 3}
    leg |= {"missing": 0, "same": True, "struck": [12.0], "parts": [], "curve": [(0, 1), (50, 101)], **more}
    known = {"trace": "short", "seed": 0, "device": "cpu", "machine": "CPU", "millions": 2.0, "at": "2026-01-01 10:00"}
    return known | {
        "system": system,
        "repeat": 0,
        "version": "1",
        "load": [0.1, 0.2],
        "failure": "",
        "pace_s": 0.25,
        "legs": [leg],
    }


def test_a_row_has_medians_the_worst_and_goodput() -> None:
    (row,) = page.sorted_rows([record("torchrun", 2.0), record("torchrun", 4.0), record("torchrun", None)])
    assert page.lost([row]).splitlines()[-1] == "| torchrun, fixed size | 4 (never) | – | – | – | – | – | 2 of 3 | 50 % |"
    assert page.exact([row]).splitlines()[-1].startswith("| torchrun, fixed size | 2 | 4 (never) | yes | 9 | 0 | 0.25 | 5 |")


def test_cells_in_which_a_peer_is_better_are_named() -> None:
    better = page.better(page.sorted_rows([record("outlast", 2.0), record("dlrover", 1.0), record("torchft", 3.0)]))
    assert "* **seconds lost, process**: DLRover 1; Outlast, own loop 2." in better
    assert "torchft" not in better.split("\n")[0]


def test_every_system_has_its_script_and_a_row() -> None:
    for name, system in systems.known(None).items():
        assert (systems.SCRIPTS / system.script).exists()
        assert page.Row(name, []).changed() >= 0
    assert page.Row("outlast-trainer", []).changed() < page.Row("torchrun", []).changed()
    assert set(page.SHOWN) <= set(systems.known(None))


@pytest.mark.skipif(not RESULTS.exists(), reason="nothing was measured yet")
def test_the_page_and_the_table_of_the_readme_are_what_the_results_give() -> None:
    records = page.chosen(page.load(RESULTS))
    assert page.PAGE.read_text() == page.render(records), "run python -m bench.resilience --page"
    assert page.README.read_text() == page.readme(page.README.read_text(), records), "run python -m bench.resilience --page"
    assert page.PAGE.with_suffix(".svg").exists()
