"""Which checkpoints exist, are valid and go; who may commit; and what is put back into models and optimizers."""

from __future__ import annotations

import collections
import datetime
import functools
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import local_checkpoints
from outlast.base import file_locks
from outlast.base.errors import OutlastError, Superseded
from outlast.job import contract
from outlast.storage import checkpoints
from outlast.storage.checkpoints import Checkpoint
from outlast.training.state import background_save, checkpoint, newest_on_disks


def found(step: int, run: str = "r", **fields: Any) -> Checkpoint:
    return Checkpoint(step, Path(contract.checkpoint_name(step)), run, **fields)


def written(directory: Path, step: int, *, content: bytes = b"weights", **of: Any) -> Checkpoint:
    """Commit a checkpoint of one file, by default as the generation that owns the directory from now on."""
    return local_checkpoints.written(directory, step, {"a": content}, **of)


# The directory


def test_what_was_committed_is_listed_and_valid(tmp_path: Path):
    new = [written(tmp_path, step) for step in (200, 100)]
    assert checkpoints.list_(tmp_path) == new[::-1]
    assert [checkpoints.verify(c.path) for c in new] == [None, None]
    assert json.loads((new[0].path / "COMMIT").read_text()) == {
        "run": "r", "step": 200, "generation": 1, "world_size": 2, "time": 5.0, "files": {"a": {"size": 7, "crc32": 449999704}}
    }  # fmt: skip


def test_checkpoints_with_wrong_bits_are_renamed_and_kept_and_their_steps_are_saved_again(tmp_path: Path):
    for step in (10, 20, 30):
        written(tmp_path, step)
    checkpoints.withdraw(tmp_path, "r", [(1, 15)])
    aside = ["step-00000020.withdrawn-0", "step-00000030.withdrawn-0"]
    written(tmp_path, 20, content=b"by the same generation, late")
    checkpoints.acquire(tmp_path, "r", 2)
    assert checkpoints.ways_back(tmp_path, "r") == [(1, 15)], "the fence keeps it"
    assert checkpoints.ways_back(tmp_path, "other") == []
    checkpoints.withdraw(tmp_path, "r", [(1, 15)])
    assert [each.step for each in checkpoints.list_(tmp_path)] == [10]
    for step in (20, 30, 40):
        new = written(tmp_path, step, generation=2)
    checkpoints.withdraw(tmp_path, "r", [(1, 15)])
    assert [each.step for each in checkpoints.sweep(tmp_path, new, checkpoints.Retention(2))] == [10, 20]
    assert [each.step for each in checkpoints.list_(tmp_path)] == [30, 40]
    assert sorted(path.name for path in tmp_path.glob("*.withdrawn-*")) == [aside[0], "step-00000020.withdrawn-1", aside[1]]
    assert all(checkpoints.verify(tmp_path / name) is None for name in aside)
    with pytest.raises(OSError, match="run r owns it"):
        checkpoints.withdraw(tmp_path, "other", [(9, 0)])


def test_nothing_else_in_the_directory_is_a_checkpoint(tmp_path: Path):
    checkpoints.acquire(tmp_path, "r", 1)
    for name in ("best", "step-00000007", "step-00000008.saving-g1", "step-9", "notes-step-00000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008.saving-g1" / "COMMIT").write_text("{}")
    assert checkpoints.list_(tmp_path) == []
    assert checkpoints.list_(tmp_path / "missing") == []


def test_a_commit_that_cannot_be_read_is_listed_as_a_problem_and_never_the_latest(tmp_path: Path):
    good, torn, odd = (written(tmp_path, step) for step in (100, 200, 300))
    (torn.path / "COMMIT").write_text('{"run": "r", "st')
    (odd.path / "COMMIT").write_text("[]")
    problems = {c.step: c.problem for c in checkpoints.list_(tmp_path)}
    assert problems[100] == ""
    assert problems[200].startswith("COMMIT cannot be read: Unterminated string")
    assert problems[300] == "COMMIT cannot be read: not a mapping"
    assert checkpoints.latest(checkpoints.list_(tmp_path), "r") == good
    assert checkpoints.verify(odd.path) == problems[300]


def test_only_a_runs_own_checkpoints_count():
    assert checkpoints.latest([found(3), found(9, run="other"), found(5)], "r") == found(5)
    assert checkpoints.latest([found(9, run="other")], "r") is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, "a has 6 bytes instead of 7"),
        (lambda path: path.write_bytes(b"Weights"), "a has crc32 3580840644 instead of 449999704"),
        (Path.unlink, "a cannot be read: No such file or directory"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], Any], problem: str):
    path = written(tmp_path, 1).path
    damage(path / "a")
    assert checkpoints.verify(path) == problem
    assert checkpoints.verify(path, part=1, parts=2) is None  # another process's part


# Who may commit


def test_a_replaced_generation_commits_nothing(tmp_path: Path):
    checkpoints.acquire(tmp_path, "r", 1)
    checkpoints.acquire(tmp_path, "r", 2)
    with pytest.raises(Superseded, match="generation 1 may not commit step 10: generation 2 of run r owns"):
        written(tmp_path, 10, acquire=False)
    assert checkpoints.list_(tmp_path) == []
    with pytest.raises(Superseded, match="generation 1 of this run has been replaced by generation 2"):
        checkpoints.acquire(tmp_path, "r", 1)


def test_what_dead_attempts_and_generations_were_writing_goes_when_another_begins(tmp_path: Path):
    for generation in (1, 2, 3):
        checkpoints.saving(tmp_path, 10, generation).mkdir()
    checkpoints.abandon(tmp_path, 2)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000010.saving-g3"]


def test_of_what_was_moved_aside_the_newest_valid_one_comes_back(tmp_path: Path):
    for generation in range(1, 13):
        saved = written(tmp_path, 10, generation=generation)
        if generation == 12:
            next(path for path in saved.path.iterdir() if path.name != contract.COMMIT).write_bytes(b"rot")
        saved.path.rename(tmp_path / f"{saved.path.name}.replaced-{generation - 1}")
    checkpoints.abandon(tmp_path, 13)
    [back] = checkpoints.list_(tmp_path)
    assert (back.generation, checkpoints.verify(back.path)) == (11, None)


def test_what_is_being_committed_is_removed_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a machine that was stopped between the look at the fence and the rename, while its successor began."""
    checkpoints.acquire(tmp_path, "r", 3)
    rename, commits, asked, goes_on = Path.rename, threading.Event(), threading.Event(), threading.Event()

    def slow(path: Path, to: Path) -> Path:
        commits.set()
        goes_on.wait()
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", slow)
    zombie = threading.Thread(target=written, args=(tmp_path, 200), kwargs={"generation": 3})
    zombie.start()
    commits.wait()
    acquire = file_locks.acquire
    monkeypatch.setattr(file_locks, "acquire", lambda fd, **how: (asked.set(), acquire(fd, **how))[1])
    successor = threading.Thread(target=checkpoints.abandon, args=(tmp_path, 4))
    successor.start()
    while successor.is_alive() and not asked.wait(0.01):
        pass
    goes_on.set()
    zombie.join()
    successor.join()
    assert [(c.step, c.generation, checkpoints.verify(c.path)) for c in checkpoints.list_(tmp_path)] == [(200, 3, None)]


@pytest.mark.parametrize("rot", [bytes(40), b"\xff", b"{}", b"[]", b'{"run": "r", "generation": "x"}'], ids=repr)
def test_a_damaged_fence_lets_nobody_commit_until_the_next_generation_comes(tmp_path: Path, rot: bytes):
    checkpoints.acquire(tmp_path, "r", 3, first=True)
    (tmp_path / "FENCE").write_bytes(rot)
    assert (checkpoints.owner(tmp_path), checkpoints.first(tmp_path, "r")) == ("", True)
    with pytest.raises(Superseded, match="generation 3 may not commit"):
        written(tmp_path, 10, generation=3, acquire=False)
    assert checkpoints.acquire(tmp_path, "r", 4) == 4
    assert written(tmp_path, 10, generation=4).step == 10


def test_a_new_run_takes_the_directory_over(tmp_path: Path):
    assert checkpoints.generation(tmp_path, "old") == 0
    checkpoints.acquire(tmp_path, "old", 7)
    assert (checkpoints.generation(tmp_path, "old"), checkpoints.generation(tmp_path, "new")) == (7, 0)
    assert checkpoints.acquire(tmp_path, "new", 1) == 1
    with pytest.raises(Superseded, match="generation 7 may not commit"):
        written(tmp_path, 10, run="old", generation=7, acquire=False)


def test_generations_count_by_themselves_when_nobody_numbers_them(tmp_path: Path):
    assert [checkpoints.acquire(tmp_path, "", None) for _ in range(3)] == [1, 2, 3]
    assert checkpoints.acquire(tmp_path, "r", None) == 1


def test_of_two_valid_checkpoints_of_a_step_that_of_the_later_generation_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = written(tmp_path, 10)
    assert written(tmp_path, 10, content=b"again") == first, "another attempt of its generation"
    with monkeypatch.context() as dies:
        rename = Path.rename
        dies.setattr(Path, "rename", lambda path, to: None if "saving" in path.name else rename(path, to))
        written(tmp_path, 10, generation=2)
    assert checkpoints.list_(tmp_path) == []
    checkpoints.abandon(tmp_path, 2)
    assert checkpoints.list_(tmp_path) == [first], "its successor died between two renames"
    later = written(tmp_path, 10, generation=2, content=b"other")
    assert checkpoints.list_(tmp_path) == [later]
    with checkpoints.fetching(tmp_path, 10) as path:
        assert checkpoints.place(path, checkpoints.Commit("r", 10, 1, 1, 5.0, {})) == later, "the store has an earlier one"
    assert {path.name for path in tmp_path.iterdir()} == {"FENCE", ".lock", "step-00000010", "step-00000010.replaced-0"}


def test_metadata_that_an_early_python_3_11_wrote_are_read_and_its_getattr_reaches_nothing_else() -> None:
    class By:
        """Pickled as Python before 3.11.4 pickles a member of an enumeration."""

        def __init__(self, *asked: Any) -> None:
            self.asked = asked

        def __reduce__(self) -> Any:
            return getattr, self.asked

    def read(thing: By) -> Any:
        return checkpoint._Metadata(io.BytesIO(pickle.dumps(thing))).load()

    assert read(By(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")) is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    for asked in ((_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "__init__"), (torch.Size([2]), "numel")):
        with pytest.raises(OutlastError, match=r"holds a builtins\.getattr"):
            read(By(*asked))


def test_saving_a_step_again_moves_a_damaged_one_aside(tmp_path: Path):
    for _ in range(2):
        cut(written(tmp_path, 10).path / "a")
    assert checkpoints.verify(written(tmp_path, 10).path) is None
    names = [f"step-00000010{suffix}" for suffix in ("", ".replaced-0", ".replaced-1")]
    assert sorted(path.name for path in tmp_path.glob("step*")) == names


# What goes


def test_sweeping_leaves_the_newest_and_what_is_not_ours(tmp_path: Path):
    written(tmp_path, 1, run="other", generation=9)
    for step in (10, 20, 30):
        written(tmp_path, step, generation=3)
    for name in ("best", *(f"step-000000{n}" for n in ("15.saving-g2", "05.expired", "40.saving-g3", "09.replaced-0"))):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.replaced-0")
    cut(written(tmp_path, 25, generation=3).path / "a")
    newest = written(tmp_path, 25, generation=3)
    assert (tmp_path / "step-00000025.replaced-0").exists()
    assert [c.step for c in checkpoints.sweep(tmp_path, newest, checkpoints.Retention(2))] == [10]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "FENCE",
        "best",
        "step-00000001.replaced-0",  # another run's
        "step-00000020",
        "step-00000025",
        "step-00000025.replaced-0",  # damaged, and replaced by one that is still kept
        "step-00000030",  # later than what was restored, so skipped as damaged: neither counted nor deleted
        "step-00000040.saving-g3",  # of our own generation
    ]


def test_one_that_is_being_read_is_not_swept_until_its_reader_has_ended(tmp_path: Path):
    old, _, newest = (written(tmp_path, step) for step in (10, 20, 30))
    with checkpoints.reading(old.path), checkpoints.reading(old.path):
        assert checkpoints.sweep(tmp_path, newest, checkpoints.Retention(2)) == []
        assert checkpoints.verify(old.path) is None
    assert checkpoints.sweep(tmp_path, newest, checkpoints.Retention(2)) == [old]
    with pytest.raises(FileNotFoundError), checkpoints.reading(old.path):
        pass
    assert [c.step for c in checkpoints.list_(tmp_path)] == [20, 30]


def test_a_reader_that_dies_holds_nothing(tmp_path: Path):
    old, _, newest = (written(tmp_path, step) for step in (10, 20, 30))
    code = (
        "import sys, pathlib, time; from outlast.storage import checkpoints\n"
        "with checkpoints.reading(pathlib.Path(sys.argv[1])): print('reads', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(old.path)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b"reads\n"
        assert not checkpoints.remove(old)
        reader.kill()
    assert checkpoints.sweep(tmp_path, newest, checkpoints.Retention(2)) == [old]


def test_what_is_being_fetched_is_not_swept_and_what_a_dead_fetcher_left_is(tmp_path: Path):
    newest = written(tmp_path, 10)
    with checkpoints.fetching(tmp_path, 5) as path:
        (path / "a").write_bytes(b"half")
        checkpoints.sweep(tmp_path, newest, checkpoints.Retention(2))
        assert (path / "a").exists()
    with checkpoints.fetching(tmp_path, 5) as again:
        assert (again / "a").read_bytes() == b"half", "the next one goes on"
    checkpoints.sweep(tmp_path, newest, checkpoints.Retention(2))
    assert not path.exists()


def fetched(directory: Path, *, instead: bool = False, **of: Any) -> Checkpoint:
    """Place a fetched checkpoint of step 5 with the file that `written` writes."""
    with checkpoints.fetching(directory, 5) as path:
        (path / "a").write_bytes(b"weights")
        said = checkpoints.Commit("r", 5, **{"generation": 1, "world_size": 2, "time": 5.0, **of}, files=FILES)
        return checkpoints.place(path, said, instead=instead)


FILES = {"a": {"size": 7, "crc32": 449999704}}


def test_two_fetch_one_after_the_other(tmp_path: Path):
    inside, order = threading.Event(), []

    def second() -> None:
        inside.wait()
        with checkpoints.fetching(tmp_path, 5) as path:
            order.append(("second", (path / "a").exists()))

    thread = threading.Thread(target=second)
    thread.start()
    with checkpoints.fetching(tmp_path, 5) as path:
        inside.set()
        (path / "a").write_bytes(b"weights")
        thread.join(0.1)
        order.append(("first", True))
        placed = checkpoints.place(path, checkpoints.Commit("r", 5, 1, 2, 5.0, FILES))
    thread.join()
    assert order == [("first", True), ("second", False)], "the second finds an empty directory: the first has placed its files"
    assert checkpoints.list_(tmp_path) == [placed]
    assert checkpoints.verify(placed.path) is None


def test_a_fetched_checkpoint_replaces_no_valid_one_of_its_generation(tmp_path: Path):
    ours = written(tmp_path, 5, generation=2)
    assert fetched(tmp_path, generation=2, world_size=3) == ours
    assert not list(tmp_path.glob("*.fetching"))
    cut(ours.path / "a")
    assert fetched(tmp_path, generation=2, world_size=3).world_size == 3
    assert checkpoints.verify(ours.path) is None
    assert (tmp_path / "step-00000005.replaced-0").exists()
    assert fetched(tmp_path, generation=3, instead=True).generation == 3, "one that comes instead replaces a valid one"
    assert checkpoints.read(tmp_path / "step-00000005.replaced-1").world_size == 3


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"files": {"a": {"size": 1}}}, "its files have no size and crc32"),
        ({"files": {"a": {"size": -1, "crc32": 1}}}, "its files have no size and crc32"),
        *(
            ({"files": {name: {"size": 1, "crc32": 1}}}, f"{name!r} is no name for a file of a checkpoint")
            for name in ("../a", "/etc/passwd", "a/../../b", "", "COMMIT")
        ),
        ({"files": []}, "its files have no size and crc32"),
        ({"step": "1"}, "run, step, generation, world_size or time is not of its kind"),
        ({"run": 1}, "run, step, generation, world_size or time is not of its kind"),
    ],
)
def test_a_commit_is_taken_at_its_word_only_if_it_makes_sense(said: dict[str, Any], problem: str):
    whole = {"run": "r", "step": 1, "generation": 1, "world_size": 1, "time": 1.0, "files": {"a": {"size": 1, "crc32": 1}}}
    assert checkpoints.Commit.parse(json.dumps(whole).encode()).size == 1
    with pytest.raises(ValueError, match=problem):
        checkpoints.Commit.parse(json.dumps({**whole, **said}).encode())


def test_a_directory_is_rank_0s_until_a_session_says_otherwise(tmp_path: Path):
    assert checkpoints.first(tmp_path, "r")
    (tmp_path / "FENCE").write_text('{"run": "r", "generation": 1}')
    assert checkpoints.first(tmp_path, "r")
    checkpoints.acquire(tmp_path, "r", 2, first=True)
    fence = (tmp_path / "FENCE").stat()
    for first in (True, None):  # another start of the generation writes nothing
        assert checkpoints.acquire(tmp_path, "r", 2, first=first) == 2
    assert (tmp_path / "FENCE").stat() == fence
    checkpoints.acquire(tmp_path, "r", 2, first=False)
    assert not checkpoints.first(tmp_path, "r"), "rank 0 is elsewhere now"
    checkpoints.acquire(tmp_path, "r", 3)  # whoever decides the world takes the fence before there is one
    assert not checkpoints.first(tmp_path, "r")
    assert checkpoints.first(tmp_path, "another run")
    checkpoints.acquire(tmp_path, "another run", 1)
    assert checkpoints.first(tmp_path, "another run")


# What is saved and put back, by a world of one


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def a_saver(directory: Path, generation: int, told: list[str] | None = None, *, fenced: bool = True) -> background_save.Saver:
    def report(kind: str, **fields: Any) -> None:
        if told is not None:
            told.append(kind)

    saver = background_save.Saver(directory, "r", generation, retention=checkpoints.Retention(2), report=report)
    saver.fenced = fenced
    return saver


def saved(directory: Path, state: checkpoint.State, step: int = 1) -> Path:
    """Save a state with a Saver; the checkpoint's path."""
    checkpoints.acquire(directory, "r", 1)
    told: list[str] = []
    writer = a_saver(directory, 1, told)
    writer.begin(step, checkpoint.capture(state, rank=0, ranks=1))
    assert writer.wait() == background_save.Outcome(step, committed=True)
    assert told == ["committed"]
    writer.close()
    return directory / contract.checkpoint_name(step)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (None, ""),
        (("another", 1), "run another has taken over .*; this process must stop"),
        (("r", 3), "generation 2 of this run has been replaced by generation 3; this process must stop"),
    ],
)
def test_a_fence_that_is_made_up_for_takes_the_directory_from_the_run_before_and_from_nobody_who_came_later(
    tmp_path: Path, later: tuple[str, int] | None, reason: str
):
    """The disk could not be written when our generation began. Before it can, somebody else has begun."""
    checkpoints.acquire(tmp_path, "of before", 7)
    writer = a_saver(tmp_path, 2, fenced=False)
    if later:
        checkpoints.acquire(tmp_path, *later)
    writer.begin(1, checkpoint.capture({"model": nn.Linear(2, 2)}, 0, 1))
    outcome = writer.wait()
    assert (outcome.committed, outcome.superseded) == (not later, bool(later))
    assert re.match(reason, outcome.reason), outcome.reason
    run, generation = later or ("r", 2)
    assert (checkpoints.owner(tmp_path), checkpoints.generation(tmp_path, run)) == (run, generation)
    assert len(checkpoints.list_(tmp_path)) == (not later)
    writer.close()


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3) + step).square().sum().backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("kind", "steps"), [("momentum", 0), ("momentum", 1), *((kind, 3) for kind in OPTIMIZERS)])
@pytest.mark.usefixtures("alone")
def test_an_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, kind: str, steps: int):
    model = a_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    stepped(model, optimizer, steps)
    before = optimizer.state_dict()
    path = saved(tmp_path, {"model": model, "optimizer": optimizer})
    assert same(optimizer.state_dict(), before)  # saving has not touched it
    again = a_model()
    fresh = OPTIMIZERS[kind](again.parameters())
    stepped(again, fresh)
    assert checkpoint.restore(path, {"model": again, "optimizer": fresh}, rank=0)
    assert same(again.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), before)
    for net, opt in ((model, optimizer), (again, fresh)):
        stepped(net, opt, 2)
    assert same(again.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.usefixtures("alone")
def test_an_optimizers_state_has_the_memory_format_of_its_parameter_again(tmp_path: Path):
    """Fused kernels walk over both as they lie in memory."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # as torch documents it
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(75.0).reshape(1, 3, 5, 5)).square().mean().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    again, fresh = made()
    checkpoint.restore(saved(tmp_path, {"model": model, "optimizer": optimizer}), {"model": again, "optimizer": fresh})
    assert fresh.state[again.weight]["momentum_buffer"].stride() == again.weight.stride()
    for net, opt in ((model, optimizer), (again, fresh)):
        step(net, opt)
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.usefixtures("alone")
def test_neither_saving_nor_restoring_makes_an_optimizer_step(tmp_path: Path):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("it stepped"))
    state = {"model": model, "optimizer": optimizer}
    checkpoint.restore(saved(tmp_path, state), state)


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_never_had_a_gradient_gets_no_momentum(tmp_path: Path):
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = saved(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.1)
    checkpoint.restore(path, {"model": model, "optimizer": fresh})
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert model["idle"].weight not in fresh.state


@pytest.mark.usefixtures("alone")
def test_groups_frozen_and_tied_parameters_and_several_modules_come_back(tmp_path: Path):
    def built(lr: float) -> dict[str, Any]:
        torch.manual_seed(int(lr * 10))
        encoder, decoder = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        decoder[1].weight = encoder.weight
        decoder[0].weight.requires_grad_(False)
        groups = [{"params": encoder.parameters(), "lr": lr}, {"params": decoder[0].parameters(), "weight_decay": lr}]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.3)
        for _ in range(round(lr * 20)):
            decoder(encoder(torch.ones(1, 3))).sum().backward()
            optimizer.step()
            schedule.step()
        return {"encoder": encoder, "decoder": decoder, "optimizer": optimizer, "schedule": schedule}

    old, new = built(0.1), built(0.2)
    path = saved(tmp_path, old)
    checkpoint.restore(path, new)
    for name in old:
        assert same(new[name].state_dict(), old[name].state_dict()), name
    assert new["decoder"][1].weight is new["encoder"].weight


@pytest.mark.usefixtures("alone")
def test_a_part_of_a_checkpoint_can_be_read_and_nothing_else_is_touched(tmp_path: Path):
    model = a_model()
    path = saved(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    dist.destroy_process_group()
    state = torch.get_rng_state()
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    drawn = torch.get_rng_state()
    checkpoint.restore(path, {"model": other})  # needs no process group
    assert same(other.state_dict(), model.state_dict())
    assert torch.get_rng_state().equal(drawn)
    assert not drawn.equal(state)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the fixture destroys


@pytest.mark.usefixtures("alone")
def test_a_state_that_is_not_what_was_saved_is_refused_by_name(tmp_path: Path):
    model = a_model()
    path = saved(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})

    def problem(**state: Any) -> str:
        with pytest.raises(OutlastError) as caught:
            checkpoint.restore(path, state)
        return str(caught.value)

    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert problem(model=other).startswith("step-00000001 holds model/0.weight of shape (4, 3), the model now has (5, 3)")
    assert problem(model=nn.Sequential(*a_model(), nn.Linear(2, 2))).startswith("step-00000001 lacks model/3.bias (and 1 more)")
    assert problem(model=a_model()[:2]).startswith("step-00000001 holds model/2.bias, which the model no longer has (and 1 more)")
    assert problem(model=a_model(), ema=a_model()).startswith("step-00000001 lacks ema/0.bias (and 8 more)")
    optimizer = torch.optim.AdamW(model.parameters())
    assert "holds the state of an SGD as optimizer, now it is an AdamW" in problem(model=model, optimizer=optimizer)


def test_names_and_things_that_cannot_be_saved_are_refused():
    for name in ("a.b", "a/b", "rng", "train"):
        with pytest.raises(OutlastError, match=f"'{name}' cannot be a name in the state"):
            checkpoint.check({name: nn.Linear(1, 1)})
    with pytest.raises(OutlastError, match="'best' is a float without state_dict"):
        checkpoint.check({"best": 0.5})
    with pytest.raises(OutlastError, match="optimizer 'sgd' holds a parameter of none of the modules"):
        checkpoint.check({"other": nn.Linear(1, 1), "sgd": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)})


def test_ranks_share_the_writing_and_buffers_are_rank_zeros():
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    parts = [checkpoint.capture({"model": model, "optimizer": optimizer}, rank, 3) for rank in range(3)]
    keys = [set(part) for part in parts]
    assert sum(map(len, keys)) == len(set().union(*keys))
    everything = {f"model/{name}" for name in model.state_dict()} | {
        f"optimizer/state/model.{name}/{what}"
        for name, _ in model.named_parameters()
        for what in ("step", "exp_avg", "exp_avg_sq")
    }
    assert set().union(*keys) == everything | {"optimizer/rest", "rng/0", "rng/1", "rng/2"}
    assert {"model/1.running_mean", "model/1.running_var", "model/1.num_batches_tracked", "optimizer/rest"} <= keys[0]
    sizes = [sum(value.nbytes for value in part.values() if isinstance(value, torch.Tensor)) for part in parts]
    assert max(sizes) - min(sizes) <= max(value.nbytes for value in parts[0].values() if isinstance(value, torch.Tensor))


@pytest.mark.usefixtures("alone")
def test_training_on_while_a_save_is_written_does_not_change_it(tmp_path: Path):
    model = nn.Linear(300, 300)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoints.acquire(tmp_path, "r", 1)
    writer = a_saver(tmp_path, 1)
    writer.begin(1, checkpoint.capture({"model": model}, 0, 1))
    with torch.no_grad():
        while writer.busy:
            model.weight += 1
    writer.wait()
    other = nn.Linear(300, 300)
    checkpoint.restore(tmp_path / "step-00000001", {"model": other})
    assert same(other.state_dict(), before)
    writer.close()


# What a checkpoint may hold


class Harm:
    """An object that runs something where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Own:
    """A class of a script."""


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, said: Any) -> None:
        self.held = said


def test_what_scripts_keep_comes_back_and_their_classes_when_they_say_so() -> None:
    kept = {
        "array": np.arange(3), "number": np.float32(1.5), "names": np.array(["a"]), "path": Path("a"),
        "when": datetime.timedelta(1),
        "random": np.random.default_rng(0).bit_generator.state, "span": range(3),
        "generators": checkpoint.generators(),
    }  # fmt: skip
    back = checkpoint.unpickled(checkpoint.pickled(kept, "kept"), "kept")
    assert str(back) == str(kept)
    for held, allowed, problem in (
        (Own(), [], r"'ema' holds a .*\.Own, which is not restored .*add_safe_globals"),
        (collections.deque([1]), [], r"'ema' holds a collections.deque"),
        (collections.deque([1]), [collections.deque], "cannot be read: Can only append to lists"),
    ):
        with torch.serialization.safe_globals(allowed), pytest.raises(OutlastError, match=problem):
            checkpoint.capture({"ema": Holder(held)}, 0, 1)
    with torch.serialization.safe_globals([Own]):
        assert isinstance(checkpoint.unpickled(checkpoint.pickled(Own(), "ema"), "ema"), Own)


def test_generators_go_on_from_what_is_saved_now_and_from_what_was_saved_at_first() -> None:
    at_first = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}

    def drawn(kept: dict[str, Any]) -> list[float]:
        checkpoint.set_generators(checkpoint.unpickled(checkpoint.pickled(kept, "rng"), "rng"))
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(()).item()]

    now = checkpoint.generators()
    first = drawn(at_first)
    assert drawn(now) == first
    later = checkpoint.generators()  # in the middle of a pair of normal numbers
    more = [random.gauss(0, 1), float(np.random.normal())]
    drawn(at_first)
    checkpoint.set_generators(later)
    assert [random.gauss(0, 1), float(np.random.normal())] == more


@pytest.mark.parametrize("place", ["object", "bytes", "metadata"])
def test_a_forged_checkpoint_runs_nothing(tmp_path: Path, place: str) -> None:
    harm, holder = Harm(tmp_path / "harm"), Holder({"a": 1})
    forged = io.BytesIO()
    torch.save(harm, forged)
    held: Any = {"object": forged.getvalue(), "bytes": harm, "metadata": checkpoint.pickled({"a": 1}, "h")}[place]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save({"h": held}, checkpoint_id=tmp_path / "c", no_dist=True)
    if place == "metadata":
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(harm))
    with pytest.raises(OutlastError, match=r"holds a posix.mkdir|h of the checkpoint is not bytes"):
        checkpoint.restore(tmp_path / "c", {"h": holder})
    assert not (tmp_path / "harm").exists()
    assert holder.held == {"a": 1}


def test_the_newest_is_the_last_of_the_newest_world_and_one_that_cannot_be_read_has_a_place_by_its_step():
    offer = newest_on_disks._Offer
    whole = [offer(12, 2, "a"), offer(9, 3, "b"), offer(10, 3, "c")]
    rotten, other, old = (offer(step, 0, "", "it cannot be read") for step in (20, 12, 3))
    disks = [{each.step: each for each in (*whole, rotten, old)}, {12: other, 9: offer(9, 1, "d")}]
    readable = [offer(10, 3, "c"), offer(9, 3, "b"), offer(12, 2, "a"), offer(9, 1, "d")]
    assert newest_on_disks._candidates(disks) == [rotten, *readable, old]
