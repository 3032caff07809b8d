"""Training that goes on from the memory of its agents: the same bits, each sample once, whatever is lost or damaged."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

import worlds
from outlast.job import contract
from outlast.job.contract import Env
from ranks import SELDOM, Agents, killed, restored, resumed, same
from worlds import LAST, Calm, Training

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


@pytest.mark.slow
def test_a_worker_is_lost_with_its_memory_and_a_new_one_gets_it_from_peers(agents: Agents, calm: Calm):
    plan = Training("mlp", "adamw", sharded=True)
    agents.train(killed(plan, 9), 2)
    agents.lose(1)
    agents.start(1)
    expected = agents.newest(2).at
    again = agents.train(plan, 2, 2)
    assert (1, resumed(again)) == expected > (1, 0)
    assert same(again, calm(plan, 2))
    assert restored(again)["source"] == "peer"
    assert agents.store_reads == [0]


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


@pytest.mark.slow
def test_a_damaged_part_is_read_from_its_replica_and_without_one_the_snapshot_before_counts(agents: Agents, calm: Calm):
    plan = Training("mlp", "adamw", sharded=True)
    agents.train(killed(plan, 13), 2)
    newest = agents.newest(2)
    for worker in range(2):
        agents.damage(worker, "unique", newest.at[1])
    again = agents.train(killed(plan, 16), 2, 2)
    assert again.codes == [-9, -9], again.errors
    assert restored(again)["step"] == newest.at[1]
    assert "has a wrong checksum in a snapshot (in the memory of worker 0, at 127.0.0.1:" in "".join(again.errors)
    newest = agents.newest(3)
    for worker in range(2):
        for replica in (False, True):
            agents.damage(worker, "unique", newest.at[1], replica=replica)
    last = agents.train(plan, 2, 3)
    assert resumed(last) < newest.at[1]
    assert same(last, calm(plan, 2))
    assert f"the snapshot of step {newest.at[1]} (generation {newest.at[0]}) cannot be used: rank" in last.errors[0]
    assert agents.store_reads == [0]


@pytest.mark.slow
def test_without_a_valid_snapshot_the_checkpoint_counts_and_a_later_checkpoint_beats_a_snapshot(agents: Agents, calm: Calm):
    plan = Training("mlp", "sgd")
    agents.train(dataclasses.replace(plan, kill_at=13), 2, **{Env.CHECKPOINT_EVERY: "5 steps"})
    for worker in range(2):
        for step in range(LAST):
            agents.damage(worker, "shared", step)
    again = agents.train(plan, 2, 2)
    assert resumed(again) == 10
    assert restored(again)["source"] == "disk"
    assert same(again, calm(plan, 2))
    assert agents.train(plan, 2, 3).kinds("restored")[-1]["step"] == LAST, "the last step is saved after the last snapshot"


def test_a_worker_without_memory_ends_the_snapshots_with_a_sentence_and_not_the_training(agents: Agents):
    agents.start(1, budget=1 << 16)
    end = agents.train(dataclasses.replace(Training("mlp", "sgd"), eager=True), 2)
    assert resumed(end) == 0
    assert "no snapshots are taken for 10 minutes: " in end.errors[1]
    assert "raise checkpoint.memory" in end.errors[1]
    assert "snapshots" not in end.errors[0]
