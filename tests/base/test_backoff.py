"""How long what may pass by itself is tried again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from outlast.base import backoff
from outlast.base.backoff import interrupt, interruptibly, retried
from outlast.base.errors import Denied, Stopped, StoreError, Unreachable
from outlast.storage import store


class Time:
    """A clock that stands still but for what sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(backoff, "time", clock)
    return clock


def attempts(time: Time, *takes_s: float, wrong: type[StoreError] = Unreachable) -> tuple[Callable[[], int], list[float]]:
    """An attempt that fails after each of these times, and then succeeds; and when each began."""
    begun: list[float] = []

    def attempt() -> int:
        begun.append(time.monotonic())
        if len(begun) > len(takes_s):
            return len(begun)
        time.sleep(takes_s[len(begun) - 1])
        raise wrong("it is not well")

    return attempt, begun


def as_it_is(error: Exception) -> StoreError:
    assert isinstance(error, StoreError)
    return error


def test_a_store_that_stood_still_and_then_hangs_up_is_asked_once_more(clock: Time) -> None:
    attempt, _ = attempts(clock, 0.5, 0.2)
    assert retried(attempt, as_it_is, 2) == 3


def test_no_attempt_begins_after_the_time_and_the_last_one_may_end_after_it(clock: Time) -> None:
    attempt, begun = attempts(clock, *[0.3] * 9)
    with pytest.raises(Unreachable):
        retried(attempt, as_it_is, 0.5)
    assert len(begun) == 2
    assert begun[-1] - begun[0] < 0.5


def test_what_does_not_pass_is_not_tried_again(clock: Time) -> None:
    attempt, begun = attempts(clock, 0, wrong=Denied)
    with pytest.raises(Denied):
        retried(attempt, as_it_is, 9)
    assert len(begun) == 1


def test_a_store_has_all_of_its_time(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    place = store.open_("s3://bucket", timeout_s=2)
    attempt, _ = attempts(clock, 1.2, 0.1)
    assert place._do("read", "key", attempt) == 3


def test_a_signal_that_comes_with_the_first_request_ends_the_wait() -> None:
    over = threading.Event()

    def attempt() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        over.wait(60)

    before = signal.signal(signal.SIGUSR1, lambda *_: interrupt("told to"))
    try:
        with pytest.raises(Stopped, match="told to"):
            interruptibly(attempt)
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, before)
