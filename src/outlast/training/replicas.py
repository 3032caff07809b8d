"""DDP that sums gradients in the same order in every generation of a run, for `Session.ddp`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def ddp(model: torch.nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel(model, **options)` whose gradient buckets are arranged already.

    An empty backward pass arranges them and leaves the model unchanged. A collective.
    """
    net = DistributedDataParallel(model, device_ids=None if device.index is None else [device.index], **options)
    if options.get("find_unused_parameters"):
        return net  # DDP does not rebuild its buckets then
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = vars(model).pop("forward", None)
    vars(model)["forward"] = lambda: sum(parameter.sum().abs().float().to(device) * 0 for parameter in parameters)
    try:
        net().backward()
    finally:
        del vars(model)["forward"]
        if hidden is not None:
            vars(model)["forward"] = hidden
    for parameter in parameters:
        parameter.grad = None
    return net
