"""Snapshots in the memory of agents: ranks write, agents keep and send, ranks read. Real servers, sockets and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.base.errors import NotRestored, OutlastError, StoreError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.storage.snapshots import agent_messages, client, part_format, server
from outlast.storage.snapshots.client import Client
from outlast.storage.snapshots.part_format import Damaged, Item, Part
from outlast.storage.snapshots.rooms import Refused, Room, Rooms
from waits import until

KEY = "secret of the run"
LARGE = 64 << 20


class Workers:
    """Workers of one run on this machine: an agent's server for each, and clients of their ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack = contextlib.ExitStack()
        self.restored: list[int] = []
        self.addresses: dict[int, str] = {}

    def environ(self, worker: int, **others: str) -> dict[str, str]:
        state = self.directory / f"worker-{worker}"
        state.mkdir(exist_ok=True)
        return {Env.RUN: "run", Env.STATE: str(state), Env.RENDEZVOUS_KEY: KEY, **others}

    def agent(self, worker: int, budget: int = LARGE, **others: str) -> server.Server:
        agent = server.Server(self.environ(worker, **others), budget, lambda: self.restored.append(worker))
        agent.rooms.headroom = lambda: 1 << 40  # whatever else fills this machine
        agent.start()
        self.stack.callback(agent.close)
        self.addresses[worker] = agent.address
        return agent

    def rank(self, worker: int) -> Client:
        rank = client.connect(self.environ(worker))
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
    places, total = part_format.laid_out(sizes)
    return [Item(f"w{i}", "uint8", (n,), (0,), (n,), place, n) for i, (n, place) in enumerate(zip(sizes, places))], total  # noqa: B905


INDEX, TOTAL = an_index([1000, 0, part_format.BLOCK + 100, 1])
DATA = random.Random(7).randbytes(TOTAL)


def published(rank: Client, part: Part, *to: str, data: bytes = DATA, complete: tuple[int, int] = (0, 0)) -> str:
    """Write and publish a part, and wait for its last state."""
    room = rank.room(len(data), part.at, complete)
    room.view[:] = data
    rank.publish(room, dataclasses.replace(part, bytes=len(data)), INDEX if data is DATA else [], to=to, complete=complete)
    working = ("", "held") if to else ("",)
    until(lambda: rank.poll()[part.kind, part.step] not in working)
    return rank.poll()[part.kind, part.step]


def kept(workers: Workers) -> tuple[server.Server, Client, Part]:
    """An agent, its rank, and the part of it that the agent holds."""
    agent, rank = workers.agent(0), workers.rank(0)
    assert published(rank, a_part()) == "held"
    (part,) = rank.catalog()
    return agent, rank, part


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
    _, first, _ = kept(workers)
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


def test_a_changed_byte_in_memory_is_found_when_it_is_read(workers: Workers) -> None:
    """Whoever still maps a room writes to it: here, at home and from another worker."""
    agent = workers.agent(0)
    workers.agent(1)
    rank, other = workers.rank(0), workers.rank(1)
    room = rank.room(TOTAL, (1, 1))
    room.view[:] = DATA
    rank.publish(room, a_part(nbytes=TOTAL), INDEX)
    until(lambda: rank.poll()["unique", 1] == "held")
    (part,) = rank.catalog()
    place = INDEX[2].place + part_format.BLOCK + 5
    room.view[place] ^= 1
    for reader, address in ((rank, None), (other, agent.address)):
        with pytest.raises(Damaged, match="w2 has a wrong checksum"):
            content(reader, part, address)
    with rank.open(part) as source:
        source.fetch([(0, memoryview(bytearray(1000)))])
    rank.publish(dataclasses.replace(room, id=7), a_part(2), [])  # not lent to it: the connection goes on
    assert rank.catalog() == [part]
    room.view[:] = DATA
    rank.rooms([TOTAL], (1, 2))
    assert rank.catalog() == [], "something else is being written over it"


def test_a_part_that_changes_while_it_is_sent_is_no_replica(workers: Workers) -> None:
    (agent, _, part), there = kept(workers), workers.agent(1)
    with agent.rooms.opened(part) as room:
        room.file.data[0] ^= 1
    (problem,) = agent.sender.send(part, [there.address], (0, 0))
    assert problem == (
        f"no replica of the unique part of rank 0 of step 1 (generation 1) at {there.address}:"
        " w0 of the unique part of rank 0 of step 1 (generation 1) has arrived with a wrong checksum"
    )
    assert there.rooms.parts() == []


def test_an_agent_takes_nothing_of_another_run_or_of_a_generation_that_is_over(workers: Workers) -> None:
    zombie, there = workers.agent(0), workers.agent(1)
    assert published(workers.rank(1), a_part(5, generation=2)) == "held"
    assert "generation 1 is over: generation 2 trains here now" in published(workers.rank(0), a_part(), there.address)
    assert published(workers.rank(0), a_part(2)) == "held", "alone it may go on; nobody will elect it"
    problem = _refused(lambda: workers.rank(1).room(10, (1, 6)))
    assert problem == "generation 1 is over: generation 2 trains here now"
    assert "this worker trains run run, not another" in published(workers.rank(0), a_part(3, run="another"))
    foreign = workers.agent(2, OUTLAST_RUN="another")
    assert "this worker trains run another, not run" in published(workers.rank(0), a_part(4), foreign.address)
    assert [part.step for part in there.rooms.parts()] == [5]
    assert zombie.rooms.run == "run"


def test_a_replica_that_finds_no_memory_is_given_up_with_a_sentence(workers: Workers) -> None:
    workers.agent(0)
    full, gone = workers.agent(1, budget=TOTAL - 1), workers.agent(2)
    gone.close()
    state = published(workers.rank(0), a_part(), full.address, gone.address)
    assert f"no replica of the unique part of rank 0 of step 1 (generation 1) at {full.address}: 0.0 MB of the" in state
    assert f"at {gone.address}: [Errno 111] Connection refused" in state


def test_no_memory_is_taken_of_the_last_tenth_nor_where_the_kernel_has_none(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    agent, rank = workers.agent(0), workers.rank(0)
    with monkeypatch.context() as kernel:
        kernel.setattr(os, "posix_fallocate", full)
        with pytest.raises(client.NoMemory, match=r"MB for snapshots cannot be allocated: No space left on device"):
            rank.room(TOTAL, (1, 1))
    agent.rooms.headroom = lambda: TOTAL - 1
    with pytest.raises(client.NoMemory, match=r"if a tenth of the memory is to stay free; lower checkpoint\.memory"):
        rank.room(TOTAL, (1, 1))


def test_memory_is_allocated_for_all_at_once_and_nobody_else_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for a large part."""
    rooms = Rooms("run", 2 * LARGE, lambda: LARGE)
    there = rooms.take(1000, (1, 1))
    rooms.hold(there, a_part(1, 1000, digest="1" * 8), [], b"")
    allocating = threading.Barrier(3)

    really = os.posix_fallocate

    def allocate(*what: int) -> None:
        allocating.wait(10)
        allocating.wait(10)
        really(*what)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    taken: list[Room] = []
    takers = [threading.Thread(target=lambda: taken.append(rooms.take(LARGE // 3, (1, 2)))) for _ in range(2)]
    for taker in takers:
        taker.start()
    allocating.wait(10)
    with pytest.raises(Refused, match=r"22.4 MB are needed for snapshots, and 22.4 MB can be taken"):
        rooms.take(LARGE // 3 + 2, (1, 2))
    (part,) = rooms.parts()
    rooms.admit("run", (1, 2), (1, 1))
    rooms.release(rooms.open(part))
    allocating.wait(10)
    for taker in takers:
        taker.join()
    assert len({room.id for room in taken}) == 2
    rooms.close()


def test_a_peer_hears_that_its_replica_is_awaited_while_memory_is_allocated(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up after some seconds of silence."""
    monkeypatch.setattr("outlast.storage.snapshots.rooms._PIECE", TOTAL // 2)
    workers.agent(0)
    there = workers.agent(1)
    connection = agent_messages.connect(there.address, KEY.encode())
    connection.send({"put": a_part(nbytes=TOTAL).json(), "tail": 10, "complete": [0, 0]})
    assert [list(connection.receive()) for _ in range(3)] == [["soon"], ["soon"], ["go"]]
    connection.close()
    assert published(workers.rank(0), a_part(2), there.address) == "replicated"


def test_a_connection_to_a_peer_is_used_again_and_made_anew_when_the_peer_has_hung_up(workers: Workers) -> None:
    agent, there = workers.agent(0), workers.agent(1)
    rank = workers.rank(0)
    for step in (1, 2):
        assert published(rank, a_part(step), there.address, complete=(1, step - 1)) == "replicated"
    (connection,) = agent.sender._idle[there.address]
    connection.sock.shutdown(socket.SHUT_RDWR)
    assert published(rank, a_part(3), there.address, complete=(1, 2)) == "replicated"


def test_an_index_that_came_with_a_part_that_was_refused_is_not_taken_for_that_of_the_next(workers: Workers) -> None:
    """It is not sent again as long as it is the same."""
    workers.agent(0)
    rank = workers.rank(0)
    assert published(rank, a_part(1)) == "held"
    other, total = an_index([TOTAL - 64, 10])
    room = rank.room(TOTAL, (1, 2))
    for step, run in ((2, "another"), (3, "run")):
        rank.publish(room, a_part(step, total, run=run), other)
        until(lambda step=step: rank.poll()["unique", step] != "")  # type: ignore[misc]
    assert [rank.poll()["unique", step].partition(" ")[0] for step in (2, 3)] == ["this", "held"]
    part = max(rank.catalog(), key=lambda part: part.step)
    with rank.open(part) as source:
        assert source.index == other


def test_a_late_replica_of_processes_that_have_ended_neither_comes_in_nor_frees_what_training_goes_on_from(
    workers: Workers,
) -> None:
    """Step 104 was complete, but more workers were lost than there are replicas: training goes on from step 100."""
    rooms = workers.agent(0).rooms
    rooms.admit("run", (3, 100), (0, 0), "first")
    rooms.hold(rooms.take(1000, (3, 100)), a_part(100, 1000, generation=3), [], b"")
    rooms.forget((3, 100))
    late = a_part(108, 10, generation=3, session="first")
    for said in ("", "second"):
        if said:
            rooms.admit("run", (3, 101), (3, 100), said)
        connection = agent_messages.connect(workers.addresses[0], KEY.encode())
        connection.send({"put": late.json(), "tail": 10, "complete": [3, 104]})
        assert connection.receive() == {"problem": "step 108 of generation 3 is of processes that have ended"}
        connection.close()
    with pytest.raises(Refused, match="have ended"):  # a word of a dead rank that was still on its way
        rooms.admit("run", (3, 108), (3, 104), "first")
    rooms.take(1000, (3, 101))
    assert [part.step for part in rooms.parts()] == [100]


def test_a_peer_whose_part_is_not_the_announced_one_is_not_believed(workers: Workers) -> None:
    """It lists step 7 and hands out another: a bug, or a room that was used again meanwhile."""
    agent, rank, part = kept(workers)
    workers.agent(1)
    other = workers.rank(1)
    for lie in (dataclasses.replace(part, step=7), dataclasses.replace(part, digest="00000000")):
        for reader, address in ((rank, None), (other, agent.address)):
            with pytest.raises(Damaged, match="is not in the memory of this worker any more"):
                reader.open(lie, address)
    with agent.rooms.opened(part) as room:
        room.part = dataclasses.replace(part, step=7)
        with pytest.raises(Damaged, match=r"of step 7 .* was announced, and .* of step 1 .* is there"):
            rank.open(room.part)


def test_strangers_at_the_port_get_nothing_and_do_not_keep_members_out(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.storage.snapshots.data_port._STRANGERS", 3)
    agent, _, part = kept(workers)
    workers.agent(1)
    other = workers.rank(1)
    connection = agent_messages.connect(agent.address, b"another key")
    connection.send({"list": True})
    with pytest.raises(OSError, match=r"hung up|reset"):
        connection.receive()
    connection.close()
    host, _, port = agent.address.rpartition(":")
    with contextlib.ExitStack() as silent:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b'{"nonce": "a"}\n{"list": true}\n', *[b""] * 40):
            stranger = silent.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):  # it has hung up already
                stranger.sendall(garbage)
        assert content(other, part, agent.address) == expected(), "the first strangers have to go, not the last who comes"


def test_who_brings_and_who_reads_do_not_keep_each_other_out_and_whoever_is_too_many_waits(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.storage.snapshots.data_port._READERS", 1)
    monkeypatch.setattr("outlast.storage.snapshots.data_port._REPLICAS", 1)
    agent, _, part = kept(workers)
    workers.agent(1)
    other = workers.rank(1)
    first = other.open(part, agent.address)
    found: list[bytes] = []
    second = threading.Thread(target=lambda: found.append(content(workers.rank(1), part, agent.address)))
    second.start()
    bringing = agent_messages.connect(agent.address, KEY.encode())
    bringing.send({"put": a_part(2, replica=True).json(), "tail": 10, "complete": [1, 1]})
    assert bringing.receive() == {"go": True}
    assert not found
    first.close()
    second.join()
    assert found == [expected()]
    bringing.close()


def test_what_a_member_asks_for_is_checked(workers: Workers) -> None:
    agent, rank, part = kept(workers)
    for outside in ([[TOTAL - 1, 2]], [[-1, 1]], [[True, None]], [1]):
        connection = agent_messages.connect(agent.address, KEY.encode())
        connection.send({"open": part.json()})
        found, length = part_format.described(connection.receive())
        assert found == part
        connection.read_into(memoryview(bytearray(length)))
        connection.send({"items": outside})
        with pytest.raises(OSError, match=r"hung up|reset"):
            connection.receive()
        connection.close()
    assert content(rank, part) == expected()


AGENT = """
import os, signal, sys
from outlast.storage.snapshots import replicas, server
replicas._FIRST = 1e6
agent = server.Server(os.environ, 1 << 28, lambda: None)
agent.start()
print(agent.address, flush=True)
sys.stdin.read()
"""


def test_an_agent_killed_in_the_middle_of_a_replica_leaves_none_and_ranks_that_map_its_memory_live_on(workers: Workers) -> None:
    there = workers.agent(1, budget=1 << 28)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], env={**os.environ, **workers.environ(0)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout.readline()
        rank = workers.rank(0)
        data = bytes(4 * part_format.BLOCK)
        index, _ = an_index([len(data)])
        room = rank.room(len(data), (1, 1))
        rank.publish(room, a_part(nbytes=len(data)), index, to=[there.address])
        until(lambda: bool(there.rooms.busy()))
        agent.kill()
        agent.wait()
    until(lambda: not there.rooms.busy())
    assert there.rooms.parts() == []
    room.view[:100] = bytes(100)
    assert "the agent is gone" in rank.poll()["unique", 1]
    assert "the agent gives no memory" in _refused(lambda: rank.room(10, (1, 2), (1, 1)))
    assert "the agent does not answer" in _refused(rank.catalog)


@pytest.mark.parametrize(
    ("problem", "retry"), [(StoreError("no such key"), False), (StoreError("away", retry=True), True), (OSError("full"), True)]
)
def test_a_checkpoint_that_cannot_be_fetched_is_an_error_of_the_rank(workers: Workers, problem: Exception, retry: bool) -> None:
    def fails() -> None:
        raise problem

    workers.agent(0).fetch = fails
    with pytest.raises(StoreError, match=str(problem)) as raised:
        workers.rank(0).restore()
    assert raised.value.retry is retry


def test_what_is_given_up_is_no_part_any_more(workers: Workers) -> None:
    workers.agent(0)
    rank = workers.rank(0)
    for step in (1, 2):
        assert published(rank, a_part(step)) == "held"
    rank.forget((1, 2))
    assert [part.step for part in rank.catalog()] == [2]


def test_what_is_given_up_while_a_dead_rank_s_part_is_finished_is_no_part_and_its_memory_is_free(workers: Workers) -> None:
    """Else memory for two snapshots would not suffice when the same generation starts again, and snapshots would end."""
    rooms = workers.agent(0, budget=2 * TOTAL).rooms
    rooms.admit("run", (1, 3), (1, 3))
    complete = rooms.take(TOTAL, (1, 3))
    rooms.hold(complete, a_part(3, TOTAL), INDEX, b"")
    late = rooms.take(TOTAL, (1, 5))
    rooms.admit("run", (1, 5), (1, 5))  # others have said that it is complete
    rooms.forget((1, 3))
    found: list[object] = []
    writer = threading.Thread(target=lambda: found.append(rooms.take(TOTAL, (1, 4))))
    writer.start()
    with pytest.raises(OutlastError, match="was given up"):
        rooms.hold(late, a_part(5, TOTAL), INDEX, b"")
    rooms.release(late)
    writer.join()
    assert found == [late], "used again as soon as it can be"
    assert [part.step for part in rooms.parts()] == [3], "training went back to it, so it stays"


def test_without_an_agent_there_are_no_snapshots(tmp_path: Path) -> None:
    assert client.connect({Env.STATE: str(tmp_path)}) is None
    assert client.connect({}) is None


def test_an_agent_that_is_gone_is_an_error_since_nobody_has_asked_the_store(workers: Workers) -> None:
    agent = workers.agent(0)
    path = Path(workers.environ(0)[Env.STATE], contract.SNAPSHOTS)
    path.rename(path.with_suffix(".left"))
    agent.close()
    path.with_suffix(".left").rename(path)
    with pytest.raises(NotRestored, match="does not answer"):
        client.connect(workers.environ(0))


def test_a_fork_of_a_rank_does_not_keep_its_rooms(workers: Workers) -> None:
    """A worker of a data loader notices the end of its rank seconds later."""
    agent = workers.agent(0)
    rank = workers.rank(0)
    rank.room(TOTAL, (1, 1))
    held, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(held, 1)
        os._exit(0)
    os.close(held)
    try:
        assert agent.rooms.busy() == [1]
        rank.close()
        until(lambda: not agent.rooms.busy())
    finally:
        os.close(go)
        os.waitpid(pid, 0)


def test_a_rank_unmaps_rooms_that_its_agent_has_given_up(workers: Workers) -> None:
    agent = workers.agent(0)
    rank = workers.rank(0)
    for step, size in enumerate((TOTAL // 2, TOTAL // 2, TOTAL, TOTAL, TOTAL), start=1):
        assert published(rank, a_part(step), data=bytes(size), complete=(1, step - 1)) == "held"
    assert sorted(rank._lent) == agent.rooms.ids() == [3, 4]
