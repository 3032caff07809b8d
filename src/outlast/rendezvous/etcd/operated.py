"""A member's connections to the elected coordinator, by etcd, and to the operator that looks after its pod: an ElasticJob with
`rendezvous.backend: etcd` has both (docs/decisions/0014).

    member -> etcd       its report, and what the operator wants          `etcd`
    member -> operator   its report, its progress, and what was decided   `kubernetes`

Who trains together is heard from the etcd alone. The operator is heard when the job is over for another reason, and when this pod
is no longer worker i of it. That a suspended job is over is not: who suspends takes the pods away, and they save before they go.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

from outlast import contract
from outlast.rendezvous.etcd import client as etcd
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.transports import kubernetes
from outlast.rendezvous.transports.sockets import Called, Closed
from outlast.rendezvous.world import World

TELL = 3
"""So many members of a world tell the operator of it: who hears of a thousand need not hear it a thousand times."""


def for_operator(said: schema.Said, id: int) -> schema.Said | None:
    """What this member tells the operator of what was decided; None when others do."""
    if said.world and id not in said.world.members[:TELL]:
        return None
    return replace(said, tokens=(), failures=(), ended={}, lost=())


class Client:
    """As `transport.Client`. The elastic agent asks it many times a second: then it passes on what is new, to both sides."""

    def __init__(self, by_etcd: etcd.Client, operator: kubernetes.Client) -> None:
        self._by_etcd, self._operator = by_etcd, operator
        self._told: schema.Said | None = None
        self._wanted: object = None
        """What we have passed on already."""

    @property
    def id(self) -> int:
        return self._by_etcd.id

    @property
    def called(self) -> Called | None:
        self._pass_on()
        return self._by_etcd.called

    @property
    def world(self) -> World | None:
        return self._by_etcd.world

    @property
    def closed(self) -> Closed | None:
        said = self._operator.closed
        if said and (self._operator.gone or said.code != contract.Exit.INTERRUPTED):
            return said
        return self._by_etcd.closed

    def report(self, standing: str, **fields: Any) -> None:
        self._operator.report(standing, **fields)
        self._by_etcd.report(standing, **fields)

    def amend(self, **fields: Any) -> None:
        self._operator.amend(**fields)
        self._by_etcd.amend(**fields)

    def wait(self, timeout_s: float) -> None:
        self._pass_on()
        self._by_etcd.wait(timeout_s)

    def close(self) -> None:
        self._pass_on()
        self._by_etcd.close()
        self._operator.close()

    def _pass_on(self) -> None:
        said, wanted = self._by_etcd.said, self._operator.wanted
        if said and (news := for_operator(said[1], self.id)) and replace(news, why="") != self._told:
            self._told = replace(news, why="")
            self._operator.tell(json.dumps({"revision": said[0], "said": dataclasses.asdict(news)}))
        if wanted != self._wanted:
            self._wanted = wanted
            if read := schema.Wanted.of(wanted):
                self._by_etcd.want(read)
