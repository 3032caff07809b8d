"""The agents of a job in `simulated` that asks for an etcd: each is a member, and one of them is elected and decides."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from outlast import spec
from outlast.errors import EtcdError
from outlast.rendezvous import coordinator
from outlast.rendezvous.etcd import election, schema
from outlast.rendezvous.etcd.member import Identity, Membership
from outlast.rendezvous.etcd.operated import for_operator
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.world import MemberState, World
from outlast.status import State
from simulated_etcd import Link, SimulatedEtcd

OF = schema.Keys.of("/outlast", "team/train/run")
TTL = 5


class Voice:
    def say(self, text: str) -> None: ...
    def event(self, kind: str, **facts: Any) -> None: ...
    def finished(self, state: State, reason: str, code: int) -> None: ...


class Node:
    """What the agent of one pod has of the etcd."""

    def __init__(self, etcd: SimulatedEtcd, index: int, uid: str, job: Mapping[str, Any], floor: int) -> None:
        fields = spec.Spec.model_validate(job)
        rng, clock = random.Random(uid), lambda: etcd.now
        link = Link(etcd, rng)
        self.member = Membership(link, OF, Identity("run", index, uid, TTL, generation=floor), clock=clock)
        config = election.ElectionConfig(
            coordinator.Settings.of(fields), Voice(), uid, replicas=fields.workers.replicas, operated=True, ttl=TTL,
            clock=clock, random=rng.random, nonce=lambda: f"born-{rng.random()}",
        )  # fmt: skip
        self.candidate = election.Candidate(link, OF, config, id=lambda: index)
        self._store = link
        self._told = ""

    def act(
        self,
        standing: str,
        generation: int,
        failure: Mapping[str, Any] | None,
        wanted: object,
        unheard: Sequence[int] = (),
        refused: Sequence[int] = (),
    ) -> None:
        """Say how it is, and do what is to be done."""
        report = sockets.Report("run", self.member.id, standing, generation, 0.0, f"10.0.0.{self.member.id}:1")
        peers = {"unheard": tuple(unheard), "refused": tuple(refused)}
        self.member.report = dataclasses.replace(report, failed=failure is not None, failure=failure, **peers)
        self.member.wanted = schema.Wanted.of(wanted)
        with contextlib.suppress(EtcdError):
            self.member.listed(self._store.range(OF.decided, prefix=True))
            self.member.tell()
            for _ in range(3):
                self.candidate.listed(self._store.range(self.candidate.prefix, prefix=True))
                self.candidate.turn()

    def listen(self) -> None:
        """Hear what all have said and done."""
        with contextlib.suppress(EtcdError):
            self.member.listed(self._store.range(OF.decided, prefix=True))

    def leave(self) -> None:
        """It ends, and says so."""
        self.member.report = dataclasses.replace(self.member.report, standing=MemberState.LEAVING)
        with contextlib.suppress(EtcdError):
            self.member.leave()
            self.candidate.last()

    @property
    def decided(self) -> str:
        """As on a Lease; empty before it has heard anything."""
        said = self.member.said
        if said and (news := for_operator(said[1], self.member.id)):
            self._told = json.dumps({"revision": said[0], "said": dataclasses.asdict(news)})
        return self._told


class Deciders:
    """All of them, and their etcd."""

    def __init__(self, now: float) -> None:
        self.etcd = SimulatedEtcd()
        self.etcd.now = now
        self.nodes: dict[str, Node] = {}
        self.jumped = 0.0
        """By how much the clocks of the cluster have been set; that of the etcd goes on."""

    def pass_(self, now: float) -> None:
        self.etcd.pass_(now - self.jumped - self.etcd.now)

    @property
    def world(self) -> World | None:
        """The newest that there has been."""
        there = [node.member.world for node in self.nodes.values() if node.member.world]
        return max(there, key=lambda world: world.generation, default=None)

    def told(self, uid: str) -> dict[str, Any]:
        """What an agent has heard, as the operator would say it."""
        member = self.nodes[uid].member
        said = {"world": member.world, "called": member.called, "closed": member.closed}
        return {key: dataclasses.asdict(each) if each else None for key, each in said.items()}
