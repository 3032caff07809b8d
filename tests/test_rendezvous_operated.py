"""A member that hears those who decide by an etcd and the operator: what it passes on, and whom it believes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from outlast import contract
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.etcd.operated import TELL, Client, for_operator
from outlast.rendezvous.transports.sockets import Called, Closed
from outlast.rendezvous.world import World

SAID = schema.Said(
    by="a", born="b", tokens=("x", "y"), why="2 workers train", world=World(4, (1, 0), "h:1", "training starts", 1.0)
)
WANTED = {"number": 3, "replicas": 2, "sizes": [1, 2], "expected": [0, 1]}


@dataclasses.dataclass
class Side:
    """Of either: what it has said, and what it was told."""

    id: int = 0
    said: tuple[int, schema.Said] | None = None
    wanted: Any = None
    called: Called | None = None
    world: World | None = None
    closed: Closed | None = None
    gone: bool = False
    told: list[Any] = dataclasses.field(default_factory=list)

    def tell(self, decided: str) -> None:
        self.told.append(json.loads(decided))

    def want(self, wanted: schema.Wanted) -> None:
        self.told.append(wanted)

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None:
        self.told.append("close")

    def report(self, standing: str, **fields: Any) -> None:
        self.told.append((standing, fields))


def a_client() -> tuple[Client, Side, Side]:
    deciders, operator = Side(), Side()
    return Client(deciders, operator), deciders, operator  # type: ignore[arg-type]


def test_each_hears_once_what_is_new_of_the_other() -> None:
    client, deciders, operator = a_client()
    deciders.said, operator.wanted = (7, SAID), WANTED
    for _ in range(3):
        assert client.called is None
    deciders.said = (8, dataclasses.replace(SAID, why="all is well", failures=((1.0, 2, None),)))
    client.wait(0.1)
    said = dataclasses.replace(SAID, tokens=())
    assert operator.told == [{"revision": 7, "said": json.loads(said.dumps())}]
    assert deciders.told == [schema.Wanted(3, 2, (1, 2), (0, 1))]
    deciders.said = (9, dataclasses.replace(SAID, closed=Closed("done", 0)))
    client.close()
    assert [told if told == "close" else told["revision"] for told in operator.told] == [7, 9, "close"]


def test_of_a_large_world_the_first_members_tell() -> None:
    large = dataclasses.replace(SAID, world=World(4, tuple(range(9, 0, -1)), "h:1", "", 1.0))
    assert [id for id in range(1, 10) if for_operator(large, id)] == [10 - TELL, 8, 9]
    assert for_operator(dataclasses.replace(SAID, world=None), 5)


def test_what_a_member_does_is_said_to_both() -> None:
    client, deciders, operator = a_client()
    client.report("waiting", address="h:1")
    assert deciders.told == operator.told == [("waiting", {"address": "h:1"})]


@pytest.mark.parametrize(
    ("code", "gone", "heard"),
    [(contract.Exit.GIVEN_UP, False, True), (contract.Exit.INTERRUPTED, True, True), (contract.Exit.INTERRUPTED, False, False)],
)
def test_the_operator_is_believed_when_the_job_or_our_place_in_it_is_over_and_not_when_it_suspends(
    code: int, gone: bool, heard: bool
) -> None:
    client, deciders, operator = a_client()
    operator.closed, operator.gone = Closed("why", code), gone
    assert client.closed == (operator.closed if heard else None)
    deciders.closed = Closed("done", 0)
    assert client.closed == (operator.closed if heard else deciders.closed)


def test_who_trains_together_is_heard_from_the_deciders_alone() -> None:
    client, deciders, operator = a_client()
    operator.world, operator.called = SAID.world, Called(5, "", False, 0.0)
    assert (client.world, client.called) == (None, None)
    deciders.world, deciders.called = SAID.world, Called(6, "", True, 0.0)
    assert (client.world, client.called) == (deciders.world, deciders.called)


@pytest.mark.parametrize("said", [None, [], {"number": 1}, {**WANTED, "sizes": 3}])
def test_what_makes_no_sense_is_not_passed_on(said: Any) -> None:
    assert schema.Wanted.of(said) is None
