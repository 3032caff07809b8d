"""Simulated etcd in memory with a simulated clock: revisions, leases, transactions, watches, lost responses and lost data."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.base.errors import EtcdAway
from outlast.rendezvous.etcd.gateway import Gone, KeyValue, LeaseGone, Outcome


@dataclass
class Lease:
    ttl: float
    ends: float
    keys: set[str] = field(default_factory=set)


class SimulatedEtcd:
    """Server. `now` is its only clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.revision = 1
        self.kvs: dict[str, KeyValue] = {}
        self.leases: dict[int, Lease] = {}
        self.history: list[KeyValue | Gone] = []
        self.epoch = 0
        """Number of times that the data were lost."""
        self.up = True
        self._lease = 1000
        self.wrote: Callable[[KeyValue], None] = lambda kv: None

    def lose_data(self) -> None:
        self.epoch += 1
        self.revision, self.kvs, self.leases, self.history = 1, {}, {}, []

    def restart(self) -> None:
        """Restart all leases, as after every leader election of an etcd."""
        self.up = True
        for lease in self.leases.values():
            lease.ends = self.now + lease.ttl

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        if self.up:
            for id in [id for id, lease in self.leases.items() if lease.ends <= self.now]:
                self.end(id)

    def end(self, id: int) -> None:
        lease = self.leases.pop(id, None)
        if lease:
            self.revision += 1
            for key in sorted(lease.keys):
                self._delete(key)

    def _delete(self, key: str) -> None:
        kv = self.kvs.pop(key, None)
        if kv:
            if kv.lease in self.leases:
                self.leases[kv.lease].keys.discard(key)
            self.history.append(Gone(key, self.revision))

    def _put(self, key: str, value: str, lease: int) -> None:
        if lease and lease not in self.leases:
            raise LeaseGone("requested lease not found")
        before = self.kvs.get(key)
        if before and before.lease in self.leases:
            self.leases[before.lease].keys.discard(key)
        kv = KeyValue(key, value, before.created if before else self.revision, self.revision, lease)
        self.kvs[key] = kv
        if lease:
            self.leases[lease].keys.add(key)
        self.history.append(kv)
        self.wrote(kv)

    def range(self, start: str, end: str | None) -> tuple[KeyValue, ...]:
        return tuple(kv for key, kv in sorted(self.kvs.items()) if (start <= key < end if end else key == start))

    def txn(self, compare: Sequence[Mapping[str, Any]], branches: Sequence[Sequence[Mapping[str, Any]]]) -> Outcome:
        held = all(self._holds(each) for each in compare)
        operations = branches[not held]
        for each in operations:  # all or nothing
            lease = int(each.get("request_put", {}).get("lease", 0))
            if lease and lease not in self.leases:
                raise LeaseGone("requested lease not found")
        if any("request_range" not in each for each in operations):
            self.revision += 1
        found: list[KeyValue] = []
        for each in operations:
            [(kind, fields)] = each.items()
            key = _text(fields["key"])
            if kind == "request_put":
                self._put(key, _text(fields["value"]), int(fields["lease"]))
            elif kind == "request_range":
                found += self.range(key, _text(fields["range_end"]) if "range_end" in fields else None)
            else:
                self._delete(key)
        return Outcome(held, self.revision, tuple(found))

    def _holds(self, compare: Mapping[str, Any]) -> bool:
        kv = self.kvs.get(_text(compare["key"]))
        if compare["target"] == "CREATE":
            return (kv.created if kv else 0) == int(compare["create_revision"])
        if compare["target"] == "VALUE":
            return kv is not None and kv.value == _text(compare["value"])
        return (kv.modified if kv else 0) == int(compare["mod_revision"])


class Link:
    """Connection of one process to the server: `membership.Store`. It can be cut, and loses requests and responses at random."""

    def __init__(self, server: SimulatedEtcd, rng: random.Random) -> None:
        self.server, self._rng = server, rng
        self.cut = False
        self.loss = 0.0

    def _ask(self, what: Callable[[], Any]) -> Any:
        lost = self._rng.random() < self.loss
        if self.cut or not self.server.up or (lost and self._rng.random() < 0.5):
            raise EtcdAway("it cannot be reached")
        answer = what()
        if lost:
            raise EtcdAway("the answer was lost")
        return answer

    def range(self, key: str, *, prefix: bool = False) -> Outcome:
        end = key[:-1] + chr(ord(key[-1]) + 1) if prefix else None
        return self._ask(lambda: Outcome(True, self.server.revision, self.server.range(key, end)))  # type: ignore[no-any-return]

    def txn(
        self,
        compare: Sequence[Mapping[str, Any]],
        then: Sequence[Mapping[str, Any]],
        otherwise: Sequence[Mapping[str, Any]] = (),
    ) -> Outcome:
        return self._ask(lambda: self.server.txn(compare, (then, otherwise)))  # type: ignore[no-any-return]

    def grant(self, seconds: int) -> int:
        def make() -> int:
            self.server._lease += 1
            self.server.leases[self.server._lease] = Lease(seconds, self.server.now + seconds)
            return self.server._lease

        return self._ask(make)  # type: ignore[no-any-return]

    def keep(self, lease: int) -> None:
        def renew() -> None:
            if lease not in self.server.leases:
                raise LeaseGone("the lease has expired")
            self.server.leases[lease].ends = self.server.now + self.server.leases[lease].ttl

        self._ask(renew)

    def revoke(self, lease: int) -> None:
        self._ask(lambda: self.server.end(lease))


class Watch:
    """Watch of a prefix over a link: it lists, then receives events, late and sometimes twice."""

    def __init__(
        self, link: Link, prefix: Callable[[], str], listed: Callable[[Outcome], None], happened: Callable[[list], None]
    ) -> None:
        self._link, self._prefix, self._listed, self._happened = link, prefix, listed, happened
        self._at: tuple[int, int, str] | None = None
        """Epoch, number of events received, and prefix."""

    def hear(self, rng: random.Random) -> None:
        server, prefix = self._link.server, self._prefix()
        if self._link.cut or not server.up:
            self._at = None
            return
        if self._at is None or self._at[0] != server.epoch or self._at[2] != prefix or rng.random() < 0.02:
            try:
                found = self._link.range(prefix, prefix=True)
            except EtcdAway:
                return
            self._at = server.epoch, len(server.history), prefix
            self._listed(found)
            return
        upto = rng.randint(self._at[1], len(server.history)) if rng.random() < 0.3 else len(server.history)
        since = self._at[1] if rng.random() < 0.9 else max(0, self._at[1] - 3)
        self._at = server.epoch, upto, prefix
        self._happened([event for event in server.history[since:upto] if event.key.startswith(prefix)])


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()
