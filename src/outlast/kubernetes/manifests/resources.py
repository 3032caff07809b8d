"""Requests, limits, processes and threads of a worker's container.

Memory and accelerators are both requested and limited. Cores are only requested, unless the job limits them: a limit would
throttle data loaders while other cores are idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.base import units
from outlast.job import accelerators, spec
from outlast.kubernetes.manifests.render_request import wrong

Quantities = dict[str, str | int]

EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""Huge pages for libfabric's EFA provider. https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"""


@dataclass(frozen=True)
class Share:
    """The share of a machine that one worker has."""

    requests: Quantities
    limits: Quantities
    processes: int
    threads: int
    """Number of threads per process (OMP_NUM_THREADS). Results depend on it, so it must be the same on every machine."""
    shared_memory: int | None
    """Size of `/dev/shm` in bytes; None: limited only by the memory."""

    def container(self) -> dict[str, Quantities]:
        """The `resources` of a container."""
        return {key: value for key, value in (("requests", self.requests), ("limits", self.limits)) if value}


def accelerator(wanted: spec.Resources) -> str:
    """Resource name of the accelerators; empty if there are none."""
    return accelerators.resource(wanted.accelerator) if wanted.gpu else ""


def share(job: spec.Job) -> Share:
    """The share of each worker. Raises InvalidJob if shared memory leaves nothing of the memory, if cores exceed their limit, or
    if EFA is requested without memory or cores."""
    wanted, count = job.spec.resources, job.spec.processes()
    if wanted.shared_memory and wanted.memory and wanted.shared_memory >= wanted.memory:
        said = f"{units.memory_text(wanted.shared_memory)}), which counts as memory, leaves nothing of resources.memory"
        raise wrong(job, f"resources.sharedMemory ({said} ({units.memory_text(wanted.memory)}); lower it or raise memory")
    if wanted.cpu and wanted.cpu_limit and wanted.cpu > wanted.cpu_limit:
        cpu, limit = units.cores_text(wanted.cpu), units.cores_text(wanted.cpu_limit)
        raise wrong(job, f"resources.cpu ({cpu}) is above resources.cpuLimit ({limit}); lower it or raise cpuLimit")
    if wanted.efa and not (wanted.memory or wanted.cpu or wanted.cpu_limit):
        said = "takes huge pages, which Kubernetes gives only to pods that ask for memory or cores"
        raise wrong(job, f"resources.efa ({wanted.efa}) {said}; set resources.memory")
    firm: Quantities = {}
    if wanted.memory:
        firm["memory"] = units.memory_text(wanted.memory + job.spec.checkpoint.reserved)
    if wanted.efa:
        firm |= {EFA: wanted.efa, **HUGE_PAGES}
    if device := accelerator(wanted):
        firm[device] = wanted.gpu
    cores = _cores(wanted.cpu or wanted.cpu_limit)  # without a request Kubernetes uses the limit
    threads = max(1, int((wanted.cpu or wanted.cpu_limit or 1) / count))
    return Share({**cores, **firm}, {**_cores(wanted.cpu_limit), **firm}, count, threads, wanted.shared_memory)


def _cores(count: float | None) -> Quantities:
    return {"cpu": units.cores_text(count)} if count else {}


def times(fields: spec.Spec, count: int) -> Quantities:
    """The resources that `count` workers request in total."""
    wanted = fields.resources
    total = _cores((wanted.cpu or wanted.cpu_limit or 0) * count)
    if wanted.memory:
        total["memory"] = units.memory_text((wanted.memory + fields.checkpoint.reserved) * count)
    if device := accelerator(wanted):
        total[device] = wanted.gpu * count
    if wanted.efa:
        total[EFA] = wanted.efa * count
    return total
