"""Fetches checkpoints from the store to a worker's disk: the newest one for training, or a requested one for an evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast.base import units
from outlast.job import contract
from outlast.storage import store
from outlast.storage.checkpoints import in_store, on_disk, retention


def restore(output: Path, place: store.Store, run: str, say: Callable[[str], None]) -> None:
    """Fetch the newest valid checkpoint of `run` to `output`. Raises StoreError.

    If the store is unreachable, a valid local checkpoint is enough.
    """
    directory = output / contract.CHECKPOINTS
    directory.mkdir(parents=True, exist_ok=True)
    local = (c for c in reversed(on_disk.list_(directory)) if c.run == run and not c.problem)
    here = next((c.step for c in local if on_disk.verify(c.path) is None), 0)
    try:
        in_store.Checkpoints(place, run).restore(directory, say=say, above=here)
    except store.Unreachable as problem:
        if not here:
            raise
        say(f"goes on from step {here} of this machine: {problem}")


def evaluated(output: Path, place: store.Store | None, run: str, args: Sequence[str]) -> list[str]:
    """Fetch the checkpoint that an evaluation's arguments request, and return the arguments with its step as the value.

    `--checkpoint=best` requests the best checkpoint on this machine or in the store. Raises NotFound, Damaged and
    store.StoreError.
    """
    requested = [each for each in args if each.startswith(contract.EVALUATED)]
    if not requested:
        return [*args]
    directory = output / contract.CHECKPOINTS
    if not place:  # on a volume, an earlier version of the job may have begun the run
        run = on_disk.owner(directory) or run
    here = {c.step: c for c in on_disk.list_(directory) if c.run == run and not c.problem}
    stored = in_store.Checkpoints(place, run) if place else None
    remote_steps = {c.step: c for c in stored.list_() if not c.problem} if stored else {}
    committed: list[retention.Committed] = [*here.values(), *(c for c in remote_steps.values() if c.step not in here)]
    step = retention.named(committed, requested[-1].removeprefix(contract.EVALUATED)).step
    if stored and step in remote_steps and not (step in here and on_disk.verify(here[step].path) is None):
        size = units.human_bytes(remote_steps[step].bytes)
        print(f"outlast | fetching the checkpoint of step {step} ({size}) from {stored.store.url}", file=sys.stderr, flush=True)
        directory.mkdir(parents=True, exist_ok=True)
        stored.fetch(remote_steps[step], directory)
    return [*(each for each in args if each not in requested), f"{contract.EVALUATED}{step}"]
