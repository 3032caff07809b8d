"""Reads the memory and utilization of this machine's GPUs from NVML, a library of NVIDIA's driver. Uses ctypes, since the agent
has only the standard library in some images. https://docs.nvidia.com/deploy/nvml-api/"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

from outlast.job.prometheus_metrics import Sample

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percentages of the time in which a kernel ran, and in which memory was accessed."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Gpus:
    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        self._nvml: ctypes.CDLL | None = None
        self._lock = threading.Lock()

    def samples(self) -> list[Sample]:
        """Return each GPU's utilization (except for MIG slices) and memory. The list is empty without NVML, and while an earlier
        call is pending, since a broken GPU can hang NVML."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            return list(self._read())
        finally:
            self._lock.release()

    def _read(self) -> Iterator[Sample]:
        if self._nvml is None:
            try:
                nvml = ctypes.CDLL(self._library)
            except OSError:
                return
            if nvml.nvmlInit_v2():
                return
            self._nvml = nvml
        nvml, count = self._nvml, ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, memory, utilization = ctypes.c_void_p(), _Memory(), _Utilization()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                continue
            if not nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(utilization)):
                yield "gpu_use_ratio", {"gpu": index}, utilization.gpu / 100
            if not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                yield "gpu_memory_used_bytes", {"gpu": index}, memory.used
                yield "gpu_memory_bytes", {"gpu": index}, memory.total
