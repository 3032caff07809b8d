"""A flipped bit in one rank's weights is named, and a restart takes the bits of most ranks; or, by choice,
the run goes back. A rank that is slower than the others is named, although all steps are equally long."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import local_checkpoints
import worlds
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.storage import checkpoints
from outlast.training import Stream, own_time, session
from outlast.training.state import snapshot_taking
from ranks import SELDOM, Agents

FLIP_AT, KILL_AT = 12, 24


def train(flipped: int) -> None:
    """Train with a snapshot at each step. Rank `flipped` flips a bit, and all ranks are killed later, in the first generation."""
    snapshot_taking.SHARE = float("inf")
    with session.open(seed=1, quiet=True) as run:
        net = run.ddp(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        stream = Stream((torch.randn(300, 16), torch.randint(0, 4, (300,))), 12, steps=30)
        step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        for batch in stream:
            optimizer.zero_grad()
            for (x, y), share in batch.split(net):
                (nn.functional.cross_entropy(net(x), y) * share).backward()
            optimizer.step()
            step += 1
            if (step, run.rank, run.generation) == (FLIP_AT, flipped, 1):
                net.module[0].weight.data.view(torch.int32)[1, 5] ^= 1 << 12
            while run._snapshots._working and not run._snapshots._replicated():
                time.sleep(0.001)
            run.boundary(step)
            while run._saver.busy:
                time.sleep(0.001)
            if step == KILL_AT and run.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        (run.output / f"hash-{run.rank}.json").write_text(json.dumps(worlds.hashed(net.module, optimizer)))


def world(flipped: int, output: Path, ranks: int, **how: Any) -> worlds.Ended:
    return worlds.ran(functools.partial(train, flipped), output, ranks, **how)


@pytest.mark.slow
@pytest.mark.parametrize("local", [1, 2], ids=["one rank a worker", "two ranks a worker"])
def test_a_flipped_bit_is_named_with_tensor_step_and_rank_and_is_gone_after_a_restart(agents: Agents, local: int) -> None:
    ranks, flipped = 3 * local, 2 * local - 1
    for worker in range(3):
        agents.start(worker)
    end = world(flipped, agents.output, ranks, code=-signal.SIGKILL, local=local, **SELDOM, **{Env.NODE: "n"})
    [first] = end.kinds("differs")
    assert (first["rank"], first["worker"], first["node"], first["copies"]) == (flipped, 1, "n", 3)
    assert first["tensors"] == ["model/0.weight"]
    assert FLIP_AT <= first["step"] <= FLIP_AT + local, "as many snapshots as a worker has ranks compare all"
    assert FLIP_AT - 2 * local <= first["agreed"] < FLIP_AT
    assert first["reason"] in end.errors[0]
    told = [progress_file.read(agents.output / "workers" / str(rank // local), rank % local) for rank in range(ranks)]
    assert [rank for rank, each in enumerate(told) if each and each.differs] == [flipped]

    agents.settle()
    again = world(flipped, agents.output, ranks, generation=2, local=local, **SELDOM)
    assert [event["step"] for event in again.kinds("restored")][-1] >= FLIP_AT, "from memory, with the flipped bit in it"
    assert len({(agents.output / f"hash-{rank}.json").read_text() for rank in range(ranks)}) == 1
    assert not [event for event in again.kinds("differs") if event["generation"] == 2]


@pytest.mark.slow
@pytest.mark.parametrize("local", [1, 2], ids=["one rank a worker", "two ranks a worker"])
def test_by_choice_a_run_goes_back_without_the_worker_and_ends_as_the_undisturbed_one(agents: Agents, local: int) -> None:
    """With one rank a worker from memory, with two from a checkpoint. Later checkpoints are kept and do not count."""
    ranks, flipped, calm = 3 * local, 2 * local - 1, agents.output / "calm"
    how = {Env.CHECKPOINT_EVERY: "4 steps", Env.NODE: "n", Env.GO_BACK: "1"}
    world(-1, calm, ranks, generation=2, local=local, **how)
    for worker in range(3):
        agents.start(worker)
    end = world(flipped, agents.output, ranks, code=1, local=local, **how)
    [differs] = end.kinds("differs")
    step = differs["agreed"]
    assert FLIP_AT - 2 * local <= step < FLIP_AT
    told = f"WrongBits: {differs['reason']}; the run goes back to step {step}, and another worker takes the place of this one"
    assert [told in error for error in end.errors] == [rank == flipped for rank in range(ranks)]
    directory = agents.output / contract.CHECKPOINTS
    # what the first generation commits as a zombie, after it has ended
    late = local_checkpoints.written(directory, 16, acquire=False).path

    agents.settle()
    agents.lose(1)
    agents.start(1)
    again = world(flipped, agents.output, ranks, generation=2, local=local, **how, **{Env.HELD: "14"})
    restored = again.kinds("restored")[-1]
    assert (restored["step"], bool(restored["path"])) == ((step, False) if local == 1 else (8, True))
    assert ("warning" in restored) == (local == 2), "all that counted is there, with one rank a worker"
    for rank in range(ranks):
        assert (agents.output / f"hash-{rank}.json").read_text() == (calm / f"hash-{rank}.json").read_text()
    withdrawn = {path.name: checkpoints.read(path).generation for path in directory.glob("*.withdrawn-*")}
    assert withdrawn == {"step-00000012.withdrawn-0": 1, f"{late.name}.withdrawn-0": 1}
    assert {each.generation for each in checkpoints.list_(directory) if each.step > step} == {2}


@pytest.mark.slow
def test_a_third_way_back_that_leads_no_further_ends_the_run(agents: Agents) -> None:
    checkpoints.acquire(agents.output / contract.CHECKPOINTS, "r", 1)
    checkpoints.withdraw(agents.output / contract.CHECKPOINTS, "r", [(0, FLIP_AT), (0, FLIP_AT + 1)])
    for worker in range(3):
        agents.start(worker)
    end = world(1, agents.output, 3, code=1, **SELDOM, **{Env.GO_BACK: "1"})
    assert all(f"going back to step {FLIP_AT - 1} has not helped 2 times, so the run ends" in error for error in end.errors)


# Slower than the others


STEP_S = 0.05


class Slow(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def train_slowed(slowed: int, factor: float, steps: int) -> None:
    own_time.WINDOW_S, own_time._EVERY_S = 1.5, 0.05
    with session.open(seed=1, quiet=True) as run:
        slow = Slow(STEP_S * (factor if run.rank == slowed else 1))
        net = run.ddp(nn.Sequential(nn.Linear(64, 512), slow, nn.ReLU(), nn.Linear(512, 4)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        stream = Stream((torch.randn(300, 64), torch.randint(0, 4, (300,))), 12, steps=steps)
        step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        times = []
        for batch in stream:
            begun = time.monotonic()
            optimizer.zero_grad()
            for (x, y), share in batch.split(net):
                (nn.functional.cross_entropy(net(x), y) * share).backward()
            optimizer.step()
            step += 1
            run.boundary(step)
            times.append(time.monotonic() - begun)
        (run.output / f"steps-{run.rank}.json").write_text(json.dumps(sorted(times)[len(times) // 2]))


@pytest.mark.slow
def test_a_rank_slowed_by_a_quarter_is_named_with_its_place(tmp_path: Path) -> None:
    end = worlds.ran(functools.partial(train_slowed, 1, 1.25, 150), tmp_path, 3, **{Env.NODE: "n"})
    first, *_ = end.kinds("slow")
    assert (first["rank"], first["worker"], first["node"]) == (1, 1, "n")
    assert "rank 1 (worker 1, node n) is slow" in first["reason"]
    assert {event["rank"] for event in end.kinds("slow")} == {1}
    steps = [json.loads((tmp_path / f"steps-{rank}.json").read_text()) for rank in range(3)]
    assert max(steps) < 1.1 * min(steps), "all steps are equally long"
    told = [progress_file.read(tmp_path / "workers" / str(rank), 0) for rank in range(3)]
    assert [bool(each and each.slow) for each in told] == [False, True, False]
    own = [each.own_s for each in told if each]
    assert own[1] > 1.12 * max(own[0], own[2])
    assert first["reason"] in end.errors[0]
