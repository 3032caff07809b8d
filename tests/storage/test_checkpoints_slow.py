"""Two hundred generations of a world that saves at every step, killed at random moments: nothing committed is torn or lost."""

from __future__ import annotations

import functools
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

import worlds
from outlast.job import contract
from outlast.job.workerfiles import progress_file
from outlast.storage import checkpoints
from worlds import Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = 2
GENERATIONS = 200


def test_killed_at_any_moment_the_newest_committed_checkpoint_is_whole_and_the_one_resumed_from(tmp_path: Path):
    """Every generation must begin with the bits of the newest checkpoint that earlier ones committed.

    Most are killed outright, all ranks or one first; some live on as zombies, saving, while the next generation begins.
    """
    rng = random.Random(20_251_120)
    every = {contract.Env.CHECKPOINT_EVERY: "1 step"}
    plan = Training("conv", "adamw", epochs=10**6, hasty=True, reference=True)
    zombies: list[worlds.ForkServerProcess] = []
    newest, resumed_from, in_a_save = 0, [], 0
    for generation in range(1, GENERATIONS + 1):
        world = worlds.started(functools.partial(worlds.train, plan), tmp_path, RANKS, generation=generation, **every)
        trained = training(tmp_path, generation)
        for process in zombies:
            process.kill()
            process.join()
        theirs = [c for c in checkpoints.list_(tmp_path / "checkpoints") if c.generation < generation]
        assert trained == max((c.step for c in theirs), default=0) >= newest
        resumed_from.append(trained)
        time.sleep(rng.random() * 0.2)
        if rng.random() < 0.25:
            zombies = world
            continue
        rng.shuffle(world)
        for process in world:
            process.kill()
            time.sleep(rng.choice([0, 0, 0.002, 0.02]))
        for process in world:
            process.join()
        found = checkpoints.list_(tmp_path / "checkpoints")
        assert [(c.step, c.problem, checkpoints.verify(c.path)) for c in found] == [(c.step, "", None) for c in found]
        newest, zombies = max((c.step for c in found), default=0), []
        in_a_save += any((tmp_path / "checkpoints").glob(f"*.saving-g{generation}"))
    weights = defaultdict(set)
    resumptions = 0
    for path in tmp_path.glob("consumed-0-*"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # else its writer was killed
                record = json.loads(line)
                weights[record["step"]].add(record["weights"])
                resumptions += record.get("resumed", False)
    assert {step: len(hashes) for step, hashes in weights.items() if len(hashes) > 1} == {}
    assert resumptions >= GENERATIONS - 10
    assert len(set(resumed_from)) > GENERATIONS / 4  # they did advance
    assert in_a_save > GENERATIONS / 10  # some died half way through writing
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert len(kept) < 15  # what the killed left behind was swept


def training(output: Path, generation: int) -> int:
    """Wait until rank 0 of this generation trains; the step it began from."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record = progress_file.read(output / "workers" / "0", 0)
        log = output / contract.LEDGER / "rank-0.jsonl"
        if record and record.phase == "train" and log.exists():
            restored = [json.loads(line) for line in log.read_bytes().splitlines() if b'"restored"' in line]
            ours = [event["step"] for event in restored if event["generation"] == generation]
            if ours:
                return int(ours[-1])
        time.sleep(0.002)
    raise AssertionError(f"generation {generation} does not train: {(output / 'workers' / '0' / 'stderr').read_text()}")
