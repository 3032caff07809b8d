"""Snapshots in the memory of agents: ranks write, agents keep and send, ranks read. Real servers, sockets and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.contract import Env
from outlast.errors import OutlastError
from outlast.snapshots import client, parts, server
from outlast.snapshots.client import Client
from outlast.snapshots.parts import Item, Part

KEY = "secret of the run"
LARGE = 64 << 20


class Workers:
    """Workers of one run on this machine: an agent's server for each, and clients of their ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack = contextlib.ExitStack()
        self.restored: list[int] = []

    def environ(self, worker: int, **others: str) -> dict[str, str]:
        state = self.directory / f"worker-{worker}"
        state.mkdir(exist_ok=True)
        return {Env.RUN: "run", Env.STATE: str(state), Env.RENDEZVOUS_KEY: KEY, **others}

    def agent(self, worker: int, budget: int = LARGE, **others: str) -> server.Server:
        agent = server.Server(self.environ(worker, **others), budget, lambda: self.restored.append(worker))
        agent.start()
        self.stack.callback(agent.close)
        return agent

    def rank(self, worker: int) -> Client:
        rank = client.connect(self.environ(worker))
        assert rank is not None
        self.stack.callback(rank.close)
        return rank


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path)
    with workers.stack:
        yield workers


def a_part(step: int = 1, nbytes: int = 0, **fields: object) -> Part:
    base = Part("run", 1, step, world=2, rank=0, worker=0, local_rank=0, local_ranks=1, kind="unique", bytes=nbytes)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def an_index(sizes: list[int]) -> tuple[list[Item], int]:
    places, total = parts.laid_out(sizes)
    return [Item(f"w{i}", "uint8", (n,), (0,), (n,), place, n) for i, (n, place) in enumerate(zip(sizes, places))], total  # noqa: B905


INDEX, TOTAL = an_index([1000, 0, parts.BLOCK + 100, 1])
DATA = random.Random(7).randbytes(TOTAL)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def published(rank: Client, part: Part, *to: str, data: bytes = DATA, complete: tuple[int, int] = (0, 0)) -> str:
    """Write and publish a part, and wait for its last state."""
    room = rank.room(len(data), part.at, complete)
    room.view[:] = data
    rank.publish(room, dataclasses.replace(part, bytes=len(data)), INDEX if data is DATA else [], to=to, complete=complete)
    working = ("", "held") if to else ("",)
    until(lambda: rank.poll()[part.kind, part.step] not in working)
    return rank.poll()[part.kind, part.step]


def content(rank: Client, part: Part, address: str | None = None) -> bytes:
    """What is read of a part; zeros where no item is."""
    found = bytearray(part.bytes)
    with rank.open(part, address) as source:
        memory = memoryview(found)
        source.fetch([(i, memory[item.place : item.place + item.nbytes]) for i, item in enumerate(source.index)])
    return bytes(found)


def expected() -> bytes:
    found = bytearray(TOTAL)
    for item in INDEX:
        found[item.place : item.place + item.nbytes] = DATA[item.place : item.place + item.nbytes]
    return bytes(found)


def test_a_part_outlives_the_rank_that_wrote_it(workers: Workers) -> None:
    workers.agent(0)
    first = workers.rank(0)
    assert published(first, a_part()) == "held"
    first.close()
    second = workers.rank(0)
    (part,) = second.catalog()
    assert dataclasses.replace(part, digest="") == a_part(nbytes=TOTAL, items=4)
    assert content(second, part) == expected()


def test_a_replica_is_read_from_another_worker_once_the_first_is_gone(workers: Workers) -> None:
    gone, there = workers.agent(0), workers.agent(1)
    assert published(workers.rank(0), a_part(), there.address) == "replicated"
    gone.close()
    rank = workers.rank(1)
    (part,) = rank.catalog()
    assert (part.replica, part.worker) == (True, 0)
    workers.agent(2)
    assert content(workers.rank(2), part, there.address) == content(rank, part) == expected()


def test_a_rank_killed_while_it_writes_leaves_no_part_and_its_room_is_used_again(workers: Workers) -> None:
    workers.agent(0, budget=2 * TOTAL)
    rank = workers.rank(0)
    assert published(rank, a_part(1)) == "held"
    (before,) = rank.catalog()
    torn = workers.rank(0)
    torn.room(TOTAL, (1, 2), (1, 1)).view[:100] = bytes(100)
    with pytest.raises(client.NoMemory, match=r"more are needed; raise checkpoint\.memory"):
        rank.room(TOTAL, (1, 2), (1, 1))
    torn.close()
    until(lambda: not _refused(lambda: rank.room(TOTAL, (1, 2), (1, 1))))
    assert rank.catalog() == [before]
    assert content(rank, before) == expected()


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except OutlastError as problem:
        return str(problem)
    return ""
