"""Recovery from memory in worlds of many ranks: threads of this process, with real agents, sockets and memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import resource
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.job.contract import Env
from outlast.storage.snapshots import client, newest_snapshot, part_format, replicas, server
from outlast.storage.snapshots.part_format import Item, Part
from outlast.training.state import checkpoint, newest_on_disks, resuming
from outlast.training.state.resuming import Restored
from outlast.training.state.shared_disks import Disks

pytestmark = pytest.mark.filterwarnings("ignore")  # threads share the filters, which torch changes


class Meeting:
    """Where the ranks of one world exchange values."""

    def __init__(self, ranks: int) -> None:
        self.values: list[Any] = [None] * ranks
        self.all = threading.Barrier(ranks, timeout=120)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.all.wait()
        found = list(self.values)
        self.all.wait()
        return found


class Met(Disks):
    """The disk that all ranks of this process share."""

    meeting: Meeting

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.gather(self.rank, value)

    def broadcast(self, value: Any, group: Any, *, by: int = 0) -> Any:
        return self.gather(value)[by]


State = dict[str, Any]


class Workers:
    """Workers of some ranks each, whose agents hold snapshots of a small model, as DDP makes them, and replicas."""

    def __init__(self, directory: Path, workers: int, local: int) -> None:
        self.directory, self.local, self.ranks = directory, local, workers * local
        self.agents: dict[int, server.Server] = {}
        self.met: collections.Counter[str] = collections.Counter()
        """Connections at the ports, by address."""
        for worker in range(workers):
            self.start(worker)
        self.to = replicas.holders([replicas.Place(agent.address, f"n{n}") for n, agent in self.agents.items()], 1)

    def start(self, worker: int) -> None:
        state = self.directory / str(worker)
        state.mkdir(exist_ok=True)
        environ = {Env.RUN: "r", Env.STATE: str(state), Env.RENDEZVOUS_KEY: "secret"}
        agent = self.agents[worker] = server.Server(environ, 1 << 26, lambda: None)
        agent.rooms.headroom = lambda: 1 << 40  # whatever else fills this machine
        serve = agent._port._serve

        def counted(sock: socket.socket) -> None:
            self.met[agent.address] += 1
            serve(sock)

        agent._port._serve = counted  # type: ignore[method-assign]
        agent.start()

    def lose(self, worker: int, *, replaced: bool) -> None:
        """A worker is gone with its memory; an empty one takes its place, or none."""
        self.agents.pop(worker).close()
        if replaced:
            self.start(worker)
            self.agents = dict(sorted(self.agents.items()))

    def hold(self, step: int, value: float) -> None:
        """All agents hold all parts of a snapshot of a model whose weights have this value."""
        saved = checkpoint.collected(self.state(value), 0)
        tensors = dict(saved.everybody)
        agents = list(self.agents.values())
        for agent in agents:
            agent.rooms.admit("r", (1, step), (1, step - 1))
        rng = checkpoint.quickly_pickled(checkpoint.generators())
        for rank in range(self.ranks):
            worker, local = divmod(rank, self.local)
            of = Part("r", 1, step, self.ranks, rank, worker, local, self.local, "shared", session="s")
            shared = {key: bytes(tensors[key].numpy().data) for key in sorted(checkpoint.dealt(tensors, self.local)[local])}
            self._keep(agents[worker], of, shared, {key: tensors[key] for key in shared})
            firsts = {key: value for key, value in saved.rank0.items() if isinstance(value, bytes)} if rank == 0 else {}
            unique = dataclasses.replace(of, kind="unique")
            self._keep(agents[worker], unique, {f"rng/{rank}": rng, **firsts})
            [peer] = [agent for agent in agents if agent.address in self.to[worker]]
            self._keep(peer, dataclasses.replace(unique, replica=True), {f"rng/{rank}": rng, **firsts})

    @staticmethod
    def _keep(agent: server.Server, part: Part, data: dict[str, bytes], tensors: dict[str, torch.Tensor] | None = None) -> None:
        places, end = part_format.laid_out(map(len, data.values()))
        shapes = {key: tuple(tensor.shape) for key, tensor in (tensors or {}).items()}
        index = [
            Item(key, "float32", shapes[key], (0,) * len(shapes[key]), shapes[key], place, len(data[key]))
            if key in shapes
            else Item(key, "bytes", (), (), (), place, len(data[key]))
            for key, place in zip(data, places, strict=True)
        ]
        room = agent.rooms.take(max(end, 1), part.at, replica=part.replica)
        for item in index:
            room.file.data[item.place : item.place + item.nbytes] = data[item.key]
        part = dataclasses.replace(part, bytes=end)
        tail = part_format.tail(index, part_format.checksums(index, room.file.data))
        agent.rooms.hold(room, part_format.finished(part, index, tail), index, tail)

    def state(self, value: float = 0.0) -> State:
        net = torch.nn.Linear(4, 4)
        for parameter in net.parameters():
            parameter.data.fill_(value)
        return {"net": net, "counter": Counter()}

    def restored(self, make: Callable[[], State] | None = None) -> list[tuple[Restored, State]]:
        """What each rank of the next world goes on from. Raises the first error of one."""
        where = [worker for worker in self.agents for _ in range(self.local)]
        meeting = Meeting(len(where))
        found: dict[int, tuple[Restored, State]] = {}
        errors: list[Exception] = []

        def restore(rank: int, worker: int) -> None:
            disks, state = Met([0] * len(where), rank, None), (make or self.state)()
            disks.meeting = meeting
            try:
                connected = client.connect({Env.STATE: str(self.directory / str(worker)), "RANK": str(rank)})
                with contextlib.ExitStack() as held, contextlib.closing(connected):
                    share = rank % self.local, self.local
                    search = newest_on_disks.Search(self.directory, "r", disks, share, held, lambda *_, **__: None)
                    found[rank] = resuming.restore(state, search, connected, 2), state
            except Exception as error:
                errors.append(error)
                meeting.all.abort()

        threads = [threading.Thread(target=restore, args=each, daemon=True) for each in enumerate(where)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error
        return [each for _, each in sorted(found.items())]

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()


class Counter:
    """A thing of a script, which is pickled."""

    def __init__(self) -> None:
        self.loaded = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, said: dict[str, int]) -> None:
        self.loaded += said["count"]


Made = Callable[[int, int], Workers]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    one, unpickled = threading.Lock(), checkpoint.unpickled

    def in_turn(data: bytes, name: str) -> Any:  # torch's list of what may be read is the process's
        with one:
            return unpickled(data, name)

    monkeypatch.setattr(checkpoint, "unpickled", in_turn)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with contextlib.ExitStack() as stack:

        def make(workers: int, local: int) -> Workers:
            made = Workers(tmp_path, workers, local)
            stack.callback(made.close)
            return made

        yield make
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def went_on(found: Sequence[tuple[Restored, State]], step: int) -> None:
    """All ranks have this step, whole."""
    for restored, state in found:
        assert restored.at == (1, step)
        assert {float(value) for parameter in state["net"].parameters() for value in parameter.flatten()} == {float(step)}
        assert state["counter"].loaded == 1


def test_workers_of_several_ranks_go_on_from_memory_and_read_only_their_own(made: Made) -> None:
    workers = made(5, 4)
    workers.hold(9, 9.0)
    went_on(workers.restored(), 9)
    assert not workers.met, "their own agents have all that they need, and rank 0 tells the rest"


@pytest.mark.parametrize(("count", "local"), [(3, 2), (7, 2)])
def test_the_connections_at_a_port_are_those_of_a_lost_worker_s_ranks_however_many_there_are(
    made: Made, count: int, local: int
) -> None:
    """A rank of the new worker reads weight and bias, of which two ranks of each worker had one, and its own part; all others
    read what is near."""
    workers = made(count, local)
    workers.hold(9, 9.0)
    workers.lose(1, replaced=True)
    went_on(workers.restored(), 9)
    assert sum(workers.met.values()) == local * (2 + 1)


def test_ranks_that_have_moved_read_what_they_alone_had_each_by_one_connection(made: Made) -> None:
    workers = made(7, 2)
    workers.hold(9, 9.0)
    workers.lose(1, replaced=False)
    went_on(workers.restored(), 9)
    assert max(workers.met.values(), default=0) <= 2 * 2, "its own ranks' parts, and those of which it keeps replicas"


class Together:
    """A thing of a script whose ranks meet when they load it."""

    def __init__(self, all_ranks: threading.Barrier) -> None:
        self.all, self.loaded = all_ranks, list[int]()

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, said: dict[str, int]) -> None:
        self.all.wait(timeout=10)
        self.loaded.append(said["count"])


def test_a_snapshot_that_one_rank_cannot_read_is_applied_by_none_and_all_go_on_from_the_one_before(made: Made) -> None:
    """Else some would be in the script's `load_state_dict`, which may be a collective, and some in ours."""
    workers = made(2, 1)
    meet = threading.Barrier(2)
    workers.hold(8, 8.0)
    workers.hold(9, 9.0)
    for agent in workers.agents.values():
        for part in agent.rooms.parts():
            if (part.kind, part.rank, part.step) == ("unique", 1, 9):
                with agent.rooms.opened(part) as room:
                    room.file.data[0] ^= 1
    for restored, state in workers.restored(lambda: {**workers.state(), "counter": Together(meet)}):
        assert restored.at == (1, 8)
        assert state["counter"].loaded == [1], "once, that of step 8"


def test_what_a_newer_version_says_is_understood_as_far_as_it_can_be() -> None:
    part = Part("r", 1, 5, 1, 0, 0, 0, 1, "unique", digest="00000000")
    said = json.loads(zlib.decompress(resuming.packed("w0:1", [part], (1, 4))))
    said["parts"] = [{**said["parts"][0], "colour": "blue"}, {**said["parts"][0], "kind": "quantum"}]
    newer = zlib.compress(json.dumps({**said, "weather": "fine"}).encode())
    assert resuming.merged([newer]) == ([newest_snapshot.Held(part, "w0:1")], (1, 4), "", [])
