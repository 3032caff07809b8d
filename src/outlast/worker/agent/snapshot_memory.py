"""The agent's memory for snapshots: whether there is any, and its server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.job import contract
from outlast.job.contract import Env

if TYPE_CHECKING:
    from outlast.storage.snapshots.server import Query, Server


def begin(environ: Mapping[str, str], workers: int, restore: Query, newest: Query) -> Server | None:
    """Serve memory to the ranks of a worker, one of so many on this machine. None where snapshots are off, or cannot be kept.

    Without memory the ranks still read the snapshots of other workers. So these count although this worker can keep none.
    `restore` fetches the newest checkpoint of the job's store when ranks ask for it, `newest` says which it is. Raises OSError
    where that would keep others from what they have in memory: the worker is started again.
    """
    Path(environ[Env.STATE], contract.SNAPSHOTS).unlink(missing_ok=True)  # an agent that was killed has left it
    said = environ.get(Env.MEMORY, "off")  # absent: an earlier version made this worker, and its memory limit
    if said == "off":
        return None
    from outlast.storage.snapshots import budget, memory, server

    requested = budget.requested(said)
    given = memory.Machine().budget(requested, workers)
    if not given.bytes or (isinstance(requested, int) and given.bytes < requested):
        print(f"outlast | snapshots in memory: {given.reason}", flush=True)
    snapshots = server.Server(environ, given.bytes, restore, newest)
    try:
        snapshots.start()
    except OSError as error:
        snapshots.close()
        if environ.get(Env.GENERATION, "0") != "0":
            raise
        print(f"outlast | no snapshots in memory, their socket cannot be opened: {error}", flush=True)
        return None
    return snapshots
