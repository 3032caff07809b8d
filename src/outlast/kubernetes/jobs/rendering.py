"""A job's documents and code, and the backend that applies them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outlast.base.errors import InvalidJob, OutlastError
from outlast.job.spec import Job
from outlast.kubernetes import api, manifests
from outlast.kubernetes.jobs.backend import KubernetesBackend
from outlast.kubernetes.jobs.parcel import CONFIG_MAP_BYTES, Parcel, pack
from outlast.kubernetes.manifests import volumes


def backend(cluster: api.Cluster, topology: str, say: Callable[[str], None]) -> KubernetesBackend:
    """Return a backend that submits jobs with this topology. `say` is called with a sentence about where code is shipped."""

    def documents(job: Job, source: Path, run: str | None, fresh: bool) -> list[api.Document]:
        with rendered(job, topology, source=source, namespace=cluster.namespace, run=run, fresh=fresh) as (found, parcel):
            if run is not None:  # if there is no run, the documents are only compared
                if parcel.sentence:
                    say(parcel.sentence)
                parcel.upload()
            return found

    return KubernetesBackend(cluster, documents=documents)


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
            made = manifests.render(
                parcel.job, topology, run=run, namespace=namespace, files=files, code=parcel.code, fresh=fresh
            )
        except InvalidJob as error:
            raise InvalidJob(error.problems, source=str(source)) from error
        yield made, parcel


def _texts(paths: Sequence[str]) -> dict[str, str]:
    contents = {}
    for path in paths:
        try:
            contents[path] = Path(path).read_text()
        except OSError as error:
            raise OutlastError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    return contents
