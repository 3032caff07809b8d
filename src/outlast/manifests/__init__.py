"""A job as documents for Kubernetes: `render(job, "indexed-job")`.

Pure: a job goes in, a list of dicts comes out, names and files are arguments; nothing here knows a cluster, a clock or a disk.
Called by `outlast render`, by the operator (`pods.pod`) and by `deploy/render.py` (`install`, `crd`). What a worker's pod may
rely on is written in `docs/decisions/0009-the-workers-pod.md`.
"""

from __future__ import annotations

from outlast.manifests.request import Document, Request
from outlast.manifests.topologies import TOPOLOGIES, render, warnings

__all__ = ["TOPOLOGIES", "Document", "Request", "render", "warnings"]
