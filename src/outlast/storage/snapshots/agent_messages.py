"""Sends messages between agents and ranks as JSON lines. Unix sockets also carry file descriptors, and TCP raw bytes.

On TCP, each line is authenticated with the run's key (`job.sealed_lines`), and a crc32 in such a line verifies raw bytes. Nothing
is encrypted.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from outlast.base import tcp
from outlast.job import sealed_lines

LINE = 64 << 10
"""Maximum length of a line in bytes."""
INDEX = 256 << 20
"""Maximum length in bytes of a line that a rank sends to its own agent. Such a line may contain an index."""
TIMEOUT_S = 10.0
"""Timeout without progress, in seconds. Arbitrary, but twice the timeout used elsewhere, to allow for machines that swap."""
_CHUNK = 1 << 18
_FDS = 8


class Connection:
    """One side of a connection."""

    def __init__(self, sock: socket.socket, *, longest: int = LINE) -> None:
        self.sock, self._longest = sock, longest
        self._buffer = bytearray()
        self._fds: collections.deque[int] = collections.deque()
        self._seal = sealed_lines.Plain()
        self._sending = threading.Lock()

    def greet(self, key: bytes, side: sealed_lines.Side) -> None:
        """Exchange nonces with the peer, so that later lines are authenticated. Raises OSError, ValueError."""
        own = sealed_lines.nonce()
        self.sock.sendall(sealed_lines.greeting(own))
        peer = sealed_lines.greeted(self._line(sealed_lines.LONGEST_NONCE))
        self._seal = sealed_lines.Seal(key, side, own=own, peer=peer)

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a message, with a file descriptor if given. Raises OSError."""
        with self._sending:
            line = memoryview(self._seal.sealed(json.dumps(message).encode()))
            if fd is not None:
                socket.send_fds(self.sock, [line[:1]], [fd])
                line = line[1:]
            self.sock.sendall(line)

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises OSError (also at EOF) and ValueError."""
        message = json.loads(self._seal.opened(self._line(self._longest)))
        if not isinstance(message, dict):
            raise ValueError(f"{message!r:.80} is no message")
        return message

    def waiting(self) -> bool:
        """Return whether `receive` has a message or an error to deliver."""
        while b"\n" not in self._buffer:
            try:
                if not self._fill(socket.MSG_DONTWAIT):
                    return True  # EOF
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    def descriptor(self) -> int:
        """Return the next received file descriptor. Raises ValueError if there is none."""
        if not self._fds:
            raise ValueError("no descriptor came with it")
        return self._fds.popleft()

    def _line(self, longest: int) -> bytes:
        at = 0
        while (end := self._buffer.find(b"\n", at)) < 0:
            at = len(self._buffer)
            if at > longest:
                raise ValueError(f"a line has more than {longest} bytes")
            if not self._fill(0):
                raise ConnectionError("the other side hung up")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self, flags: int) -> bool:
        if self.sock.family == socket.AF_UNIX:
            space = socket.CMSG_LEN(_FDS * array.array("i").itemsize)
            data, extra, _flags, _address = self.sock.recvmsg(_CHUNK, space, flags | socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds.extend(struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4]))
        else:
            data = self.sock.recv(_CHUNK, flags)
        self._buffer += data
        return bool(data)

    def read_into(self, into: memoryview) -> None:
        """Fill memory with received raw bytes. Raises OSError."""
        early = min(len(into), len(self._buffer))
        into[:early] = self._buffer[:early]
        del self._buffer[:early]
        into = into[early:]
        while into:
            count = self.sock.recv_into(into)
            if not count:
                raise ConnectionError("the other side hung up")
            into = into[count:]

    def write_from(self, fd: int, at: int, count: int) -> None:
        """Send raw bytes of a file. Raises OSError."""
        while count:
            sent = os.sendfile(self.sock.fileno(), fd, at, count)
            if not sent:
                raise ConnectionError("the file is shorter than it was")
            at, count = at + sent, count - sent

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())
        self.sock.close()


def set_timeout(sock: socket.socket, seconds: float = TIMEOUT_S) -> socket.socket:
    """Make socket operations fail after `seconds` without progress. Unlike `settimeout`, this also covers sendfile."""
    sock.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
    return sock


def between_machines(sock: socket.socket) -> socket.socket:
    """Make a connection to another agent fail soon after the other machine is lost."""
    tcp.ends_when_lost(sock, TIMEOUT_S, idle_s=5, probe_s=2)
    return set_timeout(sock)


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield connections until the listener is closed."""
    while True:
        try:
            yield listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # closed, shut down
                return
            time.sleep(0.1)  # out of file descriptors, or the peer has closed the connection


def close(listener: socket.socket | None) -> None:
    """Close a listener. `accepted` ends, even if a thread is waiting in it."""
    if listener is not None:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def connect(address: str, key: bytes) -> Connection:
    """Connect to an agent's data port. Raises OSError, ValueError."""
    sock = socket.create_connection(tcp.host_port(address), timeout=5)
    try:
        connection = Connection(between_machines(sock))
        connection.greet(key, "member")
    except BaseException:
        sock.close()
        raise
    return connection
