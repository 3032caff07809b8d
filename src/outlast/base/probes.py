"""Serves a process's HTTP endpoints: `/healthz`, `/readyz` and `/metrics`, and for workers also `/end` and `/leave`.

A worker is healthy while it makes progress (a step, or a phase of startup), and ready while it is in a world. Everyone in the
cluster can reach the port, so connections are limited in number and duration. The oldest ones are closed first, so that kubelets
get a response under any load.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outlast.base.errors import OutlastError


@dataclass(frozen=True)
class Health:
    """The state that probes report."""

    healthy: bool = True
    ready: bool = False
    reason: str = "starting"
    end: str = ""
    """How the run ended (`join_run.Ended.dumps`), while the worker stays up afterwards; otherwise empty."""


MOST = 32
"""Maximum number of connections. A further one closes the oldest."""
IDLE_S = 5.0
"""Seconds after which a silent connection is closed."""
LONGEST_BODY = 4096
"""Maximum length of a request's body in bytes."""
_DIGITS = 6
BACKLOG = 128

Order = Callable[[Mapping[str, str], bytes], tuple[int, str]]
"""A thread-safe handler of POST requests. Given the headers and the body, it returns a status and a sentence."""


def serve(
    look: Callable[[], Health],
    metrics: Callable[[], str] = lambda: "",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    orders: Mapping[str, Order] | None = None,
) -> str:
    """Answer probes in background threads, and return the address `host:port`. Raises OutlastError if the port is taken. Port 0
    picks a free port; host "" listens on all addresses. `metrics` returns the text of `/metrics`, and `orders` maps paths to
    handlers of POST requests."""

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            if self.path == "/metrics":
                return self._answer(200, metrics())
            health = look()
            answers = {
                "/healthz": (200 if health.healthy else 503, health.reason + "\n"),
                "/readyz": (200 if health.ready else 503, health.reason + "\n"),
                "/end": (200 if health.end else 404, health.end),
            }
            self._answer(*answers.get(self.path, (404, "try /healthz, /readyz or /metrics\n")))

        def do_POST(self) -> None:
            order, length = (orders or {}).get(self.path), self.headers.get("Content-Length", "")
            if order is None:
                self._answer(404, "nothing is taken here\n")
            elif not (length.isascii() and length.isdecimal()):
                self._answer(411, "Content-Length is missing\n")
            elif len(length) > _DIGITS or int(length) > LONGEST_BODY:
                self._answer(413, f"at most {LONGEST_BODY} bytes are read\n")
            else:
                code, text = order({name.title(): value for name, value in self.headers.items()}, self.rfile.read(int(length)))
                self._answer(code, text + "\n")

        def _answer(self, code: int, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because probes come every few seconds."""

    class Server(_Bounded):
        address_family = socket.AF_INET if host or not socket.has_dualstack_ipv6() else socket.AF_INET6

    try:
        server = Server((host, port), Handler)
    except OSError as problem:
        remedy = "free it or choose another probe port (0 takes any free one)"
        raise OutlastError(f"cannot serve probes on {host}:{port}: {problem.strerror}; {remedy}") from problem
    threading.Thread(target=server.serve_forever, name="outlast-probes", daemon=True).start()
    return f"{host}:{server.server_address[1]}"


class _Bounded(ThreadingHTTPServer):
    """A server with at most `MOST` connections.

    A further one closes the oldest, which must be idle, because requests take milliseconds.
    """

    request_queue_size = BACKLOG

    def __init__(self, *args: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MOST else None
            if oldest is not None:
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, but not closed connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
