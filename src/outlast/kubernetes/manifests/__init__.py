"""Renders a job as Kubernetes objects, for example with `render(job, "indexed-job")`. Pure.

`outlast render` and the operator use this package. See docs/decisions/0009-the-workers-pod.md.
"""

from __future__ import annotations

from outlast.kubernetes.manifests.render_request import Document, Request
from outlast.kubernetes.manifests.topologies import TOPOLOGIES, render, warnings

__all__ = ["TOPOLOGIES", "Document", "Request", "render", "warnings"]
