"""Exact, elastic resume for the Trainer of Lightning.

    import outlast.lightning

    trainer = L.Trainer(max_epochs=3, **outlast.lightning.world())
    outlast.lightning.attach(trainer, batch=64)
    trainer.fit(model, loader)

A run that is killed continues from the newest state, in memory or on a disk: with the same samples, the same global batch and,
with as many ranks, the same bits. Loggers, ModelCheckpoint and EarlyStopping go on as they are. docs/decisions/0060 has the
design.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer

from outlast.base.errors import OutlastError
from outlast.lightning import supported
from outlast.lightning.hooks import HOOKS, Attachment
from outlast.training import libraries


def world(strategy: Any = "ddp") -> dict[str, Any]:
    """Return the arguments of Trainer that describe the processes of this start: devices, num_nodes and strategy.

    They are read from the environment, since each start may have another number of workers. Without workers there are none.
    """
    if "WORLD_SIZE" not in os.environ:
        return {}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"devices": local, "num_nodes": int(os.environ["WORLD_SIZE"]) // local, "strategy": strategy}


def attach(trainer: Trainer, batch: int, *, seed: int | None = None) -> None:
    """Make `trainer.fit()` continue exactly after every failure and in every world that `batch` allows.

    `batch` is the number of samples in one optimizer step over all ranks, whatever their number. Each rank computes its share in
    micro-batches of at most as many samples as the training loader's `batch_size`; `accumulate_grad_batches` follows, and
    `val_check_interval` counts optimizer steps. The order of samples is a function of `seed` (default: the one of
    `L.seed_everything`), and the last batch of an epoch is filled up with the epoch's first samples unless the loader has
    `drop_last`. `fit(ckpt_path=...)` counts at the first start only. Outside of a job, states are kept in `out` below the
    Trainer's `default_root_dir`. Raises OutlastError for what cannot continue exactly, here or in `fit`, with the reason.
    """
    if problem := supported.problem(trainer, HOOKS):
        raise OutlastError(f"outlast.lightning.attach: {problem}")
    libraries.plan(batch, int(os.environ.get("WORLD_SIZE", "1")), None)
    attachment = Attachment(trainer, batch, int(os.environ.get("PL_GLOBAL_SEED") or 0) if seed is None else seed)
    for path, mixin in HOOKS.items():
        owner = supported.at(trainer, path)
        was = type(owner)
        owner.__class__ = type(was.__name__, (mixin, was), {"__module__": was.__module__})
        owner._outlast = attachment
