"""Real HTTP server of files, which can simulate faults of servers and networks.

    def test_x(web):
        url = web.put("data.bin", b"...")
        web.fault = lambda request: web.cut(100)          each body ends after 100 bytes
        ...
        assert len(web.requests) == 3

`fault` gets each request and returns None, to answer it well, or one of the faults below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest


@dataclasses.dataclass
class Request:
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    number: int
    """Index among all requests."""

    @property
    def range(self) -> tuple[int, int] | None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2] or sys.maxsize - 1)) if found else None


@dataclasses.dataclass
class Fault:
    """Difference of a response from a good one."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Additional headers; an empty value removes a header."""
    cut: int | None = None
    """Number of bytes of the body after which the connection ends."""
    rate: float = 0.0
    """Bytes per second; 0 means unlimited."""
    ranges: bool = True
    """False to ignore `Range`."""
    chunked: bool = False


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], object], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Have a function answer all requests on a port of this machine, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else what is written in two parts waits 40 ms for an acknowledgement

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # while the next request is waited for
                super().handle()

        def _any(self) -> None:
            answer(self)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Web:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        opened = contextlib.ExitStack()
        self.url, self.close = opened.enter_context(serving(self.answer, tls)), opened.close
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.requests: list[Request] = []
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self.slowed = threading.Event()
        """Set when a slow response has begun."""
        self._lock = threading.Lock()

    def put(self, name: str, content: bytes, *, etag: str = '"1"') -> str:
        self.files[f"/{name}"] = content
        self.etags[f"/{name}"] = etag
        return f"{self.url}/{name}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        with self._lock:
            request = Request(path, {k.lower(): v for k, v in handler.headers.items()}, len(self.requests))
            self.requests.append(request)
        fault = self.fault(request) or Fault()
        if fault.status or path not in self.files:
            return self._send(handler, fault.status or 404, {"Content-Length": "0", **fault.headers}, b"", fault)
        content, headers = self.files[path], {"ETag": fault.headers.get("ETag", self.etags[path])}
        status, body = 200, content
        if fault.ranges and request.range and request.headers.get("if-range") in (None, headers["ETag"]):
            first, last = request.range
            if first >= len(content):
                return self._send(handler, 416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"}, b"", fault)
            status, body = 206, content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        if fault.chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Content-Length"] = str(len(body))
        return self._send(handler, status, headers | fault.headers, body, fault)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            if value:
                handler.send_header(name, value)
        if "Content-Length" in headers and not headers["Content-Length"]:
            handler.close_connection = True
        handler.end_headers()
        sent = body if fault.cut is None else body[: fault.cut]
        step = max(1, int(fault.rate / 50)) if fault.rate else 1 << 20
        for start in range(0, len(sent), step):
            piece = sent[start : start + step]
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if fault.chunked else piece)
            if fault.rate:
                self.slowed.set()
                time.sleep(len(piece) / fault.rate)
        if fault.cut is not None and fault.cut < len(body):
            handler.close_connection = True
        elif fault.chunked:
            handler.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()
