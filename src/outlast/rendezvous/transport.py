"""How a member reaches its coordinator: which transport an endpoint asks for.

    unix:///path            the launcher of this machine                      `transports.sockets`
    c10d://host:port        worker 0, in pods without an operator             `transports.sockets`
    kubernetes://job        the operator, by way of the API server            `kubernetes.board`
    etcd://host:port,...    an agent that they elect, by way of an etcd       `transports.etcd`

A new transport is a module, here or in another wing, with a function `client(endpoint, member)`, and a line in `TRANSPORTS`.
Called by `handler.create` (torchrun) and `launch.elastic`.
"""

from __future__ import annotations

import enum
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.world import World


class Mode(enum.Enum):
    """Who coordinates a run, and so what the agents of its workers have to do for the run as a whole."""

    LAUNCHER = "the launcher on this machine"
    """It owns the run, starts the workers and records the end; agents only train. In all other modes agents claim the run."""
    OPERATOR = "the operator"
    ELECTED = "an agent, elected in etcd"
    WORKER_0 = "the agent of worker 0"


TRANSPORTS = {
    sockets.SCHEME: ("outlast.rendezvous.transports.sockets", Mode.LAUNCHER),
    sockets.TCP: ("outlast.rendezvous.transports.sockets", Mode.WORKER_0),
    contract.KUBERNETES: ("outlast.kubernetes.board", Mode.OPERATOR),
    **dict.fromkeys(contract.ETCD, ("outlast.rendezvous.transports.etcd", Mode.ELECTED)),
}
"""Module and coordinator by what an endpoint begins with."""


class Client(Protocol):
    """A member's side of a transport: it reports what the member does, and holds what the coordinator published last."""

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
        """Report what this member does now; fields as in `sockets.Report`, the others stay."""

    def amend(self, **fields: Any) -> None:
        """Change what is reported beside the standing (`unheard`, `refused`, `mesh`), from any thread. Nothing is said before the
        first `report`; a report of another generation forgets them."""

    def wait(self, timeout_s: float) -> None:
        """Return when the coordinator published something, or after the timeout."""

    def close(self) -> None:
        """Leave."""


@dataclass(frozen=True)
class Member:
    """The worker that connects. What its endpoint does not say comes from its environment."""

    run: str
    id: int
    state: Path
    """The directory of its small files."""
    processes: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def generation(self) -> int:
        """The newest generation that the run's output knows of: the next one is to be beyond it."""
        return int(self.environ.get(Env.GENERATION, "0"))


class Transport(Protocol):
    """A module of `TRANSPORTS`. It may also have `preload()`, and `torchrun(endpoint, run=, sizes=, conf=)` for a plain torchrun,
    which returns a client and how many seconds it may wait for a world."""

    def client(self, endpoint: str, member: Member) -> Client:
        """Connects no earlier than the first report. Raises OutlastError."""


def of(endpoint: str) -> Transport:
    """The transport of an endpoint. Raises OutlastError for one that is not known."""
    return cast(Transport, importlib.import_module(_known(endpoint)[0]))


def mode(endpoint: str) -> Mode:
    """Who coordinates the runs of an endpoint. Raises OutlastError for one that is not known."""
    return _known(endpoint)[1]


def _known(endpoint: str) -> tuple[str, Mode]:
    for scheme, found in TRANSPORTS.items():
        if endpoint.startswith(scheme):
            return found
    raise OutlastError(
        f"the rendezvous endpoint {endpoint!r} is unknown; "
        "expected unix:///path/to/launcher.sock, c10d://host:port, kubernetes://job or etcd://host:2379"
    )


def client(endpoint: str, member: Member) -> Client:
    """A client for an endpoint. Raises OutlastError."""
    return of(endpoint).client(endpoint, member)


def others_may_wait(environ: Mapping[str, str]) -> bool:
    """Whether workers may train already, and would stop as soon as this one reports. Where none does, or none can without it,
    reporting takes longest, and ranks become ready meanwhile; on this machine it takes no time."""
    trained = environ.get(Env.GENERATION, "0") != "0"
    return mode(environ[Env.RENDEZVOUS]) is Mode.LAUNCHER or (trained and not environ.get(Env.NEEDED))


def preload(endpoint: str) -> None:
    """Import what a client for an endpoint needs, if there is one, in the process that forks the one that will make it."""
    transport = of(endpoint) if endpoint else None
    if transport and hasattr(transport, "preload"):
        transport.preload()
