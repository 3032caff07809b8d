"""Fixtures of tests of training."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from outlast.job.contract import RESERVED_ENV, Env
from ranks import agents, rank  # noqa: F401


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No environment of ours or torchrun's, as in `python train.py`."""
    for name in [name for name in os.environ if RESERVED_ENV.match(name)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
