"""A job as Kubernetes objects: `render(job, "indexed-job")`. Pure.

`outlast render`, the operator (`worker_pod.pod`) and `deploy/render.py` (`operator_deployment`, `crd`) use it. See
docs/decisions/0009-the-workers-pod.md for a worker's pod.
"""

from __future__ import annotations

from outlast.kubernetes.manifests.render_request import Document, Request
from outlast.kubernetes.manifests.topologies import TOPOLOGIES, render, warnings

__all__ = ["TOPOLOGIES", "Document", "Request", "render", "warnings"]
