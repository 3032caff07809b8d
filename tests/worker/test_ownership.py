"""Which run a worker in a pod is of: every case of what may lie in its place."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outlast.base import probes
from outlast.base.errors import Superseded
from outlast.storage import checkpoints, runs, store
from outlast.storage.sync import growing_files
from outlast.worker.agent import join_run, upload
from outlast.worker.agent.join_run import Ended


@pytest.fixture
def place(memory: store.Store) -> store.Store:
    return memory


def taken(place: store.Store, word: str, *, fresh: bool = False) -> str | Ended:
    return join_run.take(place, join_run.record("job", word), fresh=fresh)


def test_a_worker_without_a_record_is_told_of_the_end_by_those_who_stay_up() -> None:
    health = probes.Health(end=Ended("a", "it is over", 0).dumps())
    done, training = probes.serve(lambda: health), probes.serve(probes.Health)
    assert join_run.query_end(["127.0.0.1:1", training, done], "a") == Ended("a", "it is over", 0)
    assert join_run.query_end([training, done], "b") is None


def test_the_others_are_called_as_pod_0_is() -> None:
    endpoint = "c10d://train-0.train.team.svc.cluster.local:29400"
    assert join_run.others(endpoint, "", 1, 3) == [f"train-{n}.train.team.svc.cluster.local:8080" for n in (0, 2)]
    assert join_run.others("c10d://localhost:29400", "", 0, 1) == []


def test_the_others_are_called_as_this_one_is_where_none_is_special() -> None:
    me = "train-1.train.team.svc.cluster.local"
    assert join_run.others("etcd://etcd:2379", me, 1, 3) == [f"train-{n}.train.team.svc.cluster.local:8080" for n in (0, 2)]
    assert join_run.others("etcd://etcd:2379", me, 2, 3) == []  # the name is of something else
    assert join_run.others("etcd://etcd:2379", "localhost", 0, 3) == []


def test_the_first_pod_begins_a_run_and_the_others_find_it(place: store.Store) -> None:
    assert [taken(place, "a"), taken(place, "a")] == ["a", "a"]
    assert (there := runs.read(place)) is not None
    assert (there.run, there.owner, there.state) == ("a", "a", "Running")


def test_a_changed_file_goes_on_with_the_run_and_keeps_it(place: store.Store) -> None:
    assert [taken(place, "a"), taken(place, "b"), taken(place, "b")] == ["a", "a", "a"]
    with pytest.raises(Superseded, match="belongs to a later version of this job"):
        taken(place, "a")


@pytest.mark.parametrize(("state", "code"), [("Succeeded", 0), ("Failed", 79), ("Cancelled", 79)])
def test_a_run_that_has_ended_is_not_trained_again(place: store.Store, state: str, code: int) -> None:
    taken(place, "a")
    runs.end(place, "a", state, "it was so", code, by="a")
    ended = taken(place, "a")
    assert ended == Ended("a", f"run a has ended before ({state}: it was so); nothing is left to do", code)


def test_after_the_end_another_file_begins_a_run_of_its_own(place: store.Store) -> None:
    taken(place, "a")
    place.put("metrics.jsonl", b"old")
    runs.end(place, "a", "Succeeded", "", 0, by="a")
    assert taken(place, "b") == "b"
    assert place.get("previous/a/metrics.jsonl") == b"old"
    assert "metrics.jsonl" not in list(place.names())


@pytest.mark.parametrize("state", ["Failed", "Cancelled"])
def test_a_run_that_has_not_succeeded_goes_on_with_another_submission(place: store.Store, state: str) -> None:
    taken(place, "a")
    place.put("metrics.jsonl", b"old")
    runs.end(place, "a", state, "a bug", 1, by="a")
    assert [taken(place, "b"), taken(place, "b")] == ["a", "a"]
    assert (there := runs.read(place)) is not None
    assert (there.run, there.owner, there.state, there.before) == ("a", "b", "Running", ("a",))
    assert place.get("metrics.jsonl") == b"old"
    runs.end(place, "a", state, "a bug", 1, by="b")
    assert isinstance(taken(place, "b"), Ended)
    assert taken(place, "c", fresh=True) == "c"
    assert place.get("previous/a/metrics.jsonl") == b"old"


def test_who_begins_anew_sets_an_unfinished_run_aside_once(place: store.Store) -> None:
    taken(place, "a")
    place.put("metrics.jsonl", b"old")
    assert taken(place, "b", fresh=True) == "b"
    place.put("metrics.jsonl", b"new")
    assert taken(place, "b", fresh=True) == "b"
    assert (place.get("previous/a/metrics.jsonl"), place.get("metrics.jsonl")) == (b"old", b"new")


def test_a_generation_is_above_all_that_were_committed(place: store.Store, tmp_path) -> None:
    first = join_run.generation(place, tmp_path, "a", stored=True)
    assert join_run.generation(place, tmp_path / "elsewhere", "a", stored=True) == first + 1


def test_who_only_looks_sees_the_newest_generation_of_disk_and_store_and_takes_neither(place: store.Store, tmp_path) -> None:
    assert join_run.newest_generation(place, tmp_path, "a", stored=True) == 0
    taken_here = join_run.generation(place, tmp_path, "a", stored=True)
    for _ in range(2):
        assert join_run.newest_generation(place, tmp_path, "a", stored=False) == taken_here
        assert join_run.newest_generation(place, tmp_path / "elsewhere", "a", stored=True) == taken_here
    assert join_run.newest_generation(place, tmp_path / "elsewhere", "a", stored=False) == 0
    assert join_run.newest_generation(place, tmp_path, "b", stored=True) == 0


def test_what_another_run_has_left_on_a_volume_is_not_pushed_as_this_ones(place: store.Store, tmp_path: Path) -> None:
    def trained(word: str) -> str:
        run = taken(place, word)
        assert isinstance(run, str)
        for _ in range(2):  # its worker was started again
            join_run.set_aside(tmp_path, run)
            join_run.fetch_own(place, tmp_path, 0)
            checkpoints.acquire(tmp_path / "checkpoints", run, None)
            (tmp_path / "logs").mkdir(exist_ok=True)
            (tmp_path / f"{word}.json").write_text("{}")
            with (tmp_path / "logs/worker-0.log").open("a") as log:
                log.write(f"{word}\n")
            upload.Uploader(tmp_path, place, run, word, checkpoints.Retention(2), lambda _: None).upload(threading.Event())
        return run

    runs.end(place, trained("a"), "Succeeded", "", 0)
    trained("b")
    with ThreadPoolExecutor(1) as pool:
        assert b"".join(growing_files.pieces(place, "logs/worker-0.log", pool)) == b"b\nb\n"
    assert [name for name in place.names() if name.endswith(".json")] == ["b.json", "run.json"]
    assert (tmp_path / "previous/a/logs/worker-0.log").read_text() == "a\na\n"
    assert checkpoints.owner(tmp_path / "previous/a/checkpoints") == "a"


def test_of_two_that_take_a_run_at_once_the_second_knows_of_the_first(
    place: store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(place, "a")
    write, meanwhile = runs.owner._write, iter(["c"])

    def slowly(*asked: Any) -> bool:
        for owner in meanwhile:
            runs.acquire(place, "a", owner)
        return write(*asked)

    monkeypatch.setattr(runs.owner, "_write", slowly)
    now = runs.acquire(place, "a", "b")
    assert (now.owner, now.before) == ("b", ("a", "c"))
