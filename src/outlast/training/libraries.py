"""Shared parts of `outlast.hf`, `outlast.accelerate`, `outlast.lightning` and `outlast.torchtitan`."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.training.session import Session


def missing(owner: Any, hooks: dict[str, tuple[str, ...]]) -> str:
    """Return the first method that `owner` lacks or that does not take the parameters in `hooks`, or an empty string."""
    for name, parameters in hooks.items():
        method = getattr(owner, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            return name
    return ""


SPLIT = "the model is split over ranks (tensor, context or pipeline parallelism), which is not supported"
STATIC_GRAPH = "static_graph lays out gradients after the first step and cannot resume exactly; leave it out"
RESERVED = ("step", "reduce")
"""Parameters of `Session.log`; a logged value cannot have these names."""


def split(accelerator: Any) -> str:
    """Return why a model is not whole on each rank of Accelerate's `accelerator`, or an empty string if it is."""
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is None or mesh.non_data_parallel_size == 1:
        return ""
    return SPLIT


def boundary(run: Session, step: int, *, measured_later: bool) -> bool:
    """End a step. Returns True if a checkpoint is due that must wait for the step's evaluation, which is `measured_later`. A
    collective."""
    if not measured_later:
        run.boundary(step)
    elif run.interrupted():
        run.save(step, metric=math.nan)
    else:
        return run.due(step)
    return False
