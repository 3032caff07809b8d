"""Preparing data on Spark while its processes are killed, and as a command: what people see of it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import pyspark
import pytest

from outlast.data import spark_java
from outlast.data.prepare import work_units
from sparks import CASES, GATED
from texts import digests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # on a busy machine a Java takes a minute to start
TESTS = Path(__file__).parents[1] / "shared"


class Run:
    """A case that is prepared on Spark by a process of its own; `lines` says which processes have begun which unit."""

    def __init__(self, case: str, directory: Path) -> None:
        self.case, self.source, self.to, self.into = case, directory / "source", directory / "to", directory / "into"
        for each in (self.source, self.into):
            each.mkdir()
        CASES[case].write(self.source)
        CASES[case].prepare(work_units.Request(self.source, directory / "local", unit=600))
        self.local = digests(directory / "local")

    def start(self, master: str) -> subprocess.Popen[str]:
        words = [self.case, str(self.source), str(self.to), str(self.into), master]
        command = [sys.executable, "-c", "import sys, sparks; sparks.main(*sys.argv[1:])", *words]
        environ = {**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(self.source.parent)}
        return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def lines(self) -> dict[str, list[int]]:
        """The processes that have begun each unit, by the name of its note."""
        return {path.name: list(map(int, path.read_text().split())) for path in sorted(self.into.iterdir())}

    def notes(self) -> dict[str, tuple[int, int]]:
        """Inode and time of each note that there is."""
        return {path.stem: identity(path) for path in self.to.glob(f"{work_units.PRIVATE}/*/*-*.json")}

    def shards(self) -> dict[str, tuple[int, int]]:
        """Inode and time of each shard of a unit that is done."""
        notes = [json.loads(path.read_text()) for path in self.to.glob(f"{work_units.PRIVATE}/*/shard-*.json")]
        names = [note[part]["file"] for note in notes for part in ("train", "val") if note.get(part)]
        return {path.name: identity(path) for name in names for path in self.to.glob(f"{work_units.PRIVATE}/*/{name}")}

    def in_the_middle(self, process: subprocess.Popen[str], stage: str) -> psutil.Process:
        """The process that does the unit which does not end, after some others of that stage are done."""
        while process.poll() is None:
            pids = self.lines().get(f"{stage}-{GATED}")
            if pids and sum(name.startswith(stage) for name in self.notes()) >= 3:
                return psutil.Process(pids[0])
            time.sleep(0.01)
        pytest.fail(f"it has ended: {process.communicate()}")

    def check_done_once(self, stage: str, done: Iterable[str]) -> None:
        """Check that the unit which did not end was done again, and none of those that were done."""
        begun = self.lines()
        assert len(begun[f"{stage}-{GATED}"]) == 2
        assert [name for name in done if len(begun[name]) > 1] == []


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def of_java(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for each in below(process):
        with contextlib.suppress(psutil.NoSuchProcess):  # a shell of spark-submit that has ended meanwhile
            found += [each] if each.name() == "java" else []
    return found


def gone(processes: list[psutil.Process]) -> None:
    """Check that they end soon."""
    assert psutil.wait_procs(processes, timeout=60)[1] == []


@pytest.mark.parametrize(("case", "stage"), [("characters", "encode"), ("images", "shard")])
def test_an_executor_that_is_killed_changes_nothing(case: str, stage: str, tmp_path: Path) -> None:
    run = Run(case, tmp_path)
    process = run.start("local-cluster[2,1,1024]")
    worker = run.in_the_middle(process, stage)
    executor = next(each for each in worker.parents() if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline()))
    everybody = below(process)
    done = run.notes()
    executor.kill()
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, ""), err
    assert digests(run.to) == run.local
    run.check_done_once(stage, done)
    gone(everybody)


@pytest.mark.parametrize(("case", "stage"), [("characters", "encode"), ("images", "shard")])
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_a_driver_that_is_killed_and_run_again_does_not_redo_what_is_done(
    case: str, stage: str, master: str, tmp_path: Path
) -> None:
    run = Run(case, tmp_path)
    process = run.start(master)
    run.in_the_middle(process, stage)
    everybody = below(process)
    assert any("java" in each.name() for each in everybody)
    process.kill()
    process.communicate()
    gone(everybody)
    done, shards = run.notes(), run.shards()
    process = run.start(master)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, ""), err
    assert digests(run.to) == run.local
    run.check_done_once(stage, done)
    after = {path.name: identity(path) for path in run.to.iterdir()}
    assert {name: after[name] for name in shards} == shards
    assert bool(shards) == (case == "images")


class Command:
    """`outlast data prepare images` on Spark, as a process with a temporary directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("source", "tmp"):
            (directory / name).mkdir()
        CASES["images"].write(directory / "source")

    def start(self, *options: str, to: str = "to", by: Sequence[str] = (sys.executable,)) -> subprocess.Popen[str]:
        (program := self.directory / "outlast-cli.py").write_text("from outlast.cli import main\nmain()\n")
        words = ["images", str(self.directory / "source"), "--to", to, "--shard-size", "600", "--engine", "spark", *options]
        command = [*by, str(program), "data", "prepare", *words]
        environ = {**os.environ, "TMPDIR": str(self.directory / "tmp")}
        where = {"env": environ, "cwd": self.directory, "text": True}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **where)


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,2,1024]"])
def test_the_command_prints_its_result_and_leaves_nothing_behind(master: str, tmp_path: Path) -> None:
    command = Command(tmp_path)
    process = command.start("--master", master, "--verify")
    while not (javas := of_java(process)):
        assert process.poll() is None
        time.sleep(0.01)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    first, second = out.splitlines()
    assert first.startswith("wrote train ")
    assert second.startswith("verified ")
    gone(javas)
    CASES["images"].prepare(work_units.Request(tmp_path / "source", tmp_path / "local"))
    assert digests(tmp_path / "to") == digests(tmp_path / "local")


def test_as_the_program_of_spark_submit_it_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the driver's pod in cluster mode, where the image's entrypoint runs spark-submit in client mode."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("JAVA_HOME", str(spark_java.home()))
    submit = Path(pyspark.__path__[0]) / "bin" / "spark-submit"
    command = Command(tmp_path)
    process = command.start(by=(str(submit), "--master", "local[2]"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert "wrote train " in out
    CASES["images"].prepare(work_units.Request(tmp_path / "source", tmp_path / "local"))
    assert digests(tmp_path / "to") == digests(tmp_path / "local")


def test_ctrl_c_ends_it_soon(tmp_path: Path) -> None:
    command = Command(tmp_path)
    process = command.start("--master", "local[1]")
    while not list(tmp_path.glob("to/.prepare/*/shard-*.json")):
        assert process.poll() is None
        time.sleep(0.001)
    everybody = below(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "stopped; the same command goes on from here"
    gone(everybody)


def test_what_spark_refuses_is_one_sentence(tmp_path: Path) -> None:
    process = Command(tmp_path).start("--master", "local[many]")
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith("Error: Spark gave up: ")
    assert "Could not parse Master URL: 'local[many,4]'" in err
