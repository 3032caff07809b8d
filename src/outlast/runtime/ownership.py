"""Which run a worker is of, where no launcher has said so: in pods. The record is `run.json` in the job's output.

Who applies a job file makes pods that know a word, the digest of the file: by it they own a run, and a run that they begin has
that name. Every pod asks by itself, and all find the same answer:

    nothing there, or a run that has ended and is another file's    begin a run
    a run that has not ended                                        go on with it: a changed file is still the same training
    the same, and ours is to begin from the beginning               begin a run; what that one has left goes to `previous/`
    a run that has not ended, and a later file has taken it from us we are zombies
    our run, and it has ended                                       nothing is left to do
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from outlast import checkpoints, contract, remote, store
from outlast.errors import Superseded
from outlast.remote import register
from outlast.remote import run as runs
from outlast.runtime import push

_CODES = {"Succeeded": contract.Exit.DONE, "Failed": contract.Exit.GIVEN_UP, "Cancelled": contract.Exit.GIVEN_UP}


@dataclass(frozen=True)
class Ended:
    """The run is over already; what a worker is to end with."""

    run: str
    reason: str
    code: int


def place(output: Path, url: str) -> store.Store:
    """Where the record is."""
    return store.open_(url or f"file://{output}")


def take(where: store.Store, new: runs.Run, *, fresh: bool = False) -> str | Ended:
    """Take up the run of this place, or begin `new`; its id. Raises Superseded when a later owner has taken it from us, and
    StoreError."""
    there = runs.read(where)
    if there and there.ended and there.owner == new.owner:
        said = f"run {there.run} has ended before ({there.state}: {there.reason}); nothing is left to do"
        return Ended(there.run, said, _CODES[there.state])
    if there and not there.ended and new.owner in there.before:
        raise Superseded(
            f"run {there.run} in {where.url} was taken up by a later version of this job; delete this one, or the later one and "
            "submit this one again"
        )
    if there is None or there.ended or (fresh and there.owner != new.owner):
        there = runs.claim(where, new, replace=fresh)
    if there.aside:
        runs.set_aside(where, there.run)
    if there.ended or there.owner != new.owner:
        runs.take(where, there.run, new.owner)
    return there.run


def generation(where: store.Store, output: Path, run: str, *, stored: bool) -> int:
    """A generation that no worker of the run has had, and after which none from before may commit any more."""
    directory = output / contract.CHECKPOINTS
    found = checkpoints.generation(directory, run)
    if stored:
        latest = register.read(where, run)
        found = max(found, latest.generation if latest else 0)
        remote.Checkpoints(where, run).take(found + 1)
    return checkpoints.take(directory, run, found + 1)


def record(job: str, run: str, owner: str) -> runs.Run:
    """The record of a run that begins now."""
    return runs.Run(run, job, time.time(), state="Running", owner=owner)


def fetch_own(where: store.Store, output: Path, worker: int) -> None:
    """Bring what this worker has written before and its disk has lost, so that it is continued and not replaced."""
    wanted = [f"{contract.LOGS}/{contract.worker_log(worker)}", f"{contract.LEDGER}/agent-{worker}.jsonl"]
    if worker == 0:
        wanted += [contract.METRICS, f"{contract.LEDGER}/decider.jsonl"]
    for name in wanted:
        path = output / name
        if path.exists() or push.skipped(name):
            continue
        try:
            text = where.get(name)
        except store.Missing:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
