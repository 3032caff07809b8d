"""Documents of a job with any number of workers."""

from __future__ import annotations

import json
from typing import Any

from outlast.job.contract import Annotation, Label
from outlast.kubernetes.api import kinds
from outlast.kubernetes.operator.observed_job import RECEIVED_AT

NOW = 1_767_225_600.0


CREATED = "2025-12-31T00:00:00Z"


def documents(workers: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return the documents of a training job with this number of workers: the job, its pods, their Leases, the nodes."""
    ids = range(workers)
    world = {"generation": 1, "address": "10.0.0.0:1", "reason": "starts with all", "at": NOW - 600, "members": list(ids)}
    told = {"run": "train-01234567", "world": world, "formed": True}
    job = kinds.ELASTIC_JOB.document(
        {"name": "train", "namespace": "team", "uid": "0123456789", "generation": 1},
        spec={"image": "i", "module": "m", "workers": {"replicas": workers, "min": 1, "max": workers}},
        status={"state": "Running", "observedGeneration": 1, "startTime": CREATED, "rendezvous": told},
    )
    owner = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "name": "train", "uid": "0123456789"}
    pods, leases = [], []
    for id in ids:
        name = f"train-worker-{id}"
        labels = {Label.JOB: "train", Label.WORKER: str(id), Label.GENERATION: "1"}
        report = {
            "run": "train-01234567", "id": id, "standing": "training", "generation": 1, "since": NOW - 600,
            "address": "10.0.0.1:1", "failed": False,
        }  # fmt: skip
        meta = {"name": name, "namespace": "team", "uid": f"pod-{id}", "labels": labels, "creationTimestamp": CREATED}
        state = {"name": "worker", "ready": True, "state": {"running": {}}}
        spec = {"nodeName": f"node-{id % 8}", "containers": [{"name": "worker"}], "restartPolicy": "Never"}
        status = {"phase": "Running", "containerStatuses": [state]}
        pods.append({"metadata": {**meta, "ownerReferences": [owner]}, "spec": spec, "status": status})
        said = {Annotation.REPORT: json.dumps(report), Annotation.PROGRESS: json.dumps({"generation": 1, "step": 7})}
        noted = {"name": name, "labels": labels, "annotations": said}
        leases.append({"metadata": noted, "spec": {"holderIdentity": f"pod-{id}"}, RECEIVED_AT: NOW})
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return job, pods, leases, {f"node-{n}": {"metadata": {"name": f"node-{n}"}, "spec": {}, "status": ready} for n in range(8)}
