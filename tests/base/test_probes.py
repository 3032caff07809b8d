"""What probes answer, and that nobody who connects can keep others from being answered."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from outlast.base import probes
from outlast.base.errors import OutlastError
from outlast.base.probes import Health


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@contextlib.contextmanager
def silent(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent half a request."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(count)]
        for each in found:
            with contextlib.suppress(OSError):  # it was cut off already
                each.sendall(b"GET /healthz HT")
        yield found


def test_whoever_says_nothing_costs_nobody_an_answer_and_few_threads() -> None:
    before = threading.active_count()
    address = probes.serve(Health)
    with silent(address, 5 * probes.MOST):
        assert get(address, "/healthz") == (200, "starting\n")
        assert threading.active_count() - before <= probes.MOST + 2, "the server and one that is just ending"


def test_a_connection_that_is_silent_for_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "IDLE_S", 0.1)
    address = probes.serve(Health)
    with silent(address, 1) as (connection,):
        assert connection.recv(1) == b""


def test_a_port_that_is_taken_is_said() -> None:
    address = probes.serve(Health)
    port = int(address.rpartition(":")[2])
    with pytest.raises(OutlastError, match=rf"cannot serve probes on 127.0.0.1:{port}: Address already in use; free it"):
        probes.serve(Health, port=port)
