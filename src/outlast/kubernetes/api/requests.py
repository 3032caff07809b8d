"""Sends requests to an API server, retries them, and reads responses as a whole, as a stream of lines, or through a websocket.

All errors are `ClusterError`s, except `Gone`. All functions are thread-safe.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.base import backoff
from outlast.base.errors import ClusterError, Refused, Unanswered, Unauthorized
from outlast.kubernetes.api import document_parsing, error_mapping
from outlast.kubernetes.api.error_mapping import Subject
from outlast.kubernetes.api.stop import Stop, shut_down

if TYPE_CHECKING:
    import httpx2
    from httpx2.websockets import WebSocketSession

Document = dict[str, Any]

CONNECT_S = 10.0
READ_S = 65.0
"""Timeout for a response. The API server ends ordinary requests after 60 s."""
_MAX_MESSAGE = 2**20
"""Maximum size of a websocket message, in bytes. Kubelets send messages of 32 KiB."""
_CLOSE_S = 1.0
_MAX_CLIENTS = 32
"""Maximum number of HTTP clients, each of which takes a few kilobytes."""
_ATTEMPTS = 4
"""Number of attempts for a request that failed without an effect or that is idempotent."""
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Request:
    subject: Subject
    method: str
    path: str
    params: Mapping[str, str] | None = None
    body: Any = None
    content_type: str = "application/json"
    repeat: bool = False
    """True to repeat the request even if the server may have handled it already."""
    tries: int | None = None
    timeout_s: float | None = None


class Clients:
    """HTTP clients, one for each thread up to a limit. A client checks its connections under a lock before each request, so
    threads that share a client wait for each other."""

    def __init__(self, factory: Callable[[], httpx2.Client]) -> None:
        self._factory, self._clients = factory, [factory()]
        self._of_thread = threading.local()
        self._threads = itertools.count()
        self._guard = threading.Lock()

    def for_thread(self) -> httpx2.Client:
        """Return this thread's client."""
        client: httpx2.Client | None = getattr(self._of_thread, "client", None)
        if client is None:
            with self._guard:
                number = next(self._threads) % _MAX_CLIENTS
                if number == len(self._clients):
                    self._clients.append(self._factory())
                client = self._of_thread.client = self._clients[number]
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@dataclass
class Connection:
    clients: Clients = field(repr=False)
    websocket_client: Callable[[], httpx2.Client] = field(repr=False)
    server: str
    warnings: list[str] = field(default_factory=list)
    """The server's warnings without duplicates."""

    def answer(self, request: Request) -> httpx2.Response:
        """Send a request and return the server's response, or raise the server's refusal. A request that the server has not
        accepted is retried a few times; one that it may have accepted is retried only if `repeat` is set."""
        import httpx2

        timeout = httpx2.USE_CLIENT_DEFAULT if request.timeout_s is None else httpx2.Timeout(request.timeout_s)
        tries = request.tries or _ATTEMPTS
        content = None if request.body is None else json.dumps(request.body).encode()
        options: dict[str, Any] = {
            "params": request.params,
            "content": content,
            "headers": {} if content is None else {"Content-Type": request.content_type},
            "timeout": timeout,
        }
        for attempt in range(1, tries + 1):
            answer = None
            try:
                client = self.clients.for_thread()
                answer = client.send(client.build_request(request.method, request.path, **options))
                self._record_warnings(answer)
                if answer.is_success:
                    return answer
                cluster_error = error_for(answer.status_code, answer.content, request.subject)
                retry = answer.status_code == 429 or (request.repeat and isinstance(cluster_error, Unanswered))
            except Exception as error:
                cluster_error = connection_error(error, request.subject)
                retry = isinstance(error, httpx2.ConnectError) or (request.repeat and isinstance(error, httpx2.TransportError))
                retry = retry and not isinstance(error, httpx2.ConnectTimeout)
                if attempt == tries or not retry:
                    raise cluster_error from error
            if attempt == tries or not retry:
                raise cluster_error
            time.sleep(pause(attempt, answer))
        raise AssertionError

    @contextlib.contextmanager
    def stream(
        self, subject: Subject, path: str, params: Mapping[str, str], stop: Stop, *, silence_s: float | None
    ) -> Generator[Iterator[bytes], None, None]:
        """Yield a response's lines as they arrive, until `stop` is set."""
        import httpx2

        timeout = httpx2.Timeout(READ_S, connect=CONNECT_S, pool=None)
        timeout.read = silence_s
        client = self.clients.for_thread()
        try:
            answer = client.send(client.build_request("GET", path, params=params, timeout=timeout), stream=True)
        except Exception as error:
            raise connection_error(error, subject) from error
        try:
            if not answer.is_success:
                raise error_for(answer.status_code, answer.read(), subject)
            self._record_warnings(answer)
            network = answer.extensions.get("network_stream")
            with stop.holding(network.get_extra_info("socket") if network else None):
                yield _lines(answer, subject, stop)
        finally:
            answer.close()

    @contextlib.contextmanager
    def websocket(
        self, subject: Subject, path: str, params: list[tuple[str, str]], protocol: str
    ) -> Generator[WebSocketSession, None, None]:
        """Open a websocket, and close it after the block."""
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        with contextlib.closing(self.websocket_client()) as client:
            context = client.websocket(path, subprotocols=[protocol], params=params, max_message_size_bytes=_MAX_MESSAGE)  # type: ignore[arg-type]
            try:
                connection = context.__enter__()
            except WebSocketUpgradeError as error:
                raise error_for(error.response.status_code, error.response.content, subject) from error
            except Exception as error:
                raise connection_error(error, subject) from error
            try:
                yield connection
            finally:
                shut_down_reading(connection)
                # Wait until the reader has seen the end: a socket must not be closed during a read. If the server has ended the
                # connection, the reader has already stopped.
                with contextlib.suppress(HTTPXWSException, TimeoutError):
                    while True:
                        connection.receive_bytes(timeout=_CLOSE_S)
                context.__exit__(None, None, None)

    def _record_warnings(self, answer: httpx2.Response) -> None:
        """Record the server's warnings (https://kubernetes.io/blog/2020/09/03/warnings/)."""
        for value in answer.headers.get_list("warning"):
            warning = value.partition('"')[2].rpartition('"')[0].replace('\\"', '"')
            if warning and warning not in self.warnings:
                self.warnings.append(warning)


class Gone(Exception):
    """The server no longer has the changes since the requested version (HTTP 410)."""


class Expired(Refused):
    """The remaining pages of a list have expired (HTTP 410)."""


def error_for(status: int, body: bytes, subject: Subject) -> ClusterError:
    """Return the error for a response whose HTTP status is not 2xx. Raises Gone."""
    if status == 410 and subject.verb == "list":
        return Expired(f"{subject.description} cannot be listed: the list has expired")
    if status == 410 and subject.verb == "watch":
        raise Gone
    return error_mapping.error_for(status, body, subject)


def connection_error(error: Exception, subject: Subject) -> ClusterError:
    """Return the error for a request that got no response. Raises the given error again if its cause is unknown."""
    import httpx2

    text = str(error) or type(error).__name__
    if isinstance(error, ClusterError):
        return error
    if type(error).__module__.startswith("lightkube."):  # a login program failed
        return Unauthorized(f"the login to {subject.server} failed: {' '.join(text.split())[:400]}; log in again")
    if isinstance(error, FileNotFoundError):
        return Unauthorized(f"the login program {error.filename} of the kubeconfig is not installed; install it")
    if isinstance(error, (KeyError, ValueError)) and not isinstance(error, httpx2.InvalidURL):
        return Unauthorized(f"the login program of the kubeconfig for {subject.server} gave no token ({text}); log in again")
    if isinstance(error, httpx2.TimeoutException):
        cause = "it does not answer in time"
    elif "CERTIFICATE" in text or "certificate" in text:
        cause = f"its certificate is not the one that the kubeconfig trusts ({text})"
    elif "Name or service" in text or "name resolution" in text or "nodename" in text:
        cause = "its host is not known (DNS)"
    elif "refused" in text:
        cause = "the connection was refused"
    elif isinstance(error, (httpx2.TransportError, httpx2.StreamError, httpx2.InvalidURL, OSError)):
        cause = f"the connection was lost ({text})"
    else:
        raise error
    return Unanswered(f"the API server {subject.server} cannot be reached: {cause}; look at the network, the VPN, or the context")


def pause(attempt: int, answer: httpx2.Response | None = None) -> float:
    """Return the pause before the next attempt, in seconds. It grows exponentially, with jitter. It is at least the server's
    `Retry-After` and at most LONGEST_PAUSE_S."""
    demanded = answer.headers.get("retry-after", "") if answer is not None else ""
    least_s = float(demanded) if demanded.isdecimal() else 0.0
    return min(LONGEST_PAUSE_S, max(least_s, backoff.jittered(backoff.exponential(attempt, 0.25, 256.0))))


def parse(content: bytes, subject: Subject) -> Document:
    """Return the JSON object in a response. Raises Unanswered if the response contains none."""
    with parsing(content, subject):
        return document_parsing.document(content, subject.kind)


@contextlib.contextmanager
def parsing(content: bytes, subject: Subject) -> Iterator[None]:
    """Turn a ValueError in the block into Unanswered: content that cannot be parsed is not from an API server."""
    try:
        yield
    except ValueError as error:
        excerpt = content[:80].decode(errors="replace")
        raise Unanswered(
            f"{subject.server} does not answer as an API server: {excerpt!r}; look at the context's server"
        ) from error


def _lines(answer: httpx2.Response, subject: Subject, stop: Stop) -> Iterator[bytes]:
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
        raise connection_error(error, subject) from error
    if rest and not stop.is_set() and subject.verb != "watch":  # half an event is useless
        yield rest


def shut_down_reading(connection: WebSocketSession) -> None:
    """Shut down the receiving side of a websocket, so that its reader sees the end of the stream and closes the websocket."""
    if (raw_socket := connection.stream.get_extra_info("socket")) is not None:
        shut_down(raw_socket, socket.SHUT_RD)
