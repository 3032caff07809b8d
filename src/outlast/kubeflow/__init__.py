"""Kubeflow: `kubeflow.yaml`, the documents and values made of it, and whether a dashboard asks for a login.

    load(path)                 the file; every mistake with its line
    documents.render(wanted)   what Outlast adds to a Kubeflow that is there
    spawner.added(text, ...)   the list of images that notebooks are made of, with ours
    entrances.findings(seen)   how a dashboard can be reached without a login

Outlast does not install Kubeflow: its own manifests or AWS's distribution do. Everything is pure but for reading the file.
"""

from __future__ import annotations

from pathlib import Path

from outlast.errors import OutlastError
from outlast.kubeflow.model import Kubeflow, PodDefault, Profile
from outlast.spec import document, no_such_file, validation
from outlast.spec.document import Place

__all__ = ["Kubeflow", "PodDefault", "Profile", "load", "parse"]


def load(path: Path) -> Kubeflow:
    """The file; raises InvalidJob with every mistake, and OutlastError for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise no_such_file(path, "*.y*ml", "a kubeflow.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OutlastError(f"{path} cannot be read: {why}; give the path of a kubeflow.yaml") from error
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "kubeflow.yaml") -> Kubeflow:
    """The file's text; raises InvalidJob with every mistake and its line."""
    start = "cluster: my-cluster"
    return validation.validated(
        Kubeflow, document.read(text, source=source, verbatim=_verbatim, kind="kubeflow", start=start), source=source
    )


def _verbatim(place: Place) -> bool:
    """Variables, labels and annotations stay as written: `true` is no boolean there, nor `1.30` a number."""
    return place[-2:-1] in (("env",), ("labels",), ("annotations",))
