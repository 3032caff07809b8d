"""The devices that training computes on. Only this module knows the differences between torch's modules for them.

    accelerator = device.find()                # the machine's device: a GPU, a Trainium, ..., or the CPU
    accelerator.bind(local_rank)               # -> torch.device, as Session.device
    with device.of(x.device).autocast(torch.bfloat16):
        ...

An accelerator of `outlast.job.accelerators` whose torch module is like `torch.cuda` needs nothing here; any other accelerator
gets a subclass of `Device`, named in `_SPECIAL`. The CPU is a device as well, so callers need no case for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from outlast.job import accelerators


class Device:
    """Devices of one type, used through torch's module for them."""

    pins = True
    """Whether copies from pinned memory run in the background."""

    def __init__(self, type: str, backend: str = "", package: str = "") -> None:
        self.type = type
        self.backend = f"cpu:gloo,{type}:{backend}"
        """Argument of `init_process_group`: gloo for tensors on the CPU, the accelerator's own backend for its tensors."""
        self._package = package

    @property
    def _module(self) -> Any:
        _imported(self._package)
        return getattr(torch, self.type, None)

    def available(self) -> bool:
        """Whether this machine has a device of this type that torch can use."""
        return self._module is not None and bool(self._module.is_available())

    def bind(self, index: int) -> torch.device:
        """Make device `index` the current device of this process."""
        self._module.set_device(index)
        return torch.device(self.type, index)

    def name(self) -> str:
        """The name of the current device's model."""
        return str(self._module.get_device_name())

    def peak_flops(self) -> float | None:
        """Peak FLOP/s of dense matrix products in bfloat16; None if unknown."""
        return accelerators.peak_flops(self.name())

    def bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 are faster than in float32."""
        return True

    def autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        """A context in which matrix products are computed in `dtype`; with None or float32, in the type of the tensors."""
        lower = dtype not in (None, torch.float32)
        return torch.autocast(self.type, dtype if lower else None, enabled=lower)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor in pinned memory, if that makes copies to the device faster; otherwise the tensor itself."""
        return tensor.pin_memory() if self.pins and tensor.device.type == "cpu" else tensor

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """CPU memory for a copy of a tensor on the device, pinned if that makes the copy faster.

        Memory for a device other than the current one is not pinned, so that copies end before the call returns: `synchronize`
        would not wait for them.
        """
        pins = self.pins and tensor.device.index == self._module.current_device()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)

    def place(self, tensor: torch.Tensor) -> int:
        """A number that is equal for tensors on this device if they share memory."""
        return tensor.data_ptr()

    def seed(self, seed: int) -> None:
        """Seed torch's random number generators: the CPU's and the current device's."""
        torch.manual_seed(seed)
        self._module.manual_seed(seed)

    def random_state(self) -> Any:
        return self._module.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        self._module.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for queued work on the current device, such as copies to the CPU."""
        self._module.synchronize()

    def beside(self) -> Beside | None:
        """A stream for copies to the CPU in parallel with the computation; None if the device has none."""
        module = self._module
        return Beside(module) if all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")) else None

    def register(self, memory: torch.Tensor) -> bool:
        """Pin CPU memory that was allocated elsewhere, for faster copies. Returns whether it is pinned."""
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`, before the memory is unmapped: later copies to the same address would go astray."""

    def mark_step(self) -> None:
        """End the step for devices that record operations and run them as one program (XLA). Other devices compute at once."""


class Beside:
    """A stream on which one batch of copies at a time runs in parallel with the current device's computation."""

    def __init__(self, module: Any) -> None:
        self._module, self._stream, self._index = module, module.Stream(), module.current_device()
        self._copied: Any = None
        """The event at the end of the copies, until it has been waited for."""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this stream's device. Copies of tensors on other devices run on other streams, so `wait` would
        not wait for them."""
        return tensor.device.type != "cpu" and tensor.device.index == self._index

    def queue(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies of the second tensor of each pair into the first on the current stream."""
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs], non_blocking=True)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Queue copies, which begin once the computation queued so far has ended."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield
        self._copied = self._module.Event()
        self._copied.record(self._stream)

    def before_changes(self) -> None:
        """Make later computation wait for the copies, since it may change their sources."""
        if (copied := self._copied) is not None:
            self._module.current_stream().wait_event(copied)

    def wait(self) -> None:
        """Wait for the copies; may be called in any thread."""
        if (copied := self._copied) is not None:
            self._module.set_device(self._index)  # a new thread has device 0, on which CUDA would take memory
            copied.synchronize()
            self._copied = None  # a graph captured from now on must not wait for an event from outside


class _Cpu(Device):
    pins = False

    def __init__(self) -> None:
        super().__init__("cpu")
        self.backend = "gloo"

    def available(self) -> bool:
        return True

    def bind(self, index: int) -> torch.device:
        return torch.device("cpu")

    def name(self) -> str:
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def peak_flops(self) -> None:
        return None

    def bfloat16(self) -> bool:
        module: Any = torch.cpu  # its functions for this are private; they return None on other processors than x86
        return bool(module._is_amx_tile_supported() or module._is_avx512_bf16_supported())

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random_state(self) -> Any:
        return torch.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Nothing to wait for: the CPU's calls return when they are done."""

    def beside(self) -> None:
        return None


class _Cuda(Device):
    def register(self, memory: torch.Tensor) -> bool:
        if memory.is_pinned():  # registering it again is an error, which the next kernel would raise
            return True
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # CUDA reports the error at the next kernel: let that be this one
            torch.ones(1, device="cuda")
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(runtime.cudaHostUnregister(memory.data_ptr())):
            raise RuntimeError(f"cudaHostUnregister ended with {code} for {memory.nbytes} bytes at {memory.data_ptr():#x}")

    def bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


class _Neuron(Device):
    pins = False  # TorchNeuron's documentation does not mention pinned memory


class _Xla(Device):
    """torch_xla: TPUs, and Trainium with an SDK before TorchNeuron. A process has one device, and need not choose.

    The process group of XLA takes only tensors on XLA devices; the session's group for the CPU is separate.
    """

    pins = False

    def __init__(self, type: str, backend: str = "", package: str = "") -> None:
        super().__init__(type, backend, package)
        self.backend = backend

    def available(self) -> bool:
        return _has_xla()

    def bind(self, index: int) -> torch.device:
        importlib.import_module("torch_xla.distributed.xla_backend")  # registers the backend
        return torch.device(self.type)

    def name(self) -> str:
        return str(importlib.import_module("torch_xla.runtime").device_type())

    def peak_flops(self) -> None:
        return None

    def place(self, tensor: torch.Tensor) -> int:  # XLA tensors have no addresses
        return int(importlib.import_module("torch_xla")._XLAC._xla_get_tensor_id(tensor))

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.set_random_state(seed)

    def random_state(self) -> Any:
        return self._model.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        self._model.set_rng_state(state)

    def beside(self) -> None:
        return None

    def synchronize(self) -> None:
        self.mark_step()
        self._model.wait_device_ops()

    def mark_step(self) -> None:
        state = self.random_state()
        importlib.import_module("torch_xla").sync()
        self.set_random_state(state)  # `sync` changes it, and a run that saves more often would draw other numbers

    @property
    def _model(self) -> Any:
        return importlib.import_module("torch_xla.core.xla_model")


_SPECIAL: dict[str, type[Device]] = {"cuda": _Cuda, "neuron": _Neuron, "xla": _Xla}
"""The classes for torch modules that differ from `torch.cuda`, by torch's device type."""
CPU = _Cpu()


@functools.cache
def _imported(package: str) -> bool:
    """Import the package that adds a device to torch; returns whether it is installed."""
    try:
        return bool(package and importlib.import_module(package))
    except ModuleNotFoundError as error:
        if error.name and (package == error.name or package.startswith(f"{error.name}.")):
            return False
        raise


@functools.cache
def _has_xla() -> bool:
    """Whether torch_xla has an accelerator, or $PJRT_DEVICE requests its CPU. Cached: torch_xla sets the variable itself."""
    forced = "PJRT_DEVICE" in os.environ
    return _imported("torch_xla") and (forced or importlib.import_module("torch_xla.runtime").device_type() not in (None, "CPU"))


def _made(row: accelerators.Accelerator) -> Device:
    return _SPECIAL.get(row.device, Device)(row.device, row.backend, row.package)


def find() -> Device:
    """This machine's accelerator, or the CPU if it has none."""
    return next((each for each in map(_made, accelerators.DEVICES.values()) if each.available()), CPU)


def of(where: torch.device) -> Device:
    """The device for tensors on `where`."""
    row = accelerators.DEVICES.get(where.type)
    return CPU if where.type == "cpu" else _made(row) if row else Device(where.type)


def dtype(requested: str, where: torch.device, gather: Callable[[bool], list[bool]] | None = None) -> torch.dtype:
    """The type of matrix products: `float32` or `bfloat16` as requested; `auto` is bfloat16 where that is faster.

    Ranks on different hardware must use the same type: pass `run.gather`, and `auto` is bfloat16 only if that is faster on all of
    them. A collective with `gather`.
    """
    fast = requested == "auto" and all((gather or (lambda fast: [fast]))(of(where).bfloat16()))
    return torch.bfloat16 if fast or requested == "bfloat16" else torch.float32


def computing() -> torch.device:
    """The device of a process that is not a rank, such as an evaluation."""
    return torch.device(find().type)
