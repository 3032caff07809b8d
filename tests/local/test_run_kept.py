"""Real jobs whose processes go on in the next world: the end is that of processes that no agent starts, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The end of a run in the same worlds, each of new processes, which no agent starts."""
    output = tmp_path_factory.mktemp("replaced")
    for ranks, until in ((2, 10), (3, 20), (1, 30)):
        worlds.exact(("--steps=30", f"--until={until}"), output, ranks)
    return dict(json.loads((output / "final.json").read_text()))


def test_workers_that_stay_keep_their_processes_and_change_no_bit(machine, replaced: dict[str, object]):
    first, second, third = resized(machine, "kept", "--keep")
    assert (second[0], second[1], third[0]) == (first[0], first[1], first[0])
    assert machine.final("kept") == replaced
    assert machine.backend.status("kept").restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["waits", "enters", "begins"])
def test_a_change_that_fails_ends_in_new_processes_with_the_same_bits(machine, harm: str, replaced: dict[str, object]):
    first, second, third = resized(machine, "harmed", "--keep", f"--harm={harm}")
    assert second[1] != first[1]
    assert third[0] == second[0], "the next change keeps processes again"
    assert machine.final("harmed") == replaced
    restarts = machine.backend.status("harmed").restarts
    assert restarts == 1 or (harm == "waits" and not restarts), "a process that waits is needed by nobody, once its agent knows"


@pytest.mark.slow
def test_a_collective_that_only_new_processes_begin_costs_a_restart_and_no_bit(machine, replaced: dict[str, object]):
    first, second, _ = resized(machine, "asked", "--keep", "--asks")
    assert second[1] != first[1]
    assert machine.final("asked") == replaced
    assert machine.backend.status("asked").restarts == 1


@pytest.mark.slow
def test_a_model_that_cannot_change_worlds_is_named_and_its_processes_are_replaced(machine):
    name = machine.submit(machine.job(args=(*ARGS, "--keep", "--sharded"), workers=WORKERS, checkpoint={"every": "1h"}))
    before = pids(machine.at_step(name, 10))
    why = "each change of the world starts new processes, although keep_process is set: 'net' in the state is bound to this world"
    machine.wait(name, lambda s: any(why in warning for warning in s.warnings))
    machine.backend.scale(name, 1)
    machine.wait(name, lambda s: len(s.world) == 1 and s.step > 10)
    assert pids(machine.at_step(name, 20))[0] != before[0]
    machine.backend.steer(name, "cancel")
