"""A job of torchelastic on a real cluster: a document for the archived controller, its script and its torchrun.

outlast install --image registry/outlast:dev --wait
KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/kubernetes/test_torchelastic_cluster.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from namespaces import Document, Namespace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LEGACY = "elasticjobs.elastic.pytorch.org"
SCRIPT = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(STEPS):
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: step {step}, {int(total)} took part", flush=True)
    time.sleep(0.2)
dist.barrier()
print("the end", flush=True)
"""


def a_job(name: str, script: str, **workers: object) -> Document:
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "elasticjob-worker",
        "image": os.environ["OUTLAST_TEST_IMAGE"],
        "command": ["sh", "-c", 'printf "%s" "$SCRIPT" > /tmp/train.py && exec torchrun --nproc-per-node=1 /tmp/train.py'],
        "env": [
            {"name": "SCRIPT", "value": script},
            {"name": "HOME", "value": "/tmp"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "securityContext": confined,
        "resources": {"requests": {"cpu": "200m", "memory": "500Mi"}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    template = {"spec": {"containers": [container], "securityContext": user}}
    spec = {
        "rdzvEndpoint": "etcd-service:2379",
        "minReplicas": 1,
        "maxReplicas": 3,
        "replicaSpecs": {"Worker": {"replicas": 2, "restartPolicy": "ExitCode", "template": template, **workers}},
    }
    return {"apiVersion": "elastic.pytorch.org/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}, "spec": spec}


def status(namespace: Namespace, name: str) -> Document:
    return dict(json.loads(namespace.kubectl("get", LEGACY, name, "-o", "json")).get("status") or {})


def condition(namespace: Namespace, name: str) -> str:
    """The newest condition that is true, as the archived controller named them, but for what is limited."""
    true = [each["type"] for each in status(namespace, name).get("conditions", ()) if each["status"] == "True"]
    return next((each for each in reversed(true) if each != "Limited"), "")


def becomes(namespace: Namespace, name: str, wanted: str) -> None:
    namespace.wait(lambda: condition(namespace, name) == wanted, lambda: str(status(namespace, name)))


def says(namespace: Namespace, pod: str) -> Callable[[str], bool]:
    return lambda what: what in namespace.kubectl("logs", pod, fails=True)


def seen(namespace: Namespace, pod: str, what: str) -> None:
    namespace.wait(lambda: says(namespace, pod)(what), lambda: namespace.kubectl("logs", pod, fails=True)[-2000:])


def replaced(namespace: Namespace, pod: str) -> None:
    """Delete a pod at once, and wait for the next of its name."""
    uid = namespace.kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
    namespace.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    def another() -> bool:
        return namespace.kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}", fails=True) not in ("", uid)

    namespace.wait(another, lambda: namespace.kubectl("get", "pods"))


def test_workers_are_replaced_scaled_and_end(namespace: Namespace) -> None:
    namespace.apply([a_job("old", SCRIPT.replace("STEPS", "400"))])
    becomes(namespace, "old", "Running")
    for index in (0, 1):
        seen(namespace, f"old-worker-{index}", "2 took part")
    limited = next(each for each in status(namespace, "old")["conditions"] if each["type"] == "Limited")
    assert "rdzvEndpoint etcd-service:2379 is not used: workers meet at worker 0" in limited["message"]
    for index in (1, 0):
        replaced(namespace, f"old-worker-{index}")
        seen(namespace, f"old-worker-{index}", "2 took part")
    patch = json.dumps({"spec": {"replicaSpecs": {"Worker": {"replicas": 3}}}})
    namespace.kubectl("patch", LEGACY, "old", "--type=merge", "-p", patch)
    seen(namespace, "old-worker-2", "3 took part")
    becomes(namespace, "old", "Succeeded")
    found = status(namespace, "old")
    assert found["replicaStatuses"]["Worker"]["succeeded"] == 3
    namespace.kubectl("delete", LEGACY, "old")
    namespace.wait(
        lambda: not namespace.kubectl("get", "pods,services", "-l", "job-name=old", "-o", "name"),
        lambda: namespace.kubectl("get", "pods,services"),
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda spec: spec.update(minReplicas=4), "minReplicas"),
        (lambda spec: spec["replicaSpecs"]["Worker"].update(replicas=-1), "replicas"),
        (lambda spec: spec["replicaSpecs"].clear(), "Worker"),
    ],
)
def test_what_makes_no_sense_is_refused(change: Callable[[Document], object], sentence: str, namespace: Namespace) -> None:
    job = a_job("refused", "pass")
    change(job["spec"])
    with pytest.raises(AssertionError, match=sentence):
        namespace.kubectl("create", "-f", "-", given=job)
