"""Transports between members and their coordinator, one per kind of endpoint.

    unix:///path            the launcher of this machine                      `transports.sockets`
    c10d://host:port        worker 0, in pods without an operator             `transports.sockets`
    kubernetes://job        the operator, through the API server              `kubernetes.board`
    etcd://host:port,...    an agent, elected through an etcd                 `etcd.client`

A transport is a module in `TRANSPORTS` with a function `board(endpoint, member)`, which returns an unconnected
`member_client.Board` or raises OutlastError. Called by `worker.agent.world_loop`.
"""

from __future__ import annotations

import enum
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.rendezvous.member_client import Client
from outlast.rendezvous.messages import Closed
from outlast.rendezvous.transports import sockets


class Mode(enum.Enum):
    """The kind of process that coordinates a run, which determines the agents' other duties."""

    LAUNCHER = "the launcher on this machine"
    """The launcher owns the run, starts the workers and records the end. In all other modes, agents claim the run."""
    OPERATOR = "the operator"
    ELECTED = "an agent, elected in etcd"
    WORKER_0 = "the agent of worker 0"


TRANSPORTS = {
    sockets.SCHEME: ("outlast.rendezvous.transports.sockets", Mode.LAUNCHER),
    sockets.TCP: ("outlast.rendezvous.transports.sockets", Mode.WORKER_0),
    contract.KUBERNETES: ("outlast.kubernetes.board", Mode.OPERATOR),
    **dict.fromkeys(contract.ETCD, ("outlast.rendezvous.etcd.client", Mode.ELECTED)),
}
"""Module and mode for each endpoint scheme."""


@dataclass(frozen=True)
class Member:
    """The worker that connects. `environ` has the settings that are not in the endpoint."""

    run: str
    id: int
    state: Path
    processes: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    must_leave: Callable[[float | None, str], None] = lambda _deadline, _reason: None
    """Called when this worker must leave, with the reason and the deadline in seconds since the epoch; None if only the job's
    grace period limits the time."""
    run_ended: Callable[[Closed], None] = lambda _: None
    """Called with the run's end once the operator has published it, before anything acts on the end."""

    @property
    def generation(self) -> int:
        """The newest generation recorded in the run's output directory; the next world's generation is higher."""
        return int(self.environ.get(Env.GENERATION, "0"))


def of(endpoint: str) -> ModuleType:
    """Return an endpoint's transport module. Raises OutlastError if its scheme is unknown."""
    return importlib.import_module(_entry(endpoint)[0])


def mode(endpoint: str) -> Mode:
    """Return the mode of an endpoint's coordinator. Raises OutlastError if the endpoint's scheme is unknown."""
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
    """Create a client for an endpoint. Raises OutlastError."""
    return Client(of(endpoint).board(endpoint, member))


def reports_when_ready(environ: Mapping[str, str], *, needed: bool) -> bool:
    """Return whether this worker reports only once it is ready to start ranks, because other workers may be training and would
    stop when it reports.

    `needed` is True if no world can form without this worker; the other workers then wait for it, so it reports at once. On one
    machine, workers always report only when they are ready.
    """
    trained = environ.get(Env.GENERATION, "0") != "0"
    return mode(environ[Env.RENDEZVOUS]) is Mode.LAUNCHER or (trained and not needed)
