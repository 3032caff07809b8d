"""Jobs that get nowhere, each for one reason: what to apply to a cluster so that it comes about, and what it looked like there.

`recorded(name)` is what a cluster had to show; tests of `outlast why` read that. To write what `outlast why` finds in it:

    python tests/shared/situations.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from namespaces import Namespace
from outlast.job import spec
from outlast.kubernetes import diagnosis, manifests
from outlast.kubernetes.api import kinds
from outlast.kubernetes.diagnosis import Finding
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_time
from outlast.kubernetes.manifests import render_request

HERE = Path(__file__).parent / "recorded"
FINDINGS = HERE / "findings.yaml"
NOW = 1_800_000_000.0
"""When `findings` are looked for."""
RECORDED_IMAGE = "docker.io/library/outlast:test"
IMAGE = os.environ.get("OUTLAST_TEST_IMAGE", RECORDED_IMAGE)
Document = dict[str, Any]


@dataclass(frozen=True)
class Situation:
    """Job with the other documents in its namespace."""

    fields: Document = field(default_factory=dict)
    """Fields of the job's `spec`."""
    there: tuple[Document, ...] = ()
    """Documents that exist in the namespace before the job."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the namespace."""


def quota(**hard: str) -> Document:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": hard}}


def claim(name: str, **more: str) -> Document:
    wanted = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, **more}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": wanted}


def container(**fields: Any) -> Document:
    """Return a template that changes the worker's container."""
    return {"spec": {"containers": [{"name": "worker", **fields}]}}


def python(code: str) -> Document:
    return container(command=["python", "-c", code])


DATA = [{"claim": "datasets", "to": "/data"}]
FAILS = """
import sys, traceback
try:
    raise ValueError("no labels in /data/labels.csv")
except ValueError:
    traceback.print_exc()
print("outlast | worker 0: training failed with exit code 1 (exit 1)", flush=True)
sys.exit(1)
"""
"""Script that fails, and the end of its log."""
SLEEP = container(command=["sleep", "600"])
ONE: Document = {"workers": {"replicas": 1}}
ONCE: Document = {**ONE, "restarts": {"limit": 0}}
MAXIMUM: Document = {"type": "Container", "max": {"memory": "1Gi"}}
WORKERS = {"matchLabels": {"app.kubernetes.io/component": "worker"}}
AWAY = [{"topologyKey": "kubernetes.io/os", "labelSelector": WORKERS}]
APART = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": AWAY}}
SITUATIONS: dict[str, Situation] = {
    "image-unreachable": Situation({"image": "127.0.0.1:5056/team/train:v9"}),
    "image-never": Situation({"image": "localhost/train:v9", "template": container(imagePullPolicy="Never")}),
    "image-invalid": Situation({"image": "Team/Train:v9"}),
    "gpu": Situation({"resources": {"gpu": 2}}),
    "cpu": Situation({"resources": {"cpu": 64}}),
    "memory": Situation({"resources": {"memory": "900Gi"}}),
    "node-selector": Situation({"nodeSelector": {"disk": "nvme"}}),
    "claim-missing": Situation({"volumes": DATA}),
    "claim-no-class": Situation({"volumes": DATA}, there=(claim("datasets"),)),
    "claim-wrong-class": Situation({"volumes": DATA}, there=(claim("datasets", storageClassName="fast"),)),
    "secret-missing": Situation({"secrets": [{"name": "hf-token"}]}),
    "secret-volume-missing": Situation({"secrets": [{"name": "hf-token", "to": "/secrets"}]}),
    "configmap-missing": Situation({"template": container(envFrom=[{"configMapRef": {"name": "settings"}}])}),
    "quota": Situation({"template": SLEEP}, there=(quota(pods="1"),)),
    "quota-unset": Situation({}, there=(quota(**{"requests.cpu": "4"}),)),
    "limit-range": Situation(
        {"resources": {"memory": "2Gi"}},
        there=({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "team"}, "spec": {"limits": [MAXIMUM]}},),
    ),
    "pod-security": Situation(
        {"template": container(securityContext={"privileged": True, "allowPrivilegeEscalation": True})},
        labels={"pod-security.kubernetes.io/enforce": "restricted"},
    ),
    "account-missing": Situation({"template": {"spec": {"serviceAccountName": "trainer"}}}),
    "priority-missing": Situation({"scheduling": {"priorityClassName": "urgent"}}),
    "out-of-memory": Situation(
        {"resources": {"memory": "128Mi"}, **ONCE, "template": python("x = [bytearray(1 << 20) for _ in range(1 << 20)]")}
    ),
    "command-missing": Situation({"template": container(command=["outlast-agent"])}),
    "script-fails": Situation({**ONCE, "template": python(FAILS)}),
    "configuration-wrong": Situation(
        {**ONE, "template": container(env=[{"name": "OUTLAST_JOB_FILE", "value": "/etc/outlast/jobs.yaml"}])}
    ),
    "probe-fails": Situation({"template": SLEEP}),
    "suspended": Situation({"suspend": True}),
    "deadline": Situation({"activeDeadlineSeconds": 5, "template": SLEEP}),
    "finished": Situation({**ONE, "template": container(command=["true"])}),
    "alone": Situation({"template": {"spec": {**SLEEP["spec"], "affinity": APART}}}),
}


def job(name: str) -> spec.Job:
    usual: Document = {"image": IMAGE, "module": "outlast.recipes.smoke", "workers": {"replicas": 2}, "output": "/out"}
    fields = {**usual, "interruption": {"grace": "1s"}, **SITUATIONS[name].fields}
    return spec.parse(json.dumps(kinds.ELASTIC_JOB.document({"name": "train"}, spec=fields)))


# As it was recorded


def recorded(name: str) -> Document:
    return dict(json.loads((HERE / f"{name}.json").read_text()))


def seen(name: str) -> Snapshot:
    """Return the recorded documents, as rules receive them."""
    found = recorded(name)
    return Snapshot(
        name="train",
        namespace="team",
        workload=found["jobs"][0],
        pods=tuple(found["pods"]),
        events=tuple(found["events"]),
        nodes=tuple(found["nodes"]),
        claims=tuple(found["persistentvolumeclaims"]),
        storage_classes=tuple(found["storageclasses"]),
        secrets=frozenset(found["secrets"]),
        config_maps=frozenset(found["configmaps"]),
        logs=found["logs"],
    )


@functools.cache
def _findings() -> Document:
    return dict(yaml.safe_load(FINDINGS.read_text()))


def findings(name: str) -> list[Finding]:
    return [Finding(**{**each, "evidence": tuple(each["evidence"])}) for each in _findings()[name]]


def noted(it: Snapshot) -> float:
    """Return the approximate time of the recording: the time of its last event."""
    return datetime.fromisoformat(max(filter(None, map(event_time, it.events)))).timestamp()


# On a cluster


def begin(name: str, namespace: Namespace) -> None:
    documents = json.dumps(manifests.render(job(name).in_namespace(namespace.name), "indexed-job"))
    documents = documents.replace(render_request.OPERATOR_IMAGE, IMAGE)  # from which pods copy Outlast if their image lacks it
    namespace.apply([*SITUATIONS[name].there, *json.loads(documents)])


if __name__ == "__main__":
    found = {name: [dataclasses.asdict(each) for each in diagnosis.causes(seen(name), NOW)] for name in SITUATIONS}
    FINDINGS.write_text(yaml.safe_dump(json.loads(json.dumps(found)), sort_keys=False, width=130, allow_unicode=True))
