"""Starts the agent's server that keeps ranks' snapshots in memory, up to a size limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.job import contract
from outlast.job.contract import Env

if TYPE_CHECKING:
    from outlast.storage.snapshots.server import Query, Server


def begin(environ: Mapping[str, str], workers: int, restore: Query, newest: Query) -> Server | None:
    """Serve memory for a worker's snapshots. This machine has `workers` workers. Returns None if snapshots are off or impossible.

    Even with a budget of 0 bytes, ranks can read other workers' snapshots. `restore` fetches the newest checkpoint from the store
    at a rank's request; `newest` returns its generation and step. Raises OSError if the socket cannot be opened in a running job:
    the worker must be restarted, since other workers may have newer snapshots.
    """
    Path(environ[Env.STATE], contract.SNAPSHOTS).unlink(missing_ok=True)  # left by a killed agent
    setting = environ.get(Env.MEMORY, "off")  # absent if an earlier version created this worker and its memory limit
    if setting == "off":
        return None
    from outlast.storage.snapshots import budget, memory_files, server

    requested = budget.requested(setting)
    granted = memory_files.Machine().budget(requested, workers)
    if not granted.bytes or (isinstance(requested, int) and granted.bytes < requested):
        print(f"outlast | snapshots in memory: {granted.reason}", flush=True)
    snapshots = server.Server(environ, granted.bytes, restore, newest)
    try:
        snapshots.start()
    except OSError as error:
        snapshots.close()
        if environ.get(Env.GENERATION, "0") != "0":
            raise
        print(f"outlast | no snapshots in memory, their socket cannot be opened: {error}", flush=True)
        return None
    return snapshots
