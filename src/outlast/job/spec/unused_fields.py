"""Warnings about fields in a job file that have no effect where the job runs, or anywhere. `validate` prints all of them; `run`,
`submit` and `render` print only the surprising ones. `manifests.warnings` adds the fields that a topology ignores. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from outlast.base import units
from outlast.job.spec import substitution

if TYPE_CHECKING:
    from outlast.job.spec import Job

PODS = (
    "metadata.namespace",
    "metadata.labels",
    "metadata.annotations",
    "image",
    "inject",
    "resources.cpu_limit",
    "resources.memory",
    "resources.accelerator",
    "resources.efa",
    "resources.shared_memory",
    "rendezvous",
    "scheduling",
    "ttl_seconds_after_finished",
    "clean_pod_policy",
    "managed_by",
    "node_selector",
    "tolerations",
    "template",
)
"""Fields that have no effect on this machine, and without which training is the same."""


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


def pods(job: Job) -> Iterator[str]:
    """Yield at most one warning, about the fields in `PODS`, which have no effect on this machine."""
    given = [path for path in PODS if _given(job if path.startswith("metadata.") else job.spec, path)]
    if given:
        named = ", ".join(".".join(map(to_camel, path.split("."))) for path in given)
        yield f"{named} {'is' if len(given) == 1 else 'are'} for pods and {'has' if len(given) == 1 else 'have'} no effect here"


def _given(part: BaseModel, path: str) -> bool:
    first, _, rest = path.partition(".")
    value = getattr(part, first)
    if rest:
        return _given(value, rest)
    return bool(value != type(part).model_fields[first].default)
