"""A client for a cluster's API server. Objects are represented as plain dicts ("documents"), so unknown fields are preserved.

All functions are thread-safe. Long calls end as soon as their `Stop` is set.
"""

from __future__ import annotations

import email.utils
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from outlast.base.errors import Absent, Forbidden, NotServed, Refused
from outlast.kubernetes.api import requests, streams, watch
from outlast.kubernetes.api.error_mapping import Subject
from outlast.kubernetes.api.kinds import NAMESPACE, POD, Kind, kind_of
from outlast.kubernetes.api.paths import Api, Selection
from outlast.kubernetes.api.requests import Document, Request
from outlast.kubernetes.api.stop import Stop
from outlast.kubernetes.api.streams import Ended
from outlast.kubernetes.api.watch import Change

MANAGER = "outlast"
_WRITTEN_BY_SERVER = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")
_WRITE = {"fieldManager": MANAGER, "fieldValidation": "Strict"}


@dataclass(frozen=True)
class LogOptions:
    container: str = ""
    follow: bool = False
    since_s: float | None = None
    since: str = ""
    """Read only lines after this time, given in the format that `timestamps` produces."""
    tail: int | None = None
    previous: bool = False
    """Read the log from before the container's last restart."""
    timestamps: bool = False
    """Begin each line with its time."""

    def params(self) -> dict[str, str]:
        """Return the options as query parameters."""
        values = {
            "follow": "true" * self.follow,
            "previous": "true" * self.previous,
            "timestamps": "true" * self.timestamps,
            "container": self.container,
            "sinceSeconds": "" if self.since_s is None else str(max(1, round(self.since_s))),
            "sinceTime": self.since,
            "tailLines": "" if self.tail is None else str(self.tail),
        }
        return {name: value for name, value in values.items() if value}


class Cluster(Api):
    # Objects

    def get(self, kind: Kind, name: str, *, namespace: str | None = None, subresource: str = "") -> Document:
        """Return an object. Raises Absent if it does not exist."""
        subject, path = self.address("get", kind, name, namespace, subresource=subresource)
        return self.document(Request(subject, "GET", path, repeat=True))

    def find(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document | None:
        """Return an object, or None if it does not exist."""
        try:
            return self.get(kind, name, namespace=namespace)
        except Absent:
            return None

    def list_(
        self, kind: Kind, *, namespace: str | None = None, everywhere: bool = False, labels: str = "", fields: str = ""
    ) -> list[Document]:
        """Return all objects of a kind that match the selectors, in one namespace or in all."""
        selection = Selection(kind, namespace, everywhere, labels, fields)
        try:
            return [document for page, _ in self.pages(selection) for document in page]
        except requests.Expired:  # between two pages
            return [document for page, _ in self.pages(selection) for document in page]

    def create(self, document: Document) -> Document:
        """Create an object. Raises Taken if an object with this name exists."""
        kind, name, namespace = _named(document)
        collection, path = self.address("create", kind, "", namespace)
        subject = replace(collection, name=name)
        return self.document(Request(subject, "POST", path, _WRITE, document))

    def apply(
        self, document: Document, *, dry_run: bool = False, tries: int | None = None, timeout_s: float | None = None
    ) -> Document:
        """Create an object, or set the given fields if it exists (server-side apply). Unknown fields are an error. Pass `tries=1`
        if the caller retries with fresher data."""
        kind, name, namespace = _named(document)
        subject, path = self.address("apply", kind, name, namespace)
        params = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        content_type = "application/apply-patch+yaml"
        return self.document(
            Request(subject, "PATCH", path, params, document, content_type, repeat=True, tries=tries, timeout_s=timeout_s)
        )

    def patch(self, kind: Kind, name: str, change: Any, *, namespace: str | None = None, subresource: str = "") -> Document:
        """Change some fields of an object with a merge patch. If `change` contains a `metadata.resourceVersion`, raises Conflict
        unless the object has that version."""
        subject, path = self.address("patch", kind, name, namespace, subresource=subresource)
        return self.document(Request(subject, "PATCH", path, _WRITE, change, "application/merge-patch+json"))

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        """Replace an object. Raises Conflict if another client has written it since it was read."""
        kind, name, namespace = _named(document)
        subject, path = self.address("update", kind, name, namespace, subresource=subresource)
        return self.document(Request(subject, "PUT", path, _WRITE, document))

    def delete(
        self,
        kind: Kind,
        name: str,
        *,
        namespace: str | None = None,
        grace_s: float | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
        uid: str | None = None,
        timeout_s: float | None = None,
    ) -> Document:
        """Delete an object and, by default, its dependents. Returns the object with its deletion timestamp, or a Status. Raises
        Absent, or Conflict if the object has another uid."""
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = round(grace_s)
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        subject, path = self.address("delete", kind, name, namespace)
        return self.document(Request(subject, "DELETE", path, body=options, repeat=True, timeout_s=timeout_s))

    def evict(
        self,
        pod: str,
        *,
        namespace: str | None = None,
        uid: str | None = None,
        grace_s: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Evict a pod, as `kubectl drain` does. Raises Refused if a PodDisruptionBudget forbids the eviction."""
        name = {"name": pod, "namespace": namespace or self.namespace}
        options: Document = {"preconditions": {"uid": uid}} if uid else {}
        if grace_s is not None:
            options["gracePeriodSeconds"] = round(grace_s)
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": name}
        body |= {"deleteOptions": options} if options else {}
        subject, path = self.address("evict", POD, pod, namespace, subresource="eviction")
        self.document(Request(subject, "POST", path, body=body, tries=1, timeout_s=timeout_s))

    def watch(
        self,
        kind: Kind,
        *,
        stop: Stop,
        namespace: str | None = None,
        everywhere: bool = False,
        labels: str = "",
        fields: str = "",
        on_version: Callable[[str | None], None] = lambda _: None,
    ) -> Iterator[Change]:
        """Yield all existing objects, then every change, until `stop` is set.

        If the server no longer has the changes since the last connection, the watch lists everything again, and reports vanished
        objects as deleted. While the server is down, the watch retries. Raises the server's refusals, and Unanswered if the
        server is down before the first list is complete.

        `on_version` receives the version up to which everything has been reported, and None when the connection is lost.
        """
        return watch.changes(self, Selection(kind, namespace, everywhere, labels, fields), stop, on_version)

    # Pods

    def logs(
        self, pod: str, options: LogOptions | None = None, *, namespace: str | None = None, stop: Stop | None = None
    ) -> Iterator[str]:
        """Yield a container's log lines, without line endings. Raises Refused if the container has not started."""
        options = options or LogOptions()
        subject, path = self.address("log", POD, pod, namespace, subresource="log")
        silence_s = None if options.follow else requests.READ_S
        with self.connection.stream(subject, path, options.params(), stop or Stop(), silence_s=silence_s) as lines:
            for line in lines:
                yield line.decode(errors="replace")

    def proxy(self, pod: str, port: int, path: str, *, timeout_s: float | None = None) -> str:
        """Send a GET request to a server in a pod, and return the response. Raises Unanswered."""
        subject, base = self.address("proxy", POD, f"{pod}:{port}", None, subresource="proxy")
        return self.connection.answer(Request(subject, "GET", f"{base}/{path.lstrip('/')}", timeout_s=timeout_s)).text

    def exec_(
        self, pod: str, command: Sequence[str], *, namespace: str | None = None, container: str = "", stdin: bytes | None = None
    ) -> Ended:
        """Run a command in a container, with `stdin` as input."""
        return streams.execute(self, pod, command, namespace=namespace, container=container, stdin=stdin)

    # The cluster

    def may(self, verb: str, kind: Kind, *, name: str = "", subresource: str = "") -> bool:
        """Return whether the current user may perform an action (SelfSubjectAccessReview)."""
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural, "name": name, "subresource": subresource}
        if kind.namespaced:
            attributes["namespace"] = self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        path = "apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        request = Request(Subject("create", server=self.server), "POST", path, body=review, repeat=True)
        return bool(self.document(request)["status"].get("allowed"))

    def version(self) -> str:
        """Return the server's version, such as `v1.36.2`."""
        return str(self.raw("version")["gitVersion"])

    def time(self) -> float:
        """Return the server's time in seconds since the epoch, accurate to half a second. Raises Refused if the response has no
        `Date`."""
        request = Request(Subject("get", server=self.server), "GET", "version", repeat=True)
        date = self.connection.answer(request).headers.get("date", "")
        try:
            return email.utils.parsedate_to_datetime(date).timestamp() + 0.5  # the header has whole seconds, rounded down
        except ValueError as error:
            raise Refused(
                f"the API server sends no time (Date: {date!r}); a proxy in front of it may remove that header"
            ) from error

    def serves(self, kind: Kind) -> bool:
        """Return whether the cluster serves this kind."""
        try:
            group_version = self.raw(kind.root)
        except (Absent, NotServed):
            return False
        return any(resource["name"] == kind.plural for resource in group_version.get("resources", ()))

    def has_namespace(self, namespace: str | None = None) -> bool:
        """Return whether a namespace exists; True if reading it is forbidden."""
        try:
            self.get(NAMESPACE, namespace or self.namespace)
        except Absent:
            return False
        except Forbidden:
            pass
        return True

    def raw(self, path: str) -> Document:
        """Return the JSON object at a path. It need not have a kind; the server's version, for example, has none."""
        return self.document(Request(Subject("get", server=self.server), "GET", path, repeat=True))

    def close(self) -> None:
        self.connection.clients.close()


def without_server_fields(document: Document) -> Document:
    """Return an object without its status and without the metadata that the API server writes."""
    meta = {key: value for key, value in document["metadata"].items() if key not in _WRITTEN_BY_SERVER}
    return {**{key: value for key, value in document.items() if key != "status"}, "metadata": meta}


def _named(document: Mapping[str, Any]) -> tuple[Kind, str, str | None]:
    meta = document["metadata"]
    return kind_of(document), meta.get("name", ""), meta.get("namespace")
