"""Sends and reads a run's heartbeat: `alive.json` in a store, which is written every BEAT_S while the run trains.

`run.json` remains when a run's owner dies. So before a worker on another machine or in another cluster takes over the run, it
reads the heartbeat, and if that is recent, it takes over only at the user's request. Workers with the same `where` are one owner.
Times are by the store's clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable

from outlast.base import units
from outlast.base.errors import AlreadyRunning, Missing, StoreError, Superseded
from outlast.storage.runs import owner as record
from outlast.storage.store import Store

ALIVE = "alive.json"
BEAT_S = 30.0
DEAD_S = 120.0
"""How long a heartbeat is valid, in seconds."""
LEFT_S = BEAT_S + 5.0
_POLL_S = 5.0


@dataclasses.dataclass(frozen=True)
class Beat:
    """A heartbeat."""

    run: str
    where: str
    """Where the run trains, as text for people; the same for all workers of an owner."""
    left: bool = False
    """True in the last heartbeat of an owner that has stopped training."""
    leaving: bool = False
    """True if its worker has left, or saves before it leaves. If other workers still train, one of them sends a heartbeat within
    BEAT_S."""
    etag: str = dataclasses.field(default="", compare=False)
    modified: float = dataclasses.field(default=0.0, compare=False)


def last(place: Store) -> Beat | None:
    """Return the latest heartbeat, or None if it is missing or damaged."""
    try:
        text, entry = place.read(ALIVE)
        document = json.loads(text)
        flags = bool(document.get("left")), bool(document.get("leaving"))
        return Beat(str(document["run"]), str(document["where"]), *flags, entry.etag, entry.modified)
    except (Missing, ValueError, KeyError, TypeError):
        return None


def beat(place: Store, run: str, where: str, *, left: bool = False, leaving: bool = False) -> None:
    """Write a heartbeat."""
    nonce = secrets.token_hex(4)  # gives each heartbeat a different etag
    document = {"run": run, "where": where, "left": left, "leaving": leaving, "word": nonce}
    place.put(ALIVE, json.dumps(document).encode() + b"\n")


def held(place: Store, run: str, where: str) -> tuple[Beat, float] | None:
    """Return another owner's valid heartbeat for the run, with its age in seconds, or None."""
    beat = last(place)
    if beat is None or beat.left or beat.run != run or beat.where == where:
        return None
    key = f".outlast-probe-{secrets.token_hex(8)}"
    place.put(key, b"")
    try:
        ago = max(0.0, place.head(key).modified - beat.modified)
    finally:
        with contextlib.suppress(StoreError):  # an empty probe does no harm
            place.delete([key])
    return (beat, ago) if ago < (LEFT_S if beat.leaving else DEAD_S) else None


def wait(
    place: Store, run: str, where: str, *, advice: str, say: Callable[[str], None], pause: Callable[[float], object] = time.sleep
) -> None:
    """Wait until another owner's heartbeat, if any, has expired. Raises AlreadyRunning if that owner sends a new one."""
    current = held(place, run, where)
    if current is None:
        return
    first, ago = current
    say(f"{first.where} trained run {run} until {units.human_seconds(ago)} ago; waiting to see whether it lives")
    while current is not None:
        beat, ago = current
        if beat.etag != first.etag and not beat.leaving:
            age = f"last heartbeat {units.human_seconds(ago)} ago"
            raise AlreadyRunning(f"run {run} in {place.url} is trained by {beat.where} ({age}); {advice}")
        pause(_POLL_S)
        current = held(place, run, where)


def release(place: Store) -> str:
    """Take a run from its owner, whose processes then stop. Returns where the owner trained."""
    run, newest = record.read(place), last(place)
    if run is None or run.ended:
        return ""
    record.acquire(place, run.run, f"released-{secrets.token_hex(4)}")
    beat(place, run.run, newest.where if newest else "", left=True)
    return newest.where if newest else "an owner without a heartbeat"


class Heartbeats:
    """Sends a run's heartbeats from a thread. If another owner takes over, the thread calls `lost` with a sentence and ends.

    Worker 0 always sends heartbeats. Another worker sends one only if the store has no recent one.
    """

    leaving = False
    """Set to True when this worker begins to leave, so that another owner waits for the end of its saves."""

    def __init__(
        self, open_: Callable[[], Store], run: str, owner: str, where: str, index: int = 0, lost: Callable[[str], None] = print
    ) -> None:
        self._open, self._run, self._owner, self._where = open_, run, owner, where
        self._index, self._lost = index, lost
        self._stop = threading.Event()
        self._etag = ""
        self._doubted = False
        """True if another owner's heartbeat has replaced the last one that this worker saw."""
        self.silent = False
        """True once another owner has taken over."""
        self._thread = threading.Thread(target=self._live, name="outlast-heart", daemon=True)
        self._thread.start()

    def stop(self, *, left: bool = False) -> None:
        """Stop the heartbeats. With `left`, a last heartbeat says that this owner has stopped training."""
        self._stop.set()
        self._thread.join(_POLL_S)
        if left and not self._thread.is_alive() and not self.silent:
            beat(self._open(), self._run, self._where, left=True)

    def leave(self) -> None:
        """Stop the heartbeats of this worker, while the owner's other workers may continue."""
        self.stop()
        if self._index == 0 and not self._thread.is_alive() and not self.silent:
            with contextlib.suppress(StoreError):  # if this fails, the next owner waits longer
                beat(self._open(), self._run, self._where, leaving=True)

    def _live(self) -> None:
        first = self._index == 0
        while not self._stop.is_set():
            try:
                self.once(self._open(), first=first)
                first = False
            except StoreError:  # the uploader reports an unreachable store, and the next heartbeat may succeed
                pass
            except Superseded as reason:
                self.silent = True
                self._lost(str(reason))
                return
            except Exception as problem:  # without heartbeats, another owner would take over the run
                print(f"outlast | the heartbeat of run {self._run} could not be sent: {problem!r}", flush=True)
            self._stop.wait(BEAT_S)

    def once(self, place: Store, *, first: bool) -> None:
        """Send a heartbeat if it is this worker's turn. Raises Superseded if another owner has taken over."""
        record.check(place, self._run, self._owner)
        newest = last(place)
        foreign = newest is not None and newest.run == self._run and newest.where != self._where and not newest.left
        if newest is not None and foreign and not first and newest.etag != self._etag and self._etag:
            if self._doubted:
                raise Superseded(f"run {self._run} in {place.url} is trained by {newest.where} now")
            self._doubted = True  # it may be a late heartbeat from an owner that was frozen
        elif not foreign:
            self._doubted = False
        if self._index == 0 or newest is None or newest.left or newest.leaving or newest.etag == self._etag:
            beat(place, self._run, self._where, leaving=self.leaving)
            newest = last(place)
        self._etag = newest.etag if newest else ""
