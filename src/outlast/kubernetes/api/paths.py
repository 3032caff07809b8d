"""Builds the URL paths of objects and reads lists page by page, for requests, watches and streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

from outlast.kubernetes.api import document_parsing, dropins, requests
from outlast.kubernetes.api.error_mapping import Subject
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.api.requests import Document, Request

_PAGE, _PAGE_OF_JOBS = 100, 20
"""Number of objects per page, for most kinds and for jobs. A job may take up 1 MiB: an API server needs minutes for 500 such
jobs, and a page must fit into memory."""


@dataclass(frozen=True)
class Selection:
    kind: Kind
    namespace: str | None = None
    everywhere: bool = False
    labels: str = ""
    fields: str = ""

    def selectors(self) -> dict[str, str]:
        """Return the selectors as query parameters."""
        parameters = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {key: value for key, value in parameters.items() if value}


@dataclass
class Api:
    """An API server, and the default namespace for requests."""

    connection: requests.Connection = field(repr=False)
    context: str
    namespace: str

    @property
    def server(self) -> str:
        return self.connection.server

    @property
    def warnings(self) -> list[str]:
        """The server's warnings without duplicates."""
        return self.connection.warnings

    def address(
        self, verb: str, kind: Kind, name: str, namespace: str | None, *, everywhere: bool = False, subresource: str = ""
    ) -> tuple[Subject, str]:
        """Return the subject of a request, for error messages, and the request's path."""
        effective_namespace = (namespace or self.namespace) if kind.namespaced and not everywhere else ""
        parts = [kind.root, *(["namespaces", quote(effective_namespace, safe="")] if effective_namespace else []), kind.plural]
        parts += [quote(name, safe=":")] if name else []
        parts += [subresource] if subresource else []
        shown_name = name.partition(":")[0] if subresource == "proxy" else name
        return Subject(verb, kind, shown_name, effective_namespace, self.server, subresource), "/".join(parts)

    def pages(self, selection: Selection) -> Iterator[tuple[Iterator[Document], str]]:
        """Yield a list's pages, each with the list's version. Objects are parsed one at a time. Raises `requests.Expired` if the
        list has expired; the earlier pages are then useless."""
        kind = selection.kind
        subject, path = self.address("list", kind, "", selection.namespace, everywhere=selection.everywhere)
        params = {**selection.selectors(), "limit": str(_PAGE_OF_JOBS if kind in dropins.ELASTIC_JOBS else _PAGE)}
        while True:
            content = self.connection.answer(Request(subject, "GET", path, params, repeat=True)).content
            with requests.parsing(content, subject):
                meta, items = document_parsing.page(content, kind)
            yield _items(items, kind, content, subject), str(meta.get("resourceVersion", ""))
            if not (token := meta.get("continue")):
                return
            params["continue"] = token

    def document(self, request: Request) -> Document:
        return requests.parse(self.connection.answer(request).content, request.subject)


def _items(items: Iterable[Document], kind: Kind, content: bytes, subject: Subject) -> Iterator[Document]:
    """Yield a page's objects with their kind, which the server omits in lists."""
    with requests.parsing(content, subject):
        for item in items:
            yield {"apiVersion": kind.api_version, "kind": kind.kind, **item}
