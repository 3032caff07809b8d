"""Trees and stores become alike, for little when little changed, and whatever happens in between."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

import faults
from faults import Proxy
from outlast.base import crc32, file_locks
from outlast.base.errors import AlreadyRunning, Changed, Denied, Missing, NoBucket, NotFound, OutlastError, Stopped
from outlast.cli import transfer_progress
from outlast.cli.data import sync as command
from outlast.storage import store
from outlast.storage.store import Store
from outlast.storage.sync import index, push_and_pull, transfer
from outlast.storage.sync.index import Object, Seen, Stat, Verdict
from outlast.storage.sync.push_and_pull import Options, pull, push
from servers import Place

OUTLAST = str(Path(sys.executable).with_name("outlast"))
pytestmark = pytest.mark.usefixtures("small_parts")
MIB = 1 << 20
NAMES = ["a", "with space", "ü€漢/ñ", "a#b", "a%b", "a%20b", "a+b&c=d?e", "q\"'b", "deep/er/and/deeper"]
NAMES += ["...", "~t", "a\\b", "-rf", "*"]


def a_tree(directory: Path, files: dict[str, bytes], *, age_s: float = 100) -> Path:
    """A directory with these files, last written so long ago."""
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (time.time() - age_s,) * 2)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def objects(place: Store) -> dict[str, bytes]:
    """What is in the store, but for the manifest."""
    return {entry.key: place.get(entry.key) for entry in place.entries() if entry.key != push_and_pull.MANIFEST}


def counts(report: push_and_pull.Report) -> tuple[int, int, int]:
    """Sent, unchanged, deleted; nothing may have failed."""
    assert report.failed == []
    return report.transferred, report.unchanged, report.deleted


# Rules


def test_a_file_is_believed_unchanged_only_if_everything_says_so() -> None:
    here, there = Stat(5, 100, 200), Object(5, 100, 7, 0)
    seen = Seen(5, 100, 200, 7)

    def verdict(here: Stat = here, seen: Seen | None = seen, there: Object = there, clean_before: int = 1000) -> Verdict:
        return index.compare(here, seen, there, clean_before)

    assert verdict() is Verdict.SAME
    assert verdict(here=Stat(6, 100, 200)) is Verdict.DIFFERENT
    assert verdict(here=Stat(5, 101, 200)) is Verdict.DIFFERENT, "it was written"
    assert verdict(here=Stat(5, 100, 201)) is Verdict.UNKNOWN, "its time may have been set back"
    assert verdict(there=Object(5, 100, 8, 0)) is Verdict.DIFFERENT, "somebody replaced the object"
    assert verdict(seen=None) is Verdict.SAME, "the state was lost, or another machine sent it"
    assert verdict(seen=None, clean_before=100) is Verdict.UNKNOWN, "it was read when it might still have changed unnoticed"
    assert verdict(seen=None, here=Stat(5, 101, 200)) is Verdict.UNKNOWN, "reading is cheaper than sending"
    unknown = Object(5, 100, -1, 0)
    assert verdict(there=unknown, seen=None) is Verdict.SAME, "a file that was received from it has its time"
    assert verdict(there=unknown, seen=None, here=Stat(5, 101, 200)) is Verdict.DIFFERENT
    assert verdict(there=unknown) is Verdict.DIFFERENT, "somebody replaced the object in the same second"


def test_a_file_that_was_just_written_is_looked_at_again() -> None:
    second = 1_000_000_000
    stat = Stat(5, 100 * second, 100 * second)
    later = index.seen(stat, 7, 103 * second)
    soon = index.seen(stat, 7, 101 * second)
    there = Object(5, 100 * second, 7, 0)
    assert index.compare(stat, later, there, 0) is Verdict.SAME
    assert index.compare(stat, soon, there, 0) is Verdict.UNKNOWN


def test_a_listing_tells_what_others_replaced() -> None:
    known = {key: Object(5, 1, 7, index.etag_hash('"etag"')) for key in ("same", "replaced", "resized", "gone")}
    entries = [
        ("same", 5, "etag", 200.0),
        ("replaced", 5, "other", 200.0),
        ("resized", 6, "etag", 200.0),
        ("new", 5, "etag", 200.0),
        ("directory/", 0, "etag", 200.0),
        (".m", 5, "etag", 200.0),
    ]
    found = index.listed(entries, known, own=".m")
    assert {key for key, there in found.items() if there == known.get(key)} == {"same"}
    assert {key for key, there in found.items() if there.crc32 == -1} == {"replaced", "resized", "new"}
    assert found["new"].mtime == 200_000_000_000


@given(some.binary(), some.binary())
def test_checksums_of_parts_make_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc32.update(second, crc32.update(first)) == zlib.crc32(first + second), "whichever library does it"
    assert crc32.combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


INTS = some.integers(-1, 2**62)
OBJECTS = some.dictionaries(some.text(min_size=1), some.builds(Object, INTS.filter(lambda n: n >= 0), INTS, INTS, INTS))


@given(OBJECTS, INTS)
def test_a_manifest_is_read_as_it_was_written(there: dict[str, Object], clean_before: int) -> None:
    assert index.decode(index.encode(there, clean_before)) == (there, clean_before)


@given(OBJECTS, some.dictionaries(some.text(min_size=1), some.builds(Seen, INTS.filter(lambda n: n >= 0), INTS, INTS, INTS)))
def test_a_state_is_read_as_it_was_written(there: dict[str, Object], here: dict[str, Seen]) -> None:
    for fresh in (set[str](), set(there)):
        state = index.State("s3://b", '"etag"', 2, 3.5, there, here, fresh)
        assert index.State.decode(state.encode()) == state
        etag = json.loads(state.encode())["etag"]
        assert etag == ("" if fresh else '"etag"'), "a version that does not know `fresh` reads the manifest again"


@given(some.binary())
def test_nonsense_is_no_manifest(data: bytes) -> None:
    for decode in (index.decode, index.State.decode):
        with pytest.raises(ValueError, match=r"."):
            decode(data)


# There and back


def test_a_tree_comes_back_as_it_was(place: Store, tmp_path: Path) -> None:
    files = {name: name.encode() * 100 for name in NAMES} | {"empty": b"", "large": random.Random(0).randbytes(3 * MIB)}
    source = a_tree(tmp_path / "source", files)
    os.utime(source / "a", ns=(10**18 + 123_456_789,) * 2)
    assert counts(push(source, place, tmp_path / "push")) == (len(files), 0, 0)
    assert objects(place) == files
    target = tmp_path / "target"
    report = pull(place, target, tmp_path / "pull")
    assert counts(report) == (len(files), 0, 0)
    assert report.bytes == sum(map(len, files.values()))
    assert contents(target) == files
    assert (target / "a").stat().st_mtime_ns == 10**18 + 123_456_789
    assert counts(push(source, place, tmp_path / "push", Options(check=True))) == (0, len(files), 0)
    assert counts(pull(place, target, tmp_path / "pull", Options(check=True))) == (0, len(files), 0)


def test_a_change_that_leaves_size_and_time_alone_is_noticed(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"same": b"1" * 10, "set back": b"1" * 10, "moved here": b"1" * 10})
    push(source, memory, tmp_path / "push")
    for name in ("set back", "moved here"):
        before = (source / name).stat()
        other = source / name if name == "set back" else tmp_path / "other"
        other.write_bytes(b"2" * 10)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.rename(source / name)
    assert counts(push(source, memory, tmp_path / "push")) == (2, 1, 0)
    assert objects(memory) == contents(source)


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_an_unchanged_tree_costs_one_request(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    proxy: Proxy = request.getfixturevalue(f"{kind}_proxy")
    source, target = a_tree(tmp_path / "source", {f"{n}/file": b"%d" % n for n in range(60)}), tmp_path / "target"
    place = store.open_(proxy.url)
    push(source, place, tmp_path / "push")
    pull(place, target, tmp_path / "pull")
    for again in (lambda: push(source, place, tmp_path / "push"), lambda: pull(place, target, tmp_path / "pull")):
        proxy.forget()
        assert counts(again()) == (0, 60, 0)
        assert proxy.counts == {"HEAD": 1}
    (source / "7" / "file").write_bytes(b"another")
    proxy.forget()
    assert counts(push(source, place, tmp_path / "push")) == (1, 59, 0)
    assert proxy.counts.total() <= 5
    proxy.forget()
    assert counts(pull(place, target, tmp_path / "pull")) == (1, 59, 0)
    assert proxy.counts.total() <= 3


def test_nothing_is_transferred_again_when_the_state_was_lost(place: Store, tmp_path: Path) -> None:
    files = {"a": b"1", "b/c": b"2", "large": bytes(2 * MIB)}
    source, target = a_tree(tmp_path / "source", files), tmp_path / "target"
    (source / "just now").write_bytes(b"3")
    push(source, place, tmp_path / "push")
    pull(place, target, tmp_path / "pull")
    assert counts(push(source, place, tmp_path / "another state")) == (0, 4, 0)
    assert counts(push(target, place, tmp_path / "one more")) == (0, 4, 0)
    assert counts(pull(place, target, tmp_path / "yet another")) == (0, 4, 0)
    (tmp_path / "push").write_bytes((tmp_path / "push").read_bytes()[:-10])
    assert counts(push(source, place, tmp_path / "push")) == (0, 4, 0)


def test_a_state_of_another_store_is_of_no_use(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"a": b"1"})
    push(source, memory.child("one"), tmp_path / "push")
    assert counts(push(source, memory.child("two"), tmp_path / "push")) == (1, 0, 0)
    assert objects(memory.child("two")) == {"a": b"1"}


# Others in the store


def test_what_others_did_is_noticed_by_a_check(place: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"same": b"1", "replaced": b"2", "resized": b"3", "removed": b"4"})
    push(source, place, tmp_path / "push")
    place.put("replaced", b"!")
    place.put("resized", b"!!!")
    place.put("added", b"5")
    place.delete(["removed"])
    assert counts(push(source, place, tmp_path / "push")) == (0, 4, 0), "the manifest is believed"
    assert counts(push(source, place, tmp_path / "push", Options(check=True))) == (3, 1, 0)
    assert objects(place) == {**contents(source), "added": b"5"}
    assert counts(push(source, place, tmp_path / "push", Options(check=True))) == (0, 4, 0)
    target = tmp_path / "target"
    assert counts(pull(place, target, tmp_path / "pull")) == (5, 0, 0), "what was added is in the manifest now"
    assert contents(target) == objects(place)


def test_a_store_is_checked_once_a_day(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"a": b"1"})
    push(source, memory, tmp_path / "push")
    memory.delete(["a"])
    assert counts(push(source, memory, tmp_path / "push")) == (0, 1, 0)
    state = index.State.decode((tmp_path / "push").read_bytes())
    state.checked -= index.CHECK_EVERY_S
    (tmp_path / "push").write_bytes(state.encode())
    assert counts(push(source, memory, tmp_path / "push")) == (1, 0, 0)


def test_a_store_without_a_manifest_is_listed(place: Store, tmp_path: Path) -> None:
    for name in NAMES:
        place.put(name, name.encode())
    target = tmp_path / "target"
    assert counts(pull(place, target, tmp_path / "pull")) == (len(NAMES), 0, 0)
    assert contents(target) == objects(place)
    assert counts(pull(place, target, tmp_path / "pull")) == (0, len(NAMES), 0)
    assert counts(pull(place, target, tmp_path / "another state")) == (0, len(NAMES), 0)
    place.put("a", b"b")
    (target / "a#b").unlink()
    assert counts(pull(place, target, tmp_path / "pull")) == (2, len(NAMES) - 2, 0)
    assert contents(target) == objects(place)


def test_a_manifest_that_cannot_be_read_is_none(place: Store, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1", "b": b"2"}), tmp_path / "target"
    push(source, place, tmp_path / "push")
    place.put(push_and_pull.MANIFEST, b"not by us")
    assert counts(pull(place, target, tmp_path / "pull")) == (2, 0, 0)
    assert counts(push(source, place, tmp_path / "push")) == (0, 2, 0)
    assert sorted(index.decode(place.get(push_and_pull.MANIFEST))[0]) == ["a", "b"]


def test_two_machines_that_push_into_one_place_see_each_other(place: Store, tmp_path: Path) -> None:
    one, two = a_tree(tmp_path / "one", {"a": b"1", "both": b"1"}), a_tree(tmp_path / "two", {"b": b"2", "both": b"2"})
    push(one, place, tmp_path / "push-1")
    assert counts(push(two, place, tmp_path / "push-2")) == (2, 0, 0)
    assert objects(place) == {"a": b"1", "b": b"2", "both": b"2"}
    assert counts(push(one, place, tmp_path / "push-1")) == (1, 1, 0)
    assert counts(pull(place, tmp_path / "target", tmp_path / "pull")) == (3, 0, 0)
    assert contents(tmp_path / "target") == {"a": b"1", "b": b"2", "both": b"1"}


def test_a_manifest_written_meanwhile_is_not_lost(moto_proxy: Proxy, tmp_path: Path) -> None:
    one, two = a_tree(tmp_path / "one", {"a": b"1"}), a_tree(tmp_path / "two", {"b": b"2"})
    place = store.open_(moto_proxy.url)

    def chosen(request: faults.Request) -> faults.Fault | None:
        return first if request.method == "PUT" and request.path.endswith("/a") else None

    def first(exchange: faults.Exchange) -> None:
        push(two, place, tmp_path / "push-2")
        faults.passed(exchange)

    moto_proxy.fault = chosen
    push(one, place, tmp_path / "push-1")
    assert sorted(index.decode(place.get(push_and_pull.MANIFEST))[0]) == ["a", "b"]


def test_an_object_that_is_replaced_during_a_pull_arrives_as_it_is_then(place: Store, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1", "b": b"2" * (2 * MIB), "c": b"3"}), tmp_path / "target"
    push(source, place, tmp_path / "push")
    pull(place, target, tmp_path / "pull")
    for name in contents(source):
        (target / name).unlink()
    place.put("a", b"one")
    place.put("b", b"two")
    place.delete(["c"])
    report = pull(place, target, tmp_path / "pull")
    assert (report.transferred, [path for path, _ in report.failed]) == (2, ["c"])
    assert report.failed[0][1].endswith("/c does not exist")
    assert contents(target) == {"a": b"one", "b": b"two"}


# Files that change


@contextlib.contextmanager
def written_to(write: Callable[[int], object], pause_s: float = 0.001) -> Iterator[None]:
    """A thread calls `write` with 1, 2, 3 ... until the end."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        for number in itertools.count(1):
            write(number)
            begun.set()
            if ended.wait(pause_s):
                return

    writer = threading.Thread(target=work)
    writer.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def test_a_log_that_grows_while_it_is_pushed_arrives_in_the_end(place: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"small": b"", "large": bytes(3 * MIB)})

    def write(number: int) -> None:
        for name in ("small", "large"):
            with (source / name).open("ab", buffering=0) as file:
                file.write(b"line %d\n" % number)

    with written_to(write):
        for _ in range(3):
            assert push(source, place, tmp_path / "push").failed == []
            for name, content in objects(place).items():
                assert (source / name).read_bytes().startswith(content), "no mixture, and nothing skipped"
    push(source, place, tmp_path / "push")
    assert objects(place) == contents(source)
    assert counts(push(source, place, tmp_path / "push", Options(check=True))) == (0, 2, 0)
    assert counts(pull(place, tmp_path / "target", tmp_path / "pull")) == (2, 0, 0)


def test_a_file_that_is_overwritten_all_the_time_is_sent_again_the_next_time(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"a": bytes(9 << 20)})

    def write(number: int) -> None:
        with (source / "a").open("r+b", buffering=0) as file:
            for at in (0, (9 << 20) - 4096):
                os.pwrite(file.fileno(), bytes([number % 256]) * 4096, at)

    with written_to(write, pause_s=0):
        reports = (push(source, memory, tmp_path / "push") for _ in range(100))
        report = next(report for report in reports if report.changing)
    assert (report.failed, report.changing) == ([], ["a"])
    assert counts(push(source, memory, tmp_path / "push")) == (1, 0, 0)
    assert objects(memory) == contents(source)


def test_files_deleted_during_the_walk_have_never_been_there(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {f"{n}": b"1" for n in range(100)} | {"large": bytes(2 * MIB), "last": bytes(100)})

    def harm(progress: push_and_pull.Progress) -> None:
        for path in source.iterdir():
            if path.name != "last":
                path.unlink()

    report = push(source, memory, tmp_path / "push", Options(progress=harm))
    assert report.failed == []
    assert report.transferred < 102
    assert "last" in objects(memory)


def test_the_low_level_calls_send_and_receive_what_they_are_told(place: Store, tmp_path: Path) -> None:
    files = {"a": b"1", "empty": b"", "large": random.Random(0).randbytes(2 * MIB + 5)}
    source = a_tree(tmp_path / "source", files)
    moved: list[int] = []
    sent = push_and_pull.send(
        place, [(source / n, f"to/{n}") for n in files], journals=tmp_path / "journals", progress=moved.append
    )
    assert {key: (s.size, s.crc32) for key, s in sent.items()} == {f"to/{n}": (len(c), zlib.crc32(c)) for n, c in files.items()}
    assert {entry.key: entry.etag for entry in place.entries()} == {key: s.etag for key, s in sent.items()}
    assert sum(moved) == sum(map(len, files.values()))
    moved.clear()
    wanted = [(f"to/{n}", len(c), tmp_path / "target" / n) for n, c in files.items()]
    received = push_and_pull.receive(place, wanted, durable=True, progress=moved.append)
    assert received == {key: s.crc32 for key, s in sent.items()}
    assert contents(tmp_path / "target") == files
    assert sum(moved) == sum(map(len, files.values()))


@pytest.mark.parametrize("size", [3, 3 * MIB])
def test_receive_leaves_nothing_behind_of_what_is_not_as_expected(place: Store, tmp_path: Path, size: int) -> None:
    place.put("a", bytes(size))
    target = tmp_path / "target"
    for wanted, error in [(("a", size + 1), Changed), (("b", size), Missing)]:
        with pytest.raises(error):
            push_and_pull.receive(place, [(*wanted, target / "a")])
        assert contents(target) == {}
    outcomes = list(transfer.downloads(place, [transfer.Download("a", size, str(target / "a"), crc32=1)]))
    assert [type(outcome.error) for outcome in outcomes] == [transfer.Damaged]
    assert contents(target) == {}
    (target / "a").mkdir(parents=True, exist_ok=True)
    with pytest.raises(OutlastError, match="there is a directory of this name"):
        push_and_pull.receive(place, [("a", size, target / "a")])
    assert os.listdir(target) == ["a"]


# Names and kinds of files


def test_what_is_no_file_is_named_and_left_out(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"file": b"1", "dir/inner": b"2"})
    outside = a_tree(tmp_path / "outside", {"secret": b"3"})
    links = {"link": "file", "dir link": "dir", "dangling": "nothing", "dir/loop": "..", "self": "self"}
    for name, target in {**links, "out link": outside / "secret", "out": outside}.items():
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe")
    (source / "nothing in here").mkdir()
    report = push(source, memory, tmp_path / "push")
    assert report.failed == []
    assert objects(memory) == {"file": b"1", "dir/inner": b"2", "link": b"1", "dir link/inner": b"2", "out link": b"3"}
    assert report.ignored == [
        ("dangling", "it is a link to nothing (No such file or directory)"),
        ("dir link/loop", f"it is a link to a directory that it is in ({source})"),
        ("dir/loop", f"it is a link to a directory that it is in ({source})"),
        ("out", f"it is a link to a directory outside ({outside})"),
        ("pipe", "it is neither a file nor a directory"),
        ("self", "it is a link to nothing (Too many levels of symbolic links)"),
    ]
    assert counts(push(source, memory, tmp_path / "push"))[0] == 0


def test_names_that_a_store_cannot_have_fail_and_the_rest_goes_on(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"good": b"1", "new\nline": b"2"})
    with open(os.fsencode(source) + b"/bad-\xff", "wb"):
        pass
    report = push(source, memory, tmp_path / "push")
    assert report.transferred == 1
    assert [path for path, _ in report.failed] == ["bad-\\xff", "new\nline"]
    assert report.failed[0][1] == "its name is not UTF-8; rename it"
    assert "cannot be the name of an object" in report.failed[1][1]


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is not root, who may read everything, and is in a directory that it may write."""
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)  # from here paths need no permission further up
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.mark.usefixtures("nobody")
def test_what_cannot_be_read_is_named_and_the_rest_goes_on(memory: Store) -> None:
    source = a_tree(Path("source"), {"good": b"1", "bad": b"2", "large": bytes(2 * MIB), "dir/inner": b"3"})
    push(source, memory, Path("push"))
    a_tree(source, {"good": b"one", "bad": b"two", "large": bytes(3 * MIB), "dir/inner": b"three"}, age_s=50)
    for name in ("bad", "large", "dir"):
        (source / name).chmod(0)
    report = push(source, memory, Path("push"), Options(delete=True))
    assert (report.transferred, report.deleted) == (1, 0), "what cannot be listed may still exist"
    assert report.failed == [
        ("bad", "it cannot be read: Permission denied"),
        ("dir/", "it cannot be listed: Permission denied"),
        ("large", "it cannot be read: Permission denied"),
    ]
    for name in ("bad", "large", "dir"):
        (source / name).chmod(0o700)
    (source / "dir").chmod(0o500)
    report = pull(memory, source, Path("pull"))
    assert report.failed == [("dir/inner", "it cannot be written: Permission denied")]
    assert (source / "bad").read_bytes() == b"2"


def test_a_pull_never_writes_outside_of_its_directory(tmp_path: Path) -> None:
    outside = a_tree(tmp_path / "outside", {"kept": b"1"})
    target = a_tree(tmp_path / "target", {"file": b"1"})
    (target / "link").symlink_to(outside)
    (target / "kept").symlink_to(outside / "kept")
    memory = store.open_(f"memory://{uuid.uuid4().hex}")
    pull(memory, target, tmp_path / "pull")
    keys = ["good", "link/evil", "link/deep/evil", "kept", "file/inner"]
    for key in keys:
        memory.put(key, b"2")
    lies = {key: Object(1, 0, -1, 0) for key in [*keys, "../up", "/abs", "a//b", "nul\0"]}
    memory.put(push_and_pull.MANIFEST, index.encode(lies, 0))
    report = pull(memory, target, tmp_path / "pull")
    assert report.transferred == 2
    assert dict(report.failed) == {
        "link/evil": f"link is a link that leads outside ({outside})",
        "link/deep/evil": f"link is a link that leads outside ({outside})",
        "file/inner": "file is not a directory here; move it away",
        "../up": "it has a segment `.` or `..`",
        "/abs": "it begins with a slash",
        "a//b": "it has an empty segment",
        "nul\0": "it has a NUL in it",
    }
    assert contents(outside) == {"kept": b"1"}, "the link was replaced, not followed"
    assert not (target / "kept").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "target", "pull", "pull.lock"}


def test_a_name_that_is_file_and_directory_fails_and_the_rest_goes_on(memory: Store, tmp_path: Path) -> None:
    for key in ("a", "a/b", "c"):
        memory.put(key, b"1")
    memory.put("d", b"1")
    (tmp_path / "target" / "d").mkdir(parents=True)
    report = pull(memory, tmp_path / "target", tmp_path / "pull")
    assert contents(tmp_path / "target") == {"a/b": b"1", "c": b"1"}
    assert [path for path, _ in report.failed] == ["a", "d"]
    assert report.failed[0][1] == "the store has a directory of this name as well; rename one of them"
    assert "there is a directory of this name" in report.failed[1][1]


def test_half_written_files_are_not_pushed_and_go_when_nobody_writes_them(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"a": b"1", ".outlast-0.part": b"half"}, age_s=10_000)
    a_tree(source, {".outlast-1.part": b"half"}, age_s=1)
    push(source, memory, tmp_path / "push", Options(delete=True))
    assert objects(memory) == {"a": b"1"}
    pull(memory, source, tmp_path / "pull", Options(delete=True))
    assert sorted(os.listdir(source)) == [".outlast-1.part", "a"]


# Deleting


def test_nothing_is_deleted_unless_asked_for(place: Store, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1", "b/c/d": b"2", "e": b"3"}), tmp_path / "target"
    push(source, place, tmp_path / "push")
    pull(place, target, tmp_path / "pull")
    (source / "b/c/d").unlink()
    assert counts(push(source, place, tmp_path / "push")) == (0, 2, 0)
    assert counts(push(source, place, tmp_path / "push", Options(delete=True))) == (0, 2, 1)
    assert set(objects(place)) == {"a", "e"}
    assert counts(pull(place, target, tmp_path / "pull")) == (0, 2, 0)
    assert set(contents(target)) == {"a", "b/c/d", "e"}
    (target / "mine").mkdir()
    assert counts(pull(place, target, tmp_path / "pull", Options(delete=True))) == (0, 2, 1)
    assert sorted(os.listdir(target)) == ["a", "e", "mine"]


def test_delete_does_not_touch_what_is_skipped(place: Store, tmp_path: Path) -> None:
    def skip(path: str) -> bool:
        return path.startswith("mine/")

    source, target = a_tree(tmp_path / "source", {"a": b"1", "mine/x": b"2"}), a_tree(tmp_path / "target", {"mine/z": b"3"})
    place.put("mine/y", b"4")
    place.put("other", b"5")
    assert counts(push(source, place, tmp_path / "push", Options(skip=skip, delete=True))) == (1, 0, 1)
    assert objects(place) == {"a": b"1", "mine/y": b"4"}
    assert counts(pull(place, target, tmp_path / "pull", Options(skip=skip, delete=True))) == (1, 0, 0)
    assert contents(target) == {"a": b"1", "mine/z": b"3"}


def test_an_empty_or_missing_source_deletes_nothing(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"a": b"1"})
    push(source, memory, tmp_path / "push")
    (source / "a").unlink()
    with pytest.raises(OutlastError, match=r"source is empty: --delete would delete all of memory://"):
        push(source, memory, tmp_path / "push", Options(delete=True))
    with pytest.raises(NotFound, match="typo is not there"):
        push(tmp_path / "typo", memory, tmp_path / "push", Options(delete=True))
    target = a_tree(tmp_path / "target", {"a": b"1"})
    with pytest.raises(OutlastError, match=r"there is nothing in memory://.*/typo: --delete would delete all of .*target"):
        pull(memory.child("typo"), target, tmp_path / "pull", Options(delete=True))
    assert contents(target) == objects(memory) == {"a": b"1"}


def test_a_file_that_has_two_names_is_not_deleted_by_the_other(memory: Store, tmp_path: Path) -> None:
    target = a_tree(tmp_path / "target", {"real/a": b"1", "real/b": b"2"})
    (target / "link").symlink_to("real")
    memory.put("real/a", b"1")
    pull(memory, target, tmp_path / "pull", Options(delete=True))
    assert {path.name for path in (target / "real").iterdir()} == {"a"}
    memory.put("real/b", b"2")
    pull(memory, target, tmp_path / "pull")
    memory.delete(["real/a"])
    memory.put("link/b", b"2")
    pull(memory, target, tmp_path / "pull", Options(delete=True))
    assert {path.name for path in (target / "real").iterdir()} == {"b"}


def test_a_dry_run_says_what_would_be_done_and_does_nothing(place: Store, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1", "b": b"2"}), a_tree(tmp_path / "target", {"x": b"9"})
    push(source, place, tmp_path / "push")
    a_tree(source, {"a": b"one", "c": b"3"}, age_s=50)
    (source / "b").unlink()
    report = push(source, place, tmp_path / "push", Options(delete=True, dry_run=True))
    assert report.planned == [("send", "a"), ("send", "c"), ("delete", "b")]
    assert (counts(report), report.bytes) == ((2, 0, 1), 4)
    assert objects(place) == {"a": b"1", "b": b"2"}
    report = pull(place, target, tmp_path / "pull", Options(delete=True, dry_run=True))
    assert report.planned == [("receive", "a"), ("receive", "b"), ("delete", "x")]
    assert contents(target) == {"x": b"9"}
    assert counts(push(source, place, tmp_path / "push", Options(delete=True))) == (2, 0, 1)


def test_a_pull_of_what_is_missing_leaves_the_rest_alone(memory: Store, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1", "b": b"2"}), a_tree(tmp_path / "target", {"a": b"mine"})
    push(source, memory, tmp_path / "push")
    assert counts(pull(memory, target, tmp_path / "pull", only_missing=True)) == (1, 1, 0)
    assert contents(target) == {"a": b"mine", "b": b"2"}
    assert counts(pull(memory, target, tmp_path / "pull")) == (1, 1, 0)
    assert contents(target) == contents(source)


# Interruptions


def test_what_arrived_before_a_stop_is_not_transferred_again(moto_proxy: Proxy, tmp_path: Path) -> None:
    files = {f"{n:04d}": b"%d" % n for n in range(120)}
    source, target = a_tree(tmp_path / "source", files), tmp_path / "target"
    place = store.open_(moto_proxy.url)
    stop = threading.Event()

    def stopping(method: str) -> faults.Chooser:
        left = iter(range(40))

        def choose(request: faults.Request) -> None:
            if request.method == method and next(left, None) is None:
                stop.set()

        return choose

    moto_proxy.fault = stopping("PUT")
    with pytest.raises(Stopped):
        push(source, place, tmp_path / "push", Options(stop=stop))
    arrived = len(objects(place))
    assert 40 <= arrived < 120
    stop.clear()
    moto_proxy.forget()
    moto_proxy.fault = lambda _: None
    assert counts(push(source, place, tmp_path / "push")) == (120 - arrived, arrived, 0)
    assert moto_proxy.counts["PUT"] == 120 - arrived + 1

    moto_proxy.forget()
    moto_proxy.fault = stopping("GET")
    with pytest.raises(Stopped):
        pull(place, target, tmp_path / "pull", Options(stop=stop))
    arrived = len(contents(target))
    assert 20 <= arrived < 120
    moto_proxy.fault = lambda _: None
    assert counts(pull(place, target, tmp_path / "pull")) == (120 - arrived, arrived, 0)
    assert contents(target) == files


def test_one_state_is_used_by_one_process(memory: Store, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"a": b"1"})
    lock = tmp_path / "push.lock"
    lock.touch()
    with file_locks.attempted(lock), pytest.raises(AlreadyRunning, match="another process syncs this"):
        push(source, memory, tmp_path / "push")
    assert counts(push(source, memory, tmp_path / "push")) == (1, 0, 0)


def test_a_store_that_refuses_is_not_asked_a_thousand_times(moto_proxy: Proxy, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {f"{n}": b"1" for n in range(300)})
    place = store.open_(moto_proxy.url)
    moto_proxy.fault = faults.always(faults.denied, method="PUT")
    with pytest.raises(Denied):
        push(source, place, tmp_path / "push")
    assert moto_proxy.counts["PUT"] < 100
    with pytest.raises(NoBucket):
        push(source, store.open_("s3://no-such-bucket-here"), tmp_path / "other")


def test_one_object_that_is_refused_fails_and_the_rest_goes_on(moto_proxy: Proxy, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {f"{n}": b"1" for n in range(20)}), tmp_path / "target"
    place = store.open_(moto_proxy.url)
    moto_proxy.fault = faults.always(faults.denied, method="PUT", path="/7")
    report = push(source, place, tmp_path / "push")
    assert (report.transferred, [path for path, _ in report.failed]) == (19, ["7"])
    moto_proxy.fault = faults.always(faults.denied, method="GET", path="/8")
    report = pull(place, target, tmp_path / "pull")
    assert (report.transferred, [path for path, _ in report.failed]) == (18, ["8"])
    moto_proxy.fault = lambda _: None
    assert counts(push(source, place, tmp_path / "push")) == (1, 19, 0)
    assert counts(pull(place, target, tmp_path / "pull")) == (2, 18, 0)


def test_whatever_happens_a_push_and_a_pull_make_all_three_alike(memory: Store, tmp_path: Path) -> None:
    """A random world: people edit, others write into the store, pushes and pulls are stopped, states are lost."""
    for seed in range(15):
        rng = random.Random(seed)
        place, here = memory.child(f"world-{seed}"), tmp_path / f"world-{seed}"
        source, target = a_tree(here, {}) / "source", here / "target"
        a_tree(source, {"first": b"1"})
        names = [f"{directory}{n}" for directory in ("", "x/", "x/y/") for n in range(4)]
        foreign = False
        for _ in range(rng.randrange(5, 40)):
            name, content = rng.choice(names), bytes([rng.randrange(256)]) * rng.choice((1, 1, 3))
            match rng.randrange(9):
                case 0 | 1 | 2:
                    a_tree(source, {name: content}, age_s=rng.choice((0.0, 0.0, 10.0, 10.0, 20.0)))
                case 3:
                    (source / name).unlink(missing_ok=True)
                case 4:
                    a_tree(target, {name: content}, age_s=10.0)
                case 5:
                    foreign = True
                    if rng.random() < 0.5:
                        place.put(name, content)
                    else:
                        place.delete([name])
                case 6:
                    rng.choice((here / "push", here / "pull")).unlink(missing_ok=True)
                case _ as what:
                    stop = threading.Event()
                    if rng.random() < 0.3:
                        threading.Timer(rng.random() / 100, stop.set).start()
                    with contextlib.suppress(Stopped):
                        if what == 7:
                            push(source, place, here / "push", Options(stop=stop))
                            sent, arrived = contents(source), objects(place)
                        else:
                            pull(place, target, here / "pull", Options(stop=stop))
                            sent, arrived = objects(place), contents(target)
                        assert foreign or sent.items() <= arrived.items(), seed
        a_tree(source, {"first": b"1"})
        assert push(source, place, here / "push", Options(check=foreign, delete=True)).failed == []
        assert objects(place) == contents(source), seed
        assert pull(place, target, here / "pull", Options(check=foreign, delete=True)).failed == []
        assert contents(target) == contents(source), seed
        assert counts(push(target, place, here / "back")) == (0, len(contents(source)), 0)


# The command line


@pytest.fixture
def outlast(
    outlast: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs `outlast sync`: words -> exit code, standard output, standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*words: object) -> tuple[int, str, str]:
        code, out, err = outlast("sync", *words)
        return code, re.sub(r"in [\d.]+m?s \(.*?/s\)|in [\d.]+m?s", "in TIME", out), err

    return call


Outlast = Callable[..., tuple[int, str, str]]


def test_sync_goes_there_and_back_and_says_what_it_did(outlast: Outlast, moto: Place, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1" * 1024, "b c/ü": b"2"}), tmp_path / "target"
    assert outlast(source, f"{moto.url}/x/") == (0, "2 files, 1.0 KiB sent in TIME, 0 unchanged, 0 deleted\n", "")
    assert outlast(source, f"{moto.url}/x/") == (0, "0 files, 0 B sent in TIME, 2 unchanged, 0 deleted\n", "")
    assert outlast(f"{moto.url}//x", target) == (0, "2 files, 1.0 KiB received in TIME, 0 unchanged, 0 deleted\n", "")
    assert contents(target) == contents(source)
    (target / "mine").write_bytes(b"3")
    assert outlast(f"{moto.url}/x", target, "--delete", "--dry-run") == (
        0,
        "delete  mine\n0 files, 0 B would be received, 2 unchanged, 1 would be deleted\n",
        "",
    )
    code, out, _ = outlast(f"{moto.url}/x", target, "--delete", "-o", "json")
    said = json.loads(out)
    assert (code, said["unchanged"], said["deleted"], said["failed"]) == (0, 2, 1, [])


def test_sync_between_two_directories(outlast: Outlast, tmp_path: Path) -> None:
    source, target = a_tree(tmp_path / "source", {"a": b"1"}), tmp_path / "target"
    assert outlast(source, target)[:2] == (0, "1 file, 1 B sent in TIME, 0 unchanged, 0 deleted\n")
    assert outlast(f"file://{source}", f"file://{target}")[:2] == (0, "0 files, 0 B sent in TIME, 1 unchanged, 0 deleted\n")
    assert (target / "a").read_bytes() == b"1"
    assert outlast(source, source / "inside")[0] == 2
    assert "lies inside the other" in outlast(source, source / "inside")[2]


def test_sync_names_what_failed_and_exits_with_1(outlast: Outlast, moto: Place, tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"good": b"1", **{f"bad\n{n:02}": b"2" for n in range(25)}})
    (source / "dangling").symlink_to("nothing")
    code, out, err = outlast(source, moto.url)
    assert (code, out) == (1, "1 file, 1 B sent in TIME, 0 unchanged, 0 deleted, 25 failed\n")
    lines = err.splitlines()
    assert lines[0] == "ignored: dangling: it is a link to nothing (No such file or directory)"
    assert lines[1].startswith("failed: 'bad\\n00': ")
    assert lines[-1] == "failed: and 5 more (all of them with -o json)"
    assert len(lines) == 22


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("s3://one", "s3://two"), "Error: s3://one and s3://two are both in a store; sync the one to a directory, and that to"),
        (("/nonexistent/typo", "memory://x"), "Error: /nonexistent/typo is not there; give a directory that is\n"),
        (("memory://empty/typo", "target"), "Error: there is nothing in memory://empty/typo; correct the URL\n"),
        (("/etc/passwd", "memory://x"), "Error: /etc/passwd is not a directory; give a directory\n"),
    ],
)
def test_a_mistake_is_one_sentence(
    outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = outlast(*words)
    assert (code, out) == (2, "")
    assert err.startswith(sentence)


def test_what_is_shown_meanwhile() -> None:
    said = transfer_progress.line(412 << 20, 1 << 30, "sent", 4.0, "412/1,000 files")
    assert said == "412/1,000 files, 412 MiB of 1.0 GiB sent, 103 MiB/s, 5.9s left"
    assert transfer_progress.line(500, 0, "received", 4.0, first=100) == "500 B received, 100 B/s", "resumed, of unknown length"
    report = push_and_pull.Report(transferred=1000, bytes=1 << 30, unchanged=3)
    said = command.summary(report, "sent", 4.2, dry_run=False)
    assert said == "1,000 files, 1.0 GiB sent in 4.2s (244 MiB/s), 3 unchanged, 0 deleted"


@pytest.mark.parametrize("terminal", [False, True])
def test_each_stage_and_what_an_earlier_command_has_brought_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(transfer_progress, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(transfer_progress.terminal, "interactive", lambda stream: terminal)
    with transfer_progress.shown("received") as tell:
        for done, total in ((900, 1000), (950, 1000), (0, 0), (40, 0)):
            tell(done, total)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    if not terminal:
        assert lines == [
            "900 B of 1000 B received, 0 B/s",
            "950 B of 1000 B received, 2 B/s, 20s left",
            "0 B received, 0 B/s",
            "40 B received, 2 B/s",
        ]


def test_ctrl_c_ends_the_wait_for_a_store_that_does_not_answer(tmp_path: Path) -> None:
    source = a_tree(tmp_path / "source", {"one": b"1"})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
        environ = {**os.environ, **keys, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [OUTLAST, "sync", str(source), "s3://bucket/x"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environ, **pipes) as child, silent.accept()[0]:  # its first request is on its way
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "stopped; the same command goes on from here\n")
