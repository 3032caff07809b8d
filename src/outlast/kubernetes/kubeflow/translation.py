"""Translates a `TrainJob` or a `PyTorchJob` to a job file, with the table `fields.yaml` and with rules for fields that have no
single counterpart."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from outlast.base.errors import InvalidJob
from outlast.job import contract, spec
from outlast.job.contract import Pod
from outlast.job.spec import validation, yaml_document
from outlast.job.spec.yaml_document import Place
from outlast.kubernetes.kubeflow.draft import Document, Draft
from outlast.kubernetes.manifests import overlay

IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Image of Kubeflow Trainer 2.3's torch-distributed runtime."""
_OTHERS = {"deepspeed": "MPI", "mlx": "MPI", "mpi": "MPI", "jax": "JAX", "xgboost": "XGBoost", "torchtune": "torchtune"}
"""Frameworks of Kubeflow's other runtimes, keyed by the first word of a runtime's name."""
_KINDS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "PyTorchJob": "kubeflow.org/v1"}
_TYPES = {str: "text", int: "a whole number", list: "a list", dict: "a mapping of names to values"}
_QUEUE, _MULTIKUEUE = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/multikueue"
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def convert(text: str, *, source: str, directory: Path) -> tuple[Document, Sequence[str]]:
    """Translate a Kubeflow document to an ElasticJob, and return it with sentences about fields that are assumed or dropped. Both
    are empty if the document is not one of Kubeflow's. `directory` may contain the script, and `source` names the document in
    errors. Raises InvalidJob."""
    document = yaml_document.read(text, source=source, verbatim=_verbatim)
    fields: Document = _without_nulls(document.data) if isinstance(document.data, dict) else {}
    version, kind = str(fields.get("apiVersion")), str(fields.get("kind"))
    if version.partition("/")[0] not in ("kubeflow.org", "trainer.kubeflow.org"):
        return {}, ()
    if _KINDS.get(kind) != version:
        known = " and ".join(f"{kind} ({version})" for kind, version in _KINDS.items())
        raise InvalidJob([(document.line(("kind",)), f"{kind} ({version}) cannot be converted; {known} can")], source=source)
    import yaml

    table = yaml.safe_load((resources.files("outlast.kubernetes.kubeflow") / "fields.yaml").read_text())
    whole = {"apiVersion": "text", "kind": "text", "metadata": table["metadata"], "spec": table[kind], "status": "any"}
    draft = Draft(source, directory)
    mistakes = [(document.line(place), sentence) for place, sentence in _take(fields, whole, (), draft)]
    if problems := [*document.problems, *mistakes]:
        raise InvalidJob(problems, source=source)
    metadata, given = fields.setdefault("metadata", {}), fields.setdefault("spec", {})
    (train_job if kind == "TrainJob" else pytorch_job)(fields, draft)
    if _MULTIKUEUE in (given.get("managedBy"), given.get("runPolicy", {}).get("managedBy")):
        draft.put("managedBy", _MULTIKUEUE)
    metadata.get("annotations", {}).pop(_APPLIED, None)
    if queue := metadata.get("labels", {}).pop(_QUEUE, None):
        draft.put("scheduling.queue", queue)
        draft.spec.pop("suspend", None)  # Kueue sets it until it admits the job
    own = {name: metadata[name] for name in ("name", "namespace", "labels", "annotations") if metadata.get(name)}
    job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": own, "spec": draft.spec}
    spec.of(job, source=source)
    return job, draft.said


def _take(value: Any, rule: Any, place: Place, draft: Draft) -> Iterator[tuple[Place, str]]:
    """Copy or drop a value and its fields according to a rule of the table. Yield the place of each field that is unknown or has
    the wrong type, with a sentence about it."""
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
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value if each is not None] if isinstance(value, list) else value


def _verbatim(place: Place) -> bool:
    return place[-1:] == ("value",) or place[-2:-1] in (("command",), ("args",), ("labels",), ("annotations",))


def train_job(document: Document, draft: Draft) -> None:
    """Translate a TrainJob, and add the labels and annotations in its spec to its metadata. Raises InvalidJob."""
    spec, metadata = document["spec"], document["metadata"]
    trainer = spec.get("trainer", {})
    runtime = spec.get("runtimeRef", {}).get("name", "")
    if other := _OTHERS.get(runtime.partition("-")[0]):
        raise draft.refusal(
            f"runtimeRef.name ({runtime})", f"is a runtime of {other}; Outlast trains what torchrun or python starts"
        )
    if runtime != "torch-distributed" or "image" not in trainer:
        image = "" if "image" in trainer else f", image {IMAGE}: --set image=NAME takes another"
        draft.say(f"runtimeRef.name ({runtime})", f"is taken for torch-distributed of Kubeflow Trainer 2.3, one node{image}")
    own = {name: trainer[name] for name in ("image", "command", "args", "env") if name in trainer}
    container = {"name": Pod.TRAINER, "image": IMAGE, "resources": trainer.get("resourcesPerNode", {}), **own}
    pod: Document = {"spec": {"containers": [container]}}
    for field, name, patch in _patches(spec):
        if name == "node":
            try:
                pod = overlay.merge(pod, named_trainer(patch, "node"), field)
            except ValueError as error:
                raise InvalidJob([(None, str(error))], source=draft.source) from error
        else:
            draft.say(f"{field} ({name})", "is dropped: an ElasticJob has pods that train, and no others")
    for part in (spec, *_templates(spec)):
        for name in ("labels", "annotations"):
            source = part if part is spec else part.get("metadata", {})
            metadata[name] = {**metadata.get(name, {}), **source.get(name, {})}
    draft.take_pod(pod, "trainer")
    draft.take_processes(str(trainer.get("numProcPerNode", "auto")), "trainer.numProcPerNode", cores=True)
    draft.take_sizes(trainer.get("numNodes", 1), "trainer.numNodes", elastic=True)
    for name, source in spec.get("initializer", {}).items():
        if uri := source.get("storageUri"):
            if uri.partition("://")[0] not in ("s3", "gs", "az"):
                ways = "is in no store that Outlast reads (s3, gs, az); put it there, or let the script download it"
                raise draft.refusal(f"initializer.{name}.storageUri ({uri})", ways)
            draft.spec.setdefault("data", []).append({"from": uri, "to": f"{Pod.CODE}/{name}"})
        if secret := source.get("secretRef", {}).get("name"):
            draft.spec.setdefault("secrets", []).append({"name": secret})


def _templates(spec: Document) -> list[Document]:
    return [each.get("trainingRuntimeSpec", {}).get("template", {}) for each in spec.get("runtimePatches", ())]


def _patches(spec: Document) -> Iterator[tuple[str, str, Document]]:
    """For each patch of pods, yield the field that contains it, the name of the Job that owns the pods, and the patch itself."""
    for n, each in enumerate(spec.get("podTemplateOverrides", ())):
        patch = {name: each[name] for name in ("metadata", "spec") if name in each}
        yield from ((f"podTemplateOverrides[{n}]", target.get("name", ""), patch) for target in each.get("targetJobs", ()))
    for n, template in enumerate(_templates(spec)):
        for job in template.get("spec", {}).get("replicatedJobs", ()):
            pod = job.get("template", {}).get("spec", {}).get("template", {})
            yield f"runtimePatches[{n}]", job.get("name", ""), pod


def pytorch_job(document: Document, draft: Draft) -> None:
    spec = document["spec"]
    specs = spec.get("pytorchReplicaSpecs")
    if not specs:
        raise draft.refusal("pytorchReplicaSpecs", "is missing; give Worker, with the pods that train")
    kind = "Worker" if "Worker" in specs else "Master"
    field, pod = f"pytorchReplicaSpecs.{kind}", specs[kind].get("template", {})
    if any(each.get("template") != pod for each in specs.values()):
        draft.say("pytorchReplicaSpecs.Master.template", "is dropped: all workers are alike, and have the template of Worker")
    draft.take_pod(named_trainer(pod, "pytorch"), f"{field}.template")
    elastic = spec.get("elasticPolicy", {})
    count = spec.get("nprocPerNode", elastic.get("nProcPerNode", "auto"))
    draft.take_processes(str(count), "nprocPerNode", cores=False)
    if least := elastic.get("minReplicas", elastic.get("maxReplicas")):
        draft.launcher.setdefault("nnodes", f"{least}:{elastic.get('maxReplicas', least)}")
    replicas = sum(each.get("replicas", 1) for each in specs.values())
    draft.take_sizes(replicas, f"{field}.replicas", elastic=False)
    if "maxRestarts" in elastic:  # torchrun's limit; backoffLimit limits pods' failures
        draft.spec.setdefault("restarts", {"limit": elastic["maxRestarts"]})
    restarts = specs[kind].get("restartPolicy", "OnFailure")
    if restarts == "Never":
        draft.put("restarts.limit", 0)
    elif restarts != "OnFailure":
        draft.say(f"{field}.restartPolicy ({restarts})", "is OnFailure here; code 78 alone is final at once")


def named_trainer(pod: Document, name: str) -> Document:
    """Return a pod template, or a patch of one, with the container `name` renamed to `trainer`."""
    spec = pod.get("spec", {})
    given = spec.get("containers", ())
    containers = [{**each, "name": Pod.TRAINER} if each.get("name") == name else each for each in given]
    return {**pod, "spec": {**spec, "containers": containers}}
