"""Sends requests to an API server, retries them and reads the answers: whole, as a stream of lines, or through a websocket.

All errors are `ClusterError`s, except `Gone`. All functions here may be called from several threads.
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
from outlast.kubernetes.api.stop import Stop, hang_up

if TYPE_CHECKING:
    import httpx2
    from httpx2.websockets import WebSocketSession

Document = dict[str, Any]

CONNECT_S = 10.0
"""Timeout for connecting to the API server."""
READ_S = 65.0
"""Timeout for an answer: the API server ends ordinary requests after 60 s."""
_MESSAGE = 2**20
"""Maximum size of a websocket message in bytes; messages of a kubelet have 32 KiB."""
_LAST_S = 1.0
"""Time that the reader of a websocket has to see the websocket's end."""
_CLIENTS = 32
"""Maximum number of HTTP clients per cluster. Each client takes some kilobytes, plus the connections of its threads."""
_TRIES = 4
"""Number of attempts for a request that had no effect or that may be repeated."""
LONGEST_PAUSE_S = 30.0
"""Maximum pause between two attempts."""


@dataclass(frozen=True)
class Request:
    """A request to the API server."""

    asked: Subject
    method: str
    path: str
    params: Mapping[str, str] | None = None
    body: Any = None
    content_type: str = "application/json"
    repeat: bool = False
    """Whether the request may be repeated although the server may have handled it."""
    tries: int | None = None
    """Number of attempts; None: the default."""
    timeout_s: float | None = None
    most: int | None = None
    """Maximum size in bytes of the body of a successful answer, which becomes the extension `whole`. A longer body raises
    TooLong."""


class Clients:
    """HTTP clients, one for each thread up to a limit.

    Before each request, a client checks all its idle connections under a lock. With one client for twenty threads, most threads
    would wait for the lock.
    """

    def __init__(self, make: Callable[[], httpx2.Client]) -> None:
        self._make, self._made = make, [make()]
        self._of_thread = threading.local()
        self._threads = itertools.count()
        self._guard = threading.Lock()

    def for_thread(self) -> httpx2.Client:
        """The client of this thread; threads share clients only if there are many threads."""
        found: httpx2.Client | None = getattr(self._of_thread, "client", None)
        if found is None:
            with self._guard:
                number = next(self._threads) % _CLIENTS
                if number == len(self._made):
                    self._made.append(self._make())
                found = self._of_thread.client = self._made[number]
        return found

    def close(self) -> None:
        for client in self._made:
            client.close()


@dataclass
class Connection:
    """A connection to an API server: clients, retries, warnings."""

    clients: Clients = field(repr=False)
    tunnel: Callable[[], httpx2.Client] = field(repr=False)
    """Makes the HTTP client of one websocket."""
    server: str
    warnings: list[str] = field(default_factory=list)
    """Warnings from the server, each of them once: about a policy that will be enforced, or a version that will be removed."""

    def answer(self, request: Request) -> httpx2.Response:
        """The server's answer; raises its refusals. A request that the server has not accepted is retried a few times; a request
        that the server may have accepted is retried only if it may be repeated."""
        import httpx2

        timeout = httpx2.USE_CLIENT_DEFAULT if request.timeout_s is None else httpx2.Timeout(request.timeout_s)
        tries = request.tries or _TRIES
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
                answer = client.send(client.build_request(request.method, request.path, **options), stream=True)
                try:
                    _read(answer, request.asked, request.most)
                finally:
                    answer.close()
                self._note(answer)
                if answer.is_success:
                    return answer
                wrong = mistake(answer.status_code, answer.content, request.asked)
                again = answer.status_code == 429 or (request.repeat and isinstance(wrong, Unanswered))
            except TooLong:
                raise
            except Exception as error:
                wrong = unreached(error, request.asked)
                again = isinstance(error, httpx2.ConnectError) or (request.repeat and isinstance(error, httpx2.TransportError))
                again = again and not isinstance(error, httpx2.ConnectTimeout)
                if attempt == tries or not again:
                    raise wrong from error
            if attempt == tries or not again:
                raise wrong
            time.sleep(pause(attempt, answer))
        raise AssertionError

    @contextlib.contextmanager
    def stream(
        self, asked: Subject, path: str, params: Mapping[str, str], stop: Stop, *, silence_s: float | None
    ) -> Generator[Iterator[bytes], None, None]:
        """The lines of an answer as they arrive, without line ends, until `stop` is set."""
        import httpx2

        timeout = httpx2.Timeout(READ_S, connect=CONNECT_S, pool=None)
        timeout.read = silence_s
        client = self.clients.for_thread()
        try:
            answer = client.send(client.build_request("GET", path, params=params, timeout=timeout), stream=True)
        except Exception as error:
            raise unreached(error, asked) from error
        try:
            if not answer.is_success:
                raise mistake(answer.status_code, answer.read(), asked)
            self._note(answer)
            network = answer.extensions.get("network_stream")
            with stop.holding(network.get_extra_info("socket") if network else None):
                yield _lines(answer, asked, stop)
        finally:
            answer.close()

    @contextlib.contextmanager
    def websocket(
        self, asked: Subject, path: str, params: list[tuple[str, str]], protocol: str
    ) -> Generator[WebSocketSession, None, None]:
        """A websocket that is closed at the end of the block."""
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        with contextlib.closing(self.tunnel()) as client:
            opened = client.websocket(path, subprotocols=[protocol], params=params, max_message_size_bytes=_MESSAGE)  # type: ignore[arg-type]
            try:
                connection = opened.__enter__()
            except WebSocketUpgradeError as error:
                raise mistake(error.response.status_code, error.response.content, asked) from error
            except Exception as error:
                raise unreached(error, asked) from error
            try:
                yield connection
            finally:
                end(connection)
                # The reader must have seen the end, since a socket must not be closed while it is read from. If the server has
                # ended the connection, the reader is gone and no more messages come.
                with contextlib.suppress(HTTPXWSException, TimeoutError):
                    while True:
                        connection.receive_bytes(timeout=_LAST_S)
                opened.__exit__(None, None, None)

    def _note(self, answer: httpx2.Response) -> None:
        """Record the server's warnings: https://kubernetes.io/blog/2020/09/03/warnings/."""
        for value in answer.headers.get_list("warning"):
            said = value.partition('"')[2].rpartition('"')[0].replace('\\"', '"')
            if said and said not in self.warnings:
                self.warnings.append(said)


class Gone(Exception):
    """The server no longer has the changes since the requested version (410)."""


class Expired(Refused):
    """The rest of a list has expired (410)."""


class TooLong(Refused):
    """An answer is longer than the limit."""


def mistake(status: int, body: bytes, asked: Subject) -> ClusterError:
    """The error for an answer other than 2xx. Raises Gone."""
    if status == 410 and asked.verb == "list":
        return Expired(f"{asked.thing} cannot be listed: the list has grown too old")
    if status == 410 and asked.verb == "watch":
        raise Gone
    return error_mapping.mistake(status, body, asked)


def unreached(error: Exception, asked: Subject) -> ClusterError:
    """The error for a request that got no answer."""
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


def pause(attempt: int, answer: httpx2.Response | None = None) -> float:
    """Seconds until the next attempt: growing, random, and at least the time that the server demands, up to LONGEST_PAUSE_S."""
    demanded = answer.headers.get("retry-after", "") if answer is not None else ""
    least = float(demanded) if demanded.isdecimal() else 0.0
    return min(LONGEST_PAUSE_S, max(least, backoff.jittered(backoff.exponential(attempt, 0.25, 256.0))))


def parsed(content: bytes, asked: Subject) -> Document:
    """The document in an answer. Raises Unanswered if the answer contains none."""
    with reading(content, asked):
        return document_parsing.document(content, asked.kind)


@contextlib.contextmanager
def reading(content: bytes, asked: Subject) -> Iterator[None]:
    """Raise Unanswered for content that no API server writes."""
    try:
        yield
    except ValueError as error:
        said = content[:80].decode(errors="replace")
        raise Unanswered(f"{asked.server} does not answer as an API server: {said!r}; look at the context's server") from error


def _read(answer: httpx2.Response, asked: Subject, most: int | None) -> None:
    """Read an answer to its end. Raises TooLong if a successful answer has more than `most` bytes."""
    if most is None or not answer.is_success:
        answer.read()
        return
    parts, size = [], 0
    for part in answer.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > most:
            raise TooLong(f"{asked.thing}: the answer takes more than {most >> 20} MiB")
    answer.extensions["whole"] = b"".join(parts)


def _lines(answer: httpx2.Response, asked: Subject, stop: Stop) -> Iterator[bytes]:
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
        raise unreached(error, asked) from error
    if rest and not stop.is_set() and asked.verb != "watch":  # half an event is useless
        yield rest


def end(connection: WebSocketSession) -> None:
    """End a websocket; its reader sees the end, and closes the websocket."""
    if (there := connection.stream.get_extra_info("socket")) is not None:
        hang_up(there, socket.SHUT_RD)
