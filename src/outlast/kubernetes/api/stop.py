"""An Event that also ends connections: when it is set, every function that waits for the API server returns."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Stop(threading.Event):
    """An Event that also interrupts waits for the server, in any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: set[socket.socket] = set()
        self._guard = threading.Lock()

    def set(self) -> None:
        with self._guard:
            super().set()
            for connection in self._sockets:
                hang_up(connection)

    @contextlib.contextmanager
    def holding(self, connection: socket.socket | None) -> Iterator[None]:
        """During the block, shut the connection down as soon as the Event is set."""
        if connection is None:
            yield
            return
        with self._guard:
            self._sockets.add(connection)
            if self.is_set():
                hang_up(connection)
        try:
            yield
        finally:
            with self._guard:
                self._sockets.discard(connection)


@contextlib.contextmanager
def within(timeout_s: float) -> Iterator[Stop]:
    """A Stop that is set after the timeout or at the end of the block, whichever is first."""
    stop = Stop()
    clock = threading.Timer(timeout_s, stop.set)
    clock.daemon = True
    clock.start()
    try:
        yield stop
    finally:
        clock.cancel()
        stop.set()


def hang_up(connection: socket.socket, way: int = socket.SHUT_RDWR) -> None:
    """Shut a connection down, so that its reader sees the end."""
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(connection, way)  # with TLS, the reader has to see the end by itself
