"""Writes that need not wait for each other."""

from __future__ import annotations

import logging
import threading

import pytest

from outlast.kubernetes.operator.writer import IN_FLIGHT, Background, Parallel


def test_things_are_done_at_once_and_what_comes_of_them_is_in_their_order() -> None:
    meeting = threading.Barrier(IN_FLIGHT, timeout=60)

    def meet(number: int) -> int:
        meeting.wait()  # nobody passes before all are here
        return -number

    assert Parallel(IN_FLIGHT)(meet, range(2 * IN_FLIGHT)) == [-number for number in range(2 * IN_FLIGHT)]
    assert Parallel(1)(lambda number: -number, []) == []


def test_a_failure_is_raised_when_nothing_is_under_way_and_ends_what_has_not_begun() -> None:
    ended: list[int] = []
    others = threading.Event()

    def fail(number: int) -> None:
        if number == 0:
            others.set()
            raise ValueError("no quota")
        assert others.wait(60)
        ended.append(number)

    with pytest.raises(ValueError, match="no quota"):
        Parallel(2)(fail, range(2 * IN_FLIGHT))
    assert sorted(ended) == list(range(1, IN_FLIGHT))


def test_what_nobody_waits_for_is_done_in_its_order_and_too_much_of_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(2), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(60)
        raise ValueError("a bug")

    with caplog.at_level(logging.WARNING):
        background(first)
        assert begun.wait(60)
        for word in ("second", "third", "fourth"):
            background(lambda word=word: done.append(word))  # type: ignore[misc]
        background.finish(0.0)
        assert done == []
        go_on.set()
        background.finish(10.0)
    assert done == ["second", "third"]
    assert [record.getMessage() for record in caplog.records] == [
        "an Event is dropped: 2 are pending",
        "an Event could not be written",
    ]
