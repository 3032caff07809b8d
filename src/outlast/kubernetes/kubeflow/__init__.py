"""Kubeflow's documents as job files: `TrainJob` of its Trainer, and `PyTorchJob` of its training operator.

`fields.yaml` is the table of their fields: each becomes a field of an ElasticJob, is dropped with a sentence, or is translated
here. A field that cannot be honoured is refused. See docs/decisions/0064-documents-of-others.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from outlast.base.errors import InvalidJob
from outlast.job import contract, spec
from outlast.job.spec import validation, yaml_document
from outlast.job.spec.yaml_document import Place
from outlast.kubernetes.kubeflow import translation
from outlast.kubernetes.kubeflow.draft import Document, Draft

_KINDS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "PyTorchJob": "kubeflow.org/v1"}
_TYPES = {str: "text", int: "a whole number", list: "a list", dict: "a mapping of names to values"}
_QUEUE, _MULTIKUEUE = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/multikueue"
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def convert(text: str, *, source: str, directory: Path) -> tuple[Document, Sequence[str]]:
    """Translate a Kubeflow document. Returns an ElasticJob, and a sentence for each field that is assumed or dropped; nothing for
    other documents.

    `directory` may hold the script, beside the document; `source` names the document in errors. Raises InvalidJob with every
    mistake, or with a field that cannot be honoured.
    """
    document = yaml_document.read(text, source=source, verbatim=_verbatim)
    fields: Document = _without_nulls(document.data) if isinstance(document.data, dict) else {}
    version, kind = str(fields.get("apiVersion")), str(fields.get("kind"))
    if version.partition("/")[0] not in ("kubeflow.org", "trainer.kubeflow.org"):
        return {}, ()
    if _KINDS.get(kind) != version:
        known = " and ".join(f"{kind} ({version})" for kind, version in _KINDS.items())
        raise InvalidJob([(document.line(("kind",)), f"{kind} ({version}) cannot be converted; {known} can")], source=source)
    import yaml

    table = yaml.safe_load((resources.files(__name__) / "fields.yaml").read_text())
    whole = {"apiVersion": "text", "kind": "text", "metadata": table["metadata"], "spec": table[kind], "status": "any"}
    draft = Draft(source, directory)
    mistakes = [(document.line(place), sentence) for place, sentence in _take(fields, whole, (), draft)]
    if problems := [*document.problems, *mistakes]:
        raise InvalidJob(problems, source=source)
    metadata, given = fields.setdefault("metadata", {}), fields.setdefault("spec", {})
    (translation.train_job if kind == "TrainJob" else translation.pytorch_job)(fields, draft)
    if _MULTIKUEUE in (given.get("managedBy"), given.get("runPolicy", {}).get("managedBy")):
        draft.put("managedBy", _MULTIKUEUE)
    metadata.get("annotations", {}).pop(_APPLIED, None)
    if queue := metadata.get("labels", {}).pop(_QUEUE, None):
        draft.put("scheduling.queue", queue)
        draft.spec.pop("suspend", None)  # Kueue's, until it admits the job
    own = {name: metadata[name] for name in ("name", "namespace", "labels", "annotations") if metadata.get(name)}
    job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": own, "spec": draft.spec}
    spec.of(job, source=source)
    return job, draft.said


def _take(value: Any, rule: Any, place: Place, draft: Draft) -> Iterator[tuple[Place, str]]:
    """Copy and drop fields as the table says. Yields the place of, and a sentence about, each unknown field and mistyped
    value."""
    name, target = validation.name(place), rule if isinstance(rule, str) else ""
    kind: Any = {"text": str, "whole": int, "any": object}.get(target, type(rule))
    if target.startswith("-> "):
        draft.put(target.removeprefix("-> "), value)
    elif target.startswith("dropped: "):
        draft.say(name, f"is {target}")
    elif not isinstance(value, kind):
        yield place, f"{name} ({validation.shown(value)}) must be {_TYPES[kind]}"
    elif isinstance(rule, list):
        for index, item in enumerate(value):
            yield from _take(item, rule[0], (*place, index), draft)
    elif isinstance(rule, dict) and rule:
        for field, each in value.items():
            if field in rule:
                yield from _take(each, rule[field], (*place, field), draft)
            elif "*" not in rule:
                near = difflib.get_close_matches(field, rule, 1)
                remedy = f"did you mean {near[0]}?" if near else f"known here are {', '.join(rule)}"
                yield (*place, field), f"{validation.name((*place, field))} is unknown; {remedy}"


def _without_nulls(value: Any) -> Any:
    """Return a document without nulls, which Kubernetes treats as absent."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value if each is not None] if isinstance(value, list) else value


def _verbatim(place: Place) -> bool:
    """Return whether a value keeps its written text: arguments, variables, labels."""
    return place[-1:] == ("value",) or place[-2:-1] in (("command",), ("args",), ("labels",), ("annotations",))
