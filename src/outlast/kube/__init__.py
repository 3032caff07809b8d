"""A Kubernetes cluster: documents in, documents out, as plain dicts. The only module that knows lightkube.

lightkube finds the way in (certificates, tokens, login programs of clouds) and its HTTP client carries the requests; documents
are not made into its models, so what we do not know of them stays as it is. All errors are `ClusterError`s of `answers`.
Everything here may be called from several threads. Lengthy things end when their `Stop` is set, at once.

    cluster = kube.connect()
    for pod in cluster.list_(kube.POD, labels="outlast.dev/job=train"): ...
"""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Literal
from urllib.parse import quote

from outlast import backoff
from outlast.errors import Absent, ClusterError, Forbidden, NoCluster, NotServed, Refused, Unanswered, Unauthorized
from outlast.kube import error_mapping, kubeconfig, wire
from outlast.kube.error_mapping import Asked
from outlast.kube.kinds import *  # noqa: F403  # `kube.POD`: callers name kinds by this module
from outlast.kube.kinds import NAMESPACE, POD, Kind, kind_of

if TYPE_CHECKING:
    import httpx2
    from httpx2.websockets import WebSocketSession

Document = dict[str, Any]

MANAGER = "outlast"
"""Who we are, in `managedFields`."""
_PAGE = 500
"""Documents a request of `list_`, as kubectl asks for."""
_FIRST = 20
"""The same of the first page of what may be of any size, such as jobs: an API server needs minutes for 500 of a MiB each. As long
as pages are short, each has twice as many as the one before."""
_PAGE_BYTES = 8 * 2**20
"""A page that is longer is asked for anew with a quarter of the documents: some have a MiB each."""
_SERVERS = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")
"""Metadata that the API server writes."""
_CONNECT_S = 10.0
_READ_S = 65.0
"""The API server ends ordinary requests after 60 s."""
_WATCH_S = 140
"""The server is asked to end a watch after at most so long; the next goes on where it ended. That is before `_SILENCE_S`: of a
kind to which nothing has happened since the server began, it sends no bookmarks, and only the end shows that it was there."""
_SILENCE_S = 150.0
"""A watch over which nothing has come for so long, no bookmark and no end either, is taken for dead."""
_STOOD_S = 30.0
"""A watch that stood for so long before the server ended it has not failed, although nothing has come."""
_MESSAGE = 2**20
"""Bytes of the longest message over a websocket; a kubelet's are 32 KiB."""
_LAST_S = 1.0
"""How long the reader of a websocket may take to see its end."""
_SIZE_S = 0.2
"""How often it is looked whether a terminal has another size."""
_GONE_S = 30.0
"""How long nothing may come from a pod for a connection over which nothing more is asked."""
_IDLE_S = 30.0
"""How long a connection is kept over which nothing goes."""
_CLIENTS = 32
"""At most. Each is some kilobytes, and the connections of its threads."""
_TRIES = 4
"""How often a request that cannot have done anything, or may be repeated, is made."""
_LONGEST_PAUSE_S = 30.0


class Stop(threading.Event):
    """An Event that also ends what waits for the server, in whichever thread."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: set[socket.socket] = set()
        self._guard = threading.Lock()

    def set(self) -> None:
        with self._guard:
            super().set()
            for connection in self._sockets:
                _hang_up(connection)

    @contextlib.contextmanager
    def holding(self, connection: socket.socket | None) -> Iterator[None]:
        """Close the connection when the Event is set."""
        if connection is None:
            yield
            return
        with self._guard:
            self._sockets.add(connection)
            if self.is_set():
                _hang_up(connection)
        try:
            yield
        finally:
            with self._guard:
                self._sockets.discard(connection)


@contextlib.contextmanager
def within(timeout_s: float) -> Iterator[Stop]:
    """A Stop that is set after this time, and at the end."""
    stop = Stop()
    clock = threading.Timer(timeout_s, stop.set)
    clock.daemon = True
    clock.start()
    try:
        yield stop
    finally:
        clock.cancel()
        stop.set()


def _hang_up(connection: socket.socket, way: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(connection, way)  # of TLS, the reader has to see the end by itself


@dataclass(frozen=True)
class Change:
    """What has happened to a document."""

    type: Literal["added", "modified", "deleted"]
    document: Document
    """As it is, or as it was last. Of one that vanished while nobody watched there are only kind, apiVersion and metadata
    without annotations."""


@dataclass(frozen=True)
class Ended:
    """How a command in a pod ended."""

    code: int
    output: bytes
    error: bytes


def connect(context: str | None = None, namespace: str | None = None, *, own: bool = False) -> Cluster:
    """The cluster of a context of the kubeconfig (default: its current one), or the one that this pod runs in.

    `own`: a pod that has an account uses that, whatever `$KUBECONFIG` says: it may be meant for the script that is trained.
    Asks the server nothing. Raises NoCluster.
    """
    try:
        from lightkube.config.client_adapter import ConnectionParams
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.config.models import User
        from lightkube.core.exceptions import ConfigError
    except ImportError as error:
        raise NoCluster(f"{error.name} is not installed; for clusters: pip install 'outlast[kubernetes]'") from error
    import httpx2

    proxy, headers = None, []
    paths = [] if own and kubeconfig.inside(os.environ) else kubeconfig.files(os.environ)
    try:
        if paths:
            whole = kubeconfig.read(paths)
            name = kubeconfig.chosen(whole, context)
            config = KubeConfig.from_dict(_understood(whole), fname=paths[0]).get(name)
            assert config is not None
            servers = {entry["name"]: entry["cluster"] for entry in whole["clusters"]}
            proxy = servers[config.context.cluster].get("proxy-url")
            headers = kubeconfig.impersonated(whole, name)
        elif kubeconfig.inside(os.environ):
            if context:
                raise NoCluster(f"there is no context {context}: this pod has an account and no kubeconfig; leave --context out")
            config = KubeConfig.from_service_account(kubeconfig.ACCOUNT).get()
            assert config is not None
        else:
            raise NoCluster(
                "there is no kubeconfig (KUBECONFIG, ~/.kube/config) and this is no pod; log in to a cluster, "
                "or run it on this machine: outlast run FILE"
            )
        config = config._replace(user=config.user or User())
        # What a pod's $HTTPS_PROXY is for lies outside the cluster, its API server does not.
        timeout = httpx2.Timeout(_READ_S, connect=_CONNECT_S, pool=None)
        params = ConnectionParams(timeout=timeout, proxy=proxy, trust_env=bool(paths))
        arguments = {**params.httpx_params(config), "headers": headers}
        # Less than the API server keeps an idle connection (90 s), and more than there is between two renewals of a Lease.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_IDLE_S)
        clients = _Clients(lambda: httpx2.Client(**arguments, limits=limits))
    except (ConfigError, OSError, ValueError, KeyError, TypeError) as error:
        place = ", ".join(map(str, paths)) or "the account of this pod"
        raise NoCluster(f"{place} cannot be used: {error or type(error).__name__}; log in to the cluster again") from error
    return Cluster(
        clients,
        # What becomes a websocket must not be taken for a connection to be used again; and refusals are to be read.
        lambda: httpx2.Client(**arguments, event_hooks={"response": [_read_refusal]}),
        context=config.context_name,
        server=config.cluster.server,
        namespace=namespace or config.namespace,
    )


def load() -> None:
    """Import what `connect` needs: for who forks before it connects. Raises ImportError."""
    import httpx2  # noqa: F401
    import lightkube.config.client_adapter
    import lightkube.config.kubeconfig
    import lightkube.core.exceptions  # noqa: F401


def _read_refusal(answer: httpx2.Response) -> None:
    if answer.status_code != 101:
        answer.read()


def _understood(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The kubeconfig with login programs as lightkube knows them: it tells them nothing, and refuses the newest version of their
    answers, which is no different."""

    def user(entry: Mapping[str, Any]) -> dict[str, Any]:
        program = entry["user"].get("exec")
        if not program:
            return dict(entry)
        version = program["apiVersion"]
        told = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}})
        env = [*(program.get("env") or []), {"name": "KUBERNETES_EXEC_INFO", "value": told}]
        if version == "client.authentication.k8s.io/v1":
            version = "client.authentication.k8s.io/v1beta1"
        return {**entry, "user": {**entry["user"], "exec": {**program, "apiVersion": version, "env": env}}}

    return {**whole, "users": [user(entry) for entry in whole["users"]]}


class _Clients:
    """HTTP clients, among which threads are spread.

    Before each request a client asks all of its idle connections whether they are still there, and nobody else gets one
    meanwhile: of twenty threads with one client, most wait for that.
    """

    def __init__(self, make: Callable[[], httpx2.Client]) -> None:
        self._make, self._made = make, [make()]
        self._of_thread = threading.local()
        self._threads = itertools.count()
        self._guard = threading.Lock()

    def mine(self) -> httpx2.Client:
        """The one of this thread; no two threads have the same until there are many."""
        found: httpx2.Client | None = getattr(self._of_thread, "client", None)
        if found is None:
            with self._guard:
                number = next(self._threads) % _CLIENTS
                if number == len(self._made):
                    self._made.append(self._make())
                found = self._of_thread.client = self._made[number]
        return found

    def close(self) -> None:
        """Close all connections."""
        for client in self._made:
            client.close()


@dataclass
class Cluster:
    """The API server of a cluster, and the namespace in which documents are when nothing else is said."""

    clients: _Clients = field(repr=False)
    tunnel: Callable[[], httpx2.Client] = field(repr=False)
    """A client for one websocket."""
    context: str
    server: str
    namespace: str
    warnings: list[str] = field(default_factory=list)
    """What the server has warned of, each once: a policy that will be enforced, a version that goes away."""

    @property
    def client(self) -> httpx2.Client:
        """The HTTP client of this thread."""
        return self.clients.mine()

    # documents

    def get(self, kind: Kind, name: str, *, namespace: str | None = None, subresource: str = "") -> Document:
        """A document. Raises Absent."""
        return self._document("get", "GET", kind, name, namespace=namespace, subresource=subresource)

    def list_(
        self, kind: Kind, *, namespace: str | None = None, everywhere: bool = False, labels: str = "", fields: str = ""
    ) -> list[Document]:
        """All documents of a kind that the selectors find, in one namespace or `everywhere`."""
        for attempt in (1, 2):
            pages = self._pages(kind, namespace=namespace, everywhere=everywhere, labels=labels, fields=fields)
            try:
                return [document for page, _ in pages for document in page]
            except _Expired:  # between two pages
                if attempt == 2:
                    raise
        raise AssertionError

    def create(self, document: Document, *, dry_run: bool = False) -> Document:
        """Make a document. Raises Taken when one of its name exists."""
        kind, _, namespace = self._of(document)
        params = {"fieldManager": MANAGER, "fieldValidation": "Strict", **_dry(dry_run)}
        return self._document("create", "POST", kind, "", namespace=namespace, params=params, body=document)

    def apply(
        self, document: Document, *, dry_run: bool = False, tries: int | None = None, timeout_s: float | None = None
    ) -> Document:
        """Make a document, or make what we say of it true (server-side apply). Unknown fields are an error.

        `tries` and `timeout_s` are for who tries again by itself, with what is newer by then.
        """
        kind, name, namespace = self._of(document)
        params = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict", **_dry(dry_run)}
        return self._document(
            "apply",
            "PATCH",
            kind,
            name,
            namespace=namespace,
            params=params,
            body=document,
            content_type="application/apply-patch+yaml",
            tries=tries,
            timeout_s=timeout_s,
        )

    def patch(
        self,
        kind: Kind,
        name: str,
        change: Any,
        *,
        namespace: str | None = None,
        subresource: str = "",
        type: Literal["merge", "strategic", "json"] = "merge",
    ) -> Document:
        """Change some fields. A `metadata.resourceVersion` in the change makes it a condition: raises Conflict."""
        content_type = {"merge": "merge-patch", "strategic": "strategic-merge-patch", "json": "json-patch"}[type]
        params = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return self._document(
            "patch",
            "PATCH",
            kind,
            name,
            namespace=namespace,
            subresource=subresource,
            params=params,
            body=change,
            content_type=f"application/{content_type}+json",
        )

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        """Write a document that was read before. Raises Conflict when somebody else has written it meanwhile."""
        kind, name, namespace = self._of(document)
        params = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return self._document(
            "update", "PUT", kind, name, namespace=namespace, subresource=subresource, params=params, body=document
        )

    def delete(
        self,
        kind: Kind,
        name: str,
        *,
        namespace: str | None = None,
        grace_s: float | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
        uid: str | None = None,
    ) -> Document:
        """Delete a document, and what it owns; what the server answers is the document as it is while it goes, or a Status.

        Raises Absent; Conflict when its uid is another by now.
        """
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = round(grace_s)
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        return self._document("delete", "DELETE", kind, name, namespace=namespace, body=options)

    def evict(self, pod: str, *, namespace: str | None = None, uid: str | None = None) -> None:
        """Have a pod go as the drain of its node does. Raises Refused when a PodDisruptionBudget keeps it."""
        name = {"name": pod, "namespace": namespace or self.namespace}
        options = {"deleteOptions": {"preconditions": {"uid": uid}}} if uid else {}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": name, **options}
        self._document("evict", "POST", POD, pod, namespace=namespace, subresource="eviction", body=body, tries=1)

    # changes

    def watch(
        self,
        kind: Kind,
        *,
        stop: Stop,
        namespace: str | None = None,
        everywhere: bool = False,
        labels: str = "",
        fields: str = "",
        listening: Callable[[str | None], None] | None = None,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> Iterator[Change]:
        """First all that there is, then every change, until `stop` is set.

        Whatever happens to the connection, no state is missed for good: when the server has forgotten what came meanwhile, all is
        listed anew, and what vanished is said as well. While the server is away it is asked again, with growing pauses. What it
        refuses is raised; so is the first failure to reach it.

        Documents are parsed one at a time. `listening` is told the version up to which everything has been said, when a
        connection stands and now and then after that, and None when it is lost.
        """
        tell = listening or (lambda version: None)
        select = {"namespace": namespace, "everywhere": everywhere, "labels": labels, "fields": fields}
        known = _Known()
        version, begun, failures = "", False, 0
        while not stop.is_set():
            try:
                if not version:
                    version = yield from known.differences(self._pages(kind, **select))  # type: ignore[arg-type]
                    begun = True
                failures += 1  # unless anything comes: a connection that ends at once is no better than none
                since = time.monotonic()
                for reached, change in self._changes(kind, version, stop, tell=tell, **select):
                    version, failures = reached, 0
                    if change is not None:
                        known.note(change)
                        yield change
                    else:
                        tell(version)
                if time.monotonic() - since >= _STOOD_S:
                    failures = 0
            except _Gone:
                version = ""
                tell(None)
            except _Expired:
                failures += 1
                tell(None)
            except Unanswered:
                tell(None)
                if not begun:
                    raise
            if failures:
                stop.wait(min(_pause(failures), longest_pause_s))

    def _changes(
        self, kind: Kind, version: str, stop: Stop, *, tell: Callable[[str], None], **select: Any
    ) -> Iterator[tuple[str, Change | None]]:
        """Versions after the given one and what changed with them (None: nothing that was asked for), over one connection."""
        params = {
            **_selectors(select["labels"], select["fields"]),
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(backoff.RANDOM.randint(_WATCH_S * 3 // 4, _WATCH_S)),
        }
        asked, path = self._address("watch", kind, "", select["namespace"], everywhere=select["everywhere"])
        with self._stream(asked, path, params, stop, silence_s=_SILENCE_S) as lines:
            tell(version)
            for line in lines:
                with _reading(line, asked):
                    type_, document = wire.event(line, kind)
                if type_ == "ERROR":
                    raise _mistake(int(document.get("code") or 500), json.dumps(document).encode(), asked)
                reached = document["metadata"]["resourceVersion"]
                if type_ == "BOOKMARK":
                    yield reached, None
                else:
                    yield reached, Change(type_.lower(), document)  # type: ignore[arg-type]

    # pods

    def logs(
        self,
        pod: str,
        *,
        namespace: str | None = None,
        container: str = "",
        follow: bool = False,
        since_s: float | None = None,
        since: str = "",
        tail: int | None = None,
        previous: bool = False,
        timestamps: bool = False,
        stop: Stop | None = None,
    ) -> Iterator[str]:
        """The lines of a container's log, without their ends. `since` is a time as `timestamps` shows it.

        A container that is still to begin is Refused.
        """
        params = {"follow": follow, "previous": previous, "timestamps": timestamps}
        given = {name: "true" for name, value in params.items() if value}
        given |= {"container": container} if container else {}
        given |= {"sinceSeconds": str(max(1, round(since_s)))} if since_s is not None else {}
        given |= {"sinceTime": since} if since else {}
        given |= {"tailLines": str(tail)} if tail is not None else {}
        asked, path = self._address("log", POD, pod, namespace, subresource="log")
        with self._stream(asked, path, given, stop or Stop(), silence_s=None if follow else _READ_S) as lines:
            for line in lines:
                yield line.decode(errors="replace")

    def proxy(self, pod: str, port: int, path: str, *, namespace: str | None = None, timeout_s: float | None = None) -> str:
        """What a server in a pod answers to GET, by way of the API server. Raises Unanswered."""
        asked, base = self._address("proxy", POD, f"{pod}:{port}", namespace, subresource="proxy")
        return self._answer(asked, "GET", f"{base}/{path.lstrip('/')}", repeat=False, timeout_s=timeout_s).text

    def exec_(
        self,
        pod: str,
        command: Sequence[str],
        *,
        namespace: str | None = None,
        container: str = "",
        stdin: BinaryIO | bytes | None = None,
        stdout: Callable[[bytes], None] | None = None,
        stderr: Callable[[bytes], None] | None = None,
        tty: bool = False,
        size: Callable[[], tuple[int, int]] | None = None,
    ) -> Ended:
        """Run a command in a container. What it writes is given to `stdout` and `stderr`, or is in the result.

        `stdin` is what it reads; a file is read by a thread of its own, to its end. `size` tells the columns and lines of the
        terminal, for `tty`; it is asked again and again.
        """
        params: list[tuple[str, str]] = [("command", word) for word in command]
        params += [("stdout", "true")] + ([] if tty else [("stderr", "true")])
        params += [("container", container)] if container else []
        params += [("stdin", "true")] if stdin is not None else []
        params += [("tty", "true")] if tty else []
        asked, path = self._address("exec", POD, pod, namespace, subresource="exec")
        kept: dict[int, list[bytes]] = {1: [], 2: []}
        sinks = {1: stdout or kept[1].append, 2: stderr or kept[2].append}
        with self._websocket(asked, path, params, "v5.channel.k8s.io") as connection, _sized(connection, size):
            if isinstance(stdin, bytes):
                connection.send_bytes(b"\0" + stdin)
                connection.send_bytes(b"\xff\0")
            elif stdin is not None:
                threading.Thread(target=_feed, args=(connection, stdin), daemon=True).start()
            for message in _messages(connection, asked):
                channel, rest = message[0], message[1:]
                if channel == 3:
                    return Ended(_exit_code(rest, asked), b"".join(kept[1]), b"".join(kept[2]))
                if rest and channel in sinks:
                    sinks[channel](rest)
        raise Unanswered(f"{asked.thing}: the connection ended before the command did; the command may still run")

    def forward(self, pod: str, port: int, connection: socket.socket, *, namespace: str | None = None) -> None:
        """Carry what comes over a connection to a port of a pod, and what it answers back, until the pod ends it.

        Whoever asked may have said all and still read; they are taken for gone when nothing has come for a while. Raises
        Unanswered with what the node says when nothing listens there.
        """
        asked, path = self._address("portforward", POD, pod, namespace, subresource="portforward")
        with self._websocket(asked, path, [("ports", str(port))], "v4.channel.k8s.io") as there:
            gone = threading.Event()
            threading.Thread(target=_upload, args=(connection, there, gone), daemon=True).start()
            begun: set[int] = set()
            for message in _messages(there, asked, gone):
                channel, rest = message[0], message[1:]
                if channel not in begun:  # the first message of each is the port
                    begun.add(channel)
                elif channel == 1 and rest:
                    raise Unanswered(f"{asked.thing}: port {port} does not answer: {rest.decode(errors='replace').strip()}")
                elif channel == 0:
                    try:
                        connection.sendall(rest)
                    except OSError:  # who asked has gone
                        return

    # the cluster

    def may(
        self,
        verb: str,
        kind: Kind,
        *,
        name: str = "",
        subresource: str = "",
        namespace: str | None = None,
        everywhere: bool = False,
    ) -> bool:
        """Whether we have the right to do something (SelfSubjectAccessReview)."""
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural, "name": name, "subresource": subresource}
        if kind.namespaced and not everywhere:
            attributes["namespace"] = namespace or self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        asked = Asked("create", server=self.server)
        answer = self._answer(asked, "POST", "apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review, repeat=True)
        return bool(_parsed(answer.content, asked)["status"].get("allowed"))

    def version(self) -> str:
        """The server's version: `v1.36.2`."""
        return str(self.raw("version")["gitVersion"])

    def time(self) -> float:
        """The server's time, to half a second: its documents carry it. Raises Refused if it does not say."""
        asked = Asked("get", server=self.server)
        said = self._answer(asked, "GET", "version").headers.get("date", "")
        try:
            return email.utils.parsedate_to_datetime(said).timestamp() + 0.5  # whole seconds, cut off
        except ValueError as error:
            raise Refused(f"the API server says no time (Date: {said!r}); a proxy before it may remove that header") from error

    def serves(self, kind: Kind) -> bool:
        """Whether the cluster knows a kind of document."""
        try:
            found = self.raw(kind.root)
        except (Absent, NotServed):
            return False
        return any(resource["name"] == kind.plural for resource in found.get("resources", ()))

    def has_namespace(self, namespace: str | None = None) -> bool:
        """Whether a namespace exists; True when we may not know."""
        try:
            self.get(NAMESPACE, namespace or self.namespace)
        except Absent:
            return False
        except Forbidden:
            return True
        return True

    def raw(self, path: str) -> Document:
        """What the server has at a path: discovery, `readyz?verbose` and the like have no kind."""
        asked = Asked("get", server=self.server)
        return _parsed(self._answer(asked, "GET", path.lstrip("/")).content, asked)

    def close(self) -> None:
        """Close all connections."""
        self.clients.close()

    # requests

    def _of(self, document: Document) -> tuple[Kind, str, str | None]:
        meta = document["metadata"]
        return kind_of(document), meta.get("name", ""), meta.get("namespace")

    def _address(
        self,
        verb: str,
        kind: Kind,
        name: str,
        namespace: str | None,
        *,
        everywhere: bool = False,
        subresource: str = "",
    ) -> tuple[Asked, str]:
        inside = (namespace or self.namespace) if kind.namespaced and not everywhere else ""
        parts = [kind.root, *(["namespaces", quote(inside, safe="")] if inside else []), kind.plural]
        parts += [quote(name, safe=":")] if name else []
        parts += [subresource] if subresource else []
        shown = name.partition(":")[0] if subresource == "proxy" else name
        return Asked(verb, kind, shown, inside, self.server, subresource), "/".join(parts)

    def _document(
        self,
        verb: str,
        method: str,
        kind: Kind,
        name: str,
        *,
        namespace: str | None,
        subresource: str = "",
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        tries: int | None = None,
        timeout_s: float | None = None,
    ) -> Document:
        asked, path = self._address(verb, kind, name, namespace, subresource=subresource)
        if verb == "create":
            asked = Asked(verb, kind, body["metadata"].get("name", ""), asked.namespace, self.server)
        repeat = verb in ("get", "apply", "delete")
        answer = self._answer(
            asked,
            method,
            path,
            params=params,
            body=body,
            content_type=content_type,
            repeat=repeat,
            tries=tries,
            timeout_s=timeout_s,
        )
        return _parsed(answer.content, asked)

    def _pages(
        self, kind: Kind, *, namespace: str | None, everywhere: bool, labels: str, fields: str
    ) -> Iterator[tuple[Iterator[Document], str]]:
        """The pages of a list, each with its version; documents are parsed one at a time. Raises _Expired when the list has grown
        too old: what came before is of no use."""
        asked, path = self._address("list", kind, "", namespace, everywhere=everywhere)
        token, limit = "", _FIRST if kind in wire.FREE else _PAGE
        while True:
            params = {**_selectors(labels, fields), "limit": str(limit), **({"continue": token} if token else {})}
            try:
                answer = self._answer(asked, "GET", path, params=params, most=_PAGE_BYTES if limit > 3 else None)
            except _TooLong:
                limit //= 4
                continue
            content: bytes = answer.extensions.pop("whole", None) or answer.content
            with _reading(content, asked):
                meta, items = wire.page(content, kind)
            token = meta.get("continue") or ""
            yield _items(items, kind, content, asked), str(meta.get("resourceVersion", ""))
            if not token:
                return
            if len(content) < _PAGE_BYTES // 4:
                limit = min(_PAGE, 2 * limit)

    def _answer(
        self,
        asked: Asked,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        repeat: bool | None = None,
        tries: int | None = None,
        timeout_s: float | None = None,
        most: int | None = None,
    ) -> httpx2.Response:
        """What the server answers; raises what it refuses.

        A request that it has not taken is made again a few times; so is one that it may have taken, if it may be repeated. An
        answer of which no more than `most` bytes are read has them in its extensions, as `whole`; raises _TooLong for more.
        """
        import httpx2

        timeout = httpx2.USE_CLIENT_DEFAULT if timeout_s is None else httpx2.Timeout(timeout_s)
        repeat = method == "GET" if repeat is None else repeat
        tries = tries or _TRIES
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": content_type}
        for attempt in range(1, tries + 1):
            answer = None
            try:
                client = self.client
                request = client.build_request(method, path, params=params, content=content, headers=headers, timeout=timeout)
                answer = client.send(request, stream=True)
                try:
                    _read(answer, asked, most)
                finally:
                    answer.close()
                self._note(answer)
                if answer.is_success:
                    return answer
                wrong = _mistake(answer.status_code, answer.content, asked)
                again = answer.status_code == 429 or (repeat and isinstance(wrong, Unanswered))
            except _TooLong:
                raise
            except Exception as error:
                wrong = _unreached(error, asked)
                again = isinstance(error, httpx2.ConnectError) or (repeat and isinstance(error, httpx2.TransportError))
                again = again and not isinstance(error, httpx2.ConnectTimeout)
                if attempt == tries or not again:
                    raise wrong from error
            if attempt == tries or not again:
                raise wrong
            time.sleep(_pause(attempt, answer))
        raise AssertionError

    @contextlib.contextmanager
    def _stream(
        self, asked: Asked, path: str, params: Mapping[str, str], stop: Stop, *, silence_s: float | None
    ) -> Generator[Iterator[bytes], None, None]:
        """The lines of an answer as they come, without their ends; they end when `stop` is set."""
        import httpx2

        timeout = httpx2.Timeout(_READ_S, connect=_CONNECT_S, pool=None)
        timeout.read = silence_s
        request = self.client.build_request("GET", path, params=params, timeout=timeout)
        try:
            answer = self.client.send(request, stream=True)
        except Exception as error:
            raise _unreached(error, asked) from error
        try:
            if not answer.is_success:
                raise _mistake(answer.status_code, answer.read(), asked)
            self._note(answer)
            network = answer.extensions.get("network_stream")
            with stop.holding(network.get_extra_info("socket") if network else None):
                yield _lines(answer, asked, stop)
        finally:
            answer.close()

    @contextlib.contextmanager
    def _websocket(
        self, asked: Asked, path: str, params: list[tuple[str, str]], protocol: str
    ) -> Generator[WebSocketSession, None, None]:
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        with contextlib.closing(self.tunnel()) as client:
            opened = client.websocket(path, subprotocols=[protocol], params=params, max_message_size_bytes=_MESSAGE)  # type: ignore[arg-type]
            try:
                connection = opened.__enter__()
            except WebSocketUpgradeError as error:
                raise _mistake(error.response.status_code, error.response.content, asked) from error
            except Exception as error:
                raise _unreached(error, asked) from error
            try:
                yield connection
            finally:
                _end(connection)
                # Its reader must have seen the end: a socket must not be closed while somebody reads from it. When the server has
                # ended the connection, the reader is gone and nothing more comes.
                with contextlib.suppress(HTTPXWSException, TimeoutError):
                    while True:
                        connection.receive_bytes(timeout=_LAST_S)
                opened.__exit__(None, None, None)

    def _note(self, answer: httpx2.Response) -> None:
        """Keep what the server warns of: https://kubernetes.io/blog/2020/09/03/warnings/."""
        for value in answer.headers.get_list("warning"):
            said = value.partition('"')[2].rpartition('"')[0].replace('\\"', '"')
            if said and said not in self.warnings:
                self.warnings.append(said)


def said(document: Document) -> Document:
    """A document without what the API server writes into it."""
    meta = {key: value for key, value in document["metadata"].items() if key not in _SERVERS}
    return {**{key: value for key, value in document.items() if key != "status"}, "metadata": meta}


class _Gone(Exception):
    """The server has forgotten what came after the version that was asked for (410)."""


class _Expired(Refused):
    """The rest of a list is no longer to be had (410)."""


class _TooLong(Refused):
    """An answer is longer than what was to be read of it."""


def _mistake(status: int, body: bytes, asked: Asked) -> ClusterError:
    if status == 410 and asked.verb == "list":
        return _Expired(f"{asked.thing} cannot be listed: the list has grown too old")
    if status == 410 and asked.verb == "watch":
        raise _Gone
    return error_mapping.mistake(status, body, asked)


def _unreached(error: Exception, asked: Asked) -> ClusterError:
    """What it means that a request had no answer."""
    import httpx2
    from lightkube.core.exceptions import ConfigError

    text = str(error) or type(error).__name__
    if isinstance(error, ClusterError):
        return error
    if isinstance(error, ConfigError):
        return Unauthorized(f"the login to {asked.server} failed: {' '.join(text.split())[:400]}; log in again")
    if isinstance(error, FileNotFoundError):
        return Unauthorized(f"the login program {error.filename} of the kubeconfig is not installed; install it")
    if isinstance(error, (KeyError, ValueError)) and not isinstance(error, httpx2.InvalidURL):
        return Unauthorized(f"the login program of the kubeconfig for {asked.server} gave no token ({text}); log in again")
    if isinstance(error, httpx2.TimeoutException):
        why = "it does not answer in time"
    elif "CERTIFICATE" in text or "certificate" in text:
        why = f"its certificate is not the one that the kubeconfig trusts ({text})"
    elif "Name or service" in text or "name resolution" in text or "nodename" in text:
        why = "its host is not known (DNS)"
    elif "refused" in text:
        why = "the connection was refused"
    elif isinstance(error, (httpx2.TransportError, httpx2.StreamError, httpx2.InvalidURL, OSError)):
        why = f"the connection was lost ({text})"
    else:
        raise error
    return Unanswered(f"the API server {asked.server} cannot be reached: {why}; look at the network, the VPN, or the context")


def _pause(attempt: int, answer: httpx2.Response | None = None) -> float:
    """Seconds before the next attempt: growing, random, and no less than the server asks for."""
    wanted = answer.headers.get("retry-after", "") if answer is not None else ""
    least = float(wanted) if wanted.isdecimal() else 0.0
    return min(_LONGEST_PAUSE_S, max(least, backoff.jittered(backoff.exponential(attempt, 0.25, 256.0))))


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {**({"labelSelector": labels} if labels else {}), **({"fieldSelector": fields} if fields else {})}


def _parsed(content: bytes, asked: Asked) -> Document:
    with _reading(content, asked):
        return wire.document(content, asked.kind)


@contextlib.contextmanager
def _reading(content: bytes, asked: Asked) -> Iterator[None]:
    """Say what it means that this is not what an API server writes. Raises Unanswered."""
    try:
        yield
    except ValueError as error:
        said = content[:80].decode(errors="replace")
        raise Unanswered(f"{asked.server} does not answer as an API server: {said!r}; look at the context's server") from error


def _items(items: Iterator[Document], kind: Kind, content: bytes, asked: Asked) -> Iterator[Document]:
    """The documents of a page, which do not say what they are."""
    with _reading(content, asked):
        for item in items:
            yield {"apiVersion": kind.api_version, "kind": kind.kind, **item}


def _read(answer: httpx2.Response, asked: Asked, most: int | None) -> None:
    """Read an answer to its end, unless it is good and longer than that."""
    if most is None or not answer.is_success:
        answer.read()
        return
    parts, size = [], 0
    for part in answer.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > most:
            raise _TooLong(f"{asked.thing}: the answer takes more than {most >> 20} MiB")
    answer.extensions["whole"] = b"".join(parts)


def _lines(answer: httpx2.Response, asked: Asked, stop: Stop) -> Iterator[bytes]:
    rest = b""
    try:
        for part in answer.iter_bytes():
            *whole, rest = (rest + part).split(b"\n")
            yield from whole
            if stop.is_set():
                return
    except Exception as error:
        if stop.is_set():
            return
        raise _unreached(error, asked) from error
    if rest and not stop.is_set() and asked.verb != "watch":  # half an event is none
        yield rest


class _Known:
    """What a watch has said, so that a new list can be compared with it, and what has vanished can be named."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, tuple[str, str], bytes]] = {}
        """Version, place and text by uid: of documents, Python makes ten times their text."""

    def note(self, change: Change) -> None:
        """A watch says this."""
        if change.type == "deleted":
            self._held.pop(change.document["metadata"]["uid"], None)
        else:
            self._hold(change.document)

    def differences(self, pages: Iterable[tuple[Iterable[Document], str]]) -> Generator[Change, None, str]:
        """What a new list says to who has heard all this; its version. What has another's name now has vanished before that
        came."""
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


def _end(connection: WebSocketSession) -> None:
    """End a websocket: whoever reads from it sees its end, and closes it."""
    if (there := connection.stream.get_extra_info("socket")) is not None:
        _hang_up(there, socket.SHUT_RD)


def _messages(connection: WebSocketSession, asked: Asked, gone: threading.Event | None = None) -> Iterator[bytes]:
    """What comes over a websocket, until it is closed, or nothing comes for a while and who wanted it has `gone`."""
    from httpx2.websockets import WebSocketDisconnect, WebSocketNetworkError

    while True:
        try:
            message = connection.receive_bytes(timeout=None if gone is None else _GONE_S)
        except WebSocketDisconnect:
            return
        except TimeoutError:
            if gone is not None and gone.is_set():
                return
            continue
        except (WebSocketNetworkError, OSError) as error:
            if gone is not None and gone.is_set():
                return
            raise Unanswered(f"{asked.thing}: the connection to the API server was lost; try again") from error
        if message:
            yield message


def _feed(connection: WebSocketSession, source: BinaryIO) -> None:
    """Send what is read from a file, as it can be had."""
    with contextlib.suppress(Exception):  # the command has ended; what it did not read is of no use
        while part := os.read(source.fileno(), 32 * 1024):
            connection.send_bytes(b"\0" + part)
        connection.send_bytes(b"\xff\0")


@contextlib.contextmanager
def _sized(connection: WebSocketSession, size: Callable[[], tuple[int, int]] | None) -> Iterator[None]:
    """Send the size of a terminal, and again whenever that is another."""
    if size is None:
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        old = None
        with contextlib.suppress(Exception):  # the command has ended
            while not ended.is_set():
                if (new := size()) != old:
                    connection.send_bytes(b"\4" + json.dumps({"Width": new[0], "Height": new[1]}).encode())
                    old = new
                ended.wait(_SIZE_S)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _upload(source: socket.socket, there: WebSocketSession, gone: threading.Event) -> None:
    """Send what comes over a connection, and say when no more does. The protocol has no word for that, so the pod is not told;
    what it still answers is read."""
    try:
        while part := source.recv(32 * 1024):
            there.send_bytes(b"\0" + part)
        gone.set()
    except Exception:  # either side has gone altogether
        gone.set()
        _end(there)


def _exit_code(content: bytes, asked: Asked) -> int:
    """The exit code in the Status with which a command ends. Raises Refused when it could not be started."""
    status = _parsed(content, asked)
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise Refused(f"nothing can be run in {asked.thing}: {status.get('message')}")
