"""DDP that adds gradients in the same order after every restart."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Modules passed to `settle`, whose waits `own_time` measures."""


def wrap(model: torch.nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Wrap a model in DDP on `device`, with the final gradient buckets from the first step on. All ranks must call this."""
    net = DistributedDataParallel(model.to(device), device_ids=None if device.index is None else [device.index], **options)
    settle(net)
    return net


def settle(net: torch.nn.Module) -> None:
    """Give DDP its final gradient buckets before the first step, by a backward pass in which all gradients are zero. All ranks
    must call this. Afterwards, gradients are None. Does nothing if the module is not wrapped in DDP."""
    if not isinstance(net, DistributedDataParallel):
        return
    wrapped.add(net)
    if net.find_unused_parameters:  # DDP does not rebuild its buckets
        return
    model, device = net.module, next(net.parameters()).device
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = vars(model).pop("forward", None)
    # DDP moves a call's arguments to its device, and fails if there are none
    vars(model)["forward"] = lambda _: sum(parameter.sum().abs().float().to(device) * 0 for parameter in parameters)
    try:
        net(None).backward()
    finally:
        del vars(model)["forward"]
        if hidden is not None:
            vars(model)["forward"] = hidden
    for parameter in parameters:
        parameter.grad = None
