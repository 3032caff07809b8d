"""The rendezvous transport through etcd's v3 API (`etcd://host:2379`), see `transport.Transport`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.base.errors import OutlastError
from outlast.job.contract import Env
from outlast.rendezvous.etcd import gateway, schema
from outlast.rendezvous.etcd.client import Client
from outlast.rendezvous.etcd.member import Identity

if TYPE_CHECKING:
    from outlast.rendezvous import transport
    from outlast.rendezvous.transport import Member


def client(endpoint: str, member: Member) -> transport.Client:
    """Return a client for an endpoint. Raises OutlastError in a pod whose operator is of an older version, which left the
    decision to an etcd."""
    if Env.MEMBER in member.environ:
        raise OutlastError(f"this pod's operator has it meet at {endpoint}, which it no longer can; upgrade it: outlast install")
    name = schema.run_name(member.run, member.environ)
    return Client(gateway.address(endpoint), Identity(member.run, member.id, generation=member.generation), name=name)


def torchrun(endpoint: str, *, run: str, sizes: tuple[int, int], conf: Mapping[str, Any]) -> tuple[Client, float]:
    """Return a client for a plain torchrun, which may be elected, and its timeout for a world in seconds. Raises OutlastError."""
    from outlast.rendezvous import torchrun

    return torchrun.client(endpoint, run=run, sizes=sizes, conf=conf)
