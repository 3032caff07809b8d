"""What users and machines get wrong: one clear sentence, no traceback of ours, nothing lost."""

from __future__ import annotations

import time

import pytest

from outlast.job.status import State


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_who_failed_first_and_ends_last_is_the_cause(machine, processes: int):
    text = (
        "import atexit, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == dist.get_world_size() - 1:\n"
        "    atexit.register(time.sleep, 2)\n"
        "    dist.destroy_process_group()\n"
        "    raise ValueError('a bug')\n"
        "dist.barrier()\n"
    )
    workers = {"workers": {"replicas": 2 // processes}, "processesPerWorker": processes}
    status = machine.run(machine.job(**a_script(machine, text), **workers, restarts={"limit": 0}, hang={"limit": "5m"}))
    assert (status.state, status.failure.rank, status.failure.code) == (State.FAILED, 1, 1)
    assert status.failure.reason == f"rank 1 on worker {2 // processes - 1} raised ValueError: a bug"


def a_script(machine, text: str) -> dict[str, str]:
    """The fields of a job that runs this text."""
    code = machine.directory / "code"
    code.mkdir()
    (code / "wrong.py").write_text(text)
    return {"script": "wrong.py", "code": str(code)}


@pytest.mark.slow  # the rule: tests/rendezvous/test_restarts.py
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nfor x in range(3)\n    pass\n", "raised SyntaxError: expected ':' (wrong.py, line 2)"),
        ("import no_such_package\n", "raised ModuleNotFoundError: No module named 'no_such_package'"),
        (
            "from outlast.training import session\nwith session.open() as run:\n    run.resume(run.ddp())\n",
            "Session.ddp() missing 1 required positional argument: 'model' (wrong.py:3); write net = run.ddp(model)",
        ),
        (
            "from outlast.training import session\nwith session.open() as run:\n    len(run.rank)\n",
            "raised TypeError: object of type 'int' has no len()",
        ),
    ],
)
def test_an_error_of_the_script_on_all_ranks_before_the_first_step_is_not_tried_again(machine, text: str, said: str):
    status = machine.run(machine.job(**a_script(machine, text)))
    assert (status.state, status.exit_code, status.restarts) == (State.FAILED, 78, 0), status.reason
    assert said in status.failure.reason
    assert "a restart would not help" in status.reason


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_end_a_job_with_the_sentence(machine):
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n"
        "    dist.barrier()\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.barrier()\n"
    )
    status = machine.run(machine.job(**a_script(machine, text), hang={"limit": "30s"}))
    assert (status.state, status.exit_code, status.restarts) == (State.FAILED, 78, 0), status.reason
    assert "rank 0 is in dist.barrier() (wrong.py:4), rank 1 is in dist.all_reduce(torch.ones(1)) (wrong.py:5)" in status.reason


@pytest.mark.slow
def test_a_step_that_hangs_three_times_ends_the_job(machine):
    text = (
        "import time\n"
        "from torch import nn\n"
        "from outlast.training import session\n"
        "with session.open() as run:\n"
        "    step = run.resume({'net': nn.Linear(1, 1)})\n"
        "    while step < 3:\n"
        "        step += 1\n"
        "        run.log(step)\n"
        "        run.interrupted()\n"
        "    while run.rank:\n"
        "        time.sleep(1)\n"
        "    run.interrupted()\n"
    )
    status = machine.run(machine.job(**a_script(machine, text)))
    assert (status.state, status.exit_code, status.restarts) == (State.FAILED, 137, 2), status.reason
    assert "hung: no progress for " in status.reason
    assert (
        " s after step 3: rank 0 is in run.interrupted() (wrong.py:12), rank 1 is in time.sleep(1) (wrong.py:11); "
        "it has hung here 3 times in a row"
    ) in status.reason


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_plain_script_that_hangs_three_times_soon_after_its_start_ends_the_job(machine, workers: int):
    text = (
        "import threading, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 0:\n"
        "    threading.Event().wait()\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    job = machine.job(**a_script(machine, text), workers={"replicas": workers})
    began = time.monotonic()
    status = machine.run(job)
    assert (status.state, status.exit_code, status.restarts) == (State.FAILED, 137, 2), status.reason
    said = "rank 0 is in threading.Event().wait() (wrong.py:5)"
    said += {
        1: "",
        2: ", rank 1 is in dist.all_reduce(torch.ones(1)) (wrong.py:6)",
        3: ", ranks 1 and 2 are in dist.all_reduce(torch.ones(1)) (wrong.py:6)",
    }[workers]
    assert f"{said}; it has hung here 3 times in a row" in status.reason
    print(f"three hangs with {workers} workers took {time.monotonic() - began:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["computes", "has a process compute", "says that it is alive", "is a plain script"])
def test_a_long_evaluation_on_one_rank_is_no_hang(machine, how: str):
    """Longer than `hang.limit`, 3 s; the other rank waits for it in a collective."""
    busy = "import time; end = time.monotonic() + 9\nwhile time.monotonic() < end: sum(range(1000))"
    evaluate = {
        "has a process compute": f"subprocess.run([sys.executable, '-c', {busy!r}])",
        "says that it is alive": "exec('with run.alive(): time.sleep(9)')",
    }.get(how, f"exec({busy!r})")
    session_ = how != "is a plain script"
    text = (
        "import subprocess, sys, time, torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from outlast.training import session\n"
        "with session.open() as run:\n"
        "    run.resume({'net': nn.Linear(1, 1)})\n"
        "    run.log(1)\n"
        f"    run.rank or {evaluate}\n"
        "    run.interrupted()\n"
        "    run.log(2)\n"
        if session_
        else f"import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.get_rank() or {evaluate}\ndist.barrier()\n"
    )
    status = machine.run(machine.job(**a_script(machine, text)))
    assert (status.state, status.restarts) == (State.SUCCEEDED, 0), status.reason
    assert not [event for event in machine.backend.events(status.name) if event["kind"] == "hang"]


@pytest.mark.slow
def test_a_process_that_is_aborted_on_its_way_out_failed_by_what_it_said(machine):
    script = a_script(machine, "import atexit, os\natexit.register(os.abort)\nraise ValueError('a bug')\n")
    status = machine.run(machine.job(**script, restarts={"limit": 0}))
    assert (status.state, status.exit_code, status.failure.code) == (State.FAILED, 1, 1)
    assert "raised ValueError: a bug" in status.failure.reason


@pytest.mark.slow
def test_a_script_that_disappears_from_the_copy_of_the_code_is_named(machine):
    name = machine.submit(machine.job(args=("--steps=4000", "--pause=0.02", "--gate")))
    machine.at_step(name, 3)
    machine.backend.steer(name, "interrupt")
    machine.end(name)
    (machine.directory / "state/runs/job/work/exact.py").unlink()
    machine.backend.resume(name)
    status = machine.end(name)
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    assert "script: exact.py is not in" in status.reason


@pytest.mark.slow
def test_a_job_that_runs_for_too_long_is_ended(machine):
    status = machine.run(machine.job(args=("--steps=4000", "--gate"), activeDeadlineSeconds=2))
    assert (status.state, status.exit_code) == (State.FAILED, 1)
    assert "the job has run for activeDeadlineSeconds (2)" in status.reason
