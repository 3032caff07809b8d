"""The volumes of a worker's pod, and the job file with paths that are valid in the pod.

A pod does not see the machine that submits the job. A local path in a job must be on a volume that is mounted at that path in the
pod, or name a file that is shipped with the job (`files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from outlast.base import units
from outlast.job import spec
from outlast.job.contract import Annotation, Pod
from outlast.kubernetes.manifests import resources
from outlast.kubernetes.manifests.render_request import Document, Request, invalid_job

_STATE_SIZE = "256Mi"
"""Size limit of the state directory, which is in memory and small."""


def document(job: spec.Job) -> spec.Job:
    """Return the job with paths that are valid in its pods, and without `suspend`. Raises InvalidJob, which lists every path that
    pods cannot see."""
    fields = job.spec
    if invisible := list(_invisible_paths(job)):
        raise invalid_job(job, *invisible)
    archived = checksum(fields.code)
    changes = {
        "code": Pod.CODE if _is_local(fields.code) and (fields.code or fields.script) and not archived else fields.code,
        "data": tuple(each.model_copy(update={"from_": each.to}) if _is_local(each.from_) else each for each in fields.data),
        "models": tuple(
            each.model_copy(update={"from_": f"{Pod.MODELS}/{each.name}"}) if _is_local(each.from_) else each
            for each in fields.models
        ),
        "output": output(fields) if _is_local(fields.output) else fields.output,
        "environment": fields.environment.model_copy(
            update={name: f"{Pod.CONFIG}/{key}" for name, key, _ in _files_outside_code(fields)}
        ),
        "suspend": False,
    }
    return job.model_copy(update={"spec": fields.model_copy(update=changes)})


def code_to_ship(fields: spec.Spec) -> str | None:
    """Return the location of local code that must be shipped to pods, or None."""
    code = fields.code
    return code if code and _is_local(code) and not checksum(code) and not _in_pod(fields, spec.pinned(code)[0]) else None


def shipped_url(archive: str, checksum: str) -> str:
    """Return the URL by which a job file refers to code in a ConfigMap."""
    return f"file://{Pod.SHIPPED}/{archive}#sha256={checksum}"


def checksum(code: str | None) -> str:
    """Return the SHA-256 of code in a ConfigMap; empty for other code."""
    place, digits = spec.pinned(code or "")
    path = spec.local(place)
    return digits if path is not None and PurePosixPath(Pod.SHIPPED) in PurePosixPath(path).parents else ""


def archive(code: str | None) -> str:
    """Return the file name of the code archive in a ConfigMap."""
    return PurePosixPath(spec.pinned(code or "")[0]).name


def files(fields: spec.Spec) -> list[str]:
    """Return the paths of the local files whose contents pods need."""
    return [path for _, _, path in _files_outside_code(fields)]


def output_is_lost(job: spec.Job) -> bool:
    return _is_local(job.spec.output) and not _on_volume(job.spec, output(job.spec))


def urls_without_credentials(fields: spec.Spec) -> list[str]:
    """Return a job's S3 URLs if its pods have no credentials for S3, otherwise an empty list."""
    pod = str(fields.template.get("spec") or "")
    own = any(
        name.startswith("AWS_") and name not in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL") for name in fields.env
    )
    if own or fields.secrets or any(word in pod for word in ("serviceAccount", "envFrom", "AWS_")):
        return []
    named = [fields.output, fields.code, *[each.from_ for each in fields.data], *[each.from_ for each in fields.models]]
    return list(dict.fromkeys(place for place in named if place and place.startswith("s3://")))


def output(fields: spec.Spec, name: str = "") -> str:
    """Return the output directory in a pod: the job's path if it is on a volume, otherwise one below `/out`."""
    path = str(spec.local(fields.output) or "") if fields.output else ""
    root = path if path and _on_volume(fields, path) else Pod.OUTPUT
    return f"{root}/{name}" if name else root


def store_url(job: spec.Job) -> str:
    """Return the URL of the job's output; empty if the output is not in a store."""
    parent = store_parent(job.spec)
    return f"{parent}/{job.metadata.name}" if parent else ""


def store_parent(fields: spec.Spec) -> str:
    """Return the URL in the job's `output`, to which the job's name is appended; empty if the output is not in a store."""
    return "" if fields.output is None or _is_local(fields.output) else fields.output.rstrip("/")


def config_data(request: Request) -> Document:
    """Return the data of the job's ConfigMap, which contains the job file and local files outside the code."""
    local_files = {key: request.files[path] for _, key, path in _files_outside_code(request.spec)}
    return {"job.yaml": job_file(request.job), **local_files}


def job_file(job: spec.Job) -> str:
    return spec.dump(document(job))


def volumes(request: Request) -> tuple[list[Document], list[Document]]:
    """Return a pod's volumes and its container's mounts, with one mount per path."""
    by_path: dict[str, tuple[Document, Document]] = {}
    for place, name, source in _standard_volumes(request):
        by_path[place] = {"name": name, **source}, {"name": name, "mountPath": place}
    for place, volume, mount in user_volumes(request.spec):
        by_path[place] = volume, {**mount, "mountPath": place}
    sources = {volume["name"]: volume for volume, _ in by_path.values()}
    return list(sources.values()), [mount for _, mount in by_path.values()]


def pod_security() -> dict[str, Any]:
    """Return a pod's security context that meets the restricted Pod Security Standard."""
    return {
        "runAsNonRoot": True,
        "runAsUser": Pod.USER,
        "runAsGroup": Pod.USER,
        "fsGroup": Pod.USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Return a container's security context that meets the restricted Pod Security Standard."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def claims(fields: spec.Spec, mode: str) -> dict[str, Document]:
    """Return the specs of the claims to create, keyed by name. `mode` is the default access mode."""
    return {
        volume.claim: {
            "accessModes": [volume.access_mode or mode],
            **({"storageClassName": volume.storage_class} if volume.storage_class else {}),
            "resources": {"requests": {"storage": units.memory_text(volume.size)}},
        }
        for volume in fields.volumes
        if volume.size
    }


def _standard_volumes(request: Request) -> Iterator[tuple[str, str, Document]]:
    """Yield the mount path, name and source of each volume that every worker has. A worker can write only to volumes, because its
    image is read-only."""
    share = resources.share(request.job)
    limit = {"sizeLimit": units.memory_text(share.shared_memory)} if share.shared_memory else {}
    job_file = [
        {"path": PurePosixPath(Pod.JOB_FILE).name, "fieldRef": {"fieldPath": f"metadata.annotations['{Annotation.JOB_FILE}']"}}
    ]
    config = (
        {"downwardAPI": {"items": job_file}} if request.job_file_in_annotation else {"configMap": {"name": request.names.config}}
    )
    yield Pod.CONFIG, "config", config
    if digits := checksum(request.spec.code):
        yield Pod.SHIPPED, "archive", {"configMap": {"name": request.names.code(digits)}}
    yield "/dev/shm", "shm", {"emptyDir": {"medium": "Memory", **limit}}
    yield Pod.STATE, "state", {"emptyDir": {"medium": "Memory", "sizeLimit": _STATE_SIZE}}
    scratch = {Pod.DATA: "data", Pod.MODELS: "models", Pod.OUTPUT: "output", Pod.CACHE: "cache", Pod.HOME: "home", "/tmp": "tmp"}
    if request.spec.code and (checksum(request.spec.code) or not _is_local(request.spec.code)):
        scratch = {Pod.CODE: "code", **scratch}  # else it is in the image, which an emptyDir would hide
    for index, data in enumerate(request.spec.data):
        if not _on_volume(request.spec, data.to):
            scratch.setdefault(data.to, f"data-{index}")
    for place, name in scratch.items():
        yield place, name, {"emptyDir": {}}


def user_volumes(fields: spec.Spec) -> Iterator[tuple[str, Document, Document]]:
    """Yield the mount path, volume and mount of each of the user's claims and Secrets."""
    order = list(dict.fromkeys(volume.claim for volume in fields.volumes))
    for volume in fields.volumes:
        name = f"claim-{order.index(volume.claim)}"
        mount: Document = {"name": name}
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        yield volume.to, {"name": name, "persistentVolumeClaim": {"claimName": volume.claim}}, mount
    for index, secret in enumerate(fields.secrets):
        if secret.to:
            name = f"secret-{index}"
            yield secret.to, {"name": name, "secret": {"secretName": secret.name}}, {"name": name, "readOnly": True}


def _invisible_paths(job: spec.Job) -> Iterator[str]:
    fields = job.spec
    if code := code_to_ship(fields):
        place = spec.pinned(code)[0]
        yield (
            f"code ({place}) is on this machine, which pods do not see; put it into a store (code: s3://...), "
            f"or into the image and say code: {Pod.CODE}"
        )
    for i, data in enumerate(fields.data):
        if _is_local(data.from_) and not _on_volume(fields, data.to):
            yield _invisible_path(f"data[{i}].from", data.from_, data.to)
    for i, model in enumerate(fields.models):
        if _is_local(model.from_) and not _on_volume(fields, f"{Pod.MODELS}/{model.name}"):
            yield _invisible_path(f"models[{i}].from", model.from_, Pod.MODELS)


def _invisible_path(field: str, place: str, to: str) -> str:
    return (
        f"{field} ({place}) is on this machine, which pods do not see; put it into a store, "
        f"or on a volume: volumes: [{{claim: NAME, to: {to}}}]"
    )


def _is_local(place: str | None) -> bool:
    """Return whether a path or URL is local; True for None."""
    return place is None or spec.local(spec.pinned(place)[0]) is not None


def _in_pod(fields: spec.Spec, place: str) -> bool:
    return str(spec.local(place)) == Pod.CODE or (_on_volume(fields, Pod.CODE) and not spec.archive(place))


def _on_volume(fields: spec.Spec, place: str) -> bool:
    path = PurePosixPath(place)
    return any(PurePosixPath(volume.to) in (path, *path.parents) for volume in fields.volumes)


def _files_outside_code(fields: spec.Spec) -> list[tuple[str, str, str]]:
    """Return the field, ConfigMap key and path of each environment file that must be shipped separately because it is outside the
    code."""
    files: Mapping[str, str | None] = dict(fields.environment)
    keys = {"requirements": "requirements.txt", "conda": "environment.yml"}
    return [(name, keys[name], path) for name, path in files.items() if path and PurePosixPath(path).is_absolute()]
