"""Trying again what may pass by itself: for a bounded time and with jitter, by `store`; while somebody looks on, by what follows
a job in a cluster.

obstore repeats requests on its own where it is sure that no harm is done, for up to half of the time. We repeat what it leaves:
writes whose answer was lost, bodies that end too early, conflicts, and all that botocore does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TypeVar

from outlast.errors import Stopped, StoreError, Unanswered, Unreachable
from outlast.jitter import CHANCE

T = TypeVar("T")

DEFAULT_S = 60.0


def from_environment() -> float:
    """OUTLAST_STORE_TIMEOUT, seconds: about how long a store that is not well is asked again. Raises StoreError."""
    text = os.environ.get("OUTLAST_STORE_TIMEOUT") or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise StoreError(f"OUTLAST_STORE_TIMEOUT is {text}; it must be a number of seconds, above 0")
    return seconds


def patiently(attempt: Callable[[], T], mistake: Callable[[Exception], StoreError], seconds: float) -> T:
    """The result of an attempt, which is repeated while `mistake` calls what it raised Unreachable. None begins later than
    `seconds` after the first; the last one may take its time."""
    begun = time.monotonic()
    for n in count():
        try:
            return interruptibly(attempt)
        except Exception as error:
            wrong = mistake(error)
            pause = CHANCE.uniform(0.5, 1) * min(0.1 * 2**n, 8)
            late = time.monotonic() - begun + pause > seconds
            if late or not isinstance(wrong, Unreachable):
                raise wrong from (None if wrong is error else error)
            interruptibly(partial(time.sleep, pause))
    raise AssertionError


def while_away(ask: Callable[[], T], say: Callable[[str], None], *, every_s: float) -> T:
    """The answer of a cluster, asked again while it is Unanswered; that it is away, and that it is back, is said once each."""
    away = False
    while True:
        try:
            answer = ask()
        except Unanswered as error:
            if not away:
                say(f"{error}; trying again")
            away = True
            time.sleep(every_s)
            continue
        if away:
            say("the cluster answers again")
        return answer


def interruptibly(attempt: Callable[[], T]) -> T:
    """The result of an attempt. Foreign code does not hear of signals, so the main thread leaves the work to another."""
    if threading.current_thread() is not threading.main_thread():
        return attempt()
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(attempt())
        except BaseException as error:
            result.set_exception(error)

    global _waiting
    _waiting = True  # before the work begins: a signal that comes with its first request must not be lost
    try:
        threading.Thread(target=work, name="store", daemon=True).start()
        return result.result()
    finally:
        _waiting = False


_waiting = False
"""Whether the main thread waits for an attempt, or to make the next one."""


def give_up(why: str) -> None:
    """For a signal's handler: end the main thread's wait for a store, if it is in one, with Stopped."""
    if _waiting:
        raise Stopped(why)
