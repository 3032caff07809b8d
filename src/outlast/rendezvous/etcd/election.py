"""Coordination by an elected member, until it exits or its lease expires (docs/decisions/0014).

`Candidate` runs for election and `Term` decides. Neither has threads; `client.Running` adds them. Every write of a term is
conditional on the term's election, so a term that is over cannot write, and its pending output and ledger events are dropped. A
nonce in the leader's key identifies an election because revisions restart if etcd loses its data.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from outlast.base.backoff import RANDOM
from outlast.base.clock import Clock
from outlast.base.errors import EtcdError
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import Ending, State
from outlast.rendezvous import coordinator, messages, who_trains
from outlast.rendezvous.etcd import key_schema
from outlast.rendezvous.etcd.gateway import Etcd, Gone, KeyValue, LeaseGone, Outcome, created, holds, modified, put, range_
from outlast.rendezvous.etcd.member import TTL_S

TICK_S = 0.1
LINGER_S = 600
"""TTL, in seconds, of the published state once no coordinator is left. It also limits how long etcd may be down."""
LISTEN_S = 1.0
"""Seconds for which a new coordinator listens to members if etcd has no state. While etcd is unreachable, members retry their
reports every half second."""
REPORT_S = 3.0
"""Seconds for which a new coordinator waits for a first report, because all members may have been disconnected."""
PASSED = 100
"""Number of generations to skip if etcd has lost its state."""
WHY_S = 0.5
"""Minimum interval, in seconds, between writes that change only the reason for a wait."""
ENDED = 100
JITTER_S = 0.1
"""Maximum random delay, in seconds, before running for election, because all candidates notice the end of a term at once."""


class Deposed(Exception):
    """Raised if another candidate was, or may have been, elected."""


@dataclasses.dataclass(frozen=True)
class ElectionConfig:
    """Settings that are the same in every term."""

    settings: coordinator.Settings
    events: coordinator.EventSink
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    nnodes: str = ""
    """`min:max` under torchrun, where any node may join and --max-restarts limits the restarts; empty in pods."""
    replicas: int = 0
    """Expected number of workers in pods."""
    ttl: int = TTL_S
    """TTL of the leader's lease, in seconds."""
    clock: Callable[[], float] = dataclasses.field(default_factory=Clock)
    """A steady clock, which may stop while this machine sleeps: leases that expire in the meantime are replaced."""
    random: Callable[[], float] = RANDOM.random
    nonce: Callable[[], str] = lambda: secrets.token_hex(4)


class Term:
    """One coordinator's leadership after its election."""

    def __init__(
        self,
        store: Etcd,
        keys: key_schema.Keys,
        config: ElectionConfig,
        leader: KeyValue,
        listing: Outcome,
        incarnation: str = "",
    ) -> None:
        """`leader` is the key that won the election, `listing` contains all keys of the run, and `incarnation` is that of the run
        that the candidate has followed so far, if any."""
        self._store, self._keys, self._config, self.leader = store, keys, config, leader
        # A plain torchrun is not restarted after an exit, and has no equivalent exit code.
        self._settings = replace(config.settings, fences=not config.nnodes, gives_up=not config.nnodes)
        self.clock, self.state = config.clock, coordinator.CoordinatorState({})
        self._lease: int | None = None
        self._renewed_at = 0.0
        self._seen: dict[int, tuple[str, int]] = {}
        """Token and revision of each member's key."""
        self._parked: dict[int, KeyValue] = {}
        """Keys of processes that have taken the index of a member of the world, until the loss of that member is decided."""
        self._effects: list[coordinator.Effect] = []
        """Effects to show once etcd has accepted the state."""
        self._last_published: key_schema.Published | None = None
        self._last_published_at = 0.0
        self._listen_until: float | None = None
        of, now = self._keys, self.clock()
        kv = next((kv for kv in listing.kvs if kv.key == of.published), None)
        last = key_schema.Published.loads(kv.value) if kv else None
        self._published_at = kv.modified if kv else 0
        self._after = 0
        """Last revision of the previous run, whose keys are ignored."""
        members = [kv for kv in listing.kvs if kv.key.startswith(of.members)]
        all_done = last and last.world and set(last.world.members) <= set(last.done)
        own = key_schema.Published(by="", incarnation="")
        if last and (last.closed or (all_done and incarnation != last.incarnation)):
            own = replace(own, incarnation=self._config.nonce(), previous_incarnation=last.incarnation)
            self._after, last = self._published_at, None
        elif last:
            own, self.state = replace(last, why=""), last.restored(now)
        else:
            records = [record for kv in members if (record := key_schema.Record.loads(kv.value)) and record.incarnation]
            newest = max(records, key=lambda record: record.world.generation if record.world else 0, default=None)
            own = replace(own, incarnation=newest.incarnation if newest else self._config.nonce())
            self._listen_until = now + LISTEN_S
        leave_s = self._settings.timeouts.leave
        self._own = replace(own, by=self._config.token, nnodes=self._config.nnodes, leave_s=leave_s)
        """The published fields that are not taken from the coordinator's state."""
        for kv in members:
            self._on_report_key(kv)
        if not self.state.world:
            return
        ranks, generation = self.state.world.members, self.state.world.generation
        for id in set(last.done if last else ()) & set(ranks) - self.state.members.keys():
            self.state = self.state.reported(who_trains.Member(id, "", who_trains.MemberState.DONE, generation, now))
        inside = [member.id for member in self.state.inside]
        if not inside:
            self._listen_until = now + REPORT_S
        if not any(kv.created < self._published_at for kv in members if self._id(kv) in inside):
            self.forgive()  # all members that are back had to reconnect; give the rest time

    @property
    def incarnation(self) -> str:
        """The run's incarnation; empty before it is first published."""
        return self._own.incarnation if self._last_published else ""

    # Members' reports

    def happened(self, events: Iterable[KeyValue | Gone]) -> None:
        """Process events for the run's keys. Raises Deposed."""
        of = self._keys
        for event in events:
            if event.key == of.leader and event != self.leader:
                raise Deposed("another candidate was elected")
            if event.key.startswith(of.members):
                if isinstance(event, KeyValue):
                    self._on_report_key(event)
                else:
                    self._on_key_gone(self._id(event), event.modified)

    def listed(self, listing: Outcome) -> None:
        """Process a listing of all the run's keys, which makes up for missed events."""
        members = {self._id(kv): kv for kv in listing.kvs if kv.key.startswith(self._keys.members)}
        for id in set(self._seen) - set(members):
            self._on_key_gone(id, listing.revision)
        for kv in members.values():
            self._on_report_key(kv)

    def forgive(self) -> None:
        """Reset the deadlines, so that members with expired leases have time to return."""
        self.state = replace(self.state, since=self.clock())

    def _id(self, kv: KeyValue | Gone) -> int:
        number = kv.key.removeprefix(self._keys.members)
        return int(number) if number.isdecimal() else -1

    def _on_report_key(self, kv: KeyValue) -> None:
        record, id = key_schema.Record.loads(kv.value), self._id(kv)
        token, at = self._seen.get(id, ("", 0))
        if record is None or record.report.id != id or kv.modified <= max(at, self._after):
            return  # the record is from another program, or already processed
        if record.nnodes != self._config.nnodes or (record.incarnation and record.incarnation == self._own.previous_incarnation):
            return  # the record is from another job, or from a run that is over
        if record.token in self._own.ended:
            return  # the process was fenced, but does not know that yet
        if token and token != record.token:
            self._take(messages.Gone(id))  # another process has replaced the member
        self._seen[id] = record.token, kv.modified
        self._recover(record)
        report, now = record.report, self.state.world
        if now and id in now.members and (id, record.token) not in zip(now.members, self._own.tokens, strict=False):
            if self.state.called is None:
                self._take(messages.Gone(id))  # another process has this index: it may join the next world
                self._parked[id] = kv
                return
            if report.generation == now.generation and not report.again:
                report = replace(report, generation=now.generation - 1)
        if report.failure:  # dated by its arrival because clocks differ
            report = replace(report, failure={**report.failure, "time": self.clock()})
        failure = report.failure if self._config.nnodes and report.failed else None
        if failure and failure.get("code") == contract.Exit.GIVEN_UP and report.generation >= self.state.generation:
            # Otherwise the world has moved on without this member.
            reason = failure.get("reason", f"worker {id} gives up")
            self._take(Ending(State.FAILED, reason, contract.Exit.FAILED, End.LIMIT))
        self._take(report)

    def _recover(self, record: key_schema.Record) -> None:
        """Recover the world in a member's record if etcd has lost it, and skip the generations that may have followed it."""
        lost, state = record.world, self.state
        if lost and lost.generation > (state.world.generation if state.world else 0):
            if state.called is not None and lost.generation < state.called.generation:
                return
            now = self.clock()
            min_generation = max(state.min_generation, lost.generation + PASSED)
            incarnation = self.incarnation or record.incarnation
            self._own = replace(self._own, incarnation=incarnation, tokens=record.tokens)
            self.state = replace(state, world=replace(lost, at=now), called=None, since=now, min_generation=min_generation)

    def _on_key_gone(self, id: int, revision: int) -> None:
        _, at = self._seen.get(id, ("", 0))
        if id in self._seen and at <= revision:
            del self._seen[id]
            self._parked.pop(id, None)
            self._take(messages.Gone(id))

    # Deciding

    def turn(self) -> None:
        """Decide and publish. Raises EtcdError and Deposed."""
        now = self.clock()
        self._renew_lease()
        if self._listen_until is not None:
            if now >= self._listen_until:
                self._listened()
            else:
                if self.state.world:
                    self._publish()  # restore a state that etcd has lost before its members exit
                return
        for _ in range(10):
            self._publish()  # never decide on top of a state that may not have been written
            if self.state.closed is not None:
                return
            self._unpark()
            before, pods = self.state, frozenset({*range(self._config.replicas), *self.state.reports})
            self._take(coordinator.Tick(None if self._config.nnodes else pods))
            if self.state is before:
                break
        self._publish()

    def _take(self, event: coordinator.Event) -> None:
        """Process an event. Effects that other processes or people can see are delayed until etcd has accepted the state."""
        self.state, effects = coordinator.step(self._settings, self.state, event, self.clock())
        for effect in effects:
            match effect:
                case who_trains.Wait(steady=steady):
                    self._own = replace(self._own, why=steady)
                case who_trains.World(members=ranks):
                    self._own = replace(self._own, tokens=tuple(self._seen[id][0] for id in ranks))
                case coordinator.Fence(id, reason):  # the state lists fenced processes by token
                    ended = [*self._own.ended.items(), (self._seen[id][0], reason)]
                    self._own, self.state = replace(self._own, ended=dict(ended[-ENDED:])), replace(self.state, fenced={})
                case _:
                    self._effects.append(effect)

    def _unpark(self) -> None:
        if self.state.called is not None or self.state.world is None:
            parked, self._parked = self._parked, {}
            for id, kv in parked.items():
                if self._seen.get(id, ("", 0))[1] == kv.modified:  # still the newest
                    del self._seen[id]
                    self._on_report_key(kv)

    def _listened(self) -> None:
        self._listen_until = None
        if self.state.world and not self.state.inside:
            min_generation = max(self.state.min_generation, self.state.generation)
            reason = "no member of the last world is left"
            called = who_trains.Call(min_generation + 1, reason, False, self.clock(), cause=who_trains.Cause.LOST)
            self.state = replace(self.state, world=None, called=called, min_generation=min_generation, since=-math.inf)

    def _state_to_publish(self) -> key_schema.Published:
        state, tokens = self.state.persisted(self.clock()), self._own.tokens if self.state.world else ()
        done = sorted(member.id for member in self.state.inside if member.standing is who_trains.MemberState.DONE)
        return replace(self._own, **vars(state), tokens=tokens, done=tuple(done))

    def _publish(self) -> None:
        """Publish the state if it has changed. Raises Deposed if this term is over."""
        current, last, now = self._state_to_publish(), self._last_published, self.clock()
        new, waits = replace(current, failures=(), lost=()), ""  # ageing is not a change
        if last and replace(new, why=last.why) == last and now - self._last_published_at < WHY_S:
            new = last  # one write covers many members that arrive in quick succession
        if new != last:
            waits = new.why if self.state.world is None and new.why != (last.why if last else "") else ""
            self._write(current.dumps())
            self._last_published, self._last_published_at = new, now
        effects, self._effects = self._effects, []
        for effect in effects:
            coordinator.show(effect, self._config.events)
        if waits:
            self._config.events.say(waits)

    def _write(self, value: str) -> None:
        of, store = self._keys, self._store
        for _ in range(3):
            if self._lease is None:
                self._lease, self._renewed_at = store.grant(LINGER_S), self.clock()
            unchanged = [holds(of.leader, self.leader.value), modified(of.published, self._published_at)]
            try:
                outcome = store.txn(unchanged, [put(of.published, value, self._lease)], [range_(of.leader), range_(of.published)])
            except LeaseGone:
                self._lease = None
                continue
            if outcome.succeeded:
                self._published_at = outcome.revision
                return
            current = {kv.key: kv for kv in outcome.kvs}
            if of.leader not in current or current[of.leader].value != self.leader.value:
                raise Deposed("another candidate was elected, or etcd has lost the election")
            # We lead, so we wrote the current value and its response was lost, or the value's lease has expired.
            self._published_at = current[of.published].modified if of.published in current else 0
        raise EtcdError(f"{of.published} changes although only this process may write it")

    def _renew_lease(self) -> None:
        if self._lease is None or self.clock() - self._renewed_at < LINGER_S / 4:
            return
        try:
            self._store.keep(self._lease)
        except LeaseGone:
            self._lease = self._last_published = None
        self._renewed_at = self.clock()


class Candidate:
    """A process that may be elected. Call `turn` regularly, `listed` with every listing of the keys, and `happened` with their
    events."""

    def __init__(
        self,
        store: Etcd,
        keys: key_schema.Keys,
        config: ElectionConfig,
        *,
        host: str = "",
        id: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._store, self._keys, self._config, self._host, self._id = store, keys, config, host, id
        self.term: Term | None = None
        self.ended = False
        self._at = 0
        self._began: int | None = None
        """Revision of our first listing; None until then."""
        self._incarnation = ""
        self._leader: KeyValue | None = None
        self._lease: int | None = None
        self._renewed_at = 0.0
        self._run_at: float | None = None

    @property
    def prefix(self) -> str:
        """Prefix for the keys to watch."""
        return f"{self._keys.root}/" if self.term else self._keys.decided

    def listed(self, listing: Outcome, below: str = "") -> None:
        """Process a listing of all keys below `prefix`. `below` is the prefix of the request; `prefix` may have changed since."""
        if below and below != self.prefix:
            return  # the listing is outdated; the new prefix is listed as well
        self._at = listing.revision
        current = {kv.key: kv for kv in listing.kvs}
        if self._began is None:
            self._began = listing.revision
        self._leader = current.get(self._keys.leader)
        if kv := current.get(self._keys.published):
            self._on_published(kv)
        if self.term:
            if self._leader != self.term.leader:
                self._stand_down()
                return
            if self._config.clock() - self._renewed_at >= self._config.ttl / 2:
                self.term.forgive()
            self.term.listed(listing)

    def happened(self, events: Iterable[KeyValue | Gone]) -> None:
        events = [event for event in events if event.modified > self._at]
        for event in events:
            self._at = event.modified
            if event.key == self._keys.leader:
                self._leader = event if isinstance(event, KeyValue) else None
            elif event.key == self._keys.published and isinstance(event, KeyValue):
                self._on_published(event)
        if self.term:
            try:
                self.term.happened(events)
            except Deposed:
                self._stand_down()

    def _on_published(self, kv: KeyValue) -> None:
        published = key_schema.Published.loads(kv.value)
        if published is None or published.by == self._config.token:
            return
        if not published.closed:
            if key_schema.live(published, self._leader):
                self._incarnation = published.incarnation
        elif not self.ended and (
            self._incarnation == published.incarnation or (not self._incarnation and kv.modified > (self._began or 0))
        ):
            self.ended = True
            state = State.FAILED if published.closed.code else State.SUCCEEDED
            self._config.events.finished(state, published.closed.reason, published.closed.code)

    def turn(self) -> float:
        """Run for election, coordinate, or wait. Returns the maximum number of seconds until the next turn. Raises EtcdError."""
        config, now = self._config, self._config.clock()
        if self._began is None or (self.ended and not self.term):
            return float(config.ttl)
        term = self.term
        if term is None:
            own = self._leader is not None and self._lease is not None and self._leader.lease == self._lease
            if self._leader is not None and not own:
                self._run_at = None
                return float(config.ttl)
            if self._run_at is None:
                self._run_at = now + JITTER_S * (config.random() + (not self._incarnation))
            if now < self._run_at and not own:
                return self._run_at - now
            self._run()
            return 0.0
        try:
            if now - self._renewed_at >= config.ttl / 3:
                self._store.keep(self._lease or 0)
                self._renewed_at = now
            term.turn()
        except (Deposed, LeaseGone):
            self._stand_down()
            return 0.0
        if term.state.closed is not None:
            self.ended = True
            self.resign()
        return TICK_S

    def _run(self) -> None:
        config, store = self._config, self._store
        if self._lease is None:
            self._lease, self._renewed_at = store.grant(config.ttl), config.clock()
        value = key_schema.Leader(config.token, self._host, self._id(), config.nonce()).dumps()
        leader = self._keys.leader
        try:
            outcome = store.txn([created(leader, 0)], [put(leader, value, self._lease)], [range_(leader)])
        except LeaseGone:
            self._lease = None
            return
        self._run_at = None
        if not outcome.succeeded and not any(kv.lease == self._lease for kv in outcome.kvs):
            lease, self._lease = self._lease, None
            self._leader = next(iter(outcome.kvs), None)
            store.revoke(lease)
            return
        listing = store.range(f"{self._keys.root}/", prefix=True)
        self._leader = next((kv for kv in listing.kvs if kv.key == leader), None)
        if self._leader is None or self._leader.lease != self._lease:
            self._lease = None
            return
        self.term = Term(store, self._keys, config, self._leader, listing, self._incarnation)

    def _stand_down(self) -> None:
        if self.term:
            self._incarnation = self.term.incarnation or self._incarnation  # for our next election
        self.term = self._lease = self._leader = self._run_at = None

    def resign(self) -> None:
        """Resign, so that another candidate is elected at once. Raises EtcdError."""
        lease = self._lease
        self._stand_down()
        if lease is not None:
            self._store.revoke(lease)

    def last(self) -> None:
        """Decide one last time from the current keys, then resign. Raises EtcdError."""
        if self.term:
            self.term.listed(self._store.range(f"{self._keys.root}/", prefix=True))
            self.turn()
            self.resign()
