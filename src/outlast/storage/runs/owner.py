"""Reads and writes `run.json`, the record of the run that owns a store's URL.

A new run first claims the URL, then moves the objects of earlier runs to `previous/<run>/`. Until these are moved, the new run's
record has `aside` set, and the run writes nothing else. If it is killed, it continues the move when it resumes. See
docs/decisions/0007-commits-in-a-store.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from outlast.base.errors import AlreadyRunning, Changed, Exists, Missing, StoreError, Superseded, Unreachable
from outlast.job import contract, ownership
from outlast.storage.store import Store

RUN = "run.json"
PREVIOUS = "previous"
FINAL = ("Succeeded", "Failed", "Cancelled")
"""The final states in `status.State`, repeated because `status` is slow to import."""
_PROBE = ".outlast-probe-"
_VERSION = 1
_AT_ONCE = 64
_BATCH = 1000
_ATTEMPTS = 20
_OWNERS = 50


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of `run.json`."""

    run: str
    job: str
    submitted: float
    """Time of submission, in seconds since the epoch."""
    state: str = "Pending"
    """The run's `status.State`."""
    reason: str = ""
    exit_code: int | None = None
    owner: str = ""
    """Nonce of the machine that last acquired the run. Other machines may no longer write to the run."""
    before: tuple[str, ...] = ()
    """Earlier owners, most recent last."""
    aside: str = ""
    """The previous run, while its objects are being moved to `previous/`; otherwise empty."""
    version: int = _VERSION

    @property
    def ended(self) -> bool:
        """True in a final state. The run can still be resumed, unless it succeeded."""
        return self.state in FINAL

    @property
    def succeeded(self) -> bool:
        return self.state == "Succeeded"

    def text(self) -> bytes:
        """Return the record as JSON, which `parse` accepts."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, text: bytes) -> Run:
        """Parse a record, ignoring fields of newer versions. Raises ValueError."""
        document = json.loads(text.decode())
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            fields = {name: value for name, value in document.items() if name in names}
            return cls(**{**fields, "before": tuple(document.get("before", ()))})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged ({error})") from error


def read(store: Store) -> Run | None:
    """Return the run that owns the URL, or None. Raises StoreError, also for a damaged record."""
    record, _, problem = _load(store)
    if problem:
        raise StoreError(f"{store.url}/{RUN} cannot be read: {problem}; remove it, or begin anew with --fresh")
    return record


def check(store: Store, run: str, owner: str = "") -> None:
    """Raise Superseded if another run owns the URL, or a machine other than `owner` has acquired the run."""
    record, _, _ = _load(store)
    if record and record.run != run:
        raise _superseded(store, run, record)
    if record and owner and record.owner != owner:
        raise Superseded(_elsewhere(store, run))


def _elsewhere(store: Store, run: str) -> str:
    return f"run {run} in {store.url} has been taken up elsewhere; what is here adds nothing to it any more"


def _superseded(store: Store, run: str, record: Run | None, lost: str = "gone") -> Superseded:
    return Superseded(f"run {run} no longer owns {store.url}: {f'run {record.run} does' if record else f'its {RUN} is {lost}'}")


def claim(store: Store, new: Run, *, replace: bool = False) -> Run:
    """Claim the URL for the run `new`, and return the run's record, which is the existing one if the run already owns the URL.

    Call `archive` next. Raises AlreadyRunning if an unfinished run owns the URL, unless `replace` is set. Without conditional
    writes, two simultaneous claims may both seem to succeed; the loser's next `update` then raises Superseded.
    """
    for _ in range(_ATTEMPTS):
        others = _others(store)  # before the record, which a run writes before anything else
        old, etag, _ = _load(store)
        if etag:  # what that run has written since is moved, too
            others = _others(store)
        if not etag and not replace:  # without a record, the objects may not be Outlast's: never move them unless requested
            mark = "" if others and {contract.CHECKPOINTS, contract.LOGS} & set(others) else None
            instead = "choose another output, or begin with --fresh, which moves them to previous/"
            ownership.check_place(store.url, [name for name in others if not name.startswith(".")], mark, instead=instead)
        if old and old.run == new.run:
            return old
        if old and not old.ended and not replace:
            raise AlreadyRunning(
                f"run {old.run} of job {old.job} in {store.url} has not ended (it was {old.state} when it last said so); "
                "go on with it, cancel it, or begin anew with --fresh"
            )
        if old:
            store.put(f"{PREVIOUS}/{old.run}/{RUN}", old.text())
        aside = ((old.aside or old.run) if old else f"before-{new.run}") if others else ""
        record = dataclasses.replace(new, aside=aside)
        if _write(store, record, etag, store.conditional()):
            return record
    raise _contended(store)


def update(store: Store, run: str, *, by: str = "", **changes: Any) -> Run:
    """Change a run's record and return it. Raises Superseded if another run owns the URL, or `by` is not the run's owner."""
    return _change(store, run, by, lambda record: dataclasses.replace(record, **changes))


def _change(store: Store, run: str, by: str, changed: Callable[[Run], Run]) -> Run:
    conditional = store.conditional()
    for _ in range(_ATTEMPTS):
        record, etag, problem = _load(store)
        if record is None or record.run != run:
            raise _superseded(store, run, record, "damaged" if problem else "gone")
        if by and record.owner != by:
            raise Superseded(_elsewhere(store, run))
        new = changed(record)
        if new == record or _write(store, new, etag, conditional):
            return new
    raise _contended(store)


def acquire(store: Store, run: str, owner: str) -> Run:
    """Make `owner` the run's owner, so that other machines can no longer write to the run."""

    def acquired(old: Run) -> Run:
        before = old.before if old.owner in ("", owner) else (*(o for o in old.before if o != owner), old.owner)[-_OWNERS:]
        return dataclasses.replace(old, owner=owner, before=before, state="Running", reason="", exit_code=None)

    return _change(store, run, "", acquired)


def end(store: Store, run: str, state: str, reason: str, exit_code: int | None, *, by: str = "") -> Run:
    """Record how a run has ended. Raises Superseded in the same cases as `update`."""
    return update(store, run, by=by, state=str(state), reason=reason, exit_code=exit_code)


def archive(store: Store, run: str) -> int:
    """Move the objects of earlier runs to `previous/<their run>/`, and return the number of objects moved.

    An object is deleted only after it has been copied, and only while `aside` is set, so a killed or late process neither loses
    objects nor deletes the new run's objects.
    """
    moved = 0

    def to_move() -> str:
        record = read(store)
        if record is None or record.run != run:
            raise _superseded(store, run, record)
        return record.aside

    if not (aside := to_move()):
        return 0
    keys = _keys_to_move(store)
    with ThreadPoolExecutor(_AT_ONCE, "outlast-aside") as pool:
        while batch := list(islice(keys, _BATCH)):
            list(pool.map(lambda key: store.copy(key, f"{PREVIOUS}/{aside}/{key}"), batch))
            if to_move() != aside:
                return moved
            store.delete(batch)
            moved += len(batch)
    update(store, run, aside="")
    return moved


def _others(store: Store) -> list[str]:
    return [name for name in store.names() if name not in (PREVIOUS, RUN) and not name.startswith(_PROBE)]


def _keys_to_move(store: Store) -> Iterator[str]:
    for name in _others(store):
        keys = [entry.key for entry in store.entries(name)]
        with contextlib.suppress(Missing):
            keys.append(store.head(name).key)
        yield from keys


def _load(store: Store) -> tuple[Run | None, str, str]:
    try:
        text, entry = store.read(RUN)
    except Missing:
        return None, "", ""
    try:
        return Run.parse(text), entry.etag, ""
    except ValueError as error:
        return None, entry.etag, str(error)


def _write(store: Store, record: Run, etag: str, conditional: bool) -> bool:
    """Write the record if the stored one still has `etag`. Returns whether it was written.

    Without conditional writes, the record is written in any case, and read back to check that it is still there.
    """
    if not conditional:
        store.put(RUN, record.text())
        return _load(store)[0] == record
    try:
        if etag:
            store.replace(RUN, record.text(), etag)
        else:
            store.create(RUN, record.text())
    except (Changed, Exists):
        return False
    return True


def _contended(store: Store) -> Unreachable:
    return Unreachable(f"{store.url}/{RUN} changes whenever we would change it; is more than one run beginning there?")
