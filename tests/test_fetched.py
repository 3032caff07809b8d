"""Shards that come from a store: fetched by a process apart, through a cache of bounded size, whatever happens to either."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from faults import Proxy
from outlast import file_locks, store
from outlast.data import shards as prepared
from outlast.errors import OutlastError
from outlast.hangs import stall
from outlast.prepare import cache, fetcher, room
from outlast.prepare.room import Thing
from outlast.training import Shards, Stream, fetched
from outlast.workerfiles import wants
from outlast.workerfiles.wants import Place, Reader, Want
from test_stream_shards import a_text

SHARD = 200
"""Bytes of the shards that `a_text(shard=100)` makes."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of a machine of its own; its fetchers end with the test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("OUTLAST_CACHE", str(directory))
    monkeypatch.setenv("OUTLAST_STORE_TIMEOUT", "1")
    monkeypatch.setattr(fetched, "_LONGEST_POLL_S", 0.03)
    yield directory
    for place in directory.glob("places/*"):
        deadline = time.monotonic() + 60
        while not file_locks.free(place / "lock"):
            assert time.monotonic() < deadline
            with contextlib.suppress(ProcessLookupError):
                if pid := wants.heard(place).pid:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def read(place: str, window: int = 4, epochs: int = 1) -> Iterator[tuple[list[int], list[list[int]]]]:
    """The indices and the samples of each batch."""
    for batch in Stream(Shards(place, block=10, window=window), 16, epochs=epochs):
        yield batch.indices.tolist(), [row.tolist() for rows, _ in batch.split() for row in rows]


def whole(directory: Path) -> bool:
    """Whether every shard of a cache is what its name says."""
    return all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in (directory / "shards").iterdir())


def test_shards_of_a_store_are_the_same_samples_in_the_same_order(home: Path, tmp_path: Path):
    data = a_text(tmp_path / "data", 2000, shard=100)
    (data / "tokenizer.json").write_text("{}")
    assert list(read(f"file://{data}")) == list(read(str(data)))
    assert len(list((home / "shards").iterdir())) == 20
    assert whole(home)
    shards = Shards(f"file://{data}", block=10)
    assert shards.window == 8
    assert shards.file("tokenizer.json").read_text() == "{}"
    with pytest.raises(OutlastError, match=r"file://.*/data has no meta.pkl; see that nothing writes there"):
        shards.file("meta.pkl")
    with pytest.raises(OutlastError, match=r"'\.\./tokenizer.json' is not the name of a file beside the shards"):
        shards.file("../tokenizer.json")
    assert len(list(home.glob("places/*"))) == 1, "one for train and val, whoever reads them"


def test_a_dataset_larger_than_the_cache_trains_through(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = a_text(tmp_path / "data", 4000, shard=100)
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", str(14 * SHARD))
    seen, most = [], 0
    for indices, _ in read(f"file://{data}", epochs=2):
        seen += indices
        most = max(most, sum(1 for _ in (home / "shards").iterdir()))
    assert sorted(seen) == sorted([*range(360)] * 2)
    assert 4 < most <= 14


@pytest.mark.slow
@pytest.mark.parametrize(("shuffle", "workers"), [(True, 2), (False, 0), (False, 2)])
def test_every_way_of_reading_trains_through_a_small_cache(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, workers: int
):
    data = a_text(tmp_path / "data", 4000, shard=100)
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", str(16 * SHARD))
    shards = Shards(f"file://{data}", block=10, window=4, transform=first if workers else None)
    stream, seen = Stream(shards, 16, epochs=2, shuffle=shuffle, workers=workers), []
    for batch in stream:
        seen += [int(row if workers else row[0]) // 10 * 10 for rows, _ in batch.split() for row in rows]
    assert sorted(seen) == sorted([i * 100 + j for i in range(40) for j in range(0, 90, 10)] * 2)
    assert len(list((home / "shards").iterdir())) <= 20


def first(tokens: torch.Tensor) -> int:
    return int(tokens[0])


@pytest.mark.slow
def test_a_fetcher_that_is_killed_is_replaced_and_leaves_nothing_half(home: Path, tmp_path: Path):
    data, killed, over = a_text(tmp_path / "data", 4000, shard=100), [], threading.Event()
    place = Place(f"file://{data}", home)

    def kill() -> None:
        while len(killed) < 4 and not over.is_set():
            if (pid := place.said().pid) and pid not in killed and len(list(home.glob("shards/*"))) > 5 * len(killed):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            over.wait(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        first = list(read(place.url))
    finally:
        over.set()
        thread.join()
    assert killed
    assert first == list(read(str(data)))
    assert whole(home)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[::-1]),
            r"train-00003.bin of \S+ is damaged: its sha256 is \w{12}\.\.\.",
        ),
        pytest.param(
            lambda file: file.write_bytes(b"short"),
            r"train-00003.bin of \S+ is not what manifest.json says: .* 5 bytes instead of",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda file: file.unlink(),
            r"file://\S+ has no train-00003.bin; see that nothing writes there, or prepare the",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_shard_that_is_not_what_the_manifest_says_is_refused(
    home: Path, tmp_path: Path, harm: Callable[[Path], object], sentence: str
):
    data = a_text(tmp_path / "data", 600, shard=100)
    harm(data / "train-00003.bin")
    with pytest.raises(OutlastError, match=sentence):
        list(read(f"file://{data}"))
    assert whole(home)
    a_text(data, 600, shard=100)
    assert len(list(read(f"file://{data}"))) == 4, "it is asked for again by who starts again"


def test_a_place_without_data_is_refused(home: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutlastError, match=r"file://.*/empty has no manifest.json; prepare data there \(outlast data prepare\)"):
        Shards(f"file://{tmp_path}/empty", block=10)
    outside = prepared.Part((prepared.Shard("train.bin", 1, 22, "../../outside"),), 11)
    prepared.write(tmp_path / "empty", prepared.Manifest("text", {"train": outside}, dtype="uint16"))
    with pytest.raises(OutlastError, match=r"train.bin of \S+ has the sha256 '../../outside', which is none"):
        Shards(f"file://{tmp_path}/empty", block=10)
    (tmp_path / "empty" / "manifest.json").write_text("{")
    with pytest.raises(OutlastError, match=r"manifest.json is not JSON"):
        Shards(f"file://{tmp_path}/empty", block=10)


def uploaded(data: Path, url: str) -> str:
    """A prepared directory in a store."""
    place = store.open_(url).child("data")
    for path in data.iterdir():
        place.put(path.name, path.read_bytes())
    return place.url


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for_with_signs_of_life(
    home: Path, tmp_path: Path, moto_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(fetched, "_TELL_S", 0.5)
    data = a_text(tmp_path / "data", 4000, shard=100)
    url = uploaded(data, moto_proxy.place.url)
    expected = list(read(str(data), window=2))
    batches, got = read(url, window=2), []
    got.append(next(batches))
    moto_proxy.down()
    for path in (home / "shards").iterdir():
        path.unlink()
    signs, back = stall.watch().signs, threading.Event()

    def return_() -> None:
        deadline = time.monotonic() + 100
        while not Place(url, home).said().away and time.monotonic() < deadline:
            time.sleep(0.05)
        moto_proxy.up()
        back.set()

    threading.Thread(target=return_).start()
    got += batches
    assert back.wait(1)
    assert got == expected
    assert stall.watch().signs > signs + 5
    assert any(text.startswith("outlast: waiting for train-") for text in caplog.messages)
    moto_proxy.down()
    assert len(Shards(url, block=10)) == len(Shards(data, block=10)), "the manifest is in the cache"
    with pytest.raises(OutlastError, match=r"waited \S+ for its manifest of s3://nowhere-\S+; see that the store can be reached"):
        Shards(moto_proxy.place.url.replace("s3://", "s3://nowhere-"), block=10, patience=0.1)


# Room


def a_thing(name: str, size: int, used: float, gone: list[str], in_use: bool = False) -> Thing:
    def remove() -> bool:
        if not in_use:
            gone.append(name)
        return not in_use

    return Thing(Path(name), size, used, remove)


def test_what_was_used_least_recently_goes_first_and_what_is_used_stays(tmp_path: Path):
    gone: list[str] = []
    things = [a_thing("new", 10, 9, gone), a_thing("old", 10, 1, gone), a_thing("older", 10, 0, gone, in_use=True)]
    ranks = {"soon": 3, "late": 7, "now": -1}
    things += [a_thing("late", 10, 0, gone), a_thing("soon", 10, 0, gone), a_thing("now", 10, 0, gone)]
    size = {"OUTLAST_CACHE_SIZE": "70"}

    def make(needed: int) -> tuple[int, list[str]]:
        gone.clear()
        return room.make(tmp_path, needed, things, size, lambda thing: ranks.get(thing.path.name)), list(gone)

    assert make(10) == (0, [])
    assert make(15) == (0, ["old"])
    assert make(35) == (0, ["old", "new", "late"])
    assert make(60) == (10, ["old", "new", "late", "soon"])
    with pytest.raises(OutlastError, match=r"OUTLAST_CACHE_SIZE is much; it must be a size, e.g. 200GiB"):
        room.make(tmp_path, 1, things, {"OUTLAST_CACHE_SIZE": "much"})
    disk = shutil.disk_usage(tmp_path)
    assert disk.free / 2 < room.limit(tmp_path, {"OUTLAST_CACHE_SIZE": f"{disk.total}"}, 0) < disk.total - disk.used
    assert 0 < room.limit(tmp_path, {}, 0) < os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize / 2 + 1


def test_old_data_goes_when_room_is_needed_and_what_a_run_has_pinned_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", "250")

    def acquire(name: str, run: str) -> cache.Version:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "file").write_bytes(os.urandom(100))
        pins = tmp_path / run
        return cache.Source(tmp_path / "cache", f"file://{directory}", field="data[0].from", pins=pins, say=said.append).acquire()

    said: list[str] = []
    pinned, gone = acquire("a", "run-a"), acquire("b", "run-b")
    pinned.close()
    gone.close()
    for pin in (tmp_path / "run-b").iterdir():
        pin.unlink()  # its run was forgotten
    third = acquire("c", "run-c")
    assert (pinned.tree.exists(), gone.tree.exists(), third.tree.exists()) == (True, False, True)
    acquire("d", "run-d")
    assert any(text.endswith("larger than it should be: 50 B more than OUTLAST_CACHE_SIZE are in use") for text in said)


def test_what_a_worker_takes_while_it_is_being_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(b"data")

    def source(run: str) -> cache.Source:
        url = f"file://{tmp_path / 'data'}"
        return cache.Source(tmp_path / "cache", url, field="data[0].from", pins=tmp_path / run, say=lambda _: None)

    first = source("first").acquire()
    first.close()
    shutil.rmtree(tmp_path / "first")
    read, taken = cache._read_text, []

    def read_text(note: Path) -> str:
        taken.append(source("second")._taken(first.version))
        return read(note)

    monkeypatch.setattr(cache, "_read_text", read_text)
    (thing,) = cache.things(tmp_path / "cache")
    removed = thing.remove()
    assert taken == [None] or not removed, "a worker has a version that is removed"


def test_a_full_disk_refuses_what_is_needed_now_and_only_delays_what_is_read_ahead(tmp_path: Path):
    one = fetcher.Fetcher(Place("file:///data", tmp_path), {})
    one._place.home.mkdir(parents=True)
    one._ranks = {"later": 3, "now": -1}
    for sha256 in one._ranks:
        one._troubled(sha256, "train-00000.bin", OSError(errno.ENOSPC, "No space left on device"))
    said = one._place.said()
    assert list(said.refused) == ["now"]
    assert "is full, of which the cache has 0 B; make room" in said.refused["now"]
    assert said.full


def test_the_wants_of_a_reader_end_with_it(tmp_path: Path):
    place = Place("s3://b/data", tmp_path)
    reader, other = Reader(place), Reader(place)
    reader.want(Want([("train.bin", 3, "ab")], 1, ["tokenizer.json"]))
    expected = {reader.name: Want([["train.bin", 3, "ab"]], 1, ["tokenizer.json"]), other.name: Want([], 0, [])}
    assert wants.readers(place.home) == expected
    child = os.fork()
    if not child:
        del reader, other
        os._exit(0)
    os.waitpid(child, 0)
    assert len(wants.readers(place.home)) == 2, "a fork that ends takes nothing away"
    del reader
    assert list(wants.readers(place.home)) == [other.name]
