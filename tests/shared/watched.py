"""Store with a hook on every request, which may delay it, refuse it, or lose its response.

A scheduler lets the requests of several writers happen one at a time, in an order that a seed determines.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from outlast.base.errors import Unreachable
from outlast.storage.store import Entry, Store

Hand = Callable[[str, str, Callable[[], Any]], Any]
"""Hook that receives the name of a request, its key, and a function that makes the request; it returns the response."""

WRITES = ("put", "upload", "create", "replace", "delete", "copy")


class Killed(BaseException):
    """The process has died, and must not continue."""


def hand_over(request: str, key: str, act: Callable[[], Any]) -> Any:
    """A hand that lets everything happen."""
    return act()


class Last:
    """A hand in which the n-th request is the last of a process, or fails, after it was carried out or before."""

    def __init__(self, n: int, *, lost: bool, carried_out: bool) -> None:
        self._left, self._lost, self._carried_out = n, lost, carried_out
        self.reached = False

    def __call__(self, request: str, key: str, act: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left > 0 or (self._lost and self.reached):
            return act()
        if self._carried_out and not self.reached:
            act()
        self.reached = True
        raise Unreachable("the answer is lost") if self._lost else Killed


each_register = pytest.mark.parametrize(
    "conditional", [pytest.param(True, id="swapped"), pytest.param(False, id="named", marks=pytest.mark.slow)]
)
"""A register that is replaced as a whole, and one of names, where a store knows no conditions."""


class Watched:
    """A `store.Store` with a hook. Without `conditional` it ignores conditions, as old S3 servers do."""

    def __init__(self, store: Store, hand: Hand, *, conditional: bool = True) -> None:
        self._store, self._hand, self._conditional = store, hand, conditional
        self.url = store.url

    def child(self, key: str) -> Watched:
        return Watched(self._store.child(key), self._hand, conditional=self._conditional)

    def conditional(self) -> bool:
        return self._conditional

    def entries(self, below: str = "") -> Iterator[Entry]:
        return iter(self._hand("entries", below, lambda: list(self._store.entries(below))))

    def get(self, key: str) -> bytes:
        return self.read(key)[0]

    def link(self, key: str) -> None:
        """Return None, so that all reads pass the hook."""

    def upload(self, path: Any, key: str, **options: Any) -> str:
        return self._hand("upload", key, lambda: self._store.upload(path, key, **options))

    def forget(self, journal: Any) -> None:
        self._store.forget(journal)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # a store that is asked to delete many may have deleted some
            self._hand("delete", key, lambda key=key: self._store.delete([key]))

    def __getattr__(self, request: str) -> Callable[..., Any]:
        """Every other request has its key first: `head`, `read`, `put`, `create`, `replace`, `copy` ..."""
        act = getattr(self._store, request)
        return lambda key="", *more: self._hand(request, key, lambda: act(key, *more))


class Turns:
    """Scheduler of writers in separate threads, which lets exactly one request happen at a time.

    Whenever all live writers wait for a request, `rng` chooses the next. `after` is called after each write, while all writers
    wait.
    """

    def __init__(self, rng: random.Random, after: Callable[[], None] = lambda: None) -> None:
        self._rng, self._after = rng, after
        self._turn = threading.Condition()
        self._waiting: dict[int, str] = {}
        self._tickets = 0
        self._granted: int | None = None
        self._alive: set[str] = set()
        self._problems: list[BaseException] = []

    def hand(self, who: str) -> Hand:

        def hand(request: str, key: str, act: Callable[[], Any]) -> Any:
            with self._turn:
                self._tickets += 1
                mine = self._tickets
                self._waiting[mine] = who
                self._next()
                self._turn.wait_for(lambda: self._granted == mine)
            try:
                return act()
            finally:
                if request in WRITES:
                    try:
                        self._after()
                    except BaseException as problem:
                        self._problems.append(problem)
                with self._turn:
                    self._granted = None
                    self._next()

        return hand

    def _next(self) -> None:
        if self._granted is None and self._waiting and self._alive <= set(self._waiting.values()):
            self._granted = self._rng.choice(sorted(self._waiting, key=lambda ticket: (self._waiting[ticket], ticket)))
            del self._waiting[self._granted]
            self._turn.notify_all()

    def run(self, **writers: Callable[[], Any]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        self._alive = set(writers)

        def run(who: str, writer: Callable[[], Any]) -> None:
            try:
                results[who] = writer()
            except Killed:
                results[who] = None
            except BaseException as problem:
                self._problems.append(problem)
            finally:
                with self._turn:
                    self._alive.discard(who)
                    self._next()

        threads = [threading.Thread(target=run, args=each, name=each[0], daemon=True) for each in writers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} waits for ever"
        if self._problems:
            raise self._problems[0]
        return results
