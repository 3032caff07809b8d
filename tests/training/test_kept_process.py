"""Whether a process can go on in the next world, and what it reads there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outlast.job.contract import ERROR, NEXT, Env, Exit
from outlast.job.workerfiles import next_world, progress_file
from outlast.training import Stream, kept_process, session
from outlast.training.kept_process import Facts
from outlast.worker.hangs import deadlocks
from outlast.worker.launch import training_process
from outlast.worker.launch.rank_failures import Ended, Start

RESUME = "run.resume(net, stream)"


@pytest.mark.parametrize("calls", [("run.ddp()", RESUME), (RESUME,), ("run.ddp()", "run.ddp()", RESUME)])
def test_a_process_whose_collectives_before_its_first_batch_are_known_goes_on(calls: tuple[str, ...]) -> None:
    assert kept_process.refusal(Facts(calls=calls)) == ""


CALLS = "before its first batch, the script calls {}; only run.ddp() and a last run.resume() may come"
HOOKS = (
    "a model of run.ddp() has hooks, or options other than broadcast_buffers, bucket_cap_mb, dim, find_unused_parameters, "
    "gradient_as_bucket_view"
)
OWN = "the script has collectives before its first batch, or process groups of its own"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"agent": False}, "no agent of Outlast has started it"),
        (
            {"foreign": ["net"]},
            "'net' in the state is bound to this world; only models of run.ddp() and Streams can change worlds",
        ),
        ({"streams": 0}, "`for batch in stream` reads 0 Streams of the state; it must read one"),
        ({"streams": 2}, "`for batch in stream` reads 2 Streams of the state; it must read one"),
        ({"hooks": True}, HOOKS),
        (
            {"compiled": True},
            "torch.compile or torch.jit has compiled code, and would compile it otherwise than in a new process",
        ),
        ({"thread": True}, "another thread than the session's reads the Stream"),
        ({"backend": "mpi"}, "the backend mpi cannot be left and joined again; gloo and nccl can"),
        ({"calls": ["run.gather()", RESUME]}, CALLS.format("run.gather()")),
        ({"calls": [RESUME, "run.ddp()"]}, CALLS.format(RESUME)),
        ({"calls": [RESUME, "run.log(0, reduce=True)"]}, CALLS.format(RESUME)),
        ({"calls": ["run.ddp()"]}, CALLS.format("run.ddp()")),
        ({"calls": []}, CALLS.format("nothing")),
        ({"collectives": 1}, OWN),
        ({"collectives": None}, OWN),
        ({"groups": 2}, OWN),
    ],
)
def test_a_process_that_others_would_wait_for_in_vain_is_replaced(facts: dict[str, Any], why: str) -> None:
    assert kept_process.refusal(Facts(**facts)) == why


def test_a_place_in_a_world_is_read_by_the_process_that_waits_for_a_later_start(tmp_path: Path) -> None:
    place = {Env.GENERATION: "3", Env.ATTEMPT: "1", "RANK": "4"}
    assert next_world.read(tmp_path, 0, (2, 5)) == {}
    next_world.write(tmp_path, 0, place)
    assert next_world.read(tmp_path, 0, (2, 5)) == next_world.read(tmp_path, 0, (3, 0)) == place
    assert next_world.read(tmp_path, 0, (3, 1)) == next_world.read(tmp_path, 1, (2, 5)) == {}
    (tmp_path / NEXT.format(local_rank=0)).write_text('{"OUTLAST_GENERATION": ')
    assert next_world.read(tmp_path, 0, (2, 5)) == {}


def test_groups_that_the_script_holds_are_those_of_the_optimizer_after_a_load() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    groups, values = optimizer.param_groups, optimizer.state
    group = groups[0]
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    with kept_process.same_groups({"net": net, "optimizer": optimizer}):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert optimizer.state is values
    assert groups[0] is group
    assert group["lr"] == 0.25
    group["lr"] = 0.0
    net(torch.ones(1, 2)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    assert torch.equal(net.weight, before)
    assert set(values) == set(net.parameters())


COMPILES = """
import torch
from outlast.training import kept_process
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert not kept_process._compiled({"net": net, "optimizer": optimizer})
assert kept_process._compiled({"net": torch.compile(net)})
assert kept_process._compiled({"net": torch.jit.script(torch.nn.Linear(2, 2))})
torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
assert kept_process._compiled({"net": net})
"""


def test_compiled_code_is_noticed_in_the_state_and_anywhere_in_the_process() -> None:
    subprocess.run([sys.executable, "-c", COMPILES], check=True)


@pytest.mark.parametrize("kept", [False, True])
def test_an_error_of_a_kept_process_is_no_mistake_that_each_start_repeats(tmp_path: Path, kept: bool) -> None:
    progress_file.Writer(tmp_path, 0).write(progress_file.Progress(generation=2, rank=0, phase="first step"))
    record = {"rank": 0, "type": "AttributeError", "message": "raised", "traceback": "x", "time": 1.0, "code": 1, "kept": kept}
    (tmp_path / ERROR.format(local_rank=0)).write_text(json.dumps(record))
    assert Start(0, tmp_path, 1, 2, 0).failure(Ended(0, 0, 1, 1.0))["early"] == ("" if kept else "AttributeError")


def test_a_mistake_in_a_world_with_kept_processes_ends_the_job_only_from_the_second_batch_on() -> None:
    keeper, watch, met = kept_process.Keeper(), deadlocks.watch(), []
    keeper.refusal = ""
    keeper.opened(lambda call, own: [own + 1.0])
    assert watch.code == Exit.FAILED
    keeper.before_batch({}, met.append)
    assert (watch.code, met) == (Exit.FAILED, ["for batch in stream"])
    keeper.before_batch({}, met.append)
    assert (watch.code, met) == (Exit.MISCONFIGURED, ["for batch in stream"])
    keeper.opened(lambda call, own: [own])
    keeper.before_batch({}, met.append)
    assert (watch.code, met) == (Exit.MISCONFIGURED, ["for batch in stream"])


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream of a rank that is to leave its world."""
    monkeypatch.setattr(training_process, "is_rank", True)
    monkeypatch.setattr(deadlocks.Watch, "start", lambda _: None)
    for name, value in {Env.OUTPUT: tmp_path, Env.STATE: tmp_path, Env.NOTICE: tmp_path / "notice"}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "notice").write_text("{}")
    return Stream(torch.zeros(8, 2), batch=2)


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_waits_only_for_a_world_that_has_a_saved_step(leaving: Stream, late: int) -> None:
    net, reached = nn.Linear(2, 2), []

    def trains() -> None:
        with session.open(keep_process=True) as run:
            step = run.resume({"net": run.ddp(net), "stream": leaving})
            for _ in leaving:
                step += late
                if run.interrupted():
                    run.save(step)
                    reached.append(run._keeper and (run._keeper.refusal, run._keeper.departure))
                    break

    with pytest.raises(SystemExit, match="75"):
        trains()
    assert reached == [("", 1)][:late]


def trains(stream: Stream, batches: Callable[[], Iterable[object]], steps: list[int]) -> None:
    with session.open(keep_process=True) as run:
        step = run.resume({"net": run.ddp(nn.Linear(2, 2)), "stream": stream})
        for _ in batches():
            steps.append(step := step + 1)
            if run.interrupted():
                run.save(step)


def test_a_process_whose_stream_is_read_otherwise_leaves_as_without_the_choice(leaving: Stream) -> None:
    """No batch would come in which it could change the world."""
    steps: list[int] = []
    with pytest.raises(SystemExit, match="75"):
        trains(leaving, lambda: leaving.batches(0, 1), steps)
    assert steps == [1]


def test_a_place_that_cannot_be_taken_is_the_error_of_a_kept_process(leaving: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise RuntimeError("the store refuses connections")

    monkeypatch.setattr(kept_process.Keeper, "wait", wait)
    with pytest.raises(RuntimeError, match="the store refuses connections"):
        trains(leaving, lambda: leaving, [])
