"""Real jobs that are scaled, suspended, interrupted and submitted again: nothing is lost and nothing is done twice."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

import worlds
from outlast.base.errors import AlreadyRunning, OutlastError
from outlast.job import spec
from outlast.job.backend import previous
from outlast.job.report import goodput
from outlast.job.report.steps import Bucket
from outlast.job.status import State
from worlds import steps as told_steps


def kept(machine, name: str) -> dict[int, dict[int, list[int]]]:
    """Step -> rank -> samples consumed, in the execution of each step that was kept (that of the newest generation)."""
    records: dict[int, dict[int, dict[int, list[int]]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for path in machine.backend.output(name).glob("consumed-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            assert record["rank"] not in records[record["step"]][record["generation"]], "one process does one step once"
            records[record["step"]][record["generation"]][record["rank"]] = record["indices"]
    return {step: generations[max(generations)] for step, generations in records.items()}


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def test_scaling_consumes_every_sample_of_every_epoch_once_and_loses_no_step(machine, tmp_path_factory):
    args = ("--steps=132", "--dropout=0", "--samples=330")  # 12 epochs of 11 steps, the last one short
    workers = {"replicas": 2, "min": 1, "max": 3}
    job = machine.job(args=(*args, "--pause=0.1", "--gate"), workers=workers, checkpoint={"every": "1h"})
    name = machine.submit(job)
    with pytest.raises(OutlastError, match=r"5 workers are not allowed; the job allows 1 to 3 .*--set workers.max=5"):
        machine.backend.scale(name, 5)
    for replicas in (1, 3):
        beyond = min(machine.at_step(name, 10).step + 6, 131)
        machine.backend.scale(name, replicas)
        machine.wait(
            name,
            lambda s, n=replicas, beyond=beyond: len(s.world) == n and s.step >= beyond and s.state is State.RUNNING,
        )
    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 0)

    events = machine.backend.events(name)
    sizes = [len(event["workers"]) for event in events if event["kind"] == "world"]
    assert sizes == [2, 1, 3]
    assert told_steps(events) == list(range(1, 133)), "planned changes lose no step"

    steps = kept(machine, name)
    for epoch in range(12):
        consumed = [i for step in range(epoch * 11 + 1, epoch * 11 + 12) for indices in steps[step].values() for i in indices]
        assert sorted(consumed) == list(range(330))

    alone = worlds.exact(args, tmp_path_factory.mktemp("alone"), 1)
    assert losses(machine.backend.output(name)) == pytest.approx(losses(alone.output), rel=1e-3, abs=1e-4)


ARGS = ("--steps=60", "--pause=0.04", "--gate")


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["interrupt", pytest.param("suspend", marks=pytest.mark.slow)])
def test_an_interrupted_run_saves_leaves_and_goes_on_where_it_was(machine, undisturbed, leave: str):
    path = machine.job(args=ARGS, checkpoint={"every": "1h"})
    name = machine.submit(path)
    machine.at_step(name, 20)
    machine.backend.steer(name, leave)
    left = machine.end(name)
    assert (left.state, left.exit_code) == ({"interrupt": State.INTERRUPTED, "suspend": State.SUSPENDED}[leave], 75)
    assert left.workers == []
    if leave == "suspend":
        machine.backend.resume(name)
    else:
        assert machine.backend.submit(spec.load(path), source=path) == left.run
    status = machine.end(name, hurry=True)
    assert (status.state, status.run, status.restarts) == (State.SUCCEEDED, left.run, 0)
    steps = told_steps(machine.backend.events(name))
    assert steps == list(range(1, 61))
    assert machine.final(name) == undisturbed(ARGS, 2)


@pytest.mark.slow  # tests/local/test_run_first_hour.py is quick
@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_a_run_that_has_ended_and_is_mended_goes_on_bit_for_bit(machine, undisturbed, end: str):
    args = ("--steps=30", "--pause=0.02", "--gate")
    name = machine.submit(machine.job(args=(*args, "--fail-at=13") if end == "fails" else args, restarts={"limit": 0}))
    if end == "is cancelled":
        machine.at_step(name, 13)
        with pytest.raises(AlreadyRunning, match="job is running"):
            machine.submit(machine.directory / "job.yaml")
        machine.backend.steer(name, "cancel")
    ended = machine.end(name)
    assert ended.state is {"fails": State.FAILED, "is cancelled": State.CANCELLED}[end]
    machine.submit(machine.job(args=args, restarts={"limit": 0}))
    assert "changed since: args: --fail-at=13 → nothing" in machine.backend.notices or end != "fails"
    status = machine.end(name, hurry=True)
    assert (status.state, status.run, status.restarts) == (State.SUCCEEDED, ended.run, 0), status.reason
    assert status.generation > ended.generation
    events = list(machine.backend.events(name))
    restored = [event["step"] for event in events if event["kind"] == "restored"]
    assert restored[0] == 0
    assert restored[-1] >= 10
    assert f"goes on from step {restored[-1]} of the run that " in machine.backend.notices[0]
    assert machine.final(name) == undisturbed(args, 2)
    told = goodput.buckets(events, None)
    assert told.seconds[Bucket.IDLE] > 0
    if end == "fails":
        return
    machine.submit(machine.job(args=("--steps=2",)))
    assert machine.end(name).run != ended.run
    (old,) = (machine.backend.output(name) / "previous").iterdir()
    assert (old / "checkpoints" / "step-00000030" / "COMMIT").exists()


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_batch_reads_every_sample_of_an_epoch_once(machine):
    name = machine.submit(machine.job(args=("--steps=60", "--batch=32", "--fail-at=13"), restarts={"limit": 0}))
    assert machine.end(name).state is State.FAILED
    machine.submit(machine.job(args=("--steps=60", "--batch=24")))
    assert machine.end(name).state is State.SUCCEEDED
    assert "changed since: args: --batch=32 --fail-at=13 → --batch=24" in machine.backend.notices
    steps = kept(machine, name)
    samples = [index for step in sorted(steps) for rank in sorted(steps[step]) for index in steps[step][rank]]
    assert sorted(samples[:512]) == list(range(512))
    assert sorted(samples[512:1024]) == list(range(512))


@pytest.mark.slow
def test_a_plain_torchrun_script_runs_unchanged_and_survives(machine):
    path = machine.job(script="plain.py", args=("40",))
    name = machine.submit(path)
    machine.wait(name, lambda s: s.state is State.RUNNING and all(w.ranks for w in s.workers))
    machine.backend.chaos(name, "kill-process", worker=1, rng=machine.rng)
    status = machine.end(name)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1)
    said = [line.text for line in machine.backend.logs(name, worker=0)]
    assert said.count("rank 0 of 2 starts") == 2
    assert "rank 0 of 2 is done" in said
    before = [line.text for line in previous(machine.backend.logs(name))]
    assert sorted(text for text in before if "start" in text) == ["rank 0 of 2 starts", "rank 1 of 2 starts"]
    assert "rank 0 of 2 is done" not in before


@pytest.mark.slow  # tests/local/test_run_survives.py has one of one worker
def test_several_processes_of_one_worker_are_ranks_of_one_world(machine):
    status = machine.run(machine.job(script="plain.py", args=("3",), workers={"replicas": 2}, processesPerWorker=2))
    assert status.state is State.SUCCEEDED
    said = [line.text for line in machine.backend.logs(status.name)]
    assert sorted(line for line in said if "starts" in line) == [f"[rank {rank}] rank {rank} of 4 starts" for rank in range(4)]
