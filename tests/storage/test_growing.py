"""Files that grow, in a store: what is sent is what was written, and nothing there is ever replaced by less."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.base.errors import StoreError, Unreachable
from outlast.job import contract, ledger
from outlast.job.report import goodput, incidents
from outlast.storage import store
from outlast.storage.checkpoints import Retention
from outlast.storage.runs import output as stored
from outlast.storage.runs.output import skipped
from outlast.storage.sync import growing_files, push_and_pull
from outlast.worker.agent import join_run, upload

GO = threading.Event()
LOG, METRICS = "logs/worker-0.log", "metrics.jsonl"


def a_place() -> store.Store:
    return store.open_(f"memory://{uuid.uuid4().hex}/job")


def bytes_in(place: store.Store) -> int:
    return sum(entry.size for entry in place.entries())


def text(place: store.Store, path: str, *, threads: int = 2) -> bytes:
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(growing_files.pieces(place, path, pool))


def append(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(data)


def test_what_is_no_log_or_has_an_odd_name_keeps_no_other_from_being_pushed(tmp_path: Path):
    place, logs = a_place(), tmp_path / "logs"
    append(tmp_path / LOG, b"a line\n")
    (logs / "tensorboard.log").mkdir()
    (logs / "tensorboard.log/events").write_bytes(b"x")
    os.mkfifo(logs / "pipe.log")
    Path(os.fsdecode(os.fsencode(logs) + b"/\xff.log")).write_bytes(b"x")
    (tmp_path / "else").write_bytes(b"x")
    uploader = upload.Uploader(tmp_path, place, "run", "owner", Retention(2), lambda _: None)
    with pytest.raises(
        upload.SomeFailed, match=r"logs/\\udcff.log could not be pushed: it cannot be the name of an object: .*rename it"
    ):
        uploader.upload(GO)
    assert text(place, LOG) == b"a line\n"
    assert place.get("else") == place.get("logs/tensorboard.log/events") == b"x"


def test_a_file_that_cannot_be_read_or_that_the_store_refuses_keeps_no_other_from_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place, refused = a_place(), [True]
    append(tmp_path / LOG, b"a line\n")
    append(tmp_path / "logs/odd.log", b"odd\n")
    put = store.Store.put

    def refusing(self: store.Store, key: str, data: bytes) -> str:
        if "odd" in key and refused:
            raise StoreError(f"{key} is not taken")
        return put(self, key, data)

    monkeypatch.setattr(store.Store, "put", refusing)
    (tmp_path / "ledger/a.jsonl").mkdir(parents=True)
    sender = growing_files.Sender(place, tmp_path)
    assert sender.push(["ledger/a.jsonl", "logs/odd.log", LOG, "ledger/gone.jsonl"], GO) == len(b"a line\n")
    assert sorted(sender.failed) == [
        ("ledger/a.jsonl", "it cannot be read: Is a directory"),
        ("logs/odd.log", "logs/odd.parts/00000000-0-ec9b1c08.log is not taken"),
    ]
    refused.clear()
    assert sender.push(["logs/odd.log", LOG], GO) == len(b"odd\n")


def test_no_more_is_read_ahead_than_can_be_held():
    asked: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        for n, _ in enumerate(growing_files._ahead(pool, ((5, asked.append, (n,)) for n in range(32)), 20)):
            assert len(asked) <= n + 4
    assert sorted(asked) == list(range(32))


def test_a_file_that_was_cut_back_goes_on_from_there(tmp_path: Path):
    place, file = a_place(), tmp_path / METRICS
    sender = growing_files.Sender(place, tmp_path)
    for lines in (b"1\n2\n", b"3\n4\n", b"5\n6\n"):
        append(file, lines)
        sender.push([METRICS], GO)
    file.write_bytes(b"1\n2\n3\n" + b"4 again\n5 again\n")
    assert sender.push([METRICS], GO) == len(b"3\n4 again\n5 again\n")
    assert text(place, METRICS) == b"1\n2\n3\n4 again\n5 again\n"
    assert growing_files.fetch(place, METRICS, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == text(place, METRICS)


def test_what_a_superseded_sender_still_sent_is_no_part_of_the_metrics(tmp_path: Path):
    place, ours, theirs = a_place(), tmp_path / "ours", tmp_path / "theirs"
    append(theirs / METRICS, b'{"step": 1}\n')
    zombie = growing_files.Sender(place, theirs)
    zombie.push([METRICS], GO)
    growing_files.fetch(place, METRICS, ours / METRICS)
    sender = growing_files.Sender(place, ours)
    append(ours / METRICS, b'{"step": 2, "loss": 0.5}\n')
    sender.push([METRICS], GO)
    append(theirs / METRICS, b'{"step": 2, "loss": 0.25}\n{"step": 3}\n')
    zombie.push([METRICS], GO)  # it had looked whether it may before we came
    for each in (sender, growing_files.Sender(place, ours)):
        append(ours / METRICS, b'{"step": 3, "loss": 0.5}\n')
        each.push([METRICS], GO)
        assert text(place, METRICS) == (ours / METRICS).read_bytes()


def test_a_log_that_lost_its_end_takes_nothing_from_the_store(tmp_path: Path):
    place = a_place()
    for lines in (b"1\n", b"2\n", b"3\n"):
        append(tmp_path / LOG, lines)
        growing_files.Sender(place, tmp_path).push([LOG], GO)
    (tmp_path / LOG).write_bytes(b"1\n")  # the power failed
    append(tmp_path / LOG, b"after it\n")
    growing_files.Sender(place, tmp_path).push([LOG], GO)
    assert text(place, LOG) == b"1\n2\n3\nafter it\n"
    assert list(growing_files.tail(place, LOG, 2)) == [b"3", b"after it"]


def test_a_fetch_that_is_killed_leaves_the_store_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The truncated copy of an interrupted start must not become the run's history."""
    place, whole = a_place(), b"".join(b'{"step": %d}\n' % step for step in range(10_000))
    append(tmp_path / "first" / METRICS, whole)
    growing_files.Sender(place, tmp_path / "first").push([METRICS], GO)
    second = tmp_path / "second"

    def killed(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(growing_files.tree, "write", killed)
        with pytest.raises(OSError, match="No space left"):
            join_run.fetch_own(place, second, 0)
    assert not (second / METRICS).exists()
    join_run.fetch_own(place, second, 1)  # whichever worker rank 0 will be on
    assert (second / METRICS).read_bytes() == whole
    assert [path.name for path in second.iterdir()] == [METRICS]


def test_a_fetch_never_replaces_what_somebody_has_begun_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = a_place()
    append(tmp_path / "a" / METRICS, b"old\n")
    growing_files.Sender(place, tmp_path / "a").push([METRICS], GO)
    there = growing_files.tree.write

    def meanwhile(*args: object) -> None:
        append(tmp_path / "b" / METRICS, b"of another worker of this volume\n")
        there(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(growing_files.tree, "write", meanwhile)
    assert growing_files.fetch(place, METRICS, tmp_path / "b" / METRICS)
    assert (tmp_path / "b" / METRICS).read_bytes() == b"of another worker of this volume\n"


def test_a_push_leaves_growing_files_to_their_sender(tmp_path: Path):
    place = a_place()
    for name in (LOG, METRICS, "ledger/rank-0.jsonl", "final.json", "logs/stacks-worker-0.txt"):
        append(tmp_path / name, b"{}\n")
    sender = growing_files.Sender(place, tmp_path)
    for _ in range(2):
        sender.push([LOG, METRICS, "ledger/rank-0.jsonl"], GO)
        report = push_and_pull.push(
            tmp_path, place, tmp_path / ".push" / "manifest", push_and_pull.Options(skip=skipped, check=True)
        )
    assert report.transferred == 0
    assert [key.rpartition("/")[0] or key for key in sorted(entry.key for entry in place.entries())] == [
        ".outlast-manifest", "final.json", "ledger/rank-0.parts", "logs", "logs/worker-0.parts", "metrics.parts",
    ]  # fmt: skip
    assert list(stored.events(place)) == []
    append(tmp_path / "ledger/rank-0.jsonl", json.dumps({"t": 1.0, "kind": "world"}).encode())
    sender.push(["ledger/rank-0.jsonl"], GO)
    assert [event["kind"] for event in stored.events(place)] == ["world"]


class Failing:
    """A store whose next write fails, before or after it has been done."""

    def __init__(self, place: store.Store) -> None:
        self.place, self.fail = place, ""

    def __getattr__(self, name: str) -> object:
        return getattr(self.place, name)

    def put(self, key: str, data: bytes) -> str:
        fail, self.fail = self.fail, ""
        if fail == "before":
            raise Unreachable("gone")
        with_ = {entry.key for entry in self.place.entries()}
        assert key not in with_ or self.place.get(key) == data, "an object is never replaced by another content"
        self.place.put(key, data)
        if fail == "after":
            raise Unreachable("the answer was lost")
        return ""


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 40)),
        st.tuples(st.just("cut"), st.integers(0, 100)),
        st.tuples(st.sampled_from(["push", "fail before", "fail after", "restart", "new disk"]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=settings.default.max_examples // 2)
@given(ACTS, st.sampled_from([LOG, METRICS]), st.integers(10, 60))
def test_whatever_fails_the_store_has_the_file_and_no_byte_of_it_twice(acts, path, part):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(growing_files, "PART", part)
        place, disk, disks = Failing(a_place()), Path(directory, "0"), 0
        sender, wrote, cuts = growing_files.Sender(place, disk), 0, 0
        for act, number in [*acts, ("push", 0)]:
            file = disk / path
            if act == "write":
                append(file, b"".join(b"%d," % (wrote + i) for i in range(number)))
                wrote += number
            elif act == "cut" and path == METRICS and file.exists():
                cuts += 1
                data = file.read_bytes()
                file.write_bytes(data[: len(data) * number // 100])
            elif act == "restart":
                sender = growing_files.Sender(place, disk)
            elif act == "new disk":
                disks += 1
                disk = Path(directory, str(disks))
                growing_files.fetch(place, path, disk / path)
                sender = growing_files.Sender(place, disk)
            elif act in ("push", "fail before", "fail after"):
                place.fail = act.removeprefix("fail ") if act != "push" else ""
                try:
                    sender.push([path], GO)
                except Unreachable:
                    continue
                place.fail = ""
                if file.exists():
                    here = file.read_bytes()
                    there = text(place, path)
                    assert there[: len(here)] == here if cuts else there == here
        assert all(0 < each.size <= part for each in growing_files.parts(place, path))
        if not cuts and not disks:
            assert bytes_in(place) <= sum(len(b"%d," % n) for n in range(wrote))


def test_a_ledger_is_in_the_store_soon_after_an_event_and_costs_a_request_a_minute_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place, asked = a_place(), []
    book = ledger.Ledger(tmp_path / "ledger", "worker-0-process-0")
    uploader = upload.Uploader(tmp_path, place, "run", "owner", Retention(2), lambda _: None)
    book.write("session", generation=1)
    uploader.upload(GO)
    for name in ("put", "read"):
        whole = getattr(store.Store, name)
        monkeypatch.setattr(store.Store, name, lambda self, *args, whole=whole: (asked.append(args[0]), whole(self, *args))[1])

    def there() -> list[str]:
        return [event["kind"] for event in stored.events(place)]

    book.write("failure", generation=1)
    uploader.upload_ledger(GO, 1000)
    assert there() == ["session", "failure"]
    asked.clear()
    for second in range(1, 1201):
        book._append({"t": float(second), "kind": "step", "source": "w", "generation": 1, "step": second})
        uploader.upload_ledger(GO, 1000 + second)
    assert len(there()) == 1202
    assert len(asked) <= 1200 / 60
    book.write("interrupted")
    uploader.upload_ledger(GO, 2200 + upload.EVENTS_S)
    assert there()[-1] == "interrupted"


def test_the_goodput_that_the_operator_is_told_counts_the_ledgers_of_all_workers(tmp_path: Path):
    """Those that this worker has written on a disk that is gone among them."""
    place, told = a_place(), []
    events = [{"t": 0.0, "kind": "submitted"}, {"t": 1.0, "kind": "worker"}, {"t": 2.0, "kind": "world", "generation": 1}]
    steps = [{"t": 2.0 + step, "kind": "step", "generation": 1, "step": step} for step in range(1, 9)]
    told_by = [("operator-1", events), ("worker-0-process-0", steps[:5]), ("worker-0-process-0", steps[5:])]
    for number, (name, lines) in enumerate(told_by):
        append(tmp_path / f"{number}/ledger/{name}.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        growing_files.Sender(place, tmp_path / str(number)).push([f"ledger/{name}.jsonl"], GO)
    environ = {contract.Env.MEMBER: "uid", contract.Env.STATE: str(tmp_path)}
    output = tmp_path / "2"
    uploader = upload.Uploader(output, place, "run", "me", Retention(2), told.append, environ=environ)
    uploader.ended = 10.0
    uploader.count(0.0, GO)
    assert told == [], "the run has not ended, this worker leaves"
    uploader.run_ended = True
    uploader.count(0.0, GO)
    assert told == [], "there is no place to put them, which fails no upload"
    (output / ".push").mkdir()
    stopped = threading.Event()
    stopped.set()
    uploader.count(100.0, stopped)
    assert told == []
    uploader.count(200.0, GO)
    account = goodput.buckets([*events, *steps], None)
    assert [said.goodput for said in told] == [round(account.goodput, 6)] == [0.8]
    assert (told[0].lost, told[0].lost_steps) == (dict.fromkeys(incidents.CAUSES, 0.0), 0)
