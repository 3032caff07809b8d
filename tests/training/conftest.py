"""Fixtures of tests of training."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from outlast.job.contract import Env
from ranks import agents, rank  # noqa: F401


@pytest.fixture
def a_checkpoint_of_each_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions save each step. Random numbers are as before afterwards, and a start that was killed leaves no process group."""
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, "1 step")
    before = torch.get_rng_state(), random.getstate()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_rng_state(before[0])
    random.setstate(before[1])
