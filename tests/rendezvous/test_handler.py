"""The handler of a member, without torchrun: which endpoints there are, when it gives up, and which process is the cause."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError

import ports
from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.rendezvous import entry_point, who_trains
from outlast.rendezvous.membership import Membership


def test_an_endpoint_of_another_kind_is_refused_with_a_sentence():
    asked = RendezvousParameters("outlast", "nowhere:x", "run", 1, 1)
    with pytest.raises(OutlastError, match=r"^'nowhere:x' is not an etcd endpoint; expected etcd://host:2379"):
        entry_point()(asked)


class Offers:
    """Who offers world after world, of which this member reaches none."""

    id, called, closed, world = 1, None, None, None
    generation = 0

    def report(self, standing: str, **fields: object) -> None:
        if standing == who_trains.MemberState.WAITING:
            self.generation += 1
            self.world = who_trains.World(self.generation, (0, 1), f"127.0.0.1:{ports.free()}", "")

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def test_a_member_that_reaches_no_world_gives_up_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outlast.rendezvous import handler

    monkeypatch.setenv(contract.Env.GENERATION, "0")  # put back what it sets
    offers = Offers()
    member = Membership(offers, run_id="run", state=tmp_path, host="127.0.0.1", processes=1, join_s=0.2)  # type: ignore[arg-type]
    sentence = (
        r"no world within join_timeout \(0.2 s\): worker 1 cannot reach the store of generation \d+ at 127.0.0.1:\d+: .*refused"
    )
    with pytest.raises(RendezvousTimeoutError, match=sentence):
        handler.Handler(member).next_rendezvous()
    assert offers.generation > 1


def test_a_world_gives_the_environment_no_new_name_while_other_threads_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.rendezvous import handler

    member = Membership(Offers(), run_id="run", state=tmp_path, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
    for name in member.numbers:
        monkeypatch.delenv(name, raising=False)
    ours = handler.Handler(member)
    assert {os.environ[name] for name in member.numbers} == {"0"}
    monkeypatch.setattr(
        member, "next_world", lambda _: setattr(member, "world", who_trains.World(7, (1,), "127.0.0.1:5", "", held=3))
    )
    ours.next_rendezvous()
    assert [os.environ[name] for name in member.numbers] == ["7", "0", "3"]
