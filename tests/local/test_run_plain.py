"""Plain scripts, which import nothing of Outlast: what they write is in the output, is not lost, and is said as it is."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outlast.cli import run_view, status_page
from outlast.job.status import JobStatus, State
from outlast.storage import store
from servers import Place

EXAMPLES = str(Path(__file__).parents[2] / "examples")
SCRIPT = {"script": "torchrun.py", "code": EXAMPLES}


def step(path: Path) -> int:
    return int(torch.load(path)["step"])


def saved(at_least: int, machine) -> Callable[[JobStatus], bool]:
    path = machine.directory / "state" / "runs" / "job" / "work" / "checkpoint.pt"
    return lambda status: path.exists() and step(path) >= at_least


def went_on(machine) -> list[int]:
    said = "\n".join(line.text for line in machine.backend.logs("job"))
    return [int(match) for match in re.findall(r"rank 0 of \d+ goes on from step (\d+)", said)]


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_plain_script_saves_in_the_output_and_goes_on_at_the_exact_step(machine, resumed: bool) -> None:
    name = machine.submit(machine.job(args=("--steps=100000", "--pause=0.02", "--save-every=20"), **SCRIPT))
    machine.wait(name, saved(20, machine))
    machine.backend.chaos(name, "kill-process", worker=1, rng=machine.rng)
    machine.wait(name, lambda status: bool(went_on(machine)))
    assert went_on(machine)[0] % 20 == 0
    status = machine.wait(name, lambda status: status.told == "log" and status.saved is not None and bool(status.eta_s))
    assert (status.steps, status.saved.name, status.checkpoint) == (100_000, "work/checkpoint.pt", None)
    assert status.step % 20 == 0
    assert {rank.rank: rank.step for worker in status.workers for rank in worker.ranks} == {0: status.step, 1: None}
    page = status_page.page(status, time.time())
    assert re.search(r"\nstep +[\d,]+/100,?000, .* steps/s, .* left \(read from the log\)\n", page)
    assert re.search(r"\ncheckpoint +newest file that looks like a checkpoint: work/checkpoint.pt, .* ago\n", page)
    assert run_view.leaving(status) == "the script gets SIGTERM and interruption.grace to save and exit"
    trained = status.step
    machine.backend.steer(name, "suspend")
    status = machine.end(name)
    assert status.state is State.SUSPENDED
    assert re.search(r"; newest file that looks like a checkpoint: work/checkpoint.pt, .* ago$", status.reason)
    left = step(machine.backend.output(name) / "work" / "checkpoint.pt")
    assert left >= trained
    if not resumed:
        return
    machine.backend.resume(name)
    machine.wait(name, lambda status: len(went_on(machine)) > 1)
    assert went_on(machine)[1] == left
    machine.backend.steer(name, "cancel")
    machine.end(name)


@pytest.mark.slow
def test_with_a_store_another_machine_goes_on_with_a_plain_scripts_files(machine, elsewhere, rclone: Place):
    url = rclone.url
    args = ("--steps=2000", "--pause=0.02", "--save-every=20")
    job = machine.job(args=args, output=url, sync={"every": "1s"}, **SCRIPT)
    name = machine.submit(job)
    place = store.open_(f"{url}/job")
    machine.wait(name, lambda status: "work/checkpoint.pt" in {entry.key for entry in place.entries()})
    machine.kill_everything()
    pushed = machine.directory / "pushed.pt"
    pushed.write_bytes(place.get("work/checkpoint.pt"))
    shutil.rmtree(machine.directory / "state")
    assert not [entry.key for entry in place.entries() if entry.key.endswith(".py")]
    elsewhere.submit(job, take_over=True)
    elsewhere.wait(name, lambda status: bool(went_on(elsewhere)))
    assert went_on(elsewhere)[0] == step(pushed)
    elsewhere.backend.steer(name, "cancel")
    elsewhere.end(name)
    assert step(elsewhere.backend.output(name) / "work" / "checkpoint.pt") >= step(pushed)
