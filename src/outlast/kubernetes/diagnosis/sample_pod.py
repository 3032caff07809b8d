"""A worker's pod with small requests. `outlast doctor` creates it in a dry run, or with the inspection in it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from outlast.job import contract, spec
from outlast.kubernetes import manifests
from outlast.kubernetes.manifests.render_request import Document

NAME = "outlast-doctor"
CORES, MEMORY = "100m", "256Mi"
LITTLE = f"{CORES} cores and {MEMORY}"


def worker(image: str = "ghcr.io/outlast/outlast:0.1", secrets: Sequence[str] = (), **where: str) -> Document:
    """The pod as the operator or a Job would make it. `secrets` are names of Secrets that become environment variables; `where`
    may contain the pod's namespace. Raises InvalidJob for values that no worker may have."""
    fields = {"image": image, "module": "train", "resources": {"cpu": CORES, "memory": MEMORY}}
    asked = {**fields, "secrets": [{"name": each} for each in secrets]}
    meta = {"name": NAME, **where}
    job = spec.parse(json.dumps({"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": meta, "spec": asked}))
    template = manifests.render(job, "job")[-1]["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, **template["metadata"]}, "spec": template["spec"]}
