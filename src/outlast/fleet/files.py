"""`cluster.yaml` on disk, and the presets that the package holds."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from outlast.errors import OutlastError
from outlast.fleet.model import Cluster
from outlast.spec import document, no_such_file, validation
from outlast.spec.document import Place

PRESETS = {
    "workshop": "two CPU machines with room for ten, for the workshop of aws-samples on EKS",
    "torchelastic": "two p3.2xlarge, as in torchelastic's guide for Kubernetes",
    "spot": "p3 machines: up to seven spot, then up to three on-demand; cluster-autoscaler",
    "accelerators": "GPU, Trainium and Graviton machines on demand of pods; Karpenter and Volcano",
}
"""Presets and what each is."""


def load(path: Path) -> Cluster:
    """The cluster in a file; raises InvalidJob with every mistake, and OutlastError for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise no_such_file(path, "*.y*ml", "a cluster.yaml, or --preset NAME") from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OutlastError(f"{path} cannot be read: {why}; give the path of a cluster.yaml") from error
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "cluster.yaml") -> Cluster:
    """The cluster in a text; raises InvalidJob with every mistake and its line."""
    read = document.read(text, source=source, verbatim=_verbatim, kind="cluster", start="name: my-cluster")
    return validation.validated(Cluster, read, source=source)


def preset(name: str) -> Cluster:
    """The cluster of a preset."""
    return parse(preset_text(name), source=f"preset {name}")


def preset_text(name: str) -> str:
    """The file of a preset, with its comments; raises OutlastError if there is none of this name."""
    if name not in PRESETS:
        raise OutlastError(f"there is no preset {name}; known are {', '.join(PRESETS)}")
    return (resources.files("outlast.fleet") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def _verbatim(place: Place) -> bool:
    """Versions, labels, tags and values of taints stay as written: `1.30` is no number there, nor `true` a boolean."""
    return place[-1:] == ("version",) or place[-2:-1] in (("labels",), ("tags",)) or place[-3:-2] == ("taints",)
