"""The rendezvous by etcd, against a real one, without torch: who meets, who decides, what outages and losses do, what ends."""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ports
from etcds import Server
from outlast.base.errors import EtcdAway, EtcdRefused, OutlastError
from outlast.job import contract, spec
from outlast.rendezvous import coordinator, torchrun, transport
from outlast.rendezvous.etcd import client as rendezvous
from outlast.rendezvous.etcd import gateway, key_schema
from outlast.rendezvous.etcd.election import ElectionConfig
from outlast.rendezvous.who_trains import MemberState
from waits import until


class Nodes:
    """Members of one run as torchrun makes them; their training does what it is told by `obey`."""

    def __init__(self, server: Server) -> None:
        self.server, self.run = server, f"run-{secrets.token_hex(4)}"
        self.endpoint = server.endpoint
        self.all: list[torchrun.Client] = []
        self.away = server.client()

    def start(self, sizes: tuple[int, int] = (1, 2), *, run: str = "", **conf: Any) -> torchrun.Client:
        said = {"last_call_timeout": 1, "growth_timeout": 0, "ttl": 3, **conf}
        client, _ = torchrun.client(self.endpoint, run=run or self.run, sizes=sizes, conf=said)
        self.all.append(client)
        client.report("waiting", address=f"host-{len(self.all)}:1")
        return client

    def obey(self, client: torchrun.Client) -> None:
        """What the handler does."""
        me = client._report
        if (
            me.standing == "waiting"
            and client.world
            and client.world.generation > me.generation
            and client.id in client.world.members
        ):
            client.report("training", generation=client.world.generation, failed=False, failure=None)
        elif me.standing == "training" and client.called and client.called.generation > me.generation:
            client.report("waiting")

    def until(self, condition: Callable[[], object], within_s: float = 20) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.look()
            for client in self.all:
                self.obey(client)
            time.sleep(0.01)

    def training(self, generation: int, *clients: torchrun.Client) -> Callable[[], bool]:
        reports = lambda: [client._report for client in clients or self.all]  # noqa: E731
        return lambda: all((me.standing, me.generation) == ("training", generation) for me in reports())

    def look(self) -> rendezvous.Run | None:
        return next(iter(rendezvous.look(self.away, self.run)), None)

    def decider(self) -> torchrun.Client:
        """The one that has been elected."""
        [client] = [client for client in self.all if client._running._candidate.term]
        return client

    def kill(self, client: torchrun.Client) -> None:
        """Without a word: nothing is revoked."""
        self.all.remove(client)
        silent(client)


def silent(client: torchrun.Client) -> None:
    client.board.membership._lease = None
    client._running._candidate._stand_down()
    client._running._candidate.ended = True
    client.close()


@pytest.fixture
def nodes(shared_etcd: Server) -> Iterator[Nodes]:
    made = Nodes(shared_etcd)
    yield made
    for client in made.all:
        silent(client)
    made.away.close()


def test_a_world_is_formed_and_goes_on_without_its_decider(nodes: Nodes) -> None:
    a, b, c = (nodes.start((1, 3), ttl=2) for _ in range(3))
    nodes.until(nodes.training(1))
    assert sorted((a.id, b.id, c.id)) == [0, 1, 2]
    nodes.until(lambda: bool((run := nodes.look()) and [member.report.standing for member in run.members] == ["training"] * 3))
    run = nodes.look()
    assert run is not None
    assert (run.world, run.nnodes) == (a.world, "1:3")
    first = nodes.decider()
    assert [member.report.id for member in run.members if member.decides] == [first.id]
    nodes.kill(first)
    nodes.until(nodes.training(2))
    assert nodes.all[0].world is not None
    assert nodes.all[0].world.reason == f"lost worker {first.id}; training goes on with 2 of 3"


def test_a_run_that_has_ended_is_nothing_to_a_new_one_of_its_name(nodes: Nodes) -> None:
    old = [nodes.start((2, 2)) for _ in range(2)]
    nodes.until(nodes.training(1))
    for client in old:
        client.report(MemberState.DONE)
    nodes.until(lambda: all(client.closed for client in old))
    assert {client.closed.code for client in old if client.closed} == {contract.Exit.DONE}
    nodes.all.clear()
    new = [nodes.start((2, 2)) for _ in range(2)]  # the keys of the old are still there
    nodes.until(nodes.training(1))
    assert not [client.closed for client in new if client.closed]
    for client in old:
        client.close()


class Relay(socketserver.ThreadingTCPServer):
    """A way to a server, such as a Service; it may fall silent without being closed, for watches or as a whole."""

    daemon_threads = True
    silent: frozenset[socket.socket] = frozenset()
    dead = False

    def __init__(self, to: int) -> None:
        self.to, self.watches = to, set[socket.socket]()
        super().__init__(("127.0.0.1", 0), Way)
        self.endpoint = f"etcd://127.0.0.1:{self.server_address[1]}"

    def hush(self) -> None:
        self.silent |= self.watches


class Way(socketserver.BaseRequestHandler):
    """One connection through it."""

    server: Relay

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.to)) as other:
            ends = {self.request: other, other: self.request}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    if not (data := end.recv(1 << 16)):
                        return
                    if b"/v3/watch" in data:
                        self.server.watches.add(self.request)
                    if not self.server.dead and self.request not in self.server.silent:
                        ends[end].sendall(data)


@pytest.mark.slow
def test_watches_that_have_died_without_a_word_hide_no_loss(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LIST_S", 1.0)
    with Relay(nodes.server.port) as relay:
        threading.Thread(target=relay.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(nodes, "endpoint", relay.endpoint)
        for _ in range(3):
            nodes.start((1, 3), ttl=2)
        nodes.until(nodes.training(1))
        relay.hush()
        nodes.kill(next(client for client in nodes.all if client is not nodes.decider()))
        nodes.until(nodes.training(2))
        nodes.kill(nodes.decider())
        nodes.until(nodes.training(3))
        relay.shutdown()


@pytest.mark.slow
def test_an_endpoint_that_hangs_costs_no_lease_when_there_is_another(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with Relay(nodes.server.port) as relay:
        threading.Thread(target=relay.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(nodes, "endpoint", f"{relay.endpoint},127.0.0.1:{nodes.server.port}")
        for _ in range(3):
            nodes.start((1, 3), ttl=2)
        nodes.until(nodes.training(1))
        relay.dead = True
        until = time.monotonic() + 6  # three times the lease
        while time.monotonic() < until:
            run = nodes.look()
            assert run is not None
            assert len(run.members) == 3
            time.sleep(0.1)
        assert nodes.training(1)()
        nodes.kill(nodes.decider())
        nodes.until(nodes.training(2))
        relay.shutdown()


# What cannot work


def test_an_endpoint_where_nobody_is_is_given_up_after_a_while(capfd) -> None:
    port = ports.free()
    with pytest.raises(
        EtcdAway, match=rf"etcd at 127.0.0.1:{port} cannot be reached: Connection refused \(for connect_timeout, 0.3 s\)"
    ):
        torchrun.client(f"etcd://127.0.0.1:{port}", run="r", sizes=(1, 1), conf={"connect_timeout": "0.3"})
    assert f"etcd at 127.0.0.1:{port} cannot be reached: Connection refused; trying again for 0.3 s" in capfd.readouterr().out


def test_a_wrong_login_is_not_tried_again(own_etcd: Server) -> None:
    own_etcd.require_users()
    with pytest.raises(EtcdRefused, match="refuses user 'u'"):
        torchrun.client(own_etcd.endpoint, run="r", sizes=(1, 1), conf={"user": "u", "password": "p"})


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"ttl": "1"}, "--rdzv-conf ttl=1 must be whole seconds, at least 2, the shortest TTL that etcd grants"),
        ({"ttl": "x"}, "--rdzv-conf ttl=x must be a number of seconds, e.g. ttl=5"),
        ({"id": "node-1"}, "--rdzv-conf id=node-1 must be the index of this node: 0, 1, 2, ..."),
        ({"id": "-1"}, "--rdzv-conf id=-1 must be the index of this node"),
        ({"join_timout": "5"}, "--rdzv-conf join_timout=5 is unknown; expected one of ttl, join_timeout, last_call_timeout"),
    ],
)
def test_options_that_make_no_sense_are_refused(conf: dict[str, str], sentence: str) -> None:
    with pytest.raises(OutlastError) as caught:
        torchrun.options(conf)
    assert str(caught.value).startswith(sentence)


def test_who_says_no_id_hears_with_whom_it_is_one_job(shared_etcd: Server, capfd) -> None:
    for run, told in (("none", True), ("train", False)):
        made, _ = torchrun.client(shared_etcd.endpoint, run=run, sizes=(1, 1), conf={})
        made.close()
        assert ("no --rdzv-id: all nodes without one at this etcd form one job" in capfd.readouterr().out) == told


def test_options_of_other_back_ends_may_stay() -> None:
    assert torchrun.options({"timeout": "900", "is_host": "1", "last_call_timeout": "3"})["last_call_timeout"] == 3


@pytest.mark.parametrize(
    ("seen", "hosts", "main", "own"),
    [
        ("10.0.0.7", ["etcd"], "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", ["localhost"], "10.0.0.7", "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], "10.0.0.7", "127.0.0.1"),
        ("127.0.1.1", ["this-machine"], "10.0.0.7", "10.0.0.7"),
        ("::1", ["this-machine"], "", "::1"),
        ("fe80::1%eth0", ["etcd"], "10.0.0.7", "fe80::1%eth0"),
    ],
)
def test_where_others_reach_us(seen: str, hosts: list[str], main: str, own: str) -> None:
    assert torchrun.own_address(seen, hosts, main) == own


# In pods


@pytest.fixture
def pod(shared_etcd: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The environment of a worker's pod; the endpoint."""
    monkeypatch.setenv(contract.Env.NAMESPACE, "team-a")
    monkeypatch.setenv(contract.Env.JOB, "train")
    monkeypatch.delenv(contract.Env.GENERATION, raising=False)
    return shared_etcd.endpoint


def test_workers_of_pods_have_their_index_and_an_agent_decides(pod: str, tmp_path: Path, monkeypatch) -> None:
    run, ended = f"run-{secrets.token_hex(4)}", []
    job = {"script": "train.py", "workers": {"replicas": 2, "min": 1, "max": 2}, "image": "x:1"}
    file = tmp_path / "job.yaml"
    file.write_text(
        json.dumps({"apiVersion": contract.API_VERSION, "kind": "ElasticJob", "metadata": {"name": "train"}, "spec": job})
    )
    terms = coordinator.Settings.of(spec.load(file).spec)

    class Voice(torchrun.Printer):
        def finished(self, state: Any, reason: str, code: int) -> None:
            ended.append((str(state), reason, code))

    where = gateway.address(pod, environ={})
    name = key_schema.run_name(run, {contract.Env.NAMESPACE: "team-a", contract.Env.JOB: "train"})
    agents = [rendezvous.Running(where, name, ElectionConfig(terms, Voice(), replicas=2)) for _ in range(2)]
    monkeypatch.setenv(contract.Env.GENERATION, "6")  # what their output has seen
    members = [transport.client(pod, transport.Member(run, id, tmp_path, 1)) for id in (1, 0)]
    for agent in agents:
        agent.start()
    for member in members:
        member.report("waiting", address="10.0.0.1:1")
    until(lambda: all(member.world for member in members))
    assert members[0].world is not None
    assert (members[0].world.generation, members[0].world.members) == (7, (0, 1))
    with contextlib.closing(gateway.Etcd(where)) as client:
        [seen] = rendezvous.look(client, f"team-a/train/{run}")
    assert [member.report.id for member in seen.members] == [0, 1]
    for member in members:
        member.report("training", generation=7)
        member.report("done", generation=7)
    until(lambda: len(ended) == 2 and all(member.closed for member in members))
    assert ended == [("Succeeded", "workers 0 and 1 are done", 0)] * 2
    for each in (*members, *agents):
        each.close()
