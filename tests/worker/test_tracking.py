"""Metrics on their way to trackers: what is new, what comes again, what a tracker sees of a run with a hard life."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.job.contract import Env
from outlast.kubernetes import manifests
from outlast.training import metrics
from outlast.worker.tracking import event_files, follower, follower_supervisor, missing_points
from outlast.worker.tracking.event_files import EventFile
from outlast.worker.tracking.follower import Forwarder
from outlast.worker.tracking.follower_supervisor import Trackers
from outlast.worker.tracking.missing_points import Point
from outlast.worker.tracking.mlflow_runs import MLflow
from outlast.worker.tracking.tracker_interface import Run, Settings, Status, settings
from tracked import append, line, shown
from waits import until

# What is new


def test_a_value_is_new_once_per_step_and_name():
    text = (
        line(1, loss=3.0) + line(2, loss=2.0) + line(2, val=5.0) + line(2, loss=9.0) + b"no json\n" + b"[]\n" + line(1, val=1.0)
    )
    assert missing_points.points(text, {}) == [
        Point(1, 1001.0, "loss", 3.0),
        Point(2, 1002.0, "loss", 2.0),
        Point(2, 1002.0, "val", 5.0),
    ]
    assert missing_points.points(text, {"loss": 1}) == [Point(2, 1002.0, "loss", 2.0), Point(2, 1002.0, "val", 5.0)]
    assert (
        missing_points.points(b'{"step": 3, "a/b:c": NaN, "text": "x", "flag": true}\n', {}, lambda name: name.replace(":", "_"))[
            0
        ][2]
        == "a/b_c"
    )


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11), st.integers(0, 200)), max_size=8))
def test_whatever_is_killed_and_resumed_each_step_arrives_once_in_order(tmp_path_factory, history):
    """Each life goes on for some steps, the next one from an earlier step; its follower reads at any point of the file."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    sent: list[int] = []
    position: missing_points.Position = {}
    reader, step = missing_points.Reader(path), 0

    def look() -> None:
        nonlocal position
        while found := reader.read():
            new = missing_points.points(found, position)
            position = missing_points.advanced(position, new)
            sent.extend(point.step for point in new)
            reader.offset += len(found)

    for life, (steps, back, torn) in enumerate(history):
        for _ in range(steps):
            step += 1
            metrics.append(path, {"step": step, "time": life, "generation": life, "loss": step / 7})
            if (step + back) % 3 == 0:
                look()
        with path.open("ab") as file:
            file.write(line(step + 1, loss=0.5)[: torn % 20])  # what a killed process has left
        if torn % 2:
            look()
        step = max(0, step - back)
        metrics.truncate_after(path, step)
        if torn % 5 == 0:  # another follower, or another disk
            reader = missing_points.Reader(path)
    look()
    reached = max(sent, default=0)
    assert sent == list(range(1, reached + 1)), "strictly increasing, none missing"
    assert reached >= step


def test_a_file_that_was_cut_back_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, reader = tmp_path / "metrics.jsonl", missing_points.Reader(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(missing_points, "BLOCK", 100)

    def rest() -> bytes:
        found = []
        while lines := reader.read():
            found.append(lines)
            reader.offset += len(lines)
        return b"".join(found)

    assert rest() == b""
    path.write_bytes(line(1, loss=1.0) + line(2, loss=1.0) + b'{"st')
    assert reader.read() == reader.read()
    assert rest() == line(1, loss=1.0) + line(2, loss=1.0), "not the torn line"
    assert rest() == b""
    path.write_bytes(line(1, loss=1.0))
    assert rest() == line(1, loss=1.0), "it is shorter"
    path.write_bytes(b"".join(line(step, loss=0.123456789) for step in range(50)))
    assert rest() == path.read_bytes(), "it is longer, with other lines"


# What is wanted


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, Settings()),
        ({Env.TENSORBOARD: "1"}, Settings(tensorboard=True)),
        (
            {"MLFLOW_TRACKING_URI": "/shared/mlruns", "MLFLOW_EXPERIMENT_NAME": "e"},
            Settings(mlflow="/shared/mlruns", experiment="e"),
        ),
        ({"MLFLOW_TRACKING_URI": "http://b", Env.MLFLOW: "http://a"}, Settings(mlflow="http://a")),
        ({"MLFLOW_TRACKING_URI": "http://b", Env.MLFLOW: "none"}, Settings()),
        ({"WANDB_API_KEY": "k", "WANDB_PROJECT": "p"}, Settings(wandb=True, project="p")),
        ({"WANDB_MODE": "offline", Env.EXPERIMENT: "e"}, Settings(wandb=True, experiment="e", project="e")),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, Settings()),
        ({"WANDB_API_KEY": "k", "WANDB_DISABLED": "true"}, Settings()),
    ],
)
def test_the_job_file_wins_over_the_trackers_own_variables(environ: Mapping[str, str], asked: Settings):
    found = settings(environ)
    assert (found, bool(found)) == (asked, bool(asked.tensorboard or asked.mlflow or asked.wandb))


def test_pods_get_the_fields_as_variables_and_a_relative_path_is_refused():
    text = (
        "apiVersion: outlast.dev/v1alpha1\nkind: ElasticJob\nmetadata: {name: a}\n"
        "spec: {module: m, image: i, tracking: {tensorboard: true, mlflow: MLFLOW, experiment: e}}\n"
    )
    [job] = [
        each for each in manifests.render(spec.parse(text.replace("MLFLOW", "/shared/$(x)")), "job") if each["kind"] == "Job"
    ]
    given = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert (given[Env.TENSORBOARD], given[Env.MLFLOW], given[Env.EXPERIMENT]) == ("1", "/shared/$$(x)", "e")
    for uri in ("http://flow", "sqlite:////a.db", "databricks", "none"):
        spec.parse(text.replace("MLFLOW", uri))
    with pytest.raises(OutlastError, match=r"mlflow \(mlruns\) must be a URI, such as http://mlflow:5000, or an absolute path"):
        spec.parse(text.replace("MLFLOW", "mlruns"))
    with pytest.raises(OutlastError, match=r"tracking.mlflow holds a password.* MLFLOW_TRACKING_PASSWORD") as refused:
        spec.parse(text.replace("MLFLOW", "http://me:hunter2@flow"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("error", "leaving", "restarted", "said"),
    [
        (None, False, True, (Status.FINISHED, False)),
        (SystemExit(0), False, False, (Status.FINISHED, False)),
        (SystemExit(75), True, True, (None, True)),
        (None, True, False, (None, True)),
        (ValueError(), False, True, (None, True)),
        (ValueError(), False, False, (Status.FAILED, False)),
        (KeyboardInterrupt(), False, False, (Status.KILLED, False)),
    ],
)
def test_how_a_run_has_ended_is_said_only_where_it_is_known(error, leaving, restarted, said):
    assert follower_supervisor.outcome(error, leaving=leaving, restarted=restarted) == said


# A tracker that is away


class Tracker:
    """A sink that does what a test tells it to."""

    title, pause_s = "Tracker (test)", 0.01

    def __init__(self) -> None:
        self.there: list[Point] = []
        self.faults: list[Exception] = []
        self.told: list[object] = []
        self.partly = False

    def open(self) -> missing_points.Position:
        return missing_points.advanced({}, self.there)

    def rename(self, name: str) -> str:
        return name

    def send(self, points: Sequence[Point]) -> None:
        if self.faults:
            if self.partly:
                self.there += points[: len(points) // 2]  # it arrived, but not its answer
            raise self.faults.pop(0)
        self.there += points

    def parameters(self, values: Mapping[str, Any]) -> None:
        self.told.append(dict(values))

    def end(self, status: Status | None) -> None:
        self.told.append(status)


def a_run(output: Path, **environ: str) -> Run:
    return Run.of(output, "0123456789abcdef", environ)


@pytest.mark.parametrize("partly", [False, True])
def test_a_tracker_that_is_away_is_said_once_and_gets_everything_when_it_is_back(tmp_path: Path, monkeypatch, partly: bool):
    monkeypatch.setattr(follower, "LAST_RETRY_S", 0.01)
    tracker, said = Tracker(), []
    tracker.partly = partly
    append(tmp_path, 1, 2, 3)
    forwarder = Forwarder(tracker, a_run(tmp_path), said.append)
    tracker.faults = [ConnectionError("[Errno 111] Connection refused"), TimeoutError("timed out"), ConnectionError("x\ny")]
    forwarder.start()
    until(lambda: len(said) == 2)
    append(tmp_path, 4, 5)
    forwarder.finish(Status.FINISHED)
    forwarder.join()
    assert said == [
        "Tracker (test): [Errno 111] Connection refused; training goes on, what is logged waits in metrics.jsonl",
        "Tracker (test): works again; everything up to step 3 is there",
    ]
    assert [point.step for point in tracker.there] == [1, 2, 3, 4, 5]
    assert tracker.told[-1] == "FINISHED"
    assert forwarder.missing() == ""


def test_what_has_not_arrived_is_said_in_the_end(tmp_path: Path):
    tracker, said = Tracker(), []
    tracker.faults = [OSError("no route to host")] * 1000
    append(tmp_path, 1, 2, 3)
    forwarder = Forwarder(tracker, a_run(tmp_path), said.append)
    forwarder.start()
    until(lambda: bool(said))
    assert forwarder.missing() == (
        "Tracker (test): has the metrics up to step 0 only (no route to host); metrics.jsonl has all, and the next start sends it"
    )
    tracker.faults = []
    forwarder.finish(None)
    forwarder.join()


# TensorBoard


def test_event_files_go_on_after_any_kill(tmp_path: Path):
    append(tmp_path, 1, 2)
    append(tmp_path, 2, val=5.0)
    kept = tmp_path / ".tracking/tensorboard.json"
    kept.parent.mkdir()

    def forwarded() -> Path:
        Forwarder(EventFile(tmp_path / "tb", "one", kept), a_run(tmp_path), print).forward()
        return max((tmp_path / "tb").iterdir())

    append(tmp_path, 2, parameters=7.0)  # the name of a metric and of the settings' text
    (tmp_path / "parameters.json").write_text('{"lr": 0.1}')
    first = forwarded()
    whole = {"loss": [(1, 1.0), (2, 0.5)], "val": [(2, 5.0)], "parameters": [(2, 7.0)]}
    assert shown(tmp_path / "tb") == whole
    assert b"loss" not in forwarded().read_bytes(), "nothing is new"
    size, position = first.stat().st_size, kept.read_text()
    append(tmp_path, 3, 4)
    last = forwarded()
    whole["loss"] += [(3, shown(tmp_path / "tb")["loss"][2][1]), (4, shown(tmp_path / "tb")["loss"][3][1])]
    for left in (size, last.stat().st_size - 3, 5, 0):  # killed at any byte, and before the position was noted
        os.truncate(last, min(left, last.stat().st_size))
        kept.write_text(position)
        last = forwarded()
        assert shown(tmp_path / "tb") == whole
    kept.unlink()
    forwarded()
    assert shown(tmp_path / "tb") == whole, "on another disk all is sent again"
    EventFile(tmp_path / "tb", "two", kept).open()
    [file] = (tmp_path / "tb").iterdir()
    assert file.name.startswith(f"{event_files.PREFIX}-two."), "a run that begins again is another one"


def test_event_files_need_neither_torch_nor_tensorflow(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from outlast.worker.tracking.event_files import EventFile; "
        f"EventFile(Path({str(tmp_path)!r}), 'a', Path('x')).open(); sys.exit(bool({{'torch', 'tensorflow'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# MLflow


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    return mlflow.tracking.MlflowClient((tmp_path / "mlruns").as_uri())


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_one_run_over_all_starts(tmp_path: Path, mlflow_client: Any):
    output = tmp_path / "out"
    output.mkdir()
    run = a_run(output, OUTLAST_JOB="digits", OUTLAST_STORE="s3://bucket/runs/digits/")

    def forwarded(status: Status | None) -> Any:
        forwarder = Forwarder(MLflow(str(tmp_path / "mlruns"), "", run), run, print)
        forwarder.finish(status)
        forwarder.run()
        [found] = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("digits").experiment_id])
        return found

    def steps(name: str) -> list[int]:
        return [metric.step for metric in mlflow_client.get_metric_history(found.info.run_id, name)]

    (output / "parameters.json").write_text('{"lr": 0.1, "sizes": [1, 2], "a:b": null}')
    append(output, *range(1, 1501))
    append(output, 1500, **{"val:loss": float("nan")})
    found = forwarded(None)
    assert found.info.status == "RUNNING"
    assert steps("loss") == list(range(1, 1501))
    assert steps("val_loss") == [1500]
    (output / "parameters.json").write_text('{"lr": 0.2, "sizes": [1, 2], "a:b": null, "new": "x"}')
    append(output, 1499, 1500, 1501)  # the first two come again
    found = forwarded(Status.FAILED)
    assert found.info.status == "FAILED"
    assert steps("loss") == list(range(1, 1502))
    assert found.data.params == {"lr": "0.1", "sizes": "[1, 2]", "a_b": "null", "new": "x"}
    tags = {name: value for name, value in found.data.tags.items() if not name.startswith("mlflow.user")}
    assert tags == {"mlflow.runName": "digits", "outlast.run": run.id, "outlast.output": "s3://bucket/runs/digits"}


@pytest.mark.filterwarnings("ignore")
def test_metrics_have_names_that_mlflow_accepts(tmp_path: Path, mlflow_client: Any):
    run = a_run(tmp_path)
    names = ["loss", "loss/main", "acc@5", "\N{GREEK SMALL LETTER ALPHA}"]
    server = MLflow("http://mlflow:5000", "", run)
    assert [server.rename(name) for name in names] == ["loss", "loss/main", "acc_5", names[-1]]
    append(tmp_path, 1, **dict.fromkeys(names, 1.0))
    Forwarder(MLflow(str(tmp_path / "mlruns"), "", run), run, print).forward()  # here each is a file
    [found] = mlflow_client.search_runs([mlflow_client.get_experiment_by_name(run.name).experiment_id])
    assert found.data.metrics.keys() == {"loss", "loss.main", "acc_5", names[-1]}


def test_no_sentence_has_a_password():
    error = OSError("API request to http://user:p@ss@mlflow:5000/api failed with exception ('Connection broken: ...')")
    assert follower.sentence(error) == "API request to http://mlflow:5000/api failed with exception ('Connection broken: ...')"


@pytest.mark.filterwarnings("ignore")
def test_a_uri_that_mlflow_does_not_know_is_one_sentence(tmp_path: Path):
    said: list[str] = []
    run = a_run(tmp_path)
    forwarder = Forwarder(MLflow("strange://user:secret@nowhere", "", run), run, said.append)
    forwarder.run()  # it ends, since no retry mends that
    assert forwarder.missing().startswith("MLflow (strange://nowhere): has the metrics up to step 0 only (MLflow does not")
    assert said == [
        "MLflow (strange://nowhere): MLflow does not support the URI strange://nowhere; set tracking.mlflow, e.g. to "
        "http://mlflow:5000; training goes on, nothing goes there"
    ]


# The process


def test_two_followers_of_one_output_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follower_supervisor, "LEAVE_S", 60.0)  # followers have the lowest priority
    monkeypatch.setenv(Env.TENSORBOARD, "1")
    (tmp_path / "checkpoints").mkdir()
    append(tmp_path, 1)
    one, two = Trackers(tmp_path, 0), Trackers(tmp_path, 0)
    one.follow()
    until(lambda: bool(list(tmp_path.glob("tensorboard/metrics/*"))))
    two.follow()
    done: list[dict[str, str]] = []
    waiting = threading.Thread(target=lambda: done.append(two.end(None, leaving=False)))
    waiting.start()
    waiting.join(0.3)
    assert not done
    assert one.end(None, leaving=True) == {}
    waiting.join()
    assert done == [{}]
    assert (tmp_path / ".tracking/ended").read_text() == "FINISHED"
    assert follower_supervisor.end(tmp_path, os.environ, "Succeeded") == "", "it is known"
    assert follower_supervisor.end(tmp_path, os.environ, "Cancelled") == ""
    assert (tmp_path / ".tracking/ended").read_text() == "KILLED"


def test_without_trackers_there_is_no_follower(tmp_path: Path):
    none = Trackers(tmp_path, 0)
    none.follow()
    assert (none.process, none.end(None, leaving=False)) == (None, {})
