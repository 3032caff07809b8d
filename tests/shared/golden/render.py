"""Writes the documents of the jobs in jobs/, one file a job and topology, to look at what a change changes:

python tests/shared/golden/render.py
"""

from __future__ import annotations

from pathlib import Path

from outlast.cli.cluster import render
from outlast.job import spec
from outlast.kubernetes import manifests
from outlast.kubernetes.manifests.render_request import Document

HERE = Path(__file__).parent
JOBS = sorted(path.stem for path in (HERE / "jobs").glob("*.yaml"))


def job(name: str) -> spec.Job:
    """Read a job of jobs/. Its paths are kept, and are independent of this machine."""
    return spec.parse((HERE / "jobs" / f"{name}.yaml").read_text())


def documents(name: str, topology: str) -> list[Document]:
    return manifests.render(job(name), topology)


def pages() -> dict[str, str]:
    """Return the text of each file, by its path below this directory."""
    return {
        f"{topology}/{name}.yaml": render.text(documents(name, topology)) for topology in manifests.TOPOLOGIES for name in JOBS
    }


if __name__ == "__main__":
    for name, text in pages().items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
