"""Training that goes on from the memory of its agents: the same bits, each sample once, whatever is lost or damaged."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

import worlds
from outlast.job import contract
from ranks import SELDOM, Agents, killed, restored, resumed, same
from worlds import Calm, Training


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param(Training("conv", "adamw", epochs=2), 2, id="DDP", marks=pytest.mark.slow),
        pytest.param(Training("mlp", "adamw", epochs=2, sharded=True), 2, id="FSDP2"),
    ],
)
def test_killed_it_goes_on_from_memory_with_the_same_bits_and_without_a_store(
    agents: Agents, calm: Calm, plan: Training, ranks: int
):
    end = agents.train(killed(plan, 8), ranks)
    assert end.codes == [-9] * ranks, end.errors
    assert agents.store_reads == [0], "at the first start: nobody has anything"
    expected = agents.newest(2).at
    again = agents.train(plan, ranks, 2)
    assert (1, resumed(again)) == expected
    assert same(again, calm(plan, ranks))
    assert agents.store_reads == [0]
    assert restored(again)["source"] in ("memory", "peer")


def test_what_a_worker_without_an_agent_cannot_read_stays_in_the_memory_of_the_others(agents: Agents):
    plan = Training("mlp", "adamw")
    agents.train(killed(plan, 9), 2)
    agents.lose(1)  # and the agent that takes its place opens no socket
    kept = agents.newest(2).at
    assert kept > (1, 0)
    again = worlds.world(killed(plan, 3), agents.output, 2, generation=2, **SELDOM)
    assert agents.newest(3).at == kept
    assert any("what is in memory is not used, and kept" in error for error in again.errors)


@pytest.mark.slow
def test_resized_from_3_to_2_to_3_each_sample_comes_once(agents: Agents):
    """Workers are lost, with their memory, and come back empty."""
    plan = Training("mlp", "adamw", sharded=True)
    agents.train(killed(plan, 6), 3)
    agents.lose(2)
    first = agents.newest(2).at
    agents.train(dataclasses.replace(plan, leave_at=12), 2, 2)
    for notice in agents.output.glob(f"workers/*/{contract.NOTICE}"):
        notice.unlink()
    last = agents.train(plan, 3, 3)
    assert resumed(last) == 12
    seen = Counter(
        (record["epoch"], index)
        for path in agents.output.glob("consumed-*")
        for record in map(json.loads, path.read_text().splitlines())
        if record["generation"] > 1 or record["step"] <= first[1]
        for index in record["indices"]
    )
    assert set(seen.values()) == {1}
    assert len(seen) == 4 * 150


def test_a_worker_without_memory_ends_the_snapshots_with_a_sentence_and_not_the_training(agents: Agents):
    agents.start(1, budget=1 << 16)
    end = agents.train(dataclasses.replace(Training("mlp", "sgd"), eager=True), 2)
    assert resumed(end) == 0
    assert "no snapshots are taken for 10 minutes: " in end.errors[1]
    assert "raise checkpoint.memory" in end.errors[1]
    assert "snapshots" not in end.errors[0]
