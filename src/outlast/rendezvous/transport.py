"""How a member reaches its coordinator: the transport for each kind of endpoint.

    unix:///path            the launcher of this machine                      `transports.sockets`
    c10d://host:port        worker 0, in pods without an operator             `transports.sockets`
    kubernetes://job        the operator, through the API server              `kubernetes.board`
    etcd://host:port,...    an agent that the agents elect, through an etcd   `transports.etcd`

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
    """The kind of process that coordinates a run. It determines what the agents do beyond training."""

    LAUNCHER = "the launcher on this machine"
    """The launcher owns the run, starts the workers and records the end; agents only train. In all other modes, agents claim the
    run."""
    OPERATOR = "the operator"
    ELECTED = "an agent, elected in etcd"
    WORKER_0 = "the agent of worker 0"


TRANSPORTS = {
    sockets.SCHEME: ("outlast.rendezvous.transports.sockets", Mode.LAUNCHER),
    sockets.TCP: ("outlast.rendezvous.transports.sockets", Mode.WORKER_0),
    contract.KUBERNETES: ("outlast.kubernetes.board", Mode.OPERATOR),
    **dict.fromkeys(contract.ETCD, ("outlast.rendezvous.transports.etcd", Mode.ELECTED)),
}
"""Module and mode for each scheme of an endpoint."""


class Client(Protocol):
    """A member's side of a transport: it sends the member's reports and stores the coordinator's last messages."""

    @property
    def id(self) -> int:
        """Index of this worker; negative until it has one."""

    @property
    def called(self) -> sockets.Called | None: ...

    @property
    def world(self) -> World | None: ...

    @property
    def closed(self) -> sockets.Closed | None: ...

    def report(self, standing: str, **fields: Any) -> None:
        """Report the member's new `standing`, a `world.MemberState`. `fields` are those of `sockets.Report`; fields that are not
        given keep their values."""

    def amend(self, **fields: Any) -> None:
        """Change fields other than `standing` (`unheard`, `refused`, `mesh`), from any thread. Nothing is sent before the first
        `report`; a report of another generation resets these fields."""

    def wait(self, timeout_s: float) -> None:
        """Return once the coordinator has published something, or after the timeout."""

    def close(self) -> None:
        """Leave the run."""


@dataclass(frozen=True)
class Member:
    """The worker that connects. Settings that are not in the endpoint come from the worker's environment."""

    run: str
    id: int
    state: Path
    """The worker's state directory."""
    processes: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def generation(self) -> int:
        """The newest generation recorded in the run's output; the next world gets a newer generation."""
        return int(self.environ.get(Env.GENERATION, "0"))


class Transport(Protocol):
    """The interface of the modules in `TRANSPORTS`. A module may also have `preload()`, and `torchrun(endpoint, run=, sizes=,
    conf=)` for a plain torchrun, which returns a client and its timeout for a world in seconds."""

    def client(self, endpoint: str, member: Member) -> Client:
        """A client, which connects no earlier than its first report. Raises OutlastError."""


def of(endpoint: str) -> Transport:
    """The transport of an endpoint. Raises OutlastError if its scheme is unknown."""
    return cast(Transport, importlib.import_module(_entry(endpoint)[0]))


def mode(endpoint: str) -> Mode:
    """The kind of coordinator behind an endpoint. Raises OutlastError if its scheme is unknown."""
    return _entry(endpoint)[1]


def _entry(endpoint: str) -> tuple[str, Mode]:
    for scheme, entry in TRANSPORTS.items():
        if endpoint.startswith(scheme):
            return entry
    raise OutlastError(
        f"the rendezvous endpoint {endpoint!r} is unknown; "
        "expected unix:///path/to/launcher.sock, c10d://host:port, kubernetes://job or etcd://host:2379"
    )


def client(endpoint: str, member: Member) -> Client:
    """A client for an endpoint. Raises OutlastError."""
    return of(endpoint).client(endpoint, member)


def others_may_wait(environ: Mapping[str, str]) -> bool:
    """Whether other workers may be training, and would stop as soon as this worker reports. If none trains, or none can train
    without this worker, it is faster to report first and to prepare ranks meanwhile; on one machine reporting takes no time."""
    trained = environ.get(Env.GENERATION, "0") != "0"
    return mode(environ[Env.RENDEZVOUS]) is Mode.LAUNCHER or (trained and not environ.get(Env.NEEDED))


def preload(endpoint: str) -> None:
    """Import the modules that a client for this endpoint needs, before the process that creates it is forked."""
    transport = of(endpoint) if endpoint else None
    if transport and hasattr(transport, "preload"):
        transport.preload()
