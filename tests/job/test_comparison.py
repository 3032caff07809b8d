"""Runs side by side: what a table and a picture say of the same training with more workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outlast.job.report import comparison, goodput


def events(workers: int, steps: int = 10, each: float = 2.0, *, ends: bool = True) -> list[dict[str, Any]]:
    """The ledger of a job that starts for 10 seconds and then makes steps."""
    found: list[dict[str, Any]] = [
        {"t": 0.0, "kind": "submitted", "source": "cli"},
        {"t": 0.0, "kind": "launcher", "source": "launcher"},
        {"t": 0.0, "kind": "world", "source": "launcher", "generation": 1, "workers": list(range(workers))},
        {"t": 10.0, "kind": "session", "source": "worker-0-process-0", "generation": 1, "rank": 0, "world_size": workers},
        {"t": 10.0, "kind": "restored", "source": "worker-0-process-0", "generation": 1, "step": 0},
    ]
    step = {"kind": "step", "source": "worker-0-process-0", "generation": 1}
    found += [{"t": 10 + each * n, "step": n, **step} for n in range(1, steps + 1)]
    end = {"t": 10 + each * steps, "kind": "finished", "source": "launcher", "state": "Succeeded"}
    return [*found, end] if ends else found


def a_run(name: str, workers: int, *metrics: dict[str, Any], each: float = 2.0, ends: bool = True) -> comparison.Run:
    told = events(workers, each=each, ends=ends)
    return comparison.run(name, goodput.buckets(told, 100.0), told, map(json.dumps, metrics))


def test_more_workers_are_compared_by_the_time_from_submission_to_the_end() -> None:
    metrics = [
        {"step": 5, "loss": 2.0, "images_per_s": 100},
        {"step": 9, "acc": 0.5},
        {"step": 10, "loss": 0.5, "images_per_s": 300},
    ]
    one, two = a_run("one", 1, *metrics, each=3.0), a_run("two", 2)  # 10 + 30 s, 10 + 20 s
    assert (one.time_s, one.training_s, one.workers, one.steps, one.loss, one.throughput) == (
        *(40.0, 30.0, (1,), 10, 0.5),
        {"images_per_s": 200.0},
    )
    assert one.steps_per_s == pytest.approx(1 / 3)
    first, second = comparison.compared([one, two])
    assert (first.speedup, first.efficiency) == (1.0, 1.0)
    assert (second.speedup, second.efficiency) == (pytest.approx(4 / 3), pytest.approx(2 / 3))
    assert comparison.cells(second) == [
        *("two", "Succeeded", "2", "30s", "1.33x", "66.7 %", "10", "0.50", None, "66.7 %", None),
    ]  # fmt: skip
    diverged = comparison.compared([a_run("one", 1, {"loss": float("nan")})])[0]
    assert (comparison.cells(diverged)[-1], comparison.as_json(diverged)["loss"]) == ("nan", None)
    assert comparison.cells(first)[8:] == ["200 images/s", "75.0 %", "0.5000"]


def test_what_has_not_ended_or_has_changed_its_size_has_no_speedup_or_no_efficiency() -> None:
    told = events(2)
    told.insert(8, {"t": 15.0, "kind": "world", "source": "launcher", "generation": 2, "workers": [0, 1, 2]})
    resized = comparison.run("resized", goodput.buckets(told, 100.0), told, ["", "{", "[1]", '{"loss": true}'])
    rows = comparison.compared([a_run("one", 1), a_run("running", 2, ends=False), resized])
    assert [(row.state, row.workers, row.speedup is None, row.efficiency is None) for row in rows] == [
        ("Succeeded", (1,), False, False),
        ("Running", (2,), True, True),
        ("Succeeded", (2, 3), False, True),
    ]
    assert comparison.cells(rows[2])[2] == "2→3"
    assert comparison.as_json(rows[2])["workers"] == [2, 3]


def test_without_a_launcher_ranks_count() -> None:
    told = [event for event in events(4) if event["kind"] != "world"]
    assert comparison.run("plain", goodput.buckets(told, None), told, ()).workers == (4,)
