"""A member's client, which keeps the member's report on a board and reads what the coordinator has published there.

A board is a socket to the coordinator (`transports.sockets`), the API server (`kubernetes.board`) or an etcd
(`rendezvous.etcd.client`). Each report is complete and replaces the previous one. While the board is unreachable, the last
published state stays valid and training continues. Used by `rendezvous.membership`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any, Protocol

from outlast.base.backoff import ConnectionLog
from outlast.base.errors import OutlastError, Superseded
from outlast.job import contract
from outlast.rendezvous.messages import Called, Closed, Published, Report
from outlast.rendezvous.vocabulary import MemberState, World

LAST_S = 1.0
"""Maximum number of seconds that a leaving member waits for the board to accept its last report."""


class Board(Protocol):
    """A member's side of a board. One thread calls `put`, another `watch`; both raise OutlastError or OSError if the board is
    unreachable, and Superseded if the member has lost its run or its place in it."""

    run: str
    put_log: ConnectionLog
    watch_log: ConnectionLog

    @property
    def id(self) -> int:
        """The member's index; negative before one is assigned."""

    def put(self, report: Report) -> float | None:
        """Write or renew the report. Returns the seconds until the next renewal; None if nothing can be written before the next
        item of `watch`."""

    def watch(self) -> Generator[bool]:
        """Yield whenever something may have been published. The value is True if the report must be written again. Returns after
        `close`."""

    def published(self) -> Published:
        """Return the parts of the newest published state that concern this member."""

    def pause_s(self, failures: int, *, changed: bool) -> float:
        """Return the seconds to wait after this many `failures`. `changed` is True if a report is waiting to be written."""

    def close(self) -> None:
        """End `watch`."""

    def leave(self, *, reachable: bool) -> None:
        """Leave the run and disconnect, after the last `put`."""


class Client:
    """A member of a run, which connects only when it first reports."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._report = Report(board.run, board.id, MemberState.WAITING, since=time.time())
        self._changed = threading.Condition()
        self._version, self._written = 0, 0
        """Version of the current report, and of the last report that the board has accepted."""
        self._watched = 0
        self._reachable = False
        self._over = threading.Event()
        self._closed: Closed | None = None
        """Set once the run has ended for this member alone."""
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"outlast-{name}", daemon=True)
            for name, loop in (("rendezvous", self._watch), ("report", self._write))
        ]

    @property
    def id(self) -> int:
        """This worker's index; negative before one is assigned."""
        return self._board.id

    @property
    def called(self) -> Called | None:
        return self._board.published().called

    @property
    def world(self) -> World | None:
        return self._board.published().world

    @property
    def closed(self) -> Closed | None:
        return self._closed or self._board.published().closed

    @property
    def why(self) -> str:
        """The coordinator's reason for waiting, if published."""
        return self._board.published().why

    def report(self, standing: str, **fields: Any) -> None:
        """Report the member's new `standing`, a `MemberState`, without waiting for the write. `fields` are fields of `Report`;
        omitted fields keep their values."""
        self._replace(lambda last: last.changed(standing, **fields))
        if not self._threads[0].ident:
            self._reachable = True
            for thread in self._threads:
                thread.start()

    def amend(self, **fields: Any) -> None:
        """Change fields other than `standing`, from any thread. Nothing is written before the first `report`."""
        self._replace(lambda last: dataclasses.replace(last, **fields))

    def _replace(self, changed: Callable[[Report], Report]) -> None:
        with self._changed:
            self._report, self._version = changed(self._report), self._version + 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until something is published or changes, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Leave the run. If the board is reachable, wait until it has accepted the last report."""
        with self._changed:
            self._changed.wait_for(lambda: self._written == self._version or not self._reachable, LAST_S)
            if self._over.is_set():
                return
            self._over.set()
            self._changed.notify_all()
        self._board.close()
        for thread in self._threads:
            if thread.ident:
                thread.join(LAST_S)
        if not self._threads[1].is_alive():
            self._board.leave(reachable=self._reachable)

    def _stopped(self) -> bool:
        return self._over.is_set() or self._closed is not None

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Superseded as problem:
            self._end(str(problem), contract.Exit.INTERRUPTED)
        except Exception as bug:  # without this thread the worker cannot report
            self._end(f"the rendezvous has failed: {bug!r}", contract.Exit.FAILED)
            raise

    def _end(self, reason: str, code: int) -> None:
        """Exclude this member from further worlds. The run may continue without it."""
        with self._changed:
            if not self.closed:
                print(f"outlast | {reason}", flush=True)
            self._closed, self._reachable = self.closed or Closed(reason, code), False
            self._changed.notify_all()

    def _watch(self) -> None:
        failures = 0
        while not self._stopped():
            try:
                with contextlib.closing(self._board.watch()) as items:
                    for lost in items:
                        failures = 0
                        self._board.watch_log.restored()
                        with self._changed:
                            self._watched, self._version = self._watched + 1, self._version + lost
                            self._changed.notify_all()
            except Superseded:
                raise
            except Exception as problem:
                failures += 1
                if failures > 1:
                    self._board.watch_log.broken(problem)
                elif not isinstance(problem, OutlastError | OSError):  # a bug must not stop this member from listening
                    print(f"outlast | news could not be processed; trying again:\n{traceback.format_exc()}", flush=True)
                self._over.wait(self._board.pause_s(failures, changed=True))

    def _write(self) -> None:
        failures = 0
        while not self._stopped():
            with self._changed:
                report, version, watched = self._report, self._version, self._watched
            try:
                renewal_s = self._board.put(report)
            except Superseded:
                raise
            except (OutlastError, OSError) as problem:
                failures += 1
                if failures > 1:
                    self._board.put_log.broken(problem)
                with self._changed:
                    self._reachable = failures < 2
                    self._changed.notify_all()
                    pause_s = self._board.pause_s(failures, changed=self._version != self._written)
                    self._changed.wait_for(self._stopped, pause_s)
                continue
            failures = 0
            if renewal_s is not None:
                self._board.put_log.restored()
            self._wait_to_write(version, watched, renewal_s)

    def _wait_to_write(self, version: int, watched: int, renewal_s: float | None) -> None:
        """Wait for the next report or renewal. If nothing could be written, wait for the next item from `watch`."""
        with self._changed:
            self._reachable = renewal_s is not None
            if self._reachable:
                self._written = version
            self._changed.notify_all()
            if renewal_s is not None:
                self._changed.wait_for(lambda: self._version != version or self._stopped(), renewal_s)
            else:
                self._changed.wait_for(lambda: self._watched != watched or self._stopped(), LAST_S)
                self._reachable = self._watched != watched and not self._stopped()
