"""A job's documents and code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outlast.base.errors import InvalidJob, OutlastError
from outlast.job.contract import Env
from outlast.job.spec import Job
from outlast.kubernetes import manifests
from outlast.kubernetes.jobs.parcel import CONFIG_MAP_BYTES, Parcel, pack
from outlast.kubernetes.manifests import volumes
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE


@contextlib.contextmanager
def rendered(
    job: Job,
    topology: str,
    *,
    source: Path,
    namespace: str | None,
    run: str | None = None,
    fresh: bool = False,
    room: int | None = None,
) -> Iterator[tuple[list[dict[str, Any]], Parcel]]:
    """Yield a job's documents, in the order to apply them, and its code, which must be uploaded first. `run` and `fresh` are
    passed to `manifests.render`, and `room` is the maximum size of code in a ConfigMap, in bytes. Raises InvalidJob with the job
    file's name."""
    with pack(job, excluded=[source], limit=room or CONFIG_MAP_BYTES) as parcel:
        files = _texts(volumes.files(parcel.job.spec))
        try:
            packed = parcel.job.in_namespace(namespace)
            made = manifests.render(
                packed, topology, run=run, files=files, code=parcel.code, fresh=fresh, agent_image=operator_image()
            )
        except InvalidJob as error:
            raise InvalidJob(error.problems, source=str(source)) from error
        yield made, parcel


def operator_image() -> str:
    """Return the operator's image, which has no torch. Pods whose own image has no Outlast copy it from there."""
    return os.environ.get(Env.OPERATOR_IMAGE) or OPERATOR_IMAGE


def _texts(paths: Sequence[str]) -> dict[str, str]:
    contents = {}
    for path in paths:
        try:
            contents[path] = Path(path).read_text()
        except OSError as error:
            raise OutlastError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    return contents
