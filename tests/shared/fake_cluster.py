"""Fake cluster without a server, for tests of users of `api.Cluster`: documents in a dictionary."""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from outlast.base.errors import Absent, Forbidden, NotServed, Refused
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds
from outlast.kubernetes.api.kinds import Kind, kind_of

Document = dict[str, Any]


class FakeCluster(api.Cluster):
    """Cluster that serves ElasticJobs once their definition is applied. `then` is called with every change, and may make more."""

    def __init__(
        self,
        *documents: Document,
        namespace: str = "team",
        forbidden: tuple[Kind, ...] = (),
        served: tuple[Kind, ...] = (),
        version: str = "v1.36.2",
    ) -> None:
        connection: Any = types.SimpleNamespace(server="https://fake", warnings=[])
        super().__init__(connection, "fake", namespace)
        self.documents: dict[tuple[str, str, str], Document] = {}
        self.forbidden = forbidden
        self.served = served
        self.lines: dict[str, list[str]] = {}
        self.then: Callable[[Document], None] = lambda document: None
        self.order: list[str] = []
        """Operations in order, such as `apply Namespace a`."""
        self._version = version
        self._versions = itertools.count(1)
        for document in documents:
            self.put(document)

    def put(self, document: Document) -> Document:
        kind = kind_of(document)
        meta = document["metadata"]
        if kind.namespaced:
            meta.setdefault("namespace", self.namespace)
        key = self._key(kind, meta["name"], meta.get("namespace"))
        old = self.documents.get(key)
        if old is None or {**old, "metadata": None} != {**document, "metadata": None}:
            meta = {**meta, "resourceVersion": str(next(self._versions)), "uid": meta.get("uid", f"uid-{meta['name']}")}
        else:
            meta = old["metadata"]
        self.documents[key] = {**copy.deepcopy(document), "metadata": {"creationTimestamp": "2026-11-21T16:00:00Z", **meta}}
        return self.documents[key]

    def _key(self, kind: Kind, name: str, namespace: str | None) -> tuple[str, str, str]:
        return kind.resource, (namespace or self.namespace) if kind.namespaced else "", name

    def _may(self, kind: Kind) -> None:
        if kind in self.forbidden:
            raise Forbidden(f"you may not list {kind.resource}")
        if not self.serves(kind):
            raise NotServed(f"{kind.resource} are not known here")

    # As api.Cluster

    def get(self, kind: Kind, name: str, *, namespace: str | None = None, subresource: str = "") -> Document:
        self._may(kind)
        try:
            return self.documents[self._key(kind, name, namespace)]
        except KeyError:
            raise Absent(f"{kind} {name} does not exist") from None

    def list_(
        self, kind: Kind, *, namespace: str | None = None, everywhere: bool = False, labels: str = "", fields: str = ""
    ) -> list[Document]:
        self._may(kind)
        where = self._key(kind, "", namespace)[1]
        found = [each for key, each in self.documents.items() if key[0] == kind.resource and (everywhere or key[1] == where)]
        return [each for each in found if selected(each["metadata"].get("labels", {}), labels)]

    def apply(self, document: Document, *, dry_run: bool = False) -> Document:
        kind, meta = kind_of(document), document["metadata"]
        if kind.namespaced and self._key(kinds.NAMESPACE, meta["namespace"], None) not in self.documents:
            raise Absent(f"there is no namespace {meta['namespace']}")
        if dry_run:
            return {**self.documents.get(self._key(kind, meta["name"], meta.get("namespace")), {}), **document}
        old = self.documents.get(self._key(kind, meta["name"], meta.get("namespace")), {})
        self.order.append(f"apply {kind} {meta['name']}")
        made = self.put({**old, **copy.deepcopy(document)})
        self.then(made)
        return made

    def create(self, document: Document) -> Document:
        made = self.put(copy.deepcopy(document))
        self.order.append(f"create {kind_of(document)} {made['metadata']['name']}")
        self.then(made)
        return made

    def delete(self, kind: Kind, name: str, *, namespace: str | None = None, **_: Any) -> None:
        if self.documents.pop(self._key(kind, name, namespace), None) is None:
            raise Absent(f"{kind} {name} does not exist")
        self.order.append(f"delete {kind} {name}")

    def watch(
        self, kind: Kind, *, stop: api.Stop, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Iterator[api.Change]:
        """Yield all documents. Nothing changes afterwards."""
        for document in self.list_(kind, namespace=namespace, labels=labels):
            if not fields or fields == f"metadata.name={document['metadata']['name']}":
                yield api.Change("added", document)
        stop.wait()

    def logs(self, pod: str, options: api.LogOptions | None = None, **_: Any) -> Iterator[str]:
        if pod not in self.lines:
            raise Refused(f"Pod {pod} has not begun")
        return iter(self.lines[pod])

    def may(self, verb: str, kind: Kind, **_: Any) -> bool:
        return kind not in self.forbidden

    def version(self) -> str:
        return self._version

    def serves(self, kind: Kind) -> bool:
        if kind in self.served:
            return True
        if kind == kinds.ELASTIC_JOB:
            return any(key[0] == kinds.CRD.resource for key in self.documents)
        return kind.group not in kinds.INSTALLED_BY

    def close(self) -> None:
        """Do nothing, because no connection is open."""


def selected(labels: dict[str, str], selector: str) -> bool:
    """Return whether labels match a selector of the API server."""
    for part in filter(None, selector.split(",")):
        name, equals, value = part.partition("=")
        if name.endswith("!"):
            if labels.get(name[:-1]) == value:
                return False
        elif name not in labels or (equals and labels[name] != value):
            return False
    return True
