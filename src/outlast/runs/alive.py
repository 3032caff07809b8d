"""Who trains the run of a place just now: `alive.json`, written again and again for as long as it trains.

`run.json` says whose the place is; it stays when its owner dies. So whoever comes from elsewhere, another machine, namespace or
cluster, looks here: a run that was heard of lately is not taken from its owner, unless that is asked for. Workers and machines of
the same `where` are one owner: they never wait for each other. Times are the store's clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable

from outlast import units
from outlast.errors import AlreadyRunning, Missing, StoreError, Superseded
from outlast.runs import record
from outlast.store import Store

ALIVE = "alive.json"
BEAT_S = 30.0
"""How often an owner says that it lives."""
DEAD_S = 120.0
"""Who has said nothing for so long is taken for dead."""
LEFT_S = BEAT_S + 5.0
"""Whose last word was that it leaves is taken for gone after so long."""
_LOOK_S = 5.0
"""How often we look whether an owner that may be dead says something."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """The last word of an owner."""

    run: str
    where: str
    """Where it trains, for people, and the same for all that belong together."""
    left: bool = False
    """Whether it was its last: it has left."""
    leaving: bool = False
    """Whether who said it has left: if others still train there, one of them speaks within BEAT_S."""
    etag: str = dataclasses.field(default="", compare=False)
    modified: float = dataclasses.field(default=0.0, compare=False)


def last(place: Store) -> Beat | None:
    """The last word of whoever trains here; None when there is none that can be read."""
    try:
        text, entry = place.read(ALIVE)
        said = json.loads(text)
        return Beat(
            str(said["run"]), str(said["where"]), bool(said.get("left")), bool(said.get("leaving")), entry.etag, entry.modified
        )
    except (Missing, ValueError, KeyError, TypeError):
        return None


def beat(place: Store, run: str, where: str, *, left: bool = False, leaving: bool = False) -> None:
    """Say that the run is trained, or was until now."""
    said = {
        "run": run,
        "where": where,
        "left": left,
        "leaving": leaving,
        "word": secrets.token_hex(4),
    }  # each of them another version
    place.put(ALIVE, json.dumps(said).encode() + b"\n")


def held(place: Store, run: str, where: str) -> tuple[Beat, float] | None:
    """Who else has been heard of as training the run, and how many seconds ago; None when nobody was, or not for long."""
    there = last(place)
    if there is None or there.left or there.run != run or there.where == where:
        return None
    key = f".outlast-probe-{secrets.token_hex(8)}"
    place.put(key, b"")
    try:
        ago = max(0.0, place.head(key).modified - there.modified)
    finally:
        with contextlib.suppress(StoreError):  # it is empty, and nobody takes it for anything
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
    """Return when nobody else trains the run: at once, or when one that was heard of lately turns out to be dead. Raises
    AlreadyRunning when it turns out to live."""
    found = held(place, run, where)
    if found is None:
        return
    there, ago = found
    say(f"{there.where} trained run {run} until {units.human_seconds(ago)} ago; waiting to see whether it lives")
    while found is not None:
        now, ago = found
        if now.etag != there.etag and not now.leaving:
            raise _taken(place, run, now, ago, advice)
        pause(_LOOK_S)
        found = held(place, run, where)


def _taken(place: Store, run: str, there: Beat, ago: float, advice: str) -> AlreadyRunning:
    heard = f"heard of {units.human_seconds(ago)} ago"
    return AlreadyRunning(f"run {run} in {place.url} is trained by {there.where} ({heard}); {advice}")


def release(place: Store) -> str:
    """Take the run of a place from whoever trains it, for whoever comes next; what was said of that owner. Its processes find
    that they are superseded, and stop."""
    run, there = record.read(place), last(place)
    if run is None or run.ended:
        return ""
    record.acquire(place, run.run, f"released-{secrets.token_hex(4)}")
    beat(place, run.run, there.where if there else "", left=True)
    return there.where if there else "an owner that says nothing of itself"


class Heart:
    """Says every BEAT_S that we train a run, in a thread. `index`: all workers but 0 speak only when nobody has for a while.

    `lost` is called when somebody else is found to have taken over; then we are silent.
    """

    def __init__(
        self, open_: Callable[[], Store], run: str, owner: str, where: str, index: int = 0, lost: Callable[[str], None] = print
    ) -> None:
        self._open, self._run, self._owner, self._where = open_, run, owner, where
        self._index, self._lost = index, lost
        self._stop = threading.Event()
        self._etag = ""
        self._doubted = False
        """Whether somebody else has spoken since we did."""
        self.silent = False
        """Whether somebody else has taken over."""
        self._thread = threading.Thread(target=self._live, name="outlast-heart", daemon=True)
        self._thread.start()

    def stop(self, *, left: bool = False) -> None:
        """Be silent from now on; `left`: the last word is that nobody trains here any more."""
        self._stop.set()
        self._thread.join(_LOOK_S)
        if left and not self._thread.is_alive() and not self.silent:
            beat(self._open(), self._run, self._where, left=True)

    def leave(self) -> None:
        """Be silent from now on; worker 0, who speaks for all, says so: others may train on here."""
        self.stop()
        if self._index == 0 and not self._thread.is_alive() and not self.silent:
            with contextlib.suppress(StoreError):  # whoever comes waits for longer
                beat(self._open(), self._run, self._where, leaving=True)

    def _live(self) -> None:
        first = self._index == 0
        while not self._stop.is_set():
            try:
                self.once(self._open(), first=first)
                first = False
            except StoreError:  # it is away, as the pusher says; the next time
                pass
            except Superseded as reason:
                self.silent = True
                self._lost(str(reason))
                return
            except Exception as problem:  # who is silent is taken for dead, and loses the run
                print(f"outlast | that we train run {self._run} could not be said: {problem!r}", flush=True)
            self._stop.wait(BEAT_S)

    def once(self, place: Store, *, first: bool) -> None:
        """Say it, if it is ours to say. Raises Superseded when it never is again."""
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
