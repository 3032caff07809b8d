"""The devices that training computes on. Only this module handles the differences between torch's device modules.

    accelerator = device.find()                # the machine's device: a GPU, a Trainium, ..., or the CPU
    accelerator.bind(local_rank)               # -> torch.device, as Session.device
    with device.of(x.device).autocast(torch.bfloat16):
        ...

Accelerators whose torch module differs from `torch.cuda` have a subclass of `Device` in `_SPECIAL`.
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
import torch.distributed as dist

from outlast import __version__
from outlast.job import accelerators


def versions() -> dict[str, str]:
    found = {"outlast": __version__, "Python": platform.python_version(), "torch": str(torch.__version__)}
    return found | ({"CUDA": torch.version.cuda} if torch.version.cuda else {})


class Device:
    """Devices of one type, accessed through torch's module for that type."""

    pins = True
    """True if copies from pinned memory run in the background."""

    def __init__(self, type: str, backend: str = "", package: str = "") -> None:
        self.type = type
        self.backend = f"cpu:gloo,{type}:{backend}"
        """Argument for `init_process_group`: gloo for tensors on the CPU, the accelerator's own backend for its tensors."""
        self._package = package

    @property
    def _module(self) -> Any:
        _imported(self._package)
        return getattr(torch, self.type, None)

    def available(self) -> bool:
        """Return whether this machine has a device of this type that torch can use."""
        return self._module is not None and bool(self._module.is_available())

    def bind(self, index: int) -> torch.device:
        """Make device `index` this process's current device."""
        self._module.set_device(index)
        return torch.device(self.type, index)

    def name(self) -> str:
        return str(self._module.get_device_name())

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of dense matrix products in bfloat16, or None if unknown."""
        return accelerators.peak_flops(self.name())

    def bfloat16(self) -> bool:
        """Return whether matrix products in bfloat16 are faster than in float32."""
        return True

    def autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        """Return a context that computes matrix products in `dtype`, or in the tensors' own type for None and float32."""
        lower = dtype not in (None, torch.float32)
        return torch.autocast(self.type, dtype if lower else None, enabled=lower)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor in pinned memory if that speeds up copies to the device, otherwise the tensor itself."""
        return tensor.pin_memory() if self.pins and tensor.device.type == "cpu" else tensor

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate CPU memory for a copy of a device's tensor, pinned if that makes the copy faster. Memory for a device other
        than the current one is not pinned, since `synchronize` would not wait for copies from that device, which would run in the
        background."""
        pins = self.pins and tensor.device.index == self._module.current_device()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)

    def place(self, tensor: torch.Tensor) -> int:
        """Return a number that is equal for tensors on this device that share memory."""
        return tensor.data_ptr()

    def seed(self, seed: int) -> None:
        """Seed torch's generators for the CPU and the current device."""
        torch.manual_seed(seed)
        self._module.manual_seed(seed)

    def random_state(self) -> Any:
        return self._module.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        self._module.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for queued work on the current device, such as copies to the CPU."""
        self._module.synchronize()

    def copy_stream(self) -> CopyStream | None:
        """Return a stream for copies in parallel with the computation, or None if the device has no streams."""
        module = self._module
        names = ("Stream", "Event", "stream", "current_stream")
        return CopyStream(module) if all(hasattr(module, name) for name in names) else None

    def register(self, memory: torch.Tensor) -> bool:
        """Pin CPU memory that was allocated elsewhere, for faster copies. Returns whether it is pinned."""
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`. Call this before the memory is unmapped, since CUDA would still treat its address as pinned."""

    def mark_step(self) -> None:
        """End the step on devices that record operations and run them as one program (XLA)."""


class CopyStream:
    """Runs one batch of copies at a time in parallel with the current device's computation."""

    def __init__(self, module: Any) -> None:
        self._module, self._stream, self._index = module, module.Stream(), module.current_device()
        self._copied: Any = None
        """The event at the end of the copies; None after `wait`."""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this stream's device, so that `wait` waits for its copies."""
        return tensor.device.type != "cpu" and tensor.device.index == self._index

    def queue(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """On the current stream, queue the copies of each pair's second tensor into its first."""
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs], non_blocking=True)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies queued inside the block wait for the computation that was queued before the block."""
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
        """Wait for the copies. Any thread may call this."""
        if (copied := self._copied) is not None:
            self._module.set_device(self._index)  # a new thread starts on device 0, where CUDA would allocate memory
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
        module: Any = torch.cpu  # these functions are private, and return None on processors other than x86
        return bool(module._is_amx_tile_supported() or module._is_avx512_bf16_supported())

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random_state(self) -> Any:
        return torch.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """No-op: operations on the CPU are synchronous."""

    def copy_stream(self) -> None:  # torch.cpu's streams run nothing in parallel
        return None


class _Cuda(Device):
    def register(self, memory: torch.Tensor) -> bool:
        if memory.is_pinned():  # registering it again is an error, which the next kernel would raise
            return True
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # CUDA reports the error at the next kernel, so run one here
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
    """Devices of torch_xla: TPUs, and Trainium with an SDK before TorchNeuron. A process has exactly one of them. XLA's process
    group accepts only tensors on XLA devices, so the session has a separate group for the CPU."""

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

    def synchronize(self) -> None:
        self.mark_step()
        self._model.wait_device_ops()

    def mark_step(self) -> None:
        state = self.random_state()
        importlib.import_module("torch_xla").sync()
        self.set_random_state(state)  # `sync` changes it, so the random numbers would depend on how often the run saves

    @property
    def _model(self) -> Any:
        return importlib.import_module("torch_xla.core.xla_model")


_SPECIAL: dict[str, type[Device]] = {"cuda": _Cuda, "neuron": _Neuron, "xla": _Xla}
CPU = _Cpu()


@functools.cache
def _imported(package: str) -> bool:
    """Import the package that adds a device to torch. Returns False if it is not installed."""
    try:
        return bool(package and importlib.import_module(package))
    except ModuleNotFoundError as error:
        if error.name and (package == error.name or package.startswith(f"{error.name}.")):
            return False
        raise


@functools.cache
def _has_xla() -> bool:
    """Return whether torch_xla has an accelerator or $PJRT_DEVICE asks for its CPU. The result is cached, since torch_xla later
    sets $PJRT_DEVICE itself."""
    forced = "PJRT_DEVICE" in os.environ
    return _imported("torch_xla") and (forced or importlib.import_module("torch_xla.runtime").device_type() not in (None, "CPU"))


def _made(row: accelerators.Accelerator) -> Device:
    return _SPECIAL.get(row.device, Device)(row.device, row.backend, row.package)


def find() -> Device:
    """Return this machine's accelerator, or the CPU."""
    return next((each for each in map(_made, accelerators.DEVICES.values()) if each.available()), CPU)


def join(backend: str) -> bool:
    """Join the process group that the environment describes, or else a world of one. Returns False if a library has already
    joined a group."""
    if dist.is_initialized():
        return False
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined] # is public
    return True


def of(where: torch.device) -> Device:
    """Return the `Device` of tensors on `where`."""
    row = accelerators.DEVICES.get(where.type)
    return CPU if where.type == "cpu" else _made(row) if row else Device(where.type)


def dtype(requested: str, where: torch.device, gather: Callable[[bool], list[bool]] | None = None) -> torch.dtype:
    """Return the type for matrix products: the requested `float32` or `bfloat16`, or for `auto`, bfloat16 where that is faster
    and float32 elsewhere. Ranks on different hardware must pass `run.gather`, which is a collective: `auto` is then bfloat16 only
    if that is faster on all ranks."""
    fast = requested == "auto" and all((gather or (lambda fast: [fast]))(of(where).bfloat16()))
    return torch.bfloat16 if fast or requested == "bfloat16" else torch.float32


def computing() -> torch.device:
    """Return the device for a process that is not a rank, such as an evaluation."""
    return torch.device(find().type)
