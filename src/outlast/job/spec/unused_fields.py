"""Warnings about fields in a job file that surprisingly have no effect where the job runs, or anywhere. `manifests.warnings` adds
the fields that a topology ignores. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outlast.base import units
from outlast.job.spec import substitution

if TYPE_CHECKING:
    from outlast.job.spec import Job


def anywhere(job: Job) -> Iterator[str]:
    """Yield warnings about settings that have no effect, or a smaller effect than requested, wherever the job runs."""
    for name in sorted(substitution.circular(job.spec.env)):
        yield f"env.{name} ({job.spec.env[name]}) refers to itself and stays as it is; write the whole value"
    replicas, most = job.spec.checkpoint.replicas, job.spec.workers.max - 1
    if replicas > most and "replicas" in job.spec.checkpoint.model_fields_set:
        others = units.count(most, "other worker")
        yield f"checkpoint.replicas ({replicas}) is reduced to {most}: there is no more than {others} to hold one"


def here(job: Job) -> Iterator[str]:
    """Yield warnings about fields that have no effect on this machine."""
    if job.spec.secrets:
        named = ", ".join(secret.name for secret in job.spec.secrets)
        yield f"secrets ({named}) are for pods; on this machine set their variables in the shell, or keep their values in files"
    if job.spec.volumes:
        places = ", ".join(volume.to for volume in job.spec.volumes)
        yield f"volumes ({places}) are for pods; on this machine these are ordinary directories"
