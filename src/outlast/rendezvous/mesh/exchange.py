"""How the members of a world learn each other's addresses in the mesh: by the store of the world, in a thread of its own.

    outlast/mesh/<rank>     host:port of that rank's mesh

Joining a world waits for nothing here. The thread is a client of its own in the store, as a client is one request at a time, and
reads the addresses of the peers that it watches, and of all others in small worlds. In large ones only rank 0 reads all: another
member's address is also learned when that member calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outlast.rendezvous.mesh import hearing
from outlast.rendezvous.mesh.mesh import Mesh
from outlast.rendezvous.vocabulary import World

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # its type stubs forget it

SMALL = 64
"""Worlds up to this size: everybody reads everybody's address."""
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 5.0
"""Between two looks for those that have not written yet; a member of an older version never does. The store's own `wait` prints
two warnings whenever it waits in vain."""
CONNECT_S, TRIES = 5.0, 3
"""How long the store may take to accept a connection, and how often one is tried."""


class Exchange:
    """The exchange of one world. Ends when all addresses are known, or by `stop`."""

    def __init__(self, mesh: Mesh, world: World, connect: Callable[[], TCPStore]) -> None:
        """`connect` makes a client of the world's store."""
        self._mesh, self._generation, self._members, self._connect = mesh, world.generation, world.members, connect
        self._rank = world.members.index(mesh.id)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-mesh-addresses", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether all addresses are known, or none will come."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """The world is over."""
        self._stop.set()

    def join(self) -> None:
        """Return when the thread has ended, after `stop`: torch's clients must not outlive the interpreter."""
        self._thread.join(CONNECT_S + 1.0)

    def _run(self) -> None:
        missing = [*self._wanted()]
        for _ in range(TRIES):
            try:
                self._read(self._connect(), missing)
                return
            except RuntimeError:  # the store is gone, and with it, as a rule, the world; without it the mesh stays incomplete
                if self._stop.wait(1.0):
                    return

    def _wanted(self) -> Sequence[int]:
        """The ranks whose addresses we read, those that we watch first."""
        near = [self._members.index(each) for each in hearing.watched(self._mesh.id, self._members)]
        if self._rank == 0 or len(self._members) <= SMALL:
            near += [each for each in range(len(self._members)) if each not in near and each != self._rank]
        return [*dict.fromkeys([*near, *([0] if self._rank else [])])]

    def _read(self, store: TCPStore, missing: list[int]) -> None:
        """Read the addresses of the ranks that are missing, and remove them from the list."""
        store.set(_key(self._rank), self._mesh.address)
        pause_s = 0.0
        while missing and not self._stop.wait(pause_s):
            there = [rank for rank in missing if store.check([_key(rank)])]
            if there:
                found = store.multi_get([_key(rank) for rank in there])
                addresses = {self._members[rank]: said.decode() for rank, said in zip(there, found, strict=True)}
                self._mesh.learn(self._generation, addresses)
                missing[:] = [rank for rank in missing if rank not in there]
            least_s = LEAST_PAUSE_S * max(1.0, len(self._members) / SMALL)  # one process answers all
            pause_s = least_s if there else min(max(1.5 * pause_s, least_s), LONGEST_PAUSE_S)


def _key(rank: int) -> str:
    return f"outlast/mesh/{rank}"
