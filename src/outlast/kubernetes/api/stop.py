"""A `threading.Event` that also shuts down connections: setting it ends every wait for the API server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Stop(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._sockets: set[socket.socket] = set()
        self._guard = threading.Lock()

    def set(self) -> None:
        with self._guard:
            super().set()
            for connection in self._sockets:
                shut_down(connection)

    @contextlib.contextmanager
    def holding(self, connection: socket.socket | None) -> Iterator[None]:
        """Shut down the connection if `set` is called during the block."""
        if connection is None:
            yield
            return
        with self._guard:
            self._sockets.add(connection)
            if self.is_set():
                shut_down(connection)
        try:
            yield
        finally:
            with self._guard:
                self._sockets.discard(connection)


@contextlib.contextmanager
def within(timeout_s: float) -> Iterator[Stop]:
    """Yield a Stop that is set after the timeout or at the end of the block, whichever comes first."""
    stop = Stop()
    timer = threading.Timer(timeout_s, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield stop
    finally:
        timer.cancel()
        stop.set()


def shut_down(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut down a connection, so that its reader sees the end."""
    with contextlib.suppress(OSError):  # already closed
        socket.socket.shutdown(connection, how)  # below TLS: the reader itself must see the end
