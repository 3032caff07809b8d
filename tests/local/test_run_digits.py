"""The main job from end to end: real images, a worker killed on the way, and a model that recognises the held-out part."""

from __future__ import annotations

import json
import time

import pytest

from outlast.data import digits
from outlast.job.status import State


@pytest.mark.slow
def test_digits_are_learnt_although_a_worker_is_killed_on_the_way(machine):
    (machine.directory / "digits").mkdir()
    digits.write(machine.directory / "digits")
    path = machine.job(
        "digits",
        script=None,
        code=None,
        module="outlast.recipes.cifar10",
        args=("--epochs=6", "--no-flip"),
        data=[{"from": "digits", "to": "/data"}],
        checkpoint={"every": "20 steps", "best": 1, "by": "loss"},
        hang={"limit": "10m"},
    )
    begun = time.monotonic()
    name = machine.submit(path)
    machine.wait(name, lambda s: s.step >= 30 and len(s.workers) == 2)
    machine.backend.chaos(name, "kill-worker", worker=1, rng=machine.rng)
    status = machine.end(name, timeout_s=180)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1)
    assert machine.backend.evaluate(name, []) == 0
    evaluation = json.loads((machine.backend.output(name) / "evaluation.json").read_text())
    assert evaluation["accuracy"] >= 97
    assert machine.backend.evaluate(name, ["--checkpoint=best"]) == 0
    evaluation = json.loads((machine.backend.output(name) / "evaluation.json").read_text())
    assert (evaluation["weights"][:5], evaluation["accuracy"] >= 90) == ("step-", True)
    assert time.monotonic() - begun < 200
