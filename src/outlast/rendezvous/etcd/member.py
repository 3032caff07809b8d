"""A member's side of the etcd rendezvous, without threads: it writes the member's key and follows the published state.

`rendezvous.etcd.client.Board` calls it from two threads: one calls `publish` repeatedly, the other delivers events, which may be
late, duplicated or lost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outlast.base.backoff import RANDOM
from outlast.base.clock import Clock
from outlast.base.errors import Superseded
from outlast.job import contract
from outlast.rendezvous.etcd import key_schema
from outlast.rendezvous.etcd.gateway import Etcd, Gone, KeyValue, LeaseGone, Outcome, created, delete, modified, put, range_
from outlast.rendezvous.messages import Called, Closed, Report
from outlast.rendezvous.who_trains import MemberState, World

TTL_S = 5
"""TTL of a member's lease, in seconds: how long a silent member counts as alive."""
WATCHED_TTL_S = 10
"""TTL, in seconds, of a member's lease once its peers watch it. Peers report a silent machine within 3 s, but not a stopped
process, whose lease must outlast a stop of 5 s."""


@dataclass(frozen=True)
class Identity:
    run: str
    id: int | None = None
    """The member's index; None for any free index."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    ttl: int = TTL_S
    nnodes: str = ""
    """`min:max`; see `key_schema.Record.nnodes`."""
    most: int = 1
    """Maximum number of members in the run."""
    generation: int = 0
    """The newest generation recorded in the run's output directory; the next world's generation is higher."""


class EtcdMember:
    """One member of a run. `clock` is steady; `wall` is the wall clock, for deadlines that local processes read."""

    def __init__(
        self,
        store: Etcd,
        of: key_schema.Keys,
        who: Identity,
        *,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
        choose: Callable[[Sequence[int]], int] = RANDOM.choice,
    ) -> None:
        self._store, self._keys, self._who = store, of, who
        self._min_generation = who.generation
        self._clock, self._wall, self._choose = clock or Clock(), wall, choose
        self.id = -1 if who.id is None else who.id
        self.report = Report(run=who.run, id=self.id, standing=MemberState.WAITING, since=wall())
        self.called: Called | None = None
        self.world: World | None = None
        """The newest world that includes us."""
        self.closed: Closed | None = None
        self.why = ""
        self.synced = False
        """True once the keys in etcd have been listed. Before that, we must not register."""
        self._newest: World | None = None
        """The newest published world, even if it does not include us."""
        self._tokens: tuple[str, ...] = ()
        self._incarnation = ""
        self._leader: KeyValue | None = None
        self._leads_since = 0.0
        self._call: tuple[int, bool, str] | None = None
        """The call (generation, planned, reason) whose deadline has been set."""
        self._lease: int | None = None
        self._ttl = who.ttl
        self._renewed_at = 0.0
        self._at = 0
        self._registered = 0
        """Revision of our first registration; 0 before it."""
        self._modified = 0
        """Revision at which we last wrote our key; 0 if the key must be registered."""
        self._written: Report | None = None

    # Writing

    def record(self) -> key_schema.Record:
        report = replace(self.report, id=self.id, generation=self.report.generation or self._min_generation)
        return key_schema.Record(report, self._who.token, self._who.nnodes, self._incarnation, self._newest, self._tokens)

    def publish(self) -> None:
        """Register, write a changed report, or renew the lease. Raises EtcdError and Superseded."""
        for _ in range(100):
            ttl = max(self._ttl, WATCHED_TTL_S) if self.report.mesh else self._ttl
            if self._lease is None or ttl > self._ttl:
                self._lease, self._renewed_at, self._ttl = self._store.grant(ttl), self._clock(), ttl
                self._written = None  # move our key to this lease; the previous lease expires
            try:
                if self._modified:
                    if self._renew():
                        return
                elif self._register():
                    return
            except LeaseGone:
                self._lease, self._modified = None, 0
        raise Superseded(f"worker {self.id} finds no free index in run {self._who.run}: other processes keep taking them")

    def _renew(self) -> bool:
        """Write our key if the report has changed, and renew its lease if due. Returns False if the caller must retry."""
        assert self._lease is not None
        record = self.record()
        same = record.report == self._written
        if same or self._clock() - self._renewed_at >= self._ttl / 3:
            self._store.keep(self._lease)
            self._renewed_at = self._clock()
        if same:
            return True
        return self._write(record, [modified(self._keys.member(self.id), self._modified)])

    def _register(self) -> bool:
        if self.id < 0:
            self._choose_index()
        replace_key = self._who.id is not None and not self._registered  # an earlier process with this index has left its key
        return self._write(self.record(), [] if replace_key else [created(self._keys.member(self.id), 0)])

    def _write(self, record: key_schema.Record, conditions: list[Mapping[str, Any]]) -> bool:
        """Write our key if the conditions hold; otherwise look at what it holds. Returns whether it was written."""
        assert self._lease is not None
        key = self._keys.member(self.id)
        outcome = self._store.txn(conditions, [put(key, record.dumps(), self._lease)], [range_(key)])
        self._modified, self._written = (outcome.revision, record.report) if outcome.succeeded else (0, None)
        if outcome.succeeded:
            self._registered = self._registered or outcome.revision
        for current in outcome.kvs:
            self._reconcile_key(current)
        return outcome.succeeded

    def _reconcile_key(self, current: KeyValue) -> None:
        """Handle an unexpected value in our key. Raises Superseded if another process has our fixed index."""
        record = key_schema.Record.loads(current.value)
        if record and record.token == self._who.token:  # we wrote the value, but the response was lost
            self._registered = self._registered or current.created
            if current.lease == self._lease:
                self._modified, self._written = current.modified, record.report
            else:  # the key has a lease whose id we have lost
                self._store.txn([modified(current.key, current.modified)], [delete(current.key)])
        elif self._who.id is not None:
            raise Superseded(f"another process is worker {self.id} of run {self._who.run} now, in the place of this one")
        else:
            self.id, self.world = -1, None

    def _choose_index(self) -> None:
        """Choose a low free index at random: members that start together would all try the lowest."""
        kvs = self._store.range(self._keys.members, prefix=True).kvs
        taken = {int(number) for kv in kvs if (number := kv.key.removeprefix(self._keys.members)).isdecimal()}
        free = [index for index in range(max(self._who.most, len(taken) + 1)) if index not in taken]
        self.id = self._choose(free)

    def leave(self) -> None:
        """Leave at once. A final report (done, failed) remains until our lease expires. Raises EtcdError."""
        if self._lease is not None and self.report.standing != MemberState.DONE and not self.report.failed:
            self._store.revoke(self._lease)
        self._lease, self._modified = None, 0

    # Receiving

    def listed(self, listing: Outcome) -> None:
        """Process a listing of the keys below `key_schema.Keys.decided`."""
        self._at = listing.revision
        current = {kv.key: kv for kv in listing.kvs}
        self._on_leader(current.get(self._keys.leader))
        kv = current.get(self._keys.published)
        if not self.synced:
            published = key_schema.Published.loads(kv.value) if kv else None
            if published and not published.closed and published.generation >= self._min_generation:
                self._min_generation = 0  # etcd stores this generation already
        if kv:
            self._on_published(kv)
        self.synced = True

    def happened(self, events: Iterable[KeyValue | Gone]) -> None:
        """Process events for keys below `key_schema.Keys.decided`."""
        for event in [event for event in events if event.modified > self._at]:  # several keys may change in one revision
            self._at = event.modified
            if event.key == self._keys.leader:
                self._on_leader(event if isinstance(event, KeyValue) else None)
            elif event.key == self._keys.published and isinstance(event, KeyValue):
                self._on_published(event)

    def _on_leader(self, leader: KeyValue | None) -> None:
        if leader != self._leader:
            self._leader, self._leads_since = leader, self._clock()

    def _on_published(self, kv: KeyValue) -> None:
        published = key_schema.Published.loads(kv.value)
        if published is None:
            print("outlast | the published state in etcd is invalid; another version may have written it", flush=True)
            return
        if published.closed:  # the end concerns members of that run, not of a later run
            if self._incarnation == published.incarnation or (not self._incarnation and 0 < self._registered < kv.modified):
                self.closed = published.closed
            return
        if self._incarnation and published.previous_incarnation == self._incarnation:
            self.closed = Closed(f"run {self._who.run} is over, and another of this name has begun", contract.Exit.FAILED)
            return
        if published.incarnation != self._incarnation and not key_schema.live(published, self._leader):
            return  # the state is from a run that is over or has no new coordinator yet
        if published.nnodes != self._who.nnodes:
            # The key of a killed job remains until its lease expires; only a leader that stays longer is another job's.
            if published.nnodes and self._who.nnodes and self._clock() - self._leads_since > self._who.ttl + 1:
                other, own = key_schema.nnodes_text(published.nnodes), key_schema.nnodes_text(self._who.nnodes)
                reason = f"run {self._who.run} has --nnodes={other}, and this node has --nnodes={own}"
                self.closed = Closed(f"{reason}: another job has this --rdzv-id; give each its own", contract.Exit.MISCONFIGURED)
            return
        self._incarnation, self.why = published.incarnation, published.why
        if self._who.token in published.ended:
            self.closed = Closed(published.ended[self._who.token], contract.Exit.INTERRUPTED)
        world = published.world
        if world and world.generation > (self._newest.generation if self._newest else 0):
            # Each member's key has a copy of the world, so it must be small.
            self._newest, self._tokens = replace(world, mesh_addresses=()), published.tokens
            if (self.id, self._who.token) in zip(world.members, published.tokens, strict=False):
                self.world = world  # and not that of an earlier process of our index
        call = published.called
        if call and (world is None or call.generation > world.generation):
            mark = (call.generation, call.planned, call.reason)
            if mark != self._call:  # the deadline counts from the call's arrival because clocks differ
                self._call = mark
                self.called = Called(
                    call.generation, call.reason, call.planned, self._wall() + published.leave_s, published.leave_s
                )
        elif world:  # the world's call came first, even if we missed it
            self.called = Called(world.generation, world.reason, False, self._wall())
