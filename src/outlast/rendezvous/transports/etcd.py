"""The rendezvous transport through etcd's v3 API (`etcd://host:2379`), see `transport.Transport`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.base.errors import OutlastError
from outlast.job.contract import Env
from outlast.rendezvous.etcd import gateway, key_schema
from outlast.rendezvous.etcd.client import Client
from outlast.rendezvous.etcd.member import Identity

if TYPE_CHECKING:
    from outlast.rendezvous import transport
    from outlast.rendezvous.transport import Member


def client(endpoint: str, member: Member) -> transport.Client:
    """Create a client for an endpoint. Raises OutlastError in a pod of an older operator, which relied on an etcd."""
    if Env.MEMBER in member.environ:
        raise OutlastError(f"this pod's operator requires a rendezvous at {endpoint}, which is gone; upgrade it: outlast install")
    name = key_schema.run_name(member.run, member.environ)
    return Client(gateway.address(endpoint), Identity(member.run, member.id, generation=member.generation), name=name)


def torchrun(endpoint: str, *, run: str, sizes: tuple[int, int], conf: Mapping[str, Any]) -> tuple[Client, float]:
    """Create a client for a plain torchrun, which may be elected; returns it with its timeout for a world in seconds. Raises
    OutlastError."""
    from outlast.rendezvous import torchrun

    return torchrun.client(endpoint, run=run, sizes=sizes, conf=conf)
