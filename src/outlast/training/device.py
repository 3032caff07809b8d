"""The devices that training computes on: what `training` asks of torch about them.

An accelerator of `outlast.accelerators` whose torch module is like `torch.cuda` needs nothing here; another one gets a subclass
of `Device`, named in `_SPECIAL`.
"""

from __future__ import annotations

from typing import Any

import torch

from outlast import accelerators


class Device:
    """Accelerators of one type, by the module that torch has for them."""

    def __init__(self, type: str, backend: str) -> None:
        self.type = type
        self.backend = f"cpu:gloo,{type}:{backend}"
        """What `init_process_group` needs: gloo for tensors on the CPU, the accelerator's own backend for its tensors."""

    @property
    def _module(self) -> Any:
        return getattr(torch, self.type, None)

    def available(self) -> bool:
        """Whether this machine has one that torch can use."""
        return self._module is not None and bool(self._module.is_available())

    def bind(self, index: int) -> torch.device:
        """Make device `index` this process's own."""
        device = torch.device(self.type, index)
        self._module.set_device(device)
        return device

    def random_state(self) -> Any:
        """State of the current device's random number generator."""
        return self._module.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        """Restore what `random_state` returned."""
        self._module.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for the work that was queued on the current device, such as copies to the CPU."""
        self._module.synchronize()


_SPECIAL: dict[str, type[Device]] = {}
"""Classes of accelerators whose module is not like `torch.cuda`, by torch's device type."""


def find() -> Device | None:
    """The accelerator of this machine; None: training computes on the CPU."""
    rows = (_SPECIAL.get(type, Device)(type, backend) for type, backend in accelerators.BACKENDS.items())
    return next((each for each in rows if each.available()), None)
