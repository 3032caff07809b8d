"""Requests, limits, processes and threads of a worker's container.

Memory and accelerators are requested and limited. Cores are only requested, unless the job limits them, because a limit would
throttle data loaders while other cores are idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.base import units
from outlast.job import accelerators, spec
from outlast.kubernetes.manifests.render_request import invalid_job

Quantities = dict[str, str | int]

EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""Huge pages for libfabric's EFA provider. https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"""


@dataclass(frozen=True)
class Share:
    """One worker's share of a machine."""

    requests: Quantities
    limits: Quantities
    processes: int
    threads: int
    """Threads per process (OMP_NUM_THREADS). Results depend on it, so it must be the same on every machine."""
    shared_memory: int | None
    """Size of `/dev/shm` in bytes; None if only the memory limits it."""

    def container(self) -> dict[str, Quantities]:
        return {key: value for key, value in (("requests", self.requests), ("limits", self.limits)) if value}


def accelerator(requested: spec.Resources) -> str:
    """Return the resource name of the requested accelerators; empty if none are requested."""
    return accelerators.resource(requested.accelerator) if requested.gpu else ""


def share(job: spec.Job) -> Share:
    """Return each worker's share. Raises InvalidJob if the requested resources contradict each other."""
    requested, count = job.spec.resources, job.spec.processes()
    if requested.shared_memory and requested.memory and requested.shared_memory >= requested.memory:
        problem = f"{units.memory_text(requested.shared_memory)}), which counts as memory, leaves nothing of resources.memory"
        raise invalid_job(
            job, f"resources.sharedMemory ({problem} ({units.memory_text(requested.memory)}); lower it or raise memory"
        )
    if requested.cpu and requested.cpu_limit and requested.cpu > requested.cpu_limit:
        cpu, limit = units.cores_text(requested.cpu), units.cores_text(requested.cpu_limit)
        raise invalid_job(job, f"resources.cpu ({cpu}) is above resources.cpuLimit ({limit}); lower it or raise cpuLimit")
    if requested.efa and not (requested.memory or requested.cpu or requested.cpu_limit):
        problem = "takes huge pages, which Kubernetes gives only to pods that ask for memory or cores"
        raise invalid_job(job, f"resources.efa ({requested.efa}) {problem}; set resources.memory")
    limited: Quantities = {}
    if requested.memory:
        limited["memory"] = units.memory_text(requested.memory + job.spec.checkpoint.reserved)
    if requested.efa:
        limited |= {EFA: requested.efa, **HUGE_PAGES}
    if device := accelerator(requested):
        limited[device] = requested.gpu
    cores = _cores(requested.cpu or requested.cpu_limit)  # without a request Kubernetes uses the limit
    threads = max(1, int((requested.cpu or requested.cpu_limit or 1) / count))
    return Share({**cores, **limited}, {**_cores(requested.cpu_limit), **limited}, count, threads, requested.shared_memory)


def _cores(count: float | None) -> Quantities:
    return {"cpu": units.cores_text(count)} if count else {}


def total(fields: spec.Spec, count: int) -> Quantities:
    requested = fields.resources
    quantities = _cores((requested.cpu or requested.cpu_limit or 0) * count)
    if requested.memory:
        quantities["memory"] = units.memory_text((requested.memory + fields.checkpoint.reserved) * count)
    if device := accelerator(requested):
        quantities[device] = requested.gpu * count
    if requested.efa:
        quantities[EFA] = requested.efa * count
    return quantities
