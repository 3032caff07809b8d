"""Real jobs whose processes go on in the next world: the end is that of processes that no agent starts, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import worlds
from outlast.job.status import JobStatus, State

ARGS = ("--steps=30", "--pause=0.02", "--holds", "10", "20")
WORKERS = {"replicas": 2, "min": 1, "max": 3}


def pids(status: JobStatus) -> dict[int, int]:
    return {worker.index: worker.ranks[0].pid for worker in status.workers if worker.ranks}


def resized(machine, name: str, *args: str) -> Iterator[dict[int, int]]:
    """Train in worlds of 2, 3 and 1 workers, which change after steps 10 and 20. Yields the processes of each."""
    machine.submit(machine.job(name, args=(*ARGS, *args), workers=WORKERS, checkpoint={"every": "1h"}))
    for step, replicas in ((10, 3), (20, 1)):
        yield pids(machine.at_step(name, step))
        machine.backend.scale(name, replicas)
        after = machine.wait(name, lambda s, n=replicas, at=step: len(s.world) == n and s.step > at)
    yield pids(after)
    status = machine.end(name)
    assert status.state is State.SUCCEEDED, status.reason
    assert worlds.steps(machine.backend.events(name)) == list(range(1, 31)), "no step is lost"


@functools.cache
def replaced(output: Path, *args: str) -> dict[str, object]:
    """The end of a run in the same worlds, each of new processes, which no agent starts."""
    for ranks, until in ((2, 10), (3, 20), (1, 30)):
        worlds.exact(("--steps=30", f"--until={until}", *args), output, ranks)
    return dict(json.loads((output / "final.json").read_text()))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replaced")


def test_workers_that_stay_keep_their_processes_and_change_no_bit(machine, output: Path):
    first, second, third = resized(machine, "kept", "--keep")
    assert (second[0], second[1], third[0]) == (first[0], first[1], first[0])
    assert machine.final("kept") == replaced(output)
    assert machine.backend.status("kept").restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--sharded", "--compile"])
def test_sharded_and_compiled_models_change_worlds(machine, tmp_path: Path, how: str):
    first, second, third = resized(machine, "kept", "--keep", how)
    assert (second[0], second[1], third[0]) == (first[0], first[1], first[0])
    assert machine.final("kept") == replaced(tmp_path, how)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["waits", "enters", "begins"])
def test_a_change_that_fails_ends_in_new_processes_with_the_same_bits(machine, harm: str, output: Path):
    first, second, third = resized(machine, "harmed", "--keep", f"--harm={harm}")
    assert second[1] != first[1]
    assert third[0] == second[0], "the next change keeps processes again"
    assert machine.final("harmed") == replaced(output)
    restarts = machine.backend.status("harmed").restarts
    assert restarts == 1 or (harm == "waits" and not restarts), "a process that waits is needed by nobody, once its agent knows"


@pytest.mark.parametrize(
    ("victim", "how"), [("process", ()), ("worker", ()), pytest.param("worker", ("--sharded",), marks=pytest.mark.slow)]
)
def test_processes_outlive_the_loss_of_another_and_change_no_bit(machine, undisturbed, victim: str, how: tuple[str, ...]):
    args = ("--steps=60", "--pause=0.04", "--gate", *how, "--keep")
    name = machine.submit(machine.job(args=args, workers={"replicas": 3}, checkpoint={"every": "1h"}))
    before = machine.at_step(name, 15)
    lost = before.workers[1]
    os.kill(lost.ranks[0].pid if victim == "process" else lost.pid, signal.SIGKILL)
    after = machine.wait(name, lambda s: s.restarts == 1 and s.step > before.step + 10 and len(s.world) == 3)
    assert {index for index, pid in pids(before).items() if pids(after)[index] == pid} == {0, 2}
    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1), status.reason
    assert machine.final(name) == undisturbed(args[:-1], 3)


@pytest.mark.slow
def test_processes_outlive_one_that_is_stopped_once_it_is_killed_for_that(machine, undisturbed):
    args = ("--steps=60", "--pause=0.04", "--gate", "--keep")
    name = machine.submit(machine.job(args=args, hang={"limit": "3s"}, checkpoint={"every": "1h"}))
    before = machine.at_step(name, 15)
    os.kill(before.workers[1].ranks[0].pid, signal.SIGSTOP)
    machine.wait(name, lambda s: s.restarts == 1 and s.step > before.step + 5)
    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1), status.reason
    assert machine.final(name) == undisturbed(args[:3], 2)


@pytest.mark.slow
def test_a_process_that_notices_the_loss_late_is_replaced_and_the_status_says_so(machine, undisturbed):
    args = ("--steps=6", "--pause=2.5", "--keep")
    name = machine.submit(machine.job(args=args, checkpoint={"every": "1h"}))
    before = machine.at_step(name, 2)
    os.kill(before.workers[1].ranks[0].pid, signal.SIGKILL)
    after = machine.wait(name, lambda s: s.restarts == 1 and any(worker.replaced for worker in s.workers))
    (said,) = after.warnings
    assert said.startswith("worker 0 has replaced its processes 1 time")
    assert "new processes start: the old ones have not left" in "".join(map(str, machine.backend.logs(name)))
    status = machine.end(name)
    assert (status.state, status.restarts, status.warnings) == (State.SUCCEEDED, 1, []), status.reason
    assert machine.final(name) == undisturbed(args[:1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["hf", "lightning"])
def test_processes_with_a_trainer_outlive_the_loss_of_another_and_change_no_bit(machine, library: str):
    usual = {"script": "trainers.py", "args": [library, "100"], "workers": {"replicas": 3}, "hang": {"limit": "30s"}}
    whole = machine.submit(machine.job("whole", **usual))
    assert machine.end(whole).state is State.SUCCEEDED
    name = machine.submit(machine.job(**usual))
    before = machine.at_step(name, 20)
    os.kill(before.workers[1].ranks[0].pid, signal.SIGKILL)
    after = machine.wait(name, lambda s: s.restarts == 1 and s.step > before.step + 20 and len(s.world) == 3)
    assert {index for index, pid in pids(before).items() if pids(after)[index] == pid}, "a Trainer takes a while to leave"
    assert machine.end(name).state is State.SUCCEEDED
    assert machine.final(name) == machine.final(whole)
