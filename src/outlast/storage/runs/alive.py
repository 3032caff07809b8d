"""The heartbeat of a run in a store: `alive.json`, written every BEAT_S while it trains.

`run.json` names the owner of a place, and stays when the owner dies. So a worker of another machine, namespace or cluster looks
here first: a run with a recent heartbeat is not taken over unless the user asks for that. Workers and machines of the same
`where` are one owner and never wait for each other. Times are the store's clock.
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
from outlast.storage.runs import record
from outlast.storage.store import Store

ALIVE = "alive.json"
BEAT_S = 30.0
"""Interval of heartbeats."""
DEAD_S = 120.0
"""TTL of a heartbeat: an owner without one for this long is dead."""
LEFT_S = BEAT_S + 5.0
"""TTL of a heartbeat that said its worker leaves."""
_LOOK_S = 5.0
"""Poll interval while waiting for an owner's next heartbeat."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """A heartbeat."""

    run: str
    where: str
    """Where it trains, for people, and the same for all that belong together."""
    left: bool = False
    """Whether the owner has stopped training: its last heartbeat."""
    leaving: bool = False
    """Whether its worker has left. If others of the owner still train, one of them sends a heartbeat within BEAT_S."""
    etag: str = dataclasses.field(default="", compare=False)
    modified: float = dataclasses.field(default=0.0, compare=False)


def last(place: Store) -> Beat | None:
    """The latest heartbeat; None if there is none that can be read."""
    try:
        text, entry = place.read(ALIVE)
        said = json.loads(text)
        return Beat(
            str(said["run"]), str(said["where"]), bool(said.get("left")), bool(said.get("leaving")), entry.etag, entry.modified
        )
    except (Missing, ValueError, KeyError, TypeError):
        return None


def beat(place: Store, run: str, where: str, *, left: bool = False, leaving: bool = False) -> None:
    """Send a heartbeat."""
    nonce = secrets.token_hex(4)  # so that each heartbeat has an etag of its own
    said = {"run": run, "where": where, "left": left, "leaving": leaving, "word": nonce}
    place.put(ALIVE, json.dumps(said).encode() + b"\n")


def held(place: Store, run: str, where: str) -> tuple[Beat, float] | None:
    """The valid heartbeat of another owner of the run, and its age in seconds; None if there is none."""
    there = last(place)
    if there is None or there.left or there.run != run or there.where == where:
        return None
    key = f".outlast-probe-{secrets.token_hex(8)}"
    place.put(key, b"")
    try:
        ago = max(0.0, place.head(key).modified - there.modified)
    finally:
        with contextlib.suppress(StoreError):  # it is empty and has no meaning
            place.delete([key])
    return (there, ago) if ago < (LEFT_S if there.leaving else DEAD_S) else None


def wait(
    place: Store,
    run: str,
    where: str,
    *,
    advice: str,
    say: Callable[[str], None],
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Return when no other owner trains the run: at once, or once the heartbeat of one has expired. Raises AlreadyRunning when
    it sends another."""
    found = held(place, run, where)
    if found is None:
        return
    there, ago = found
    say(f"{there.where} trained run {run} until {units.human_seconds(ago)} ago; waiting to see whether it lives")
    while found is not None:
        now, ago = found
        if now.etag != there.etag and not now.leaving:
            heard = f"heard of {units.human_seconds(ago)} ago"
            raise AlreadyRunning(f"run {run} in {place.url} is trained by {now.where} ({heard}); {advice}")
        pause(_LOOK_S)
        found = held(place, run, where)


def release(place: Store) -> str:
    """Release the run of a place from its owner, for the next one; returns where that owner trained. Its processes find that
    they are superseded, and stop."""
    run, there = record.read(place), last(place)
    if run is None or run.ended:
        return ""
    record.acquire(place, run.run, f"released-{secrets.token_hex(4)}")
    beat(place, run.run, there.where if there else "", left=True)
    return there.where if there else "an owner that says nothing of itself"


class Heart:
    """Sends heartbeats of a run from a thread. `index`: workers other than 0 send one only if none has come for a while.

    `lost` is called when another owner has taken over; then no more are sent.
    """

    def __init__(
        self, open_: Callable[[], Store], run: str, owner: str, where: str, index: int = 0, lost: Callable[[str], None] = print
    ) -> None:
        self._open, self._run, self._owner, self._where = open_, run, owner, where
        self._index, self._lost = index, lost
        self._stop = threading.Event()
        self._etag = ""
        self._doubted = False
        """Whether another owner has sent a heartbeat since ours."""
        self.silent = False
        """Whether another owner has taken over."""
        self._thread = threading.Thread(target=self._live, name="outlast-heart", daemon=True)
        self._thread.start()

    def stop(self, *, left: bool = False) -> None:
        """Send no more heartbeats; with `left`, one last that says that training here has ended."""
        self._stop.set()
        self._thread.join(_LOOK_S)
        if left and not self._thread.is_alive() and not self.silent:
            beat(self._open(), self._run, self._where, left=True)

    def leave(self) -> None:
        """Send no more heartbeats from this worker; worker 0 sends one that says so, since other workers may go on here."""
        self.stop()
        if self._index == 0 and not self._thread.is_alive() and not self.silent:
            with contextlib.suppress(StoreError):  # the next owner waits longer
                beat(self._open(), self._run, self._where, leaving=True)

    def _live(self) -> None:
        first = self._index == 0
        while not self._stop.is_set():
            try:
                self.once(self._open(), first=first)
                first = False
            except StoreError:  # unreachable, as the uploader reports; next time
                pass
            except Superseded as reason:
                self.silent = True
                self._lost(str(reason))
                return
            except Exception as problem:  # without heartbeats we would lose the run
                print(f"outlast | that we train run {self._run} could not be said: {problem!r}", flush=True)
            self._stop.wait(BEAT_S)

    def once(self, place: Store, *, first: bool) -> None:
        """Send a heartbeat if it is our turn. Raises Superseded if another owner has taken over."""
        record.check(place, self._run, self._owner)
        there = last(place)
        foreign = there is not None and there.run == self._run and there.where != self._where and not there.left
        if there is not None and foreign and not first and there.etag != self._etag and self._etag:
            if self._doubted:
                raise Superseded(f"run {self._run} in {place.url} is trained by {there.where} now")
            self._doubted = True  # it may be the last word of an owner that stood still before it was sent
        elif not foreign:
            self._doubted = False
        if self._index == 0 or there is None or there.left or there.leaving or there.etag == self._etag:
            beat(place, self._run, self._where)
            there = last(place)
        self._etag = there.etag if there else ""
