"""What a mistake in a training script leads to: a sentence within seconds. The guide's table holds the same mistakes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import worlds
from outlast import contract
from outlast.errors import OutlastError
from outlast.runtime import stall
from outlast.runtime.stall import Standing
from outlast.training import Stream, calls, session

HERE = r"\(test_script_mistakes.py:\d+\)"
X, Y = torch.randn(64, 4), torch.zeros(64, dtype=torch.int64)


def script(mistake: str) -> None:
    """A training loop with one mistake, on rank 0 only where ranks matter."""
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
    return worlds.ended(worlds.started(functools.partial(script, mistake), output, ranks), output, timeout_s=20)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("mistake", "one", "others"),
    [
        ("save", r"run.save\(2\)", r"run.interrupted\(\)"),
        ("log", r"run.log\(1, reduce=True, loss\)", r"run.interrupted\(\)"),
        ("gather", r"run.gather\(\)", r"run.save\(2\)"),
        ("steps", r"run.save\(1\)", r"run.save\(2\)"),
    ],
)
def test_ranks_in_different_calls_of_the_session_are_named_at_once(
    tmp_path: Path, ranks: int, mistake: str, one: str, others: str
):
    end = done(mistake, tmp_path, ranks)
    assert end.codes == [1] * ranks
    rest = "rank 1 is" if ranks == 2 else "ranks 1 and 2 are"
    said = rf"OutlastError: rank 0 is in {one} {HERE}, {rest} in {others} {HERE}; every rank must make the same calls in the same"
    for error in end.errors:
        assert re.search(said, error), error


def test_a_rank_that_leaves_the_session_early_is_named(tmp_path: Path):
    end = done("leave", tmp_path, 2)
    assert re.search(rf"rank 0 is in run.interrupted\(\) {HERE}, rank 1 has left the session {HERE}; every rank", end.errors[0])


BACKWARD = rf"\(nn.functional.cross_entropy\(net\(x\), y\) \* share\).backward\(\) {HERE}"


@pytest.mark.parametrize(
    ("mistake", "ranks", "one"),
    [
        ("interrupted", 2, r"run.interrupted\(\)"),
        pytest.param("interrupted", 3, r"run.interrupted\(\)", marks=pytest.mark.slow),
        pytest.param("due", 3, r"run.interrupted\(\)", marks=pytest.mark.slow),
        pytest.param("twice", 2, r"run.interrupted\(\)", marks=pytest.mark.slow),
        pytest.param("barrier", 2, r"dist.barrier\(\)", marks=pytest.mark.slow),
        pytest.param("barrier", 3, r"dist.barrier\(\)", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_wait_for_each_other_are_named_in_seconds(tmp_path: Path, mistake: str, ranks: int, one: str):
    end = done(mistake, tmp_path, ranks)
    assert contract.Exit.MISCONFIGURED in end.codes, end.errors
    rest = "rank 1 is" if ranks == 2 else "ranks 1 and 2 are"
    said = rf"rank 0 is in {one} {HERE}, {rest} in {BACKWARD}, and wait for each other; every rank must make the same calls"
    assert re.search(said, end.errors[end.codes.index(contract.Exit.MISCONFIGURED)]), end.errors


# Who waits for whom


def in_call(calls: int, **begun: int) -> Standing:
    return Standing(calls, "run.save(20) (train.py:20)", "all_reduce", "run.save(step) (train.py:20)", begun)


def waiting(calls: int, waits: str = "backward", **begun: int) -> Standing:
    return Standing(calls, "", waits, "loss.backward() (train.py:12)" if waits else "time.sleep(9) (train.py:9)", begun)


def test_a_call_and_a_collective_that_wait_for_each_other_are_a_deadlock():
    assert stall.deadlock([in_call(7, default=5), waiting(6, default=6), waiting(6, default=6)]) == (
        "rank 0 is in run.save(20) (train.py:20), ranks 1 and 2 are in loss.backward() (train.py:12), and wait for each other; "
        "every rank must make the same calls in the same order"
    )


@pytest.mark.parametrize(
    "standings",
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
    ],
)
def test_what_is_only_slow_is_no_deadlock(standings: list[Standing]):
    assert stall.deadlock(standings) == ""


def test_different_collectives_of_one_number_are_a_deadlock():
    assert stall.deadlock([waiting(0, "barrier", default=6), waiting(0, default=6)]).startswith("ranks 0 and 1 are in loss.back")


def test_many_ranks_are_counted():
    assert stall.listed(["a"] * 6 + ["b"], "in") == "6 ranks (0, 1, ...) are in a, rank 6 is in b"


def test_positions_are_said_when_they_differ():
    call = "run.interrupted() (train.py:16)"
    assert calls.differing([(call, 5), (call, 6)]).startswith(
        f"rank 0 is in {call} after batch 5, rank 1 is in {call} after batch 6;"
    )


# In one process


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An open session in a world of one."""
    for name in [name for name in os.environ if contract.RESERVED_ENV.match(name)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    with session.open() as run:
        yield run


NET = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda run: run.resume(model=NET), r"keyword argument 'model' \(.*:\d+\); write run.resume\(\{\"model\": net, "),
        (lambda run: run.resume([NET]), r"resume\(\) got a list of 1 and needs names for what it restores"),
        (lambda run: run.resume(NET), r"resume\(\) got a Linear and needs names"),
        (lambda run: run.resume({"data": DataLoader(TensorDataset(X))}), r"'data' is a DataLoader without .*; read .* a Stream"),
        (lambda run: run.resume({0: NET}), "0 cannot name a thing to save; use a plain word"),
        (lambda run: run.save(1, NET), r"3 were given \(.*\); write run.save\(step\); it saves what resume\(\) was given"),
        (lambda run: run.save(NET), r"step \(a Linear\) must be a whole number, the optimizer steps done \(.*\); count it"),
        (lambda run: run.log(loss=0.5), r"missing 1 required .*: 'step' \(.*\); write run.log\(step, loss=loss\)"),
        (lambda run: run.log(0.5), r"step \(0.5\) must be a whole number"),
        (lambda run: run.log(1, loss=torch.zeros(3)), r"loss \(a Tensor of shape \(3,\)\) must be a single number"),
        (lambda run: run.due(), r"missing 1 required positional argument: 'step' \(.*\); write run.due\(step\)"),
        (lambda run: session.open().__enter__(), r"a process group exists already; .*: remove init_process_group\(\)"),
        (lambda run: session.open().device, r"not open yet; write `with session.open\(...\) as run:`"),
        (lambda run: session.open().resume({"net": NET}), "not open yet"),
        (lambda run: session.open().interrupted(), "not open yet"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit_says_what_to_write(run: Any, call: Callable[[Any], object], sentence: str):
    with pytest.raises(OutlastError, match=sentence):
        call(run)


def test_a_session_that_is_over_says_so(run: Any):
    run.resume({"net": NET})
    run.__exit__(None, None, None)
    with pytest.raises(OutlastError, match=r"run.save\(1\) comes after the end of the session; move it into its `with` block"):
        run.save(1)
    run.__enter__()


def test_a_stream_that_is_not_saved_is_named_at_the_first_save(run: Any):
    stream = Stream((X, Y), 8)
    run.resume({"net": NET})
    batches = iter(stream)
    next(batches)
    next(batches)
    with pytest.raises(OutlastError, match=r"\(batch 2 of 8\) is not among what resume\(\) was given \(net\), so its samples"):
        run.save(2)


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


def test_a_step_that_is_not_counted_is_named_at_the_second_step(run: Any):
    stream = Stream((X, Y), 8)
    step = run.resume({"net": NET, "stream": stream})
    batches = iter(stream)
    next(batches)
    assert not run.due(step)
    next(batches)
    with pytest.raises(OutlastError, match=r"run.due\(0\): step is still 0 although the stream has gone on from batch 1 to 2"):
        run.due(step)


def test_a_step_that_begins_anew_after_a_resume_is_named(run: Any):
    stream = Stream((X, Y), 8)
    run.resume({"net": NET, "stream": stream})
    for step, _ in enumerate(stream, start=1):
        if step == 5:
            run.save(step)
            break
    run._saver.wait()
    assert run.resume({"net": NET, "stream": stream}) == 5
    with pytest.raises(OutlastError, match=r"run.due\(1\): resume\(\) returned step 5, and this is step 1; go on from there"):
        run.due(1)


def test_samples_that_are_no_pairs_are_said_where_they_were_to_be_unpacked(run: Any):
    error: BaseException | None = None
    stream = Stream(X, 8)
    run.resume({"net": NET, "stream": stream})
    try:
        for batch in stream:
            for (_x, _y), _share in batch.split(NET):
                pass
    except ValueError as raised:
        error = raised
    assert error is not None
    run.__exit__(ValueError, error, None)
    assert error.__notes__ == [
        "outlast: batch.split() gives (data, share) pairs, and data here is a Tensor of shape (8, 4): unpack just that, "
        "e.g. `for data, share in batch.split(net):`, or return pairs from the dataset"
    ]
    dist.destroy_process_group()
    run.__enter__()


# Another batch


def schedule(optimizer: torch.optim.Optimizer, stream: Stream, last: int = -1) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=stream.total_steps, last_epoch=last)


def parts(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Stream]:
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1), Stream((X, Y), batch, epochs=4)


def trained(run: Any, state: dict[str, Any], until: int, *more: Any) -> int:
    step = int(run.resume(state))
    for _ in state["stream"]:
        state["optimizer"].step()
        for each in more:
            each.step()
        step += 1
        if step == until:
            run.save(step)
            run._saver.wait()
            break
    return step


def test_a_schedule_for_another_batch_is_refused_and_made_anew_as_the_sentence_says(run: Any, caplog: pytest.LogCaptureFixture):
    net, optimizer, stream = parts(8)
    saved = schedule(optimizer, stream)
    trained(run, {"net": net, "optimizer": optimizer, "stream": stream, "schedule": saved}, 12, saved)

    net, optimizer, stream = parts(16)
    state = {"net": net, "optimizer": optimizer, "stream": stream}
    with pytest.raises(
        OutlastError, match=r"batch is 16 from step 12 on, it was 8; the run has 22 steps instead of 32, and 'schedule' "
    ):
        run.resume({**state, "schedule": schedule(optimizer, stream)})

    net, optimizer, stream = parts(16)
    step = run.resume({"net": net, "optimizer": optimizer, "stream": stream})
    assert (step, stream.total_steps, len(stream)) == (12, 22, 10)
    assert "the run has 22 steps instead of 32" in caplog.text
    made = schedule(optimizer, stream, step - 1)
    for _ in stream:
        optimizer.step()
        made.step()
    assert made.last_epoch == stream.total_steps == 22


# A mesh


def tensor_parallel(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with session.open() as run:
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        if kind == "fsdp":
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        elif kind == "hsdp":
            fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
        else:
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
            parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel()})
            if kind == "both":
                fully_shard(net, mesh=mesh["data"])
        stream = Stream((X, Y), 8)
        run.resume({"net": net, "stream": stream})
        if kind in ("fsdp", "hsdp"):
            assert next(iter(stream)).size == 8
        else:
            assert next(stream.batches(0, 1)).indices.size == 8
            iter(stream)


@pytest.mark.parametrize("kind", ["tensor", "both", "fsdp", "hsdp"])
def test_a_stream_is_not_dealt_over_ranks_that_share_one_copy_of_a_model(tmp_path: Path, kind: str):
    end = worlds.ended(worlds.started(functools.partial(tensor_parallel, kind), tmp_path, 2), tmp_path)
    if kind in ("fsdp", "hsdp"):
        assert end.codes == [0, 0], end.errors
    else:
        assert "OutlastError: module 'net' is data-parallel over 1 of 2 ranks, and a Stream gives each rank" in end.errors[0], end
