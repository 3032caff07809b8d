"""Watches: all existing documents of a kind, then every change, across as many connections as needed."""

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
"""Timeout that we request for one watch; the next watch continues where it ended. It is less than `_SILENCE_S` because the server
sends no bookmarks for a kind without any change since its start: only the end of the watch shows that the server is alive."""
_SILENCE_S = 150.0
"""Timeout of a watch without any event, bookmark or end."""
_STOOD_S = 30.0
"""Duration after which a watch that the server ended does not count as failed, even without events."""


@dataclass(frozen=True)
class Change:
    """One change of a document."""

    type: Literal["added", "modified", "deleted"]
    document: Document
    """The document's current state, or its last state if it was deleted. A document that vanished between two connections has
    only kind, apiVersion and metadata without annotations."""


@dataclass(frozen=True)
class Pace:
    """Settings of a watch: the longest pause before it reconnects, and a callback that follows the state of its connection."""

    listening: Callable[[str | None], None] = lambda version: None
    """Called with the version up to which everything has been reported, when a connection is made and from time to time after
    that; called with None when the connection is lost."""
    longest_pause_s: float = requests.LONGEST_PAUSE_S
    """Maximum pause between two attempts to connect."""


PACE = Pace()


def changes(api: Api, selection: Selection, stop: Stop, pace: Pace) -> Iterator[Change]:
    listening = pace.listening
    reported = _Reported()
    version, begun, failures = "", False, 0
    while not stop.is_set():
        try:
            if not version:
                version = yield from reported.differences(api.pages(selection))
                begun = True
            failures += 1  # reset by any event: a connection that ends at once is no better than none
            since = time.monotonic()
            for reached, change in _one_connection(api, selection, version, stop, listening):
                version, failures = reached, 0
                if change is not None:
                    reported.note(change)
                    yield change
                else:
                    listening(version)
            if time.monotonic() - since >= _STOOD_S:
                failures = 0
        except requests.Gone:
            version = ""
            listening(None)
        except requests.Expired:
            failures += 1
            listening(None)
        except Unanswered:
            listening(None)
            if not begun:
                raise
        if failures:
            stop.wait(min(requests.pause(failures), pace.longest_pause_s))


def _one_connection(
    api: Api, selection: Selection, version: str, stop: Stop, listening: Callable[[str | None], None]
) -> Iterator[tuple[str, Change | None]]:
    """The versions after `version`, each with its change (None for a bookmark), from one connection."""
    params = {
        **selection.selectors(),
        "watch": "true",
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(backoff.RANDOM.randint(_WATCH_S * 3 // 4, _WATCH_S)),
    }
    asked, path = api.address("watch", selection.kind, "", selection.namespace, everywhere=selection.everywhere)
    with api.connection.stream(asked, path, params, stop, silence_s=_SILENCE_S) as lines:
        listening(version)
        for line in lines:
            with requests.reading(line, asked):
                type_, document = document_parsing.event(line, selection.kind)
            if type_ == "ERROR":
                raise requests.mistake(int(document.get("code") or 500), json.dumps(document).encode(), asked)
            reached = document["metadata"]["resourceVersion"]
            if type_ == "BOOKMARK":
                yield reached, None
            else:
                yield reached, Change(type_.lower(), document)  # type: ignore[arg-type]


class _Reported:
    """The state that a watch has reported. A new list is compared with it, in order to report documents that have vanished."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, tuple[str, str], bytes]] = {}
        """Version, place (namespace and name) and JSON text by uid: parsed documents take ten times the memory of their text."""

    def note(self, change: Change) -> None:
        """Record a change that the watch reports."""
        if change.type == "deleted":
            self._held.pop(change.document["metadata"]["uid"], None)
        else:
            self._hold(change.document)

    def differences(self, pages: Iterable[tuple[Iterable[Document], str]]) -> Generator[Change, None, str]:
        """The changes between the reported state and a new list; returns the list's version. If another document now has the name
        of a vanished document, the deletion comes before the creation."""
        places = {place: uid for uid, (_, place, _) in self._held.items()}
        present: set[str] = set()
        version = ""
        for page, version in pages:  # noqa: B007  # the last one's is returned
            for document in page:
                meta = document["metadata"]
                uid, place = meta["uid"], _place(meta)
                if places.get(place, uid) != uid and (replaced := places.pop(place)) in self._held:
                    yield self._vanished(replaced)
                present.add(uid)
                old = self._held[uid][0] if uid in self._held else None
                self._hold(document)
                if old != meta.get("resourceVersion"):
                    yield Change("added" if old is None else "modified", document)
        for uid in [uid for uid in self._held if uid not in present]:
            yield self._vanished(uid)
        return version

    def _vanished(self, uid: str) -> Change:
        return Change("deleted", json.loads(self._held.pop(uid)[2]))

    def _hold(self, document: Document) -> None:
        meta = {key: value for key, value in document["metadata"].items() if key not in ("managedFields", "annotations")}
        kept = {"apiVersion": document.get("apiVersion"), "kind": document.get("kind"), "metadata": meta}
        self._held[meta["uid"]] = str(meta.get("resourceVersion", "")), _place(meta), json.dumps(kept).encode()


def _place(meta: Mapping[str, Any]) -> tuple[str, str]:
    return meta.get("namespace", ""), meta["name"]
