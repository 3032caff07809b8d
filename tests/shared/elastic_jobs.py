"""ElasticJob of the workshop, a document of elastic.pytorch.org."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import yaml

from operators import World, world  # noqa: F401  # the fixture
from outlast.kubernetes.operator.plan import Document
from outlast.kubernetes.torchelastic import torchrun_pod

START = 1_800_000_000.0


def text(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


WORKSHOP = """
apiVersion: elastic.pytorch.org/v1alpha1
kind: ElasticJob
metadata:
  name: cifar10-train
spec:
  rdzvEndpoint: etcd-service:2379
  minReplicas: 1
  maxReplicas: 128
  replicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: ExitCode
      template:
        apiVersion: v1
        kind: Pod
        spec:
          nodeSelector:
            beta.kubernetes.io/instance-type: c5.4xlarge
          containers:
            - name: elasticjob-worker
              image: 620266777012.dkr.ecr.us-west-2.amazonaws.com/pytorch-cpu:latest
              imagePullPolicy: Always
              command: ["torchrun"]
              args:
                - "--nproc_per_node=1"
                - "/workspace/cifar10-model-train.py"
                - "--epochs=10"
                - "--batch-size=128"
                - "--model-file=/efs-shared/cifar10-model.pth"
                - "/efs-shared/cifar-10-batches-py/"
              resources: {limits: {cpu: 32}}
              volumeMounts:
                - {name: efs-pv, mountPath: /efs-shared}
                - {name: dshm, mountPath: /dev/shm}
          volumes:
            - {name: efs-pv, persistentVolumeClaim: {claimName: efs-pvc}}
            - {name: dshm, emptyDir: {medium: Memory}}
"""
"""Manifest of the EKS workshop."""


def a_job(replicas: int | None = 2, *, policy: str | None = "ExitCode", worker: Document | None = None, **spec: Any) -> Document:
    """Return the workshop's job, without an etcd."""
    job: Document = yaml.safe_load(WORKSHOP)
    job["metadata"] = {"name": "cifar", "namespace": "team", "uid": "12345678-abcd", "creationTimestamp": text(START)}
    replica = {**torchrun_pod.worker(job), "replicas": replicas, "restartPolicy": policy, **(worker or {})}
    replica = {key: value for key, value in replica.items() if value is not None}
    more = {key: value for key, value in job["spec"].items() if key != "rdzvEndpoint"}
    return {**job, "spec": {**more, **spec, "replicaSpecs": {"Worker": replica}}}
