"""Computes the pauses between retries, and retries requests until they succeed or time out.

obstore and botocore also retry, for up to half of the timeout; `retried` covers the remaining cases: lost responses to writes,
truncated bodies, conflicts. tenacity and stamina are not used: they do not let signals interrupt a wait in native code, and draw
jitter from Python's shared generator, which a training script may have seeded. The script would then get other random numbers.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TypeVar

from outlast.base.errors import ClusterError, Stopped, StoreError, Unanswered, Unreachable

T = TypeVar("T")

RANDOM = random.SystemRandom()
"""The operating system's random number generator, which scripts cannot seed and forks do not share."""
DEFAULT_S = 60.0
"""Default retry timeout for store requests, in seconds."""


def exponential(attempt: int, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds after failed attempt `attempt`, counting from 0.

    The pause doubles with each attempt, up to `longest_s`.
    """
    return min(longest_s, first_s * 2.0 ** min(attempt, 10))


def jittered(pause_s: float) -> float:
    """Return a random pause between half of `pause_s` and all of it."""
    return pause_s * RANDOM.uniform(0.5, 1)


def timeout_from_environment() -> float:
    """Return OUTLAST_STORE_TIMEOUT, the retry timeout for store requests in seconds. Raises StoreError if it is invalid."""
    text = os.environ.get("OUTLAST_STORE_TIMEOUT") or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise StoreError(f"OUTLAST_STORE_TIMEOUT is {text}; it must be a number of seconds, above 0")
    return seconds


def retried(attempt: Callable[[], T], mapped: Callable[[Exception], StoreError], timeout_s: float) -> T:
    """Call `attempt` until it succeeds, for up to `timeout_s` seconds, and return its result.

    `mapped` maps an exception to a StoreError. Only Unreachable is retried; any other error is raised at once.
    """
    begun = time.monotonic()
    for n in count():
        try:
            return interruptibly(attempt)
        except Exception as error:
            store_error = mapped(error)
            pause = jittered(exponential(n, 0.1, 8.0))
            late = time.monotonic() - begun + pause > timeout_s
            if late or not isinstance(store_error, Unreachable):
                raise store_error from (None if store_error is error else error)
            interruptibly(partial(time.sleep, pause))
    raise AssertionError


def until_answered(
    request: Callable[[], T],
    say: Callable[[str], None],
    *,
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
    hopeless: Callable[[ClusterError], bool] = lambda error: not isinstance(error, Unanswered),
) -> T:
    """Repeat a cluster request until it succeeds, and return the response. Raises errors that are `hopeless`.

    `say` is called when the cluster becomes unreachable, and when it is back.
    """
    away = False
    while True:
        try:
            answer = request()
        except ClusterError as error:
            if hopeless(error):
                raise
            if not away:
                say(f"{error}; trying again")
            away = True
            sleep(every_s)
            continue
        if away:
            say("the cluster answers again")
        return answer


def interruptibly(attempt: Callable[[], T]) -> T:
    """Call `attempt` and return its result. Signals can interrupt the wait.

    The main thread calls `attempt` in another thread, because native code would delay signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return attempt()
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(attempt())
        except BaseException as error:
            result.set_exception(error)

    global _waiting
    _waiting = True  # before the work begins, so that no signal is lost
    try:
        threading.Thread(target=work, name="store", daemon=True).start()
        return result.result()
    finally:
        _waiting = False


_waiting = False
"""True while the main thread waits for a store."""


def interrupt(why: str) -> None:
    """Raise Stopped if the main thread is waiting for a store. Call this in signal handlers."""
    if _waiting:
        raise Stopped(why)


FIRST_PAUSE_S = 0.1


class ConnectionLog:
    """Prints a message when a connection breaks, when the type of error changes, and when the connection is back."""

    def __init__(self, broken: str = "", restored: str = "") -> None:
        self._sentences = broken, restored
        self._problem: type[Exception] | None = None

    def broken(self, problem: Exception) -> None:
        """Report that the connection is broken."""
        if self._sentences[0] and type(problem) is not self._problem:
            _say(f"{self._sentences[0]}; it goes on as it was and tries again: {problem}")
        self._problem = type(problem)

    def restored(self) -> None:
        """Report that the connection works."""
        if self._sentences[1] and self._problem:
            _say(self._sentences[1])
        self._problem = None


def pause(failures: int, longest_s: float) -> float:
    """Return the pause in seconds before the next attempt, given the number of failures so far.

    The pause has jitter, because all workers lose a server at the same time.
    """
    return jittered(exponential(failures, FIRST_PAUSE_S, longest_s))


def _say(sentence: str) -> None:
    # `file` keeps a reference: without one, print() in Python 3.11 crashes if another thread replaces sys.stdout meanwhile.
    print(f"outlast | {sentence}", file=sys.stdout, flush=True)
