"""A `TrainJob` and a `PyTorchJob`: the fields that have no single counterpart in a job file."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.base.errors import InvalidJob
from outlast.job.contract import Pod
from outlast.kubernetes.kubeflow.draft import Document, Draft
from outlast.kubernetes.manifests import overlay

IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Image of the torch-distributed runtime in Kubeflow Trainer 2.3."""
_OTHERS = {"deepspeed": "MPI", "mlx": "MPI", "mpi": "MPI", "jax": "JAX", "xgboost": "XGBoost", "torchtune": "torchtune"}
"""The programs that Kubeflow's other runtimes start, by the first word of a runtime's name."""


def train_job(document: Document, draft: Draft) -> None:
    """Translate a TrainJob; labels and annotations in its spec are added to those of its metadata. Raises InvalidJob."""
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
    """Yield the field of each pod patch, with the name of the Job whose pods it changes."""
    for n, each in enumerate(spec.get("podTemplateOverrides", ())):
        patch = {name: each[name] for name in ("metadata", "spec") if name in each}
        yield from ((f"podTemplateOverrides[{n}]", target.get("name", ""), patch) for target in each.get("targetJobs", ()))
    for n, template in enumerate(_templates(spec)):
        for job in template.get("spec", {}).get("replicatedJobs", ()):
            pod = job.get("template", {}).get("spec", {}).get("template", {})
            yield f"runtimePatches[{n}]", job.get("name", ""), pod


def pytorch_job(document: Document, draft: Draft) -> None:
    """Translate a PyTorchJob. Raises InvalidJob."""
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
    if "maxRestarts" in elastic:  # torchrun's; backoffLimit is the pods'
        draft.spec.setdefault("restarts", {"limit": elastic["maxRestarts"]})
    restarts = specs[kind].get("restartPolicy", "OnFailure")
    if restarts == "Never":
        draft.put("restarts.limit", 0)
    elif restarts != "OnFailure":
        draft.say(f"{field}.restartPolicy ({restarts})", "is OnFailure here; code 78 alone is final at once")


def named_trainer(pod: Document, name: str) -> Document:
    """Return a pod template, or a patch of one, with the container `name` renamed to that of Outlast's."""
    spec = pod.get("spec", {})
    given = spec.get("containers", ())
    containers = [{**each, "name": Pod.TRAINER} if each.get("name") == name else each for each in given]
    return {**pod, "spec": {**spec, "containers": containers}}
