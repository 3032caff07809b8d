"""Shards that come from a store: through a cache of bounded size that many processes share, whatever happens to any of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import small_disks
from faults import Proxy
from outlast.base import file_locks, files
from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.storage import store
from outlast.training import Shards, Stream
from outlast.training.samples import shard_fetching
from outlast.worker.hangs import deadlocks
from outlast.worker.prepare import data_cache, data_cache_eviction
from outlast.worker.prepare.data_cache_eviction import Thing
from texts import a_text
from waits import until

SHARD = 200
"""Bytes of the shards that `a_text(shard=100)` makes."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine of its own."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("OUTLAST_CACHE", str(directory))
    monkeypatch.setenv("OUTLAST_STORE_TIMEOUT", "1")
    monkeypatch.setattr(shard_fetching, "_LONGEST_POLL_S", 0.03)
    return directory


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


def test_shards_are_fetched_ahead_and_no_further(home: Path, tmp_path: Path):
    shards = Shards(f"file://{a_text(tmp_path / 'data', 4000, shard=100)}", block=10, window=4)
    stream = Stream(shards, 16, prefetch=0)  # a window has 40 samples, and three batches ahead would begin the next
    next(iter(stream))
    until(lambda: len(shards._place._ahead_held) == 12)  # type: ignore[attr-defined]
    here = {path.name for path in home.glob("shards/*") if not file_locks.free(path)}
    three = shards.windows(4, seed=0).ahead(0, 0, 3)  # type: ignore[union-attr]
    assert here == {path.name for path in home.glob("shards/*")} == {shards._shards[number].sha256 for number in three}


@pytest.mark.slow
def test_processes_that_were_forked_read_shards_that_are_not_here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = a_text(tmp_path / "data", 600, shard=100)
    shards = Shards(f"file://{data}", block=10)
    assert [int(sample[0]) for sample in DataLoader(shards, batch_size=None, num_workers=2)] == [
        int(s[0]) for s in Shards(data, block=10)
    ]
    (data / "train-00003.bin").unlink()
    for path in home.glob("shards/*"):
        path.unlink()
    with pytest.raises(OutlastError, match=r"file://\S+ has no train-00003.bin; see that nothing writes there"):
        list(DataLoader(Shards(f"file://{data}", block=10), batch_size=None, num_workers=1))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[::-1]),
            r"train-00003.bin of \S+ is damaged: its sha256 is \w{12}",
        ),
        (
            lambda file: file.write_bytes(b"short"),
            r"train-00003.bin of \S+ is not what manifest.json says: .* 5 bytes",
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
    until(lambda: not [*home.rglob("coming/*/*")], why=lambda: "each attempt would leave a shard")  # others are read ahead
    a_text(data, 600, shard=100)
    assert len(list(read(f"file://{data}"))) == 4, "it is asked for again by who starts again"


def test_a_fork_whose_fetching_process_dies_says_so(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_fetching, "_forked", True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OutlastError, match=r"manifest.json of file://\S+ cannot be fetched: the process .* ended with 1; see"):
        Shards(f"file://{a_text(tmp_path / 'data', 600, shard=100)}", block=10)


def test_a_place_without_data_is_refused(home: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutlastError, match=r"file://.*/empty has no manifest.json; prepare data there \(outlast data prepare\)"):
        Shards(f"file://{tmp_path}/empty", block=10)
    outside = shard_format.Part((shard_format.Shard("train.bin", 1, 22, "../../outside"),), 11)
    shard_format.write(tmp_path / "empty", shard_format.Manifest("text", {"train": outside}, dtype="uint16"))
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
    monkeypatch.setattr(shard_fetching, "_WARN_S", 0.5)
    data = a_text(tmp_path / "data", 4000, shard=100)
    url = uploaded(data, moto_proxy.place.url)
    expected = list(read(str(data), window=2))
    batches, got, held = read(url, window=2), [], []
    got.append(next(batches))
    moto_proxy.down()
    for path in (home / "shards").iterdir():
        path.unlink()

    def return_() -> None:
        until(lambda: any(text.startswith("outlast: waiting for train-") for text in caplog.messages))
        held.append(deadlocks.watch().held)
        moto_proxy.up()

    returning = threading.Thread(target=return_)
    returning.start()
    got += batches
    returning.join()
    assert got == expected
    assert held == [1], "it counts as moving"
    moto_proxy.down()
    assert len(Shards(url, block=10)) == len(Shards(data, block=10)), "the manifest is in the cache"
    with pytest.raises(
        OutlastError, match=r"waited \S+ for manifest.json of s3://nowhere-\S+; see that the store can be reached"
    ):
        Shards(moto_proxy.place.url.replace("s3://", "s3://nowhere-"), block=10, patience=0.1)


class Odd(shard_fetching.Fetched):
    """A place whose threads that fetch ahead raise an error, or stand still, until `goes_on`."""

    error: Exception | None = None
    goes_on = threading.Event()

    def _fetch(self, shard: shard_format.Shard, now: bool) -> shard_fetching.Held | None:
        if not now:
            if self.error is not None:
                raise self.error
            self.goes_on.wait()
        return super()._fetch(shard, now)


def test_a_mistake_in_fetching_ahead_is_raised_where_a_shard_is_needed(home: Path, tmp_path: Path):
    place = Odd(f"file://{a_text(tmp_path / 'data', 600, shard=100)}", 1, 0.0)
    place.error = ValueError("a mistake")
    shards = place.manifest().part("train").shards
    place.announce(shards[:1], 0)
    until(lambda: place._failed)
    with pytest.raises(ValueError, match="a mistake"):
        place.hold(shards[1])
    place.announce([], 0)


def test_threads_that_stand_still_are_not_joined_by_more_and_go_on_with_what_is_announced_last(home: Path, tmp_path: Path):
    place = Odd(f"file://{a_text(tmp_path / 'data', 1200, shard=100)}", 1, 0.0)
    shards, before = place.manifest().part("train").shards, {*threading.enumerate()}  # some of which may end
    for first in range(0, 8, 2):
        place.announce(shards[first:], 0)
    assert [thread.name for thread in {*threading.enumerate()} - before].count("outlast-shards") == 4
    place.goes_on.set()
    until(lambda: place._ahead_held.keys() >= {shard.sha256 for shard in shards[6:]})


def test_what_is_read_ahead_gives_way_from_the_end_on_and_only_as_far_as_needed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", str(4 * SHARD))
    place = shard_fetching.Fetched(f"file://{a_text(tmp_path / 'data', 600, shard=100)}", 1, 0.0)
    shards = place.manifest().part("train").shards
    for number in range(1, 5):
        place.announce(shards[:number], 0)
        until(lambda number=number: len(place._ahead_held) == number)  # type: ignore[misc]
    place.announce(shards[:5], 0)
    until(lambda: list(place.ahead) == [(shards[4], False)])
    held = place.hold(shards[4])
    assert list(place._ahead_held) == [shard.sha256 for shard in shards[:3]]
    assert {path.name for path in home.glob("shards/*")} == {*place._ahead_held, held[0].name}


def test_a_shard_that_was_cut_off_is_replaced_and_never_removed(home: Path, tmp_path: Path):
    place = shard_fetching.Fetched(f"file://{a_text(tmp_path / 'data', 200, shard=100)}", 1, 0.0)
    shard = place.manifest().part("train").shards[0]
    (home / "shards" / shard.sha256).write_bytes(b"cut")
    assert place._held(shard) is None
    assert (home / "shards" / shard.sha256).exists(), "by now it may be whole, by another process"
    assert place.hold(shard)[0].stat().st_size == shard.bytes
    assert whole(home)


# Room


def test_a_process_that_stands_still_is_waited_for_no_longer_than_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def claimed() -> bool:
        with data_cache_eviction.claimed(tmp_path, "ab", 10, lambda _: [], {}) as (path, _):
            return path is not None

    with data_cache_eviction.claimed(tmp_path, "ab", 10, lambda _: [], {}) as (path, _):
        assert path is not None
        path.write_bytes(b"begun")
        os.utime(path.parent, (0, 0))
        assert (claimed(), caplog.messages) == (False, []), "it writes"
        for each in (path, path.parent):
            os.utime(each, (0, 0))
        assert claimed()
    assert caplog.messages == ["outlast: the process that fetches ab.10 has not written for 60 s: it is fetched again"]


def test_what_a_killed_process_was_fetching_goes_and_names_that_are_not_ours_stay(tmp_path: Path):
    for name in ("notes.d", f"{'ab' * 32}.100"):
        (tmp_path / "coming" / name).mkdir(parents=True)
    with file_locks.attempted(tmp_path / "coming" / ".nfs"):
        assert data_cache_eviction._coming(tmp_path) == 0
    assert {path.name for path in tmp_path.glob("coming/*")} == {"notes.d", ".nfs"}


def a_thing(name: str, size: int, used: float, gone: list[str], in_use: bool = False) -> Thing:
    def remove() -> bool:
        if not in_use:
            gone.append(name)
        return not in_use

    return Thing(Path(name), size, used, remove)


def test_the_cache_leaves_room_on_a_disk_that_others_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gib = 1 << 30

    def limit(free: int, used: int = 0, **size: str) -> float:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(200 * gib, 200 * gib - free, free))  # type: ignore[attr-defined]
        return data_cache_eviction.limit(tmp_path, {f"OUTLAST_CACHE_{name}": text for name, text in size.items()}, used) / gib

    assert [limit(150 * gib), limit(70 * gib), limit(9 * gib), limit(9 * gib, 3 * gib)] == [100, 60, 0, 2]
    assert limit(9 * gib, SIZE="8GiB") == 8, "a size that is given may take the last of the disk"
    assert 8 < limit(9 * gib, SIZE="100GiB") < 9


def test_what_was_used_least_recently_goes_first_and_what_is_used_stays(tmp_path: Path):
    gone: list[str] = []
    things = [a_thing("new", 10, 9, gone), a_thing("old", 10, 1, gone), a_thing("older", 10, 0, gone, in_use=True)]
    size = {"OUTLAST_CACHE_SIZE": "40"}

    def make(needed: int) -> tuple[int, list[str]]:
        gone.clear()
        return data_cache_eviction.make(tmp_path, needed, lambda _: things, size), list(gone)

    assert make(10) == (0, [])
    assert make(15) == (0, ["old"])
    assert make(40) == (10, ["old", "new"])
    with data_cache_eviction.claimed(tmp_path, "ab", 10, lambda _: things, size) as (path, missing):
        assert (path is not None, missing) == (True, 0)
        with data_cache_eviction.claimed(tmp_path, "ab", 10, lambda _: things, size) as (path, missing):
            assert (path, missing) == (None, 0), "somebody else fetches it"
        with data_cache_eviction.claimed(tmp_path, "cd", 30, lambda _: things, size) as (path, missing):
            assert (path is not None, missing) == (True, 10), "what is being fetched counts"
    assert make(10) == (0, [])
    assert list(tmp_path.glob("coming/*")) == []
    with pytest.raises(OutlastError, match=r"OUTLAST_CACHE_SIZE is much; it must be a size, e.g. 200GiB"):
        data_cache_eviction.make(tmp_path, 1, lambda _: things, {"OUTLAST_CACHE_SIZE": "much"})
    assert (
        data_cache_eviction.limit(tmp_path, {"OUTLAST_CACHE_SIZE": "4KiB"}, 0)
        == data_cache_eviction.limit(tmp_path, {"OUTLAST_CACHE_SIZE": "4Ki"}, 0)
        == 4096
    )


def test_old_data_goes_when_room_is_needed_and_what_a_run_has_pinned_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", "250")

    def acquire(name: str, run: str) -> data_cache.Version:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "file").write_bytes(os.urandom(100))
        pins = tmp_path / run
        return data_cache.Source(
            tmp_path / "cache", f"file://{directory}", field="data[0].from", pins=pins, say=said.append
        ).acquire()

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

    def source(run: str) -> data_cache.Source:
        url = f"file://{tmp_path / 'data'}"
        return data_cache.Source(tmp_path / "cache", url, field="data[0].from", pins=tmp_path / run, say=lambda _: None)

    first = source("first").acquire()
    first.close()
    shutil.rmtree(tmp_path / "first")
    read, taken = files.text, []

    def read_text(note: Path) -> str:
        taken.append(source("second")._lock_version(first.version))
        return read(note)

    monkeypatch.setattr(files, "text", read_text)
    (thing,) = data_cache.things(tmp_path / "cache")
    removed = thing.remove()
    assert taken == [None] or not removed, "a worker has a version that is removed"


def test_a_full_disk_is_one_sentence_and_read_ahead_gives_way_to_what_is_needed_now(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_disk: Path
):
    monkeypatch.setattr(shard_fetching, "_TRY_S", 0.01)
    monkeypatch.setenv("OUTLAST_CACHE", str(small_disk / "cache"))
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", "1GiB")
    data = a_text(tmp_path / "data", 10 * 500_000, shard=500_000)
    shards = Shards(f"file://{data}", block=10, window=1)
    first, *ahead, last = shards._shards
    place, ours = shards._place, home.parent / "disk" / "cache" / "shards"
    place.announce([first, *ahead], 1)
    until(lambda: len(list(ours.iterdir())) == 5)
    assert whole(small_disk / "cache"), "no more than fit"
    place.hold(last)
    assert (ours / last.sha256).exists()
    place.announce([], 1)
    held = [place.hold(shard) for shard in shards._shards[:5]]
    small_disks.fill(small_disk)
    with pytest.raises(OutlastError, match=r"the disk of the cache \S+ is full, and the cache uses .* of it; make room"):
        place.hold(shards._shards[5])
    small_disks.repair(small_disk)
    place.hold(shards._shards[5])
    assert held


def test_only_data_in_a_store_need_one_and_a_process_may_end_while_its_stream_reads_ahead(tmp_path: Path):
    code = """
import sys
import torch
from outlast.training import Shards, Stream
Shards(sys.argv[1], block=10)[0]
print(*{"outlast.storage.store", "obstore"} & set(sys.modules))
batches = iter(Stream(torch.zeros(10**4, 640), 4096, epochs=10**6, prefetch=10**6))
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", code, a_text(tmp_path / "data")], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"\n"
