"""The requests of operator and node watcher, as another project, kmock, understands them: resources, names, actions.

Only the shape of requests is looked at; how an API server behaves is the matter of `apiserver` and of tests marked `cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kmock
import pytest

import apiserver
import imds
from imds import Imds
from nodes import T0, a_node, a_pod
from outlast.job import contract
from outlast.kubernetes import api
from outlast.kubernetes.nodewatch import node_watcher as watch
from outlast.kubernetes.nodewatch.metadata import Metadata
from outlast.kubernetes.operator import reconciler_by_kind
from outlast.kubernetes.operator.leader import Leadership
from outlast.kubernetes.operator.observed_job import Limits
from outlast.kubernetes.operator.operator import Operator
from outlast.kubernetes.operator.watches import Settings

JOB = {
    "apiVersion": contract.API_VERSION,
    "kind": contract.KIND,
    "metadata": {"name": "train", "namespace": "ml", "uid": "uid-train", "resourceVersion": "10", "generation": 1},
    "spec": {"image": "example.com/train:1", "script": "train.py", "workers": {"replicas": 2, "min": 1, "max": 2}},
}
JOBS = "outlast.dev/v1alpha1/elasticjobs"
KINDS = [
    *("v1/pods", "v1/nodes", "v1/services", "v1/serviceaccounts", "v1/events", "coordination.k8s.io/v1/leases"),
    *("policy/v1/poddisruptionbudgets", "rbac.authorization.k8s.io/v1/roles", "rbac.authorization.k8s.io/v1/rolebindings"),
    *(JOBS, "elastic.pytorch.org/v1alpha1/elasticjobs"),
]
NODES, PODS, EVENTS, LEASES = map(kmock.resource, ("v1/nodes", "v1/pods", "v1/events", "coordination.k8s.io/v1/leases"))


class Mock:
    """kmock in a thread of its own. Lists are empty but for `items`, watches bring nothing, what is written is answered with."""

    def __init__(self, items: dict[str, list[dict[str, Any]]]) -> None:
        self.items, self.handler = items, kmock.KubernetesScaffold()
        self.url, self._versions = "", itertools.count(100)
        self._up, self._loop = threading.Event(), asyncio.new_event_loop()
        self._down = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Mock:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        for name in KINDS:
            self.handler.resources[kmock.resource(name)] = {"namespaced": name != "v1/nodes"}
        action = kmock.action
        self.handler[action.LIST] << self._listed
        self.handler[action.WATCH] << (b"", ...)
        for node in self.items.get("v1/nodes", ()):
            self.handler[action.FETCH, NODES] << node
        self.handler[action.FETCH] << 404 << self._absent
        for method in ("post", "put", "patch"):
            self.handler[method] << self._written
        self.handler["delete"] << {"kind": "Status", "status": "Success"}
        async with self.handler, kmock.Server(self.handler) as server:
            self.url = str(server.url)
            self._up.set()
            await self._down.wait()

    def _listed(self, request: kmock.Request) -> dict[str, Any]:
        assert request.resource is not None
        name = "/".join(filter(None, (request.resource.group, request.resource.version, request.resource.plural)))
        return {"metadata": {"resourceVersion": "50"}, "items": self.items.get(name, [])}

    def _absent(self, request: kmock.Request) -> dict[str, Any]:
        assert request.resource is not None
        details = {"name": request.name, "kind": request.resource.plural}
        return {"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "details": details}

    def _written(self, request: kmock.Request) -> dict[str, Any]:
        version = str(next(self._versions))
        return {**request.data, "metadata": {"uid": f"uid-{version}", **request.data["metadata"], "resourceVersion": version}}

    def requests(self, **like: object) -> list[kmock.Request]:
        """Return the requests with these attributes, in order."""
        return [each for each in list(self.handler) if all(getattr(each, name) == value for name, value in like.items())]

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for it."""
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "\n".join(f"{each.method.value} {each.url}" for each in self.requests())
            time.sleep(0.02)


@contextlib.contextmanager
def operating(mock: Mock, kubeconfig: Path) -> Iterator[None]:
    """An operator at work, with its real decisions."""
    apiserver.kubeconfig(kubeconfig, mock.url)
    with contextlib.closing(api.connect(namespace="outlast-system")) as cluster:
        leadership = Leadership(cluster, "operator-1", "outlast-system", interval_s=60, duration_s=180)
        operator = Operator(cluster, reconciler_by_kind.reconcilers(Limits()), leadership, Settings(host="127.0.0.1"))
        stop = threading.Event()
        thread = threading.Thread(target=operator.run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def shape(request: kmock.Request) -> tuple[str, str, str | None]:
    """Resource, namespace and name; the name of what is created is in the document."""
    assert request.resource is not None
    name = request.name or request.data["metadata"]["name"]
    return str(request.resource.plural), str(request.namespace), name


def test_what_is_asked_for_a_new_job(kubeconfig: Path) -> None:
    with Mock({JOBS: [JOB]}) as mock, operating(mock, kubeconfig):
        mock.until(lambda: len(mock.requests(method="POST", resource=PODS)) == 2)
    created = {shape(each): each for each in mock.requests(action="CREATE") if each.resource != EVENTS}
    named = [
        ("services", "train-rdzv"),
        ("poddisruptionbudgets", "train"),
        ("pods", "train-worker-0"),
        ("pods", "train-worker-1"),
    ]
    named += [(kind, "train-worker") for kind in ("serviceaccounts", "roles", "rolebindings")]
    wanted = {(kind, "ml", name) for kind, name in named}
    assert created.keys() == wanted | {("leases", "outlast-system", "outlast-operator")}
    for (_, namespace, _), request in created.items():
        assert request.params == {"fieldManager": "outlast", "fieldValidation": "Strict"}
        assert request.data["metadata"]["namespace"] == namespace
        if namespace == "ml":
            [owner] = request.data["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"], owner["controller"]) == ("ElasticJob", "uid-train", True)
    # Each write says on what it is built.
    status = mock.requests(method="PUT", subresource="status")[0]
    assert shape(status) == ("elasticjobs", "ml", "train")
    assert (status.data["metadata"]["uid"], status.data["metadata"]["resourceVersion"]) == ("uid-train", "10")
    [given_up] = mock.requests(method="PUT", resource=LEASES)  # at the end
    assert shape(given_up) == ("leases", "outlast-system", "outlast-operator")
    assert given_up.data["metadata"]["resourceVersion"] == "100", "the first write of all was the lease"


def test_what_the_node_watcher_asks_for(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVICT_S", 60.0)
    node = a_node()
    pods = [a_pod("web"), a_pod("kube-proxy", "DaemonSet")]
    with Mock({"v1/nodes": [node], "v1/pods": pods}) as mock:
        apiserver.kubeconfig(kubeconfig, mock.url)
        with imds.serving(Imds()) as service, contextlib.closing(api.connect()) as cluster:
            service.documents[imds.SPOT] = imds.spot("2026-01-01T00:02:00Z")
            watch.Watcher(node, Metadata(service.address, timeout_s=60), cluster, clock=lambda: T0).tick()
    (change,) = mock.requests(action="UPDATE", resource=NODES) or mock.requests(method="PATCH", resource=NODES)
    assert (change.name, change.data["metadata"]["resourceVersion"], change.data["spec"]["unschedulable"]) == ("n1", "7", True)
    (evicted,) = mock.requests(method="POST", resource=PODS)
    assert (evicted.namespace, evicted.name, evicted.subresource) == ("team", "web", "eviction")
    assert evicted.data["deleteOptions"] == {"preconditions": {"uid": "uid-web"}, "gracePeriodSeconds": 30}
    (listed,) = mock.requests(action="LIST")
    assert (listed.namespace, dict(listed.params)["fieldSelector"]) == (None, "spec.nodeName=n1")
    assert mock.requests(method="DELETE") == []
