"""Brings the newest committed checkpoint from the store to this machine, before a worker trains.

A valid local checkpoint that is newer stays. Workers of one machine share their output, so only the first one fetches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outlast import contract, store
from outlast.checkpoints import disk, remote


def restore(output: Path, place: store.Store, run: str, say: Callable[[str], None]) -> None:
    """Fetch the newest valid checkpoint of `run` to `output` unless it is here; `say` gets progress.

    Raises store.StoreError. While the store is unreachable, a worker with a checkpoint of its own resumes from that.
    """
    directory = output / contract.CHECKPOINTS
    directory.mkdir(parents=True, exist_ok=True)
    ours = (c for c in reversed(disk.list_(directory)) if c.run == run and not c.problem)
    here = next((c.step for c in ours if disk.verify(c.path) is None), 0)
    try:
        remote.Checkpoints(place, run).restore(directory, say=say, above=here)
    except store.Unreachable as problem:
        if not here:
            raise
        say(f"goes on from step {here} of this machine: {problem}")
