"""A worker's pod with small requests. `outlast doctor` creates it in a dry run, or runs checks in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.job import spec
from outlast.kubernetes import manifests
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests.render_request import Document

NAME = "outlast-doctor"
CORES, MEMORY = "100m", "256Mi"
LITTLE = f"{CORES} cores and {MEMORY}"


def worker(image: str = "ghcr.io/outlast/outlast:0.1", secrets: Sequence[str] = (), **metadata: str) -> Document:
    """Return the pod as the operator would create it, with the entries of these Secrets as environment variables. Raises
    InvalidJob."""
    fields = {"image": image, "inject": False, "module": "train", "resources": {"cpu": CORES, "memory": MEMORY}}
    spec_fields = {**fields, "secrets": [{"name": each} for each in secrets]}
    pod_metadata = {"name": NAME, **metadata}
    job = spec.of(kinds.ELASTIC_JOB.document(pod_metadata, spec=spec_fields))
    template = manifests.render(job, "job")[-1]["spec"]["template"]
    return kinds.POD.document({**pod_metadata, **template["metadata"]}, spec=template["spec"])
