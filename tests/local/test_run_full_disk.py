"""Real jobs whose output fails: what is in memory goes on, and is saved once the output is well again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import small_disks
from outlast.job.status import JobStatus, State
from outlast.job.workerfiles import progress_file
from outlast.local.state_dir import StateDir
from outlast.storage import checkpoints

ARGS = ("--steps=160", "--pause=0.03", "--width=4000", "--print")


@pytest.mark.slow
@pytest.mark.parametrize("harm", [small_disks.fill, small_disks.protect])
def test_an_output_that_fails_ends_no_job_and_loses_no_step(machine, undisturbed, small_disk: Path, harm: Callable[[Path], None]):
    """While it cannot be written, first a process is killed, which the same workers repair, then a worker, which makes another
    generation. Nothing can be recorded there meanwhile, so what it goes on from is read from the small files of the workers."""
    path = machine.job(args=ARGS, checkpoint={"every": "10 steps"}, output=str(small_disk), hang={"limit": "60s"})
    name = machine.submit(path)
    output = machine.backend.output(name)
    assert small_disk in output.parents
    home = StateDir(machine.directory / "state" / "jobs" / name)
    machine.wait(name, lambda s: s.step >= 12 and s.checkpoint is not None)
    harm(small_disk)
    before = beyond(machine, name, 12)
    saved = [c.step for c in checkpoints.list_(output / "checkpoints")]
    record = progress_file.read(home.worker(1), 0)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    assert went_on(home, record.generation, record.attempt + 1) >= before.snapshot.step
    before = beyond(machine, name, before.step + 10)
    machine.backend.chaos(name, "kill-worker", worker=1, rng=machine.rng)
    assert went_on(home, record.generation + 1, 0) >= before.snapshot.step
    assert [c.step for c in checkpoints.list_(output / "checkpoints")] == saved
    small_disks.repair(small_disk)
    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 2), home.log.read_text()
    assert status.checkpoint.step == 160
    assert machine.final(name) == undisturbed(ARGS, 2)


def beyond(machine, name: str, step: int) -> JobStatus:
    """The status when a snapshot of a later step is complete."""
    return machine.wait(name, lambda s: s.snapshot is not None and s.snapshot.step > step)


def went_on(home: StateDir, generation: int, attempt: int) -> int:
    """The step from which rank 0 goes on in an attempt of a generation."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = progress_file.read(home.worker(0), 0)
        if found and (found.generation, found.attempt) >= (generation, attempt) and found.phase in ("first step", "train"):
            return found.step
        time.sleep(0.002)
    pytest.fail(f"attempt {attempt} of generation {generation} does not train: {found}")
