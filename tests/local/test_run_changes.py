"""Real jobs that are scaled, suspended, interrupted and submitted again: nothing is lost and nothing is done twice."""

from __future__ import annotations

import collections
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outlast
import worlds
from machines import PROGRAMS
from outlast.base.errors import OutlastError
from outlast.job import contract, spec
from outlast.job.status import State
from waits import until
from worlds import steps as told_steps

EXACT = PROGRAMS / "exact.py"
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"


def kept(output: Path) -> dict[int, dict[int, list[int]]]:
    """Step -> rank -> samples consumed, in the execution of each step that was kept (that of the newest generation)."""
    records: dict[int, dict[int, dict[int, list[int]]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for path in output.glob("consumed-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            assert record["rank"] not in records[record["step"]][record["generation"]], "one process does one step once"
            records[record["step"]][record["generation"]][record["rank"]] = record["indices"]
    return {step: generations[max(generations)] for step, generations in records.items()}


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.timeout(180)
def test_the_example_of_the_page_runs_and_no_change_of_size_loses_a_sample(tmp_path: Path, monkeypatch, tmp_path_factory) -> None:
    """The page's own code kills a worker and scales to three; meanwhile another process scales to one."""
    monkeypatch.chdir(tmp_path)
    args = ("--dropout=0", "--samples=330")  # epochs of 11 steps, the last one short
    options = (*args, "--pause=0.04")
    Path("train.py").write_text(
        f"import runpy, sys\nsys.argv += {options}\nrunpy.run_path({str(EXACT)!r}, run_name='__main__')\n"
    )
    example = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert example is not None
    with subprocess.Popen([sys.executable, "-c", example[1]], stdout=subprocess.PIPE, text=True) as page:
        [run] = until(outlast.runs)
        run.wait(until=lambda status: len(status.world) == 3)
        with pytest.raises(OutlastError, match=r"5 workers are not allowed; the job allows 1 to 3 .*--set workers.max=5"):
            run.scale(5)
        beyond = run.status.step + 6
        run.wait(step=beyond)
        run.scale(1)
        run.wait(until=lambda status: len(status.world) == 1 and status.step > beyond + 6)
        (run.output / "hurry").touch()
        done, _ = page.communicate()
    assert page.returncode == 0
    assert re.search(r"^Succeeded 400 0\.\d+$", done, re.M)
    assert re.search(r"^worker 1 .*killed.* \d+\.\d+$|^worker \d .*\d+\.\d+$", done, re.M)

    events = list(run.place.events("train"))
    sizes = [len(event["workers"]) for event in events if event["kind"] == "world"]
    assert (sizes[0], sizes[-2:]) == (2, [3, 1])
    steps = told_steps(events)
    assert sum(after != step + 1 for step, after in itertools.pairwise(steps)) <= 1, "only the killed worker costs steps"
    for epoch, samples in itertools.groupby(sorted(kept(run.output).items()), lambda item: (item[0] - 1) // 11):
        consumed = sorted(index for _, ranks in samples for indices in ranks.values() for index in indices)
        assert consumed == list(range(330)) or epoch == 36, "400 steps end within an epoch"
    alone = worlds.exact((*args, "--steps=400"), tmp_path_factory.mktemp("alone"), 1)
    assert losses(run.output) == pytest.approx(losses(alone.output), rel=1e-3, abs=1e-4)

    log = [line.text for line in run.logs(worker=0)]
    starts = [number for number, text in enumerate(log) if contract.is_start_line(text)]
    assert [line.text for line in run.logs(worker=0, previous=True)] == log[[0, *starts][-2] : starts[-1]]
    assert (run.name, run.checkpoints[-1].step) == ("train", 400)
    assert all(tensor.device.type == "cpu" for tensor in run.weights(400, key="net").values())
    report = run.report()
    assert report.as_json()["lost"]["failures"]["count"] == 1
    assert "train" in report.save("report.html").read_text()


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


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_batch_reads_every_sample_of_an_epoch_once(machine):
    name = machine.submit(machine.job(args=("--steps=60", "--batch=32", "--fail-at=13"), restarts={"limit": 0}))
    assert machine.end(name).state is State.FAILED
    machine.submit(machine.job(args=("--steps=60", "--batch=24")))
    assert machine.end(name).state is State.SUCCEEDED
    assert "changed since: args: --batch=32 --fail-at=13 → --batch=24" in machine.backend.notices
    steps = kept(machine.backend.output(name))
    samples = [index for step in sorted(steps) for rank in sorted(steps[step]) for index in steps[step][rank]]
    assert sorted(samples[:512]) == list(range(512))
    assert sorted(samples[512:1024]) == list(range(512))


@pytest.mark.slow  # tests/local/test_run_survives.py has one of one worker
def test_several_processes_of_one_worker_are_ranks_of_one_world(machine):
    status = machine.run(machine.job(args=("--steps=3", "--print"), workers={"replicas": 2}, processesPerWorker=2))
    assert status.state is State.SUCCEEDED
    said = [line.text for line in machine.backend.logs(status.name)]
    assert sorted(line for line in said if "step 3" in line) == [f"[rank {rank}] rank {rank} step 3" for rank in range(4)]
