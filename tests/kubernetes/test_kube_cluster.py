"""`kube` against a real cluster: what only a real API server and real nodes do."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from outlast.base import errors
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds

pytestmark = pytest.mark.cluster

SERVER = """
import http.server
print('begun', flush=True)
http.server.HTTPServer(('', 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[api.Cluster]:
    namespace = f"kube-{uuid.uuid4().hex[:8]}"
    cluster = api.connect(namespace=namespace)
    cluster.create(kinds.NAMESPACE.document({"name": namespace}))
    yield cluster
    cluster.delete(kinds.NAMESPACE, namespace)
    cluster.close()


@pytest.fixture(scope="module")
def pod(cluster: api.Cluster) -> str:
    """A pod that serves files on port 8080."""
    image = os.environ.get("OUTLAST_TEST_IMAGE", "docker.io/library/outlast:test")
    container = {"name": "worker", "image": image, "imagePullPolicy": "IfNotPresent", "command": ["python3", "-c", SERVER]}
    container |= {"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1}}
    spec = {"terminationGracePeriodSeconds": 1, "containers": [container]}
    cluster.apply(kinds.POD.document({"name": "server"}, spec=spec))
    with api.within(120) as stop:
        for change in cluster.watch(kinds.POD, stop=stop):
            states = change.document.get("status", {}).get("containerStatuses") or ()
            if any(state["ready"] for state in states):
                return "server"
    raise AssertionError("the pod is not ready within 120 s")


def test_unknown_fields_are_refused(cluster: api.Cluster) -> None:
    document = kinds.CONFIG_MAP.document({"name": "x"}, dta={})
    with pytest.raises(errors.Refused, match=r"cannot be applied: .* \.dta: field not declared in schema"):
        cluster.apply(document, dry_run=True)
    with pytest.raises(errors.Refused, match='unknown field "dta"'):
        cluster.create(document)


def test_a_namespace_that_is_not_there_is_named(cluster: api.Cluster) -> None:
    with pytest.raises(errors.Absent, match="there is no namespace kube-nowhere; create it"):
        cluster.apply(kinds.CONFIG_MAP.document({"name": "x", "namespace": "kube-nowhere"}))


def test_commands_are_run_with_input_output_and_exit_code(cluster: api.Cluster, pod: str) -> None:
    for _ in range(5):  # one after the other: a connection that has ended must not disturb the next
        ended = cluster.exec_(pod, ["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in\n")
        assert ended == api.Ended(3, b"in\n", b"err\n")
    with pytest.raises(errors.Refused, match="nothing can be run in Pod server"):
        cluster.exec_(pod, ["no-such-command"])
    with pytest.raises(errors.Absent, match="Pod nobody"):
        cluster.exec_("nobody", ["true"])


def test_pods_answer_by_way_of_the_api_server(cluster: api.Cluster, pod: str) -> None:
    assert "Directory listing" in cluster.proxy(pod, 8080, "/")
    with pytest.raises(errors.Unanswered, match="does not answer on its port"):
        cluster.proxy(pod, 8099, "/")


def test_a_followed_log_ends_when_it_is_stopped(cluster: api.Cluster, pod: str) -> None:
    stop = api.Stop()
    lines = cluster.logs(pod, api.LogOptions(follow=True), stop=stop)
    assert next(lines) == "begun"
    threading.Timer(0.2, stop.set).start()
    begun = time.monotonic()
    list(lines)
    assert time.monotonic() - begun < 10
