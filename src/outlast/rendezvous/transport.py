"""How a member reaches whoever decides its world: which transport an endpoint asks for.

    unix:///path            the launcher of this machine                      `local`
    c10d://host:port        worker 0, in pods without an operator             `local`
    kubernetes://job        the operator, by way of the API server            `kubernetes`
    etcd://host:port,...    an agent that they elect, by way of an etcd       `etcd`; in an operator's pod also `operated`

Called by `handler.create` (torchrun) and `launch.elastic`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outlast import contract
from outlast.contract import Env
from outlast.errors import OutlastError
from outlast.rendezvous.transports import seal, sockets
from outlast.rendezvous.world import World

if TYPE_CHECKING:
    from outlast.rendezvous.transports import kubernetes


class Client(Protocol):
    """A member's side of a transport: it says what it is, and knows the newest words of who decides."""

    @property
    def id(self) -> int:
        """Index of this worker; negative until one is found."""

    @property
    def called(self) -> sockets.Called | None: ...

    @property
    def world(self) -> World | None: ...

    @property
    def closed(self) -> sockets.Closed | None: ...

    def report(self, standing: str, **fields: Any) -> None:
        """Say what this member is now; fields as in `sockets.Report`, the others stay."""

    def wait(self, timeout_s: float) -> None:
        """Return when something was said, or after the timeout."""

    def close(self) -> None:
        """This member goes."""


def client(endpoint: str, *, run: str, id: int, state: Path, processes: int) -> Client:
    """A client for an endpoint. What it does not say comes from the worker's environment. Raises OutlastError."""
    if endpoint.startswith(sockets.SCHEME):
        return sockets.Client(endpoint, run=run, id=id)
    if endpoint.startswith(sockets.TCP):
        return sockets.Client(endpoint, run=run, id=id, key=seal.key(os.environ))
    floor = int(os.environ.get(Env.GENERATION, "0"))
    if endpoint.startswith(contract.ETCD):
        from outlast import etcd as servers
        from outlast.rendezvous.etcd import schema
        from outlast.rendezvous.transports import etcd

        where = servers.address(endpoint)
        by_etcd = etcd.Client(where, run=run, id=id, name=schema.run_name(run, os.environ), floor=floor)
        if Env.MEMBER not in os.environ:
            return by_etcd
        from outlast.rendezvous.etcd import operated

        return operated.Client(by_etcd, _operator(os.environ[Env.JOB], run, id, state, processes, floor))
    if not endpoint.startswith(contract.KUBERNETES):
        raise OutlastError(
            f"--rdzv-endpoint={endpoint!r} is not one that outlast knows; "
            "expected unix:///path/to/launcher.sock, c10d://host:port, kubernetes://job or etcd://host:2379"
        )
    return _operator(endpoint.removeprefix(contract.KUBERNETES), run, id, state, processes, floor)


def _operator(job: str, run: str, id: int, state: Path, processes: int, floor: int) -> kubernetes.Client:
    from outlast.rendezvous.transports import kubernetes

    member = os.environ.get(Env.MEMBER)
    if not member:
        raise OutlastError(f"{Env.MEMBER} is not set; set it to the uid of this pod (fieldRef metadata.uid)")
    return kubernetes.Client(
        job,
        run=os.environ.get(Env.OWNER, run),  # the operator knows the word that it gave its pods
        id=id,
        member=member,
        namespace=os.environ.get(Env.NAMESPACE, ""),
        state=state,
        processes=processes,
        generation=floor,
    )


def preload(endpoint: str) -> None:
    """Import what a client for an endpoint needs: for who forks the process that will make it."""
    if endpoint.startswith(contract.ETCD):
        from outlast.rendezvous.transports import etcd  # noqa: F401
    if endpoint.startswith(contract.KUBERNETES) or Env.MEMBER in os.environ:
        from outlast import kube
        from outlast.rendezvous.transports import kubernetes  # noqa: F401

        with contextlib.suppress(ImportError):  # it is said where it is needed
            kube.load()
