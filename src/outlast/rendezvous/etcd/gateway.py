"""An etcd v3 client for keys, leases, transactions and watches, which uses etcd's JSON gateway.

    etcd://host:2379,host2:2379/prefix       plain; several endpoints of one etcd, of which the first healthy one is used
    etcds://host:2379                        TLS

The gateway is part of every etcd since 3.4 (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/), so we need no client package,
and no gRPC library in processes that fork. A request whose response is lost may be executed twice. This is harmless because
callers make their writes conditional: the second time, the conditions fail, and the caller finds the value that it has written.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from outlast.base import tcp
from outlast.base.errors import EtcdAway, EtcdError, EtcdRefused, OutlastError
from outlast.job.contract import ETCD, Env

if TYPE_CHECKING:
    import ssl

SCHEME, SECURE = ETCD
PORT = 2379
PREFIX = "/outlast"
ANSWER_S = 2.0
"""Default timeout for a request to one endpoint, in seconds."""
LOGIN_S = 20.0
"""Timeout for a login, in seconds. It is long because etcd spends 60 ms of a core on each password, and all of a job's workers
may log in at once."""
_IDLE_S, _PROBE_S, _LOST_S = 5, 2, 11.0
"""TCP keepalive settings for a watch; see `tcp.ends_when_lost`."""
_HOST = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::(\d+))?|([^\[\]:@/]+)(?::(\d+))?")
_AGAIN = (1, 4, 8, 10, 13, 14)
"""gRPC codes of errors to retry: cancelled, deadline exceeded, exhausted, aborted, internal, unavailable."""
_UNAUTHENTICATED = 16
_OLD = re.compile("revision .* is old")
"""etcd's message for an outdated JWT."""
_NO_USER = "user name is empty"
_REFUSED = re.compile(f"{_NO_USER}|authentication failed|permission denied")
"""etcd's messages for requests that this user may not make."""
OPTIONS = {
    "prefix": Env.ETCD_PREFIX,
    "cacert": Env.ETCD_CACERT,
    "cert": Env.ETCD_CERT,
    "key": Env.ETCD_KEY,
    "user": Env.ETCD_USER,
    "password": Env.ETCD_PASSWORD,
}
"""Options besides the endpoint, with the environment variables for their defaults."""


class Host(NamedTuple):
    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Address:
    hosts: tuple[Host, ...]
    prefix: str = PREFIX
    tls: bool = False
    cacert: str = ""
    """File with certificate authorities; empty to trust those of this machine."""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return "etcd at " + ", ".join(map(str, self.hosts))


@dataclass(frozen=True)
class KeyValue:
    """A key and its value at some revision."""

    key: str
    value: str
    created: int
    """Revision at which the key was created."""
    modified: int
    lease: int = 0


@dataclass(frozen=True)
class Gone:
    """A key that was deleted, or whose lease expired."""

    key: str
    modified: int


@dataclass(frozen=True)
class Outcome:
    """A transaction's result: whether its comparisons held, and the keys read by the executed branch."""

    succeeded: bool
    revision: int
    kvs: tuple[KeyValue, ...] = ()


class LeaseGone(EtcdError):
    """Raised if the lease has expired, or etcd has lost it."""


class Behind(EtcdError):
    """Raised if the first revision of a watch is compacted or does not exist yet. The caller must list the keys again."""


def address(endpoint: str, options: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None) -> Address:
    """Parse an endpoint and options (see OPTIONS); defaults come from the environment. Raises OutlastError."""
    environ = os.environ if environ is None else environ
    values = {name: (options or {}).get(name) or environ.get(variable) or "" for name, variable in OPTIONS.items()}
    secure = endpoint.startswith(SECURE)
    hosts, slash, path = endpoint.removeprefix(SECURE).removeprefix(SCHEME).partition("/")
    endpoints = []
    for text in hosts.split(","):
        match = _HOST.fullmatch(text.strip())
        port = int((match[2] or match[4] or PORT) if match else 0)
        if not match or not 0 < port < 65536:
            raise OutlastError(f"{endpoint!r} is not an etcd endpoint; expected etcd://host:2379, with commas between several")
        endpoints.append(Host(match[1] or match[3], port))
    if bool(values["cert"]) != bool(values["key"]):
        raise OutlastError(f"of cert ({values['cert']!r}) and key ({values['key']!r}) one is missing; set both or neither")
    if bool(values["user"]) != bool(values["password"]):
        raise OutlastError("of user and password for the etcd one is missing; set both or neither")
    prefix = (values.pop("prefix") or (slash + path)).rstrip("/") or PREFIX
    return Address(tuple(endpoints), "/" + prefix.lstrip("/"), secure or bool(values["cacert"] or values["cert"]), **values)


class Etcd:
    """A process's connection to etcd, opened by the first request and shared by all threads."""

    def __init__(self, where: Address, *, answer_s: float = ANSWER_S) -> None:
        """`answer_s` is the timeout for a request to one endpoint, after which the next endpoint is tried."""
        self.address, self._answer_s = where, answer_s
        self.requests = 0
        self.local = ""
        """Our address on the connection to etcd; empty before the first request."""
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._at = 0
        self._token = ""
        self._tls: ssl.SSLContext | None = None
        self._answered = False
        """True after the first response, which proves that the address is right."""
        self._watching: dict[socket.socket, int] = {}
        """The sockets of watches, with the indices of their hosts."""
        self._closed = False

    # Calls

    def range(self, key: str, *, prefix: bool = False) -> Outcome:
        """Read a key, or with `prefix` all keys that begin with it. A watch can continue after `Outcome.revision`."""
        answer = self.ask("kv/range", range_(key, prefix=prefix)["request_range"])
        return Outcome(True, int(answer["header"]["revision"]), tuple(_keyvalue(kv) for kv in answer.get("kvs", ())))

    def txn(
        self,
        compare: Sequence[Mapping[str, Any]],
        then: Sequence[Mapping[str, Any]],
        otherwise: Sequence[Mapping[str, Any]] = (),
    ) -> Outcome:
        """Execute `then` if all comparisons hold, and `otherwise` if not. Both are lists of requests built by `range_`, `put` and
        `delete`. Raises LeaseGone."""
        answer = self.ask("kv/txn", {"compare": list(compare), "success": list(then), "failure": list(otherwise)})
        parts = [part["response_range"] for part in answer.get("responses", ()) if "response_range" in part]
        kvs = tuple(_keyvalue(kv) for part in parts for kv in part.get("kvs", ()))
        return Outcome(bool(answer.get("succeeded")), int(answer["header"]["revision"]), kvs)

    def grant(self, seconds: int) -> int:
        return int(self.ask("lease/grant", {"TTL": str(seconds)})["ID"])

    def keep(self, lease: int) -> None:
        """Renew a lease. Raises LeaseGone."""
        answer = self.ask("lease/keepalive", {"ID": str(lease)})
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            raise LeaseGone("the lease has expired")

    def left(self, lease: int) -> int | None:
        """Return a lease's remaining seconds; None if it has expired."""
        seconds = int(self.ask("lease/timetolive", {"ID": str(lease)}).get("TTL", 0))
        return seconds if seconds >= 0 else None

    def revoke(self, lease: int) -> None:
        """Revoke a lease, which deletes its keys."""
        with contextlib.suppress(LeaseGone):
            self.ask("lease/revoke", {"ID": str(lease)})

    def watch(self, prefix: str, after: int) -> Generator[Sequence[KeyValue | Gone], None, None]:
        """Yield the events after a revision for keys with this prefix, forever. The first item, sent when the watch starts, is
        empty.

        Raises Behind if the revision is compacted or not reached yet, and EtcdAway if the connection ends, as after `interrupt`.
        """
        with self._lock:
            self._check_open()
            connection, where = self._connect(self._at), self.address.hosts[self._at]
            token, sock = self._token, connection.sock
            self._watching[sock] = self._at
        if self._closed:
            self.interrupt()
        try:
            request = {**range_(prefix, prefix=True)["request_range"], "start_revision": str(after + 1)}
            with self._send(connection, "watch", {"create_request": request}, token) as answer:
                if answer.status != 200:
                    self._refused(where, answer.status, answer.read(), token)
                sock.settimeout(None)
                tcp.ends_when_lost(sock, _LOST_S, idle_s=_IDLE_S, probe_s=_PROBE_S)
                while line := answer.readline():
                    message = json.loads(line)
                    if "error" in message:
                        raise EtcdAway(f"etcd at {where} ended a watch: {message['error'].get('message', message['error'])}")
                    result = message["result"]
                    if result.get("canceled") or (result.get("created") and int(result["header"]["revision"]) < after):
                        raise Behind(f"etcd at {where} does not have revision {after + 1}")
                    yield [_event(event) for event in result.get("events", ())]
            raise EtcdAway(f"etcd at {where} ended a watch")
        except (OSError, ValueError, http.client.HTTPException) as problem:
            raise EtcdAway(f"etcd at {where} ended a watch: {_why(problem)}") from problem
        finally:
            self._watching.pop(sock, None)
            connection.close()

    def interrupt(self) -> None:
        """End all watches. Call this if their endpoints may be dead."""
        self._end(list(self._watching))

    def _end(self, watches: Sequence[socket.socket]) -> None:
        for sock in watches:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect, after any pending request. Further requests raise EtcdAway."""
        self._closed = True
        self.interrupt()
        if self._lock.acquire(timeout=self._answer_s):
            self._hang_up()
            self._lock.release()

    # Requests

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the gateway and return the response. `path` is relative to `/v3/`. Raises EtcdError."""
        with self._lock:
            self._check_open()
            try:
                return self._from_any_endpoint(path, body)
            finally:
                if self._closed:
                    self._hang_up()

    def _check_open(self) -> None:
        if self._closed:
            raise EtcdAway(f"{self.address}: the connection was closed")

    def _from_any_endpoint(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of the first healthy endpoint, trying the last used endpoint first."""
        first, problems = self._at, list[OutlastError]()
        for n in range(len(self.address.hosts)):
            self._at = (first + n) % len(self.address.hosts)
            try:
                answer = self._answer(path, body)
            except (EtcdAway, _Useless) as problem:
                self._hang_up()
                problems.append(problem)
                continue
            # a watch on an unhealthy endpoint may stay silent forever
            self._end([sock for sock, at in list(self._watching.items()) if at != self._at])
            return answer
        self._at = (first + 1) % len(self.address.hosts)
        if len(problems) == 1:
            raise problems[0]
        kind = EtcdAway if any(isinstance(problem, EtcdAway) for problem in problems) else EtcdRefused
        raise kind("; ".join(dict.fromkeys(map(str, problems)))) from problems[-1]

    def _answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the current endpoint's response, on a new connection if the server has closed the old one."""
        where = self.address.hosts[self._at]
        reused, logged_in = self._connection is not None, False
        while True:
            if self._connection is None:
                self._connection = self._connect(self._at)
            try:
                with self._send(self._connection, path, body, self._token) as answer:
                    text = answer.read()
            except TimeoutError as problem:
                if not reused:  # an etcd that has lost its data may never respond to an older token
                    self._token = ""
                raise EtcdAway(f"etcd at {where} does not answer within {self._answer_s:.2g} s") from problem
            except (OSError, http.client.HTTPException) as problem:
                self._hang_up()
                failed = self._failed(where, problem)  # with TLS 1.3, the first response reports a rejected certificate
                if reused and isinstance(failed, EtcdAway):
                    reused = False
                    continue
                raise failed from problem
            if answer.status == 200:
                self._answered = True
                with contextlib.suppress(ValueError):
                    content = json.loads(text)
                    if isinstance(content, dict) and ("header" in content or "result" in content):
                        return content
                raise _Useless(f"etcd at {where} is not an etcd: it answers {text[:60]!r}")
            try:
                self._refused(where, answer.status, text, self._token)
            except _Expired as problem:
                if logged_in:
                    raise EtcdRefused(
                        f"etcd at {where} rejects the token that it has issued to user {self.address.user}"
                    ) from problem
                reused, logged_in, self._token = False, True, ""
                self._hang_up()

    def _connect(self, at: int) -> http.client.HTTPConnection:
        """Open a connection to an endpoint, and log in if a user is set. Raises EtcdAway and EtcdRefused."""
        where = self.address.hosts[at]
        connection = http.client.HTTPConnection(*where, timeout=self._answer_s)
        if self.address.tls:
            connection = http.client.HTTPSConnection(*where, timeout=self._answer_s, context=self._context())
        try:
            connection.connect()
            self.local = connection.sock.getsockname()[0]
            if self.address.user and not self._token:
                self._log_in(connection, where)
        except OutlastError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise self._failed(where, problem) from problem
        return connection

    def _log_in(self, connection: http.client.HTTPConnection, where: Host) -> None:
        login = {"name": self.address.user, "password": self.address.password}
        connection.sock.settimeout(LOGIN_S)
        with self._send(connection, "auth/authenticate", login, "") as answer:
            text = answer.read()
        if connection.sock:
            connection.sock.settimeout(self._answer_s)
        if answer.status == 200:
            self._token = json.loads(text)["token"]
        elif b"authentication is not enabled" not in text:
            self._refused(where, answer.status, text, "")

    def _context(self) -> ssl.SSLContext:
        import ssl

        if self._tls is None:
            where = self.address
            try:
                self._tls = ssl.create_default_context(cafile=where.cacert or None)
                if where.cert:
                    self._tls.load_cert_chain(where.cert, where.key)
            except OSError as problem:  # includes SSLError
                files = ", ".join(filter(None, (where.cacert, where.cert, where.key)))
                raise EtcdRefused(f"{files}: {_why(problem)}; expected files in PEM format") from problem
        return self._tls

    def _send(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any], token: str
    ) -> http.client.HTTPResponse:
        self.requests += 1
        headers = {"Authorization": token} if token else {}
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        return connection.getresponse()

    def _refused(self, where: Host, status: int, text: bytes, token: str) -> NoReturn:
        """Raise the error for a response that is not 200."""
        user = self.address.user
        try:
            error = json.loads(text)
            code, message = int(error["code"]), str(error.get("message") or error.get("error")).removeprefix("etcdserver: ")
        except (ValueError, KeyError, TypeError):
            if status >= 500:
                raise EtcdAway(f"etcd at {where} is not well: HTTP {status}") from None
            expected = f"expected etcd 3.4 or newer, with its JSON gateway on this port ({SECURE} if it speaks TLS)"
            raise _Useless(f"etcd at {where} answers a v3 request with HTTP {status}: {text[:200]!r}; {expected}") from None
        if token and (code == _UNAUTHENTICATED or _OLD.search(message)):
            raise _Expired(message)
        if not token and user and _NO_USER in message:  # users were created after we connected
            raise _Expired(message)
        if "lease not found" in message:
            raise LeaseGone(message)
        if "space exceeded" in message:
            remedy = "compact and defragment it, or raise its --quota-backend-bytes; then run `etcdctl alarm disarm`"
            raise EtcdRefused(f"etcd at {where} has reached its space quota and accepts no writes ({message}); {remedy}")
        if code == _UNAUTHENTICATED or _REFUSED.search(message):
            remedy = f"set a user ({Env.ETCD_USER}, ...) who may read and write below {self.address.prefix}/"
            raise EtcdRefused(f"etcd at {where} refuses user {user!r}: {message}; {remedy}")
        if code in _AGAIN:
            raise EtcdAway(f"etcd at {where} is not well: {message}")
        raise EtcdError(f"etcd at {where} rejects a request: {message} (code {code})")

    def _failed(self, where: Host, problem: Exception) -> OutlastError:
        """Return the error for a connection that failed or ended without a response. A bad client certificate may cause either:
        with TLS 1.3 the server checks the certificate after the handshake, and the server's alert may be lost."""
        self._tls = None  # read the files again, in case they were renewed
        why = f"etcd at {where} cannot be reached: {_why(problem)}"
        hint = f"; check {SCHEME} or {SECURE} (TLS), and cacert, cert and key"
        if "CERTIFICATE" in str(problem):
            return _Useless(why + hint)
        plain = self._answered or isinstance(problem, ConnectionRefusedError | TimeoutError | socket.gaierror)
        return EtcdAway(why if plain else why + hint)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Useless(EtcdRefused):
    """Raised if this endpoint cannot serve our requests; another endpoint may."""


class _Expired(EtcdAway):
    """Raised if our token has expired, or if etcd has begun to require a token."""


# Parts of a transaction


def range_(key: str, *, prefix: bool = False) -> dict[str, Any]:
    """Build a read of a key, or of all keys with this prefix."""
    end = key[:-1] + chr(ord(key[-1]) + 1)  # the first key after those with this prefix
    return {"request_range": {"key": _b64(key), **({"range_end": _b64(end)} if prefix else {})}}


def put(key: str, value: str, lease: int = 0) -> dict[str, Any]:
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": _b64(key)}}


def created(key: str, revision: int) -> dict[str, Any]:
    """Build the condition that the key was created at this revision; 0 means that the key does not exist."""
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def modified(key: str, revision: int) -> dict[str, Any]:
    """Build the condition that the key was last written at this revision; 0 means that the key does not exist."""
    return {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def holds(key: str, value: str) -> dict[str, Any]:
    return {"key": _b64(key), "target": "VALUE", "result": "EQUAL", "value": _b64(value)}


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode(errors="replace")


def _keyvalue(kv: Mapping[str, Any]) -> KeyValue:
    revisions = int(kv["create_revision"]), int(kv["mod_revision"])
    return KeyValue(_text(kv["key"]), _text(kv.get("value", "")), *revisions, int(kv.get("lease", 0)))


def _event(event: Mapping[str, Any]) -> KeyValue | Gone:
    kv = event["kv"]
    return Gone(_text(kv["key"]), int(kv["mod_revision"])) if event.get("type") == "DELETE" else _keyvalue(kv)


def _why(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
