"""Downloads objects through presigned URLs, from a socket to a file through one small buffer.

obstore collects a response in new memory and passes it from thread to thread, which takes up to 1.6 times the CPU time, even over
TLS (docs/decisions/0024-the-house-in-order.md). Only the simplest responses are supported (RFC 9112: HTTP/1.1, a Content-Length,
no encoding). In all other cases, such as a proxy or an error, `fetch` returns None, and the caller uses the store's client.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from outlast.base import crc32
from outlast.storage.sync import tree

if TYPE_CHECKING:
    import ssl

_BUFFER = 256 << 10  # fits into a CPU cache between recv, checksum and write
_TIMEOUT_S = 30
_MOST_FAILURES = 3
"""Number of consecutive failures after which direct downloads are no longer tried."""
_END = b"\r\n\r\n"


class Direct:
    """Downloads objects over one connection per thread. `link` returns the presigned URL of a key, or None."""

    def __init__(self, link: Callable[[str], str | None]) -> None:
        self._link = link
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[_Connection] | None = []  # None: closed
        self._failures = 0

    def fetch(self, key: str, file: int, start: int, end: int, whole: bool) -> int | None:
        """Write bytes `start` to `end` of an object to the same offset of an open file, and return their crc32.

        Returns None if the caller must use the store's client. `whole` says whether the range is the entire object. Raises
        OSError.
        """
        if self._failures >= _MOST_FAILURES or (url := self._link(key)) is None:
            return None
        parts = urlsplit(url)
        crc = None if self._proxied(parts) else self._fetch(parts, file, start, end, whole)
        self._failures = self._failures + 1 if crc is None else 0
        return crc

    def close(self) -> None:
        """Close all connections. `fetch` returns None from now on."""
        with self._lock:
            ended, self._open = self._open or [], None
        for connection in ended:
            connection.close()

    def _fetch(self, parts: SplitResult, file: int, start: int, end: int, whole: bool) -> int | None:
        place = parts.scheme, parts.netloc
        connection: _Connection | None = getattr(self._local, "connection", None)
        for used in (True, False):
            if not used or connection is None or connection.place != place:
                if (connection := self._connected(parts)) is None:
                    return None
                self._local.connection = connection
                used = False
            try:
                crc = connection.fetch(parts, file, start, end, whole)
            except _Closed:
                if used:
                    continue  # the server closed the idle connection
                crc = None
            if crc is None or connection.over:
                connection.close()
                self._local.connection = None
            return crc
        return None

    def _connected(self, parts: SplitResult) -> _Connection | None:
        if self._open is None:
            return None
        try:
            connection = _Connection(parts, self._tls if parts.scheme == "https" else None)
        except (OSError, ValueError):
            return None
        with self._lock:
            if self._open is not None:
                self._open.append(connection)
                return connection
        connection.close()
        return None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        import ssl

        return ssl.create_default_context()

    def _proxied(self, parts: SplitResult) -> bool:
        named = parts.scheme in self._proxies or "all" in self._proxies
        return named and not urllib.request.proxy_bypass(parts.hostname or "")

    @cached_property
    def _proxies(self) -> dict[str, str]:
        return urllib.request.getproxies()


class _Closed(Exception):
    """The server closed the connection before it responded."""


class _Connection:
    def __init__(self, parts: SplitResult, tls: ssl.SSLContext | None) -> None:
        host, port = parts.hostname or "", parts.port or (443 if tls else 80)
        self.place = parts.scheme, parts.netloc
        self.over = False
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._socket = socket.create_connection((host, port), timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flags = 0
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        else:  # MSG_WAITALL with a socket timeout avoids a poll before each call and a return after each packet
            self._flags = socket.MSG_WAITALL
            for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", _TIMEOUT_S, 0))
            self._socket.settimeout(None)

    def close(self) -> None:
        self._socket.close()

    def fetch(self, parts: SplitResult, file: int, start: int, end: int, whole: bool) -> int | None:
        """Do what `Direct.fetch` does, over this connection. Raises _Closed if the server sends no response."""
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        byte_range = "" if whole else f"Range: bytes={start}-{end - 1}\r\n"
        filled = 0
        try:
            self._socket.sendall(f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\n{byte_range}\r\n".encode())
            while (head := self._buffer.find(_END, 0, filled)) < 0:
                count = self._socket.recv_into(self._view[filled:])
                if not count:
                    break
                filled += count
        except OSError:
            filled = 0
        if not filled:
            raise _Closed
        if head < 0 or not self._as_requested(bytes(self._view[:head]), start, end, whole):
            return None
        return self._body(head + len(_END), filled, file, start, end)

    def _as_requested(self, head: bytes, start: int, end: int, whole: bool) -> bool:
        """Return whether the body will be exactly the requested bytes."""
        status, _, rest = head.partition(b"\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in rest.split(b"\r\n"))}
        self.over = fields.get(b"connection", b"").lower() == b"close"
        # rclone answers ranges with 200 and a Content-Range
        ranged = fields.get(b"content-range", b"").startswith(b"bytes %d-%d/" % (start, end - 1))
        return (
            re.match(rb"HTTP/1\.1 20[06] ", status) is not None
            and fields.get(b"content-length") == b"%d" % (end - start)
            and ranged != whole
            and b"transfer-encoding" not in fields
            and fields.get(b"content-encoding", b"identity") == b"identity"
        )

    def _body(self, begin: int, filled: int, file: int, start: int, end: int) -> int | None:
        """Write the response's body to a file, and return its crc32, or None if the connection breaks."""
        crc = 0
        while start < end:
            count = min(_BUFFER - begin, end - start)
            try:
                while filled - begin < count:
                    if not (more := self._socket.recv_into(self._view[filled : begin + count], 0, self._flags)):
                        return None
                    filled += more
            except OSError:
                return None
            piece = self._view[begin : begin + count]
            crc = crc32.update(piece, crc)
            tree.write(file, piece, start)
            start, begin, filled = start + count, 0, 0
        return crc
