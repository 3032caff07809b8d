"""Takes over a run whose output is in a store: finds out which machine owns and trains it, claims it, and fetches its files.
Accessing the store may raise StoreError. Called by `local.submission`, and by the launcher when a run ends."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.status import State
from outlast.local.state_dir import Run
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store, register
from outlast.storage.runs import heartbeat
from outlast.storage.runs.output import OWN, skipped
from outlast.storage.sync import growing_files, push_and_pull, tree

_ADVICE = (
    "end it there, or give this job another name or output; --take-over takes the run from it, "
    "--fresh begins another one and keeps what is there in previous/"
)


def reach(url: str) -> store.Store:
    """Open the store at `url`, and check that it can be written."""
    place = store.open_(url)
    place.conditional()
    return place


def unfinished(
    place: store.Store,
    own: Run | None,
    *,
    ended: Run | None,
    home: str,
    take_over: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> runs.Run | None:
    """Return the run that owns this place in the store. Returns None if there is no such run, if it has succeeded and is not
    `own`, or if it is `ended`, a run that has ended on this machine.

    Raises OutlastError if `own`, this machine's unfinished run, no longer owns the place, and AlreadyRunning if a machine other
    than `home` trains the run, unless `take_over` is set. While this is unclear, waits and calls `say`.
    """
    record = runs.read(place)
    if own and record and record.run != own.run:
        raise OutlastError(
            f"run {own.run} of this machine no longer owns {place.url}: run {record.run} does ({record.state}); "
            "--fresh begins anew and keeps what is there in previous/"
        )
    if record is None or (record.succeeded and not own):
        return None
    if ended and (record.run, record.owner) == (ended.run, ended.owner):  # the store does not know yet that the run has ended
        return None
    if not take_over and not (own and own.owner == record.owner):
        heartbeat.wait(place, record.run, home, advice=_ADVICE, say=say)
    return record


def owned(run: Run) -> bool:
    """Return whether a run that has ended on this machine still owns its output and has not succeeded elsewhere since."""
    record = runs.read(store.open_(run.store)) if run.store else None
    if record is None:
        return Path(run.output).is_dir()
    return record.run == run.run and (not record.succeeded or record.owner == run.owner)


def home(state: Path) -> str:
    """Return a name for this machine and state directory (`runs.heartbeat`). Several machines may have the same host name, such
    as `localhost`, so the name includes a random id."""
    id_file = state.parent / ".id"
    if not id_file.exists():
        state.parent.mkdir(parents=True, exist_ok=True)
        with tree.AtomicFile(str(id_file)) as file:
            tree.write(file.fd, secrets.token_hex(4).encode(), 0)
            file.finish_unless_there()  # another process may have been faster
    return f"{socket.gethostname()}:{state} (id {id_file.read_text()})"


def take_over(place: store.Store, output: Path, new: runs.Run, *, last: Run | None, replace: bool = False) -> int:
    """Claim a run, so that its earlier owners can no longer write to it, and download its missing files, except for checkpoints.
    Returns the acquired generation, which fences off the earlier owners. This machine continues with the next one.

    `last` is this machine's last record of the run. If the run has had another owner since, this machine's older files are
    archived. Unless `replace` is set, raises AlreadyRunning if another run owns the place and has not ended.
    """
    old = runs.claim(place, new, replace=replace)
    runs.archive(place, new.run)
    runs.acquire(place, new.run, new.owner)
    latest, directory = register.read(place, new.run), output / contract.CHECKPOINTS
    generation = 1 + max(latest.generation if latest else 0, checkpoints.generation(directory, new.run))
    in_store.Checkpoints(place, new.run).acquire(generation)
    if last is None or old.owner != last.owner:
        excluded = (contract.CHECKPOINTS, OWN, runs.PREVIOUS)
        entries = [entry for entry in output.iterdir() if entry.name not in excluded] if output.is_dir() else []
        if stale := [entry for entry in entries if entry.is_file() or any(entry.iterdir())]:
            archive(output, stale, time.strftime("%Y%m%d-%H%M%S-before", time.gmtime()))
    report = push_and_pull.pull(place, output, output / OWN / "pulled", push_and_pull.Options(skip=skipped), only_missing=True)
    if report.failed:
        path, reason = report.failed[0]
        raise OutlastError(f"{place.url}/{path} could not be fetched: {reason}")
    for path in growing_files.files(place):
        growing_files.fetch(place, path, output / path)
    checkpoints.acquire(directory, new.run, generation)
    return generation


def archive(output: Path, entries: Iterable[Path], name: str) -> Path:
    """Move entries of an output directory to `previous/<name>`, or to the next free name, and return the new directory."""
    directory = output / runs.PREVIOUS / name
    while directory.exists():
        directory = directory.with_name(directory.name + "+")
    directory.mkdir(parents=True)
    for entry in entries:
        shutil.move(entry, directory / entry.name)
    return directory


def end(run: Run, state: State, reason: str, code: int | None) -> str:
    """Record in the store how a run ended. Returns an error message, or an empty string on success."""
    try:
        runs.end(store.open_(run.store), run.run, state, reason, code, by=run.owner)
    except OutlastError as problem:
        return str(problem)
    return ""
