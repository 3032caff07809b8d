"""Coordination by etcd: members elect one of them, which coordinates until it ends or its lease does (docs/decisions/0014).

`Candidate` runs for election and `Term` decides, both without threads: `Running` has those, and tests have an etcd of their own.
Whatever a term writes is compared with its election: one that is over can write nothing, and what it would have printed or
recorded is dropped with it. An election is identified by a nonce in its key and not by a revision: an etcd that
has lost its data counts revisions from the start again.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from outlast.base.backoff import RANDOM
from outlast.base.clock import Clock
from outlast.base.errors import EtcdError
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.failure import Failure
from outlast.job.status import State
from outlast.rendezvous import coordinator, partition, restarts, world
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.etcd.gateway import Gone, KeyValue, LeaseGone, Outcome, created, holds, modified, put, range_
from outlast.rendezvous.etcd.member import TTL_S, Store
from outlast.rendezvous.transports import sockets

TICK_S = 0.1
LINGER_S = 600
"""TTL of the published state after the last coordinator is gone; bounds a full outage of etcd."""
LISTEN_S = 1.0
"""How long a new coordinator listens when etcd has no state: etcd may have lost it, and members report it every half second."""
REPORT_S = 3.0
"""How long a new coordinator waits for any member of the published world: all may have been cut off for a while."""
PASSED = 100
"""Generations that are skipped when etcd has lost its state: more than can have followed the newest known one."""
WHY_S = 0.5
"""Shortest interval of writes that change only the reason of a wait."""
ENDED = 100
"""How many processes that are to end are kept published."""
JITTER_S = 0.1
"""Jitter before running for election, since all see the end of a term at once. Candidates that know no world wait longer."""


class Deposed(Exception):
    """Another candidate was elected, or may have been."""


class EventSink(Protocol):
    """Receives what a coordinator says, records and ends, once etcd has accepted it."""

    def say(self, text: str) -> None: ...
    def event(self, kind: str, **facts: Any) -> None: ...
    def finished(self, state: State, reason: str, code: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class ElectionConfig:
    """What does not change from term to term."""

    settings: coordinator.Settings
    events: EventSink
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    """Of the process."""
    nnodes: str = ""
    """`min:max` under torchrun: its --max-restarts counts, anybody may come. Empty in pods."""
    replicas: int = 0
    """Workers that are expected, in pods."""
    ttl: int = TTL_S
    """TTL of the leadership."""
    clock: Callable[[], float] = dataclasses.field(default_factory=Clock)
    """A steady one. It stops while this machine sleeps: leases that end meanwhile are found ended, and made again."""
    random: Callable[[], float] = RANDOM.random
    nonce: Callable[[], str] = lambda: secrets.token_hex(4)


class Term(coordinator.Coordinator):
    """Leadership of one coordinator, from its election on."""

    def __init__(
        self, store: Store, keys: schema.Keys, config: ElectionConfig, leader: KeyValue, found: Outcome, born: str = ""
    ) -> None:
        """`leader` is the key by which it was elected; `found` is all that etcd has of the run; `born` is the run that the
        candidate was part of."""
        super().__init__(config.settings, config.clock)
        self._store, self._keys, self._config, self.leader = store, keys, config, leader
        self.gives_up = not config.nnodes  # torchrun knows no such code
        self._lease: int | None = None
        """Of what we say."""
        self._kept = 0.0
        self._seen: dict[int, tuple[str, int]] = {}
        """Of each member's key the token in it, and its revision."""
        self._tokens: tuple[str, ...] = ()
        """Of the members of the world."""
        self._parked: dict[int, KeyValue] = {}
        """Keys of processes in the place of members whose loss is yet to be decided about."""
        self._effects: list[Callable[[], None]] = []
        """What follows once etcd has taken what we say."""
        self._written: schema.Said | None = None
        self._written_at = 0.0
        self._why = ""
        self._failure: Mapping[str, Any] | None = None
        """The last failure that was judged."""
        self._ended: dict[str, str] = {}
        """Tokens of processes that were fenced, and why."""
        self._listen_until: float | None = None
        self._begin(found, born)

    @property
    def born(self) -> str:
        """Incarnation of the run; empty until it is published."""
        return self._born if self._written else ""

    def _begin(self, found: Outcome, born: str) -> None:
        """Take over the published state and the reports of members."""
        of, now = self._keys, self.clock()
        there = {kv.key: kv for kv in found.found}
        kv = there.get(of.said)
        said = schema.Said.loads(kv.value) if kv else None
        self._said_at = kv.modified if kv else 0
        self._after = 0
        """What was written up to this revision is of a run that is over."""
        members = [kv for kv in found.found if kv.key.startswith(of.members)]
        if said and (said.closed or (said.world and set(said.world.members) <= set(said.done) and born != said.born)):
            self._before, self._born, self._after, said = said.born, self._config.nonce(), self._said_at, None
        elif said:
            self._before, self._born = said.before, said.born
        else:
            known = [record for kv in members if (record := schema.Record.loads(kv.value)) and record.born]
            newest = max(known, key=lambda record: record.world.generation if record.world else 0, default=None)
            self._before, self._born = "", newest.born if newest else self._config.nonce()
            self._listen_until = now + LISTEN_S
        if said:
            self.judged, self.restarts, self._failure = (said.judged, said.attempt), said.restarts, said.failure
            self.history = tuple(restarts.Record(now - ago, committed, step) for ago, committed, step in said.failures)
            restamped = said.world and replace(said.world, at=now), said.called and replace(said.called, at=now)
            lost = partition.read(said.lost, now)
            self.known, self._tokens = world.State({}, restamped[0], restamped[1], floor=said.floor, lost=lost), said.tokens
            self.followed = self.generation()
            self._ended = dict(said.ended)
        for kv in members:
            self._hear(kv)
        if not self.known.world:
            return
        ranks, generation = self.known.world.members, self.known.world.generation
        for id in set(said.done if said else ()) & set(ranks) - self.known.members.keys():
            self.known = self.known.heard(world.Member(id, "", world.MemberState.DONE, generation, now))
        inside = [id for id in ranks if id in self.known.members and self.known.members[id].generation >= generation]
        if not inside:
            self._listen_until = now + REPORT_S
        if not any(kv.created < self._said_at for kv in members if self._id(kv) in inside):
            self.forgive()  # who is there had to come back, too: others may be about to

    # What members say

    def happened(self, events: Iterable[KeyValue | Gone]) -> None:
        """Take in events of the run's keys. Raises Deposed."""
        of = self._keys
        for event in events:
            if event.key == of.leader and event != self.leader:
                raise Deposed("somebody else was elected")
            if event.key.startswith(of.members):
                if isinstance(event, KeyValue):
                    self._hear(event)
                else:
                    self._lost(self._id(event), event.modified)

    def listed(self, found: Outcome) -> None:
        """Take in all keys of the run as they are now: events may have been missed."""
        members = {self._id(kv): kv for kv in found.found if kv.key.startswith(self._keys.members)}
        for id in set(self._seen) - set(members):
            self._lost(id, found.revision)
        for kv in members.values():
            self._hear(kv)

    def forgive(self) -> None:
        """Reset deadlines: leases may have ended while they could not be renewed, so members get time to come back."""
        self.known = replace(self.known, since=self.clock())

    def _id(self, kv: KeyValue | Gone) -> int:
        number = kv.key.removeprefix(self._keys.members)
        return int(number) if number.isdecimal() else -1

    def _hear(self, kv: KeyValue) -> None:
        record, id = schema.Record.loads(kv.value), self._id(kv)
        token, at = self._seen.get(id, ("", 0))
        if record is None or record.report.id != id or kv.modified <= max(at, self._after):
            return  # of another program, or known
        if record.terms != self._config.nnodes or (record.born and record.born == self._before):
            return  # of another job, or of a run that is over
        if record.token in self._ended:
            return  # it has yet to hear that it is to end
        if token and token != record.token:
            self.gone(id)  # there is another now in its place
        self._seen[id] = record.token, kv.modified
        self._learn(record)
        report, now = record.report, self.known.world
        if now and id in now.members and (id, record.token) not in zip(now.members, self._tokens, strict=False):
            if self.known.called is None:  # the index has come to another: the member is lost, and this one may join what follows
                self.gone(id)
                self._parked[id] = kv
                return
            if report.generation == now.generation and not report.again:
                report = replace(report, generation=now.generation - 1)
        if report.failure:  # dated by when we hear of it: its clock is not ours
            report = replace(report, failure={**report.failure, "time": self.clock()})
        given_up = self._config.nnodes and report.failed and (report.failure or {}).get("code") == contract.Exit.GIVEN_UP
        if given_up and report.failure and report.generation >= self.generation():  # not one that the others have gone on without
            self.over(State.FAILED, report.failure.get("reason", f"worker {id} gives up"), contract.Exit.FAILED, End.LIMIT)
        self.heard(report)

    def _learn(self, record: schema.Record) -> None:
        """A member may know a world that etcd has lost: it goes on, and we skip generations that may have followed it unseen."""
        said = record.world
        own = self.known.world.generation if self.known.world else 0
        if said and said.generation > own and (self.known.called is None or said.generation >= self.known.called.generation):
            now = self.clock()
            floor = max(self.known.floor, said.generation + PASSED)
            self._born, self._tokens = self._born if self._written else record.born, record.tokens
            self.known = replace(self.known, world=replace(said, at=now), called=None, since=now, floor=floor)

    def _lost(self, id: int, revision: int) -> None:
        _, at = self._seen.get(id, ("", 0))
        if id in self._seen and at <= revision:
            del self._seen[id]
            self._parked.pop(id, None)
            self.gone(id)

    # Deciding

    def turn(self) -> None:
        """Decide and publish. Raises EtcdError, and Deposed."""
        now = self.clock()
        self._keep()
        if self._listen_until is not None:
            if now >= self._listen_until:
                self._listened()
            else:
                if self.known.world:
                    self._publish()  # what etcd has forgotten must not die with those who know it
                return
        for _ in range(10):
            self._publish()  # nothing is decided on top of what may not have been written
            if self.closed is not None:
                return
            self._unpark()
            expected, replicas = None, self.sizes[-1]
            if not self._config.nnodes:
                expected = {*range(self._config.replicas), *self.reports}
                replicas = min(len(expected), replicas)
            decision = self.decide(replicas, expected)
            self.judge_when_settled()
            if decision is None or isinstance(decision, world.Wait):
                self._why = decision.steady if decision else self._why
                break
        self._publish()

    def _unpark(self) -> None:
        if self.known.called is not None or self.known.world is None:
            parked, self._parked = self._parked, {}
            for id, kv in parked.items():
                if self._seen.pop(id, ("", 0))[1] == kv.modified:  # still the newest
                    self._hear(kv)

    def _listened(self) -> None:
        self._listen_until = None
        now, members = self.known.world, self.known.members.values()
        if now and not any(m.generation >= now.generation for m in members if m.id in now.members):
            floor = max(self.known.floor, self.generation())
            called = world.Call(floor + 1, "nobody of the last world is left", False, self.clock(), cause=world.Cause.LOST)
            self.known = replace(self.known, world=None, called=called, floor=floor, since=-math.inf)

    def _said(self) -> schema.Said:
        known = self.known
        ranks = known.world.members if known.world else ()
        generation = known.world.generation if known.world else 0
        done = [m.id for m in known.members.values() if m.standing is world.MemberState.DONE and m.generation >= generation]
        return schema.Said(
            by=self._config.token,
            born=self._born,
            before=self._before,
            terms=self._config.nnodes,
            world=known.world,
            tokens=self._tokens if known.world else (),
            called=known.called if known.called and known.called.generation > generation else None,
            leave_s=self.timeouts.leave,
            closed=self.closed,
            why=self._why,
            floor=known.floor,
            done=tuple(sorted(set(done) & set(ranks))),
            judged=self.judged[0],
            attempt=self.judged[1],
            restarts=self.restarts,
            failure=self._failure,
            ended=self._ended,
        )

    def _publish(self) -> None:
        """Publish the state if it has changed. Raises Deposed when this term is over."""
        said, written, now = self._said(), self._written, self.clock()
        if written and replace(said, why=written.why) == written and now - self._written_at < WHY_S:
            said = written  # while many come one after the other, not each is worth a word to all
        if said != written:
            if self.known.world is None and said.why != (written.why if written else ""):
                self._effects.append(lambda: self._config.events.say(said.why))
            history = tuple((now - time_, committed, step) for time_, committed, step in self.history)
            self._write(replace(said, failures=history, lost=partition.written(self.known.lost, now)).dumps())
            self._written, self._written_at = said, now
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    def _write(self, value: str) -> None:
        of, store = self._keys, self._store
        for _ in range(3):
            if self._lease is None:
                self._lease, self._kept = store.grant(LINGER_S), self.clock()
            mine = [holds(of.leader, self.leader.value), modified(of.said, self._said_at)]
            try:
                outcome = store.txn(mine, [put(of.said, value, self._lease)], [range_(of.leader), range_(of.said)])
            except LeaseGone:
                self._lease = None
                continue
            if outcome.succeeded:
                self._said_at = outcome.revision
                return
            there = {kv.key: kv for kv in outcome.found}
            if of.leader not in there or there[of.leader].value != self.leader.value:
                raise Deposed("somebody else was elected, or etcd has lost who was")
            # We lead, so we wrote what is there and its answer was lost; or its lease has ended.
            self._said_at = there[of.said].modified if of.said in there else 0
        raise EtcdError(f"{of.said} changes although only this process may write it")

    def _keep(self) -> None:
        """Renew the lease of the published state; when it has ended, publish again."""
        if self._lease is None or self.clock() - self._kept < LINGER_S / 4:
            return
        try:
            self._store.keep(self._lease)
        except LeaseGone:
            self._lease = self._written = None
        self._kept = self.clock()

    # As a coordinator: what is decided is written for all, and what follows from it happens once etcd has taken it

    def say(self, state: State, reason: str) -> None:
        self._effects.append(lambda: self._config.events.say(f"{state}: {reason}"))

    def event(self, kind: str, **facts: Any) -> None:
        self._effects.append(lambda: self._config.events.event(kind, **facts))

    def formed(self, new: world.World) -> None:
        """All of its members have been heard: whose key goes from now on is lost."""
        self.known = replace(self.known, since=-math.inf)
        self._tokens = tuple(self._seen[id][0] for id in new.members)

    def failed(self, failure: Failure) -> None:
        self._failure = failure.told(but=("traceback",))
        if failure.traceback:
            self._effects.append(lambda: self._config.events.say(failure.traceback))

    def fence(self, id: int, reason: str) -> None:
        """As ever, by the token of its process; nobody starts a torchrun again, so that one only waits for another world."""
        if not self._config.nnodes and id in self._seen:
            ended = {**self._ended, self._seen[id][0]: reason}
            self._ended = dict([*ended.items()][-ENDED:])
            self.reports.pop(id, None)
            self.known = self.known.gone(id)

    def finished(self, state: State, closed: sockets.Closed) -> None:
        self._effects.append(lambda: self._config.events.finished(state, closed.reason, closed.code))


class Candidate:
    """A process that may be elected. `turn` acts; `listed` and `happened` take in what etcd tells."""

    def __init__(
        self,
        store: Store,
        keys: schema.Keys,
        config: ElectionConfig,
        *,
        host: str = "",
        id: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._store, self._keys, self._config, self._host, self._id = store, keys, config, host, id
        self.term: Term | None = None
        self.ended = False
        """Whether the run is over."""
        self._at = 0
        """The revision up to which we have heard."""
        self._began: int | None = None
        """Revision of etcd when we began to listen."""
        self._born = ""
        self._leader: KeyValue | None = None
        self._lease: int | None = None
        self._kept = 0.0
        self._run_at: float | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the keys to watch."""
        return f"{self._keys.root}/" if self.term else self._keys.decided

    def listed(self, found: Outcome, below: str = "") -> None:
        """All below `prefix`, as it is now; `below` is what that was when it was asked for."""
        if below and below != self.prefix:
            return  # it says nothing of members, or is of a term that is over; what is below the new one is asked for as well
        self._at = found.revision
        there = {kv.key: kv for kv in found.found}
        if self._began is None:
            self._began = found.revision
        self._leader = there.get(self._keys.leader)
        if kv := there.get(self._keys.said):
            self._hear(kv)
        if self.term:
            if self._leader != self.term.leader:
                self._stand_down()
                return
            if self._config.clock() - self._kept >= self._config.ttl / 2:
                self.term.forgive()
            self.term.listed(found)

    def happened(self, events: Iterable[KeyValue | Gone]) -> None:
        """What has happened below `prefix` since."""
        events = [event for event in events if event.modified > self._at]
        for event in events:
            self._at = event.modified
            if event.key == self._keys.leader:
                self._leader = event if isinstance(event, KeyValue) else None
            elif event.key == self._keys.said and isinstance(event, KeyValue):
                self._hear(event)
        if self.term:
            try:
                self.term.happened(events)
            except Deposed:
                self._stand_down()

    def _hear(self, kv: KeyValue) -> None:
        said = schema.Said.loads(kv.value)
        if said is None or said.by == self._config.token:
            return
        if not said.closed:
            if schema.live(said, self._leader):
                self._born = said.born
        elif not self.ended and (self._born == said.born or (not self._born and kv.modified > (self._began or 0))):
            self.ended = True
            state = State.FAILED if said.closed.code else State.SUCCEEDED
            self._config.events.finished(state, said.closed.reason, said.closed.code)

    def turn(self) -> float:
        """Run for election, coordinate, or wait; returns seconds until the next turn if nothing happens. Raises EtcdError."""
        config, now = self._config, self._config.clock()
        if self._began is None or (self.ended and not self.term):
            return float(config.ttl)
        term = self.term
        if term is None:
            mine = self._leader is not None and self._lease is not None and self._leader.lease == self._lease
            if self._leader is not None and not mine:
                self._run_at = None
                return float(config.ttl)
            if self._run_at is None:
                self._run_at = now + JITTER_S * (config.random() + (not self._born))
            if now < self._run_at and not mine:
                return self._run_at - now
            self._run()
            return 0.0
        try:
            if now - self._kept >= config.ttl / 3:
                self._store.keep(self._lease or 0)
                self._kept = now
            term.turn()
        except (Deposed, LeaseGone):
            self._stand_down()
            return 0.0
        if term.closed is not None:
            self.ended = True
            self.resign()
        return TICK_S

    def _run(self) -> None:
        config, store = self._config, self._store
        if self._lease is None:
            self._lease, self._kept = store.grant(config.ttl), config.clock()
        value = schema.Leader(config.token, self._host, self._id(), config.nonce()).dumps()
        leader = self._keys.leader
        try:
            outcome = store.txn([created(leader, 0)], [put(leader, value, self._lease)], [range_(leader)])
        except LeaseGone:
            self._lease = None
            return
        self._run_at = None
        if not outcome.succeeded and not any(kv.lease == self._lease for kv in outcome.found):
            lease, self._lease = self._lease, None
            self._leader = next(iter(outcome.found), None)
            store.revoke(lease)
            return
        found = store.range(f"{self._keys.root}/", prefix=True)
        self._leader = next((kv for kv in found.found if kv.key == leader), None)
        if self._leader is None or self._leader.lease != self._lease:
            self._lease = None
            return
        self.term = Term(store, self._keys, config, self._leader, found, self._born)

    def _stand_down(self) -> None:
        if self.term:
            self._born = self.term.born or self._born  # for when we are elected again
        self.term = self._lease = self._leader = self._run_at = None

    def resign(self) -> None:
        """Resign, so that another is elected at once. Raises EtcdError."""
        lease = self._lease
        self._stand_down()
        if lease is not None:
            self._store.revoke(lease)

    def last(self) -> None:
        """Decide once more by the current keys, and resign. Raises EtcdError."""
        if self.term:
            self.term.listed(self._store.range(f"{self._keys.root}/", prefix=True))
            self.turn()
            self.resign()
