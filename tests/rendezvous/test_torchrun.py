"""The handler under torch's own torchrun: found by its entry point, given worlds by a decider over the local transport."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outlast.rendezvous import messages, world
from outlast.rendezvous.transports import sockets

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(int(sys.argv[1]) if os.environ["OUTLAST_GENERATION"] == "1" else 3):
    number = torch.ones(1)
    dist.all_reduce(number)
    print("generation", os.environ["OUTLAST_GENERATION"], "world", int(number), "pid", os.getpid(), flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Decider:
    """The least that decides worlds: a server, a state, and `world.decide` after every word."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = world.State({})
        self.wanted = world.Desired(2, (2,), None)
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True)
        self.over = False

    async def run(self) -> None:
        self.server = sockets.Server(run="run", take=self.take)
        await self.server.start(self.path)
        self.ready.set()
        while not self.over:
            decision = world.decide(self.state, self.wanted, world.Timeouts(), time.time())
            self.state = self.state.after(decision)
            for id in self.state.members:
                match decision:
                    case world.Call(generation, reason, planned, at):
                        self.server.send([id], "called", messages.Called(generation, reason, planned, at + 10))
                    case world.World():
                        self.server.send([id], "world", decision)
            await asyncio.sleep(0.02)
        await self.server.stop()

    def take(self, event: messages.Report | messages.Gone) -> None:
        if isinstance(event, messages.Gone):
            self.state = self.state.gone(event.id)
        else:
            self.state = self.state.reported(event.member(event.id, since=time.time(), received=time.time()))


@pytest.fixture
def decider(tmp_path: Path) -> Iterator[Decider]:
    decider = Decider(tmp_path / "decider.sock")
    decider.thread.start()
    assert decider.ready.wait(60)
    yield decider
    decider.over = True
    decider.thread.join(60)


def torchrun(tmp_path: Path, id: int, steps: int) -> subprocess.Popen[str]:
    script, state = tmp_path / "train.py", tmp_path / f"state-{id}"
    script.write_text(SCRIPT)
    state.mkdir()
    options = ["--rdzv-backend=outlast", f"--rdzv-endpoint=unix://{tmp_path}/decider.sock", "--rdzv-id=run", "--nnodes=2"]
    conf = f"--rdzv-conf=id={id},state={state}"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, conf, "--max-restarts=3", str(script), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow  # tests/rendezvous/test_torchrun_etcd.py has a quick one, with etcd
def test_torchrun_finds_the_handler_and_recovers_from_a_killed_process(decider: Decider, tmp_path: Path):
    runs = [torchrun(tmp_path, id, steps=400) for id in (0, 1)]
    lines: list[list[str]] = [[], []]
    for run, said in zip(runs, lines, strict=True):
        assert run.stdout is not None
        said.append(run.stdout.readline())
    psutil.Process(int(lines[1][0].split()[-1])).kill()
    for run, said in zip(runs, lines, strict=True):
        assert run.stdout is not None
        said += run.stdout.read().splitlines()
        run.stdout.close()
        assert run.wait(60) == 0
    for said in lines:
        assert said[0].startswith("generation 1 world 2")
        assert said[-1].startswith("generation 2 world 2")
        assert sum(line.startswith("generation 2") for line in said) == 3
    assert json.loads((tmp_path / "state-1" / "world.json").read_text())["generation"] == 2
