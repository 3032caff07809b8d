"""Renders a job with its code, which travels in a ConfigMap if it is small, else through the store that the job writes to.

    with rendered(job, topology, source=job_file, namespace=None) as (documents, parcel):
        parcel.upload()                                                  only if the code goes to a store

Only `upload` writes to a store. A job whose code is in a store, in the image or on a volume is left unchanged. Archives are named
after their SHA-256, so that the same archive is not shipped twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from outlast.base import units
from outlast.base.errors import InvalidJob, OutlastError
from outlast.job import spec
from outlast.job.contract import Env, Pod
from outlast.job.shipping import archives, code_files
from outlast.kubernetes import manifests
from outlast.kubernetes.manifests import volumes
from outlast.kubernetes.manifests.names import Names
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE

CONFIG_MAP_BYTES = 700 << 10
"""Maximum archive size in a ConfigMap, which holds 1 MiB. Base64 adds a third."""
CLIENT_APPLY_BYTES = 190 << 10
"""Maximum archive size for kubectl's client-side apply, which copies the ConfigMap to an annotation of at most 256 KiB."""
CODE_DIRECTORY = "code"
"""Directory in the store that holds the archives of all jobs."""


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Code to be shipped to pods. `pack` creates it."""

    job: spec.Job
    """The job, whose `code` says where pods find the code."""
    code: bytes = b""
    """The archive for the ConfigMap; empty if no ConfigMap is used."""
    sentence: str = ""
    """A sentence for the user, such as `code: 41 files, 120 KiB -> ConfigMap train-code-1a2b3c4d`; empty if nothing is
    shipped."""
    url: str = ""
    """URL to which the archive must be uploaded before pods start; empty if no store is used."""
    archive: Path = Path()
    """The archive's path, valid within `pack`'s `with` block."""

    def upload(self) -> bool:
        """Upload the archive if it goes to a store that lacks it, and return whether it was uploaded. Raises StoreError."""
        if not self.url:
            return False
        from outlast.storage import store

        parent, _, key = self.url.rpartition("/")
        place = store.open_(parent)
        with contextlib.suppress(store.Missing):
            if place.head(key).size == self.archive.stat().st_size:
                return False
        place.upload(self.archive, key)
        return True


@contextlib.contextmanager
def rendered(
    job: spec.Job,
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


@contextlib.contextmanager
def pack(job: spec.Job, *, excluded: Collection[Path] = (), limit: int = CONFIG_MAP_BYTES) -> Iterator[Parcel]:
    """Yield the parcel for a job's code. The code is packed only if pods cannot see it.

    `excluded` contains paths that are not code. The job file should be among them, so that suspending a job does not change its
    code. `limit` is an archive's maximum size in a ConfigMap, in bytes. Raises OutlastError.
    """
    local_code = volumes.code_to_ship(job.spec)
    if local_code is None:
        yield Parcel(job)
        return
    place, checksum = spec.pinned(local_code)
    path = spec.local(place)
    assert path is not None
    for sentence in spec.absent(job.spec.model_copy(update={"data": (), "models": ()})):
        raise OutlastError(sentence)
    with tempfile.TemporaryDirectory(prefix="outlast-code-") as directory:
        if path.is_dir():
            yield _pack_directory(job, path, Path(directory, "code.tar.gz"), excluded, limit)
        else:
            yield _pack_archive(job, path, checksum, limit)


def _pack_directory(job: spec.Job, root: Path, archive: Path, excluded: Collection[Path], limit: int) -> Parcel:
    excluded = code_files.not_code(job.spec, root, excluded)
    listing = code_files.pack(root, archive, but=excluded, room=None if volumes.store_parent(job.spec) else limit)
    entries = listing.entries
    names = {entry.name for entry in entries}
    code_files.check_script(job.spec, root, names)
    parcel = _make_parcel(job, archive, f"{len(entries):,} file{'' if len(entries) == 1 else 's'}", limit)
    if parcel is None:
        raise _too_large(root, entries, limit)
    fields = parcel.job.spec
    environment = fields.environment.model_copy(update=dict(_shipped_files(fields.environment, root.resolve(), names)))
    changed = parcel.job.model_copy(update={"spec": fields.model_copy(update={"environment": environment})})
    omission = f"; {code_files.without_credentials(listing.withheld)}" if listing.withheld else ""
    return dataclasses.replace(parcel, job=changed, sentence=parcel.sentence + omission)


def _pack_archive(job: spec.Job, path: Path, checksum: str, limit: int) -> Parcel:
    archives.check(path, f"code ({path})", checksum, job.spec.script or "")
    parcel = _make_parcel(job, path, path.name, limit)
    if parcel is None:
        size = units.human_bytes(path.stat().st_size)
        raise OutlastError(f"code ({path}) has {size}, {_limit_and_alternatives(limit)}")
    return parcel


def _limit_and_alternatives(limit: int) -> str:
    by_kubectl, larger = "", ""
    if limit < CONFIG_MAP_BYTES:
        by_kubectl = " that kubectl apply takes"
        larger = f"add --server-side or use `outlast submit`, for up to {units.human_bytes(CONFIG_MAP_BYTES)}; "
    return (
        f"which is too much for a ConfigMap{by_kubectl} ({units.human_bytes(limit)}), and output is no store that it could be "
        f"put into; {larger}say output: s3://..., or put the code into the image and say code: {Pod.CODE}"
    )


def _too_large(root: Path, entries: Sequence[code_files.Entry], limit: int) -> OutlastError:
    size = units.human_bytes(sum(entry.size for entry in entries))
    return OutlastError(
        f"code ({root}) holds {len(entries):,} files, {size} ({code_files.biggest(entries)}), {_limit_and_alternatives(limit)}, "
        "or name what is no code in .outlastignore"
    )


def _make_parcel(job: spec.Job, archive: Path, content: str, limit: int) -> Parcel | None:
    """Return the parcel for an archive, or None if neither a ConfigMap nor a store can hold the archive."""
    suffix = next(each for each in spec.ARCHIVES if archive.name.lower().endswith(each))
    checksum, size = archives.checksum(archive), archive.stat().st_size
    url, data, parent = "", b"", volumes.store_parent(job.spec)
    if size <= limit:
        data, place = archive.read_bytes(), volumes.shipped_url(f"code{suffix}", checksum)
        destination = f"ConfigMap {Names(job.metadata.name).code(checksum)}"
    elif parent:
        destination = url = f"{parent}/{CODE_DIRECTORY}/{checksum}{suffix}"
        place = f"{url}#sha256={checksum}"
    else:
        return None
    changed = job.model_copy(update={"spec": job.spec.model_copy(update={"code": place})})
    return Parcel(changed, data, f"code: {content}, {units.human_bytes(size)} -> {destination}", url, archive)


def _shipped_files(environment: spec.Environment, root: Path, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the field and the file name of each environment file that is shipped with the code."""
    for field, file in environment:
        if file and Path(file).is_absolute() and root in Path(file).parents:
            name = Path(file).relative_to(root).as_posix()
            if name in names:
                yield field, name
