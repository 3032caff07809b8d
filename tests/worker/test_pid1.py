"""Process 1 of a pod, played by a process that the kernel hands its orphans as it does to process 1."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

BEFORE = """
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
from outlast.worker.agent import pid1
pid1.split()
"""
ORPHANS = 20
BUSY = f"""
for _ in range({ORPHANS}):
    subprocess.run(["sh", "-c", "sleep 0.01 &"], check=True)  # an orphan, as a rank's data loader when the rank is killed
codes = [subprocess.run([sys.executable, "-S", "-c", f"import os; os._exit({{n}})"]).returncode for n in range(5)]
print(codes, flush=True)
sys.stdin.readline()
sys.exit(7)
"""


@contextmanager
def process_1(program: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", BEFORE + program], **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                each.kill()
            process.kill()


def test_orphans_leave_no_zombies_and_the_agent_hears_how_its_own_children_ended() -> None:
    with process_1(BUSY) as process:
        assert process.stdout.readline() == "[0, 1, 2, 3, 4]\n"
        deadline = time.monotonic() + 60
        while len(left := psutil.Process(process.pid).children()) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(left) == 1, "the agent, and no zombie"
        assert not left[0].children()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_agent(number: signal.Signals) -> None:
    told = f"""
signal.signal({number:d}, lambda number, _: os._exit(75))
print("ready", flush=True)
time.sleep(60)
"""
    with process_1(told) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == 75


def test_an_agent_that_is_killed_is_a_container_that_was_killed() -> None:
    with process_1("print(os.getpid(), flush=True)\ntime.sleep(60)") as process:
        psutil.Process(int(process.stdout.readline())).kill()
        assert process.wait(60) == 137
