"""Writes what is installed in a cluster into this directory, from outlast.kubernetes.manifests.installed.operator_deployment:

python deploy/render.py
"""

from __future__ import annotations

from pathlib import Path

from outlast.cli.cluster import render
from outlast.kubernetes.manifests.installed import operator_deployment

HERE = Path(__file__).parent
HEAD = "# Written by `python deploy/render.py` from src/outlast/kubernetes/manifests/installed/operator_deployment.py.\n"


def pages() -> dict[str, str]:
    """The text of each file, by its path below this directory."""
    return {name: HEAD + render.text(documents) for name, documents in operator_deployment.files().items()}


if __name__ == "__main__":
    for name, text in pages().items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
