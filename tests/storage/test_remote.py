"""Checkpoints in a store: the rules, what is pushed and fetched, what goes, and who owns the place."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import faults
import local_checkpoints
from faults import Proxy
from outlast.base.errors import AlreadyRunning, Denied, OutlastError, Stopped, Superseded, Unreachable
from outlast.job import contract
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store, register, register_rules, retention
from outlast.storage.checkpoints.register_rules import Latest, Names, Place
from outlast.storage.runs import heartbeat
from outlast.storage.store import Store, multipart
from outlast.worker.agent import upload
from servers import Place as Bucket
from watched import WRITES, Hand, Killed, Last, Watched, each_register, hand_over

RUN = "run-1"
FILES = {"__0_0.distcp": b"weights " * 100, "__1_0.distcp": b"momenta " * 100, ".metadata": b"{}", "empty": b""}


def at(step: int, generation: int = 1) -> Place:
    return Place(step, generation, f"{RUN}-g{generation}-{step:08x}")


def latest(*places: Place, generation: int = 1) -> Latest:
    return Latest(RUN, generation, tuple(sorted(places)))


written = functools.partial(local_checkpoints.written, files=FILES, run=RUN)
"""A local checkpoint."""


def keys(place: Store, below: str = "") -> list[str]:
    return [entry.key for entry in place.entries(below)]


def watched(place: Store, hand: Hand) -> in_store.Checkpoints:
    """The run's checkpoints in a store, each request for which goes through a hand."""
    return in_store.Checkpoints(Watched(place, hand), RUN)  # type: ignore[arg-type]


def told(found: in_store.Checkpoints) -> list[tuple[int, int]]:
    """Steps and generations."""
    return [(each.step, each.generation) for each in found.list_()]


def refusing(error: BaseException, *requests: str) -> Hand:
    """A hand that lets these requests fail."""

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        if request in requests:
            raise error
        return act()

    return hand


# The rules


@st.composite
def registers(draw: st.DrawFn) -> Latest:
    steps = draw(st.lists(st.integers(1, 9), unique=True, max_size=7))
    generations = draw(st.lists(st.integers(1, 4), min_size=len(steps), max_size=len(steps)))
    return latest(*map(at, steps, generations), generation=4)


places = st.builds(at, st.integers(1, 9), st.integers(1, 4))


@given(registers(), places, st.lists(st.tuples(places, st.integers(0, 4)), max_size=8))
def test_what_is_outlived_stays_so_whatever_happens(now: Latest, old: Place, happens: list[tuple[Place, int]]):
    """So its files may be deleted however late one comes to it."""
    obsolete = register_rules.obsolete(now, old)
    for place, keep in happens:
        if not register_rules.refused(now, place):
            now = now.added(place)
        now = now.without(checkpoints.Retention(keep).expired(now.places))
        assert register_rules.obsolete(now, old) or not obsolete
        obsolete = register_rules.obsolete(now, old)


@given(registers(), st.lists(places, max_size=5))
def test_a_new_generation_finds_what_the_one_before_finished_and_nothing_of_zombies(now: Latest, finished: list[Place]):
    now = dataclasses.replace(now, generation=3)
    new = register_rules.acquired(now, 4, finished)
    assert new.generation == 4
    assert new.step >= now.step
    assert all(place.generation == 3 and place in finished for place in new.places if place not in now.places)


def test_a_checkpoint_that_a_later_generation_went_back_before_does_not_count():
    now = latest(at(8), at(10, 2), at(12), at(13))  # 12 and 13 were damaged when generation 2 began
    assert retention.counted(now.places) == [at(8), at(10, 2)]
    assert checkpoints.Retention(2).expired(now.places) == []
    now = now.added(at(14, 2))
    assert checkpoints.Retention(2).expired(now.places) == [at(8)]
    assert checkpoints.Retention(2).expired(now.added(at(15, 2)).places) == [at(8), at(10, 2), at(12), at(13)]


def test_what_may_not_be_added_is_told_why():
    now = latest(at(10), at(20, 2), at(30, 3))
    assert register_rules.refused(now, at(5)) == "step 5 is older than what the store keeps (steps 10, 20, 30)"
    assert register_rules.refused(now, at(30, 2)) == "step 30 is in the store as generation 3 wrote it"
    assert register_rules.refused(now, at(25)) == ""
    assert register_rules.refused(now, at(5, 4)) == ""  # the run has gone back before all of them


def test_who_may_not_commit_is_told_why():
    assert register_rules.superseded(None, RUN, 1) == register_rules.superseded(latest(generation=2), RUN, 2) == ""
    said = "generation 1 of run run-1 has been replaced by generation 2; this process must stop"
    assert register_rules.superseded(latest(generation=2), RUN, 1) == said
    assert register_rules.superseded(latest(), "other", 9) == "run other no longer owns its output in the store: run run-1 does"


@given(registers())
def test_a_register_is_read_as_it_was_written(now: Latest):
    assert Latest.parse(now.text(5.0)) == now
    named = [register_rules.ownership(4), *(register_rules.commitment(4, place) for place in now.places)]
    assert Names.read([*named, register_rules.commitment(3, at(9)), register_rules.announcement(5), "odd"], RUN) == Names(5, now)


def test_the_register_says_the_newest_to_people_and_scripts():
    said = json.loads(latest(at(10), at(20)).text(5.0))
    assert (said["run"], said["step"], said["name"], said["time"]) == (RUN, 20, f"step-00000020/{at(20).parts}", 5.0)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"version": 1, "run": "r", "generation": 1, "checkpoints": [{}]}'])
def test_a_damaged_register_is_recognised(text: bytes):
    with pytest.raises(ValueError, match=r"Expecting|it is damaged"):
        Latest.parse(text)


def test_a_register_of_a_later_version_is_left_alone():
    with pytest.raises(OutlastError, match="saved by a later Outlast"):
        Latest.parse(b'{"version": 2, "run": "r"}')


@given(st.integers(0, 10**9), st.integers(0, 99), st.sampled_from(["r", "20251120-101010-abcdef", "", "a.b", "x-g4-00000000"]))
def test_a_place_is_found_in_a_key(step: int, generation: int, run: str):
    said = checkpoints.Commit(run, step, generation, 2, 5.0, {"a": {"size": 1, "crc32": 2}})
    place = Place.of(said)
    assert Place.parse(f"{place.key}/some/file", run) == place
    assert Place.parse(place.key, run + "x") is None
    named = Names.read([register_rules.ownership(9), register_rules.commitment(9, place)], run)
    assert named.latest == Latest(run, 9, (place,))


def test_other_contents_have_another_place():
    said = checkpoints.Commit(RUN, 1, 1, 2, 5.0, {"a": {"size": 1, "crc32": 2}})
    other = dataclasses.replace(said, files={"a": {"size": 1, "crc32": 3}})
    assert Place.of(said) != Place.of(other)
    assert Place.of(said) == Place.of(dataclasses.replace(said, time=6.0))


# Pushing and fetching, against stores of each kind


def test_what_is_pushed_here_is_restored_there(place: Store, tmp_path: Path):
    ours = in_store.Checkpoints(place, RUN)
    assert (ours.latest(), ours.list_()) == (None, [])
    assert ours.acquire(1).step == 0
    for step in (10, 20):
        local = written(tmp_path / "here", step)
        assert ours.push(local, journals=tmp_path) == in_store.Outcome("committed", f"step {step} is in the store")
        assert ours.push(local, journals=tmp_path).kind == "there"
    theirs = in_store.Checkpoints(place, RUN)
    assert [(c.step, c.generation, c.bytes, c.problem) for c in theirs.list_()] == [(10, 1, 1602, ""), (20, 1, 1602, "")]
    newest = theirs.latest()
    assert newest == theirs.list_()[-1]
    assert theirs.verify(newest, deep=True) is None
    said: list[str] = []
    restored = theirs.restore(tmp_path / "there", say=said.append)
    assert restored == dataclasses.replace(local, path=tmp_path / "there" / "step-00000020")
    assert said == [f"fetching the checkpoint of step 20 (1.6 KiB) from {place.url}"]
    assert {path.name: path.read_bytes() for path in restored.path.iterdir()} == {
        path.name: path.read_bytes() for path in local.path.iterdir()
    }
    assert theirs.restore(tmp_path / "there", say=said.append, above=20) is None
    assert not [key for key in keys(place) if "READING" in key]


def test_a_replaced_generation_commits_nothing(place: Store, tmp_path: Path):
    zombie, owner = in_store.Checkpoints(place, RUN), in_store.Checkpoints(place, RUN)
    zombie.acquire(1)
    zombie.push(written(tmp_path / "zombie", 10), journals=tmp_path)
    assert owner.acquire(2).step == 10
    with pytest.raises(Superseded, match="generation 1 of run run-1 has been replaced by generation 2"):
        zombie.push(written(tmp_path / "zombie", 20), journals=tmp_path)
    with pytest.raises(Superseded):
        zombie.acquire(1)
    assert owner.push(written(tmp_path / "owner", 20, generation=2), journals=tmp_path).kind == "committed"
    assert told(owner) == [(10, 1), (20, 2)]


def test_another_runs_register_is_taken_over_only_by_the_run_that_owns_the_place(place: Store, tmp_path: Path):
    old, new = in_store.Checkpoints(place, "old"), in_store.Checkpoints(place, "new")
    runs.claim(place, runs.Run("old", "job", 1.0))
    old.acquire(7)
    old.push(written(tmp_path / "old", 10, run="old", generation=7), journals=tmp_path)
    with pytest.raises(Superseded, match=r"run new no longer owns .*: run old does"):
        new.acquire(1)
    runs.claim(place, runs.Run("new", "job", 2.0), replace=True)
    runs.archive(place, "new")
    assert new.acquire(1).step == 0
    with pytest.raises(Superseded):
        old.push(written(tmp_path / "old", 20, run="old", generation=7), journals=tmp_path)
    with pytest.raises(Superseded):
        old.acquire(8)
    assert new.list_() == []
    assert told(in_store.Checkpoints(place.child("previous/old"), "old")) == [(10, 7)]


def test_a_push_that_goes_on_sends_only_what_is_missing(memory: Store, tmp_path: Path):
    local = written(tmp_path / "here", 10)
    sent: list[str] = []

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        if request in ("put", "upload") and not key.endswith("READING"):
            sent.append(key.rpartition("/")[2])
            if len(sent) == 3:
                raise Unreachable("gone")
        return act()

    ours = watched(memory, hand)
    ours.acquire(1)
    with pytest.raises(Unreachable):
        ours.push(local, journals=tmp_path)
    arrived = {key.rpartition("/")[2] for key in keys(memory, "checkpoints/step-00000010")}
    assert 0 < len(arrived) < len(FILES)
    sent[:] = ["", "", "", ""]
    ours.acquire(2)  # a new generation goes on with the same files
    assert ours.push(local, journals=tmp_path).kind == "committed"
    assert set(sent[4:]) == FILES.keys() - arrived


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_was_stopped_goes_on_under_the_next_generation(moto: Bucket, moto_proxy: Proxy, tmp_path: Path):
    ours, client = in_store.Checkpoints(store.open_(f"{moto.url}/job"), RUN), moto.server.client
    large, stop = written(tmp_path / "here", 10, files={"large": bytes(5 * multipart.PART)}), threading.Event()
    ours.acquire(1)
    moto_proxy.fault = lambda request: faults.hang if re.search("partNumber=[3-5]", request.path) else None
    with pytest.raises(Stopped):
        ours.push(large, journals=tmp_path / "journals", progress=lambda count: stop.set() if count else None, stop=stop)
    moto_proxy.fault = lambda _: None
    moto_proxy.forget()
    (upload,) = client.list_multipart_uploads(Bucket=moto.bucket)["Uploads"]
    arrived = client.list_parts(Bucket=moto.bucket, Key=upload["Key"], UploadId=upload["UploadId"])["Parts"]
    assert arrived
    assert ours.latest() is None
    ours.acquire(2)
    assert ours.push(large, journals=tmp_path / "journals").kind == "committed"
    assert sum("partNumber" in request.path for request in moto_proxy.requests) == 5 - len(arrived)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=moto.bucket)
    newest = ours.latest()
    assert ours.verify(newest, deep=True) is None


def test_a_checkpoint_that_is_spread_over_machines_is_committed_by_the_last(place: Store, tmp_path: Path):
    whole = written(tmp_path / "one", 10)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (whole.path / "__1_0.distcp").unlink()
    for name in FILES.keys() - {"__1_0.distcp"}:
        (tmp_path / "two" / "step-00000010" / name).unlink()
    one, two = in_store.Checkpoints(place, RUN), in_store.Checkpoints(place, RUN)
    one.acquire(1)
    two.acquire(1)
    waits = one.push(whole, journals=tmp_path)
    assert (waits.kind, waits.done, waits.missing) == ("waiting", False, ("__1_0.distcp",))
    assert waits.reason == "step-00000010 waits for __1_0.distcp, which another machine has"
    assert one.latest() is None
    other = checkpoints.list_(tmp_path / "two")[0]
    assert two.push(other, journals=tmp_path).kind == "committed"
    assert one.push(whole, journals=tmp_path).kind == "there"
    restored = one.restore(tmp_path / "three", say=lambda _: None)
    assert checkpoints.verify(restored.path) is None


# Damage


def commit_key(place: Store, step: int) -> str:
    return next(key for key in keys(place, f"checkpoints/{contract.checkpoint_name(step)}") if key.endswith("/COMMIT"))


def garble(place: Store, key: str) -> None:
    place.put(key, b"\0" * len(place.get(key)))


def truncate(place: Store, key: str) -> None:
    place.put(key, place.get(key)[:-1])


def remove(place: Store, key: str) -> None:
    place.delete([key])


def three(place: Store, tmp_path: Path) -> in_store.Checkpoints:
    """Steps 10, 20 and 30 in a store."""
    ours = in_store.Checkpoints(place, RUN)
    ours.acquire(1)
    for step in (10, 20, 30):
        ours.push(written(tmp_path / "here", step), journals=tmp_path)
    return ours


@pytest.mark.parametrize(
    ("name", "harm", "problem"),
    [
        ("COMMIT", truncate, "COMMIT cannot be read: Expecting ',' delimiter"),
        ("COMMIT", garble, "COMMIT cannot be read: Expecting value"),
        ("COMMIT", remove, "COMMIT cannot be read: it is gone"),
        ("__0_0.distcp", truncate, "__0_0.distcp has 799 bytes instead of 800"),
        ("__0_0.distcp", garble, "__0_0.distcp has crc32 "),
        (".metadata", remove, ".metadata is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_skipped(
    memory: Store, tmp_path: Path, name: str, harm: Callable[[Store, str], None], problem: str
):
    ours = three(memory, tmp_path)
    newest = ours.latest()
    harm(memory, commit_key(memory, 30).replace("COMMIT", name))
    assert (ours.verify(newest, deep=True) or "").startswith(problem)
    said: list[str] = []
    restored = ours.restore(tmp_path / "there", say=said.append)
    assert restored.step == 20
    assert any(f"the checkpoint of step 30 is skipped: {memory.url}/checkpoints/{newest.place.key}: {problem}" in t for t in said)
    assert not list((tmp_path / "there").glob("step-00000030"))
    # The machine that has it mends it; rot in a file that kept its size shows only when somebody reads it.
    rotten = harm is garble and name != "COMMIT"
    mended = ours.push(checkpoints.list_(tmp_path / "here")[-1], journals=tmp_path)
    assert mended.kind == ("there" if rotten else "committed")
    assert (ours.verify(newest, deep=True) is None) is not rotten


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(memory: Store, tmp_path: Path):
    ours = three(memory, tmp_path)
    garble(memory, commit_key(memory, 30).replace("COMMIT", "__0_0.distcp"))
    ours.acquire(2)
    again = written(tmp_path / "again", 30, generation=2, files={**FILES, "__0_0.distcp": b"changed " * 100})
    assert ours.push(again, journals=tmp_path).kind == "committed"
    assert told(ours) == [(10, 1), (20, 1), (30, 2)]
    again = written(tmp_path / "again", 20, generation=2, files={**FILES, "__0_0.distcp": b"changed " * 100})
    assert ours.push(again, journals=tmp_path).kind == "there", "a whole one stays"
    assert told(ours) == [(10, 1), (20, 1), (30, 2)]


@pytest.mark.parametrize("harm", [truncate, garble, remove])
def test_a_lost_register_is_told_from_the_checkpoints_and_written_anew(memory: Store, tmp_path: Path, harm: Callable[..., None]):
    ours = three(memory, tmp_path)
    harm(memory, register.LATEST)
    assert [c.step for c in in_store.Checkpoints(memory, RUN).list_()] == [10, 20, 30]
    assert ours.push(written(tmp_path / "here", 40), journals=tmp_path).kind == "committed"
    assert json.loads(memory.get(register.LATEST))["generation"] == 1
    assert [c.step for c in ours.list_()] == [10, 20, 30, 40]
    harm(memory, register.LATEST)
    assert ours.acquire(2).step == 40


def test_what_is_damaged_here_is_never_committed(memory: Store, tmp_path: Path):
    ours = in_store.Checkpoints(memory, RUN)
    ours.acquire(1)
    rotten, cut, torn = (written(tmp_path / "here", step) for step in (10, 20, 30))
    (rotten.path / ".metadata").write_bytes(b"[]")
    (cut.path / ".metadata").write_bytes(b"{")
    (torn.path / "COMMIT").write_bytes(b"{")
    problems = (".metadata has crc32 ", ".metadata has 1 bytes instead of 2", "COMMIT cannot be read: ")
    for local, problem in zip((rotten, cut, torn), problems, strict=True):
        for _ in range(2):
            outcome = ours.push(local, journals=tmp_path)
            assert (outcome.kind, outcome.done) == ("damaged", False)
            assert outcome.reason.startswith(f"{local.path.name} is damaged here: {problem}")
    assert ours.latest() is None
    assert not [key for key in keys(memory) if key.endswith(("COMMIT", ".metadata"))]


# Going on after a kill


def test_a_fetch_goes_on_with_what_has_arrived(memory: Store, tmp_path: Path):
    three(memory, tmp_path)
    directory = tmp_path / "there"
    begun = directory / "step-00000030.fetching"
    begun.mkdir(parents=True)
    (begun / "__0_0.distcp").write_bytes(FILES["__0_0.distcp"])
    (begun / "__1_0.distcp").write_bytes(FILES["__1_0.distcp"][:-1] + b"!")
    (begun / "foreign").write_bytes(b"of another writer")
    read: list[str] = []

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        if request in ("read", "range") and "/step-" in key:
            read.append(key.rpartition("/")[2])
        return act()

    restored = watched(memory, hand).restore(directory, say=lambda _: None)
    assert checkpoints.verify(restored.path) is None
    assert {path.name for path in restored.path.iterdir()} == {*FILES, "COMMIT"}
    assert "__0_0.distcp" not in read
    assert {path.name for path in directory.iterdir()} == {".lock", "step-00000030"}


def test_a_valid_checkpoint_here_is_replaced_by_one_of_a_later_generation_and_a_damaged_one_by_any(memory: Store, tmp_path: Path):
    ours = three(memory, tmp_path)
    here = tmp_path / "there"
    mine = written(here, 30, files={**FILES, ".metadata": b"[]"})
    newest = ours.latest()
    assert ours.fetch(newest, here) == mine
    assert (mine.path / ".metadata").read_bytes() == b"[]"
    (mine.path / ".metadata").write_bytes(b"()")
    assert (ours.fetch(newest, here).path / ".metadata").read_bytes() == b"{}"
    assert checkpoints.verify(mine.path) is None
    assert (here / "step-00000030.replaced-0").is_dir()
    written(tmp_path / "earlier", 30, generation=0)
    assert ours.fetch(newest, tmp_path / "earlier").generation == 1


every_moment = pytest.mark.parametrize(
    ("lost", "carried_out"),
    [
        pytest.param(False, True, id="killed after"),
        pytest.param(True, True, id="answer lost", marks=pytest.mark.slow),  # test_remote_races.py loses answers, too
    ],
)


@every_moment
@each_register
def test_whichever_request_is_the_last_the_next_process_goes_on(tmp_path: Path, conditional: bool, lost: bool, carried_out: bool):
    """Take, fetch, push, prune: for every n the n-th request is the last of a process, or its answer is lost."""
    raw = store.open_(f"memory://last-{conditional}-{carried_out}-{lost}")
    local = {}
    for generation in (1, 2):
        for step in range(1, 12):
            content, metric = {"a": b"%d of %d" % (step, generation), "b": b""}, checkpoints.Metric(float(step), "loss")
            local[generation, step] = written(
                tmp_path / str(generation), step, generation=generation, files=content, metric=metric
            )

    def process(place: Any, generation: int) -> Iterator[int]:
        """Go on for three steps; those that are in the store, as soon as they are."""
        ours = in_store.Checkpoints(place, RUN)
        newest = ours.acquire(generation).step
        if newest:
            restored = ours.restore(tmp_path / f"{place.url.rpartition('/')[2]}-{generation}", say=lambda _: None)
            assert restored.step == newest
            assert (restored.path / "a").read_bytes() == b"%d of %d" % (newest, restored.generation)
        for step in range(newest + 1, newest + 4):
            assert ours.push(local[generation, step], journals=tmp_path).done
            yield step
            ours.prune(checkpoints.Retention(2, best=1))

    for n in range(1, 1000):
        place = raw.child(str(n))
        calm: Any = Watched(place, hand_over, conditional=conditional)
        last = Last(n, lost=lost, carried_out=carried_out)
        there = [0]
        try:
            there += process(Watched(place, last, conditional=conditional), 1)
        except Killed:
            pass
        except Unreachable:
            there += process(calm, 1)  # tries again
        newest = in_store.Checkpoints(calm, RUN).latest()
        assert (newest.step if newest else 0) >= max(there)
        there += process(calm, 2)
        ours = in_store.Checkpoints(calm, RUN)
        found = ours.list_()
        kept = [1, max(there) - 1, max(there)]  # the first is the best
        assert [(c.step, ours.verify(c, deep=True)) for c in found] == [(step, None) for step in kept]
        if not last.reached:
            break
    assert n > 20


# What goes


def test_as_many_are_kept_as_are_wanted_and_never_fewer_than_two(place: Store, tmp_path: Path):
    ours = three(place, tmp_path)
    assert [p.step for p in ours.prune(checkpoints.Retention(2), dry_run=True)] == [10]
    assert [c.step for c in ours.list_()] == [10, 20, 30]
    assert [p.step for p in ours.prune(checkpoints.Retention(0))] == [10]
    assert ours.prune(checkpoints.Retention(0)) == []
    assert [c.step for c in ours.list_()] == [20, 30]
    assert keys(place, "checkpoints/step-00000010") == []
    ours.push(written(tmp_path / "here", 40), journals=tmp_path)
    old = checkpoints.list_(tmp_path / "here")[0]
    outcome = ours.push(old, journals=tmp_path)
    assert (outcome.kind, outcome.done) == ("expired", True)
    assert outcome.reason == "step 10 is older than what the store keeps (steps 20, 30, 40)"


def test_checkpoints_with_wrong_bits_count_no_more_and_their_files_stay(place: Store, tmp_path: Path):
    runs.claim(place, runs.Run(RUN, "job", 1.0))
    directory, ours = tmp_path / contract.CHECKPOINTS, in_store.Checkpoints(place, RUN)

    def uploaded(uploader: upload.Uploader, *steps: int, generation: int = 1) -> list[tuple[int, int]]:
        for step in steps:
            written(directory, step, generation=generation)
            uploader.upload_checkpoints(threading.Event())
        return [(each.step, each.generation) for each in ours.list_()]

    first, second = (
        upload.Uploader(tmp_path, place, RUN, "owner", checkpoints.Retention(keep), lambda _: None) for keep in (3, 2)
    )
    assert uploaded(first, 10, 20, 30) == [(10, 1), (20, 1), (30, 1)]
    checkpoints.withdraw(directory, RUN, [(1, 15)])
    restored = ours.restore(directory, say=lambda _: None)
    assert restored.step == 10, "a machine that knows of it fetches no other"
    first.upload_checkpoints(threading.Event())
    assert uploaded(first) == [(10, 1)]
    assert uploaded(second, 20, 30, 40, generation=2) == [(30, 2), (40, 2)]
    kept = [key for key in keys(place, "checkpoints") if f"/{RUN}-g1-" in key]
    assert sum(key.endswith("/WITHDRAWN") for key in kept) == 2
    assert len(kept) == 2 * (len(FILES) + 1)


def test_one_that_is_being_read_stays_until_its_reader_has_ended(place: Store, tmp_path: Path):
    ours = three(place, tmp_path)
    oldest = ours.list_()[0]
    with ours.reading(oldest.place):
        assert ours.prune(checkpoints.Retention(2)) == []
        assert [c.step for c in ours.list_()] == [10, 20, 30]
        assert ours.verify(oldest, deep=True) is None
    assert [p.step for p in ours.prune(checkpoints.Retention(2))] == [10]
    with pytest.raises(in_store.Damaged, match="is no longer kept"), ours.reading(oldest.place):
        pass
    assert keys(place, "checkpoints/step-00000010") == []


def test_a_reader_that_comes_while_its_checkpoint_is_taken_off_keeps_the_files(memory: Store, tmp_path: Path):
    """It says so, and looks into the register before that is changed; whoever changes it looks for readers after that."""
    ours = three(memory, tmp_path)
    oldest = ours.list_()[0]
    reader = ours.reading(oldest.place)

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        if request == "replace":
            reader.__enter__()  # in between
        return act()

    assert [p.step for p in watched(memory, hand).prune(checkpoints.Retention(2))] == [10]
    assert ours.verify(oldest, deep=True) is None
    reader.__exit__(None, None, None)
    assert ours.prune(checkpoints.Retention(2)) == []
    assert keys(memory, "checkpoints/step-00000010") == []


def test_a_reader_that_has_died_is_forgotten(memory: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = three(memory, tmp_path)
    memory.put("checkpoints/step-00000010/READING-1-dead", b"")
    assert ours.prune(checkpoints.Retention(2)) == []
    monkeypatch.setattr(register_rules, "LEASE_S", 0.0)  # by the store's clock it has said nothing for so long
    assert [p.step for p in ours.prune(checkpoints.Retention(2))] == [10]
    assert keys(memory, "checkpoints/step-00000010") == []


def test_a_reader_says_again_and_again_that_it_reads(memory: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = three(memory, tmp_path)
    monkeypatch.setattr(register_rules, "RENEW_S", 0.001)
    said = threading.Semaphore(0)

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        if "READING-" in key and request == "put":
            said.release()
        return act()

    with watched(memory, hand).reading(ours.list_()[0].place):
        assert all(said.acquire(timeout=60) for _ in range(3))
    assert not [key for key in keys(memory) if "READING" in key]


def test_who_may_not_write_can_still_read(memory: Store, tmp_path: Path):
    three(memory, tmp_path)
    theirs = watched(memory, refusing(Denied("you may only read"), *WRITES))
    restored = theirs.restore(tmp_path / "there", say=lambda _: None)
    assert restored.step == 30


def test_what_dead_generations_left_is_swept_when_two_newer_are_there(place: Store, tmp_path: Path):
    ours = in_store.Checkpoints(place, RUN)
    for key in ("step-00000005/run-1-g1-00000001/a", "step-00000015/run-1-g2-00000002/a", "step-00000025/run-1-g1-00000003/a"):
        place.put(f"checkpoints/{key}", b"left")
    place.put("checkpoints/step-00000005/other-run-g1-00000001/a", b"another run's")
    place.put("checkpoints/step-00000005/notes.txt", b"somebody's")
    ours.acquire(3)
    for step in (10, 20):
        ours.push(written(tmp_path, step, generation=3), journals=tmp_path)
        ours.prune(checkpoints.Retention(2))
    left = [key for key in keys(place, "checkpoints") if key.rpartition("/")[2] not in (*FILES, "COMMIT") and "latest" not in key]
    assert left == [
        "checkpoints/step-00000005/notes.txt",
        "checkpoints/step-00000005/other-run-g1-00000001/a",
        "checkpoints/step-00000015/run-1-g2-00000002/a",  # not yet two newer ones
        "checkpoints/step-00000025/run-1-g1-00000003/a",
    ]


# Who owns the place


def a_run(run: str, **fields: Any) -> runs.Run:
    return runs.Run(run, "job", 1.0, **fields)


def test_a_run_claims_its_place_once(place: Store):
    assert runs.read(place) is None
    assert runs.claim(place, a_run("one")) == a_run("one")
    assert runs.claim(place, a_run("one", reason="again")) == a_run("one")
    runs.check(place, "one")
    with pytest.raises(Superseded, match=r"run two no longer owns .*: run one does"):
        runs.check(place, "two")
    assert runs.update(place, "one", state="Running").state == "Running"
    assert runs.end(place, "one", "Succeeded", "all steps are done", 0) == runs.read(place)
    assert runs.read(place) == a_run("one", state="Succeeded", reason="all steps are done", exit_code=0)


def test_what_another_worker_of_the_run_writes_meanwhile_is_not_foreign(place: Store, monkeypatch: pytest.MonkeyPatch):
    names = place.names

    def begun() -> list[str]:
        monkeypatch.undo()
        runs.claim(place, a_run("one"))
        heartbeat.beat(place, "one", "here")
        return names()

    monkeypatch.setattr(place, "names", begun)
    assert runs.claim(place, a_run("one", reason="a moment later")) == a_run("one")


def test_what_a_run_writes_just_before_another_takes_its_place_is_moved_with_it(place: Store, monkeypatch: pytest.MonkeyPatch):
    names = place.names

    def begun() -> list[str]:
        monkeypatch.undo()
        before = names()
        runs.claim(place, a_run("one"))
        place.put("checkpoints/step-1/COMMIT", b"")
        return before

    monkeypatch.setattr(place, "names", begun)
    assert runs.claim(place, a_run("two"), replace=True).aside == "one"
    assert runs.archive(place, "two") == 1


def test_a_run_that_has_not_ended_keeps_its_place(place: Store):
    runs.claim(place, a_run("one", state="Running"))
    with pytest.raises(AlreadyRunning, match=r"run one of job job in .* has not ended \(it was Running when it last said so\)"):
        runs.claim(place, a_run("two"))
    assert runs.claim(place, a_run("two"), replace=True) == a_run("two")
    with pytest.raises(Superseded, match=r"run one no longer owns .*: run two does"):
        runs.end(place, "one", "Succeeded", "", 0)


def test_what_earlier_runs_left_is_set_aside(place: Store):
    runs.claim(place, a_run("one", state="Failed", reason="it broke"))
    for key in ("metrics.jsonl", "logs/worker-0.log", "checkpoints/latest", "checkpoints/step-1/a b/ü#%.bin"):
        place.put(key, key.encode())
    before = {key: place.get(key) for key in keys(place)}
    claimed = runs.claim(place, a_run("two"))
    assert claimed == a_run("two", aside="one")
    assert runs.archive(place, "two") == 4
    assert runs.archive(place, "two") == 0
    assert runs.read(place) == a_run("two")
    assert {key: place.get(f"previous/one/{key}") for key in before} == before
    assert set(keys(place)) == {"run.json", *(f"previous/one/{key}" for key in before)}


def test_objects_of_nobody_are_set_aside_when_that_is_asked_for(place: Store):
    place.put("notes.txt", b"mine")
    with pytest.raises(OutlastError, match=r"holds other files \(notes.txt\); choose another output, or begin with --fresh"):
        runs.claim(place, a_run("one"))
    assert keys(place) == ["notes.txt"]
    assert runs.claim(place, a_run("one"), replace=True).aside == "before-one"
    runs.archive(place, "one")
    assert keys(place) == ["previous/before-one/notes.txt", "run.json"]


def test_a_damaged_record_is_told_and_replaced(memory: Store):
    memory.put("run.json", b'{"run": "o')
    with pytest.raises(OutlastError, match=r"run.json cannot be read: Unterminated string"):
        runs.read(memory)
    assert runs.claim(memory, a_run("two")) == a_run("two")


@every_moment
@each_register
def test_whoever_is_killed_while_setting_aside_loses_no_object(conditional: bool, lost: bool, carried_out: bool):
    raw = store.open_(f"memory://aside-{conditional}-{carried_out}-{lost}")
    objects = {f"{top}{i}": b"%d" % i for top in ("logs/", "checkpoints/step-1/", "x") for i in range(3)}
    for n in range(1, 1000):
        place = raw.child(str(n))
        calm: Any = Watched(place, hand_over, conditional=conditional)
        runs.claim(calm, a_run("one", state="Succeeded"))
        for key, content in objects.items():
            place.put(key, content)
        last = Last(n, lost=lost, carried_out=carried_out)
        dying: Any = Watched(place, last, conditional=conditional)
        try:
            runs.claim(dying, a_run("two"))
            runs.archive(dying, "two")
        except (Killed, Unreachable):
            here = {key.removeprefix("previous/one/"): place.get(key) for key in keys(place)}
            assert objects.items() <= here.items(), "an object is lost"
        runs.claim(calm, a_run("two"))
        runs.archive(calm, "two")
        assert {key: place.get(key) for key in keys(place) if not key.endswith("run.json")} == {
            f"previous/one/{key}": content for key, content in objects.items()
        }
        assert runs.read(place) == a_run("two")
        assert runs.Run.parse(place.get("previous/one/run.json")) == a_run("one", state="Succeeded")
        if not last.reached:
            break
    assert n > 20


def test_who_sets_aside_much_too_late_touches_nothing_of_the_new_run(memory: Store):
    memory.put("logs/worker-0.log", b"old")
    runs.claim(memory, a_run("one"))
    done = False

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        nonlocal done
        answer = act()
        if request == "copy" and not done:  # meanwhile another process has done it, and the run has begun
            done = True
            runs.archive(memory, "one")
            memory.put("logs/worker-0.log", b"new")
        return answer

    runs.archive(Watched(memory, hand), "one")  # type: ignore[arg-type]
    assert memory.get("logs/worker-0.log") == b"new"
    assert memory.get("previous/before-one/logs/worker-0.log") == b"old"


def test_two_that_claim_at_once_do_not_both_succeed(memory: Store):
    claimed: list[str] = []

    def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
        if request == "create" and not claimed:
            claimed.append(runs.claim(memory, a_run("two", state="Running")).run)
        return act()

    with pytest.raises(AlreadyRunning):
        runs.claim(Watched(memory, hand), a_run("one"))  # type: ignore[arg-type]
    assert runs.read(memory) == a_run("two", state="Running")
