"""Watches a kind: reports all existing objects, then every change, over as many connections as necessary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outlast.base import backoff
from outlast.base.errors import Unanswered
from outlast.kubernetes.api import document_parsing, requests
from outlast.kubernetes.api.paths import Api, Selection
from outlast.kubernetes.api.requests import Document
from outlast.kubernetes.api.stop import Stop

_WATCH_S = 140
"""Requested duration of one connection. It is less than `_SILENCE_S`, because the server sends no bookmarks for a kind that has
not changed since the server started: then only the end of a connection shows that the server is alive."""
_SILENCE_S = 150.0
"""Timeout for a connection on which nothing arrives."""
_STABLE_S = 30.0
"""A connection that lasts this long is not a failure, even without events."""
_LONGEST_PAUSE_S = 1.0
"""Maximum pause between attempts to connect: workers must learn of a new world soon."""


@dataclass(frozen=True)
class Change:
    type: Literal["added", "modified", "deleted"]
    document: Document
    """The object's current or last state. If the object vanished between two connections, only its kind, apiVersion and metadata
    without annotations remain."""


def changes(api: Api, selection: Selection, stop: Stop, on_version: Callable[[str | None], None]) -> Iterator[Change]:
    reported = _Reported()
    version, listed, failures = "", False, 0
    while not stop.is_set():
        try:
            if not version:
                version = yield from reported.differences(api.pages(selection))
                listed = True
            failures += 1  # reset by any event: a connection that ends at once counts as a failure
            since = time.monotonic()
            for new_version, change in _one_connection(api, selection, version, stop, on_version):
                version, failures = new_version, 0
                if change is not None:
                    reported.record(change)
                    yield change
                else:
                    on_version(version)
            if time.monotonic() - since >= _STABLE_S:
                failures = 0
        except requests.Gone:
            version = ""
            on_version(None)
        except requests.Expired:
            failures += 1
            on_version(None)
        except Unanswered:
            on_version(None)
            if not listed:
                raise
        if failures:
            stop.wait(min(requests.pause(failures), _LONGEST_PAUSE_S))


def _one_connection(
    api: Api, selection: Selection, version: str, stop: Stop, on_version: Callable[[str | None], None]
) -> Iterator[tuple[str, Change | None]]:
    """Yield the versions after `version` from one connection, each with its change (None for a bookmark)."""
    params = {
        **selection.selectors(),
        "watch": "true",
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(backoff.RANDOM.randint(_WATCH_S * 3 // 4, _WATCH_S)),
    }
    subject, path = api.address("watch", selection.kind, "", selection.namespace, everywhere=selection.everywhere)
    with api.connection.stream(subject, path, params, stop, silence_s=_SILENCE_S) as lines:
        on_version(version)
        for line in lines:
            with requests.parsing(line, subject):
                type_, document = document_parsing.event(line, selection.kind)
            if type_ == "ERROR":
                raise requests.error_for(int(document.get("code") or 500), json.dumps(document).encode(), subject)
            new_version = document["metadata"]["resourceVersion"]
            if type_ == "BOOKMARK":
                yield new_version, None
            else:
                yield new_version, Change(type_.lower(), document)  # type: ignore[arg-type]


class _Reported:
    """The state that a watch has reported. A comparison with a new list shows which objects have vanished."""

    def __init__(self) -> None:
        self._outlines: dict[str, tuple[str, tuple[str, str], bytes]] = {}
        """The version, the namespace and name, and the JSON text of each object, keyed by uid. Parsed objects would take ten
        times the memory."""

    def record(self, change: Change) -> None:
        if change.type == "deleted":
            self._outlines.pop(change.document["metadata"]["uid"], None)
        else:
            self._store(change.document)

    def differences(self, pages: Iterable[tuple[Iterable[Document], str]]) -> Generator[Change, None, str]:
        """Yield the changes between the reported state and a new list, and return the list's version. If another object now has a
        vanished object's name, the deletion is yielded first."""
        keys = {key: uid for uid, (_, key, _) in self._outlines.items()}
        uids: set[str] = set()
        version = ""
        for page, version in pages:  # noqa: B007  # the version of the last page is returned
            for document in page:
                meta = document["metadata"]
                uid, key = meta["uid"], _key(meta)
                if keys.get(key, uid) != uid and (replaced_uid := keys.pop(key)) in self._outlines:
                    yield self._deletion(replaced_uid)
                uids.add(uid)
                old_version = self._outlines[uid][0] if uid in self._outlines else None
                self._store(document)
                if old_version != meta.get("resourceVersion"):
                    yield Change("added" if old_version is None else "modified", document)
        for uid in [uid for uid in self._outlines if uid not in uids]:
            yield self._deletion(uid)
        return version

    def _deletion(self, uid: str) -> Change:
        return Change("deleted", json.loads(self._outlines.pop(uid)[2]))

    def _store(self, document: Document) -> None:
        meta = {key: value for key, value in document["metadata"].items() if key not in ("managedFields", "annotations")}
        outline = {"apiVersion": document.get("apiVersion"), "kind": document.get("kind"), "metadata": meta}
        self._outlines[meta["uid"]] = str(meta.get("resourceVersion", "")), _key(meta), json.dumps(outline).encode()


def _key(meta: Mapping[str, Any]) -> tuple[str, str]:
    return meta.get("namespace", ""), meta["name"]
