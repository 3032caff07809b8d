"""A run goes on unless it has succeeded: what is said of it, what it takes along, and what is forgotten."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from pathlib import Path

import pytest

from here import Here, outlast
from outlast.base.errors import OutlastError
from outlast.job import contract, spec
from outlast.job.report import goodput
from outlast.job.report.steps import Bucket
from outlast.job.shipping import code_files
from outlast.job.spec import version_differences
from outlast.job.status import State
from outlast.local.resume_messages import Resumption
from outlast.local.state_dir import Run
from outlast.storage import runs
from outlast.storage.store import open_
from outlast.worker.prepare import code_placement


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Resumption(State.FAILED, 10, 180.0), "goes on from step 10 of the run that failed 3m00s ago; --fresh starts anew"),
        (Resumption(State.CANCELLED, 5, 20.0), "goes on from step 5 of the run that was cancelled 20s ago; --fresh starts anew"),
        (Resumption(State.RUNNING, 5), "goes on from step 5 of the run that was stopped; --fresh starts anew"),
        (
            Resumption(State.FAILED, 5, where="s3://b/job"),
            "goes on from step 5 of the run in s3://b/job that failed; --fresh starts anew",
        ),
        (
            Resumption(State.INTERRUPTED, 0, 12.0),
            "goes on with the run that was interrupted 12s ago; it has no checkpoint, and keeps the files that it wrote; "
            "--fresh starts anew",
        ),
    ],
)
def test_it_is_said_where_a_run_goes_on_and_how_it_was_left(how: Resumption, said: str) -> None:
    assert how.sentence == said


def a_job(**fields: object) -> spec.Job:
    whole = {"script": "train.py", "workers": {"replicas": 2}, **fields}
    document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "job"}, "spec": whole}
    return spec.parse(json.dumps(document))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"args": ["--lr=0.1", "--n=2"]}, {"args": ["--lr=0.2", "--n=2"]}, ["args: --lr=0.1 → --lr=0.2"]),
        ({"args": ["-v"]}, {"args": ["-v", "--steps", "9"]}, ["args: nothing → --steps 9"]),
        ({"args": ["--n", "1", "-v"]}, {"args": ["--n", "2", "-v"]}, ["args: --n 1 → --n 2"]),
        ({"args": ["-v"]}, {}, ["args: -v → nothing"]),
        ({"args": ["--api-key=old"]}, {"args": ["--api-key=new"]}, ["args: --api-key=… → --api-key=…"]),
        ({"args": ["--token", "old"]}, {"args": ["--token", "new"]}, ["args: --token … → --token …"]),
        ({"env": {"TOKEN": "old"}}, {"env": {"TOKEN": "new"}}, ["env.TOKEN"]),
        (
            {"workers": {"replicas": 2, "min": 1, "max": 4}},
            {"workers": {"replicas": 3, "min": 1, "max": 4}},
            ["workers.replicas: 2 → 3"],
        ),
        ({}, {"restarts": {"limit": 3}}, ["restarts.limit: 10 → 3"]),
        ({"args": ["-v"]}, {"args": ["-v"]}, []),
    ],
)
def test_what_has_changed_in_a_job_is_named(old: dict[str, object], new: dict[str, object], said: list[str]) -> None:
    assert list(version_differences.between(a_job(**old), a_job(**new))) == [f"changed since: {each}" for each in said]


@pytest.mark.parametrize(
    ("old", "new", "longer"),
    [
        (["--steps", "60"], ["--steps", "90"], True),
        (["--max_iters=60", "-v"], ["--max_iters=90", "-v"], True),
        (["--num-train-epochs=2"], ["--num-train-epochs=3"], True),
        (["--config=conf.yaml"], ["--config=conf.yaml", "--max-iters", "61"], True),
        (["--config=conf.yaml"], ["--config=conf.yaml", "--max-iters", "60"], False),  # it has had as many
        ([], ["--epochs=3"], False),  # more than it has had? nobody knows
        (["--steps=60"], ["--steps=60"], False),
        (["--steps=60"], ["--steps=30"], False),
        (["--steps=60"], [], False),
        (["--steps=60", "--lr=1"], ["--steps=90", "--lr=2"], False),  # another training
        (["--trainer.max_steps=60"], ["--trainer.max_steps=90"], True),
        (["--warmup-steps-ratio=1"], ["--warmup-steps-ratio=2"], False),
        (["--warmup-steps=60"], ["--warmup-steps=90"], False),
        (["--eval_iters", "60"], ["--eval_iters", "90"], False),
        (["60"], ["90"], False),  # of what?
    ],
)
def test_a_job_that_asks_for_more_steps_and_nothing_else_is_longer(old: list[str], new: list[str], longer: bool) -> None:
    assert version_differences.longer(a_job(args=old), a_job(args=new), 60) is longer
    assert version_differences.longer(a_job(args=old), a_job(args=new, workers={"replicas": 1}, code="."), 60) is longer
    assert not version_differences.longer(a_job(args=old), a_job(args=new, processesPerWorker=2), 60)


# On this machine


def test_a_run_that_succeeded_goes_on_when_its_job_asks_for_more_steps(here: Here) -> None:
    run = here.submit(args=["--steps=60"])
    here.leave(State.SUCCEEDED)
    assert here.submit(args=["--steps=90"]) != run, "it has saved nothing"
    run = here.backend.status("job").run
    here.save(90, run)
    here.leave(State.SUCCEEDED)
    assert here.submit(args=["--steps=120"]) == run
    first, *changed = here.backend.notices
    assert re.fullmatch(r"goes on from step 90 of the run that succeeded [0-9.]+m?s ago; --fresh starts anew", first)
    assert changed == ["changed since: args: --steps=90 → --steps=120"]
    here.leave(State.SUCCEEDED)
    assert here.submit(args=["--steps=150"], fresh=True) != run


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
def test_a_mended_run_goes_on_from_its_newest_checkpoint_and_says_so(here: Here, state: State) -> None:
    run = here.submit(args=["--lr=0.1"])
    here.save(5, run)
    here.save(10, run)
    (here.output / "metrics.jsonl").write_text("of this run")
    here.leave(state)
    here.write("train.py", "mended")
    assert here.submit(args=["--lr=0.2"]) == run
    how = {State.FAILED: "failed", State.CANCELLED: "was cancelled"}[state]
    first, *changed = here.backend.notices
    assert re.fullmatch(f"goes on from step 10 of the run that {how} [0-9.]+m?s ago; --fresh starts anew", first)
    assert changed == ["changed since: train.py", "changed since: args: --lr=0.1 → --lr=0.2"]
    assert here.code() == {"train.py": "mended"}
    assert (here.output / "metrics.jsonl").read_text() == "of this run"
    assert (here.backend.status("job").state, here.backend.status("job").reason) == (State.PENDING, "goes on from step 10")
    assert not (here.output / "previous").exists()


@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_what_counted_against_a_run_that_failed_is_forgotten_but_not_its_generation(here: Here, verb: str) -> None:
    run = here.submit()
    here.save(10, run, generation=4)
    here.state_dir.recovery.write_text(
        json.dumps({"generation": 5, "closing": ["Failed", "a bug", 1], "history": [[1.0, 10, 13]]})
    )
    here.leave(State.FAILED)
    here.submit() if verb == "submit" else here.backend.resume("job")
    assert not here.state_dir.recovery.exists()
    assert (Run.read(here.state_dir).run, Run.read(here.state_dir).generation) == (run, 5)
    assert here.backend.notices[0].startswith("goes on from step 10 of the run that failed ")


def test_only_a_run_that_has_succeeded_is_begun_anew(here: Here) -> None:
    first = here.submit()
    here.leave(State.SUCCEEDED)
    with pytest.raises(OutlastError, match=r"job job has succeeded; `outlast run .*/job.yaml` starts it anew"):
        here.backend.resume("job")
    second = here.submit()
    assert second != first
    here.leave(State.FAILED)
    assert here.submit(fresh=True) not in (first, second)


def test_a_run_whose_output_was_removed_is_begun_anew(here: Here) -> None:
    first = here.submit()
    here.leave(State.FAILED)
    shutil.rmtree(here.output)
    with pytest.raises(OutlastError, match=r"the output of run .* is gone, or another run has it; `outlast run"):
        here.backend.resume("job")
    assert here.submit() != first


def test_another_output_in_the_job_file_does_not_lose_the_run(here: Here, tmp_path: Path) -> None:
    run = here.submit()
    here.save(10, run)
    here.leave(State.FAILED)
    assert here.submit(output=str(tmp_path / "big")) == run
    said = f"output: the run stays where its checkpoints are, in {here.output}; --fresh starts anew in {tmp_path}/big/job"
    assert here.backend.notices[1:] == [said]


def test_an_older_version_of_a_file_that_the_run_has_taken_comes_back(tmp_path: Path) -> None:
    source, state = tmp_path / "src", tmp_path / "state"
    source.mkdir()
    state.mkdir()

    def copy(text: str, at: float) -> list[str]:
        (source / "train.py").write_text(text)
        os.utime(source / "train.py", (at, at))
        return code_placement.copy(source, code_files.listed(source).entries, state / "work", begun)

    begun = time.time() - 100
    copy("v1", begun - 50)
    assert copy("v2", begun + 10) == ["train.py"]
    assert copy("v2", begun + 20) == []
    assert copy("v1", begun - 50) == ["train.py"]  # mv train.py.old train.py
    assert (state / "work" / "train.py").read_text() == "v1"
    (state / "work" / "train.py").write_text("by the job")
    assert copy("v1", begun - 50) == []
    assert (state / "work" / "train.py").read_text() == "by the job"


def test_the_time_until_a_run_goes_on_is_idle_and_everything_sums_up() -> None:
    events = [
        {"t": 100.0, "kind": "submitted", "run": "r"},
        {"t": 101.0, "kind": "launcher", "pid": 1, "adopted": 0},
        {"t": 110.0, "kind": "finished", "state": "Failed", "reason": "a bug", "step": 13, "code": 1},
        {"t": 290.0, "kind": "resumed"},
        {"t": 291.0, "kind": "launcher", "pid": 2, "adopted": 0},
        {"t": 300.0, "kind": "finished", "state": "Succeeded", "reason": "", "step": 20, "code": 0},
    ]
    told = goodput.buckets(events, None)
    assert (told.state, told.seconds[Bucket.IDLE], told.wall_s) == ("Succeeded", 180.0, 200.0)


# With a store


def ends(here: Here, store: str, state: State) -> None:
    """What the launcher and the pusher leave in the store."""
    here.leave(state)
    place, record = open_(f"{store}/job"), Run.read(here.state_dir)
    runs.end(place, record.run, state, "as told", 1, by=record.owner)
    place.put("job.yaml", (here.output / "job.yaml").read_bytes())


@pytest.fixture
def two(tmp_path: Path) -> tuple[Here, Here]:
    """Two machines."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return Here(tmp_path / "one"), Here(tmp_path / "two")


@pytest.mark.parametrize(("state", "where"), [(State.FAILED, 0), (State.FAILED, 1), (State.CANCELLED, 1)])
def test_a_run_in_a_store_goes_on_wherever_it_is_run_again(two: tuple[Here, Here], state: State, where: int) -> None:
    store = f"memory://{uuid.uuid4()}"
    run = two[0].submit(output=store, args=["--lr=0.1"])
    before = Run.read(two[0].state_dir)
    ends(two[0], store, state)
    assert two[where].submit(output=store, args=["--lr=0.2"]) == run
    now, there = Run.read(two[where].state_dir), runs.read(open_(f"{store}/job"))
    assert there is not None
    assert (there.run, there.state, there.owner, there.before) == (run, "Running", now.owner, (before.owner,))
    assert now.generation > before.generation
    assert "goes on with the run " in two[where].backend.notices[0]
    assert two[where].backend.notices[-1] == "changed since: args: --lr=0.1 → --lr=0.2"


def test_a_run_that_goes_on_from_a_store_is_followed_from_its_new_lines_on(two: tuple[Here, Here]) -> None:
    store = f"memory://{uuid.uuid4()}"
    two[0].submit(output=store)
    ends(two[0], store, State.FAILED)
    command = ("run", two[0].source.parent / "job.yaml", "--detach")
    assert "job goes on in the background" in outlast(two[1], *command)[1]
    assert "job runs in the background" in outlast(two[1], *command, "--fresh")[1]


def test_a_run_that_another_has_replaced_in_the_store_is_left_alone(two: tuple[Here, Here]) -> None:
    store = f"memory://{uuid.uuid4()}"
    first = two[0].submit(output=store)
    ends(two[0], store, State.FAILED)
    second = two[1].submit(output=store, fresh=True)
    ends(two[1], store, State.FAILED)
    assert two[0].submit(output=store) == second != first
    ends(two[0], store, State.SUCCEEDED)
    assert two[1].submit(output=store) not in (first, second)
