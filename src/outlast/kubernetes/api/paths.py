"""The address of an API server, and the common parts of requests, watches and streams: paths and pages of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

from outlast.kubernetes.api import document_parsing, requests
from outlast.kubernetes.api.error_mapping import Subject
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.api.requests import Document, Request

_PAGE = 500
"""Number of documents per page of `list_`, the same as kubectl's."""
_FIRST = 20
"""Number of documents in the first page for a kind whose documents may be of any size, such as jobs: an API server needs minutes
for 500 documents of a MiB each. Each following page has twice as many documents, as long as pages are short."""
_PAGE_BYTES = 8 * 2**20
"""Maximum size of a page in bytes. A longer page is requested again with a quarter of the documents."""


@dataclass(frozen=True)
class Selection:
    """The documents that a list or a watch selects."""

    kind: Kind
    namespace: str | None = None
    everywhere: bool = False
    labels: str = ""
    fields: str = ""

    def selectors(self) -> dict[str, str]:
        """The selectors as parameters of the request."""
        parameters = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {key: value for key, value in parameters.items() if value}


@dataclass
class Api:
    """An API server, and the namespace for documents that name none."""

    connection: requests.Connection = field(repr=False)
    context: str
    namespace: str

    @property
    def server(self) -> str:
        return self.connection.server

    @property
    def warnings(self) -> list[str]:
        """Warnings from the server, each of them once."""
        return self.connection.warnings

    def address(
        self, verb: str, kind: Kind, name: str, namespace: str | None, *, everywhere: bool = False, subresource: str = ""
    ) -> tuple[Subject, str]:
        """The subject of a request, for its errors, and the request's path."""
        inside = (namespace or self.namespace) if kind.namespaced and not everywhere else ""
        parts = [kind.root, *(["namespaces", quote(inside, safe="")] if inside else []), kind.plural]
        parts += [quote(name, safe=":")] if name else []
        parts += [subresource] if subresource else []
        shown = name.partition(":")[0] if subresource == "proxy" else name
        return Subject(verb, kind, shown, inside, self.server, subresource), "/".join(parts)

    def pages(self, selection: Selection) -> Iterator[tuple[Iterator[Document], str]]:
        """The pages of a list, each with its version; documents are parsed one at a time. Raises `requests.Expired` if the list
        has expired, which makes the earlier pages useless."""
        kind = selection.kind
        asked, path = self.address("list", kind, "", selection.namespace, everywhere=selection.everywhere)
        token, limit = "", _FIRST if kind in document_parsing.FREE else _PAGE
        while True:
            params = {**selection.selectors(), "limit": str(limit), **({"continue": token} if token else {})}
            try:
                most = _PAGE_BYTES if limit > 3 else None
                answer = self.connection.answer(Request(asked, "GET", path, params, repeat=True, most=most))
            except requests.TooLong:
                limit //= 4
                continue
            content: bytes = answer.extensions.pop("whole", None) or answer.content
            with requests.reading(content, asked):
                meta, items = document_parsing.page(content, kind)
            token = meta.get("continue") or ""
            yield _items(items, kind, content, asked), str(meta.get("resourceVersion", ""))
            if not token:
                return
            if len(content) < _PAGE_BYTES // 4:
                limit = min(_PAGE, 2 * limit)

    def document(self, request: Request) -> Document:
        return requests.parsed(self.connection.answer(request).content, request.asked)


def _items(items: Iterable[Document], kind: Kind, content: bytes, asked: Subject) -> Iterator[Document]:
    """The documents of a page, each with its kind, which the server leaves out of the items of a list."""
    with requests.reading(content, asked):
        for item in items:
            yield {"apiVersion": kind.api_version, "kind": kind.kind, **item}
