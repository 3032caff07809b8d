"""Fields of a job file without effect: nothing reads them yet, or they mean nothing where the job runs.

`validate`, `run`, `submit` and `render` print these sentences. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outlast.spec import substitution

if TYPE_CHECKING:
    from outlast.spec import Job

FIELDS = ("tracking",)
"""Fields of `spec` that nothing reads yet."""


def anywhere(job: Job) -> Iterator[str]:
    """Fields that have no effect anywhere."""
    for field in FIELDS:
        if getattr(job.spec, field) != type(job.spec).model_fields[field].default:
            yield f"{field} has no effect yet: metrics go to metrics.jsonl in the output, and nowhere else"
    for name in sorted(substitution.circular(job.spec.env)):
        yield f"env.{name} ({job.spec.env[name]}) refers to itself and stays as it is; write the whole value"


def here(job: Job) -> Iterator[str]:
    """Fields that have no effect on this machine."""
    if job.spec.secrets:
        named = ", ".join(secret.name for secret in job.spec.secrets)
        yield f"secrets ({named}) are for pods; on this machine set their variables in the shell, or keep their values in files"
    if job.spec.volumes:
        places = ", ".join(volume.to for volume in job.spec.volumes)
        yield f"volumes ({places}) are for pods; on this machine these are ordinary directories"
