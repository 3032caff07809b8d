"""A worker is killed at any moment of push and restore, its machine sometimes lost with it: the store never lies."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import machines
from outlast.job import contract
from outlast.storage import checkpoints, store
from outlast.storage.checkpoints import both_places
from outlast.storage.sync import growing_files, push_and_pull
from servers import Place

RUN = "run-1"
WRITER = machines.PROGRAMS / "writer.py"


class Worker:
    """A writer and its pusher, as an agent would run them: they die together."""

    def __init__(self, directory: Path, url: str, generation: int) -> None:
        self.output = directory / "out"
        self.output.mkdir(parents=True, exist_ok=True)
        spec = {"script": "x.py", "checkpoint": {"every": "1 step", "keep": 3}, "sync": {"every": "0.3s"}}
        job = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "job"}, "spec": spec}
        (directory / "job.yaml").write_text(json.dumps(job))
        self.env = {
            **os.environ,
            contract.Env.JOB_FILE: str(directory / "job.yaml"),
            contract.Env.OUTPUT: str(self.output),
            contract.Env.STORE: url,
            contract.Env.RUN: RUN,
            contract.Env.OWNER: "",
        }
        self.said = (directory / "writer.out").open("wb")
        argv = [sys.executable, str(WRITER), str(self.output), url, RUN, str(generation)]
        self.writer = subprocess.Popen(argv, stdout=self.said, stderr=self.said)
        push = [sys.executable, "-m", "outlast", "upload"]
        self.pusher = subprocess.Popen(push, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.said)

    def kill(self) -> None:
        for child in (self.writer, self.pusher):
            child.send_signal(signal.SIGKILL)
        for child in (self.writer, self.pusher):
            child.wait()
        self.pusher.stdin.close()
        self.said.close()

    def rest(self) -> None:
        """Push what is left, as the next start would."""
        subprocess.run([sys.executable, "-m", "outlast", "upload", "--rest", "60"], env=self.env, check=True, timeout=90)


def newest(directory: Path) -> int:
    """The newest whole checkpoint in an output directory."""
    found = checkpoints.list_(directory / contract.CHECKPOINTS)
    return max((c.step for c in found if checkpoints.verify(c.path) is None), default=0)


def restored(url: str, directory: Path) -> int:
    """The step that a machine without anything restores."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    both_places.restore(directory, store.open_(url), RUN, lambda _: None)
    return newest(directory)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_any_moment_lose_nothing_that_was_in_the_store(s3: Place, tmp_path: Path):
    rng, kills = random.Random(1), 6
    url, machine, elsewhere = f"{s3.url}/job", tmp_path / "machine", tmp_path / "elsewhere"
    in_store = here = 0
    for generation in range(1, kills + 1):
        worker = Worker(machine, url, generation)
        time.sleep(rng.uniform(0.2, 2.0))
        worker.kill()
        said = (machine / "writer.out").read_text()
        assert "Traceback" not in said, said
        now = newest(worker.output)
        assert now >= here, f"kill {generation}: step {here} was here, now {now} is the newest"
        if began := re.search(r"^restored (\d+)", said, re.MULTILINE):
            assert int(began[1]) >= max(here, in_store), (
                f"kill {generation}: began at {began[1]}; {here} here, {in_store} in store"
            )
        there = restored(url, elsewhere)
        assert there >= in_store, f"the store went back from step {in_store} to {there} (kill {generation})"
        in_store, here = there, now
        if rng.random() < 0.2:
            shutil.rmtree(machine)
            here = 0
    worker = Worker(machine, url, kills + 1)
    while newest(worker.output) < in_store + 5:
        assert worker.writer.poll() is None
        time.sleep(0.05)
    worker.kill()
    worker.rest()
    assert restored(url, elsewhere) == newest(worker.output)
    step = contract.checkpoint_name(newest(worker.output))
    ours, theirs = worker.output / contract.CHECKPOINTS / step, elsewhere / contract.CHECKPOINTS / step
    assert {p.name: p.read_bytes() for p in ours.iterdir()} == {p.name: p.read_bytes() for p in theirs.iterdir()}
    push_and_pull.pull(
        store.open_(url),
        elsewhere,
        tmp_path / "state",
        push_and_pull.Options(skip=lambda path: path.startswith("checkpoints/"), stop=threading.Event()),
    )
    log = f"{contract.LOGS}/worker-0.log"
    assert growing_files.fetch(store.open_(url), log, elsewhere / log)
    assert (elsewhere / log).read_bytes() == (worker.output / log).read_bytes()
    assert (elsewhere / "state.json").read_bytes() == (worker.output / "state.json").read_bytes()
