"""The rendezvous transport by way of an etcd that speaks v3 (`etcd://host:2379`), see `transport.Transport`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast import etcd
from outlast.contract import Env
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.etcd.client import Client
from outlast.rendezvous.etcd.member import Identity

if TYPE_CHECKING:
    from outlast.rendezvous import transport
    from outlast.rendezvous.transport import Member


def client(endpoint: str, member: Member) -> transport.Client:
    """A client for an endpoint; in an operator's pod one that tells the operator as well."""
    name = schema.run_name(member.run, member.environ)
    by_etcd = Client(etcd.address(endpoint), Identity(member.run, member.id, generation=member.generation), name=name)
    if Env.MEMBER not in member.environ:
        return by_etcd
    from outlast.rendezvous.etcd import operated
    from outlast.rendezvous.transports import kubernetes

    return operated.Client(by_etcd, kubernetes.client(member.environ[Env.JOB], member))


def preload() -> None:
    """Import what an operator's pod needs besides."""
    if Env.MEMBER in os.environ:
        from outlast.rendezvous.transports import kubernetes

        kubernetes.preload()


def torchrun(endpoint: str, *, run: str, sizes: tuple[int, int], conf: Mapping[str, Any]) -> tuple[Client, float]:
    """A client for a plain torchrun, which may be elected, and how many seconds it may wait for a world. Raises OutlastError."""
    from outlast.rendezvous import torchrun

    return torchrun.client(endpoint, run=run, sizes=sizes, conf=conf)
