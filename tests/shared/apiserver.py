"""A small API server for tests: real HTTP, documents in memory, watches that can be cut, prescribed responses."""

from __future__ import annotations

import json
import queue
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import fake_cluster
import waits
import web
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import requests
from outlast.kubernetes.api.kinds import KINDS

Document = dict[str, Any]
NOW = "2026-01-01T00:00:00Z"
DEEP, FAT = "@deep@", "@fat@"
"""Placeholders in a document for values too costly for this server: a list nested 1,100 levels deep, and 1.3 MiB of text."""
_MEANT = {f'"{DEEP}"'.encode(): b"[" * 1100 + b"]" * 1100, f'"{FAT}"'.encode(): b"[" + b"{}," * 450_000 + b"{}]"}


def status(code: int, reason: str, message: str, **details: Any) -> tuple[int, Document]:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, "details": details}
    return code, body


@dataclass(eq=False)
class Watcher:
    """Open watch with its filter, and the queue of lines to send; None ends the watch."""

    resource: str
    namespace: str
    query: dict[str, str]
    news: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)

    def tell(self, resource: str, document: Document, line: bytes) -> None:
        here = self.namespace in ("", document["metadata"].get("namespace"))
        if resource == self.resource and here and _selected(document, self.query):
            self.news.put(line)


class ApiServer:
    """Documents by kind, namespace and name."""

    def __init__(self, *, unserved: tuple[str, ...] = ("outlast.dev", "scheduling.x-k8s.io")) -> None:
        self.unserved = unserved
        self.documents: dict[tuple[str, str, str], Document] = {}
        self.version = 100
        self.oldest = 0
        """Oldest version of which watches are possible; earlier ones get 410."""
        self.events: list[tuple[int, str, bytes]] = []
        """Version, resource and line of every event."""
        self.watchers: list[Watcher] = []
        self.asked: list[str] = []
        """Methods and paths with queries of all requests, in order."""
        self.prescribed: list[tuple[str, Callable[[BaseHTTPRequestHandler], bool]]] = []
        self.logs: dict[str, list[str]] = {}
        self.metrics: dict[str, str] = {}
        self.page = 10_000
        self.graceful = False
        """True to keep deleted pods as terminating until the test removes them, unless their grace period is 0."""
        self.may: Callable[[str], bool] = lambda asked: True
        self.forbids = "the operator may not {asked}"
        self.well = True
        """False to respond with 503 to every request."""
        self.lock = threading.RLock()
        self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}})

    # what a test says

    def prescribe(self, pattern: str, *answers: tuple[int, Any] | Callable[[BaseHTTPRequestHandler], bool]) -> None:
        """Send these responses, once each, to requests whose `METHOD /path?query` matches."""
        for answer in answers:
            self.prescribed.append((pattern, answer if callable(answer) else _plain(*answer)))

    def put(self, document: Document) -> Document:
        with self.lock:
            meta = document["metadata"]
            kind = next(k for k in KINDS if (k.api_version, k.kind) == (document["apiVersion"], document["kind"]))
            namespace = meta.setdefault("namespace", "default") if kind.namespaced else ""
            key = (kind.resource, namespace, meta["name"])
            old = self.documents.get(key)
            if old is not None and _content(old) == _content(document):
                return old
            self.version += 1
            meta["uid"] = old["metadata"]["uid"] if old else meta.get("uid") or str(uuid.uuid4())
            meta.setdefault("creationTimestamp", NOW)
            meta["resourceVersion"] = str(self.version)
            self.documents[key] = document
            self.tell("MODIFIED" if old else "ADDED", kind.resource, document)
            return document

    def remove(self, resource: str, name: str, namespace: str = "default") -> None:
        """Delete a document and its dependents."""
        with self.lock:
            document = self.documents.pop((resource, namespace, name))
            self.version += 1
            document = {**document, "metadata": {**document["metadata"], "resourceVersion": str(self.version)}}
            self.tell("DELETED", resource, document)
            for key, other in list(self.documents.items()):
                if any(o["uid"] == document["metadata"]["uid"] for o in other["metadata"].get("ownerReferences") or ()):
                    self.remove(key[0], key[2], key[1])

    def tell(self, type_: str, resource: str, document: Document) -> None:
        line = json.dumps({"type": type_, "object": document}).encode() + b"\n"
        self.events.append((self.version, resource, line))
        for watcher in self.watchers:
            watcher.tell(resource, document, line)

    def objects(self, resource: str) -> list[Document]:
        with self.lock:
            return [document for key, document in self.documents.items() if key[0] == resource]

    def until(self, condition: Callable[[], object]) -> None:
        waits.until(condition, why=lambda: self.asked)

    def cut(self, *, forget: bool = False) -> None:
        """End all watches. With `forget`, drop all past events, so that clients must list again."""
        with self.lock:
            if forget:
                self.oldest = self.version + 1
                self.version += 1
            for watcher in self.watchers:
                watcher.news.put(None)

    # what it does

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = f"{handler.command} {handler.path}"
        with self.lock:
            self.asked.append(asked)
            found = next(((n, a) for n, (p, a) in enumerate(self.prescribed) if re.search(p, asked)), None)
            if found is not None:
                del self.prescribed[found[0]]
        if not self.well:
            _plain(503, "down")(handler)
            return
        if found is not None and found[1](handler):
            return
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        if not self.may(asked):
            return send(handler, *status(403, "Forbidden", self.forbids.format(asked=asked)))
        url = urlsplit(handler.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if url.path == "/version":
            return send(handler, 200, {"gitVersion": "v1.36.0"})
        if url.path.endswith("/selfsubjectaccessreviews"):
            return send(handler, 201, {"status": {"allowed": body["spec"]["resourceAttributes"]["verb"] != "delete"}})
        if served := re.fullmatch(r"/apis/([^/]+/[^/]+)", url.path):
            names = [{"name": k.plural} for k in KINDS if k.api_version == served[1] and k.group not in self.unserved]
            return send(handler, 200, {"resources": names}) if names else send(handler, *status(404, "NotFound", "not found"))
        match = re.fullmatch(
            r"/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/))?/([^/]+)(?:/([^/]+))?(?:/(.+))?", url.path
        )
        named = match and (match[1] or match[2], match[4])
        kind = next((k for k in KINDS if (k.api_version, k.plural) == named and k.group not in self.unserved), None)
        if not match or kind is None:
            return send(handler, *status(404, "NotFound", "the server could not find the requested resource"))
        namespace, name, subresource = match[3] or "", match[5] or "", match[6] or ""
        if kind.namespaced and namespace and ("namespaces", "", namespace) not in self.documents and handler.command != "GET":
            title = f'namespaces "{namespace}" not found'
            return send(handler, *status(404, "NotFound", title, name=namespace, kind="namespaces"))
        if handler.command == "GET" and not name:
            if query.get("watch"):
                return self.watch(handler, kind.resource, namespace, query)
            return self.list(handler, kind.resource, namespace, query)
        if kind.plural == "pods" and subresource.startswith("proxy"):
            text = self.metrics.get(name.partition(":")[0])
            return send(handler, 503, "error trying to reach service") if text is None else send(handler, 200, text)
        key = (kind.resource, namespace if kind.namespaced else "", name)
        if kind.plural == "pods" and subresource == "log":
            return send(handler, 200, "".join(f"{line}\n" for line in self.logs.get(name, ())))
        with self.lock:
            old = self.documents.get(key)
            if subresource == "eviction" and old is not None:  # no budgets: a test prescribes what they refuse
                return self._delete(handler, key, old, body.get("deleteOptions") or {})
            if handler.command == "POST" and not subresource:
                key = (*key[:2], body["metadata"]["name"])
                if key in self.documents:
                    title = f'{kind.plural} "{key[2]}" already exists'
                    return send(handler, *status(409, "AlreadyExists", title, name=key[2], kind=kind.plural))
                return send(handler, 201, self.put(body))
            if old is None and not (handler.command == "PATCH" and "apply" in handler.headers["Content-Type"]):
                return send(handler, *status(404, "NotFound", f'{kind.plural} "{name}" not found', name=name, kind=kind.plural))
            match handler.command:
                case "GET":
                    send(handler, 200, old)
                case "DELETE":
                    self._delete(handler, key, old or {}, body or {})
                case "PATCH":
                    seen = body.get("metadata") or {} if isinstance(body, dict) else {}
                    there = (old or {"metadata": {"resourceVersion": None, "uid": None}})["metadata"]
                    if any(name in seen and seen[name] != there[name] for name in ("resourceVersion", "uid")):
                        return send(handler, *status(409, "Conflict", "the object has been modified"))
                    new = _merged(json.loads(json.dumps(old or {})), body)
                    shown = {**new, "metadata": {"uid": "", **new["metadata"]}}
                    send(handler, 200, shown if query.get("dryRun") else self.put(new))
                case "PUT":
                    version = body["metadata"].get("resourceVersion")
                    if old is not None and version not in (None, old["metadata"]["resourceVersion"]):
                        return send(handler, *status(409, "Conflict", "the object has been modified", name=name))
                    if subresource == "status" and old is not None:
                        body = json.loads(json.dumps({**old, "status": body["status"]}))
                    send(handler, 200, self.put(body))

    def _delete(self, handler: BaseHTTPRequestHandler, key: tuple[str, str, str], old: Document, options: Document) -> None:
        uid = (options.get("preconditions") or {}).get("uid")
        if uid not in (None, old["metadata"]["uid"]):
            return send(handler, *status(409, "Conflict", "the UID in the precondition does not match"))
        if self.graceful and key[0] == "pods" and options.get("gracePeriodSeconds") != 0:
            going = json.loads(json.dumps(old))
            going["metadata"].setdefault("deletionTimestamp", NOW)
            going["metadata"].setdefault("deletionGracePeriodSeconds", options.get("gracePeriodSeconds", 30))
            return send(handler, 200, self.put(going))
        self.remove(*key[::2], key[1])
        send(handler, 200, {"kind": "Status", "status": "Success"})

    def list(self, handler: BaseHTTPRequestHandler, resource: str, namespace: str, query: dict[str, str]) -> None:
        with self.lock:
            found = [d for k, d in self.documents.items() if k[0] == resource and namespace in ("", k[1]) and _selected(d, query)]
            begin = int(query.get("continue", "0"))
            end = begin + min(self.page, int(query.get("limit", self.page)))
            part = found[begin:end]
            more = {"continue": str(end)} if end < len(found) else {}
            send(handler, 200, {"metadata": {"resourceVersion": str(self.version), **more}, "items": part})

    def watch(self, handler: BaseHTTPRequestHandler, resource: str, namespace: str, query: dict[str, str]) -> None:
        since = int(query.get("resourceVersion") or 0)
        watcher = Watcher(resource, namespace, query)
        with self.lock:
            if since < self.oldest:
                send(handler, *status(410, "Expired", "too old resource version"))
                return
            for version, which, line in self.events:
                if version > since and which == resource:
                    watcher.tell(which, json.loads(line)["object"], line)
            self.watchers.append(watcher)
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        try:
            handler.wfile.flush()
            while (line := watcher.news.get()) is not None:
                handler.wfile.write(_written(line))
                handler.wfile.flush()
        except OSError:  # who watched has gone
            pass
        finally:
            with self.lock:
                self.watchers.remove(watcher)

    def raw(self, text: str) -> None:
        for watcher in self.watchers:
            watcher.news.put(text.encode())


def send(handler: BaseHTTPRequestHandler, code: int, body: Any, **headers: str) -> None:
    content = body.encode() if isinstance(body, str) else _written(json.dumps(body).encode())
    handler.send_response(code)
    handler.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
    handler.send_header("Content-Length", str(len(content)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    try:
        handler.wfile.write(content)
    except OSError:  # who asked wants no more of it
        handler.close_connection = True


def goes_on(*lines: str) -> Callable[[BaseHTTPRequestHandler], bool]:
    """The log of a container that does not end, for as long as somebody follows it."""

    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write("".join(f"{line}\n" for line in lines).encode())
        handler.wfile.flush()
        handler.rfile.read(1)
        handler.close_connection = True
        return True

    return answer


def _written(content: bytes) -> bytes:
    for name, meant in _MEANT.items():
        content = content.replace(name, meant)
    return content


def _plain(code: int, body: Any) -> Callable[[BaseHTTPRequestHandler], bool]:
    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        send(handler, code, body)
        return True

    return answer


def _content(document: Document) -> str:
    meta = {k: v for k, v in document["metadata"].items() if k not in ("resourceVersion", "uid", "creationTimestamp")}
    return json.dumps({**document, "metadata": meta}, sort_keys=True)


def _merged(old: Any, change: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(change, dict) or not isinstance(old, dict):
        return change
    for key, value in change.items():
        if value is None:
            old.pop(key, None)
        else:
            old[key] = _merged(old.get(key, {}) if isinstance(value, dict) else None, value)
    return old


def _selected(document: Document, query: dict[str, str]) -> bool:
    if not fake_cluster.selected(document["metadata"].get("labels") or {}, query.get("labelSelector", "")):
        return False
    field, _, wanted = query.get("fieldSelector", "").partition("=")
    if field == "spec.nodeName":
        return bool(document["spec"].get("nodeName") == wanted)
    return not field or bool(document["metadata"]["name"] == wanted)


@pytest.fixture(autouse=True)
def again_soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are tried again after a twentieth of the usual pauses, but for those to a real cluster."""
    if request.node.get_closest_marker("cluster") is None:
        pause = requests.pause
        monkeypatch.setattr(requests, "pause", lambda *failed: pause(*failed) / 20)


@contextmanager
def entered(api: ApiServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve, and set the environment to the server."""
    with serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(directory / "config", url)))
        yield url


@contextmanager
def connected(
    api: ApiServer, directory: Path, monkeypatch: pytest.MonkeyPatch, namespace: str | None = None
) -> Iterator[kube.Cluster]:
    with entered(api, directory, monkeypatch), closing(kube.connect(namespace=namespace)) as cluster:
        yield cluster


@contextmanager
def serving(api: ApiServer) -> Iterator[str]:
    with web.serving(lambda handler: api.answer(handler)) as url:  # tests replace it
        try:
            yield url
        finally:
            api.cut()


def kubeconfig(path: Path, url: str, **user: Any) -> Path:
    """Write a kubeconfig for a server, with the contexts `here` (current) and `there`."""
    named = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
        "contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("here", "there")],
    }
    path.write_text(json.dumps(named))
    return path
