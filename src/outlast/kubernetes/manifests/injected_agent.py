"""The agent in pods whose image has no Outlast. An init container copies it to a volume; see `worker.launch.relocatable`."""

from __future__ import annotations

from outlast.job.contract import Pod
from outlast.kubernetes.manifests import resources, volumes
from outlast.kubernetes.manifests.render_request import Document, Request
from outlast.worker.launch import relocatable

NAME = "outlast-agent"
_SHARED = ("cpu", "memory")
"""Resources that the init container requests in the same amount as the worker. Devices are not among them."""


def program(request: Request) -> list[str]:
    """Return the words of the command that starts `outlast` in a worker's container."""
    return [*relocatable.command(Pod.INJECTED), "-m", "outlast"] if request.spec.injected() else ["outlast"]


def init_containers(request: Request) -> list[Document]:
    """Return the init containers of a worker's pod."""
    if not request.spec.injected():
        return []
    share = resources.share(request.job).container()  # the larger container counts, so the pod requests no more
    return [
        {
            "name": NAME,
            "image": request.agent_image,
            "command": ["python3", "-m", "outlast", "inject", Pod.INJECTED],
            "resources": {kind: {name: each[name] for name in _SHARED if name in each} for kind, each in share.items()},
            "securityContext": volumes.container_security(),
            "volumeMounts": [{"name": NAME, "mountPath": Pod.INJECTED}],
        }
    ]


def volume(request: Request) -> tuple[list[Document], list[Document]]:
    """Return the agent's volume and its mount; empty for an image that has Outlast."""
    if not request.spec.injected():
        return [], []
    return [{"name": NAME, "emptyDir": {}}], [{"name": NAME, "mountPath": Pod.INJECTED, "readOnly": True}]
