"""Best checkpoints: which stay, on a disk and in a store; who says how good one is; and how the best is found again."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import local_checkpoints
from outlast.base.errors import NotFound, OutlastError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.spec import Checkpoint as Spec
from outlast.recipes.shared import results
from outlast.storage import checkpoints, runs
from outlast.storage.checkpoints import both_places, in_store, on_disk, register, register_rules, retention
from outlast.storage.checkpoints.register_rules import Latest, Place
from outlast.storage.checkpoints.retention import Metric, Retention
from outlast.storage.store import Store
from outlast.training import metrics, session
from outlast.worker.agent import upload

RUN = "r"
VALUES = st.sampled_from([0.1, 0.2, 0.2, 0.3, math.inf, math.nan])
METRICS = st.none() | st.builds(Metric, VALUES, st.sampled_from(["loss", "loss", "acc"]), st.just("min"))


def loss(value: float | None) -> Metric | None:
    return None if value is None else Metric(value, "loss")


def at(step: int, metric: Metric | None = None, generation: int = 1) -> Place:
    return Place(step, generation, f"{RUN}-g{generation}-{step:08x}", metric)


def steps(found: Any) -> list[int]:
    return [each.step for each in found]


def written(directory: Path, step: int, value: float | None, *, generation: int = 1) -> checkpoints.Checkpoint:
    """A local checkpoint."""
    return local_checkpoints.written(directory, step, {"a": b"%d" % step}, run=RUN, generation=generation, metric=loss(value))


# The rule


@st.composite
def histories(draw: st.DrawFn) -> list[Place]:
    numbers = draw(st.lists(st.integers(1, 12), unique=True, max_size=9))
    return [at(step, draw(METRICS), draw(st.sampled_from([1, 1, 1, 2, 3]))) for step in numbers]


@given(histories(), st.integers(-1, 4), st.integers(0, 3))
def test_the_newest_and_the_best_stay_and_nothing_else_that_counts(found: list[Place], keep: int, best: int) -> None:
    rule = Retention(keep, best)
    gone = rule.expired(found)
    valid = retention.counted(found)
    stays = valid[-max(2, keep) :] + rule.best_of(found)
    assert not set(steps(gone)) & set(steps(stays))
    assert len(valid) <= max(2, keep) or set(steps(valid)) - set(steps(gone)) == set(steps(stays))
    left = [place for place in found if place not in gone]
    now = Latest(RUN, 4, tuple(sorted(found)))
    assert set(now.places[-2:]) <= set(left), "the last two stay"
    assert all(register_rules.obsolete(now, place) for place in gone), "they can never be added again"
    assert rule.expired(left) == []
    assert rule.best_of(left) == rule.best_of(found)


@given(st.lists(st.tuples(st.integers(1, 3), METRICS), max_size=12), st.integers(0, 3))
def test_what_has_gone_would_never_have_come_back(later: list[tuple[int, Metric | None]], best: int) -> None:
    """So it does not matter that disks and stores forget at different times."""
    rule, kept, all_, step = Retention(2, best), [], [], 0
    for ahead, metric in later:
        step += ahead
        metric = metric and dataclasses.replace(metric, by="loss")
        kept, all_ = [*kept, at(step, metric)], [*all_, at(step, metric)]
        kept = [place for place in kept if place not in rule.expired(kept)]
        assert steps(kept) == [s for s in steps(all_) if s not in steps(rule.expired(all_))]


def test_of_equal_ones_the_older_is_better_and_what_cannot_be_compared_is_never_best() -> None:
    found = [at(1, loss(0.1)), at(2, loss(0.2)), at(3, loss(0.1)), at(4, loss(math.nan)), at(5), at(6, loss(math.inf))]
    assert steps(retention.ranked(found)) == [1, 3, 2]
    assert steps(Retention(2, 2).expired(found)) == [2, 4]
    until = [at(step, loss(1.0 if step < 20 else 5.0)) for step in range(10, 31, 2)]  # logged at 10 and 20
    assert steps(Retention(2, 1).best_of(until)) == [10]
    other = [*found, at(7, Metric(9.0, "acc", "max")), at(8, Metric(8.0, "acc", "max"))]
    assert steps(retention.ranked(other)) == [7, 8]
    damaged = [at(1, loss(0.3)), at(3, loss(0.1)), at(2, loss(0.2), generation=2)]  # generation 2 went back before step 3
    assert steps(retention.ranked(damaged)) == [2, 1]


def test_a_name_is_best_or_a_step() -> None:
    found = [at(1, loss(0.1)), at(2, loss(0.2)), at(3)]
    assert [retention.named(found, name).step for name in ("best", "3", "00002")] == [1, 3, 2]
    for name, sentence in {
        "7": "no checkpoint of step 7; there are: 1, 2, 3",
        "newest": "'newest' names no checkpoint; give a step, or best",
    }.items():
        with pytest.raises(NotFound) as refused:
            retention.named(found, name)
        assert str(refused.value) == sentence
    with pytest.raises(
        NotFound, match=r"^none of the 1 checkpoints has a metric, so none is best; let the script call run\.save\("
    ):
        retention.named(found[2:], "best")


# What is written


@given(st.builds(Spec, best=st.integers(0, 9), by=st.sampled_from(["", "val_loss", "val loss", "val/acc"]),
                 mode=st.sampled_from(["min", "max"]), keep=st.integers(2, 9)))  # fmt: skip
def test_the_variables_of_a_job_say_what_to_keep(said: Spec) -> None:
    variables = said.variables()
    assert Retention.parse(variables) == Retention(said.keep, said.best, said.by, said.mode)
    assert int(variables[Env.CHECKPOINT_KEEP]) == said.keep, "versions before read that"
    assert (Env.CHECKPOINT_BEST in variables) == (said != Spec(keep=said.keep)), "unset, never empty"


def test_a_commit_of_a_version_before_is_read_and_written_as_it_was() -> None:
    old = '{"run": "r", "step": 7, "generation": 1, "world_size": 2, "time": 5.0, "files": {"a": {"size": 1, "crc32": 2}}}'
    commit = checkpoints.Commit.parse(old.encode())
    assert (commit.metric, commit.text()) == (None, old)
    new = dataclasses.replace(commit, metric=Metric(0.25, "val_loss"))
    assert checkpoints.Commit.parse(new.text().encode()) == new
    assert {**json.loads(new.text()), "metric": None} == {**json.loads(old), "metric": None}, "all else is as before"
    odd_values = ('{"value": "low"}', '{"value": true}', '{"value": NaN}', '{"value": 1, "mode": "median"}', '{"by": "x"}')
    for odd in ("3", "[]", *odd_values):
        assert checkpoints.Commit.parse((old[:-1] + f', "metric": {odd}}}').encode()) == commit


def test_a_register_of_a_version_before_is_read_and_written_as_it_was() -> None:
    now = Latest(RUN, 1, (at(10), at(20)))
    old = now.text(5.0)
    assert b"metric" not in old
    new = Latest(RUN, 1, (at(10), at(20, Metric(0.25, "acc", "max"))))
    read = Latest.parse(new.text(5.0))
    assert [place.metric for place in read.places] == [None, Metric(0.25, "acc", "max")]
    assert read == Latest.parse(old) == now, "a checkpoint is the same with or without"


# On a disk


def test_the_best_stay_on_a_disk_and_the_newest_is_what_training_goes_on_from(tmp_path: Path) -> None:
    for step, value in enumerate([0.5, 0.1, 0.4, 0.3, 0.6, None, 0.9], start=1):
        newest = written(tmp_path, step, value)
        checkpoints.sweep(tmp_path, newest, Retention(2, 2))
    assert [(c.step, c.metric) for c in checkpoints.list_(tmp_path)] == [
        (2, loss(0.1)), (4, loss(0.3)), (6, None), (7, loss(0.9))
    ]  # fmt: skip
    assert checkpoints.latest(checkpoints.list_(tmp_path), RUN) == newest


def test_a_best_one_keeps_nothing_else_that_is_old(tmp_path: Path) -> None:
    written(tmp_path, 1, 0.1)
    (written(tmp_path, 2, 0.5).path / "a").write_bytes(b"?")
    written(tmp_path, 2, 0.5)  # the damaged one moves aside
    for step in (3, 4):
        checkpoints.sweep(tmp_path, written(tmp_path, step, 0.5), Retention(2, 1))
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step"))
    assert left == [contract.checkpoint_name(step) for step in (1, 3, 4)]


# In a store


def an_uploader(output: Path, place: Store, rule: Retention) -> upload.Uploader:
    return upload.Uploader(output, place, RUN, "owner", rule, lambda _: None)


def claimed(place: Store) -> None:
    runs.claim(place, runs.Run(RUN, "job", 1.0))


def pushed(place: Store, directory: Path, *values: float) -> None:
    """Claim a place, and push checkpoints with these metrics, of steps from 1."""
    claimed(place)
    ours = in_store.Checkpoints(place, RUN)
    ours.acquire(1)
    for step, value in enumerate(values, start=1):
        ours.push(written(directory, step, value), journals=directory)


def test_the_best_stay_in_a_store_once_and_are_found_by_whoever_comes_later(place: Store, tmp_path: Path) -> None:
    claimed(place)
    rule, here = Retention(2, 1), tmp_path / "here"
    uploader = an_uploader(here, place, rule)
    for step, value in enumerate([0.5, 0.1, 0.4, 0.3, 0.6], start=1):
        written(here / contract.CHECKPOINTS, step, value)
        uploader.upload_checkpoints(threading.Event())
    assert (uploader.report.uploads, uploader.report.uploads_s > 0) == (5, True)
    there = in_store.Checkpoints(place, RUN)
    assert [(c.step, c.metric) for c in there.list_()] == [(2, loss(0.1)), (4, loss(0.3)), (5, loss(0.6))]
    named = [entry.key.split("/")[1] for entry in place.entries(contract.CHECKPOINTS) if entry.key.endswith("/a")]
    assert sorted(named) == [contract.checkpoint_name(step) for step in (2, 4, 5)], "each once"

    # Another machine goes on from the newest, knows only the store's word for the best, and keeps it.
    away = tmp_path / "away" / contract.CHECKPOINTS
    restored = in_store.Checkpoints(place, RUN).restore(away, say=lambda _: None)
    assert (restored.step, restored.metric) == (5, loss(0.6))
    for step in (6, 7, 8):
        written(away, step, 0.2, generation=2)
        an_uploader(away.parent, place, rule).upload_checkpoints(threading.Event())
    assert steps(there.list_()) == [2, 7, 8]
    assert there.prune(Retention(2, 0))[0].step == 2


def test_a_register_that_does_not_know_the_metrics_asks_the_checkpoints(memory: Store, tmp_path: Path) -> None:
    """As a version before has written it, or as it is after it was lost."""
    pushed(memory, tmp_path, 0.1, 0.4, 0.3)
    told = json.loads(memory.get(register.LATEST))
    assert [each["metric"]["value"] for each in told["checkpoints"]] == [0.1, 0.4, 0.3]
    for each in told["checkpoints"]:
        del each["metric"]
    memory.put(register.LATEST, json.dumps(told).encode())
    assert in_store.Checkpoints(memory, RUN).prune(Retention(2, 1)) == []
    assert steps(in_store.Checkpoints(memory, RUN).prune(Retention(2, 0))) == [1]


@pytest.mark.parametrize("stored", [(), (1,), (1, 6)], ids=["nothing-yet", "older", "between"])
def test_after_an_outage_the_best_reach_the_store_too(memory: Store, tmp_path: Path, stored: tuple[int, ...]) -> None:
    """Two newer ones in the store would make it too late for them."""
    claimed(memory)
    directory, rule = tmp_path / contract.CHECKPOINTS, Retention(2, 2)
    uploader, values = an_uploader(tmp_path, memory, rule), {1: 0.9, 3: 0.1, 5: 0.2, 6: 0.9, 7: 0.9, 8: 0.9}
    uploader._acquired, _ = 1, uploader._checkpoints.acquire(1)
    for step, value in values.items():
        local = written(directory, step, value)
        if step in stored:
            uploader._checkpoints.push(local, journals=tmp_path)
        checkpoints.sweep(directory, local, rule)
    order: list[int] = []
    push = uploader._checkpoints.push

    def noted(local: checkpoints.Checkpoint, **options: Any) -> in_store.Outcome:
        order.append(local.step)
        return push(local, **options)

    uploader._checkpoints.push = noted  # type: ignore[method-assign]
    uploader.upload_checkpoints(threading.Event())
    assert steps(uploader._checkpoints.list_()) == steps(checkpoints.list_(directory)) == [3, 5, 7, 8]
    assert order[:3] == ([3, 5, 8] if 6 in stored else [8, 3, 5])


@given(
    st.lists(st.tuples(st.integers(1, 8), METRICS), unique_by=lambda each: each[0], min_size=1), histories(), st.integers(0, 3)
)
def test_one_that_presses_is_best_and_allowed_and_otherwise_the_newest_goes(
    waiting: list[tuple[int, Metric | None]], there: list[Place], best: int
) -> None:
    here = [on_disk.Checkpoint(step, Path(str(step)), RUN, 2, metric=metric) for step, metric in waiting]
    latest, rule = Latest(RUN, 2, tuple(sorted(there))), Retention(2, best)
    chosen = register_rules.pressing(latest.places, here, rule)
    if chosen.step != max(steps(here)):
        assert chosen in rule.best_of([*here, *(place for place in there if place.step not in steps(here))])
        assert not register_rules.obsolete(latest, at(chosen.step, generation=2))
    assert best or chosen.step == max(steps(here))


# The one that is evaluated


def test_the_best_is_fetched_to_be_evaluated(memory: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pushed(memory, tmp_path / "away", 0.1, 0.4, 0.3)
    here = tmp_path / contract.CHECKPOINTS
    written(here, 3, 0.3)
    assert both_places.evaluated(tmp_path, memory, RUN, ["--batch=3"]) == ["--batch=3"]
    assert both_places.evaluated(tmp_path, memory, RUN, ["--checkpoint=best", "--batch=3"]) == ["--batch=3", "--checkpoint=1"]
    assert capsys.readouterr().err == f"outlast | fetching the checkpoint of step 1 (1 B) from {memory.url}\n"
    assert results.checkpoint(tmp_path, "1") == results.checkpoint(tmp_path, "best") == here / contract.checkpoint_name(1)
    assert results.checkpoint(tmp_path) == here / contract.checkpoint_name(3)
    for run in (RUN, "of-a-later-file"):
        assert both_places.evaluated(tmp_path, None, run, ["--checkpoint=best"]) == ["--checkpoint=1"]
    (here / contract.checkpoint_name(1) / "a").write_bytes(b"?")
    with pytest.raises(NotFound, match=r"step-00000001 is damaged: a has crc32 \d+ instead of \d+; name another one with"):
        results.checkpoint(tmp_path, "best")
    assert both_places.evaluated(tmp_path, memory, RUN, ["--checkpoint=best"]) == ["--checkpoint=1"], "it is fetched once more"
    assert results.checkpoint(tmp_path, "best").name == contract.checkpoint_name(1)
    with pytest.raises(NotFound, match="no checkpoint of step 9; there are: 1, 2, 3"):
        both_places.evaluated(tmp_path, memory, RUN, ["--checkpoint=9"])


# The training


def trained(
    output: Path, monkeypatch: pytest.MonkeyPatch, best: str, script: Callable[[session.Session, int], None], *, upto: int
) -> dict[int, Metric | None]:
    """A run of one rank that goes on to the step `upto`; its checkpoints and their metrics."""
    monkeypatch.setenv(Env.OUTPUT, str(output))
    monkeypatch.setenv(Env.CHECKPOINT_BEST, best)
    for name in (Env.RUN, Env.STATE, Env.NOTICE, Env.GENERATION, "RANK"):
        monkeypatch.delenv(name, raising=False)
    with session.open(quiet=True) as run:
        model = torch.nn.Linear(1, 1)
        for step in range(run.resume({"model": model}) + 1, upto + 1):
            script(run, step)
    return {c.step: c.metric for c in checkpoints.list_(output / contract.CHECKPOINTS)}


def test_what_the_script_says_counts_before_what_it_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {1: 0.5, 2: torch.tensor([0.1]), 3: float("nan"), 4: None, 5: 0.4, 6: float("-inf"), 7: None}

    def script(run: session.Session, step: int) -> None:
        if step == 4:
            run.log(step, val_loss=torch.tensor(0.3))
        run.save(step, metric=given[step])

    found = trained(tmp_path, monkeypatch, "3 min val_loss", script, upto=7)
    value = pytest.approx(0.1)
    assert {step: metric and metric.value for step, metric in found.items()} == {
        2: value,
        4: pytest.approx(0.3),
        5: 0.4,
        6: None,
        7: pytest.approx(0.3),
    }
    assert found[2] is not None
    assert (found[2].by, found[2].mode) == ("val_loss", "min")


def test_the_last_value_logged_counts_though_another_process_logged_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(run: session.Session, step: int) -> None:
        run.log(step, **({"acc": 10 * step} if step in (2, 5) else {"loss": 1.0}))
        if step != 4:
            run.save(step)

    trained(tmp_path, monkeypatch, "9 max acc", script, upto=3)
    metrics.append(tmp_path / contract.METRICS, {"step": 4, "acc": 99})  # of a step that is lost and comes again
    found = trained(tmp_path, monkeypatch, "9 max acc", script, upto=6)
    assert {step: metric and metric.value for step, metric in found.items()} == {2: 20, 3: 20, 5: 50, 6: 50}
    assert metrics.last(tmp_path / contract.METRICS, "acc", 4) == 20
    assert metrics.last(tmp_path / contract.METRICS, "acc", 1) is metrics.last(tmp_path / "none", "acc", 1) is None
    assert results.checkpoint(tmp_path, "best").name == contract.checkpoint_name(5), "the older of equal ones"


@pytest.mark.parametrize(
    ("best", "remedy"), [("2 min val_loss", "log val_loss with run.log()"), ("2 min", "set checkpoint.by in the job file")]
)
def test_a_run_without_any_metric_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, best: str, remedy: str
) -> None:
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, monkeypatch, best, lambda run, step: run.save(step), upto=2)
    assert caplog.messages == [f"outlast: no checkpoint is kept as one of the best: {remedy}, or call run.save(step, metric=...)"]


def test_a_metric_is_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(run: session.Session, step: int) -> None:
        with pytest.raises(OutlastError, match=r"^metric \(.*\) must be a single number"):
            run.save(step, metric=torch.zeros(2))

    assert trained(tmp_path, monkeypatch, "", script, upto=1) == {}
