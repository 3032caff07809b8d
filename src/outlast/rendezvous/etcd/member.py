"""A member's side of the rendezvous by etcd, without threads: what it writes, and how it reads what is published.

`rendezvous.etcd.client.Client` calls it from two threads: one that tells (`tell`, again and again), and one that hears.
All that comes from the etcd may come late, twice, or not at all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outlast.base.backoff import RANDOM
from outlast.base.clock import Clock
from outlast.base.errors import Superseded
from outlast.job import contract
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.etcd.gateway import Gone, KeyValue, LeaseGone, Outcome, created, delete, modified, put, range_
from outlast.rendezvous.transports.sockets import Called, Closed, Report
from outlast.rendezvous.world import MemberState, World


class Store(Protocol):
    """The part of `gateway.Etcd` that is used here."""

    def range(self, key: str, *, prefix: bool = False) -> Outcome: ...
    def txn(
        self,
        compare: Sequence[Mapping[str, Any]],
        then: Sequence[Mapping[str, Any]],
        otherwise: Sequence[Mapping[str, Any]] = (),
    ) -> Outcome: ...
    def grant(self, seconds: int) -> int: ...
    def keep(self, lease: int) -> None: ...
    def revoke(self, lease: int) -> None: ...


TTL_S = 5
"""TTL of a member's lease: how long a silent one counts as alive."""
WATCHED_TTL_S = 10
"""The same once its peers watch it: they report a machine that falls silent after 3 s. What they cannot see, a process that does
not run, is no loss for 5 s, after which its lease, renewed each third of the TTL, has more than a second left."""


@dataclass(frozen=True)
class Identity:
    """Which member of which run it is, and what it asks for."""

    run: str
    id: int | None = None
    """None: any index that is free."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of the process: by it a member knows its own key."""
    ttl: int = TTL_S
    nnodes: str = ""
    """`min:max`, see `schema.Record.terms`."""
    most: int = 1
    """How many members there may be."""
    generation: int = 0
    """The newest that the output knows of: the next one is to be beyond it."""


class Membership:
    """One member. `clock` is steady, `wall` is the time that other processes of this machine go by."""

    def __init__(
        self,
        store: Store,
        of: schema.Keys,
        who: Identity,
        *,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
        choose: Callable[[Sequence[int]], int] = RANDOM.choice,
    ) -> None:
        self._store, self._keys, self._who = store, of, who
        self._floor = who.generation
        self._clock, self._wall, self._choose = clock or Clock(), wall, choose
        self.id = -1 if who.id is None else who.id
        """-1 until one is found."""
        self.report = Report(run=who.run, id=self.id, standing=MemberState.WAITING, since=wall())
        self.called: Called | None = None
        self.world: World | None = None
        """The newest that we may be in."""
        self.closed: Closed | None = None
        self.why = ""
        """What the coordinator waits for."""
        self.said: tuple[int, schema.Said] | None = None
        """All that was decided, as heard last, and the revision of etcd by which it was."""
        self.heard = False
        """Whether etcd has been listed; before that we do not register."""
        self._newest: World | None = None
        """The newest world that we have heard of."""
        self._tokens: tuple[str, ...] = ()
        """Of its members."""
        self._born = ""
        self._leader: KeyValue | None = None
        self._leads_since = 0.0
        """When we have first heard of that one."""
        self._call: tuple[int, bool, str] | None = None
        """The call that we have counted the time of."""
        self._lease: int | None = None
        self._ttl = who.ttl
        """Of our lease; longer from when our peers watch us."""
        self._kept = 0.0
        """When our lease was renewed last."""
        self._at = 0
        """The revision up to which we have heard."""
        self._registered = 0
        """The revision by which our key was there first; 0 for never."""
        self._modified = 0
        """The revision of our key as we have written it last; 0: it has to be registered."""
        self._written: Report | None = None
        """What etcd has of what is ours. That we have heard of a newer world is no reason to write: etcd knows it."""

    # What it says

    def record(self) -> schema.Record:
        """What is to be in etcd."""
        report = replace(self.report, id=self.id, generation=self.report.generation or self._floor)
        return schema.Record(report, self._who.token, self._who.nnodes, self._born, self._newest, self._tokens)

    def tell(self) -> None:
        """Have etcd know what we are: register, write what has changed, or renew. Raises EtcdError, Superseded."""
        for _ in range(100):
            ttl = max(self._ttl, WATCHED_TTL_S) if self.report.mesh else self._ttl
            if self._lease is None or ttl > self._ttl:
                self._lease, self._kept, self._ttl = self._store.grant(ttl), self._clock(), ttl
                self._written = None  # our key is moved to this lease; the one before ends by itself
            try:
                if self._modified:
                    if self._renew():
                        return
                elif self._register():
                    return
            except LeaseGone:
                self._lease, self._modified = None, 0
        raise Superseded(f"worker {self.id} finds no place in run {self._who.run}: others write there all the time")

    def _renew(self) -> bool:
        """Write our key if what it says has changed, and renew its lease if not, or if that is due: who writes all the time must
        live as well. False when it has to be tried once more."""
        assert self._lease is not None
        record, key = self.record(), self._keys.member(self.id)
        same = record.report == self._written
        if same or self._clock() - self._kept >= self._ttl / 3:
            self._store.keep(self._lease)
            self._kept = self._clock()
        if same:
            return True
        outcome = self._store.txn([modified(key, self._modified)], [put(key, record.dumps(), self._lease)], [range_(key)])
        if outcome.succeeded:
            self._modified, self._written = outcome.revision, record.report
            return True
        self._modified, self._written = 0, None
        for there in outcome.found:
            self._find(there)
        return False

    def _register(self) -> bool:
        if self.id < 0:
            self._find_a_place()
        assert self._lease is not None
        record, key = self.record(), self._keys.member(self.id)
        take = self._who.id is not None and not self._registered  # replaces an earlier process of this index
        written = put(key, record.dumps(), self._lease)
        outcome = self._store.txn([] if take else [created(key, 0)], [written], [range_(key)])
        if outcome.succeeded:
            self._modified, self._written = outcome.revision, record.report
            self._registered = self._registered or outcome.revision
        for there in outcome.found:
            self._find(there)
        return outcome.succeeded

    def _find(self, there: KeyValue) -> None:
        """There is our key, not as we have it in mind. Raises Superseded when it is another's, and we may take no other."""
        found = schema.Record.loads(there.value)
        if found and found.token == self._who.token:  # we wrote it, and the answer was lost
            self._registered = self._registered or there.created
            if there.lease == self._lease:
                self._modified, self._written = there.modified, found.report
            else:  # under a lease that we have lost sight of
                self._store.txn([modified(there.key, there.modified)], [delete(there.key)])
        elif self._who.id is not None:
            raise Superseded(f"another process is worker {self.id} of run {self._who.run} now, in the place of this one")
        else:
            self.id, self.world = -1, None

    def _find_a_place(self) -> None:
        """Any of the lowest free indices: not the lowest, which all who come together would want."""
        found = self._store.range(self._keys.members, prefix=True).found
        taken = {int(number) for kv in found if (number := kv.key.removeprefix(self._keys.members)).isdecimal()}
        free = [index for index in range(max(self._who.most, len(taken) + 1)) if index not in taken]
        self.id = self._choose(free)

    def leave(self) -> None:
        """Go: at once, except that what we have said of our end stays until the lease ends. Raises EtcdError."""
        if self._lease is not None and self.report.standing != MemberState.DONE and not self.report.failed:
            self._store.revoke(self._lease)
        self._lease, self._modified = None, 0

    # What it hears

    def listed(self, found: Outcome) -> None:
        """Everything below `schema.decided`, as it is now."""
        self._at = found.revision
        there = {kv.key: kv for kv in found.found}
        self._meet(there.get(self._keys.leader))
        kv = there.get(self._keys.said)
        if not self.heard:
            said = schema.Said.loads(kv.value) if kv else None
            if said and not said.closed:
                self._floor = self._floor if self._floor > said.generation else 0  # it knows by itself
        if kv:
            self._hear(kv)
        self.heard = True

    def happened(self, events: Iterable[KeyValue | Gone]) -> None:
        """What has happened to these keys since."""
        for event in events:
            if event.modified <= self._at:
                continue
            self._at = event.modified
            if event.key == self._keys.leader:
                self._meet(event if isinstance(event, KeyValue) else None)
            elif event.key == self._keys.said and isinstance(event, KeyValue):
                self._hear(event)

    def _meet(self, leader: KeyValue | None) -> None:
        if leader != self._leader:
            self._leader, self._leads_since = leader, self._clock()

    def _hear(self, kv: KeyValue) -> None:
        said = schema.Said.loads(kv.value)
        if said is None:
            print("outlast | what was decided in etcd makes no sense here; is it of another version?", flush=True)
            return
        if said.closed:  # it is meant for those who were there, and not for who comes after
            if self._born == said.born or (not self._born and 0 < self._registered < kv.modified):
                self.closed, self.said = said.closed, (kv.modified, said)
            return
        if self._born and said.before == self._born:
            self.closed = Closed(f"run {self._who.run} is over, and another of this name has begun", contract.Exit.FAILED)
            return
        if said.born != self._born and not schema.live(said, self._leader):
            return  # of a run that is over, or that no coordinator has taken over yet
        if said.terms != self._who.nnodes:
            # A job that was killed leaves its key for as long as the lease lasts: only who is there for longer is another job.
            if said.terms and self._who.nnodes and self._clock() - self._leads_since > self._who.ttl + 1:
                theirs, ours = schema.asked(said.terms), schema.asked(self._who.nnodes)
                reason = f"run {self._who.run} is of --nnodes={theirs}, and this is --nnodes={ours}"
                self.closed = Closed(f"{reason}: another job has this --rdzv-id; give each its own", contract.Exit.MISCONFIGURED)
            return
        self._born, self.why, self.said = said.born, said.why, (kv.modified, said)
        if self._who.token in said.ended:
            self.closed = Closed(said.ended[self._who.token], contract.Exit.INTERRUPTED)
        world = said.world
        if world and world.generation > (self._newest.generation if self._newest else 0):
            self._newest, self._tokens = world, said.tokens
            if (self.id, self._who.token) in zip(world.members, said.tokens, strict=False):  # and not one that was here before us
                self.world = world
        call = said.called
        if call and (world is None or call.generation > world.generation):
            mark = (call.generation, call.planned, call.reason)
            if mark != self._call:  # our time for it begins when we hear of it: the coordinator's clock is not ours
                self._call = mark
                self.called = Called(call.generation, call.reason, call.planned, self._wall() + said.leave_s, said.leave_s)
        elif world:  # there was a call, whether or not we have heard it
            self.called = Called(world.generation, world.reason, False, self._wall())
