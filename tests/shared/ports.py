"""Ports for servers that are told which one to take."""

import socket

from outlast.base.backoff import RANDOM

_BELOW = 32768
"""Where Linux begins to give ports to outgoing connections: none of those is in the way of a server below it."""


def free(count: int = 1) -> int:
    """The first of `count` ports in a row that nobody listens on, of either family."""
    while True:
        first = RANDOM.randrange(20000, _BELOW - count)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    both = socket.has_dualstack_ipv6()
    try:
        socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True
