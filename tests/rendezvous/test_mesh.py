"""The mesh: whom a member watches, what it concludes from silence and refusals, and two ends on the loopback interface."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.rendezvous.membership import Membership
from outlast.rendezvous.mesh import connection, watched_peers
from outlast.rendezvous.mesh import mesh as mesh_module
from outlast.rendezvous.mesh.mesh import Mesh, Undelivered
from outlast.rendezvous.mesh.watched_peers import PeerState
from outlast.rendezvous.messages import Report
from outlast.rendezvous.vocabulary import Desired, State, Timeouts, World
from outlast.rendezvous.who_trains import decide
from waits import until

KEY = b"key of the run"
SOON_S = 30.0
"""How long a test waits for what happens at once, on a machine that is not busy."""


@pytest.fixture
def made() -> Iterator[Callable[..., Mesh]]:
    """Makes members; those that are left at the end are closed."""
    with contextlib.ExitStack() as stack:

        def make(id: int, *, key: bytes = KEY, run: str = "run", host: str = "127.0.0.1") -> Mesh:
            return stack.enter_context(contextlib.closing(Mesh(id, host, key, run=run)))

        yield make


def joined(*meshes: Mesh, generation: int = 1) -> None:
    """All enter one world, and have heard one another."""
    for mesh in meshes:
        mesh.enter(generation, [each.id for each in meshes])
        mesh.learn(generation, {each.id: each.address for each in meshes})
    until(lambda: all(mesh.complete for mesh in meshes))


# Neighbours


@given(st.integers(1, 8))
def test_in_a_small_world_everybody_watches_everybody(size: int) -> None:
    members = range(100, 100 + size)
    assert all(watched_peers.watched(id, members) == tuple(each for each in members if each != id) for id in members)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9999), min_size=9, max_size=100, unique=True))
def test_in_a_large_world_each_member_watches_few_and_is_watched_by_the_same(members: list[int]) -> None:
    watched = {id: set(watched_peers.watched(id, members)) for id in members}
    assert all(4 <= len(peers) <= 6 and id not in peers for id, peers in watched.items())
    assert all(id in watched[peer] for id, peers in watched.items() for peer in peers)
    near = {members[1], members[2], members[-1], members[-2], members[len(members) // 2]}
    assert near <= watched[members[0]]


# Hearing


def test_a_peer_that_does_not_answer_is_unheard_after_its_patience() -> None:
    peer = PeerState()
    peer.doubted(10.0, 1.0)
    peer.doubted(10.9, 1.0)
    peer.passed(10.9)
    assert (peer.unheard, peer.attempt_s) == ("", watched_peers.ATTEMPT_S)
    peer.passed(11.0)
    assert (peer.unheard, peer.gone) == ("has not answered for 1.0 s after its connection broke", False)
    peer.proven()
    assert not peer.unheard


def test_a_peer_is_gone_when_it_refuses_twice_and_one_refusal_proves_nothing() -> None:
    peer = PeerState()
    peer.doubted(10.0, 1.0)
    peer.refused()
    assert (peer.unheard, peer.pause_s) == ("", watched_peers.AGAIN_S)
    peer.refused()
    assert (peer.unheard, peer.gone, peer.pause_s) == ("refuses connections", True, watched_peers.PAUSE_S)


def test_a_stopped_process_stays_heard_because_its_kernel_accepts() -> None:
    peer = PeerState()
    peer.doubted(10.0, 1.0)
    peer.accepted()
    peer.passed(1000.0)
    assert not peer.unheard
    peer.doubted(1000.0, 1.0)  # now its machine goes silent, too: counted from here
    peer.passed(1000.5)
    assert not peer.unheard


def test_to_be_heard_again_takes_a_proof() -> None:
    peer = PeerState()
    peer.doubted(10.0, 1.0)
    peer.passed(12.0)
    peer.accepted()
    assert peer.unheard
    peer.proven()
    assert not peer.unheard


# Members


def test_members_hear_one_another_and_a_killed_one_is_gone_at_once(made: Callable[..., Mesh]) -> None:
    one, two, three = made(1), made(2), made(3)
    joined(one, two, three)
    assert [mesh.unheard for mesh in (one, two, three)] == [(), (), ()]
    changes: list[tuple[int, ...]] = []
    one.changed = lambda: changes.append(one.unheard)
    two.abandon()
    until(lambda: one.unheard == three.unheard == (2,))
    assert one.refused == (2,)
    assert changes == [(2,)]


def test_who_says_goodbye_is_not_missed(made: Callable[..., Mesh]) -> None:
    one, two, three = made(1), made(2), made(3)
    joined(one, two, three)
    changes: list[object] = []
    one.changed = lambda: changes.append(one.unheard)
    two.close()
    until(lambda: "has left" in str(one.send(2, {"kind": "x"}).exception(SOON_S)))
    three.abandon()
    until(lambda: one.unheard == (3,))
    assert changes == [(3,)]


def test_a_connection_that_is_reset_is_made_again_and_nobody_is_accused(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    changes: list[object] = []
    one.changed = lambda: changes.append((one.unheard, one.complete))
    two.handlers["x"] = lambda id, message: None
    two._do(lambda now: [two._drop(caller) for caller in [*two._callers]] and None)  # type: ignore[func-returns-value]
    one.send(2, {"kind": "x"}).result(SOON_S)
    assert changes == []


def test_a_member_that_comes_back_at_another_address_is_heard_in_the_next_world(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    two.abandon()
    until(lambda: one.unheard == (2,))
    again = made(2)
    one.enter(2, (1, 2))
    assert (one.generation, one.unheard, one.complete) == (2, (), False)
    again.enter(2, (1, 2))
    again.learn(2, {1: one.address})  # it calls, and so its address is known
    until(lambda: one.complete)
    assert one.unheard == ()


def test_a_peer_that_was_never_heard_is_not_accused(made: Callable[..., Mesh]) -> None:
    one = made(1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    one.enter(1, (1, 2, 3))
    one.learn(1, {2: address})
    until(lambda: "refuses connections" in str(one.send(2, {"kind": "x"}).exception(SOON_S)))
    assert (one.unheard, one.complete) == ((), False)
    problem = one.send(3, {"kind": "x"}, within_s=0.01).exception(SOON_S)
    assert str(problem) == "worker 3 has not acknowledged a message in time; its address is unknown"


def test_what_a_store_of_another_world_says_late_is_not_believed(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    joined(one, two, generation=2)
    one.learn(1, {2: gone})
    one.send(1, {"kind": "x"}).exception(SOON_S)  # it has been heard by now
    assert one._peers[2].address == two.address
    two.abandon()
    until(lambda: one.unheard == (2,))
    one.learn(2, {2: gone})
    until(lambda: one._peers[2].address == gone)


def test_a_peer_that_nobody_watched_may_be_another_process_in_the_next_world(made: Callable[..., Mesh]) -> None:
    """In a large world it was not watched when its process was replaced: nobody listens where it was when it was heard last."""
    one, two = made(0), made(5)
    joined(one, two)
    one.enter(2, range(20))
    two.abandon()
    until(lambda: one._peers[5]._connection is None)
    changes: list[object] = []
    one.changed = lambda: changes.append(one.unheard)
    one.enter(3, (0, 5))
    assert (one._peers[5].address, one._peers[5].met) == ("", False)
    again = made(5)
    again.enter(3, (0, 5))
    again.learn(3, {0: one.address})
    until(lambda: one.complete)
    assert changes == [()]


def test_who_calls_from_an_older_world_is_not_taken_for_its_successor(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    one.enter(2, (1, 2))
    two.enter(1, (1, 2))
    two.learn(1, {1: one.address})
    until(lambda: two.complete)
    assert (one._peers[2].address, one.complete) == ("", False)
    again = made(2)
    again.enter(2, (1, 2))
    again.learn(2, {1: one.address})
    until(lambda: one.complete)
    assert one._peers[2].address == again.address


@pytest.mark.parametrize(("id", "key", "run"), [(2, b"another", "run"), (2, KEY, "another"), (3, KEY, "run")])
def test_who_has_another_key_or_is_of_another_run_or_somebody_else_is_no_member(
    made: Callable[..., Mesh], capfd: pytest.CaptureFixture[str], id: int, key: bytes, run: str
) -> None:
    one, stranger = made(1), made(id, key=key, run=run)
    one.enter(1, (1, 2))
    one.learn(1, {2: stranger.address})
    problem = one.send(2, {"kind": "x"}).exception(SOON_S)
    assert isinstance(problem, Undelivered)
    assert str(problem) == "worker 2 refuses connections"
    stranger.enter(1, (1, 2, 3))
    stranger.learn(1, {1: one.address})
    assert isinstance(stranger.send(1, {"kind": "x"}).exception(SOON_S), Undelivered)
    assert not one.complete
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("outlast | worker 2 has another key")]
    assert len(said) == (key != KEY), "once"


def test_strangers_do_no_harm(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    _, where = connection.resolved(one.address)
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 5000,
        b'{"nonce": "x"}\n' + b"0" * 64 + b" {}\n",
        b"[" * 100_000 + b"\n",
        b"",
    ):
        with socket.create_connection(where) as stranger:
            stranger.settimeout(SOON_S)
            with contextlib.suppress(OSError):  # it is hung up on, perhaps before it has said all
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    two.handlers["x"] = lambda id, message: None
    one.send(2, {"kind": "x"}).result(SOON_S)
    assert (one.unheard, two.unheard) == ((), ())


def test_a_stranger_too_many_costs_the_first_its_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "STRANGERS", 1)
    with contextlib.closing(Mesh(1, "127.0.0.1", KEY, thread=False)) as mesh:
        _, where = connection.resolved(mesh.address)
        with socket.create_connection(where) as first:
            mesh.turn(SOON_S)
            with socket.create_connection(where):
                first.sendall(b"x")
                mesh.turn(SOON_S)  # has both: that one came and that one spoke
                assert len(mesh._callers) == 1


def test_what_was_said_of_the_last_world_is_not_said_of_the_next(tmp_path: Path) -> None:
    """The mesh's thread may come late; worker 2 is another process then, which has just come."""

    class Told:
        id, said = 0, list[object]()

        def amend(self, **fields: object) -> None:
            self.said.append(fields)

    told = Told()
    member = Membership(told, run_id="run", state=tmp_path, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
    with contextlib.closing(Mesh(0, "127.0.0.1", KEY, thread=False)) as member.mesh:
        mesh, mesh.changed = member.mesh, member._report_peers
        mesh.unheard = mesh.refused = (2,)
        member.world = World(2, (0, 1, 2), "", "", 0.0)
        mesh.enter(2, (0, 1, 2))
        member._report_peers()
        assert told.said == []
        mesh.turn(0.0)
        member._report_peers()
        assert told.said == [{"mesh": False, "unheard": (), "refused": ()}]


# Addresses


def test_addresses_travel_with_reports_and_worlds_and_nobody_waits_for_who_has_none(tmp_path: Path) -> None:
    class Client:
        def __init__(self, id: int) -> None:
            self.id = id

        def amend(self, **fields: object) -> None: ...

        def close(self) -> None: ...

    members = (4, 0, 9, 7)
    joined = {}
    for id in members:
        joined[id] = Membership(Client(id), run_id="run", state=tmp_path, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
        joined[id].key = KEY if id != 7 else b""  # as of an older version
    try:
        for member in joined.values():
            member._listen()
        reports = {id: Report("run", id, address="h:1", **joined[id]._stopped()) for id in members}
        state = State({id: report.member(id, since=0.0, received=0.0) for id, report in reports.items()})
        world = decide(state, Desired(4, (4,), frozenset(members)), Timeouts(), 0.0)
        assert isinstance(world, World)
        for member in joined.values():
            member.world = world
            member._enter_mesh(world)
        meshes = {id: mesh for id, member in joined.items() if (mesh := member.mesh)}
        assert [*meshes] == [4, 0, 9]
        for mesh in meshes.values():
            mesh.handlers["x"] = lambda id, message: None
        for one, other in ((4, 0), (0, 9), (9, 4)):
            meshes[one].send(other, {"kind": "x"}, within_s=SOON_S).result(SOON_S)
        assert [(mesh.complete, mesh.unheard) for mesh in meshes.values()] == [(False, ())] * 3
        with contextlib.closing(Mesh(7, "127.0.0.1", KEY, run="run")) as late:  # it connects, and so all hear each other
            late.enter(world.generation, world.members)
            late.learn(world.generation, {id: mesh.address for id, mesh in meshes.items()})
            until(lambda: all(mesh.complete for mesh in (late, *meshes.values())))
    finally:
        for member in joined.values():
            member.close()


def test_in_a_large_world_a_member_knows_those_that_it_watches_and_rank_0_and_rank_0_all() -> None:
    members = [*range(100, 300)]
    assert watched_peers.known(100, members) == tuple(members[1:])
    assert watched_peers.known(150, members) == (100, 148, 149, 151, 152, 250)
    assert watched_peers.known(102, members[:64]) == (100, 101, *members[3:64])


def test_a_member_that_is_called_before_it_has_an_index_is_heard_once_it_has_one(made: Callable[..., Mesh]) -> None:
    one, late = made(1), made(-1)
    one.enter(1, (1, 2))
    one.learn(1, {2: late.address})
    one.handlers["x"] = late.handlers["x"] = lambda id, message: None
    with pytest.raises(Undelivered, match=r"worker 2 refuses connections"):
        one.send(2, {"kind": "x"}, within_s=SOON_S).result(SOON_S)
    late.id = 2
    late.enter(1, (1, 2))
    late.learn(1, {1: one.address})
    until(lambda: one.complete and late.complete)
    one.send(2, {"kind": "x"}).result(SOON_S)


# Messages


def test_a_message_reaches_any_member_once_and_in_order(made: Callable[..., Mesh]) -> None:
    meshes = [made(id) for id in range(10)]
    joined(*meshes)
    assert 3 not in watched_peers.watched(0, range(10))
    got: list[tuple[int, object]] = []
    meshes[3].handlers["vote"] = lambda id, message: got.append((id, message["n"]))
    sent = [meshes[0].send(3, {"kind": "vote", "n": n}) for n in range(20)]
    for each in sent:
        assert each.result(SOON_S) is None
    assert got == [(0, n) for n in range(20)]
    own = meshes[3].send(3, {"kind": "vote", "n": 20})
    own.result(SOON_S)
    assert got[-1] == (3, 20)


def test_a_message_that_was_on_its_way_when_the_connection_broke_arrives_once(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    got: list[object] = []

    def handle(id: int, message: object) -> None:
        got.append(message)
        if len(got) == 1:  # the answer is lost with the connection
            for caller in [*two._callers]:
                caller.connection.sock.shutdown(socket.SHUT_RDWR)

    two.handlers["x"] = handle
    one.send(2, {"kind": "x"}).result(SOON_S)
    assert got == [{"kind": "x"}]


def test_who_was_left_out_of_a_world_and_comes_back_loses_no_message(made: Callable[..., Mesh]) -> None:
    one, two, three = made(1), made(2), made(3)
    got: list[object] = []
    two.handlers["x"] = lambda id, message: got.append(message["n"])
    for generation, world, messages in ((1, (one, two, three), 5), (2, (one, three), 0), (3, (one, two, three), 8)):
        joined(*world, generation=generation)
        for sent in [one.send(2, {"kind": "x", "n": 10 * generation + n}) for n in range(messages)]:
            sent.result(SOON_S)
    assert got == [*range(10, 15), *range(30, 38)]


def test_a_message_that_nobody_knows_is_not_delivered(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    problem = one.send(2, {"kind": "new"}).exception(SOON_S)
    assert str(problem) == "worker 2 does not support this message; it runs another version"


def test_a_mistake_in_a_handler_does_not_end_the_mesh(made: Callable[..., Mesh], capfd: pytest.CaptureFixture[str]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    two.handlers["x"] = lambda id, message: 1 / 0  # type: ignore[assignment, return-value]
    two.handlers["y"] = lambda id, message: None
    one.send(2, {"kind": "x"}).result(SOON_S)
    one.send(2, {"kind": "y"}).result(SOON_S)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_after_the_end_nothing_is_sent(made: Callable[..., Mesh]) -> None:
    one, two = made(1), made(2)
    joined(one, two)
    one.close()
    one.close()
    with pytest.raises(Undelivered, match="this worker has left the mesh"):
        one.send(2, {"kind": "x"}).result(SOON_S)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_members_may_be_at_ipv6_addresses(made: Callable[..., Mesh]) -> None:
    joined(made(1, host="::1"), made(2, host="::1"))
