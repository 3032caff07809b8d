"""What a mistake in a training script leads to: a sentence within seconds. The guide's table holds the same mistakes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import worlds
from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.training import Stream, session
from outlast.training import collective_calls as calls
from outlast.training.samples import stream as streams
from outlast.worker.hangs import deadlocks
from outlast.worker.hangs.deadlocks import RankState

HERE = r"\(test_script_mistakes.py:\d+\)"


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


X, Y = torch.randn(64, 4), torch.zeros(64, dtype=torch.int64)


def looks_often() -> None:
    """What waits for good is found in a second, in a process of its own."""
    deadlocks.LOOK_S, deadlocks.STILL_S = 0.25, 0.75


def script(mistake: str) -> None:
    """A training loop with one mistake, on rank 0 only where ranks matter."""
    looks_often()
    with session.open() as run:
        first = run.rank == 0
        net = run.ddp(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        stream = Stream((X, Y), 8, epochs=3)
        step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        if mistake == "barrier" and first:
            dist.barrier()
        for batch in stream:
            optimizer.zero_grad()
            for (x, y), share in batch.split(net):
                (nn.functional.cross_entropy(net(x), y) * share).backward()
            optimizer.step()
            step += 1
            if mistake == "log" and first:
                run.log(step, reduce=True, loss=0.5)
            if mistake == "due" and first and run.due(step):
                run.save(step)
            if mistake == "save" and first and step == 2:
                run.save(step)
            if mistake == "gather" and step == 2:
                run.gather(step) if first else run.save(step)
            if mistake == "steps":
                run.save(step if first else step + 1)
            if mistake == "leave" and not first and step == 2:
                return
            if mistake == "due":
                continue
            if mistake != "interrupted" or first:
                run.interrupted()
            if mistake == "twice" and first and step == 2:
                run.interrupted()


def done(mistake: str, output: Path, ranks: int) -> worlds.Ended:
    return worlds.ended(worlds.started(functools.partial(script, mistake), output, ranks), output)


@pytest.mark.parametrize(
    ("mistake", "ranks", "one", "others"),
    [
        ("gather", 3, r"run.gather\(\)", r"ranks 1 and 2 are in run.save\(2\)"),
        ("steps", 2, r"run.save\(1\)", r"rank 1 is in run.save\(2\)"),
    ],
)
def test_ranks_in_different_calls_of_the_session_are_named_at_once(
    tmp_path: Path, ranks: int, mistake: str, one: str, others: str
):
    end = done(mistake, tmp_path, ranks)
    assert end.codes == [1] * ranks
    said = rf"OutlastError: rank 0 is in {one} {HERE}, {others} {HERE}; every rank must make the same calls in the same"
    for error in end.errors:
        assert re.search(said, error), error


def test_a_call_in_the_line_of_an_if_is_named_without_it(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("if rank == 0: found = barrier()\nfound = found, barrier()\n")
    names = {"rank": 0, "barrier": lambda: deadlocks.where(sys._getframe(1))}
    exec(compile(script.read_text(), str(script), "exec"), names)
    assert names["found"] == (("", "barrier() (one.py:1)"), ("", "found = found, barrier() (one.py:2)"))


def test_a_frame_between_two_lines_is_at_its_function() -> None:
    code = test_a_frame_between_two_lines_is_at_its_function.__code__
    frame = SimpleNamespace(f_lineno=None, f_code=code, f_lasti=0, f_globals={"__name__": "script"}, f_back=None)
    assert deadlocks.where(cast(FrameType, frame))[1].endswith(f"(test_script_mistakes.py:{code.co_firstlineno})")


def plain() -> None:
    """A training loop without a session, which rank 1 leaves."""
    looks_often()
    deadlocks.watch().start()  # as `launch.training_process` does
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    for step in range(1, 4):
        net(X).sum().backward()
        if dist.get_rank() == 1 and step == 2:
            return
    dist.destroy_process_group()


def test_rank_0_of_a_plain_script_whose_others_have_left_fails(tmp_path: Path):
    end = worlds.ended(worlds.started(plain, tmp_path, 2), tmp_path)
    assert end.codes == [1, 0]
    assert "backward()" in end.errors[0]


# Who waits for whom


def in_call(calls: int, **begun: int) -> RankState:
    return RankState(calls, "run.save(20) (train.py:20)", "all_reduce", "run.save(step) (train.py:20)", begun)


def waiting(calls: int, waits: str = "backward", **begun: int) -> RankState:
    return RankState(calls, "", waits, "loss.backward() (train.py:12)" if waits else "time.sleep(9) (train.py:9)", begun)


@pytest.mark.parametrize(
    ("states", "who"),
    [
        (
            [in_call(7, default=5), waiting(6, default=6), waiting(6, default=6)],
            "rank 0 is in run.save(20) (train.py:20), ranks 1 and 2 are in loss.backward() (train.py:12)",
        ),
        (
            [waiting(0, "barrier", default=6), waiting(0, default=6)],  # different collectives of one number
            "rank 0 is in barrier() of loss.backward() (train.py:12), rank 1 is in backward() of loss.backward() (train.py:12)",
        ),
    ],
)
def test_ranks_that_wait_for_each_other_are_a_deadlock(states: list[RankState], who: str):
    sentence = f"{who}, and wait for each other; every rank must make the same calls in the same order"
    assert deadlocks.deadlock(states) == sentence


@pytest.mark.parametrize(
    "states",
    [
        [in_call(7, default=5), in_call(7, default=5)],  # a slow disk
        [in_call(7, default=5), waiting(6, default=5)],  # a slow network: the collective has been begun by both
        [in_call(7, default=5), waiting(7, default=6)],  # the answer to the call is on its way
        [in_call(7, default=5), waiting(6, "", default=6)],  # busy with something of its own
        [in_call(7, default=5), waiting(6, other=6)],  # a group that one of them is not in
        [in_call(7, default=5), waiting(6, default=6), waiting(7, default=5)],  # the third is only late
        [waiting(0, default=5), waiting(0, default=5)],  # a slow network
        [waiting(0, "barrier", default=6), waiting(0, default=5)],  # the second is only late
        [waiting(0, "barrier", default=6), waiting(0, "", default=6)],  # evaluates for long
        [waiting(0, "barrier"), waiting(0)],  # nobody counts
        [waiting(0, "barrier", default=6), dataclasses.replace(waiting(0, default=6), blocks=False)],  # a GPU computes
    ],
)
def test_what_is_only_slow_is_no_deadlock(states: list[RankState]):
    assert deadlocks.deadlock(states) == ""


class Words:
    """A store in which ranks say where they are."""

    def __init__(self, *others: RankState) -> None:
        self.said: dict[str, bytes] = {}
        for rank, state in enumerate(others, 1):
            self.say(rank, state)

    def say(self, rank: int, state: RankState) -> None:
        self.set(f"outlast/still/{rank}", json.dumps(dataclasses.asdict(state)))

    def set(self, key: str, text: str) -> None:
        self.said[key] = text.encode()

    def add(self, key: str, count: int) -> int:
        assert key == "outlast/still"
        return self.said.keys() >= {"outlast/still/0", "outlast/still/1"} and 2

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.said[key] for key in keys]


def test_what_a_rank_said_before_it_moved_on_is_no_part_of_a_deadlock():
    """Rank 1 has waited for rank 0 in the forward pass, and goes on; rank 0 is stopped in its backward pass."""
    watch, own = deadlocks.Watch(), waiting(0, default=6)
    watch._ranks, watch._store = 2, (words := Words(waiting(0, "forward", default=6)))

    assert deadlocks.Watch()._compare(own) == [], "there is nobody to ask"
    alone = deadlocks.Watch()
    alone._ranks, alone._store = 2, Words()
    assert alone._compare(own) is None, "the other moves"

    def compared(looks: int) -> str:
        return watch._deadlock(watch._compare(dataclasses.replace(own, looks=looks)) or ())

    assert [compared(look) for look in range(1, 9)] == [""] * 8
    words.say(1, waiting(0, default=7))
    assert compared(9) == ""
    words.say(1, dataclasses.replace(waiting(0, "barrier", default=6), looks=1))
    assert compared(10) == ""
    words.say(1, dataclasses.replace(waiting(0, "barrier", default=6), looks=2))
    assert compared(11).startswith("rank 0 is in backward() of loss.backward() (train.py:12), rank 1 is in barrier() of")


def test_many_ranks_are_counted():
    assert deadlocks.listed(["a"] * 6 + ["b"], "in") == "6 ranks (0, 1, ...) are in a, rank 6 is in b"


def test_positions_are_said_when_they_differ():
    call = "run.interrupted() (train.py:16)"
    assert calls.differing([(call, 5), (call, 6)]).startswith(
        f"rank 0 is in {call} after batch 5, rank 1 is in {call} after batch 6;"
    )


# In one process


@pytest.fixture
def run(plain: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An open session in a world of one."""
    monkeypatch.setattr(streams, "_read_now", weakref.WeakSet())  # a test that fails keeps its loop
    with session.open() as run:
        yield run


def test_a_rank_says_that_it_is_alive(run: Any):
    watch = deadlocks.watch()
    before = watch._counts()
    run.alive()
    assert (watch._counts() != before, watch.held) == (True, 0)
    with run.alive():
        assert watch.held == 1
    assert watch.held == 0


NET = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda run: run.resume(NET), r"resume\(\) got a Linear and needs names"),
        (lambda run: run.resume({0: NET}), "0 cannot be a name in the state; use a plain word"),
        (lambda run: run.save(NET), r"step \(a Linear\) must be a whole number, the optimizer steps done \(.*\); count it"),
        (lambda run: run.due(), r"missing 1 required positional argument: 'step' \(.*\); write run.due\(step\)"),
        (lambda run: session.open().interrupted(), "not open yet"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit_says_what_to_write(run: Any, call: Callable[[Any], object], sentence: str):
    with pytest.raises(OutlastError, match=sentence):
        call(run)


def test_a_stream_that_is_read_for_evaluation_or_saved_by_another_need_not_be_named(run: Any):
    class Data:
        def __init__(self) -> None:
            self.stream = Stream((X, Y), 8)

        def state_dict(self) -> dict[str, Any]:
            return {"mine": self.stream.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.stream.load_state_dict(state["mine"])

    data = Data()
    run.resume({"net": NET, "data": data})
    for step, _ in enumerate(data.stream, start=1):
        for _ in Stream((X, Y), 32):
            break
        for _ in Stream((X, Y), 64):
            pass
        run.save(step)


# A mesh


def tensor_parallel(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with session.open() as run:
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        if kind == "hsdp":
            fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
        else:
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
            parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel()})
            fully_shard(net, mesh=mesh["data"])
        stream = Stream((X, Y), 8)
        run.resume({"net": net, "stream": stream})
        if kind == "hsdp":
            assert next(iter(stream)).size == 8
        else:
            assert next(stream.batches(0, 1)).indices.size == 8
            iter(stream)


@pytest.mark.parametrize("kind", ["both", "hsdp"])
def test_a_stream_is_not_dealt_over_ranks_that_share_one_copy_of_a_model(tmp_path: Path, kind: str):
    end = worlds.ended(worlds.started(functools.partial(tensor_parallel, kind), tmp_path, 2), tmp_path)
    if kind == "hsdp":
        assert end.codes == [0, 0], end.errors
    else:
        assert shown(MESH, end.errors[0].partition("OutlastError: ")[2])


# The table of the guide

ROWS = dict(
    re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (Path(__file__).parents[2] / "docs/guide/mistakes.md").read_text(), re.MULTILINE)
)


def normal(sentence: str) -> str:
    """A sentence as the guide shows it: of a script `train.py`."""
    return re.sub(r"\((<string>|test_script_mistakes.py):\d+\)", "(train.py:20)", sentence.strip())


def shown(row: str, sentence: str) -> bool:
    """Whether the guide says the same. With WRITE_GUIDE it is made to."""
    if "WRITE_GUIDE" in os.environ:
        guide = Path(__file__).parents[2] / "docs/guide/mistakes.md"
        guide.write_text(guide.read_text().replace(f"| {row} | {ROWS[row]} |", f"| {row} | {normal(sentence)} |"))
        return True
    return ROWS[row] == normal(sentence)


RANKS = {
    "`run.save(step)` on rank 0 only": "save",
    "`run.log(step, reduce=True, loss=loss)` on rank 0 only": "log",
    "`run.interrupted()` on rank 0 only": "interrupted",
    "`run.due(step)` on rank 0 only, without `run.interrupted()`": "due",
    "`run.interrupted()` twice on rank 0": "twice",
    "`dist.barrier()` on rank 0 only": "barrier",
    "`return` or `break` on rank 1 only": "leave",
}
AT_ONCE = ("save", "log", "leave")


def begun(run: Any, stream: Stream, state: dict[str, Any] | None = None) -> Iterator[Any]:
    """A loop after its first step."""
    run.resume({"model": NET, **({"stream": stream} if state is None else state)})
    batches = iter(stream)
    next(batches)
    return batches


def not_given(run: Any) -> None:
    batches = begun(run, Stream((X, Y), 8), {})
    run.save(1)
    next(batches)
    run.save(2)


def not_counted(run: Any) -> None:
    batches = begun(run, Stream((X, Y), 8))
    run.due(0)
    next(batches)
    run.due(0)


def resumed(run: Any, other: Stream, **more: Any) -> int:
    batches = begun(run, stream := Stream((X, Y), 8), {"stream": stream, **{name: make(stream) for name, make in more.items()}})
    assert batches
    run.save(1)
    run._saver.wait()
    return int(run.resume({"model": NET, "stream": other, **{name: make(other) for name, make in more.items()}}))


def one_cycle(stream: Stream) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(NET.parameters(), lr=0.1), 0.1, total_steps=stream.total_steps)


def unpacked(run: Any) -> None:
    _inputs, _targets = next(begun(run, Stream((X, Y), 8)))


def no_pairs(run: Any) -> None:
    try:
        for (_a, _b), _share in next(begun(run, Stream(X, 8))).split(NET):
            pass
    except ValueError as error:
        run.__exit__(ValueError, error, None)
        dist.destroy_process_group()
        run.__enter__()
        raise OutlastError(*error.__notes__) from error


def over(run: Any) -> None:
    run.resume({"model": NET})
    run.__exit__(None, None, None)
    try:
        run.save(20)
    finally:
        run.__enter__()


def evaluated(run: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(Env.EVALUATION, "1")
        session.open().__enter__()


SCENES: dict[str, Callable[[Any], object]] = {
    "`session.open().device` without `with`": lambda run: session.open().device,
    '`dist.init_process_group("gloo")` before `session.open()`': lambda run: session.open().__enter__(),
    "`session.open()` in a script that ignores `--evaluate`": evaluated,
    "`run.save(20)` before `run.resume`": lambda run: run.save(20),
    "`run.save(20)` after the `with` block": over,
    "`Stream(endless, 8)`, an iterable dataset": lambda run: Stream(Endless(), 8),
    "`Stream((x, y), 1)` with two ranks": lambda run: next(Stream((X, Y), 1).batches(0, 2)),
    "`inputs, targets = batch`": unpacked,
    "`for (a, b), share in batch.split(net):` over samples that are no pairs": no_pairs,
    "a `Stream` that `run.resume` was not given": not_given,
    "`step` is never increased": not_counted,
    "`step` begins at 0 after a resume": lambda run: run.due(resumed(run, Stream((X, Y), 8)) - 1),
    "`Stream(..., seed=1)` after a resume, it was `seed=0`": lambda run: resumed(run, Stream((X, Y), 8, seed=1)),
    "`Stream` over other data after a resume": lambda run: resumed(run, Stream((X[:60], Y[:60]), 8)),
    "another `batch` after a resume, with a `OneCycleLR` in the state": lambda run: resumed(
        run, Stream((X, Y), 16), schedule=one_cycle
    ),
}
CALLS = [row for row in ROWS if re.fullmatch(r"`(run|Stream)[.(][^`]*`", row)]
MESH = "a model that is tensor-parallel over 2 ranks, and a `Stream`"


def test_every_row_of_the_guide_is_a_test():
    told = {row for row in ROWS if row.strip("- ") and row not in ("in the script", "what happens")}
    elsewhere = ("SyntaxError", "one step", "a plain script", "anything")  # test_restarts, test_work, test_run_mistakes
    elsewhere += (
        "it exits with 2",
        "a rank exits with 0",
        "processes train without",
    )  # test_script, test_coordinator, test_ranks
    jobs = {row for row in told if row.startswith(elsewhere)}
    assert told == {*RANKS, *SCENES, *CALLS, MESH, *jobs}
    assert len(jobs) == 9


@pytest.mark.parametrize("row", [*CALLS, *SCENES])
def test_a_mistake_gives_the_sentence_of_the_guide(run: Any, row: str):
    names = {"run": run, "Stream": Stream, "x": X, "y": Y, "net": NET, "loss": torch.tensor(0.5)}
    names |= {"optimizer": torch.optim.SGD(NET.parameters()), "loader": DataLoader(TensorDataset(X))}
    scene = SCENES.get(row) or (lambda run: eval(row.strip("`"), names))
    with pytest.raises(OutlastError) as raised:
        scene(run)
    assert shown(row, str(raised.value))


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        pytest.param(row, 3 if mistake == "leave" else 2, marks=() if mistake in ("interrupted", "leave") else pytest.mark.slow)
        for row, mistake in RANKS.items()
    ],
)
def test_ranks_that_disagree_give_the_sentence_of_the_guide(tmp_path: Path, row: str, ranks: int):
    end = done(RANKS[row], tmp_path, ranks)
    [*said] = {line for error in end.errors for line in error.splitlines() if re.search(r"(^|OutlastError: )rank 0 is in ", line)}
    assert len(said) == 1, end.errors
    assert (contract.Exit.MISCONFIGURED in end.codes) is (RANKS[row] not in AT_ONCE)
    sentence = said[0].removeprefix("outlast.base.errors.OutlastError: ")
    assert shown(row, re.sub(r"ranks 1 and 2 are", "rank 1 is", sentence))
