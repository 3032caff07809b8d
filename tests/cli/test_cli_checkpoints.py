"""`outlast checkpoints`: what is here, what is in a store, and what becomes of it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import fake
import local_checkpoints
from outlast import cli, client
from outlast.base.errors import NotFound
from outlast.job.shipping import code_files
from outlast.job.status import JobStatus, State, StoreStatus
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import both_places, in_store
from outlast.storage.store import Store

Outlast = Callable[..., tuple[int, str, str]]
RUN = "run-1"


@pytest.fixture
def backend(tmp_path: Path) -> fake.FakeBackend:
    """A machine that knows the job `one`."""
    backend = fake.FakeBackend(tmp_path / "output")
    there = StoreStatus(url=f"file://{tmp_path}/store/one")
    status = JobStatus(name="one", run=RUN, state=State.SUCCEEDED, store=there, output=str(tmp_path / "output/one"))
    backend.runs["one"] = fake.Run(status)
    return backend


@pytest.fixture
def outlast(outlast: Outlast, backend: fake.FakeBackend) -> Outlast:
    return functools.partial(outlast, "checkpoints", backend=backend)


def of_a_store(tmp_path: Path, *words: object) -> tuple[int, str]:
    """A command line without any backend about the run that a store has; exit code and output."""
    told = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        cli.main([str(word) for word in words], backend=fake.FakeBackend(tmp_path / "output"))
    return int(ended.value.code or 0), told.getvalue().replace(str(tmp_path), "TMP")


def test_results_come_home_without_checkpoints_and_are_no_code_there(tmp_path: Path, place: Store, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in ("model.pt", "figures/a.png", "checkpoints/step-00000001/weights"):
        place.put(name, b"x")
    code, said = of_a_store(tmp_path, "fetch", place.url)
    assert (code, said.splitlines()[-1]) == (0, "file://TMP/store/one: one")
    assert "no end of one is recorded: it trains, uploads results or was cancelled; this is what is there by now\n" in said
    found = {str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith(".")} == {"model.pt", "figures/a.png"}
    assert [entry.name for entry in code_files.listed(tmp_path, [tmp_path / "store", tmp_path / "output"]).entries] == [
        "train.py"
    ]
    runs.end(place, RUN, "Succeeded", "done", 0)
    code, said = of_a_store(tmp_path, "fetch", place.url, "check*", "--to", "saved")
    assert (code, "is recorded" in said) == (0, False)
    assert (tmp_path / "saved" / "checkpoints" / "step-00000001" / "weights").exists()


def test_a_run_that_has_ended_is_removed_from_a_store_after_a_question(tmp_path: Path, place: Store) -> None:
    place.put("model.pt", b"x")
    other = store.open_(f"file://{tmp_path}/store")
    other.put("foreign.txt", b"x")
    running = "Error: run run-1 of job one in file://TMP/store/one has not ended (Pending); cancel it first\n"
    assert of_a_store(tmp_path, "forget", place.url, "--yes") == (2, running)
    runs.end(place, RUN, "Succeeded", "done", 0)
    asked = of_a_store(tmp_path, "forget", place.url)
    assert (asked[0], place.head("model.pt").size) == (2, 1), asked
    assert of_a_store(tmp_path, "forget", place.url, "--yes") == (0, "removed file://TMP/store/one\n")
    assert [entry.key for entry in other.entries()] == ["foreign.txt"]
    assert of_a_store(tmp_path, "forget", place.url, "--yes")[1].startswith("Error: there is no job in file://TMP/store/one")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "output" / "one" / "checkpoints"


@pytest.fixture
def place(tmp_path: Path) -> Store:
    place = store.open_(f"file://{tmp_path}/store/one")
    runs.claim(place, runs.Run(RUN, "one", 1.0))
    return place


def saved(directory: Path, step: int, val_loss: float | None = None) -> checkpoints.Checkpoint:
    metric = None if val_loss is None else checkpoints.Metric(val_loss, "val_loss")
    return local_checkpoints.written(directory, step, {"weights": b"w" * 3000}, run=RUN, metric=metric)


def pushed(place: Store, local: checkpoints.Checkpoint, tmp_path: Path) -> None:
    there = in_store.Checkpoints(place, RUN)
    there.acquire(1)
    assert there.push(local, journals=tmp_path / "journals").done


@pytest.fixture
def three(here: Path, place: Store, tmp_path: Path) -> None:
    """Step 10 in the store, 20 in both places, 30 here."""
    for step in (10, 20):
        pushed(place, saved(here, step), tmp_path)
    assert checkpoints.remove(checkpoints.list_(here)[0])
    saved(here, 30)


@pytest.mark.usefixtures("three")
def test_checkpoints_are_listed_with_where_they_are(outlast: Outlast, here: Path, place: Store):
    code, out, err = outlast("list")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["STEP", "AGE", "SIZE", "GENERATION", "RANKS", "RUN", "WHERE"]
    where = ((10, "store"), (20, "both"), (30, "here"))
    assert [(row[0], *row[2:]) for row in rows[1:]] == [(f"{step}", "2.9", "KiB", "1", "2", RUN, at) for step, at in where]
    said = json.loads(outlast("list", "one", "-o", "json")[1])
    assert [(each["step"], each["where"], each["bytes"], each["problem"]) for each in said] == [(*at, 3000, "") for at in where]
    assert said[0]["path"] is None
    assert said[1]["path"] == str(here / "step-00000020")
    assert said[1]["url"].startswith(f"{place.url}/checkpoints/step-00000020/{RUN}-g1-")
    assert said[2]["url"] is None


SHORT = "is damaged: weights has 100 bytes instead of 3000"


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("damaged", "options", "code", "end"),
    [
        ((), (), 0, "step 30, "),
        ((30,), (), 0, f"warning: step 30 {SHORT}; step 20 is read instead\nstep 20, "),
        ((20,), ("--step", 20), 0, f"warning: step 20 {SHORT}; step 20 is read from the store instead\nstep 20, "),
        ((30,), ("--step", 30), 2, f"Error: step 30 {SHORT}; look at all checkpoints with: outlast checkpoints verify\n"),
    ],
)
def test_what_is_exported_is_verified_and_protected(
    outlast: Outlast, here: Path, tmp_path: Path, monkeypatch, damaged: tuple[int, ...], options: tuple, code: int, end: str
) -> None:
    def child(command: list[str], *, check: bool) -> SimpleNamespace:
        [read] = [each for each in checkpoints.list_(Path(command[4]).parent) if each.path == Path(command[4])]
        assert not checkpoints.remove(read), "it stays while torch is imported"
        Path(command[5]).write_bytes(b"1")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", child)
    for step in damaged:
        os.truncate(here / f"step-000000{step}" / "weights", 100)
    found, out, err = outlast("export", *options, "--to", tmp_path / "model.pt")
    assert (found, (err + out)[: len(end)]) == (code, end)


@pytest.mark.usefixtures("three")
def test_a_jobs_place_in_a_store_is_enough(outlast: Outlast, place: Store, tmp_path: Path):
    assert [line.split()[0] for line in outlast("list", place.url)[1].splitlines()] == ["STEP", "10", "20"]
    assert outlast("show", place.url, "--step", 10)[1].count("weights  2.9 KiB") == 1
    said = [f"step-000000{step} in the store: whole, 2.9 KiB" for step in (10, 20)]
    assert outlast("verify", place.url)[1].splitlines() == said
    code, out, err = outlast("restore", place.url, "--to", tmp_path / "there")
    assert (code, out) == (0, f"step 20, 2.9 KiB: {tmp_path}/there/step-00000020\n")
    assert err == f"fetching the checkpoint of step 20 (2.9 KiB) from {place.url}\n"
    assert checkpoints.verify(tmp_path / "there" / "step-00000020") is None


def test_a_place_without_a_job_is_named(outlast: Outlast, tmp_path: Path):
    url = f"file://{tmp_path}/nothing"
    code, out, err = outlast("list", url)
    assert (code, out) == (2, "")
    assert err == f"Error: there is no job in {url}; give the URL of a job's output, such as s3://bucket/runs/digits\n"
    assert outlast("list", url, "--store", url)[2].endswith("are two places; leave one of them out\n")


@pytest.mark.usefixtures("three")
def test_damage_is_shown_and_found_here_and_in_the_store(outlast: Outlast, here: Path, place: Store):
    key = next(entry.key for entry in place.entries("checkpoints/step-00000020") if entry.key.endswith("/weights"))
    place.put(key, b"x" * 3000)
    (here / "step-00000030" / "COMMIT").write_text("[]")
    assert outlast("list")[1].splitlines()[-1].split(maxsplit=6) == ["30", *"-----", "here: COMMIT cannot be read: not a mapping"]
    code, out, err = outlast("verify")
    assert code == 1
    assert [line.partition(": ")[::2] for line in out.splitlines()] == [
        ("step-00000020", "whole, 2.9 KiB"),
        ("step-00000030", "COMMIT cannot be read: not a mapping"),
        ("step-00000010 in the store", "whole, 2.9 KiB"),
        ("step-00000020 in the store", f"weights has crc32 {zlib.crc32(b'x' * 3000)} instead of {zlib.crc32(b'w' * 3000)}"),
    ]
    results = json.loads(outlast("verify", "-o", "json")[1])
    assert [result["whole"] for result in results] == [True, False, True, False]
    code, out, err = outlast("restore", place.url, "--to", here.parent / "there")
    assert (code, out) == (0, f"step 10, 2.9 KiB: {here.parent}/there/step-00000010\n")
    assert "the checkpoint of step 20 is skipped: " in err
    code, out, err = outlast("restore", place.url, "--step", 20, "--to", here.parent / "there")
    assert (code, out) == (2, "")
    assert "weights has crc32" in err


def test_what_is_removed_while_it_is_verified_is_not_damaged(outlast: Outlast, here: Path, monkeypatch: pytest.MonkeyPatch):
    old, new = saved(here, 10), saved(here, 20)
    verify = checkpoints.verify

    def retention(path: Path) -> str | None:
        assert not checkpoints.remove(new)  # it is being read
        checkpoints.remove(old)
        return verify(path)

    monkeypatch.setattr(checkpoints, "verify", lambda path: retention(path) if path == new.path else verify(path))
    said = ["step-00000010: removed meanwhile, as checkpoint.keep says", "step-00000020: whole, 2.9 KiB"]
    monkeypatch.setattr(cli.data.checkpoints, "_saved", lambda _: [both_places.Saved(20, new), both_places.Saved(10, old)])
    code, out, _ = outlast("verify")
    assert (code, sorted(out.splitlines())) == (0, said)


@pytest.mark.usefixtures("three")
def test_a_run_has_the_checkpoints_of_its_store_where_the_disk_is_elsewhere(backend: fake.FakeBackend, place: Store, monkeypatch):
    run = client.Run("one", backend)
    assert [(saved.step, saved.where) for saved in run.checkpoints] == [(10, "store"), (20, "both"), (30, "here")]
    monkeypatch.setattr(backend, "output", lambda _: place.url)
    assert [(saved.step, saved.where) for saved in run.checkpoints] == [(10, "store"), (20, "store")]
    with pytest.raises(NotFound, match="no checkpoint of step 30; there are: 10, 20"):
        run.weights(30)
    backend.runs["one"].status = JobStatus(name="one", run=RUN, state=State.SUCCEEDED)
    with pytest.raises(NotFound, match="the checkpoints of one are in its pods only"):
        run.checkpoints  # noqa: B018


@pytest.mark.usefixtures("three")
def test_restoring_keeps_what_is_here(outlast: Outlast, here: Path):
    assert outlast("restore")[1] == f"step 20, 2.9 KiB: {here}/step-00000020\n"
    assert outlast("restore", "one", "--step", 10)[1] == f"step 10, 2.9 KiB: {here}/step-00000010\n"
    assert [c.step for c in checkpoints.list_(here)] == [10, 20, 30]
    code, _, err = outlast("restore", "--step", 15)
    assert (code, err) == (2, "Error: no checkpoint of step 15; there are: 10, 20\n")


@pytest.mark.usefixtures("three")
def test_pruning_removes_the_oldest_here_and_in_the_store(outlast: Outlast, here: Path, place: Store, tmp_path: Path):
    for step in (40, 50):
        pushed(place, saved(here, step), tmp_path)
    would = "would remove step-00000020 here, 2.9 KiB\nwould remove step-00000030 here, 2.9 KiB\n"
    would += "would remove step-00000010 in the store\nwould remove step-00000020 in the store\n"
    assert outlast("prune", "--keep", 2, "--dry-run")[:2] == (0, would)
    assert len(checkpoints.list_(here)) == 4
    with checkpoints.reading(here / "step-00000030"):
        out = outlast("prune", "--keep", 2)[1]
    removed = would.replace("would remove", "removed")
    assert out == removed.replace("removed step-00000030", "kept, for it is being read: step-00000030")
    assert [c.step for c in checkpoints.list_(here)] == [30, 40, 50]
    assert [c.step for c in in_store.Checkpoints(place, RUN).list_()] == [40, 50]
    assert outlast("prune", place.url)[1] == "nothing to remove: there are no more than 2\n"
    assert outlast("prune", "--keep", 1)[0] == 2


@pytest.mark.usefixtures("three")
def test_pruning_asks_somebody_who_is_there(outlast: Outlast, here: Path, monkeypatch: pytest.MonkeyPatch):
    saved(here, 40)
    for answer, code, kept in (("n", 2, [20, 30, 40]), ("yes", 0, [30, 40])):
        monkeypatch.setattr(sys, "stdin", tty := io.StringIO(f"{answer}\n"))
        monkeypatch.setattr(tty, "isatty", lambda: True)
        found = outlast("prune", "--keep", 2)
        assert (found[0], found[1].splitlines()[0]) == (code, "would remove step-00000020 here, 2.9 KiB")
        assert [c.step for c in checkpoints.list_(here)] == kept


def test_a_store_that_is_away_hides_nothing_that_is_here(outlast: Outlast, here: Path, monkeypatch: pytest.MonkeyPatch):
    saved(here, 10)
    login = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    for name, value in {**login, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "OUTLAST_STORE_TIMEOUT": "0.2"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = outlast("list", "--store", "s3://bucket/runs/one")
    assert code == 0
    assert out.splitlines()[-1].endswith("here")
    assert err.startswith("warning: checkpoints in the store are not shown: ")
    assert outlast("list", "s3://bucket/runs/one")[0] == 1


@pytest.fixture
def measured(here: Path, place: Store, tmp_path: Path) -> None:
    """Step 10 in the store, 20 and 30 in both places, 40 here; 10 is the best, then 30."""
    for step, value in {10: 0.25, 20: 0.5, 30: 1 / 3}.items():
        pushed(place, saved(here, step, value), tmp_path)
    assert checkpoints.remove(checkpoints.list_(here)[0])
    saved(here, 40)


@pytest.mark.usefixtures("measured")
def test_best_checkpoints_are_marked_wherever_they_are(outlast: Outlast, here: Path, place: Store):
    rows = [line.split() for line in outlast("list")[1].splitlines()]
    assert rows[0] == ["STEP", "AGE", "SIZE", "VAL_LOSS", "BEST", "GENERATION", "RANKS", "RUN", "WHERE"]
    assert [(row[0], *row[4:6], row[-1]) for row in rows[1:4]] == [
        ("10", "0.25", "1", "store"), ("20", "0.5", "3", "both"), ("30", "0.333333", "2", "both")
    ]  # fmt: skip
    assert (rows[4][0], rows[4][-1]) == ("40", "here")
    said = json.loads(outlast("list", place.url, "-o", "json")[1])
    assert [(each["step"], each["metric"], each["by"], each["best"]) for each in said] == [
        (10, 0.25, "val_loss", 1), (20, 0.5, "val_loss", 3), (30, 1 / 3, "val_loss", 2)
    ]  # fmt: skip
    assert [json.loads(outlast("show", *args, "-o", "json")[1])["step"] for args in ([], ["--best"])] == [40, 10]
    assert "\nval_loss      0.25\n" in outlast("show", "--best")[1]
    assert outlast("show", "--best", "--step", 10)[0] == 2


@pytest.mark.usefixtures("measured")
def test_the_best_is_restored_and_kept_when_old_ones_are_removed(outlast: Outlast, here: Path, place: Store, tmp_path: Path):
    code, out, _ = outlast("restore", "--best", "--to", tmp_path / "best")
    assert (code, out) == (0, f"step 10, 2.9 KiB: {tmp_path}/best/step-00000010\n")
    assert outlast("restore", "--best")[0] == 0
    code, out, _ = outlast("prune", "--keep", 2)
    assert (code, out) == (0, "removed step-00000020 here, 2.9 KiB\n")
    assert [c.step for c in checkpoints.list_(here)] == [10, 30, 40]
    assert outlast("prune")[1] == "nothing to remove: there are no more than 2, and the best 1\n"
    assert [c.step for c in in_store.Checkpoints(place, RUN).list_()] == [10, 20, 30], (
        "of three, two are the newest and one the best"
    )
    assert outlast("prune", "--keep", 2, "--best", 0)[1].splitlines() == [
        "removed step-00000010 here, 2.9 KiB", "removed step-00000010 in the store"
    ]  # fmt: skip
