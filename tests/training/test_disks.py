"""Workers that share no disk: every disk has every checkpoint, and whichever of them is left, the run goes on from the newest."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import local_checkpoints
import worlds
from outlast.base.errors import Superseded
from outlast.job import contract
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store
from outlast.storage.sync import growing_files
from outlast.training import metrics, session
from outlast.worker.agent import upload
from ranks import resumed, same
from worlds import LAST, Calm, Training, damage, hashes, world

EVERY = contract.Env.CHECKPOINT_EVERY


def held(output: Path, *names: str) -> dict[str, dict[str, bytes]]:
    """What lies in the checkpoints of each disk, by path."""
    return {
        name: {
            str(path.relative_to(output / name)): path.read_bytes()
            for path in sorted((output / name / contract.CHECKPOINTS).glob("step-*/*"))
        }
        for name in names
    }


def of_step(step: int, files: dict[str, bytes]) -> dict[str, bytes]:
    """Those of `held` that are in the checkpoint of a step."""
    return {path: data for path, data in files.items() if contract.checkpoint_name(step) in path and "replaced" not in path}


def steps(output: Path, name: str) -> list[int]:
    return [c.step for c in checkpoints.list_(output / name / contract.CHECKPOINTS) if checkpoints.verify(c.path) is None]


def logged(output: Path, name: str) -> list[int]:
    """The steps in a disk's metrics."""
    return [json.loads(line)["step"] for line in (output / name / contract.METRICS).read_text().splitlines()]


def same_everywhere(output: Path, *names: str) -> None:
    """Every disk holds the same checkpoints, to the byte, and nothing half written; and the metrics up to the newest."""
    found = held(output, *names)
    assert all(found[name] == found[names[0]] for name in names)
    for name in names:
        directory = output / name / contract.CHECKPOINTS
        assert {path.name for path in directory.iterdir() if not path.name.startswith("step-")} == {".lock", "FENCE"}
        assert all(contract.COMMIT in os.listdir(path) for path in directory.glob("step-*"))
        newest = steps(output, name)[-1]
        assert [step for step in logged(output, name) if step <= newest] == list(range(1, newest + 1))


def firsts(output: Path, *names: str) -> list[bool]:
    return [checkpoints.first(output / name / contract.CHECKPOINTS, "r") for name in names]


# Saving


@pytest.mark.parametrize("names", ["aab", *(pytest.param(names, marks=pytest.mark.slow) for names in ("abc", "ab", "abba"))])
def test_every_disk_has_the_same_checkpoints_and_the_weights_are_those_of_one_disk(tmp_path: Path, calm: Calm, names: str):
    end = world(Training(), tmp_path, len(names), disks=names)
    assert hashes(end) == hashes(calm(Training(), len(names)))
    same_everywhere(tmp_path, *sorted(set(names)))
    assert steps(tmp_path, names[-1]) == [10, 15, 20]
    assert firsts(tmp_path, *sorted(set(names))) == [name == names[0] for name in sorted(set(names))]
    assert end.kinds("save_failed", "not_copied", "damaged") == []
    assert [event["step"] for event in end.kinds("committed")] == [5, 10, 15, 20]
    assert logged(tmp_path, names[0]) == list(range(1, LAST + 1))
    workers = [sorted(set(names)).index(name) for name in names]
    own = {rank: f"worker-{worker}-process-{workers[:rank].count(worker)}" for rank, worker in enumerate(workers)}
    assert {e["rank"]: e["source"] for e in end.events if e["kind"] == "session"} == own, "each process has a ledger of its own"
    assert sorted(path.stem for path in tmp_path.glob("*/ledger/*")) == sorted(own.values())


def test_a_leave_ends_when_every_disk_has_it(tmp_path: Path):
    left = world(Training(leave_at=7), tmp_path, 2, disks="ab")
    assert left.codes == [contract.Exit.INTERRUPTED] * 2
    same_everywhere(tmp_path, "a", "b")
    assert steps(tmp_path, "b") == [5, 7]


# Resuming


Killed = Callable[[Path, str], object]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Writes what workers with these disks have left that were killed after step 13."""

    @functools.cache
    def run(names: str) -> Path:
        end = world(Training(kill_at=13), tmp_path_factory.mktemp(names), len(names), disks=names)
        assert end.codes == [-9] * len(names)
        return end.output

    return lambda output, names: shutil.copytree(run(names), output, dirs_exist_ok=True)


@pytest.mark.slow  # one is lost in the test after the next, too
@pytest.mark.parametrize(("names", "lost"), [("ab", "a"), ("ab", "b"), ("abc", "ab"), ("abb", "a"), ("abb", "b")])
def test_nothing_is_lost_with_the_disks_of_lost_workers(tmp_path: Path, calm: Calm, killed: Killed, names: str, lost: str):
    killed(tmp_path, names)
    for name in lost:
        shutil.rmtree(tmp_path / name)
    again = world(Training(), tmp_path, len(names), generation=2, disks=names)
    assert {result["resumed"] for result in again.results} == {10}
    assert hashes(again) == hashes(calm(Training(), len(names)))
    brought = again.kinds("copied")
    (left,) = set(names) - set(lost)
    assert [(c["step"], c["holder"], c["ranks"]) for c in brought] == [
        (10, names.index(left), [names.index(name) for name in lost])
    ]
    assert again.kinds("damaged") == []
    same = {
        name: {path: data for path, data in files.items() if "10/" not in path} for name, files in held(tmp_path, *names).items()
    }
    assert len({frozenset(files.items()) for files in same.values()}) == 1
    assert logged(tmp_path, names[0]) == list(range(1, LAST + 1))
    assert {c["generation"] for c in map(json.loads, (tmp_path / names[0] / contract.METRICS).read_text().splitlines())} == {1, 2}


def test_rank_0_may_move_to_another_disk_and_goes_on_there(tmp_path: Path, calm: Calm, killed: Killed):
    killed(tmp_path, "ab")
    assert firsts(tmp_path, "a", "b") == [True, False]
    again = world(Training(), tmp_path, 2, generation=2, disks="bc")
    assert hashes(again) == hashes(calm(Training(), 2))
    assert firsts(tmp_path, "b", "c") == [True, False]
    assert logged(tmp_path, "b") == list(range(1, LAST + 1))
    same_everywhere(tmp_path, "b")
    assert steps(tmp_path, "b") == steps(tmp_path, "c") == [10, 15, 20]


def test_the_newest_checkpoint_counts_wherever_it_is(tmp_path: Path, calm: Calm, killed: Killed):
    """One disk is lost, and one has missed the last save: what the third one has is what the run goes on from."""
    killed(tmp_path, "abc")
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000010")
    metrics.truncate_after(tmp_path / "b" / contract.METRICS, 5)
    again = world(Training(), tmp_path, 3, generation=2, disks="abc")
    assert {result["resumed"] for result in again.results} == {10}
    assert [(c["holder"], c["ranks"]) for c in again.kinds("copied")] == [(2, [0, 1])]
    assert hashes(again) == hashes(calm(Training(), 3))
    assert again.kinds("damaged") == []
    same_everywhere(tmp_path, "a", "b", "c")


@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_a_damaged_copy_is_replaced_by_a_whole_one(tmp_path: Path, killed: Killed, name: str):
    killed(tmp_path, "ab")
    good = held(tmp_path, "a", "b")["b" if name == "a" else "a"]
    damage(tmp_path / name / "checkpoints" / "step-00000010")
    again = world(Training(epochs=3), tmp_path, 2, generation=2, disks="ab", **{EVERY: "100 steps"})
    assert {result["resumed"] for result in again.results} == {10}
    assert of_step(10, held(tmp_path, name)[name]) == of_step(10, good)
    assert len(list(tmp_path.glob("*/checkpoints/*.replaced-0"))) == 1
    (event,) = again.kinds("damaged")
    assert Path(event["path"]).name == "step-00000010"
    assert "has crc32" in event["reason"]
    assert event["reason"].endswith(f"(on the disk of rank {'ab'.index(name)}, which gets a whole one)")
    assert again.errors[0].count("is damaged and skipped") == 1


def test_a_checkpoint_damaged_on_all_disks_is_skipped_on_all(tmp_path: Path, calm: Calm, killed: Killed):
    killed(tmp_path, "ab")
    damage(tmp_path / "a" / "checkpoints" / "step-00000010")
    (tmp_path / "b" / "checkpoints" / "step-00000010" / contract.COMMIT).write_text("{")
    again = world(Training(), tmp_path, 2, generation=2, disks="ab")
    assert {result["resumed"] for result in again.results} == {5}
    assert hashes(again) == hashes(calm(Training(), 2))
    one, other = (event["reason"] for event in again.kinds("damaged"))
    assert "has crc32" in one
    assert one.endswith("(on the disk of rank 0)")
    assert other.startswith("COMMIT cannot be read")
    assert other.endswith("(on the disk of rank 1)")


def test_of_two_worlds_that_saved_the_same_step_the_later_ones_counts(tmp_path: Path):
    """Workers that lost each other trained on alone, one after the other, and meet again."""
    world(Training(kill_at=8), tmp_path, 2, disks="ab")
    for generation, name in [(2, "a"), (3, "b")]:
        worlds.again(world(Training(leave_at=10), tmp_path, 1, generation=generation, disks=name, **{EVERY: "100 steps"}))
    theirs = held(tmp_path, "b")["b"]
    again = world(Training(epochs=3), tmp_path, 2, generation=4, disks="ab", **{EVERY: "100 steps"})
    assert {result["resumed"] for result in again.results} == {10}
    assert of_step(10, held(tmp_path, "a")["a"]) == of_step(10, theirs)
    assert len(hashes(again)) == 1
    (event,) = again.kinds("damaged")
    assert event["reason"].startswith("it is not the one that generation 3 saved")


def test_a_worker_of_a_generation_that_was_replaced_on_any_disk_cannot_begin(tmp_path: Path):
    checkpoints.acquire(tmp_path / "b" / "checkpoints", "r", 3)
    written = checkpoints.saving(tmp_path / "b" / "checkpoints", 10, 2)
    written.mkdir()
    processes = worlds.started(functools.partial(worlds.train, Training()), tmp_path, 2, generation=2, disks="ab")
    processes[1].join(60)
    processes[0].kill()  # as its agent does
    end = worlds.ended(processes, tmp_path, disks="ab")
    assert end.codes[1] == 1
    assert "Superseded: generation 2 of this run has been replaced by generation 3" in end.errors[1]
    assert held(tmp_path, "a", "b") == {"a": {}, "b": {}}
    assert written.exists(), "it removes nothing"


def test_without_a_number_from_outside_the_generation_is_above_those_of_all_disks(tmp_path: Path):
    checkpoints.acquire(tmp_path / "b" / "checkpoints", "r", 6)
    end = world(Training(epochs=1), tmp_path, 2, generation=None, disks="ab")
    assert len(hashes(end)) == 1
    assert [checkpoints.generation(tmp_path / name / "checkpoints", "r") for name in "ab"] == [7, 7]


@pytest.mark.slow  # shards from one disk: tests/training/test_session.py
def test_sharded_models_resume_from_the_disk_that_is_left(tmp_path: Path, calm: Calm):
    """FSDP2 in two workers, each of which has had a half."""
    plan = Training(sharded=True, epochs=2)
    left = world(dataclasses.replace(plan, leave_at=3), tmp_path, 2, disks="ab")
    assert left.codes == [75, 75], left.errors
    worlds.again(left)
    shutil.rmtree(tmp_path / "a")
    again = world(plan, tmp_path, 2, generation=2, disks="ab")
    assert (resumed(again), same(again, calm(plan, 2))) == (3, True)


# No room


def test_a_full_disk_of_another_worker_is_reported_and_ends_who_is_to_begin_there(tmp_path: Path):
    """Files of its own fit, the larger one of the other worker does not: the checkpoint counts without it. A worker that has
    no room for the checkpoint it is to begin with ends all ranks with one sentence."""
    end = worlds.ran(crowded, tmp_path, 2, disks="ab")
    assert steps(tmp_path, "a") == [1, 2, 3]
    assert steps(tmp_path, "b") == [1, 3]
    assert end.kinds("not_copied") == [{"kind": "not_copied", "step": 2, "reason": "rank 1: File too large"}]
    assert [event["step"] for event in end.kinds("committed")] == [1, 2, 3]
    assert end.errors == ["outlast: step 2 is saved, but not on every disk: rank 1: File too large\n", ""]
    assert not list(tmp_path.glob("*/checkpoints/*.saving-*"))
    assert logged(tmp_path, "a") == logged(tmp_path, "b") == [1, 2, 3]

    end = worlds.ran(crowded_from_the_start, tmp_path, 3, code=1, generation=2, disks="abc")
    sentence = (
        "NoRoom: step-00000003 cannot be copied to the disk of rank 2: File too large; "
        "make room there or take another worker for it"
    )
    assert all(sentence in error for error in end.errors)
    assert not list(tmp_path.glob("c/checkpoints/step-*"))
    assert steps(tmp_path, "a") == [1, 2, 3]


def crowded() -> None:
    """Three saves; during the second, files of rank 1's disk may not be larger than 100 KB, as if it were full."""
    with session.open(quiet=True) as run:
        model = torch.nn.Linear(500, 500)  # 1 MB of weights, which rank 0 writes, and 2 KB of biases
        run.resume({"model": model})
        for step in (1, 2, 3):
            run.log(step, loss=step)
            if run.rank == 1:
                limit = 100_000 if step == 2 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            run.save(step)
            run._saves.settle(run._saver.wait())


def crowded_from_the_start() -> None:
    if os.environ["RANK"] == "2":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with session.open() as run:
        run.resume({"model": torch.nn.Linear(500, 500)})


# What is pushed


class Worker:
    """A worker's directory and its uploader."""

    def __init__(self, output: Path, place: store.Store, owner: str = "") -> None:
        self.output, self.directory = output, output / contract.CHECKPOINTS
        self.uploader = upload.Uploader(output, place, "r", owner, checkpoints.Retention(3), lambda said: None)

    def trains(self, generation: int, *, first: bool, upto: int) -> None:
        """Every disk has the checkpoints and metrics of all steps, and files of its own."""
        checkpoints.acquire(self.directory, "r", generation, first=first)
        done = max((c.step for c in checkpoints.list_(self.directory)), default=0)
        for step in range(done + 1, upto + 1):
            local_checkpoints.written(self.directory, step, generation=generation, acquire=False)
            metrics.append(self.output / contract.METRICS, {"step": step})
        (self.output / contract.LOGS).mkdir(exist_ok=True)
        (self.output / contract.LOGS / f"{self.output.name}.log").write_text(f"step {upto}")

    def push(self) -> None:
        self.uploader.upload(threading.Event())


def stored(place: store.Store) -> tuple[list[int], list[int], set[str]]:
    """The steps of the checkpoints in a store, those in its metrics, and the logs."""
    with tempfile.TemporaryDirectory() as directory:
        grown = {path: Path(directory, str(n)) for n, path in enumerate(growing_files.files(place))}
        for path, here in grown.items():
            assert growing_files.fetch(place, path, here)
        texts = {path: here.read_text() for path, here in grown.items()}
    return (
        [c.step for c in in_store.Checkpoints(place, "r").list_()],
        [json.loads(line)["step"] for line in texts.get(contract.METRICS, "").splitlines()],
        {text for path, text in texts.items() if path.startswith(contract.LOGS)},
    )


def test_only_the_first_disk_pushes_what_all_have_and_another_one_once_rank_0_moves(tmp_path: Path, memory: store.Store):
    a, b = (Worker(tmp_path / name, memory) for name in "ab")
    a.trains(1, first=True, upto=1)
    a.push()
    a.trains(1, first=True, upto=3)
    b.trains(1, first=False, upto=3)
    b.push()
    assert (b.uploader.waiting(), stored(memory)) == ([], ([1], [1], {"step 1", "step 3"}))
    b.trains(2, first=True, upto=4)  # a is lost for a while
    b.push()
    assert stored(memory) == ([1, 3, 4], [1, 2, 3, 4], {"step 1", "step 4"})
    local_checkpoints.written(a.directory, 9, acquire=False)  # it does not know yet that it is not in the world any more
    metrics.append(a.output / contract.METRICS, {"step": 9})
    a.push()
    assert a.uploader.waiting() == []
    assert stored(memory)[:2] == ([1, 3, 4], [1, 2, 3, 4])
    shutil.rmtree(a.directory / contract.checkpoint_name(9))
    shutil.copy(b.output / contract.METRICS, a.output)
    shutil.copytree(b.directory / contract.checkpoint_name(4), a.directory / contract.checkpoint_name(4))
    b.trains(3, first=False, upto=4)
    a.trains(3, first=True, upto=5)  # and back
    a.push()
    b.push()
    assert stored(memory)[:2] == ([3, 4, 5], [1, 2, 3, 4, 5])


def test_a_machine_whose_run_went_on_elsewhere_is_told_so_also_when_it_was_first(tmp_path: Path, memory: store.Store):
    runs.claim(memory, runs.Run("r", "job", 0.0, owner="old"))
    old = Worker(tmp_path / "a", memory, "old")
    old.trains(1, first=True, upto=1)
    old.push()
    runs.update(memory, "r", owner="new")
    in_store.Checkpoints(memory, "r").acquire(2)
    old.trains(1, first=True, upto=2)
    with pytest.raises(Superseded, match="taken up elsewhere"):
        old.push()


# One disk


def counted() -> None:
    """Count the collectives of resuming and of two saves, where they are called."""
    calls: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*args, **options)

        return counted

    with session.open() as run:
        names = ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "new_group")
        for name in names:
            setattr(dist, name, counting(name, getattr(dist, name)))
        begin = run.resume({"model": torch.nn.Linear(2, 2)})
        told = [dict(calls)]
        for step in (begin + 1, begin + 2):
            calls.clear()
            run.save(step)
            run._saves.settle(run._saver.wait())
            told.append(dict(calls))
        (run.output / f"calls-{run.rank}.json").write_text(json.dumps(told))


@pytest.mark.parametrize("names", ["", pytest.param("aa", marks=pytest.mark.slow)])
def test_one_disk_costs_no_collective(tmp_path: Path, names: str):
    """Each call begins with one all-reduce, by which the ranks agree that they are in it.

    Of the others in a save, one is torch's own; the first makes the group of the thread that saves; in a later one another
    all-reduce agrees how the one before has ended.
    """
    save = {"all_reduce": 1, "all_gather_object": 1, "broadcast_object_list": 2}
    for generation, found in [(1, 1), (2, 2)]:
        resume = {"all_reduce": 1, "all_gather_object": found}
        worlds.ran(counted, tmp_path, 2, generation=generation, disks=names)
        for rank in range(2):
            told = json.loads(next(tmp_path.glob(f"**/calls-{rank}.json")).read_text())
            assert told == [resume, save | {"new_group": 1}, save | {"all_reduce": 2}]
