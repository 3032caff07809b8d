"""What a job file says in vain: fields that nothing reads yet, or that have no meaning where the job runs.

Said by `validate`, `run`, `submit` and `render`, in sentences. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outlast.spec import substitution

if TYPE_CHECKING:
    from outlast.spec import Job

FIELDS = ("tracking",)
"""Those of `spec` that nothing reads yet, wherever the job runs."""


def anywhere(job: Job) -> Iterator[str]:
    """What has no effect at all."""
    for field in FIELDS:
        if getattr(job.spec, field) != type(job.spec).model_fields[field].default:
            yield f"{field} has no effect yet: metrics go to metrics.jsonl in the output, and nowhere else"
    for name in sorted(substitution.circular(job.spec.env)):
        yield f"env.{name} ({job.spec.env[name]}) refers to itself and stays as it is; write the whole value"


def here(job: Job) -> Iterator[str]:
    """What has no effect for processes of this machine."""
    if job.spec.secrets:
        named = ", ".join(secret.name for secret in job.spec.secrets)
        yield f"secrets ({named}) are for pods; on this machine set what they hold in the shell, or keep it in files"
    if job.spec.volumes:
        places = ", ".join(volume.to for volume in job.spec.volumes)
        yield f"volumes ({places}) are for pods; on this machine these are ordinary directories"
