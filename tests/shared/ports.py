"""Free ports for servers that need a port number."""

import socket

from outlast.base.backoff import RANDOM

_BELOW = 32768
"""First port that Linux assigns to outgoing connections; they never conflict with servers on lower ports."""


def free(count: int = 1) -> int:
    """Return the first of `count` consecutive ports that no process listens on, for IPv4 and IPv6."""
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
