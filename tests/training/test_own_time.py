"""A rank that is slower than the others is named, although all steps are equally long."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import worlds
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.training import Stream, own_time, session

STEP_S = 0.05


class Slow(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def train(slowed: int, factor: float, steps: int) -> None:
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
    end = worlds.ran(functools.partial(train, 1, 1.25, 150), tmp_path, 3, **{Env.NODE: "n"})
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
