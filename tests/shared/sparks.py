"""Spark for tests: one session with two cores per process, small sources of every kind, and units of work."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outlast.base.errors import OutlastError
from outlast.data.prepare import spark, work_units

FEW = {
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parent),
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
"""Configuration with which executors find the units below, and Java compiles little: it lives for seconds."""


of_pyspark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
"""Mark of tests that use Spark: pyspark leaves closing its sockets to the garbage collector."""


@pytest.fixture(scope="session")
def _session() -> Iterator[spark.Engine]:
    with spark.opened(spark.Settings("local[2]", conf=FEW)) as engine:
        engine.start()
        yield engine


@pytest.fixture
def spark_engine(_session: spark.Engine) -> Iterator[Callable[..., spark.Engine]]:
    """Return a factory of engines that share one session, for tests marked `of_pyspark`: `spark_engine(partitions=2)`."""
    yield lambda partitions=None: spark.Engine(spark.Settings("local[2]", partitions, FEW), _session.context)
    gc.collect()  # here, not in a later test, which would be blamed for pyspark's sockets


# ---- every kind


def _texts(source: Path) -> None:
    for i in range(12):
        (source / f"{i}.txt").write_text(f"document {i}, said so\n" * (10 + i))
    (source / "long.txt").write_text("a long one, übrigens, that is cut into units\n" * 100)


def _records(source: Path) -> None:
    record = {"messages": [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "good day"}]}
    (source / "a.jsonl").write_text("".join(json.dumps({**record, "id": i}) + "\n" for i in range(40)))


def _pngs(source: Path) -> None:
    from PIL import Image

    for i in range(40):
        path = source / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 6), (i, 2 * i, 3 * i)).save(path)


def _videos(source: Path) -> None:
    import av
    import numpy as np

    for i in range(5):
        (source / str(i % 2)).mkdir(exist_ok=True)
        with av.open(str(source / str(i % 2) / f"{i}.mkv"), "w") as container:
            stream = container.add_stream("ffv1", rate=25)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv444p"
            for at in range(4):
                frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * i + at, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())


def prepare(kind: str, **settings: Any) -> Callable[[work_units.Request], Any]:
    def prepared(request: work_units.Request) -> Any:
        import importlib

        module = importlib.import_module(f"outlast.data.prepare.{kind}")
        return module.prepare(request, module.Settings(**settings))

    return prepared


@dataclass(frozen=True)
class Case:
    """Source, with the preparation that divides it into several units."""

    write: Callable[[Path], None]
    prepare: Callable[[work_units.Request], Any]


CASES: Mapping[str, Case] = {
    "characters": Case(_texts, prepare("text", tokenizer="char", shard_size=4000)),
    "bpe": Case(_texts, prepare("text", tokenizer="bpe", vocab_size=300)),
    "records": Case(_records, prepare("jsonl", vocab_size=300, shard_size=800)),
    "images": Case(_pngs, prepare("images", shard_size=600)),
    "video": Case(_videos, prepare("video", frames=4, size=16, val=0.3, shard_size=30_000)),
}


# ---- units that tests watch


@dataclass(frozen=True)
class Unit:
    number: int
    seconds: float = 0.0
    wrong: str = ""

    @property
    def bytes(self) -> int:
        return 10


def do(unit: Unit, *, into: Path) -> work_units.Note:
    """Write a line with the process, then take the time, or fail."""
    with (into / f"done-{unit.number}").open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    time.sleep(unit.seconds)
    if unit.wrong == "user":
        raise OutlastError(f"unit {unit.number} cannot be done; leave it out")
    if unit.wrong == "bug":
        raise ZeroDivisionError("a bug")
    if unit.wrong == "disk":
        raise OSError(28, "No space left on device")
    return {"number": unit.number, "python": sys.executable, "threads": os.environ.get("RAYON_NUM_THREADS")}


def times(directory: Path, number: int) -> int:
    path = directory / f"done-{number}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def results(directory: Path, engine: work_units.Engine, *units: Unit, **request: Any) -> list[work_units.Note]:
    (directory / "to").mkdir(exist_ok=True)
    asked = work_units.Request(directory, directory / "to", engine=engine, **request)
    with work_units.opened(asked, {}, []) as place:
        return place.results("stage", functools.partial(do, into=directory), units)


# ---- whole runs, as processes that tests kill


GATED = "000005"
"""Number of the unit whose first attempt never ends."""


def watched(unit: Any, *, do: Callable[[Any], work_units.Note], into: Path, stage: str) -> work_units.Note:
    """Do a unit of any kind, after recording its process."""
    path = into / f"{stage}-{unit.number:06d}"
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    while path.name.endswith(GATED) and stage != "survey" and len(path.read_text().splitlines()) == 1:
        time.sleep(0.05)
    return do(unit)


@dataclass(frozen=True)
class Watched:
    """Engine that records the processes of its units, and one of whose units never ends at the first attempt."""

    engine: work_units.Engine
    into: Path

    def done(self, task: work_units.Task[Any], *rest: Any) -> Mapping[int, work_units.Note]:
        slow = functools.partial(watched, do=task.do, into=self.into, stage=task.stage)
        return self.engine.done(dataclasses.replace(task, do=slow), *rest)


def main(case: str, source: str, to: str, into: str, master: str) -> None:
    """Prepare a case on Spark: `python -c "import sparks; sparks.main(...)"`."""
    with spark.opened(spark.Settings(master, conf=FEW)) as engine:
        CASES[case].prepare(work_units.Request(Path(source), Path(to), unit=600, engine=Watched(engine, Path(into))))
