"""Spark as the engine of `outlast data prepare`: the same bytes as the local engine's, and a sentence for whatever is missing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast import cli
from outlast.base.errors import OutlastError, Stopped
from outlast.data.prepare import spark, work_units
from outlast.data.prepare.source_files import BadSource
from sparks import CASES, Unit, of_pyspark, prepare, results, times
from texts import digests
from waits import until

Engines = Callable[..., spark.Engine]
pytestmark = of_pyspark


# ---- the options and the machine, without Spark


def refusal(*args: object) -> str:
    with pytest.raises(OutlastError) as refused:
        spark.settings(*args)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_options_that_spark_cannot_meet_are_one_sentence() -> None:
    for conf in ("x", "executor.memory=4g", "spark.master=yarn"):
        assert refusal(None, None, [conf]).startswith(f"--conf {conf} is not KEY=VALUE of Spark; write --conf spark.executor.mem")
    for attempts in ("0", "many"):
        said = f"--conf spark.task.maxFailures={attempts} is not a number of attempts; give 1 or more"
        assert refusal(None, None, [f"spark.task.maxFailures={attempts}"]) == said


def test_under_spark_submit_master_and_configuration_are_those_of_the_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert refusal("local[2]", None, ()) == "--master is for spark-submit, which runs this; give it before the program"
    assert refusal(None, None, ["spark.x=a"]) == "--conf is for spark-submit, which runs this; give it before the program"
    assert spark.configuration(spark.settings(None, None, ())) == {
        "spark.executorEnv.RAYON_NUM_THREADS": "1",
        "spark.executorEnv.TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.parametrize(
    ("master", "conf", "said"),
    [
        (None, (), "local[*,4]"),
        ("local", (), "local[1,4]"),
        ("local[2]", ["spark.task.maxFailures=1"], "local[2,1]"),
        ("local[3,9]", (), "local[3,9]"),
        ("spark://a:7077,b:7077", (), "spark://a:7077,b:7077"),
    ],
)
def test_spark_tries_tasks_again_on_one_machine_too(master: str | None, conf: Sequence[str], said: str) -> None:
    assert spark.configuration(spark.settings(master, None, conf))["spark.master"] == said


def test_the_configuration_is_the_users_where_it_is_not_ours() -> None:
    made = spark.configuration(spark.settings("local", None, ["spark.ui.enabled=true", "spark.x=a=b"]))
    assert made == {
        "spark.app.name": "outlast data prepare",
        "spark.ui.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.RAYON_NUM_THREADS": "1",
        "spark.executorEnv.TOKENIZERS_PARALLELISM": "false",
        "spark.x": "a=b",
        "spark.master": "local[1,4]",
    }


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("An error occurred while calling z:x.\n: java.lang.IllegalArgumentException: Executor memory 1 is little.\n\tat",
         "java.lang.IllegalArgumentException: Executor memory 1 is little"),
        (": org.apache.spark.SparkException: Lost: Traceback (most recent call last):\nKeyError: 'a'\n\n\tat", "KeyError: 'a'"),
        ("Invalid maximum heap size: -Xmxlots", "Invalid maximum heap size: -Xmxlots"),
        ("", "it does not say why"),
    ],
)  # fmt: skip
def test_what_spark_refuses_is_told_in_its_own_words(message: str, reason: str) -> None:
    assert str(spark.gave_up(message)).startswith(f"Spark gave up: {reason}; correct that (if")


def test_a_master_without_executors_is_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, known, said = [0.0], [1], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = SimpleNamespace(size=lambda: known[0])
    java = SimpleNamespace(sc=lambda: SimpleNamespace(getExecutorMemoryStatus=lambda: status))

    def looked(master: str) -> int:
        now[0], before = 0.0, len(said)
        alone = spark._ExecutorWatch(SimpleNamespace(_jsc=java, master=master), said.append)
        for now[0] in range(150):
            alone.check()
        return len(said) - before

    assert looked("spark://there:7077") == 2
    assert said[0].startswith("no executor has come for 60 s: spark://there:7077 has no free cores or memory for one, or its")
    assert looked("local[2]") == 0
    known[0] = 2
    assert looked("spark://there:7077") == 0


def test_the_command_line_refuses_what_does_not_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.txt").write_text("to be\n" * 100)

    def said(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", "prepare", "text", str(tmp_path / "input.txt"), "--to", str(tmp_path / "to"), *options])
        out, err = capfd.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
        return err

    assert said("--master", "local") == "Error: --master is for Spark; add --engine spark, or leave it out\n"
    assert said("--partitions", "2") == "Error: --partitions is for Spark; add --engine spark, or leave it out\n"
    assert said("--engine", "spark", "--processes", "2").startswith("Error: --processes is for --engine local; leave it out, and")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert said("--engine", "spark") == "Error: --engine spark needs the library pyspark; run: pip install 'outlast[spark]'\n"
    assert not (tmp_path / "to").exists()


# ---- two attempts of a unit


class Twice:
    """An engine that does each unit a second time while the first time is just writing its file."""

    def done(
        self, task: work_units.Task[Any], units: Sequence[Any], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, work_units.Note]:
        return {unit.number: self._twice(task, unit) for unit in units}

    def _twice(self, task: work_units.Task[Any], unit: Any) -> work_units.Note:
        flush, others = os.fsync, []

        def meanwhile(fd: int) -> None:
            os.fsync = flush
            others.append(task(unit))
            flush(fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", meanwhile)
            note = task(unit)
        assert others in ([note], [])
        return note


@pytest.mark.parametrize("case", ["characters", "records", "images"])
def test_a_unit_may_be_done_by_two_at_once(case: str, tmp_path: Path) -> None:
    local = prepared(case, tmp_path, None, "local")
    assert prepared(case, tmp_path, Twice(), "twice") == local


class Recorded:
    """An engine that is stopped before the first unit of a stage, and knows what it would have done."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def done(
        self, task: work_units.Task[Any], units: Sequence[Any], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, work_units.Note]:
        if task.stage != self.stage:
            return work_units.Processes(1).done(task, units, check, finished)
        self.task, self.units = task, units
        raise Stopped("stopped")


@pytest.mark.parametrize(
    ("case", "stage", "others"), [("images", "shard", {"shard_size": 500}), ("characters", "encode", {"tokenizer": "char"})]
)
def test_units_of_another_run_that_end_late_replace_nothing(
    case: str, stage: str, others: dict[str, Any], tmp_path: Path
) -> None:
    local = prepared(case, tmp_path, None, "local")
    left = Recorded(stage)
    other = prepare("images" if case == "images" else "text", val=0.5, **others)
    with pytest.raises(Stopped):
        other(work_units.Request(tmp_path / "source" / case, tmp_path / "to" / case, unit=700, engine=left))
    assert prepared(case, tmp_path, None, "to") == local
    with pytest.raises((FileNotFoundError, OutlastError)):
        left.task(left.units[0])
    assert digests(tmp_path / "to" / case) == local


@pytest.mark.parametrize(("case", "kind"), [("characters", "text"), ("images", "images"), ("video", "video")])
def test_what_cannot_be_read_here_is_not_damage(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an executor without the source would leave it out."""
    (tmp_path / "source").mkdir()
    CASES[case].write(tmp_path / "source")
    left = Recorded("encode" if kind == "text" else "shard")
    some: dict[str, Any] = {"tokenizer": "char"} if kind == "text" else {"size": 16}
    request = work_units.Request(tmp_path / "source", tmp_path / "to", engine=left)
    with pytest.raises(Stopped):
        prepare(kind, skip_damaged=True, **some)(request)
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    with pytest.raises(OutlastError, match=r"cannot read .*: No such file or directory; correct that") as raised:
        left.task(left.units[0])
    assert spark.of_machine(raised.value)
    assert not spark.of_machine(BadSource("1.png is damaged"))


# ---- Spark itself


def prepared(case: str, tmp_path: Path, engine: work_units.Engine | None, to: str) -> dict[str, str]:
    source = tmp_path / "source" / case
    if not source.exists():
        source.mkdir(parents=True)
        CASES[case].write(source)
    CASES[case].prepare(work_units.Request(source, tmp_path / to / case, unit=600, engine=engine))
    return digests(tmp_path / to / case)


def test_spark_makes_the_bytes_of_the_local_engine(tmp_path: Path, spark_engine: Engines) -> None:
    """The only quick test with a Spark: with several, each process of xdist would start one. The next has every kind."""
    local = prepared("characters", tmp_path, None, "local")
    assert len(local) > 3
    assert prepared("characters", tmp_path, spark_engine(2), "spark") == local
    with pytest.raises(OutlastError, match=r"^unit 1 cannot be done; leave it out$"):
        results(tmp_path, spark_engine(2), Unit(0), Unit(1, wrong="user"))
    assert times(tmp_path, 1) == 1, "it is not tried again"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_partitions_is_not_in_the_bytes(case: str, tmp_path: Path, spark_engine: Engines) -> None:
    local = prepared(case, tmp_path, None, "local")
    for partitions in (1, 2, 8, None):
        assert prepared(case, tmp_path, spark_engine(partitions), f"spark-{partitions}") == local


@pytest.mark.slow
def test_units_are_done_once_by_our_python_and_their_bytes_are_told(tmp_path: Path, spark_engine: Engines) -> None:
    told: list[tuple[str, int, int]] = []
    units = [Unit(number) for number in range(9)]
    notes = results(tmp_path, spark_engine(8), *units, progress=lambda *progress: told.append(progress))
    assert notes == [{"number": unit.number, "python": sys.executable, "threads": "1"} for unit in units]
    assert (told[0], told[-1]) == (("stage", 0, 90), ("stage", 90, 90))
    assert told == sorted(told)
    assert results(tmp_path, spark_engine(3), *units, Unit(9)) == [*notes, {**notes[0], "number": 9}], "others are not done again"
    assert [times(tmp_path, number) for number in range(10)] == [1] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        ("disk", OutlastError, "the disk of TMP/to is full; make room there and run"),
        ("bug", RuntimeError, "Traceback (most recent call last):"),
    ],
)
def test_what_goes_wrong_in_an_executor_is_told_here(
    wrong: str, error: type[Exception], reason: str, tmp_path: Path, spark_engine: Engines
) -> None:
    with pytest.raises(error) as raised:
        results(tmp_path, spark_engine(2), Unit(0), Unit(1, wrong=wrong))
    assert type(raised.value) is error
    assert str(raised.value).replace(str(tmp_path), "TMP").startswith(reason)
    assert times(tmp_path, 1) == 4, "what may be the machine's is tried again"


@pytest.mark.slow
def test_stopping_ends_units_that_are_being_done(tmp_path: Path, spark_engine: Engines) -> None:
    stop = threading.Event()

    def begun() -> None:
        until(lambda: times(tmp_path, 0))
        stop.set()

    threading.Thread(target=begun, daemon=True).start()
    with pytest.raises(Stopped, match="the same command goes on from here"):
        results(tmp_path, spark_engine(1), Unit(0, seconds=1e6), Unit(1), stop=stop)
    assert results(tmp_path, spark_engine(1), Unit(1)), "and Spark can be used again"
