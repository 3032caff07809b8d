"""A `TrainJob` and a `PyTorchJob`, whose fields are known and of the right types, as ElasticJobs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.job.contract import Pod
from outlast.kubernetes.kubeflow.draft import Document, Draft, trainer_of
from outlast.kubernetes.manifests import overlay

IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Image of the runtime torch-distributed of Kubeflow Trainer 2.3."""
_OTHERS = {"deepspeed": "MPI", "mlx": "MPI", "mpi": "MPI", "jax": "JAX", "xgboost": "XGBoost", "torchtune": "torchtune"}
"""What Kubeflow's other runtimes start, by the first word of their names."""
_MULTIKUEUE = "kueue.x-k8s.io/multikueue"


def train_job(document: Document, draft: Draft) -> Document:
    """Translate a TrainJob. Raises InvalidJob."""
    spec, metadata = document["spec"], document["metadata"]
    trainer = spec.get("trainer") or {}
    name = (spec.get("runtimeRef") or {}).get("name") or ""
    if not name:
        raise draft.refusal("runtimeRef.name", "is missing; add it")
    if other := _OTHERS.get(name.partition("-")[0]):
        raise draft.refusal(
            f"runtimeRef.name ({name})", f"is a runtime of {other}; Outlast trains what torchrun or python starts"
        )
    if name != "torch-distributed" or not trainer.get("image"):
        known = "torch-distributed of Kubeflow Trainer 2.3, one node"
        image = "" if trainer.get("image") else f", image {IMAGE}: --set image=NAME takes another"
        draft.say(f"runtimeRef.name ({name})", f"is taken for {known}{image}")
    own = {name: trainer.get(name) for name in ("command", "args", "env")}
    container = {"name": Pod.TRAINER, "image": trainer.get("image") or IMAGE, "resources": trainer.get("resourcesPerNode"), **own}
    labels, annotations = ({**(metadata.get(name) or {}), **(spec.get(name) or {})} for name in ("labels", "annotations"))
    pod: Document = {"spec": {"containers": [container]}}
    for field, name, patch in _patches(spec):
        if name == "node":
            try:
                pod = overlay.merge(pod, trainer_of(patch, "node"), "template")
            except ValueError as error:
                raise draft.refusal(f"{field}:", str(error)) from error
        elif name:
            draft.say(f"{field} ({name})", "is dropped: an ElasticJob has pods that train, and no others")
        else:
            labels |= patch.get("labels") or {}
            annotations |= patch.get("annotations") or {}
    torchrun = draft.take_pod(pod, "trainer")
    count = trainer.get("numProcPerNode")
    draft.take_processes(str(count or "auto"), "trainer.numProcPerNode", torchrun=torchrun, cores=True)
    draft.take_sizes(1 if trainer.get("numNodes") is None else trainer["numNodes"], "trainer.numNodes")
    for name, source in (spec.get("initializer") or {}).items():
        _take_initializer(source or {}, name, draft)
    draft.spec |= {name: spec.get(name) or None for name in ("suspend", "activeDeadlineSeconds")}
    draft.spec["managedBy"] = _MULTIKUEUE if spec.get("managedBy") == _MULTIKUEUE else None
    return draft.job({**metadata, "labels": labels, "annotations": annotations})


def _patches(spec: Document) -> Iterator[tuple[str, str, Document]]:
    """Yield the field of each patch with the name of the Job whose pods it changes; without a name, it has metadata of all."""
    for n, each in enumerate(spec.get("podTemplateOverrides") or ()):
        patch = {name: each[name] for name in ("metadata", "spec") if each.get(name)}
        yield from ((f"podTemplateOverrides[{n}]", target["name"], patch) for target in each.get("targetJobs") or ())
    for n, each in enumerate(spec.get("runtimePatches") or ()):
        template = (each.get("trainingRuntimeSpec") or {}).get("template") or {}
        yield f"runtimePatches[{n}]", "", template.get("metadata") or {}
        for job in (template.get("spec") or {}).get("replicatedJobs") or ():
            pod = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
            yield f"runtimePatches[{n}]", job["name"], pod


def _take_initializer(source: Document, name: str, draft: Draft) -> None:
    """Bring what an initializer of Kubeflow downloads to the same place."""
    if uri := source.get("storageUri"):
        if uri.partition("://")[0] not in ("s3", "gs", "az"):
            ways = "is in no store that Outlast reads (s3, gs, az); put it there, or let the script download it"
            raise draft.refusal(f"initializer.{name}.storageUri ({uri})", ways)
        draft.spec.setdefault("data", []).append({"from": uri, "to": f"{Pod.CODE}/{name}"})
    if secret := (source.get("secretRef") or {}).get("name"):
        draft.spec.setdefault("secrets", []).append({"name": secret})
    if source.get("env"):
        draft.say(f"initializer.{name}.env", "is dropped: variables for the store belong into trainer.env")


def pytorch_job(document: Document, draft: Draft) -> Document:
    """Translate a PyTorchJob. Raises InvalidJob."""
    spec = document["spec"]
    specs = {kind: each for kind, each in (spec.get("pytorchReplicaSpecs") or {}).items() if each}
    if not specs:
        raise draft.refusal("pytorchReplicaSpecs", "is missing; give Worker, with the pods that train")
    kind = "Worker" if "Worker" in specs else "Master"
    field, pod = f"pytorchReplicaSpecs.{kind}", specs[kind].get("template") or {}
    if any(each.get("template") != pod for each in specs.values()):
        draft.say("pytorchReplicaSpecs.Master.template", "is dropped: all workers are alike, and have the template of Worker")
    torchrun = draft.take_pod(trainer_of(pod, "pytorch"), f"{field}.template")
    elastic, policy = spec.get("elasticPolicy") or {}, spec.get("runPolicy") or {}
    count = spec.get("nprocPerNode") or elastic.get("nProcPerNode") or "auto"
    draft.take_processes(str(count), "nprocPerNode", torchrun=torchrun, cores=False)
    replicas = sum(1 if each.get("replicas") is None else each["replicas"] for each in specs.values())
    if least := elastic.get("minReplicas") or elastic.get("maxReplicas"):
        draft.launcher.setdefault("nnodes", f"{least}:{elastic.get('maxReplicas') or least}")
    draft.take_sizes(replicas, f"{field}.replicas")
    restarts = specs[kind].get("restartPolicy") or "OnFailure"
    limit = next((each for each in (policy.get("backoffLimit"), elastic.get("maxRestarts")) if each is not None), None)
    draft.spec["restarts"] = {"limit": 0 if restarts == "Never" else limit}
    if restarts not in ("Never", "OnFailure"):
        draft.say(f"{field}.restartPolicy ({restarts})", "is OnFailure here; code 78 alone is final at once")
    queue = policy.get("schedulingPolicy") or {}
    draft.spec["scheduling"] |= {"queue": queue.get("queue")}
    if queue.get("priorityClass"):
        draft.spec["scheduling"]["priorityClassName"] = queue["priorityClass"]
    for name in ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds"):
        draft.spec[name] = policy.get(name)
    draft.spec |= {"suspend": policy.get("suspend") or None}
    draft.spec["managedBy"] = _MULTIKUEUE if policy.get("managedBy") == _MULTIKUEUE else None
    dropped = {
        "elasticPolicy": ("workers find one another without it", ("rdzv", "standalone")),
        "runPolicy.schedulingPolicy": ("a gang is workers.min, and waits as long as it must", ("min", "schedule")),
    }
    for part, (why, starts) in dropped.items():
        if names := [name for name in (elastic if part == "elasticPolicy" else queue) if name.startswith(starts)]:
            draft.say(f"{part}: {', '.join(names)}", f"is dropped: {why}")
    if "metrics" in elastic:
        draft.say("elasticPolicy.metrics", "is dropped: kubectl autoscale elasticjob makes such an autoscaler")
    return draft.job(document["metadata"])
