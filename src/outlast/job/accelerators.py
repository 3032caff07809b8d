"""Table of the supported accelerators. A new one needs a row in `TABLE`, and a class in `training.device` only if torch's module
for it differs from `torch.cuda`. Pure."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator."""

    resource: str
    """Kubernetes resource of the device plugin, and the key of the taint on nodes reserved for it."""
    name: str = ""
    """Short name in job files. If it is empty, job files contain the resource."""
    about: str = ""
    """Meaning of the short name, if that is not obvious."""
    others: tuple[str, ...] = ()
    """Patterns for other resources that the same devices provide, such as parts of a device."""
    shared: tuple[str, ...] = ()
    """Resources whose units each have cores for several processes."""
    device: str = ""
    """Device type in torch. `torch.<device>` is its module."""
    backend: str = ""
    package: str = ""
    """Python package that adds the device to torch; empty if torch supports it without a package."""
    files: str = ""
    """Pattern for the device files in /dev. The part that `[0-9]*` matches names the device."""
    visible: str = ""


TABLE = (
    Accelerator(
        "nvidia.com/gpu",
        name="nvidia",
        others=("nvidia.com/gpu.shared", "nvidia.com/mig-*"),
        device="cuda",
        backend="nccl",
        files="nvidia[0-9]*",
        visible="CUDA_VISIBLE_DEVICES",
    ),
    Accelerator("amd.com/gpu", name="amd", device="cuda", backend="nccl"),  # torch for ROCm uses CUDA's names
    Accelerator(
        "aws.amazon.com/neuron",
        name="neuron",
        about="AWS Trainium and Inferentia",
        others=("aws.amazon.com/neuroncore", "aws.amazon.com/neurondevice"),
        shared=("aws.amazon.com/neuron", "aws.amazon.com/neurondevice"),
        device="neuron",
        backend="neuron",
        package="torch_neuronx",
    ),
    Accelerator("google.com/tpu", device="xla", backend="xla", package="torch_xla"),  # and older Neuron SDKs
    Accelerator("gpu.intel.com/i915", others=("gpu.intel.com/xe",)),
    Accelerator("habana.ai/gaudi", device="hpu", backend="hccl", package="habana_frameworks.torch"),
)

NAMED = tuple(row for row in TABLE if row.name)
RESOURCES = {row.name: row.resource for row in NAMED}
DEVICES = {row.device: row for row in TABLE if row.device}
LIBRARIES = tuple(row.backend for row in DEVICES.values() if row.backend != row.device)
"""Libraries for collectives. An error that names one of them comes from a collective."""
SHARED = tuple(each for row in TABLE if row.shared for each in (row.name, *row.shared) if each)
"""Values of `resources.accelerator` whose units several processes may share."""


def resource(name: str) -> str:
    """Return the Kubernetes resource for a value of `resources.accelerator`."""
    return RESOURCES.get(name, name)


def described() -> str:
    """Return the list of short names for the job file reference."""
    return ", ".join(f"`{row.name}`{f' ({row.about})' if row.about else ''}" for row in NAMED)


def is_accelerator(resource: str) -> bool:
    """Return whether a resource of a node or a pod is an accelerator or part of one."""
    return any(fnmatch.fnmatchcase(resource, pattern) for row in TABLE for pattern in (row.resource, *row.others))


def taints(resource: str) -> list[str]:
    """Return the keys of the taints on nodes reserved for a resource. A part of a device has the taint of the whole device."""
    domain = f"{resource.partition('/')[0]}/"
    wholes = (row.resource for row in NAMED if row.resource.startswith(domain))
    return list(dict.fromkeys([resource, *wholes]))


PEAKS = (
    ("GB200", 2500), ("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989),
    ("H800", 989),
    ("A100", 312), ("A800", 312), ("L40S", 362), ("L40", 181), ("L4", 121), ("A40", 150), ("A30", 165), ("A10G", 70),
    ("A10", 125), ("V100", 125), ("T4", 65), ("RTX 4090", 165), ("MI300X", 1307), ("MI250X", 383),
)  # fmt: skip
"""Peak throughput of dense matrix products in bfloat16 (V100, T4: float16), in TFLOP/s, for words in a GPU's name. Source:
vendors' data sheets."""


def peak_flops(name: str) -> float | None:
    """Return a GPU's peak throughput in FLOP/s from the first matching row of `PEAKS`; None if unknown."""
    return next((peak * 1e12 for part, peak in PEAKS if re.search(rf"\b{part}\b", name)), None)
