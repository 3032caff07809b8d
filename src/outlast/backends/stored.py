"""A job's output in a store, as this machine's backend needs it: whose it is, what lies there, and the logs that are left.

`LocalBackend` asks before a run starts, the launcher when it ends. Everything here may raise `StoreError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outlast import contract, store
from outlast.backends import LogLine
from outlast.backends.places import Run
from outlast.errors import OutlastError
from outlast.remote import register
from outlast.remote import run as runs
from outlast.runtime import push, sync
from outlast.status import State


def reach(url: str) -> store.Store:
    """The place, after trying whether we may write there."""
    place = store.open_(url)
    place.conditional()
    return place


def unfinished(place: store.Store, ours: Run | None, *, ended: str) -> runs.Run | None:
    """The run that owns the place and has not ended; None when there is none, or it is the one that has `ended` here.

    Raises OutlastError when `ours`, the unfinished run of this machine, owns it no longer.
    """
    record = runs.read(place)
    if ours and record and record.run != ours.run:
        raise OutlastError(
            f"run {ours.run} of this machine no longer owns {place.url}: run {record.run} does ({record.state}); "
            "--fresh begins anew and keeps what is there in previous/"
        )
    return None if record is None or record.run == ended or (record.ended and not ours) else record


def take_over(place: store.Store, output: Path, new: runs.Run) -> int:
    """Have a run own the place, and bring what it has left there and is not here, but for checkpoints; its newest generation."""
    runs.claim(place, new, replace=True)
    runs.set_aside(place, new.run)
    runs.update(place, new.run, state=str(State.RUNNING), reason="", exit_code=None)
    sync.pull(place, output, output / push.OWN / "pulled", skip=push.skipped, only_missing=True)
    latest = register.read(place, new.run)
    return latest.generation if latest else 0


def end(url: str, run: str, state: State, reason: str, code: int | None) -> str:
    """Record how a run has ended; why that could not be, or an empty text."""
    try:
        runs.end(store.open_(url), run, state, reason, code)
    except OutlastError as problem:
        return str(problem)
    return ""


def logs(url: str, *, worker: int | None = None, tail: int | None = None) -> Iterator[LogLine]:
    """The log lines of all workers, or of one, as they are in a store."""
    place = store.open_(url)
    found: dict[int, str] = {}
    for name in place.names(contract.LOGS):
        index = name.removeprefix("worker-").removesuffix(".log")
        if index.isdecimal() and name == contract.worker_log(int(index)) and worker in (None, int(index)):
            found[int(index)] = f"{contract.LOGS}/{name}"
    for number, key in sorted(found.items()):
        lines = place.get(key).decode(errors="replace").splitlines()
        yield from (LogLine(number, text) for text in (lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]))
