"""Outlast from Python: what a `Job` becomes, what waiting for a `Run` means, and which functions can be sent."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import fake
import outlast
from outlast import function_call
from outlast.base.errors import InvalidJob, NotFound, OutlastError
from outlast.job.failure import Failure
from outlast.job.status import State

LOCK = threading.Lock()


def given(*args: object, **kwargs: object) -> None:
    print(args, kwargs)


def locks() -> None:
    LOCK.acquire()


@pytest.fixture(autouse=True)
def a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., outlast.Run]:
    def start(**options: Any) -> outlast.Run:
        place = fake.FakeBackend(tmp_path, **options)
        job = outlast.Job(script="train.py")
        place.submit(job.file, source=tmp_path / "job.yaml")
        return outlast.Run("train", place)

    return start


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="'jobs'"):
        outlast.jobs  # type: ignore[attr-defined]  # noqa: B018


def test_keywords_are_the_fields_of_the_job_file(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "workers": (2, 1, 4),
        "checkpoint": {"every": "1m"},
        "env": {"some_name": "1"},
        "output": Path("out"),
    }
    job = outlast.Job(script="train.py", args=["--lr=0.1"], labels={"team": "a"}, **fields)
    spec = job.file.spec
    assert (job.name, spec.script, spec.code, spec.args) == ("train", "train.py", str(tmp_path), ("--lr=0.1",))
    assert (spec.workers.replicas, spec.workers.min, spec.workers.max) == (2, 1, 4)
    assert (spec.output, spec.env, job.file.metadata.labels) == (str(tmp_path / "out"), {"some_name": "1"}, {"team": "a"})
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    assert outlast.Job.load("job.yaml").file == job.file


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: outlast.Job(script="absent.py"), NotFound, "absent.py: there is no such file"),
        (lambda: outlast.Job(script="train.py", workers=(1, 2)), OutlastError, r"workers=\(1, 2\): expected a number, or"),
        (lambda: outlast.Job(script="train.py", checkpont={}), InvalidJob, "checkpont is unknown; did you mean checkpoint"),
        (lambda: outlast.Job("train.py"), OutlastError, r"'train.py' is not a function; a script is Job\(script=...\)"),
        (lambda: outlast.Job(given, script="train.py"), OutlastError, "a function and script are two programs"),
        (lambda: outlast.Job(locks, wrokers=2), OutlastError, "unexpected keyword argument 'wrokers'; other keywords are fields"),
        (lambda: outlast.Job(given, 1, LOCK), OutlastError, "argument 2 of given cannot be sent to workers: cannot pickle"),
        (lambda: outlast.Job(given, key=LOCK), OutlastError, "argument key of given cannot be sent to workers: cannot pickle"),
        (lambda: outlast.Job(lambda: LOCK), OutlastError, "LOCK, which <lambda> uses, cannot be sent to workers: cannot pickle"),
        (lambda: outlast.Job(given, os.urandom(200_000)), OutlastError, "its arguments are 195 KiB; pass the path"),
        (lambda: outlast.find("absent"), NotFound, "no job 'absent' in"),
    ],
)
def test_a_mistake_is_one_sentence(make: Callable[[], object], kind: type, sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        make()


def test_a_function_of_a_module_is_called_by_name_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    job = outlast.Job(given, 0.1, steps=3, workers=2)
    assert (job.name, job.file.spec.workers.replicas) == ("given", 2)
    function_call.main(job.file.spec.args)
    assert capsys.readouterr().out == "(0.1,) {'steps': 3}\n"


def test_a_function_of_no_module_is_sent_by_value() -> None:
    program = "import outlast, sys; rate = 3\ndef train(x): print(x * rate)\nprint(outlast.Job(train, 2).file.spec.args[0])"
    call = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run([sys.executable, "-m", "outlast.function_call", call], check=True, capture_output=True, text=True)
    assert done.stdout == "6\n"


def test_a_module_that_workers_lack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("absent_here.py").write_text("def train(): ...\n")
    call = outlast.Job(importlib.import_module("absent_here").train).file.spec.args
    del sys.modules["absent_here"]
    Path("absent_here.py").unlink()
    with pytest.raises(OutlastError, match=r"^workers do not have the module absent_here, which the function of this job needs;"):
        function_call.main(call)


def test_waiting_ends_at_a_step_at_a_state_and_at_the_end(started: Callable[..., outlast.Run]) -> None:
    looked = threading.Event()
    run = started(at={8: lambda run: looked.wait(60)})
    assert run.wait(until="Running").state is State.RUNNING
    assert 5 <= run.wait(step=5).step <= 8
    assert run.wait(until=lambda status: status.step > 7).step == 8
    looked.set()
    assert run.wait().state is State.SUCCEEDED
    assert run.wait(until="Running", step=3).state is State.SUCCEEDED  # both are behind it
    assert repr(run) == "<Run train: Succeeded, step 20/20, 1 worker, 0 restarts>"
    assert "Succeeded" in run._repr_html_()


def test_waiting_has_an_end(started: Callable[..., outlast.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.client._TAKEN_UP_S", 0.0)
    run = started(steps=2000)
    with pytest.raises(TimeoutError, match=r"train is Running at step \d+ after 0.1 s; it goes on"):
        run.wait(timeout=0.1)
    with pytest.raises(OutlastError, match=r"until='Trained'\): expected one of Pending"):
        run.wait(until="Trained")
    run.suspend()
    assert run.wait(until="Suspended").state is State.SUSPENDED
    with pytest.raises(outlast.Failed, match="train has ended: Suspended"):
        run.wait(step=1999)


def test_a_failure_is_raised_with_its_first_error(started: Callable[..., outlast.Run]) -> None:
    def fails(run: fake.Run) -> None:
        run.status.failure = Failure(worker=1, code=1, reason="rank 1 on worker 1 raised ValueError", traceback="ValueError: no")
        run.wish = State.FAILED

    with pytest.raises(
        outlast.Failed, match=r"has ended: Failed: rank 1 on worker 1 raised ValueError\nValueError: no"
    ) as raised:
        started(at={3: fails}).wait()
    assert raised.value.status.failure is not None


def test_a_block_that_raises_cancels_its_run(started: Callable[..., outlast.Run]) -> None:
    run = started(steps=2000)
    with pytest.raises(KeyError), run:
        raise KeyError
    with pytest.raises(outlast.Failed, match="Cancelled"):
        run.wait()


def test_a_run_is_evaluated_explained_and_forgotten(started: Callable[..., outlast.Run]) -> None:
    run = started(steps=3)
    run.wait()
    run.evaluate("--batch=8", best=True)
    with pytest.raises(OutlastError, match="the best checkpoint and that of step 0 are two"):
        run.evaluate(best=True, step=0)
    assert cast("fake.FakeBackend", run.place).evaluated == [("train", ["--checkpoint=best", "--batch=8"])]
    [cause] = run.why().causes
    assert (cause.failed, str(run.why())) == (False, f"{cause.what[:1].upper()}{cause.what[1:]}.".rstrip("."))
    run.forget()
    with pytest.raises(NotFound):
        run.status  # noqa: B018
