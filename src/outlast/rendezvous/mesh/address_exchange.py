"""Exchange of the members' mesh addresses through the world's store, in a separate thread.

    outlast/mesh/<rank>     host:port of that rank's mesh

Joining a world does not wait for the exchange. The thread has its own client of the store, which serves one request at a time.
The thread reads the addresses of watched peers, and of all members in small worlds. In large worlds only rank 0 reads all
addresses. A member also learns a peer's address when the peer connects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outlast.rendezvous.mesh import watched_peers
from outlast.rendezvous.mesh.mesh import Mesh
from outlast.rendezvous.vocabulary import World

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # its type stubs forget it

SMALL = 64
"""Maximum size of a world in which every member reads all addresses."""
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 5.0
"""Shortest and longest pause between polls for missing addresses. A member of an older version never publishes its address. We
poll since the store's own `wait` prints two warnings at each timeout."""
CONNECT_S, TRIES = 5.0, 3
"""Timeout for connecting to the store, and maximum number of attempts."""


class Exchange:
    """The address exchange of one world, which ends with all addresses or with `stop`."""

    def __init__(self, mesh: Mesh, world: World, connect: Callable[[], TCPStore]) -> None:
        """`connect` creates a client of the world's store."""
        self._mesh, self._generation, self._members, self._connect = mesh, world.generation, world.members, connect
        self._rank = world.members.index(mesh.id)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-mesh-addresses", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """True if the exchange has ended, with or without all addresses."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End the exchange, since the world is over."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the thread to end after `stop`, since torch's clients must not outlive the interpreter."""
        self._thread.join(CONNECT_S + 1.0)

    def _run(self) -> None:
        missing = [*self._ranks_to_read()]
        for _ in range(TRIES):
            try:
                self._read(self._connect(), missing)
                return
            except RuntimeError:  # the store has ended, usually with the world; otherwise the mesh stays incomplete
                if self._stop.wait(1.0):
                    return

    def _ranks_to_read(self) -> Sequence[int]:
        """Return the ranks whose addresses we read, watched peers first."""
        near = [self._members.index(each) for each in watched_peers.watched(self._mesh.id, self._members)]
        if self._rank == 0 or len(self._members) <= SMALL:
            near += [each for each in range(len(self._members)) if each not in near and each != self._rank]
        return [*dict.fromkeys([*near, *([0] if self._rank else [])])]

    def _read(self, store: TCPStore, missing: list[int]) -> None:
        """Read the addresses of the missing ranks, and remove each from the list."""
        store.set(_key(self._rank), self._mesh.address)
        pause_s = 0.0
        while missing and not self._stop.wait(pause_s):
            published = [rank for rank in missing if store.check([_key(rank)])]
            if published:
                values = store.multi_get([_key(rank) for rank in published])
                addresses = {self._members[rank]: value.decode() for rank, value in zip(published, values, strict=True)}
                self._mesh.learn(self._generation, addresses)
                missing[:] = [rank for rank in missing if rank not in published]
            least_s = LEAST_PAUSE_S * max(1.0, len(self._members) / SMALL)  # one process serves all requests
            pause_s = least_s if published else min(max(1.5 * pause_s, least_s), LONGEST_PAUSE_S)


def _key(rank: int) -> str:
    return f"outlast/mesh/{rank}"
