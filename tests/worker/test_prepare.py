"""Code, data and models on their way to a worker: fetched once, kept apart, gone on with after a kill, never mixed."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.base import file_locks
from outlast.base.errors import InvalidJob, OutlastError, Stopped, StoreError
from outlast.job import contract, spec
from outlast.job.shipping import archives
from outlast.storage import store
from outlast.storage.store import Store
from outlast.storage.sync import push_and_pull
from outlast.worker.prepare import code_placement, data_cache, data_cache_eviction, fetch_from_store, phases
from packages import tar
from servers import Place
from waits import until
from web import Web


def contents(directory: Path) -> dict[str, str]:
    """The files of a tree."""
    found = (path for path in directory.rglob("*") if not path.is_dir())
    return {str(path.relative_to(directory)): path.read_text() for path in found}


@pytest.fixture
def place() -> Store:
    """An empty place in a store of this process."""
    return store.open_(f"memory://{uuid.uuid4().hex}").child("digits")


def put(place: Store, **files: str) -> None:
    for name, text in files.items():
        place.put(name.replace("__", "/").replace("_", "."), text.encode())


class Runs:
    """Runs of this machine, each with notes of its own, and one cache."""

    def __init__(self, directory: Path, place: Store) -> None:
        self.directory, self.place = directory, place
        self.cache = directory / "cache"
        self.said: list[str] = []
        self.when_fetching: Callable[[], object] = lambda: None

    def say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("fetching"):
            self.when_fetching()

    def once_fetching(self, act: Callable[[], object]) -> None:
        """Act when the next fetch begins."""
        acts = iter([act])
        self.when_fetching = lambda: next(acts, lambda: None)()

    def source(self, run: str = "a", *, url: str = "", stop: threading.Event | None = None) -> data_cache.Source:
        pins = self.directory / run / "pins"
        return data_cache.Source(self.cache, url or self.place.url, field="data[0].from", pins=pins, say=self.say, stop=stop)

    def trees(self) -> list[dict[str, str]]:
        """All versions there are, whole or not."""
        return sorted((contents(path) for path in self.cache.glob("data/*/*/tree")), key=str)


@pytest.fixture
def runs(tmp_path: Path, place: Store) -> Runs:
    return Runs(tmp_path, place)


# Data


def test_data_is_fetched_once_for_all_runs_of_a_machine(runs: Runs, place: Store):
    put(place, a_bin="one", sub__b_bin="two")
    place.put(".outlast-manifest", b"of outlast sync, no data")
    first = runs.source("first").acquire()
    assert contents(first.tree) == {"a.bin": "one", "sub/b.bin": "two"}
    assert runs.said[0] == f"fetching data[0].from ({place.url}): 2 files, 6 B"
    assert runs.said[1].startswith(f"fetched data[0].from ({place.url}): 6 B in ")
    second = runs.source("second").acquire()
    assert (second.tree, second.version) == (first.tree, first.version)
    assert runs.said[2:] == [f"data[0].from ({place.url}) is here already"]
    assert not (first.tree / "a.bin").stat().st_mode & 0o222, "it belongs to all: read only"


def test_a_run_keeps_the_data_it_began_with_whatever_becomes_of_the_store(runs: Runs, place: Store):
    put(place, a="one")
    runs.source().acquire().close()
    put(place, a="two")
    assert contents(runs.source().acquire().tree) == {"a": "one"}
    place.delete(["a"])
    assert contents(runs.source().acquire().tree) == {"a": "one"}


def test_a_version_goes_when_no_worker_uses_it_and_no_run_has_noted_it(runs: Runs, place: Store):
    put(place, a="1")
    worker = runs.source("old").acquire()
    put(place, a="2")
    runs.source("new").acquire().close()
    assert runs.trees() == [{"a": "1"}, {"a": "2"}], "a worker uses it, and its run may go on"
    worker.close()
    put(place, a="3")
    runs.source("newer").acquire().close()
    assert runs.trees() == [{"a": "1"}, {"a": "2"}, {"a": "3"}], "their runs may go on"
    for pin in (runs.directory / "old" / "pins").iterdir():
        pin.unlink()  # as a new run of that name does
    held = runs.source("new").acquire()
    for pin in (runs.directory / "new" / "pins").iterdir():
        pin.unlink()
    put(place, a="4")
    runs.source("newest").acquire().close()
    assert runs.trees() == [{"a": "2"}, {"a": "3"}, {"a": "4"}], "the first is gone, a worker uses the second"
    held.close()


def test_a_run_whose_data_is_lost_here_and_changed_there_does_not_go_on_with_other_data(runs: Runs, place: Store):
    put(place, a="one")
    version = runs.source().acquire()
    version.close()
    (version.tree.parent / "listing.json").unlink()
    (version.tree / "a").unlink()
    put(place, b="more")
    with pytest.raises(OutlastError, match=r"^data\[0\].from \(.*\) has changed since this run began, and this machine has no"):
        runs.source().acquire()
    place.delete(["b"])
    assert contents(runs.source().acquire().tree) == {"a": "one"}, "it is the same again"


def test_what_somebody_removed_from_the_data_of_all_is_fetched_by_the_next_run(runs: Runs, place: Store):
    put(place, a="one", b="two")
    tree = runs.source("first").acquire().tree
    (tree / "b").unlink()
    (tree / "a").unlink()
    (tree / "a").write_text("on")
    whole: list[bool] = []
    runs.once_fetching(lambda: whole.append(tree.with_name("listing.json").exists()))
    assert contents(runs.source("second").acquire().tree) == {"a": "one", "b": "two"}
    assert whole == [False], "a kill on the way leaves no version that looks complete"
    assert not (tree / "a").stat().st_mode & 0o222


def test_a_version_of_an_older_outlast_has_a_size(runs: Runs, place: Store):
    put(place, a="one")
    tree = runs.source().acquire().tree
    (tree.with_name("listing.json")).write_text(json.dumps({"url": "x", "files": [["a", 3, "etag", 0], ["b", 4, "etag", 0]]}))
    data_cache._size.cache_clear()
    assert [thing.size for thing in data_cache.things(runs.cache)] == [7]


def test_files_replaced_while_they_are_fetched_are_never_mixed(runs: Runs, place: Store):
    put(place, a="old", b="old")
    runs.once_fetching(lambda: put(place, a="new", b="new"))
    assert contents(runs.source().acquire().tree) == {"a": "new", "b": "new"}
    assert f"data[0].from ({place.url}) has changed while it was fetched; fetching again" in runs.said
    assert len(runs.trees()) == 1, "what was begun is removed"


def test_a_file_that_goes_while_it_is_fetched_is_no_longer_part_of_the_data(runs: Runs, place: Store):
    put(place, a="a", b="b")
    runs.once_fetching(lambda: place.delete(["b"]))
    assert contents(runs.source().acquire().tree) == {"a": "a"}


def test_a_store_that_never_rests_is_given_up(runs: Runs, place: Store):
    count = iter(range(100))
    put(place, a="0")
    runs.when_fetching = lambda: put(place, a=str(next(count)))
    with pytest.raises(store.StoreError, match="changes faster than it can be fetched") as caught:
        runs.source().acquire()
    assert caught.value.retry


def test_the_url_of_one_object_gives_a_directory_with_that_file(runs: Runs, place: Store):
    put(place, train_bin="tokens")
    assert contents(runs.source(url=f"{place.url}/train.bin").acquire().tree) == {"train.bin": "tokens"}


def test_a_dataset_that_is_still_being_sent_is_no_data(runs: Runs, place: Store):
    put(place, **{"a.txt": "a", ".outlast-get": "cifar10"})
    with pytest.raises(OutlastError) as caught:
        runs.source().acquire()
    reason = "is not complete: outlast data get or prepare has not finished there; wait for it, or run it again"
    assert str(caught.value) == f"data[0].from ({place.url}) {reason}"
    put(place, **{".outlast-data.json": "{}"})
    assert "a.txt" in contents(runs.source().acquire().tree)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, r"^data\[0\].from \(memory://.*\) is empty; put files there, or correct the URL$"),
        ({"a": "not empty", "a__b": "x"}, r"has both a file and a directory a; rename one of them"),
    ],
)
def test_a_place_that_can_be_no_data_is_said(runs: Runs, place: Store, files: dict[str, str], sentence: str):
    put(place, **files)
    with pytest.raises(OutlastError, match=sentence):
        runs.source().acquire()


def test_names_of_all_kinds_arrive(runs: Runs, place: Store):
    expected = {f"{name}/{name}": name for name in ("a b", "ä€", "#1%20", "-rf")} | {"empty/empty": ""}
    for name, text in expected.items():
        place.put(name, text.encode())
    assert contents(runs.source().acquire().tree) == expected


def test_who_comes_second_waits_and_says_so(runs: Runs, place: Store):
    put(place, a="one")
    source = runs.source()
    found: list[Any] = []
    with file_locks.exclusive(source._home / "lock", waiting=lambda: None, stop=threading.Event()):
        thread = threading.Thread(target=lambda: found.append(source.acquire()))
        thread.start()
        until(lambda: runs.said)
        assert runs.said == [f"waiting for another worker that fetches data[0].from ({place.url})"]
        assert not found
        stop = threading.Event()
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(Stopped):  # told to leave
            runs.source(stop=stop).acquire()
    thread.join()
    assert contents(found[0].tree) == {"a": "one"}


def dies_or_ends(argv: list[str], dies: bool, longest_s: float, rng: random.Random) -> bytes:
    """What a process prints after its first line; it is killed at a random moment after that, if it dies."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        if dies:
            time.sleep(rng.uniform(0, longest_s))
            process.send_signal(signal.SIGKILL)
        return process.stdout.read()


TAKE = """
import sys
from pathlib import Path
from outlast.worker.prepare import data_cache
say = lambda text: print(text, flush=True)
data_cache.Source(Path(sys.argv[1]), sys.argv[2], field="data", pins=Path(sys.argv[3]), say=say).acquire()
print("done")
"""


@pytest.mark.slow
def test_a_fetch_that_is_killed_again_and_again_goes_on_where_it_was(tmp_path: Path, rclone: Place):
    """kill -9 at random moments. Files that were whole are not fetched again: their inodes stay."""
    rng = random.Random(5)
    expected = {f"{i % 7}/{i}.bin": rng.randbytes(rng.choice([0, 10, 100_000])) for i in range(1500)}
    there = tmp_path / "there"
    for name, content in expected.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    url, cached = f"{rclone.url}/data", tmp_path / "cache"
    push_and_pull.send(store.open_(url), [(there / name, name) for name in expected], journals=tmp_path / "journals")
    inodes: dict[str, int] = {}
    kills = 0
    while True:
        argv = [sys.executable, "-c", TAKE, str(cached), url, str(tmp_path / "pins")]
        rest = dies_or_ends(argv, kills < 10, 0.3, rng)
        (tree,) = cached.glob("data/*/*/tree")
        now = {str(p.relative_to(tree)): p.stat().st_ino for p in tree.rglob("*") if not p.is_dir()}
        for name, inode in inodes.items():
            assert now[name] == inode, f"{name} was fetched again"
        inodes = {name: inode for name, inode in now.items() if name in expected}
        if rest.endswith(b"done\n"):
            break
        kills += 1
    assert kills >= 3
    assert {name: (tree / name).read_bytes() for name in now} == expected


def test_data_that_does_not_fit_is_told_before_it_is_fetched(runs: Runs, tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "small").write_text("x")
    with (tmp_path / "there" / "huge").open("wb") as file:
        file.truncate(10 << 40)
    with pytest.raises(
        OutlastError, match=r"needs 10 TiB, the disk of /.*/tree has .* left; make room there, or let OUTLAST_CACHE"
    ):
        runs.source(url=f"file://{tmp_path}/there").acquire()
    assert runs.trees() == [{}]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutlastError) as caught:
        data_cache.writable({"OUTLAST_CACHE": str(tmp_path / "file" / "cache")})
    remedy = "correct its permissions, or let OUTLAST_CACHE name another directory"
    assert str(caught.value) == f"the cache {tmp_path}/file/cache cannot be created: Not a directory; {remedy}"


def test_a_long_fetch_says_how_far_it_is():
    now, said = [0.0], []
    meter = fetch_from_store.Meter("data", 10 << 20, say=said.append, clock=lambda: now[0])
    for _ in range(7):
        now[0] += 1
        meter.advance(1 << 20)
    meter.end()
    assert said == [
        "fetching data: 5.0 MiB of 10 MiB, 1.0 MiB/s",
        "fetched data: 10 MiB in 7.0s",
    ]


def test_the_cache_is_where_the_environment_says():
    assert data_cache_eviction.cache({"OUTLAST_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert data_cache_eviction.cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/outlast")
    assert data_cache_eviction.cache({}) == Path.home() / ".cache" / "outlast"


# Code


def a_tgz(**files: str) -> bytes:
    return tar({name.replace("__", "/").replace("_", "."): text for name, text in files.items()})


class Worker:
    """Brings code to a directory, as each worker of a run does."""

    def __init__(self, directory: Path) -> None:
        self.into, self.shared = directory / "code", directory / "run"
        self.shared.mkdir()
        self.said: list[str] = []

    def place(self, where: str, *, runs: str = "train.py") -> dict[str, str]:
        code_placement.place(where, self.into, self.shared, runs=runs, say=self.said.append, stop=threading.Event())
        return {name: text for name, text in contents(self.into).items() if name != ".outlast-files"}


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.mark.parametrize("kind", ["archive", "prefix", "archive of this machine"])
def test_code_comes_from_an_archive_or_a_prefix(worker: Worker, place: Store, tmp_path: Path, kind: str):
    files = {"train_py": "v1", "lib__a_py": "a"}
    put(place, **files)
    elsewhere = store.open_(f"{place.url}-archive")
    elsewhere.put("code.tar.gz", a_tgz(**files))
    (tmp_path / "code.tgz").write_bytes(a_tgz(**files))
    archives = {"archive": f"{elsewhere.url}/code.tar.gz", "prefix": place.url}
    assert worker.place(archives.get(kind, str(tmp_path / "code.tgz"))) == {"train.py": "v1", "lib/a.py": "a"}


@pytest.mark.parametrize("kind", ["archive", "prefix"])
def test_a_run_keeps_its_code_until_it_is_submitted_again(worker: Worker, place: Store, kind: str):
    def upload(**files: str) -> str:
        if kind == "prefix":
            put(place, **files)
            return place.url
        place.put("code.tgz", a_tgz(**files))
        return f"{place.url}/code.tgz"

    where = upload(train_py="v1", lib_py="v1", settings="v1")
    worker.place(where)
    upload(train_py="v2", lib_py="v2", settings="v2")
    (worker.into / "snapshot.pt").write_text("the job's")
    (worker.into / "settings").write_text("the job's")
    mine = {"snapshot.pt": "the job's", "settings": "the job's"}
    assert worker.place(where) == {"train.py": "v1", "lib.py": "v1", **mine}
    code_placement.submitted_again(worker.shared)
    assert worker.place(where) == {"train.py": "v2", "lib.py": "v2", **mine}, "what the job has written stays"


def test_code_that_has_not_changed_is_not_fetched_again(worker: Worker, place: Store):
    put(place, train_py="v1")
    worker.place(place.url)
    code_placement.submitted_again(worker.shared)
    (worker.into / "train.py").write_text("mended by hand")
    worker.said.clear()
    assert worker.place(place.url) == {"train.py": "mended by hand"}
    assert worker.said == []
    place.delete(["train.py"])
    assert worker.place(place.url) == {"train.py": "mended by hand"}, "a worker that starts again does not ask"


def test_an_archive_is_checked_before_anything_is_unpacked(worker: Worker, place: Store, tmp_path: Path):
    content = a_tgz(train_py="v1")
    place.put("code.tgz", content)
    (tmp_path / "copy").write_bytes(content)
    right, wrong = archives.checksum(tmp_path / "copy"), "0" * 64
    with pytest.raises(OutlastError) as caught:
        worker.place(f"{place.url}/code.tgz#sha256={wrong}")
    assert str(caught.value) == (
        f"code ({place.url}/code.tgz) has the checksum {right}, the job file says {wrong}; correct #sha256= there, or the archive"
    )
    assert worker.place(f"{place.url}/code.tgz#sha256={right.upper()}") == {"train.py": "v1"}


def test_a_bad_archive_leaves_nothing_and_a_good_one_replaces_it(worker: Worker, place: Store):
    for bad in (b"<html>", a_tgz(train_py="x")[:-10], a_tgz(**{"a": "1", "../up": "x"})):
        place.put("code.tgz", bad)
        with pytest.raises(OutlastError, match=r"^code \(memory://.*/code.tgz\) (is no tar archive|holds '../up')"):
            worker.place(f"{place.url}/code.tgz")
    place.put("code.tgz", a_tgz(train_py="v1"))
    assert worker.place(f"{place.url}/code.tgz") == {"train.py": "v1"}


PLACE = """
import sys, threading
from pathlib import Path
from outlast.worker.prepare import code_placement
print("begins", flush=True)
code, into, shared = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
code_placement.place(code, into, shared, runs="0.py", say=lambda text: None, stop=threading.Event())
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["archive", "prefix"])
def test_code_whose_workers_are_killed_again_and_again_arrives_whole(worker: Worker, tmp_path: Path, rclone: Place, kind: str):
    """kill -9 at random moments, of the first version and of one that replaces it under files of the job."""
    rng = random.Random(3)
    for version in ("v1", "v2"):
        expected = {f"{i}.py": version for i in range(300)}
        if kind == "archive":
            where = f"{tmp_path}/code.tgz"
            Path(where).write_bytes(a_tgz(**{name.replace(".", "_"): text for name, text in expected.items()}))
        else:
            where = f"{rclone.url}/code"
            for name, text in expected.items():
                store.open_(where).put(name, text.encode())
        code_placement.submitted_again(worker.shared)
        for kills in range(7):
            argv = [sys.executable, "-c", PLACE, where, str(worker.into), str(worker.shared)]
            rest = dies_or_ends(argv, kills < 6, 0.1 if kind == "archive" else 0.7, rng)
        assert rest == b"done\n"
        found = contents(worker.into)
        assert json.loads(found.pop(".outlast-files")).keys() == expected.keys()
        assert found.pop("snapshot.pt", "the job's") == "the job's"
        assert found == expected
        (worker.into / "snapshot.pt").write_text("the job's")


def test_a_first_version_that_was_killed_on_its_way_leaves_nothing(worker: Worker, place: Store):
    put(place, train_py="v1")
    worker.into.mkdir()
    (worker.into / "old.py").write_text("half of something")
    (worker.into / ".outlast-files").write_text(json.dumps({"old.py": [1, 1]}))
    (worker.into / "checkpoint.pt").write_text("fetched")  # what the run has written on another machine
    note = {"code": place.url, "version": "", "time": 0.0, "current": False}
    (worker.shared / "code.json").write_text(json.dumps(note))  # as the kill left it
    assert worker.place(place.url) == {"train.py": "v1", "checkpoint.pt": "fetched"}


@pytest.mark.parametrize(
    ("runs", "files", "expected"),
    [
        ("train.py", {"repo-1__train_py": "v1", "repo-1__lib__a_py": "a"}, {"train.py", "lib/a.py"}),
        ("src/train.py", {"src__train_py": "v1"}, {"src/train.py"}),
        ("pkg", {"pkg__main_py": "v1"}, {"pkg/main.py"}),
        ("pkg", {"repo__pkg__main_py": "v1"}, {"pkg/main.py"}),
        ("train.py", {"a__train_py": "v1", "b__c": ""}, {"a/train.py", "b/c"}),
        ("numpy", {"repo__data_py": "v1"}, {"repo/data.py"}),
    ],
)
def test_the_only_directory_of_an_archive_is_the_code_if_what_runs_is_in_there(worker, place, runs, files, expected):
    place.put("code.tgz", a_tgz(**files))
    assert worker.place(f"{place.url}/code.tgz", runs=runs).keys() == expected


def test_code_that_is_not_there_is_said(worker: Worker, place: Store):
    with pytest.raises(OutlastError) as caught:
        worker.place(f"{place.url}/code.tgz")
    assert str(caught.value) == f"code ({place.url}/code.tgz) does not exist; correct the URL"
    with pytest.raises(OutlastError, match=r"code \(memory://.*\) is empty; put files there, or correct the URL"):
        worker.place(place.url)


def test_links_of_the_job_are_not_followed_by_new_code(worker: Worker, place: Store, tmp_path: Path):
    put(place, train_py="v1", lib__a_py="v1")
    worker.place(place.url)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (worker.into / "lib" / "a.py").unlink()
    (worker.into / "lib").rmdir()
    (worker.into / "lib").symlink_to(elsewhere)
    code_placement.submitted_again(worker.shared)
    put(place, lib__a_py="v2")
    assert worker.place(place.url) == {"train.py": "v1", "lib/a.py": "v2"}
    assert list(elsewhere.iterdir()) == []


# What training sees


def a_job(**fields: Any) -> spec.Job:
    meta = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "a"}}
    return spec.parse(json.dumps({**meta, "spec": {"module": "json", **fields}}))


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Prepares data and models of a worker of a run; the environment that training gets."""

    def prepared(environ: dict[str, str] | None = None, *, run: str = "state", **fields: Any) -> dict[str, str]:
        job = spec.anchor(a_job(**fields), tmp_path)
        (tmp_path / run).mkdir(exist_ok=True)
        places = {contract.Env.STATE: tmp_path / run, contract.Env.CODE: tmp_path, contract.Env.CACHE: tmp_path / "c"}
        seen = {**job.spec.env, **{name: str(path) for name, path in places.items()}}
        phases.Preparation(job, seen, say=lambda _: None).prepare()
        return seen

    return prepared


def test_a_module_that_does_not_exist_is_named(tmp_path: Path, prepared, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(OutlastError, match=f"^module: Python finds no 'no' in {tmp_path}; correct the name or install its"):
        prepared(module="no.such.module")


def test_variables_of_the_job_may_refer_to_its_data(tmp_path: Path, prepared):
    (tmp_path / "digits").mkdir()
    data = [{"from": str(tmp_path / "digits"), "to": "/data"}]
    environ = prepared({"TRAIN": "$(OUTLAST_DATA)/train"}, data=data, env={"TRAIN": "$(OUTLAST_DATA)/train"})
    assert environ["TRAIN"] == f"{tmp_path}/digits/train"


def test_one_directory_of_data_is_used_where_it_lies(tmp_path: Path, prepared):
    (tmp_path / "digits").mkdir()
    assert prepared(data=[{"from": "digits"}])["OUTLAST_DATA"] == str(tmp_path / "digits")
    assert "OUTLAST_DATA" not in prepared()


def test_several_are_linked_as_they_lie_in_a_pod(tmp_path: Path, prepared, place: Store):
    (tmp_path / "here").mkdir()
    put(place, a="from the store")
    data = [{"from": "here", "to": "/d/x/images"}, {"from": place.url, "to": "/d/y/images"}]
    for _ in range(2):
        root = Path(prepared(data=data)["OUTLAST_DATA"])
        assert (root / "x" / "images").resolve() == tmp_path / "here"
        assert contents((root / "y" / "images").resolve()) == {"a": "from the store"}


def test_models_are_below_one_directory_by_name_and_hugging_face_stays_offline(tmp_path: Path, prepared, place: Store):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    put(place, config_json="from the store")
    models = [{"from": "bert", "name": "bert"}, {"from": place.url, "name": "gpt-2"}]
    seen = prepared(models=models)
    root = Path(seen["OUTLAST_MODELS"])
    assert (root / "bert" / "config.json").read_text() == "{}"
    assert (root / "gpt-2" / "config.json").read_text() == "from the store"
    assert (seen["HF_HUB_OFFLINE"], seen["TRANSFORMERS_OFFLINE"]) == ("1", "1")
    assert prepared(models=models, env={"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"
    assert "HF_HUB_OFFLINE" not in prepared()


def test_a_token_of_hugging_face_has_the_name_that_its_libraries_read(prepared):
    assert prepared(env={"HUGGINGFACE_HUB_TOKEN": "hf_1"})["HF_TOKEN"] == "hf_1"
    assert prepared(env={"HUGGINGFACE_HUB_TOKEN": "hf_1", "HF_TOKEN": "hf_2"})["HF_TOKEN"] == "hf_2"


def test_an_empty_object_that_shows_a_directory_of_files_is_no_data(moto: Place, monkeypatch: pytest.MonkeyPatch):
    for key in ("data/empty/", "data/full/", "data/full-not/b", "data/full/a", "data/none"):
        moto.server.client.put_object(Bucket=moto.bucket, Key=key, Body=b"x" if key[-1] in "ab" else b"")
    listing = fetch_from_store.look(f"{moto.url}/data", "data[0].from")
    assert [entry.key for entry in listing.entries] == ["full-not/b", "full/a", "none"]
    monkeypatch.setattr(Store, "head", lambda *_: (_ for _ in ()).throw(StoreError("away", retry=True)))
    with pytest.raises(StoreError, match="away"):  # else the data would look changed
        fetch_from_store.look(f"{moto.url}/data", "data[0].from")


# Files on a web server


def from_web(url: str, content: bytes | None = None) -> list[dict[str, str]]:
    checksum = hashlib.sha256(content).hexdigest() if content else "0" * 64
    return [{"from": f"{url}#sha256={checksum}"}]


def test_an_archive_is_fetched_once_for_all_runs_of_a_machine(web: Web, prepared) -> None:
    content = tar({"train.csv": "1,2", "val.csv": "3"})
    data = from_web(web.put("set.tar.gz", content), content)
    tree = Path(prepared(data=data, run="first")["OUTLAST_DATA"])
    assert {path.name for path in tree.iterdir()} == {"train.csv", "val.csv", ".outlast-data.json"}
    assert (tree / "train.csv").read_text() == "1,2"
    assert (tree / "train.csv").stat().st_mode & 0o777 == 0o444, "shared by all jobs"
    web.close()
    for run in ("first", "second"):
        assert prepared(data=data, run=run)["OUTLAST_DATA"] == str(tree), "the machine has it: no server is needed"


def test_what_is_not_what_the_job_file_says_is_refused(web: Web, prepared, tmp_path: Path) -> None:
    with pytest.raises(OutlastError, match=r"has the sha256 [0-9a-f]{64}, and must have 0{64}; it is not the file that is want"):
        prepared(data=from_web(web.put("set.tar.gz", tar({"a.csv": "1"}))))
    assert [path.name for path in (tmp_path / "c").rglob("*") if path.is_file()] == ["lock"]


def test_what_is_not_there_is_noticed_at_submission(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))
    url = f"{web.url}/absent.zip"
    with pytest.raises(OutlastError, match=rf"^data\[0\].from: cannot download {url}: 404 Not Found; check"):
        phases.check(a_job(data=from_web(url)), tmp_path / "pins")
    phases.check(a_job(data=from_web(web.put("there.zip", b"x"), b"x")), tmp_path / "pins")


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (
            "https://host/set.zip",
            "must end with #sha256= and 64 hexadecimal digits, so that all workers train on the same bytes; ",
        ),
        ("https://host/set.zip#sha256=12", "must end with #sha256= and 64 hexadecimal digits"),
        (f"https://host#sha256={'0' * 64}", "must be the URL of a file: https://HOST/PATH#sha256=..."),
    ],
)
def test_a_file_on_the_web_needs_its_checksum(place: str, sentence: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        a_job(data=[{"from": place}])
    assert f") {sentence}" in str(caught.value)
