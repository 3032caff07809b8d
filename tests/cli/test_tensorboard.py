"""`outlast tensorboard`: what it shows of jobs wherever their metrics are, while they grow."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ports
from outlast import cli
from outlast.cli.look import tensorboard
from outlast.kubernetes.api.streams import Ended
from outlast.kubernetes.jobs.backend import KubernetesBackend
from outlast.storage import store
from outlast.storage.sync import growing_files
from tracked import append, line, shown
from waits import until


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 30)), max_size=6))
def test_a_copy_follows_a_file_that_grows_is_cut_back_or_begins_again(tmp_path_factory, history):
    copy = tmp_path_factory.mktemp("copy") / "metrics.jsonl"
    there: list[bytes] = []
    for life, (kept, more, torn) in enumerate(history):
        there = there[:kept] + [line(step, loss=float(life)) for step in range(kept, kept + more)]
        text = b"".join(there) + line(99)[:torn]
        read: list[int] = []
        tensorboard.refresh(copy, lambda start, text=text, read=read: read.append(start) or text[start:])
        assert copy.read_bytes() == text[: text.rfind(b"\n") + 1]
        read.clear()
        tensorboard.refresh(copy, lambda start, text=text, read=read: read.append(start) or text[start:])
        assert read == [len(b"".join(there)) - len(there[-1])] or not there, "only the last line comes again"


def test_event_files_of_a_directory_grow_with_its_metrics_and_a_scripts_own_are_shown(tmp_path: Path, capsys):
    output = tmp_path / "out"
    (output / "tensorboard/metrics").mkdir(parents=True)
    (output / "tensorboard/images").mkdir()
    (output / "tensorboard/metrics/events.out.tfevents.outlast-1").write_bytes(b"ours, of the job")
    (output / "tensorboard/images/events.out.tfevents.1").write_bytes(b"its own")
    append(output, 1, 2)
    show = tensorboard.Show(tmp_path, "out", output)
    show.refresh()
    append(output, 3)
    show.refresh()
    assert (tmp_path / "logs/out/script/images/events.out.tfevents.1").read_bytes() == b"its own"
    assert not list(tmp_path.glob("logs/out/script/metrics/*"))
    assert [step for step, _ in shown(tmp_path / "logs/out")["loss"]] == [1, 2, 3]
    (output / "metrics.jsonl").write_bytes(line(1, loss=7.0))  # --fresh
    show.refresh()
    assert shown(tmp_path / "logs/out")["loss"] == [(1, 7.0)]
    assert capsys.readouterr().err == ""


def test_metrics_in_a_store_are_read_as_they_are_uploaded(tmp_path: Path, capsys):
    place = store.open_(f"file://{tmp_path}/store")
    output = tmp_path / "out"
    output.mkdir()
    sender = growing_files.Sender(place, output)
    show = tensorboard.Show(tmp_path, "job", functools.partial(tensorboard.in_store, place))

    def steps() -> list[int]:
        sender.push(["metrics.jsonl"], threading.Event())
        show.refresh()
        return [step for step, _ in shown(tmp_path / "logs/job").get("loss", [])]

    assert steps() == []
    append(output, 1, 2, 3)
    assert steps() == [1, 2, 3]
    place.put("parameters.json", b'{"lr": 1}')
    (output / "metrics.jsonl").write_bytes(line(1, loss=1.0))  # resumed
    append(output, 2)
    assert steps() == [1, 2, 3]
    append(output, 3, 4, 5)
    assert steps() == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "copies/job/parameters.json").read_text()) == {"lr": 1}
    assert (tmp_path / "copies/job/metrics.jsonl").read_bytes() == (output / "metrics.jsonl").read_bytes()
    assert capsys.readouterr().err == ""


class InPod(KubernetesBackend):
    """A backend whose pod is this machine."""

    def __init__(self, output: Path) -> None:
        self.cluster: Any = self
        self.environ = {**os.environ, "OUTLAST_OUTPUT": str(output)}

    def status(self, name: str) -> Any:
        return type("Status", (), {"world": [2, 0]})

    def pod(self, name: str, worker: int) -> Any:
        return {"metadata": {"name": f"{name}-worker-{worker}", "namespace": "ns"}, "spec": {"containers": [{"name": "worker"}]}}

    def exec_(self, pod: str, command: list[str], *, namespace: str, container: str) -> Ended:
        assert (pod, namespace, container) == ("job-worker-2", "ns", "worker"), "where rank 0 is"
        done = subprocess.run(command, env=self.environ, capture_output=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)


def test_metrics_in_a_pod_are_read_through_the_api_server(tmp_path: Path, capsys):
    output = tmp_path / "out of the pod"
    output.mkdir()
    show = tensorboard.Show(tmp_path, "job", InPod(output).reader("job"))
    show.refresh()
    append(output, 1, 2)
    (output / "parameters.json").write_text('{"lr": 1}')
    show.refresh()
    append(output, 3)
    show.refresh()
    assert [step for step, _ in shown(tmp_path / "logs/job")["loss"]] == [1, 2, 3]
    assert capsys.readouterr().err == ""
    (output / "metrics.jsonl").unlink()
    (output / "metrics.jsonl").symlink_to("/proc/1/mem")
    for _ in range(2):
        show.refresh()
    if os.geteuid():
        assert capsys.readouterr().err.count("metrics.jsonl cannot be read in pod job-worker-2: ") == 1


def test_without_tensorboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["tensorboard", "out"])
    assert capsys.readouterr().err == "Error: TensorBoard is not installed; pip install 'outlast[tracking]'\n"


@pytest.mark.slow
def test_tensorboard_serves_a_run_that_grows_until_ctrl_c(tmp_path: Path):
    (tmp_path / "a").mkdir()
    append(tmp_path / "a", 1, 2)
    port = ports.free()
    command = [sys.executable, "-m", "outlast", "tensorboard", "a", "--port", str(port)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"TensorBoard: http://localhost:{port}/ (Ctrl-C ends it)\n"

        def served() -> list[int]:
            url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=a&tag=loss"
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    return [step for _, step, _ in json.loads(answer.read())]
            except urllib.error.HTTPError:  # it has not loaded that run yet
                return []

        until(lambda: served() == [1, 2])
        append(tmp_path / "a", 3)
        until(lambda: served() == [1, 2, 3])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
