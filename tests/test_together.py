"""Writes that need not wait for each other."""

from __future__ import annotations

import logging
import threading

import pytest

from outlast.operator.parallel import AT_ONCE, Later, Threads, in_turn


def test_things_are_done_at_once_and_what_comes_of_them_is_in_their_order() -> None:
    meeting = threading.Barrier(AT_ONCE, timeout=10)

    def meet(number: int) -> int:
        meeting.wait()  # nobody passes before all are here
        return -number

    assert Threads(AT_ONCE)(meet, range(2 * AT_ONCE)) == [-number for number in range(2 * AT_ONCE)]
    assert Threads(1)(lambda number: -number, []) == in_turn(lambda number: -number, []) == []


def test_a_failure_is_raised_when_nothing_is_under_way_and_ends_what_has_not_begun() -> None:
    ended: list[int] = []
    others = threading.Event()

    def fail(number: int) -> None:
        if number == 0:
            others.set()
            raise ValueError("no quota")
        assert others.wait(10)
        ended.append(number)

    with pytest.raises(ValueError, match="no quota"):
        Threads(2)(fail, range(2 * AT_ONCE))
    assert sorted(ended) == list(range(1, AT_ONCE))


def test_what_nobody_waits_for_is_done_in_its_order_and_too_much_of_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    later, done = Later(2), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(10)
        raise ValueError("a bug")

    with caplog.at_level(logging.WARNING):
        later(first)
        assert begun.wait(10)
        for word in ("second", "third", "fourth"):
            later(lambda word=word: done.append(word))  # type: ignore[misc]
        later.finish(0.0)
        assert done == []
        go_on.set()
        later.finish(10.0)
    assert done == ["second", "third"]
    assert [record.getMessage() for record in caplog.records] == [
        "an Event is left out: 2 are still to be written",
        "an Event could not be written",
    ]
