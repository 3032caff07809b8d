"""Worker 0, which decides where there is neither an operator nor an etcd: what members, and strangers, can make it do."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ports
from outlast.base.typed_json import decode
from outlast.job import contract, sealed_lines, spec
from outlast.job.ledger import Ledger
from outlast.job.status import Ending, State
from outlast.rendezvous import messages, who_trains, worker0
from outlast.rendezvous.member_client import Client
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.who_trains import MemberState
from waits import until

KEY = b"the key of the run"
JOB = spec.parse("""
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec: {module: outlast.recipes.smoke, workers: {replicas: 2, min: 1, max: 2}}
""")


class Stranger:
    """Somebody who reaches the port: it says what it likes, sealed with the key that it has."""

    def __init__(self, endpoint: str, key: bytes = KEY) -> None:
        self.sock = sockets.connect(endpoint)
        self.sock.settimeout(10)
        self.lines = sockets._Lines(self.sock)
        theirs, mine = sealed_lines.greeted(self.lines.next(1000)), sealed_lines.nonce()
        self.seal = sealed_lines.Seal(key, "member", own=mine, peer=theirs)
        self.sock.sendall(sealed_lines.greeting(mine))

    def say(self, said: Any) -> None:
        self.sock.sendall(self.seal.sealed(json.dumps(said).encode()))

    def report(self, id: Any, standing: str = "waiting", **fields: Any) -> None:
        report = {"run": "run", "id": id, "standing": standing, "address": "127.0.0.1:1", **fields}
        self.say({"report": report, "process": fields.pop("process", "p")})

    def hears(self) -> Any:
        return json.loads(self.seal.opened(self.lines.next(1 << 20)))

    def is_hung_up_on(self) -> bool:
        try:
            while True:
                self.lines.next(1 << 20)
        except ConnectionError:
            return True


class Run:
    """A host that decides, and what it has come to."""

    def __init__(self, tmp_path: Path) -> None:
        self.endpoint = f"c10d://localhost:{ports.free()}"
        self.ended: list[tuple[str, str, int]] = []
        self.broken: list[str] = []
        over = lambda state, reason, code: self.ended.append((str(state), reason, code))  # noqa: E731
        ledger = Ledger(tmp_path / "ledger", "decider")
        self.host = worker0.Host(JOB, run="run", key=KEY, generation=0, ledger=ledger, ended=over, broken=self.broken.append)
        self.host.start(self.endpoint)
        self.clients: list[Client] = []
        self.strangers: list[Stranger] = []

    def stranger(self, key: bytes = KEY) -> Stranger:
        self.strangers.append(Stranger(self.endpoint, key))
        return self.strangers[-1]

    def client(self, id: int, key: bytes = KEY) -> Client:
        client = Client(sockets.MemberSocket(self.endpoint, run="run", id=id, key=key))
        self.clients.append(client)
        client.report("waiting", address=f"127.0.0.1:{1000 + id}")
        return client


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for client in made.clients:
        client.close()
    for stranger in made.strangers:
        stranger.sock.close()
    made.host.state = replace(made.host.state, ending=Ending(State.SUCCEEDED, "", 0))
    made.host.close()


def test_strangers_can_neither_join_nor_end_the_run(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    for id in (0, 1):
        stranger = run.stranger(key=b"another")
        stranger.report(id)
        assert stranger.is_hung_up_on()
    assert run.host.state.reports == {}
    members = [run.client(id) for id in (0, 1)]
    until(lambda: all(member.world for member in members))
    for id in (0, 1):
        run.stranger(key=b"another").report(id, "done", generation=1)
    members[0].report("training", generation=1)
    until(lambda: run.host.state.reports[0].standing == "training")
    assert (run.ended, run.broken) == ([], [])
    assert "sent an invalid report: it is not sealed with the key of the run" in capfd.readouterr().err


def test_a_member_believes_nobody_who_does_not_know_the_key(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(sockets.MemberSocket(f"c10d://localhost:{listener.getsockname()[1]}", run="run", id=0, key=KEY))
        client.report("waiting")
        with listener.accept()[0] as connection:
            connection.settimeout(10)
            connection.sendall(sealed_lines.greeting(sealed_lines.nonce()))
            lines = sockets._Lines(connection)
            theirs = sealed_lines.greeted(lines.next(1000))
            false = sealed_lines.Seal(b"another", "decider", own=sealed_lines.nonce(), peer=theirs)
            connection.sendall(false.sealed(json.dumps({"closed": {"reason": "go home", "code": 0}}).encode()))
            with contextlib.suppress(ConnectionError):
                while True:
                    lines.next(1 << 20)
        client.close()
        assert client.closed is None
    assert "sent an invalid message: it is not sealed with the key of the run; trying again" in capfd.readouterr().out


def test_a_sealed_line_is_of_its_place_its_side_and_its_connection() -> None:
    a, b = sealed_lines.nonce(), sealed_lines.nonce()
    member = lambda ours=a: sealed_lines.Seal(KEY, "member", own=ours, peer=b)  # noqa: E731
    decider = lambda: sealed_lines.Seal(KEY, "decider", own=b, peer=a)  # noqa: E731
    line = member().sealed(b"{}")
    hears = decider()
    assert hears.opened(line) == b"{}"
    with pytest.raises(sealed_lines.Forged):
        hears.opened(line)
    another = member(sealed_lines.nonce()).sealed(b"{}")
    for forged in (another, line.replace(b"{}", b"[]"), decider().sealed(b"{}"), b"{}\n", b"\n"):
        with pytest.raises(sealed_lines.Forged):
            decider().opened(forged)


NONSENSE: list[Any] = [{}, [], {"report": None}]
for field, wrong in {"id": -1, "standing": ["waiting"], "generation": 10**400, "since": float("nan"), "run": None}.items():
    NONSENSE.append({"report": {"run": "run", "id": 1, "standing": "waiting", field: wrong}})


def test_nothing_that_a_member_says_ends_the_rendezvous(run: Run) -> None:
    members = [run.client(id) for id in (0, 1)]
    until(lambda: all(member.world for member in members))
    for said in NONSENSE:
        odd = run.stranger()
        odd.say(said)
        assert odd.is_hung_up_on()
    for line in (b"x" * (80 << 10), b'{"report":' * 10_000):
        odd = run.stranger()
        odd.sock.sendall(odd.seal.sealed(line))
        with contextlib.suppress(OSError):
            assert odd.is_hung_up_on()
    assert set(run.host.state.reports) == {0, 1}
    assert (run.ended, run.broken) == ([], [])
    for failure in ({"committed": "far", "code": [], "step": {}}, {"time": "now", "reason": 7}):
        members[1].report("waiting", generation=run.host.state.generation, failed=True, failure=failure)
        generation = run.host.state.generation
        until(lambda generation=generation: run.host.state.world.generation > generation)  # type: ignore[union-attr]
    assert run.host.state.restarts > 0
    assert (run.ended, run.broken) == ([], [])


def test_a_member_speaks_for_itself_alone(run: Run) -> None:
    stranger = run.stranger()
    stranger.report(0)
    stranger.report(1)
    assert stranger.is_hung_up_on()
    assert 1 not in run.host.state.reports


def test_of_two_processes_that_a_new_coordinator_does_not_know_the_one_of_the_newer_world_is_the_member(run: Run) -> None:
    successor, zombie, new = run.stranger(), run.stranger(), run.stranger()
    successor.report(0, "training", generation=5, process="successor")
    until(lambda: 0 in run.host.state.reports)
    zombie.report(0, "training", generation=4, process="zombie")
    closed = zombie.hears()["closed"]
    assert (closed["code"], "in the place of this one" in closed["reason"]) == (contract.Exit.INTERRUPTED, True)
    assert run.host.state.reports[0].generation == 5
    new.report(0, process="new")
    until(lambda: run.host.state.reports[0].generation == 0)
    assert successor.is_hung_up_on(), "who has joined no world may be later"


def test_who_connects_and_says_nothing_costs_little(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_PROVE_S", 0.5)
    monkeypatch.setattr(sockets, "_STRANGERS", 8)
    idle = [socket.create_connection(("127.0.0.1", int(run.endpoint.rpartition(":")[2]))) for _ in range(30)]
    member = run.client(0)
    until(lambda: 0 in run.host.state.reports)
    until(lambda: not run.host._server._strangers)
    assert member.closed is None
    for each in idle:
        each.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while each.recv(1000):
                pass
        each.close()


def test_decisions_that_fail_are_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    decide, fails = who_trains.decide, [True, True]

    def failing(*arguments: Any) -> who_trains.Decision:
        if fails:
            fails.pop()
            raise TypeError("a mistake")
        return decide(*arguments)

    monkeypatch.setattr(who_trains, "decide", failing)
    members = [run.client(id) for id in (0, 1)]
    until(lambda: all(member.world for member in members))
    assert run.broken == []
    assert "the rendezvous could not decide, and tries again" in capfd.readouterr().err


def test_a_report_with_too_much_in_it_is_cut_and_its_failure_counts() -> None:
    board = sockets.MemberSocket("c10d://nowhere:1", run="run", id=0)
    failure = {"code": 1, "reason": "r" * 9000, "traceback": "\0" * 30_000, "log_tail": "x"}
    said = json.loads(board._line(messages.Report("run", 0, MemberState.WAITING, failed=True, failure=failure)))
    assert decode(messages.Report, said["report"]).failure == {"code": 1, "reason": "r" * 1000}


def test_the_key_is_that_of_the_secret_or_of_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("a")
    environ = {contract.Env.JOB_FILE: str(file)}
    by_file = sealed_lines.key(environ)
    assert by_file == sealed_lines.key({**environ, contract.Env.RUN: "a", contract.Env.RENDEZVOUS: "c10d://b:1"})
    assert len(by_file) == 32
    file.write_text("b")
    assert by_file != sealed_lines.key(environ)
    assert sealed_lines.key({**environ, contract.Env.RENDEZVOUS_KEY: "k"}) == b"k"


def test_where_jobs_change_while_they_run_the_key_is_that_of_the_run_instead(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    environ = {contract.Env.JOB_FILE: str(file), contract.Env.RUN: "a-1", contract.Env.RENDEZVOUS: "kubernetes://a"}
    file.write_text("a")
    key = sealed_lines.key(environ)
    file.write_text("b")
    assert sealed_lines.key(environ) == key
    others = [sealed_lines.key({**environ, name: "n"}) for name in (contract.Env.RUN, contract.Env.NAMESPACE)]
    assert len({key, *others}) == 3
    assert sealed_lines.key({}) == b""
