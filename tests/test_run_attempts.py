"""A job whose coordinator stands still: its members repair what fails, and it counts that afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from outlast.local.state_dir import StateDir
from outlast.status import State
from outlast.workerfiles import progress

Final = Callable[..., dict[str, object]]
ARGS = ("--steps=60", "--pause=0.04", "--gate")


def test_processes_killed_while_the_launcher_stands_still_train_again_within_seconds_and_count_once(machine, undisturbed: Final):
    name = machine.submit(machine.job(args=ARGS))
    before = machine.at_step(name, 12)
    assert before.launcher is not None
    home = StateDir(machine.directory / "state" / "jobs" / name)
    os.kill(before.launcher, signal.SIGSTOP)
    for attempt, worker in ((1, 0), (2, 1)):
        found = [progress.read(home.worker(index), 0) for index in (0, 1)]
        killed = time.monotonic()
        os.kill(found[worker].pid, signal.SIGKILL)
        while not all(one and one.attempt == attempt and one.phase == "train" for one in found):
            assert time.monotonic() - killed < 30, found
            time.sleep(0.01)
            found = [progress.read(home.worker(index), 0) for index in (0, 1)]
        print(f"attempt {attempt} trains after {time.monotonic() - killed:.2f} s")
    os.kill(before.launcher, signal.SIGCONT)
    status = machine.end(name, hurry=True)
    assert (status.state, status.generation, status.restarts) == (State.SUCCEEDED, before.generation, 2)
    counted = [each["repaired"] for each in machine.backend.events(name) if each["kind"] == "failure"]
    told = [each["attempt"] for each in machine.backend.events(name) if each["kind"] == "attempt"]
    assert (counted, told) == ([1, 2], [1, 2])
    assert machine.final(name) == undisturbed(ARGS, 2)
