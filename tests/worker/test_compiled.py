"""What compilers make is kept in the store of an output: fetched before training, sent beside it, never overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.job.status import State
from outlast.storage import store
from outlast.storage.checkpoints import Retention
from outlast.worker.agent import upload
from outlast.worker.prepare import compile_cache
from outlast.worker.prepare.compile_cache import Cache
from servers import Place

STOP = threading.Event()
OLD = time.time() - 3600


def a_worker(tmp_path: Path, name: str = "worker-0", **more: str) -> dict[str, str]:
    """The environment of an agent on a machine of its own, whose output is in a store."""
    machine = tmp_path / name
    (machine / "code").mkdir(parents=True, exist_ok=True)
    (tmp_path / "store").mkdir(exist_ok=True)
    return {
        "OUTLAST_STORE": f"file://{tmp_path}/store/job",
        "OUTLAST_OUTPUT": f"{machine}/output/job",
        "OUTLAST_CACHE": f"{machine}/cache",
        "OUTLAST_WORKER_STATE": f"{machine}/state",
        "OUTLAST_CODE": f"{machine}/code",
        "OUTLAST_RUN": "a1",
        "PATH": os.environ["PATH"],
        **more,
    }


def written(cache: Cache, key: str, content: str = "x", at: float = OLD) -> Path:
    path = cache.directory / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (at, at))
    return path


def held(place: store.Store | None) -> dict[str, bytes]:
    assert place is not None
    return {entry.key: place.get(entry.key) for entry in place.entries()}


def test_the_newest_file_of_each_directory_travels_last() -> None:
    times = {"neff/MODULE_1/model.done": 3.0, "neff/MODULE_1/model.neff": 2.0, "neff/MODULE_1/flags": 1.0, "triton/a/b.so": 9.0}
    first, last = compile_cache.waves(times)
    assert sorted(first) == ["neff/MODULE_1/flags", "neff/MODULE_1/model.neff"]
    assert last == ["neff/MODULE_1/model.done", "triton/a/b.so"]


def test_a_machine_gets_what_another_one_compiled_and_nothing_is_overwritten(tmp_path: Path) -> None:
    one, two = (Cache.of(a_worker(tmp_path, name)) for name in ("one", "two"))
    assert one.directory != two.directory
    written(one, "inductor/ab/code.py", "first")
    written(one, "inductor/ab/unfinished.so", at=time.time())
    written(one, "inductor/locks/ab.lock")
    written(one, "inductor/ab/.12.tmp")
    written(one, "triton/c/tmp.pid_7_1/kernel.so", "\x7fELF")
    written(one, "inductor/ab/killed.so", "\0\0\0\0")  # what GNU's linker leaves when it is killed
    assert one.push(STOP, before=time.time() - compile_cache.SETTLED_S) == 1
    assert two.fetch(STOP) == 1
    assert (two.directory / "inductor/ab/code.py").read_text() == "first"
    written(two, "inductor/ab/code.py", "another machine's")
    written(two, "triton/c/kernel.so", "\x7fELF")
    assert two.push(STOP) == 1
    assert held(one.place) == {"inductor/ab/code.py": b"first", "triton/c/kernel.so": b"\x7fELF"}
    assert (one.fetch(STOP), one.push(STOP, before=OLD), two.fetch(STOP)) == (1, 0, 0)
    one.mend()
    assert not (one.directory / "inductor/ab/killed.so").exists(), "torch would take it for complete"
    assert (one.directory / "triton/c/kernel.so").exists()


def test_without_a_store_the_directory_is_beside_the_jobs_of_the_output(tmp_path: Path) -> None:
    environ = {"OUTLAST_OUTPUT": f"{tmp_path}/runs/digits"}
    cache = Cache.of(environ)
    assert cache == Cache(tmp_path / "runs" / ".compiled")
    assert (cache.fetch(STOP), cache.push(STOP)) == (0, 0)
    mine = cache.variables({"TRITON_CACHE_DIR": "/mine"})
    assert mine["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/runs/.compiled/inductor"
    assert set(mine) == set(compile_cache.VARIABLES) - {"TRITON_CACHE_DIR"}


COMPILER = """
import os, pathlib, sys
assert sys.argv.pop() == os.environ["OUTLAST_OUTPUT"]
cache = pathlib.Path(os.environ["NEURON_COMPILE_CACHE_URL"], "MODULE_1")
cache.mkdir(parents=True)
cache.joinpath("model.neff").write_text(" ".join(sys.argv[1:]))
other = cache.with_name("MODULE_2")
other.mkdir()
other.joinpath("model.neff").write_text("half of what another job writes")
os.utime(other / "model.neff", (4e9, 4e9))  # and goes on to write when we have ended
pathlib.Path(os.environ["OUTLAST_OUTPUT"], "checkpoint").write_text("a trial's")
print(os.getcwd(), [name for name in os.environ if name.startswith("OUTLAST_")])
"""


def test_the_warm_up_runs_once_in_a_run_and_its_output_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile_cache, "KILLED_S", 0)
    environ = a_worker(tmp_path, STEPS="5")
    Path(environ["OUTLAST_CODE"], "compiler.py").write_text(COMPILER)
    command = ["python", "compiler.py", "--max-steps", "$(STEPS)", "$(OUTLAST_OUTPUT)"]
    for _ in range(2):  # the second start of the worker
        compile_cache.prepare(Cache.of(environ), command, dict(environ), sys.executable, said.append, STOP)
    assert [line for line in said if "took" not in line] == [
        "compile.warmUp: python compiler.py --max-steps $(STEPS) $(OUTLAST_OUTPUT)"
    ], "no secrets"
    log = Path(environ["OUTLAST_WORKER_STATE"], "warm-up.log").read_text()
    assert log == f"{environ['OUTLAST_CODE']} ['OUTLAST_CACHE', 'OUTLAST_OUTPUT']\n"
    assert not Path(environ["OUTLAST_WORKER_STATE"], "warm-up").exists()
    other = a_worker(tmp_path, "worker-1")  # without the compiler: it need not compile
    compile_cache.prepare(Cache.of(other), command, other, sys.executable, said.append, STOP)
    assert Path(other["NEURON_COMPILE_CACHE_URL"], "MODULE_1", "model.neff").read_text() == "--max-steps 5"
    assert said[2:] == ["fetched 2 compiled files"]
    assert not Path(other["NEURON_COMPILE_CACHE_URL"], "MODULE_2").exists(), "it would stay half a file in the store for ever"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["neuron_parallel_compile", "x"], "compile.warmUp: there is no neuron_parallel_compile on PATH; install it"),
        (["python", "-c", "raise ValueError('no graph')"], "compile.warmUp: python failed: ValueError: no graph; correct"),
    ],
)
def test_a_warm_up_that_fails_says_why_and_leaves_no_marker(tmp_path: Path, command: list[str], sentence: str) -> None:
    environ = a_worker(tmp_path)
    for _ in range(2):
        with pytest.raises(OutlastError) as caught:
            compile_cache.prepare(Cache.of(environ), command, environ, sys.executable, lambda _: None, STOP)
        assert str(caught.value).startswith(sentence)


def test_a_store_that_fails_is_no_reason_not_to_train(tmp_path: Path) -> None:
    said: list[str] = []
    environ = a_worker(tmp_path)
    cache = Cache.of(environ)
    written(cache, "inductor")  # a file where the store has a directory
    assert cache.place is not None
    cache.place.put("inductor/ab/code.py", b"x")
    compile_cache.prepare(cache, (), environ, sys.executable, said.append, STOP)
    assert [line.partition(":")[0] for line in said] == ["compiled code could not be fetched, and may be compiled again"]
    assert environ["TRITON_CACHE_DIR"].startswith(str(cache.directory))


def test_a_cache_larger_than_half_the_free_disk_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    environ = a_worker(tmp_path)
    cache = Cache.of(environ)
    assert cache.place is not None
    cache.place.put("inductor/ab/code.py", b"x" * 600)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    compile_cache.prepare(cache, (), environ, sys.executable, said.append, STOP)
    assert ["has 600 B to fetch, more than half of 1000 B that are free" in line for line in said] == [True], said
    assert not (cache.directory / "inductor").exists()


def test_compilers_are_not_sent_to_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    environ = {"OUTLAST_OUTPUT": f"{tmp_path}/runs/digits"}
    with pytest.raises(
        OutlastError, match=r"compile\.cache: .*/runs/\.compiled cannot be written to: Not a directory; name another"
    ):
        compile_cache.prepare(Cache.of(environ), (), environ, sys.executable, lambda _: None, STOP)


def test_an_output_is_uploaded_although_what_was_compiled_is_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environ = a_worker(tmp_path)
    output = Path(environ["OUTLAST_OUTPUT"])
    output.mkdir(parents=True)
    (output / "final.json").write_text("{}")
    cache = Cache.of(environ)
    written(cache, "inductor/ab/code.py")
    (tmp_path / "store" / compile_cache.NAME).write_text("a file where the store has a directory")
    place = store.open_(environ["OUTLAST_STORE"])
    uploader = upload.Uploader(output, place, "a1", "me", Retention(3), lambda _: None)
    uploader.compiled = cache
    assert upload.flush(uploader, time.monotonic() + 20) == ""
    assert place.get("final.json") == b"{}"
    assert "compiled code could not be uploaded completely" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("compile", "sentence"),
    [
        ("{warmUp: [neuron_parallel_compile]}", "compile.warmUp fills a cache that is not kept; set compile.cache: true"),
        ("{cache: true, warmUp: ['']}", "compile.warmUp begins with an empty word; begin with a program"),
    ],
)
def test_a_warm_up_that_could_not_work_is_a_mistake_of_the_job_file(compile: str, sentence: str) -> None:
    with pytest.raises(OutlastError, match=re.escape(sentence)):
        spec.parse(
            "apiVersion: outlast.dev/v1alpha1\nkind: ElasticJob\nmetadata: {name: a}\n"
            f"spec:\n  module: m\n  compile: {compile}\n"
        )


# Real jobs


COMPILING = """
import json, os, sys, time, torch
from torch._dynamo.utils import counters
from outlast.training import session

@torch.compile
def wave(x):
    return (x.sin() + x.cos()).sum()

with session.open() as run:
    wave(torch.ones(64))
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    (run.output / "found.json").write_text(json.dumps(found))
    print("compiled", sys.argv[1:], flush=True)
    time.sleep(3)  # longer than compile_cache.KILLED_S: what changes just before the end is not sent
"""


def a_compiling_job(machine: Any, url: str, **compile: object) -> Path:
    code = machine.directory / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text(COMPILING)
    fields = {"script": "train.py", "code": str(code), "workers": {"replicas": 1}, "hang": {"limit": "120s"}, "output": url}
    path: Path = machine.job("compiling", **fields, compile={"cache": True, **compile})
    return path


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("s3", ["rclone"], indirect=True)
@pytest.mark.parametrize("warm_up", [[], ["python", "train.py", "--max-steps", "2"]], ids=["", "with a warm-up"])
def test_a_machine_without_a_cache_compiles_nothing_that_another_one_compiled(
    machine: Any, s3: Place, monkeypatch: pytest.MonkeyPatch, warm_up: list[str]
) -> None:
    for cache, found in (("one", {"hit": 1, "miss": 0} if warm_up else {"hit": 0, "miss": 1}), ("two", {"hit": 1, "miss": 0})):
        monkeypatch.setenv("OUTLAST_CACHE", str(machine.directory / cache))
        status = machine.run(a_compiling_job(machine, s3.url, warmUp=warm_up))
        assert status.state is State.SUCCEEDED, status.reason
        assert json.loads((machine.backend.output("compiling") / "found.json").read_text()) == found
        log = "\n".join(line.text for line in machine.backend.logs("compiling"))
        assert ("compiled files" in log) == (cache == "two")
    assert not [key for key in held(store.open_(s3.url)) if "warm-up/checkpoints" in key]
