"""What only a GPU can show. `make test-gpu` runs these; each needs one GPU unless it says how many."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from outlast.job.status import State
from outlast.training import Stream
from outlast.training.state.background_save import Copies
from outlast.worker.launch import warm_process
from ranks import Agents, Rank, killed, restored, resumed
from worlds import Training, world

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="there is no GPU")]

ARGS = ("--steps=60", "--pause=0.04")
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""https://docs.nvidia.com/cuda/cublas/#results-reproducibility"""


def test_a_copy_of_a_gpus_memory_is_that_of_its_moment() -> None:
    tensor = torch.arange(5_000_000, dtype=torch.float32, device="cuda")
    copies = Copies()
    copy = copies.of({"x": tensor})["x"]
    tensor.zero_()
    assert (copy.device.type, copy.is_pinned()) == ("cpu", True)
    assert torch.equal(copy, torch.arange(5_000_000, dtype=torch.float32))
    assert copies.of({"x": tensor})["x"].data_ptr() == copy.data_ptr(), "memory is kept for the next save"


def test_what_a_stream_reads_ahead_is_pinned() -> None:
    batch = next(iter(Stream((torch.ones(4, 2), torch.arange(4)), batch=2)))
    assert [part.is_pinned() for part in batch.pieces[0][0]] == [True, True]


def test_a_stream_of_data_on_the_gpu_leaves_them_there() -> None:
    batch = next(iter(Stream((torch.arange(4, device="cuda"),), batch=2, shuffle=False)))
    [(data, _)] = batch.split()
    assert (data[0].device.type, data[0].tolist()) == ("cuda", [0, 1])


def test_the_warm_process_leaves_the_gpu_to_its_forks() -> None:
    code = (
        "import importlib, os, sys, torch\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert torch.ones(8, device='cuda').sum().item() == 8\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *warm_process.PRELOADED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path, optimizer: str) -> None:
    undisturbed = world(Training("mlp", optimizer), tmp_path / "undisturbed", 1, **DETERMINISTIC)
    killed = world(Training("mlp", optimizer, kill_at=13, hasty=True), tmp_path / "killed", 1, **DETERMINISTIC)
    assert killed.codes == [-9]
    again = world(Training("mlp", optimizer), tmp_path / "killed", 1, generation=2, **DETERMINISTIC)
    assert (undisturbed.codes, again.codes) == ([0], [0]), (undisturbed.errors, again.errors)
    assert 0 < again.results[0]["resumed"] <= 12
    assert again.results[0]["hash"] == undisturbed.results[0]["hash"]


def test_a_snapshot_copied_beside_the_next_steps_is_of_its_own_and_its_memory_is_pinned(tmp_path) -> None:
    def fresh(fill: float) -> dict[str, Any]:
        net = torch.nn.Linear(2000, 2000, device="cuda")
        net.register_buffer("mean", torch.full((1_000_000,), fill, device="cuda"))
        with torch.no_grad():
            net.weight.fill_(fill)
            net.bias.fill_(fill)
        return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=1.0)}

    def step() -> None:
        net.mean.add_(1)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, -1)
        state["optimizer"].step()

    with contextlib.ExitStack() as stack:
        rank = Rank(tmp_path)
        stack.callback(rank.server.close)
        stack.callback(rank.client.close)
        state = fresh(0.0)
        net: Any = state["model"]
        rank.begin(state)
        stack.callback(rank.capture.close)
        for number in range(1, 6):
            step()
            rank.take(meanwhile=lambda: [step() for _ in range(3)])
            assert all(memory.is_pinned() and pinned for memory, pinned in rank.capture._rooms.values())
            found = rank.loaded(fresh(-1.0))["model"].state_dict()
            assert torch.cat([each.flatten() for each in found.values()]).unique().tolist() == [4 * number - 3]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_killed_it_goes_on_from_memory_and_ends_with_the_same_bits(tmp_path, optimizer: str) -> None:
    plan = Training("mlp", optimizer)
    with contextlib.ExitStack() as stack:
        ends = []
        for name, plans in (("undisturbed", [plan]), ("killed", [killed(plan, 13), plan])):
            agents = Agents(tmp_path / name)
            ends += [agents.train(each, 1, generation, **DETERMINISTIC) for generation, each in enumerate(plans, start=1)]
            for agent in agents.servers.values():
                stack.callback(agent.close)
    undisturbed, first, again = ends
    assert (undisturbed.codes, first.codes) == ([0], [-9]), (undisturbed.errors, first.errors)
    assert 0 < resumed(again) <= 13
    assert restored(again)["source"] == "memory"
    assert again.results[0]["hash"] == undisturbed.results[0]["hash"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs"))])
def test_a_job_whose_process_is_killed_ends_as_if_nothing_had_happened(machine, processes: int) -> None:
    common = {
        "args": ARGS,
        "workers": {"replicas": 1},
        "processesPerWorker": processes,
        "env": DETERMINISTIC,
        "hang": {"limit": "60s"},  # the first step starts CUDA
    }
    assert machine.run(machine.job("undisturbed", **common), timeout_s=180).state is State.SUCCEEDED
    name = machine.submit(machine.job("killed", **common))
    machine.wait(name, lambda status: status.step >= 25, timeout_s=120)
    machine.backend.chaos(name, "kill-process", worker=0, rng=machine.rng)
    status = machine.end(name, timeout_s=180)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1)
    assert machine.final(name) == machine.final("undisturbed")
