"""Kubeflow's documents as job files: `TrainJob` of its Trainer, and `PyTorchJob` of its training operator.

Each field becomes one of an ElasticJob, or is dropped with a sentence, or the document is refused: the table is in
docs/decisions/0064-documents-of-others.md.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from outlast.base.errors import InvalidJob
from outlast.job import spec
from outlast.job.spec import validation, yaml_document
from outlast.job.spec.yaml_document import Place
from outlast.kubernetes.kubeflow import translation
from outlast.kubernetes.kubeflow.draft import Draft

_KINDS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "PyTorchJob": "kubeflow.org/v1"}
_TYPES = {dict: "a mapping of names to values", list: "a list", str: "text", int: "a whole number", bool: "true or false"}


def convert(text: str, *, source: str, directory: Path) -> tuple[dict[str, Any], Sequence[str]] | None:
    """Translate a document of Kubeflow. Returns an ElasticJob, and a sentence for each field that is assumed or dropped; None if
    the text is no document of Kubeflow.

    `directory` may hold the script, beside the document; `source` names the document in errors. Raises InvalidJob with every
    mistake, or with a field that cannot be honoured.
    """
    if "kubeflow.org/" not in text:
        return None
    document = yaml_document.read(text, source=source, verbatim=_verbatim)
    fields = document.data if isinstance(document.data, dict) else {}
    version, kind = str(fields.get("apiVersion")), str(fields.get("kind"))
    if version.partition("/")[0] not in ("kubeflow.org", "trainer.kubeflow.org"):
        return None
    if _KINDS.get(kind) != version:
        known = " and ".join(f"{kind} ({version})" for kind, version in _KINDS.items())
        raise InvalidJob([(document.line(("kind",)), f"{kind} ({version}) cannot be converted; {known} can")], source=source)
    head = {"apiVersion": "", "kind": "", "metadata": {}, "spec": _fields()[kind], "status": None}
    fields = {"metadata": {}, "spec": {}, **fields}
    problems = [*document.problems, *((document.line(place), sentence) for place, sentence in _mistakes(fields, head))]
    if problems:
        raise InvalidJob(problems, source=source)
    draft = Draft(source, directory)
    job = (translation.train_job if kind == "TrainJob" else translation.pytorch_job)(fields, draft)
    spec.of(job, source=source)
    return job, draft.said


@functools.cache
def _fields() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load((resources.files(__name__) / "fields.yaml").read_text()))


def _mistakes(value: Any, like: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the place and a sentence for each unknown field, and for each value of another type than in `like`."""
    if value is None or like is None:
        return
    if not isinstance(value, type(like)):
        yield place, f"{validation.name(place)} ({validation.shown(value)}) must be {_TYPES[type(like)]}"
    elif isinstance(like, list):
        for index, item in enumerate(value):
            yield from _mistakes(item, like[0], (*place, index))
    elif isinstance(like, dict) and like:
        for field, each in value.items():
            if field in like:
                yield from _mistakes(each, like[field], (*place, field))
            elif "*" not in like:
                near = difflib.get_close_matches(field, like, 1)
                remedy = f"did you mean {near[0]}?" if near else f"known here are {', '.join(like)}"
                yield (*place, field), f"{validation.name((*place, field))} is unknown; {remedy}"


def _verbatim(place: Place) -> bool:
    """Return whether a value keeps its written text: arguments, variables, labels."""
    return place[-1:] == ("value",) or place[-2:-1] in (("command",), ("args",), ("labels",), ("annotations",))
