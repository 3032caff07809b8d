"""How a member reaches whoever decides its world: which transport an endpoint asks for.

    unix:///path            the launcher of this machine                      `local`
    c10d://host:port        worker 0, in pods without an operator             `local`
    kubernetes://job        the operator, by way of the API server            `kubernetes`

Called by `handler.create` (torchrun) and `runtime.elastic`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Protocol

from outlast import contract
from outlast.errors import OutlastError
from outlast.rendezvous import local
from outlast.rendezvous.world import World


class Client(Protocol):
    """A member's side of a transport: it says what it is, and knows the newest words of who decides."""

    called: local.Called | None
    world: World | None
    closed: local.Closed | None

    def report(self, standing: str, **fields: Any) -> None:
        """Say what this member is now; fields as in `local.Report`, the others stay."""

    def wait(self, timeout_s: float) -> None:
        """Return when something was said, or after the timeout."""

    def close(self) -> None:
        """This member goes."""


def client(endpoint: str, *, run: str, id: int, state: Path, processes: int) -> Client:
    """A client for an endpoint. What it does not say comes from the worker's environment. Raises OutlastError."""
    if endpoint.startswith((local.SCHEME, local.TCP)):
        return local.Client(endpoint, run=run, id=id)
    if not endpoint.startswith(contract.KUBERNETES):
        raise OutlastError(
            f"--rdzv-endpoint={endpoint!r} is not one that outlast knows; "
            "expected unix:///path/to/launcher.sock, c10d://host:port or kubernetes://job"
        )
    from outlast.rendezvous import kubernetes

    member = os.environ.get(contract.Env.MEMBER)
    if not member:
        raise OutlastError(f"{contract.Env.MEMBER} is not set; set it to the uid of this pod (fieldRef metadata.uid)")
    return kubernetes.Client(
        endpoint.removeprefix(contract.KUBERNETES),
        run=os.environ.get(contract.Env.OWNER, run),  # the operator knows the word that it gave its pods
        id=id,
        member=member,
        namespace=os.environ.get(contract.Env.NAMESPACE, ""),
        state=state,
        processes=processes,
        generation=int(os.environ.get(contract.Env.GENERATION, "0")),
    )


def preload(endpoint: str) -> None:
    """Import what a client for an endpoint needs: for who forks the process that will make it."""
    if endpoint.startswith(contract.KUBERNETES):
        from outlast import kube
        from outlast.rendezvous import kubernetes  # noqa: F401

        with contextlib.suppress(ImportError):  # it is said where it is needed
            kube.load()
