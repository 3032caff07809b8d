"""Random schedules against the rendezvous by etcd: members and deciders die, are cut off, hear late and twice, have clocks of
their own, which step; machines sleep; answers are lost; etcd goes away, comes back, and forgets everything.

What is recorded: every world that any decider has ever written. No two of one generation, generations only grow, and what is
written is written by who was elected. Once nothing more happens, everybody who can trains in one world.
"""

from __future__ import annotations

import dataclasses
import random
from datetime import timedelta
from typing import Any

import pytest

from outlast.base.clock import Clock
from outlast.base.errors import EtcdError, Superseded
from outlast.job.status import State
from outlast.rendezvous import coordinator, restart_budget, world
from outlast.rendezvous.etcd import election, key_schema
from outlast.rendezvous.etcd.gateway import KeyValue
from outlast.rendezvous.etcd.member import EtcdMember, Identity
from outlast.rendezvous.world import MemberState
from simulated_etcd import Link, SimulatedEtcd, Watch

TTL = 5
OF = key_schema.Keys.of("/outlast", "run")
WITHIN_S = 0.5
"""How long a process that can reach etcd takes to try again."""


class Voice:
    def say(self, text: str) -> None: ...
    def event(self, kind: str, **facts: Any) -> None: ...
    def finished(self, state: State, reason: str, code: int) -> None: ...


class Node:
    """A torchrun: a member, a candidate, and what the handler does between them."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        rng = simulation.rng
        self.link, self.rng = Link(simulation.etcd, rng), rng
        self.skew, self.slept = rng.uniform(-1e4, 1e4), 0.0
        self.clock = Clock(lambda: 1e6 + simulation.etcd.now + self.skew, lambda: simulation.etcd.now - self.slept)
        self.number = number
        sizes = simulation.sizes
        nnodes = f"{sizes[0]}:{sizes[1]}"
        token = f"process-{number}"
        who = Identity("run", None, token, TTL, nnodes, sizes[1])
        self.member = EtcdMember(self.link, OF, who, clock=self.clock, choose=rng.choice)
        self.member.report = dataclasses.replace(self.member.report, address=f"host-{number}:1")
        what = coordinator.Settings(
            tuple(range(sizes[0], sizes[1] + 1)), restart_budget.Policy(10**6, timedelta(hours=1)), world.Timeouts(start=5.0)
        )
        config = election.ElectionConfig(
            what,
            Voice(),
            token,
            nnodes=nnodes,
            ttl=TTL,
            clock=self.clock,
            random=rng.random,
            nonce=lambda: f"born-{rng.random()}",
        )
        self.candidate = election.Candidate(self.link, OF, config)
        self.watches = [
            Watch(self.link, lambda: OF.decided, self.member.listed, self.member.happened),
            Watch(self.link, lambda: self.candidate.prefix, self.candidate.listed, self.candidate.happened),
        ]
        self.next = simulation.etcd.now + rng.uniform(0, WITHIN_S)

    def say(self, standing: MemberState, **fields: Any) -> None:
        self.member.report = dataclasses.replace(self.member.report, standing=standing, **fields)

    def act(self) -> None:
        """What its threads do, in some order."""
        deeds = [self.obey, self.publish, self.turn, *(lambda watch=watch: watch.hear(self.rng) for watch in self.watches)]
        self.rng.shuffle(deeds)
        for deed in deeds:
            deed()

    def publish(self) -> None:
        if self.member.synced:
            with_problems(self.member.publish)

    def turn(self) -> None:
        with_problems(self.candidate.turn)

    def obey(self) -> None:
        me, there, called = self.member.report, self.member.world, self.member.called
        if me.standing == MemberState.WAITING and there and there.generation > me.generation and self.member.id in there.members:
            self.say(MemberState.TRAINING, generation=there.generation, failed=False, failure=None)
        elif me.standing == MemberState.TRAINING and called and called.generation > me.generation:
            self.say(MemberState.WAITING)


def with_problems(what: Any) -> None:
    try:
        what()
    except Superseded:
        raise
    except EtcdError:
        pass


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.etcd = SimulatedEtcd()
        self.etcd.wrote = self.record
        self.sizes = self.rng.choice([(1, 3), (2, 3), (2, 5), (1, 1), (3, 3)])
        self.worlds: dict[int, world.World] = {}
        self.nodes: list[Node] = []
        self.started = 0
        self.calm_until = 0.0
        for _ in range(self.sizes[1]):
            self.start()

    def start(self) -> None:
        self.nodes.append(Node(self, self.started))
        self.started += 1

    def record(self, kv: KeyValue) -> None:
        if kv.key != OF.published:
            return
        said = key_schema.Published.loads(kv.value)
        assert said is not None
        leader = key_schema.Leader.loads(self.etcd.kvs[OF.leader].value)
        assert leader is not None
        assert leader.token == said.by, "who was not elected has written"
        if not any(node.member._newest for node in self.nodes) and not said.world:
            self.worlds = {}  # a new run: who knew of the last one is gone, and etcd has forgotten it
        if said.world:
            now = dataclasses.replace(said.world, at=0.0)
            if said.world.generation in self.worlds:
                assert self.worlds[said.world.generation] == now, "two worlds of one generation"
            else:
                newest = max(self.worlds, default=0)
                assert said.world.generation > newest, f"generation {said.world.generation} after {newest}"
                assert self.sizes[0] <= len(set(now.members)) == len(now.members) <= self.sizes[1]
            self.worlds[said.world.generation] = now

    def run(self, seconds: float, *, harm: bool) -> None:
        end = self.etcd.now + seconds
        while self.etcd.now < end:
            node = min(self.nodes, key=lambda node: node.next, default=None)
            due = min(node.next if node else end, end)
            self.etcd.pass_(max(0.0, due - self.etcd.now))
            if node and due == node.next:
                if node.link.loss and self.etcd.now < self.calm_until:
                    node.link.loss = 0.0
                node.act()
                node.next = self.etcd.now + self.rng.uniform(0.01, WITHIN_S)
            if harm and self.rng.random() < 0.03:
                self.harm()

    def harm(self) -> None:
        rng, calm = self.rng, self.etcd.now < self.calm_until
        node = rng.choice(self.nodes) if self.nodes else None
        match rng.choice(
            ["die", "start", "cut", "heal", "away", "back", "lose", "loss", "fail", "freeze", "sleep", "step", "leave"]
        ):
            case "die" if node and not calm:
                self.nodes.remove(node)
            case "start" if len(self.nodes) < self.sizes[1] + 1:
                self.start()
            case "cut" if node and not calm:
                node.link.cut = True
            case "heal":
                for each in self.nodes:
                    each.link.cut = False
            case "away" if not calm:
                self.etcd.up = False
            case "back":
                self.etcd.restart()
            case "lose" if self.known():
                self.etcd.lose_data()
                self.etcd.restart()
                self.calm_until = self.etcd.now + 3  # for those who know it to come back, and say so
            case "loss":
                for each in self.nodes:
                    each.link.loss = rng.choice([0.0, 0.1, 0.3])
            case "fail" if node and node.member.report.standing == MemberState.TRAINING:
                failure = {"rank": 0, "code": 1, "reason": "it failed", "traceback": "", "time": node.clock(), "echo": False}
                node.say(MemberState.WAITING, failed=True, failure={**failure, "step": None, "committed": None})
            case "freeze" if node and not calm:
                node.next += rng.uniform(1, 20)
            case "sleep" if node and not calm:
                for each in rng.sample(self.nodes, rng.randint(1, len(self.nodes))):
                    for_s = rng.uniform(1, 20)
                    each.next += for_s
                    each.slept += for_s
            case "step" if node:
                node.skew += rng.choice([-3600.0, 3600.0, rng.uniform(-500, 500)])
            case "leave" if node and not calm:
                with_problems(node.member.leave)
                with_problems(node.candidate.resign)
                self.nodes.remove(node)

    def known(self) -> bool:
        """Whether what etcd is to forget is known to somebody who reaches it: otherwise nobody could tell it from a new run."""
        newest = max(self.worlds, default=0)
        here = [node for node in self.nodes if not node.link.cut and node.next < self.etcd.now + WITHIN_S]
        return any(node.member._newest and node.member._newest.generation == newest for node in here) if newest else False

    def settle(self) -> None:
        self.etcd.restart()
        while len(self.nodes) < self.sizes[0]:
            self.start()
        for node in self.nodes:
            node.link.cut, node.link.loss = False, 0.0
        self.run(150, harm=False)
        training = [node for node in self.nodes if node.member.report.standing == MemberState.TRAINING]
        newest = self.worlds[max(self.worlds)]
        assert {node.member.report.generation for node in training} == {newest.generation}
        assert sorted(node.member.id for node in training) == sorted(newest.members)
        assert len(training) == min(len(self.nodes), self.sizes[1])
        assert not any(node.member.closed for node in self.nodes)


def play(seed: int) -> None:
    simulation = Simulation(seed)
    try:
        simulation.run(120, harm=True)
        simulation.settle()
    except BaseException as problem:
        problem.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("seed", range(10))
def test_never_two_worlds_of_one_generation(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_never_two_worlds_of_one_generation_in_a_thousand_schedules() -> None:
    for seed in range(1000):
        play(seed)
