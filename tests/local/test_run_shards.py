"""Whole jobs that read their data from a store."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from machines import Machine
from outlast.data import shard_format

SAMPLES = 512


def a_place(directory: Path) -> Path:
    """The samples of exact.py in 16 shards."""
    draw = np.random.default_rng(7)
    x = draw.standard_normal((SAMPLES, 16), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + 2 * (x[:, 1] > 0).astype(np.int64)
    directory.mkdir()
    made = []
    for number in range(16):
        rows = slice(number * 32, (number + 1) * 32)
        made.append(shard_format.write_columns(directory / f"train-{number:05d}.safetensors", {"x": x[rows], "y": y[rows]}))
    shard_format.write(directory, shard_format.Manifest("jsonl", {"train": shard_format.Part(tuple(made))}))
    return directory


def consumed(output: Path, steps: int) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) was trained on, by the last execution of each step."""
    last: dict[int, tuple[int, list[dict[str, object]]]] = {}
    for file in output.glob("consumed-*.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # torn
                record = json.loads(line)
                generation, found = last.get(record["step"], (0, []))
                if record["generation"] >= generation:
                    found = found if record["generation"] == generation else []
                    last[record["step"]] = record["generation"], [*found, record]
    assert sorted(last) == list(range(1, steps + 1))
    return Counter((r["epoch"], i) for _, records in last.values() for r in records for i in r["indices"])  # type: ignore[attr-defined]


def shards(cache: Path) -> list[Path]:
    return sorted(cache.glob("shards/*"))


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 8])
def test_a_run_from_a_store_survives_kills_and_trains_on_each_sample_once(machine: Machine, tmp_path, monkeypatch, kills: int):
    cache, place, steps = tmp_path / "cache", a_place(tmp_path / "data"), 16 * kills + 16
    monkeypatch.setenv("OUTLAST_CACHE", str(cache))
    monkeypatch.setenv("OUTLAST_CACHE_SIZE", str(12 * sum(file.stat().st_size for file in place.glob("*.safetensors")) // 16))
    args, chance = ("--steps", str(steps), "--gate", "--shards", f"file://{place}"), random.Random(kills)
    name = machine.submit(machine.job(args=args, checkpoint={"every": "5 steps"}))
    for kill in range(kills):
        status = machine.at_step(name, 16 * kill + chance.randrange(1, 12))
        for path in chance.sample(shards(cache), 3):
            path.unlink()
        victim = chance.choice(status.workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(victim.ranks).pid, signal.SIGKILL)
    status = machine.end(name, hurry=True)
    assert (status.state, status.step) == ("Succeeded", steps)
    trained = consumed(machine.backend.output(name), steps)
    assert trained == {(epoch, sample): 1 for epoch in range(steps // 16) for sample in range(SAMPLES)}
    local = machine.job("local", args=(*args[:2], "--pause", "0", "--shards", str(place)))
    assert machine.run(local).state == "Succeeded"
    assert machine.final(name) == machine.final("local"), "the bits of an undisturbed run from a disk"
