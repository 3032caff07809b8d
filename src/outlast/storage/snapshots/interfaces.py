"""By which address other agents reach this one: that of the network on which the ranks communicate."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from outlast.job.contract import Env

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Name the network interfaces of the ranks."""


def advertised(environ: Mapping[str, str]) -> tuple[str, bool]:
    """The address to advertise, and whether to listen on all addresses; on one machine 127.0.0.1, and only there."""
    if Env.ADDRESS not in environ:
        return "127.0.0.1", False
    named = [name for variable in VARIABLES for name in prefixes(environ.get(variable, ""))]
    return (_address(named) if named else "") or environ[Env.ADDRESS].strip("[]"), True


def prefixes(said: str) -> list[str]:
    """The names in `eth0,ib` or `=eth0`; none where the variable says which not to use (`^docker`)."""
    return [] if said.startswith("^") else [name for name in said.removeprefix("=").split(",") if name]


def _address(named: list[str]) -> str:
    """The first address of an interface whose name begins so; an empty text if there is none."""
    import psutil

    for prefix in named:
        for name, addresses in sorted(psutil.net_if_addrs().items()):
            for each in sorted(addresses, key=lambda each: each.family):
                if name.startswith(prefix) and each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address:
                    return str(each.address)
    return ""
