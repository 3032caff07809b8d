"""A spot machine goes, on a real cluster: the metadata service is ours, the node and its pods are the cluster's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

import imds
from imds import Imds
from outlast.job import contract
from outlast.job.contract import Annotation
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.nodewatch.metadata import Metadata
from outlast.kubernetes.nodewatch.node_watcher import Watcher
from waits import until

pytestmark = pytest.mark.cluster

Document = dict[str, Any]


class OwnPods(api.Cluster):
    """A cluster of which the watcher sees the pods of one namespace only: others on the node are none of a test's business."""

    def list_(self, kind: kinds.Kind, **options: Any) -> list[Document]:
        if kind == kinds.POD:
            options |= {"everywhere": False, "namespace": self.namespace}
        return super().list_(kind, **options)


@pytest.fixture
def cluster() -> Iterator[api.Cluster]:
    found = api.connect(namespace=f"spot-{os.urandom(3).hex()}")
    own = OwnPods(found.connection, context=found.context, namespace=found.namespace)
    own.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": own.namespace}})
    yield own
    own.delete(kinds.NAMESPACE, own.namespace)
    own.close()


def a_pod(name: str, node: str) -> Document:
    """A pod that saves on SIGTERM: it ends after two seconds."""
    command = ["sh", "-c", "trap 'sleep 2; exit 75' TERM; while :; do sleep 0.1; done"]
    image = os.environ.get("OUTLAST_TEST_IMAGE", "docker.io/library/outlast:test")
    container = {"name": "c", "image": image, "imagePullPolicy": "IfNotPresent", "command": command}
    container |= {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    spec = {"nodeName": node, "restartPolicy": "Never", "containers": [container]}
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    meta = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {**spec, "volumes": volumes}}


def test_a_node_is_tainted_drained_against_a_budget_and_taken_back(cluster: api.Cluster) -> None:
    before = next(each for each in cluster.list_(kinds.NODE) if not each["spec"].get("unschedulable"))
    name = before["metadata"]["name"]
    for pod in ("free", "kept"):
        cluster.create(a_pod(pod, name))
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}}
    cluster.create({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "kept"}, "spec": budget})
    until(lambda: all(each["status"]["phase"] == "Running" for each in cluster.list_(kinds.POD)))
    later = [0.0]
    with imds.serving(Imds()) as service:
        source = Metadata(service.address, timeout_s=30)
        watcher = Watcher(before, source, cluster, clock=lambda: time.time() + later[0])
        try:
            watcher.tick()
            begun = time.time()
            service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(begun + 45))
            while time.time() < begun + 45:
                time.sleep(watcher.tick())
                gone = [each["metadata"]["name"] for each in cluster.list_(kinds.POD) if each["status"]["phase"] == "Running"]
                if not gone:
                    break
            assert time.time() < begun + 45
            node = cluster.get(kinds.NODE, name)
            assert node["spec"]["unschedulable"]
            assert contract.LEAVING in [each["key"] for each in node["spec"]["taints"]]
            assert node["metadata"]["annotations"][Annotation.LEAVING_AT] == pod_status.rfc3339(begun + 45)
        finally:
            service.documents.pop(imds.SPOT, None)
            later[0] = 120.0
            watcher.tick()
            time.sleep(1.1)
            watcher.tick()
    after = cluster.get(kinds.NODE, name)
    assert after["spec"].get("taints") == before["spec"].get("taints")
    assert not after["spec"].get("unschedulable")
