"""Jobs that get nowhere, each for one reason: what to apply to a cluster so that it comes about, and what it looked like there.

`recorded(name)` is what a cluster had to show; tests of `outlast why` read that. To record anew, in namespaces `<prefix>-<name>`
that are deleted afterwards, and to write what `outlast why` finds in what was recorded:

    KUBECONFIG=... python tests/shared/situations.py PREFIX [NAME...]
    python tests/shared/situations.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from outlast.job import contract, spec
from outlast.kubernetes import diagnosis, manifests
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
    """Job with the other documents in its namespace, and the sign that the situation has occurred."""

    fields: Document = field(default_factory=dict)
    """Fields of the job's `spec`."""
    there: tuple[Document, ...] = ()
    """Documents that exist in the namespace before the job."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the namespace."""
    topology: str = "indexed-job"
    until: str = "reason"
    """Word that appears in events or pods once the situation is visible."""
    words: tuple[str, ...] = ()


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
MAXIMUM: Document = {"type": "Container", "max": {"memory": "1Gi"}}
SITUATIONS: dict[str, Situation] = {
    "image-unreachable": Situation({"image": "127.0.0.1:5056/team/train:v9"}, until="ErrImagePull"),
    "image-never": Situation(
        {"image": "localhost/train:v9", "template": container(imagePullPolicy="Never")}, until="ErrImageNeverPull"
    ),
    "image-invalid": Situation({"image": "Team/Train:v9"}, until="InvalidImageName"),
    "gpu": Situation({"resources": {"gpu": 2}}, until="FailedScheduling"),
    "cpu": Situation({"resources": {"cpu": 64}}, until="FailedScheduling"),
    "memory": Situation({"resources": {"memory": "900Gi"}}, until="FailedScheduling"),
    "node-selector": Situation({"nodeSelector": {"disk": "nvme"}}, until="FailedScheduling"),
    "claim-missing": Situation({"volumes": [{"claim": "datasets", "to": "/data"}]}, until="FailedScheduling"),
    "claim-no-class": Situation(
        {"volumes": [{"claim": "datasets", "to": "/data"}]}, there=(claim("datasets"),), until="no storage class is set"
    ),
    "claim-wrong-class": Situation(
        {"volumes": [{"claim": "datasets", "to": "/data"}]},
        there=(claim("datasets", storageClassName="fast"),),
        until="ProvisioningFailed",
    ),
    "secret-missing": Situation({"secrets": [{"name": "hf-token"}]}, until="CreateContainerConfigError"),
    "secret-volume-missing": Situation({"secrets": [{"name": "hf-token", "to": "/secrets"}]}, until="FailedMount"),
    "configmap-missing": Situation(
        {"template": container(envFrom=[{"configMapRef": {"name": "settings"}}])}, until="CreateContainerConfigError"
    ),
    "quota": Situation({"template": SLEEP}, there=(quota(pods="1"),), until="exceeded quota"),
    "quota-unset": Situation({}, there=(quota(**{"requests.cpu": "4"}),), until="must specify"),
    "limit-range": Situation(
        {"resources": {"memory": "2Gi"}},
        there=({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "team"}, "spec": {"limits": [MAXIMUM]}},),
        until="maximum memory usage",
    ),
    "pod-security": Situation(
        {"template": container(securityContext={"privileged": True, "allowPrivilegeEscalation": True})},
        labels={"pod-security.kubernetes.io/enforce": "restricted"},
        until="violates PodSecurity",
    ),
    "account-missing": Situation({"template": {"spec": {"serviceAccountName": "trainer"}}}, until="serviceaccount"),
    "priority-missing": Situation({"scheduling": {"priorityClassName": "urgent"}}, until="no PriorityClass"),
    "out-of-memory": Situation(
        {
            "resources": {"memory": "128Mi"},
            "restarts": {"limit": 0},
            "workers": {"replicas": 1},
            "template": python("x = [bytearray(1 << 20) for _ in range(1 << 20)]"),
        },
        until="OOMKilled",
    ),
    "command-missing": Situation({"template": container(command=["outlast-agent"])}, until="executable file not found"),
    "script-fails": Situation(
        {"restarts": {"limit": 0}, "workers": {"replicas": 1}, "template": python(FAILS)}, until="BackoffLimitExceeded"
    ),
    "configuration-wrong": Situation(
        {
            "workers": {"replicas": 1},
            "template": container(env=[{"name": "OUTLAST_JOB_FILE", "value": "/etc/outlast/jobs.yaml"}]),
        },
        until="PodFailurePolicy",
    ),
    "probe-fails": Situation({"template": SLEEP}, until='"exitCode": 137'),
    "suspended": Situation({"suspend": True}, until="Suspended"),
    "deadline": Situation({"activeDeadlineSeconds": 5, "template": SLEEP}, until="DeadlineExceeded"),
    "finished": Situation({"workers": {"replicas": 1}, "template": container(command=["true"])}, until="Completed"),
    "alone": Situation(
        {
            "workers": {"replicas": 2},
            "template": {
                "spec": {
                    **SLEEP["spec"],
                    "affinity": {
                        "podAntiAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": [
                                {
                                    "topologyKey": "kubernetes.io/os",
                                    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "worker"}},
                                }
                            ]
                        }
                    },
                }
            },
        },
        until="anti-affinity",
    ),
}


def job(name: str) -> spec.Job:
    usual: Document = {
        "image": IMAGE,
        "module": "outlast.recipes.smoke",
        "workers": {"replicas": 2},
        "output": "/out",
        "interruption": {"grace": "1s"},
    }
    fields = {key: value for key, value in {**usual, **SITUATIONS[name].fields}.items() if value is not None}
    return spec.parse(
        yaml.safe_dump({"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "train"}, "spec": fields})
    )


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


def findings(name: str) -> list[Finding]:
    return [Finding(**{**each, "evidence": tuple(each["evidence"])}) for each in _findings()[name]]


@functools.cache
def _findings() -> Document:
    return dict(yaml.safe_load(FINDINGS.read_text()))


def noted(it: Snapshot) -> float:
    """Return the approximate time of the recording: the time of its last event."""
    return datetime.fromisoformat(max(filter(None, map(event_time, it.events)))).timestamp()


# On a cluster


def kubectl(*words: str, documents: list[Document] | None = None) -> str:
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}) if documents is not None else None
    done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def begin(name: str, namespace: str) -> None:
    it = SITUATIONS[name]
    kubectl(
        "apply",
        "-f",
        "-",
        documents=[{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": dict(it.labels)}}],
    )
    if it.there:
        kubectl("apply", "-n", namespace, "-f", "-", documents=list(it.there))
    documents = json.dumps(manifests.render(job(name), it.topology, namespace=namespace))
    documents = documents.replace(render_request.OPERATOR_IMAGE, IMAGE)  # from which pods copy Outlast if their image lacks it
    kubectl("apply", "-n", namespace, "-f", "-", documents=json.loads(documents))


def visible(name: str, namespace: str) -> bool:
    return SITUATIONS[name].until in kubectl("get", "jobs,pods,events,pvc", "-n", namespace, "-o", "json")


def wait(until: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


KINDS = ("jobs", "pods", "events", "persistentvolumeclaims", "resourcequotas", "limitranges", "nodes", "storageclasses")


def record(name: str, namespace: str) -> Document:
    """Return the documents of a namespace, without those that no rule needs."""
    found: Document = {}
    for kind in KINDS:
        found[kind] = json.loads(kubectl("get", kind, "-n", namespace, "-o", "json"))["items"]
    for kind in ("secrets", "configmaps"):
        found[kind] = [each.partition("/")[2] for each in kubectl("get", kind, "-n", namespace, "-o", "name").split()]
    found["logs"] = {}
    for pod in found["pods"]:
        with contextlib.suppress(AssertionError):  # it has none
            it = pod["metadata"]["name"]
            found["logs"][it] = kubectl("logs", "-n", namespace, it, "--tail=40").splitlines()
    return dict(json.loads(json.dumps(less(found)).replace(namespace, "team")))


def less(found: Document) -> Document:
    """Remove the fields and events that no rule could need."""
    for kind in KINDS:
        for item in found[kind]:
            item["metadata"].pop("managedFields", None)
            item["metadata"].get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    for node in found["nodes"]:
        node["metadata"] = {key: node["metadata"][key] for key in ("name", "labels")}
        node["status"] = {key: node["status"][key] for key in ("allocatable", "conditions")}
    for template in [*found["pods"], *(job["spec"]["template"] for job in found["jobs"])]:
        for each in template["spec"]["containers"]:
            for key in ("env", "volumeMounts", "startupProbe", "livenessProbe", "readinessProbe", "securityContext", "ports"):
                each.pop(key, None)
    often: dict[tuple[str, str, str], int] = {}
    kept = []
    for event in reversed(found["events"]):
        key = (event["involvedObject"]["kind"], event["involvedObject"].get("fieldPath", ""), event["reason"])
        often[key] = often.get(key, 0) + 1
        if often[key] <= 3:
            kept.append(event)
    return {**found, "events": kept[::-1]}


if __name__ == "__main__":
    prefix, *names = sys.argv[1:] or [""]
    HERE.mkdir(exist_ok=True)
    for name in (names or list(SITUATIONS)) if prefix else ():
        namespace = f"{prefix}-{name}"
        try:
            begin(name, namespace)
            if wait(lambda: visible(name, namespace), 200):  # noqa: B023 (it is called here and now)
                time.sleep(2)  # for what comes with it
                (HERE / f"{name}.json").write_text(json.dumps(record(name, namespace)) + "\n")
            else:
                print(f"{name}: there is nothing to see")
        finally:
            subprocess.run(["kubectl", "delete", "namespace", namespace, "--wait=false"], check=False, stdout=subprocess.DEVNULL)
    found = {name: [dataclasses.asdict(each) for each in diagnosis.causes(seen(name), NOW)] for name in SITUATIONS}
    FINDINGS.write_text(yaml.safe_dump(json.loads(json.dumps(found)), sort_keys=False, width=130, allow_unicode=True))
