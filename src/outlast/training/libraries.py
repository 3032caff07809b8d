"""Shared parts of `outlast.hf`, `outlast.accelerate`, `outlast.lightning` and `outlast.torchtitan`."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.training.session import Session


def missing(owner: Any, hooks: dict[str, tuple[str, ...]]) -> str:
    """Return the first of `hooks` that `owner` lacks or has with other parameters, or an empty string."""
    for name, parameters in hooks.items():
        method = getattr(owner, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            return name
    return ""


SPLIT = "the model is split over ranks (tensor, context or pipeline parallelism), which is not supported"
STATIC_GRAPH = "static_graph lays out gradients after the first step and cannot resume exactly; leave it out"
RESERVED = ("step", "reduce")
"""Names that a logged value cannot have, since they are parameters of `Session.log`."""


def split(accelerator: Any) -> str:
    """Return why a rank of Accelerate's `accelerator` does not have a whole model, or an empty string if it does."""
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is None or mesh.non_data_parallel_size == 1:
        return ""
    return SPLIT


def boundary(run: Session, step: int, *, measured_later: bool) -> bool:
    """End a step, on all ranks. With `measured_later`, return whether the caller must save after the step's evaluation."""
    if not measured_later:
        run.boundary(step)
    elif run.interrupted():
        run.save(step, metric=math.nan)
    else:
        return run.due(step)
    return False
