"""Whether a process can go on in the next world, and what it reads there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outlast.job.contract import NEXT, Env
from outlast.job.workerfiles import next_world
from outlast.training import kept_process
from outlast.training.kept_process import Facts

RESUME = "run.resume(net, stream)"


@pytest.mark.parametrize("calls", [("run.ddp()", RESUME), (RESUME,), ("run.ddp()", "run.ddp()", RESUME)])
def test_a_process_whose_collectives_before_its_first_batch_are_known_goes_on(calls: tuple[str, ...]) -> None:
    assert kept_process.refusal(Facts(calls=calls)) == ""


CALLS = "before its first batch, the script calls {}; only run.ddp() and a last run.resume() may come"
OWN = "before its first batch, the script has collectives or process groups of its own"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"agent": False}, "no agent of Outlast has started it"),
        (
            {"foreign": ["net"]},
            "'net' in the state is bound to this world; only models of run.ddp() and Streams can change worlds",
        ),
        ({"streams": 0}, "the state has 0 Streams; it needs the one that `for batch in stream` reads"),
        ({"streams": 2}, "the state has 2 Streams; it needs the one that `for batch in stream` reads"),
        (
            {"hooks": True},
            "a model of run.ddp() has hooks, or options other than broadcast_buffers, bucket_cap_mb, dim, "
            "find_unused_parameters, gradient_as_bucket_view",
        ),
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
