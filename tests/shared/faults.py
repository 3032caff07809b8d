"""A proxy in front of a real server that does what networks and stores do on a bad day, to the requests that a test chooses.

    def test_x(moto_proxy):                       the environment leads through the proxy to a fresh bucket of moto
        moto_proxy.fault = first(2, unavailable)  503 for two requests, then all is well
        moto_proxy.fault = lambda request: lost if request.method == "PUT" and "COMMIT" in request.path else None
        ...
        assert moto_proxy.counts["PUT"] == 3

A fault is a function of the exchange, which it answers, or not. `down()` and `up()` close and open the port.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from servers import Place


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """Decoded path with the query."""
    headers: dict[str, str]
    """Names in lower case."""


Fault = Callable[["Exchange"], None]
Chooser = Callable[[Request], Fault | None]


class Exchange(BaseHTTPRequestHandler):
    """Connection of a client, whose requests follow one another."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.proxy.connections.append(self.connection)

    def exchange(self) -> None:
        length, proxy = int(self.headers.get("Content-Length") or 0), self.server.proxy
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client hung up
            self.close_connection = True
            return
        with proxy.lock:
            request = Request(self.command, unquote(self.path), {name.lower(): value for name, value in self.headers.items()})
            proxy.requests.append(request)
            fault = proxy.fault(request)
        (fault or passed)(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = exchange

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        host = urlsplit(self.server.proxy.place.server.endpoint).netloc
        connection = http.client.HTTPConnection(host, timeout=60)
        headers = {n: v for n, v in self.headers.items() if n.lower() not in ("connection", "transfer-encoding", "expect")}
        headers["Content-Length"] = str(len(self.body))
        try:
            connection.request(self.command, self.path, self.body, headers)
            answer = connection.getresponse()
            kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "transfer-encoding", "keep-alive")]
            return answer.status, kept, answer.read()
        finally:
            connection.close()

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes, send: Callable[[bytes], Any] | None = None) -> None:
        self.send_response_only(status)
        named = {name.lower() for name, _ in headers}
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in named and status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            (send or self.wfile.write)(body)

    def refuse(self, status: int, code: str, message: str = "for a test", more: str = "") -> None:
        """Respond with an error in S3's format."""
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>'.encode()
        self.reply(status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else body)

    def reset(self) -> None:
        """Reset the connection (RST) without a response."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients hang up, servers are killed: that is what tests are about


@dataclass
class Proxy:
    """Proxy of a place's server with a separate port."""

    place: Place
    fault: Chooser = lambda _: None
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)
    connections: list[socket.socket] = field(default_factory=list)
    port: int = 0
    _server: Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.place.url

    @property
    def counts(self) -> Counter[str]:
        with self.lock:
            return Counter(request.method for request in self.requests)

    def up(self) -> None:
        """Listen on the port; after `down`, on the same port."""
        self._server = Server(("127.0.0.1", self.port), Exchange)
        self._server.proxy = self
        self.port = self._server.server_address[1]
        self.closing.clear()
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Refuse new connections, and cut open ones."""
        self.closing.set()
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def forget(self) -> None:
        with self.lock:
            self.requests.clear()


def passed(exchange: Exchange) -> None:
    exchange.reply(*exchange.forward())


def refused(code: str, status: int = 403, message: str = "for a test") -> Fault:
    """Return a fault that responds with an error of S3, e.g. refused("InvalidAccessKeyId")."""
    return lambda exchange: exchange.refuse(status, code, message)


denied = refused("AccessDenied")
unavailable = refused("SlowDown", 503, "Please reduce your request rate.")
broken = refused("InternalError", 500, "We encountered an internal error. Please try again.")


def reset(exchange: Exchange) -> None:
    """Reset the connection before the server receives the request."""
    exchange.reset()


def lost(exchange: Exchange) -> None:
    """Forward the request, and reset the connection before the response."""
    exchange.forward()
    exchange.reset()


def hang(exchange: Exchange) -> None:
    """Accept the request, and never respond."""
    exchange.server.proxy.closing.wait(600)
    exchange.reset()


def half(then: Callable[[Exchange], None]) -> Fault:
    """Return a fault that sends half of the response, and does something else then."""

    def fault(exchange: Exchange) -> None:
        def send(body: bytes) -> None:
            exchange.wfile.write(body[: len(body) // 2])
            exchange.wfile.flush()
            then(exchange)

        exchange.reply(*exchange.forward(), send)

    return fault


stalled = half(hang)
truncated = half(lambda exchange: exchange.connection.shutdown(socket.SHUT_WR))


def slow(bytes_per_s: float) -> Fault:
    """Return a fault that sends the response slowly."""

    def fault(exchange: Exchange) -> None:
        def send(body: bytes) -> None:
            piece = max(1, int(bytes_per_s / 10))
            for start in range(0, len(body), piece):
                exchange.wfile.write(body[start : start + piece])
                exchange.wfile.flush()
                time.sleep(0.1)

        exchange.reply(*exchange.forward(), send)

    return fault


def first(n: int, fault: Fault, *, method: str = "", path: str = "") -> Chooser:
    """Apply the fault to the first `n` requests, optionally only of a method or with a path."""
    left = [n]

    def choose(request: Request) -> Fault | None:
        if left[0] and request.method.startswith(method) and path in request.path:
            left[0] -= 1
            return fault
        return None

    return choose


def always(fault: Fault, *, method: str = "", path: str = "") -> Chooser:
    return first(1 << 60, fault, method=method, path=path)


def before(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Yield a proxy of a place's server, and set the environment to it."""
    proxy = Proxy(place)
    proxy.up()
    place.env = {**place.env, "AWS_ENDPOINT_URL": proxy.endpoint}
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.down()


@pytest.fixture
def moto_proxy(moto: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    yield from before(moto, monkeypatch)


@pytest.fixture
def rclone_proxy(rclone: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    yield from before(rclone, monkeypatch)
