"""The first hour with somebody's own script, as typed: a bug, its mend, and a run that goes on, whatever happens to it."""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import worlds
from outlast.job.status import State
from outlast.local.backend import LocalBackend

LOOP = """\
import hashlib, os, sys, time, torch
from torch import nn

steps = int(sys.argv[sys.argv.index("--steps") + 1])
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)


def said(model):
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)

"""

PLAIN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    net.module.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
print("starts at step", step, flush=True)
while step < steps:
    part = slice(step % 8 * 32 + dist.get_rank() * 16, step % 8 * 32 + dist.get_rank() * 16 + 16)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x[part]), y[part]).backward()
    optimizer.step()
    step += 1
    MISTAKE
    time.sleep(0.1 * os.path.exists(os.environ["SLOWLY"]))
    while step == steps - 1 and os.path.exists(os.environ["SLOWLY"]):
        time.sleep(0.1)
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}/{steps}", flush=True)
        torch.save({"net": net.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), "model.pt")
    said(net.module)
dist.destroy_process_group()
"""

SESSION = """
from outlast.training import Stream, session

with session.open(seed=0) as run:
    net = run.ddp(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    stream = Stream((x, y), batch=32, epochs=1000, steps=steps)
    step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
    print("starts at step", step, flush=True)
    for batch in stream:
        optimizer.zero_grad()
        for (inputs, targets), share in batch.split(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            (loss * share).backward()
        optimizer.step()
        step += 1
        MISTAKE
        time.sleep(0.1 * os.path.exists(os.environ["SLOWLY"]))
        run.log(step, loss=loss.detach())
        if run.interrupted() or run.due(step):
            run.save(step)
        while step == steps - 1 and os.path.exists(os.environ["SLOWLY"]):
            time.sleep(0.1)
            if run.interrupted():
                run.save(step)
    run.export(net)
    if run.rank == 0:
        said(net.module)
"""


def alone(script: Path, to: Path) -> None:
    """The script as a rank without an agent, whose lines go to a file."""
    sys.argv = [str(script), "--steps", "40"]
    with to.with_suffix(f".{os.environ['RANK']}").open("w") as sys.stdout:
        runpy.run_path(str(script), run_name="__main__")


def hashes(lines: str) -> list[str]:
    return [line.rpartition("weights ")[2] for line in lines.splitlines() if "weights " in line]


@pytest.mark.parametrize(
    ("body", "everything"),
    [
        pytest.param(PLAIN, True, id="plain", marks=pytest.mark.slow),
        pytest.param(SESSION, True, id="session", marks=pytest.mark.slow),
        pytest.param(SESSION, False, id="session, mended"),
    ],
)
def test_a_script_of_ones_own_fails_is_mended_and_goes_on_through_everything(
    body: str, everything: bool, machine, outlast: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails on one rank, three times at the same step."""
    directory = machine.directory
    monkeypatch.chdir(directory)
    (slowly := directory / "slowly").touch()
    monkeypatch.setenv("SLOWLY", str(slowly))
    (directory / "state").symlink_to(".outlast")
    machine.backend = LocalBackend(directory / ".outlast")
    script, whole = directory / "train.py", LOOP + body
    run = ("run", "--workers", 2, "--set", "checkpoint.every=5 steps")

    def starts() -> list[int]:
        _, out, _ = outlast("logs", "train", "--worker", 0)
        return [int(line.rpartition(" ")[2]) for line in out.splitlines() if "starts at step" in line]

    script.write_text(whole.replace("MISTAKE", "assert (step, os.environ['RANK']) != (13, '1'), 'a bug'"))
    code, _, err = outlast(*run, "train.py", "--steps", 40)
    assert code == 1
    assert "AssertionError: a bug" in err
    assert "with `outlast run --workers 2 --set" in err
    assert "AssertionError: a bug" in outlast("why")[1]
    assert 10 <= starts()[-1] < 13, "from a checkpoint, or a later snapshot"
    failed = machine.backend.status("train")
    assert (failed.state, failed.exit_code) == (State.FAILED, 1)
    assert "has failed 3 times in a row" in failed.reason or body is PLAIN, "whether its members or the launcher count it"
    assert (failed.failure.rank, failed.failure.code) == (1, 1)
    assert failed.failure.reason == "rank 1 on worker 1 raised AssertionError: a bug"
    for text in (failed.failure.traceback, failed.failure.log_tail):
        assert text.splitlines()[-1] == "AssertionError: a bug"
    assert "runpy" not in failed.failure.traceback
    counted = [each.get("repaired") for each in machine.backend.events("train") if each["kind"] == "failure"]
    assert len(counted) == 3 or body is PLAIN, "each once, whoever has started the processes again"
    assert counted[0] == 1 or body is PLAIN, "the members try again by themselves"

    script.write_text(whole.replace("MISTAKE", "pass"))
    if everything:
        code, _, detached = outlast(*run, "--detach", "train.py", "--steps", 40)
        assert code == 0
        machine.wait("train", lambda s: s.state is State.RUNNING and len(s.world) == 2 and (s.step or 0) >= 20)
        assert outlast("chaos", "kill-worker", "--worker", 1)[0] == 0
        machine.wait("train", lambda s: s.restarts >= 1 and s.state is State.RUNNING and len(s.world) == 2)
        assert outlast("suspend")[0] == 0
        machine.wait("train", lambda s: s.state is State.SUSPENDED)
        assert outlast("resume")[0] == 0
        machine.wait("train", lambda s: s.state is State.RUNNING)
        assert outlast("cancel")[0] == 0
        machine.wait("train", lambda s: s.state is State.CANCELLED)
    slowly.unlink()
    code, out, err = outlast(*run, "train.py", "--steps", 40)
    assert code == 0, err
    assert f"the run that {'was cancelled' if everything else 'failed'}" in err
    mended = detached if everything else err
    assert "the run that failed" in mended
    assert "changed since: train.py" in mended
    assert starts()[0] == 0
    assert min(starts()[2:]) >= 10
    assert f"output in {machine.backend.output('train')}" in err
    found = hashes(out)

    status = json.loads(outlast("status", "-o", "json")[1])
    assert (status["state"], status["step"]) == ("Succeeded", 40)
    assert "train  Succeeded" in outlast("report")[1]
    assert list(machine.backend.output("train").rglob("model.pt"))
    assert outlast("init", "--workers", 2, "train.py", "--steps", 40)[0] == 0
    assert outlast("validate", "job.yaml")[0] == 0

    program, output = functools.partial(alone, script, directory / "said"), directory / "undisturbed"
    end = worlds.ended(worlds.started(program, output, 2, SLOWLY=str(slowly)), output)
    assert end.codes == [0, 0], end.errors
    assert hashes((directory / "said.0").read_text()) == found

    assert outlast("forget", "--all-finished", "--output", "--yes")[0] == 0
    assert outlast("list")[1].strip() in ("", "no jobs")
    assert os.listdir(directory / ".outlast" / "runs") == []
