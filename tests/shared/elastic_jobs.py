"""ElasticJob of the workshop, a document of elastic.pytorch.org."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

from outlast.kubernetes.operator.plan import Document

START = 1_800_000_000.0


def text(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


CONTAINER = {
    "name": "elasticjob-worker", "image": "620266777012.dkr.ecr.us-west-2.amazonaws.com/pytorch-cpu:latest",
    "command": ["torchrun"], "args": ["--nproc_per_node=1", "/workspace/cifar10-model-train.py", "--epochs=10"],
    "resources": {"limits": {"cpu": 32}}, "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
}  # fmt: skip
VOLUMES = [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]
NODES = {"beta.kubernetes.io/instance-type": "c5.4xlarge"}


def a_job(replicas: int | None = 2, *, policy: str | None = "ExitCode", worker: Document | None = None, **spec: Any) -> Document:
    """Return the job of the EKS workshop, without its etcd."""
    template = {"nodeSelector": NODES, "containers": [CONTAINER], "volumes": VOLUMES}
    replica = {"replicas": replicas, "restartPolicy": policy, "template": {"spec": template}, **(worker or {})}
    replica = {key: value for key, value in replica.items() if value is not None}
    meta = {"name": "cifar", "namespace": "team", "uid": "12345678-abcd", "creationTimestamp": text(START)}
    whole = {"minReplicas": 1, "maxReplicas": 128, **spec, "replicaSpecs": {"Worker": replica}}
    job = {"apiVersion": "elastic.pytorch.org/v1alpha1", "kind": "ElasticJob", "metadata": meta, "spec": whole}
    return copy.deepcopy(job)
