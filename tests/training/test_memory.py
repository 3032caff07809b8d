"""Training that goes on from the memory of its agents: the same bits, each sample once, whatever is lost or damaged."""

from __future__ import annotations

import dataclasses

import pytest

import worlds
from ranks import SELDOM, Agents, killed, restored, resumed, same
from worlds import Calm, Training

PLANS = [
    pytest.param(Training("conv", "adamw", epochs=2), 2, id="DDP", marks=pytest.mark.slow),
    pytest.param(Training("mlp", "adamw", epochs=2, sharded=True), 2, id="FSDP2"),
    pytest.param(Training("conv", "sgd", epochs=2), 3, id="DDP of 3", marks=pytest.mark.slow),
    pytest.param(Training("mlp", "sgd", epochs=2, sharded=True), 3, id="FSDP2 of 3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
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


def test_a_worker_without_memory_ends_the_snapshots_with_a_sentence_and_not_the_training(agents: Agents):
    agents.start(1, budget=1 << 16)
    end = agents.train(dataclasses.replace(Training("mlp", "sgd"), eager=True), 2)
    assert resumed(end) == 0
    assert "no snapshots are taken for 10 minutes: " in end.errors[1]
    assert "raise checkpoint.memory" in end.errors[1]
    assert "snapshots" not in end.errors[0]
