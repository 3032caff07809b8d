"""Workers as pods run them, that meet by an etcd: their agents elect one of them who decides."""

from __future__ import annotations

import json
import time

import pytest

from bare_pods import ARGS, Final, Pods
from etcds import Server
from outlast.job import contract
from outlast.rendezvous.etcd import client as etcd


def by(server: Server) -> dict[str, str]:
    """What the pods' environment says of it."""
    return {contract.Env.RENDEZVOUS: server.endpoint, contract.Env.NAMESPACE: "team-a"}


def decider(server: Server) -> int | None:
    client = server.client()
    found = etcd.look(client)
    client.close()
    return found[0].coordinator.id if found and found[0].coordinator else None


@pytest.mark.slow
def test_pods_go_on_when_the_agent_that_decides_is_lost(pods, own_etcd: Server, undisturbed: Final) -> None:
    two: Pods = pods(args=ARGS)
    two.start(0, 1, **by(own_etcd))
    two.wait(lambda: two.step() >= 25, "step 25")
    victim = decider(own_etcd)
    assert victim in (0, 1)
    two.kill(victim)
    two.start(victim, **by(own_etcd))
    assert two.codes() == {0: 0, 1: 0}
    assert two.final() == undisturbed(ARGS, 2)
    assert (two.record().state, two.record().exit_code) == ("Succeeded", 0)


@pytest.mark.slow
def test_training_does_not_notice_an_etcd_that_is_away_for_a_minute(pods, own_etcd: Server) -> None:
    two: Pods = pods(args=("--steps=4000", "--pause=0.05", "--gate"))
    two.start(0, 1, **by(own_etcd))
    two.wait(lambda: two.step() >= 25, "step 25")
    own_etcd.stop()
    begun, step = time.monotonic(), two.step()
    while time.monotonic() - begun < 60:
        time.sleep(5)
        assert two.step() > step
        step = two.step()
    own_etcd.start()
    two.wait(lambda: (at := decider(own_etcd)) is not None and at in two.running, "an election")
    assert two.codes() == {0: 0, 1: 0}
    worlds = [json.loads(line) for path in (two.output / "ledger").glob("decider-*") for line in path.read_text().splitlines()]
    assert [event["generation"] for event in worlds if event["kind"] == "world"] == [1]
