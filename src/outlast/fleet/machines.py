"""What EC2's machines have: processors, memory, accelerators, EFA.

Machines of one *shape* can replace each other: autoscalers plan with the shape of a group before any of its machines runs.
General-purpose families follow a rule; machines with accelerators are in a table; others are described in `cluster.yaml`. Facts
are from https://aws.amazon.com/ec2/instance-types/ and https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NVIDIA = "nvidia.com/gpu"
NEURON = "aws.amazon.com/neuron"
EFA = "vpc.amazonaws.com/efa"


@dataclass(frozen=True)
class Machine:
    """One type of machine."""

    cpus: int
    """vCPUs."""
    memory_gib: float
    arch: str = "amd64"
    """`amd64` or `arm64` (Graviton), as in the label kubernetes.io/arch."""
    accelerator: str = ""
    """Kubernetes resource of its accelerators."""
    count: int = 0
    """How many of them."""
    efa: int = 0
    """EFA interfaces, as the device plugin counts them."""

    @property
    def shape(self) -> tuple[int, float, str, str, int]:
        """What pods see of it."""
        return self.cpus, self.memory_gib, self.arch, self.accelerator, self.count

    @property
    def resources(self) -> dict[str, int]:
        """Its extended resources, without EFA."""
        return {self.accelerator: self.count} if self.count else {}

    def __str__(self) -> str:
        devices = f", {self.count} {self.accelerator}" if self.count else ""
        return f"{self.cpus} vCPUs, {self.memory_gib:g} GiB{devices}, {self.arch}{f', {self.efa} EFA' if self.efa else ''}"


def _gpu(cpus: int, memory_gib: float, count: int, efa: int = 0, arch: str = "amd64") -> Machine:
    return Machine(cpus, memory_gib, arch, NVIDIA, count, efa)


def _neuron(cpus: int, memory_gib: float, count: int, efa: int = 0) -> Machine:
    return Machine(cpus, memory_gib, "amd64", NEURON, count, efa)


TABLE = {
    "p3.2xlarge": _gpu(8, 61, 1),
    "p3.8xlarge": _gpu(32, 244, 4),
    "p3.16xlarge": _gpu(64, 488, 8),
    "p3dn.24xlarge": _gpu(96, 768, 8, 1),
    "p4d.24xlarge": _gpu(96, 1152, 8, 4),
    "p4de.24xlarge": _gpu(96, 1152, 8, 4),
    "p5.4xlarge": _gpu(16, 256, 1, 1),
    "p5.48xlarge": _gpu(192, 2048, 8, 32),
    "p5e.48xlarge": _gpu(192, 2048, 8, 32),
    "p5en.48xlarge": _gpu(192, 2048, 8, 16),
    "g4dn.xlarge": _gpu(4, 16, 1),
    "g4dn.2xlarge": _gpu(8, 32, 1),
    "g4dn.4xlarge": _gpu(16, 64, 1),
    "g4dn.8xlarge": _gpu(32, 128, 1, 1),
    "g4dn.12xlarge": _gpu(48, 192, 4, 1),
    "g4dn.16xlarge": _gpu(64, 256, 1, 1),
    "g5.xlarge": _gpu(4, 16, 1),
    "g5.2xlarge": _gpu(8, 32, 1),
    "g5.4xlarge": _gpu(16, 64, 1),
    "g5.8xlarge": _gpu(32, 128, 1, 1),
    "g5.12xlarge": _gpu(48, 192, 4, 1),
    "g5.16xlarge": _gpu(64, 256, 1, 1),
    "g5.24xlarge": _gpu(96, 384, 4, 1),
    "g5.48xlarge": _gpu(192, 768, 8, 1),
    "g6.xlarge": _gpu(4, 16, 1),
    "g6.2xlarge": _gpu(8, 32, 1),
    "g6.4xlarge": _gpu(16, 64, 1),
    "g6.8xlarge": _gpu(32, 128, 1, 1),
    "g6.12xlarge": _gpu(48, 192, 4, 1),
    "g6.16xlarge": _gpu(64, 256, 1, 1),
    "g6.24xlarge": _gpu(96, 384, 4, 1),
    "g6.48xlarge": _gpu(192, 768, 8, 1),
    "g6e.xlarge": _gpu(4, 32, 1),
    "g6e.2xlarge": _gpu(8, 64, 1),
    "g6e.4xlarge": _gpu(16, 128, 1),
    "g6e.8xlarge": _gpu(32, 256, 1, 1),
    "g5g.xlarge": _gpu(4, 8, 1, arch="arm64"),
    "g5g.2xlarge": _gpu(8, 16, 1, arch="arm64"),
    "g5g.4xlarge": _gpu(16, 32, 1, arch="arm64"),
    "g5g.8xlarge": _gpu(32, 64, 1, arch="arm64"),
    "g5g.16xlarge": _gpu(64, 128, 2, arch="arm64"),
    "inf2.xlarge": _neuron(4, 16, 1),
    "inf2.8xlarge": _neuron(32, 128, 1),
    "inf2.24xlarge": _neuron(96, 384, 6),
    "inf2.48xlarge": _neuron(192, 768, 12),
    "trn1.2xlarge": _neuron(8, 32, 1),
    "trn1.32xlarge": _neuron(128, 512, 16, 8),
    "trn1n.32xlarge": _neuron(128, 512, 16, 16),
    "trn2.48xlarge": _neuron(192, 2048, 16, 16),
    "c5n.9xlarge": Machine(36, 96, efa=1),
    "c5n.18xlarge": Machine(72, 192, efa=1),
}
"""Machines that follow no rule."""

_GIB_PER_CPU = {"c": 2, "m": 4, "r": 8}
_WITH_EFA = {
    *("c6a.48xlarge", "c6i.32xlarge", "c7a.48xlarge", "c7g.16xlarge", "c7i.48xlarge", "m5n.24xlarge", "m6a.48xlarge"),
    *("m6i.32xlarge", "m7a.48xlarge", "m7g.16xlarge", "m7i.48xlarge", "r6i.32xlarge", "r7g.16xlarge", "r7i.48xlarge"),
}


def machine(name: str) -> Machine | None:
    """What the machines of this type have; None for a type that is not known here."""
    if name in TABLE:
        return TABLE[name]
    found = re.fullmatch(r"([cmr])([5-9])([a-z]*)\.(large|xlarge|([1-9][0-9]?)xlarge)", name)
    if not found or name.startswith("c5n."):  # c5n has more memory than the rule says
        return None
    cpus = {"large": 2, "xlarge": 4}.get(found[4]) or 4 * int(found[5])
    arch = "arm64" if "g" in found[3] else "amd64"
    return Machine(cpus, cpus * _GIB_PER_CPU[found[1]], arch, efa=int(name in _WITH_EFA))


def alike(machines: Iterable[Machine], *, efa: bool) -> bool:
    """Whether these have one shape, and as many EFA interfaces if those count."""
    return len({(each.shape, each.efa if efa else 0) for each in machines}) <= 1
