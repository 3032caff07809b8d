"""Which looks at a training process show that it moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.worker.hangs import deadlocks, motion
from outlast.worker.hangs.motion import Motion, Sample, Work
from waits import until


@pytest.mark.parametrize(
    ("samples", "moves"),
    [
        ([Sample("recv"), Sample("recv"), Sample("recv")], [False, False]),
        ([Sample(place) for place in ("get", "poll", "get", "poll", "get")], [True, False, False, False]),
        ([Sample("svd", cpu_s=1.0), Sample("svd", cpu_s=2.0)], [True]),
        ([Sample("all_reduce", 5), Sample("all_reduce", 6)], [True]),
        ([Sample("item", cpu_s=second, spins=True) for second in range(4)], [False] * 3),
        ([Sample(place, cpu_s=second, spins=True) for second, place in enumerate("abab")], [True] * 3),
    ],
    ids=[
        *("a wait in one place", "a loop that polls, once its places are known", "a long call that computes"),
        *("a collective that begins", "a wait for a GPU, which uses a core", "a loop that uses a GPU, by its places"),
    ],
)
def test_what_shows_that_a_process_moves(samples: list[Sample], moves: list[bool]) -> None:
    found = Motion()
    assert [found.moves(each, 1.0, Work) for each in samples][1:] == moves


def test_a_loop_of_a_process_that_uses_a_gpu_moves_when_it_allocates() -> None:
    work, motion = iter([Work(allocated=(count, 7)) for count in (1, 2, 3)]), Motion()
    assert [motion.moves(Sample("item", spins=True), 1.0, lambda: next(work)) for _ in range(3)][1:] == [True, True]


def test_processes_that_it_has_started_work_for_it():
    work, motion = iter([Work(1.0), Work(1.1), Work(1.5)]), Motion()
    assert [motion.moves(Sample("wait"), 1.0, lambda: next(work)) for _ in range(3)] == [True, False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_cpu_time_of_grandchildren_is_counted():
    burn = "x = 0\nwhile True: x += 1"
    child = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"],
        start_new_session=True,
    )
    try:
        before = motion.work().children_s
        until(lambda: motion.work().children_s >= before + 0.2)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_frames_are_read(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    """In older Pythons a finalizer that runs then may wait for a lock that the call holds."""
    calls: list[str] = []

    def noted(name: str, answer: object = None) -> Callable[[], Any]:
        def call() -> Any:
            if threading.current_thread() is threading.main_thread():  # not of a watch that another test has left
                calls.append(name)
            return answer

        return call

    frames = {1: sys._getframe()}
    monkeypatch.setattr(sys, "_current_frames", noted("frames", frames))
    fake = SimpleNamespace(isenabled=lambda: collects, disable=noted("disable"), enable=noted("enable"))
    monkeypatch.setattr(deadlocks, "gc", fake)
    assert deadlocks._frame(1) is frames[1]
    assert calls == ["disable", "frames", "enable"][: 2 + collects]
