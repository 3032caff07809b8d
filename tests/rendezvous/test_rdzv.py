"""`outlast rdzv`: what it says of runs, and that it hears of them from a real etcd."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

import etcds
from outlast.cli.cluster import rdzv
from outlast.rendezvous.etcd import gateway, key_schema
from outlast.rendezvous.etcd.client import Present, Run
from outlast.rendezvous.messages import Closed, Report
from outlast.rendezvous.who_trains import Call, World

Outlast = Callable[..., tuple[int, str, str]]

RUN = "team/cifar/cifar-1a2b"
WORLD = World(4, (0, 2), "10.0.0.5:3333", "2 of 2 workers wait")
LEADER = key_schema.Leader("a", "node-b", 2)


def a_report(id: int, standing: str = "training", generation: int = 4, **fields: Any) -> Report:
    return Report(run=RUN, id=id, standing=standing, generation=generation, address=f"10.0.0.{id}:3333", **fields)


def a_run(*members: Report, **fields: Any) -> Run:
    usual: dict[str, Any] = {"coordinator": LEADER, "world": WORLD, "why": "all is well"}
    there = members or (a_report(0), a_report(2))
    return Run(RUN, tuple(Present(each, 4, each.id == 2) for each in there), **{**usual, **fields})


# What is said


def test_a_run_is_a_page() -> None:
    assert rdzv.page(a_run(a_report(0), a_report(3, "waiting", 0))).splitlines() == [
        "run         team/cifar/cifar-1a2b",
        "generation  4",
        "world       members 0, 2 at 10.0.0.5:3333 (2 of 2 workers wait)",
        "decides     member 2 on node-b",
        "why         all is well",
        "",
        "ID  STANDING  GENERATION  ADDRESS        FAILURE  LEASE_S",
        "0   training  4           10.0.0.0:3333  -        4",
        "3   waiting   0           10.0.0.3:3333  -        4",
    ]
    assert rdzv.page(Run("other", (), None)).endswith("  nobody decides yet\n\nno members")


def test_why_is_a_call_or_the_end_before_what_is_waited_for() -> None:
    called = Call(5, "worker 2 was lost", planned=False)
    assert rdzv.why(a_run(called=called, why="waiting for worker 2")) == (
        "generation 5 is called: worker 2 was lost; waiting for worker 2"
    )
    over = a_run(called=called, closed=Closed("training is done", 0))
    assert rdzv.why(over) == "over: training is done (exit code 0)"


# A real etcd


def write(server: etcds.Server, run: str, *members: Report, said: key_schema.Published | None = None) -> None:
    """Be the members of a run, and who decides."""
    of = key_schema.Keys.of(gateway.PREFIX, run)
    puts = [gateway.put(of.member(each.id), key_schema.Record(each, "t").dumps()) for each in members]
    if said:
        puts += [gateway.put(of.published, said.dumps()), gateway.put(of.leader, LEADER.dumps())]
    with contextlib.closing(server.client()) as client:
        client.txn([], puts)


SAID = key_schema.Published(by="a", incarnation="b", world=WORLD, why="all is well")


def test_an_etcd_is_looked_into(shared_etcd: etcds.Server, outlast: Outlast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_RENDEZVOUS", f"{shared_etcd.endpoint}/shown")
    said = f"etcd at 127.0.0.1:{shared_etcd.port} has no run below /shown\n"
    assert outlast("rdzv", "show") == (0, said, "")
    assert outlast("rdzv", "show", "-o", "json")[1] == "[]\n"
    write(shared_etcd, RUN, a_report(0), a_report(2), said=SAID)
    write(shared_etcd, "other", a_report(0, "waiting", 0))
    code, out, _ = outlast("rdzv", "show", "--endpoint", shared_etcd.endpoint)
    assert (code, {"other", RUN} <= set(out.split())) == (0, True)
    code, out, _ = outlast("rdzv", "show", "--endpoint", shared_etcd.endpoint, "--run", "team/cifar", "-o", "json")
    (found,) = json.loads(out)
    assert (found["run"], found["generation"], found["decides"]) == (RUN, 4, {"member": 2, "host": "node-b"})
    assert [member["id"] for member in found["members"]] == [0, 2]


def test_a_run_that_there_is_not_is_said_with_those_there_are(shared_etcd: etcds.Server, outlast: Outlast) -> None:
    write(shared_etcd, "there", a_report(0))
    code, _, err = outlast("rdzv", "show", "--endpoint", shared_etcd.endpoint, "--run", "ther")
    assert code == 2
    assert f"Error: etcd at 127.0.0.1:{shared_etcd.port} has no run ther below /outlast; it has " in err
    assert "there" in err.partition("it has ")[2]


@pytest.mark.parametrize(
    ("endpoint", "code", "said"),
    [
        ("etcd://127.0.0.1:1", 1, "etcd at 127.0.0.1:1 cannot be reached"),
        ("c10d://a:29400", 2, "'c10d://a:29400' is not an etcd endpoint; expected etcd://host:2379"),
        ("", 2, "is not an etcd endpoint"),
    ],
)
def test_an_endpoint_that_is_none_is_said(
    endpoint: str, code: int, said: str, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTLAST_RENDEZVOUS", raising=False)
    found, out, err = outlast("rdzv", "show", "--endpoint", endpoint)
    assert (found, out, said in err) == (code, "", True), err


def test_an_etcd_that_wants_to_know_who_asks_is_told_by_variables(
    own_etcd: etcds.Server, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_etcd.require_users()
    said = []
    for password in ("", "wrong", "r"):
        monkeypatch.setenv("OUTLAST_ETCD_PASSWORD", password)
        monkeypatch.setenv("OUTLAST_ETCD_USER", "root" if password else "")
        said.append(outlast("rdzv", "show", "--endpoint", own_etcd.endpoint))
    (nobody, _, why_nobody), (wrong, _, why_wrong), (right, _, _) = said
    assert (nobody, wrong, right) == (2, 2, 0)
    assert "refuses user '': user name is empty; set a user (OUTLAST_ETCD_USER" in why_nobody
    assert "refuses user 'root': authentication failed" in why_wrong
