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
"""Number of documents per page of `list_`, as in kubectl."""
_FIRST = 20
"""Number of documents in the first page of a kind whose documents may have any size, such as jobs. An API server needs minutes
for 500 documents of 1 MiB each. While pages stay short, each page has twice as many documents as the previous one."""
_PAGE_BYTES = 8 * 2**20
"""Maximum size of a page in bytes. A larger page is requested again with a quarter of the documents."""


@dataclass(frozen=True)
class Selection:
    """The documents that a list or a watch selects."""

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
    """An API server, and the default namespace for documents."""

    connection: requests.Connection = field(repr=False)
    context: str
    namespace: str

    @property
    def server(self) -> str:
        return self.connection.server

    @property
    def warnings(self) -> list[str]:
        """The server's warnings, without repetitions."""
        return self.connection.warnings

    def address(
        self, verb: str, kind: Kind, name: str, namespace: str | None, *, everywhere: bool = False, subresource: str = ""
    ) -> tuple[Subject, str]:
        """Return the subject of a request, for its errors, and the path of the request."""
        effective_namespace = (namespace or self.namespace) if kind.namespaced and not everywhere else ""
        parts = [kind.root, *(["namespaces", quote(effective_namespace, safe="")] if effective_namespace else []), kind.plural]
        parts += [quote(name, safe=":")] if name else []
        parts += [subresource] if subresource else []
        shown_name = name.partition(":")[0] if subresource == "proxy" else name
        return Subject(verb, kind, shown_name, effective_namespace, self.server, subresource), "/".join(parts)

    def pages(self, selection: Selection) -> Iterator[tuple[Iterator[Document], str]]:
        """Yield the pages of a list, each with the list's version. Documents are parsed one at a time. Raises `requests.Expired`
        if the list has expired; the earlier pages are then useless."""
        kind = selection.kind
        subject, path = self.address("list", kind, "", selection.namespace, everywhere=selection.everywhere)
        token, limit = "", _FIRST if kind in document_parsing.FREE_FORM else _PAGE
        while True:
            params = {**selection.selectors(), "limit": str(limit), **({"continue": token} if token else {})}
            try:
                max_bytes = _PAGE_BYTES if limit > 3 else None
                answer = self.connection.answer(Request(subject, "GET", path, params, repeat=True, max_bytes=max_bytes))
            except requests.TooLong:
                limit //= 4
                continue
            content: bytes = answer.extensions.pop("whole", None) or answer.content
            with requests.parsing(content, subject):
                meta, items = document_parsing.page(content, kind)
            token = meta.get("continue") or ""
            yield _items(items, kind, content, subject), str(meta.get("resourceVersion", ""))
            if not token:
                return
            if len(content) < _PAGE_BYTES // 4:
                limit = min(_PAGE, 2 * limit)

    def document(self, request: Request) -> Document:
        return requests.parse(self.connection.answer(request).content, request.subject)


def _items(items: Iterable[Document], kind: Kind, content: bytes, subject: Subject) -> Iterator[Document]:
    """Yield the documents of a page, and add their kind, which the server omits in lists."""
    with requests.parsing(content, subject):
        for item in items:
            yield {"apiVersion": kind.api_version, "kind": kind.kind, **item}
