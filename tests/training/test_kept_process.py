"""Which errors end the training function but not its process, and what the process reads about the next world."""

from __future__ import annotations

import json
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast.base.errors import NotRestored
from outlast.job.contract import ERROR, NEXT, Env, Exit
from outlast.job.workerfiles import next_world, progress_file
from outlast.training import kept_process, session
from outlast.worker.hangs import deadlocks
from outlast.worker.launch import script_files, training_process
from outlast.worker.launch.rank_failures import Ended, Start

BROKEN = "Connection closed by peer [127.0.0.1]:5304"
collective: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d"}
exec(f"def breaks(): raise RuntimeError({BROKEN!r})", collective)


def leaves() -> None:
    raise kept_process.Left(Exit.INTERRUPTED)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a worker whose process has an agent."""
    monkeypatch.setattr(training_process, "is_rank", True)
    monkeypatch.setattr(training_process, "kept", False)
    monkeypatch.setattr(kept_process, "_outside", False)
    monkeypatch.setattr(deadlocks.watch(), "code", Exit.MISCONFIGURED)
    monkeypatch.setattr(script_files, "stays", lambda *_: None)
    names = {Env.STATE: tmp_path, Env.NOTICE: tmp_path / "notice", Env.GENERATION: 2, Env.ATTEMPT: 0, "LOCAL_RANK": 0, "RANK": 1}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    progress_file.Writer(tmp_path, 0).write(progress_file.Progress(generation=2, rank=1, phase="train", step=5, snapshot=4))
    next_world.write(tmp_path, 0, {Env.GENERATION: "3", Env.ATTEMPT: "0", "RANK": "0"})
    return tmp_path


@pytest.mark.parametrize("end", [leaves, collective["breaks"]])
def test_a_function_whose_world_has_ended_is_called_again_in_the_next(
    state: Path, end: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = set(), next_world.read
    reported: list[tuple[str, int, bool]] = []

    def place(*args: object) -> dict[str, str]:
        record = progress_file.read(state, 0)
        assert record is not None
        reported.append((record.phase, record.snapshot, (state / ERROR.format(local_rank=0)).exists()))
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(next_world, "read", place)
    starts: list[tuple[int, str]] = []
    draws: list[tuple[float, float, float]] = []

    def train() -> str:
        assert not model or not next(iter(model))(), "what the function has made is released"
        large = type("Large", (), {})()
        model.add(weakref.ref(large))
        starts.append((int(os.environ[Env.GENERATION]), os.environ["RANK"]))
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
        if len(starts) == 1:
            end()
        return "trained"

    assert session.run(train) == "trained"
    assert starts == [(2, "1"), (3, "0")]
    assert draws[0] == draws[1], "it finds the generators as a new process would"
    assert reported == [("waiting", 4, end is not leaves)], "the agent reads why, and which steps are held"
    assert not (state / ERROR.format(local_rank=0)).exists()
    assert (training_process.kept, deadlocks.watch().code) == (True, Exit.FAILED), "a new process tells whether it is a mistake"


@pytest.mark.parametrize(
    "error",
    [ValueError("a bug"), RuntimeError("shapes differ"), SystemExit(Exit.INTERRUPTED), SystemExit(0), KeyboardInterrupt()],
)
def test_another_end_is_that_of_the_process(state: Path, error: BaseException) -> None:
    (state / "notice").write_text(json.dumps({"kind": "leave", "reason": "scaled down", "deadline": 0.0}))
    calls: list[int] = []

    def train() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        session.run(train)
    assert calls == [1]
    assert not kept_process.keeps()


def test_a_process_without_a_state_to_load_is_replaced(state: Path) -> None:
    progress_file.Writer(state, 0).write(progress_file.Progress(generation=2, rank=1, phase="train", step=1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        session.run(collective["breaks"])
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NotRestored, match="no saved state is left"):
        kept_process.check({"net": net}, "")
    kept_process.check({"net": net}, "memory")
    assert net.weight.grad is None


def test_what_a_new_process_would_do_first_keeps_no_process(state: Path) -> None:
    assert session.run(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="Connection closed"):  # a new process begins with the first function
        session.run(collective["breaks"])


def test_a_process_whose_watch_waits_for_a_lost_store_is_replaced(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlocks, "FORGET_S", 0.01)
    with deadlocks.watch()._lock, pytest.raises(SystemExit, match="75"):
        session.run(collective["breaks"])
    record = progress_file.read(state, 0)
    assert record is not None
    assert record.phase == "train", "it does not say that it waits"
    assert (state / ERROR.format(local_rank=0)).exists()


def test_without_an_agent_the_function_is_called_once() -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        session.run(collective["breaks"])
    assert session.run(lambda: session.run(lambda: 3)) == 3


def test_a_place_in_a_world_is_read_by_the_process_that_waits_for_a_later_start(tmp_path: Path) -> None:
    place = {Env.GENERATION: "3", Env.ATTEMPT: "1", "RANK": "4"}
    assert next_world.read(tmp_path, 0, (2, 5)) == {}
    next_world.write(tmp_path, 0, place)
    assert next_world.read(tmp_path, 0, (2, 5)) == next_world.read(tmp_path, 0, (3, 0)) == place
    assert next_world.read(tmp_path, 0, (3, 1)) == next_world.read(tmp_path, 1, (2, 5)) == {}
    (tmp_path / NEXT.format(local_rank=0)).write_text('{"OUTLAST_GENERATION": ')
    assert next_world.read(tmp_path, 0, (2, 5)) == {}


@pytest.mark.parametrize("kept", [False, True])
def test_an_error_of_a_kept_process_is_no_mistake_that_each_start_repeats(tmp_path: Path, kept: bool) -> None:
    progress_file.Writer(tmp_path, 0).write(progress_file.Progress(generation=2, rank=0, phase="first step"))
    record = {"rank": 0, "type": "AttributeError", "message": "raised", "traceback": "x", "time": 1.0, "code": 1, "kept": kept}
    (tmp_path / ERROR.format(local_rank=0)).write_text(json.dumps(record))
    assert Start(0, tmp_path, 1, 2, 0).failure(Ended(0, 0, 1, 1.0))["early"] == ("" if kept else "AttributeError")
