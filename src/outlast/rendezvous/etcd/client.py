"""A member's client for the etcd v3 rendezvous, for torchrun anywhere and for pods without an operator. See
docs/decisions/0014-rendezvous-by-etcd.md and docs/guide/torchrun.md.

This module connects `member.EtcdMember` and `election.Candidate` to etcd, and provides `look`, which reads the state of runs for
people. While etcd is unreachable, training continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.base.backoff import ConnectionLog, pause
from outlast.base.errors import EtcdError, OutlastError
from outlast.job.contract import Env
from outlast.rendezvous.etcd import gateway, key_schema
from outlast.rendezvous.etcd.member import EtcdMember, Identity
from outlast.rendezvous.messages import Closed, Published, Report
from outlast.rendezvous.who_trains import Call, World

if TYPE_CHECKING:
    from outlast.rendezvous.etcd.election import ElectionConfig
    from outlast.rendezvous.transport import Member

LEAST_TTL_S = 2
"""The shortest TTL, in seconds, that etcd grants by default."""
LONGEST_PAUSE_S = 0.5
"""Longest pause, in seconds, between attempts while etcd is unreachable."""
LIST_S = 10.0
"""Seconds after which watched keys are listed again, because a watch may die silently. Arbitrary."""
LAST_S = 1.0
CLOSE_S = 2.0
"""Seconds for which a finished member remains a candidate, because one of the members must close the run."""


def _answer_s(ttl: int) -> float:
    """Return the timeout for a request to one endpoint. It leaves time to renew a lease through another endpoint."""
    return min(gateway.ANSWER_S, ttl / 3)


class Listener:
    """Lists and watches all keys with a prefix."""

    def __init__(self, client: gateway.Etcd) -> None:
        self._client = client
        self._again = threading.Event()
        self.over = False

    def changes(self, prefix: str) -> Iterator[gateway.Outcome | Sequence[gateway.KeyValue | gateway.Gone]]:
        """Yield a listing of the keys, then their events, until `again` or `close` is called. Raises EtcdError."""
        self._again.clear()
        if self.over:  # after `clear`, to notice a concurrent `close`
            return
        try:
            listing = self._client.range(prefix, prefix=True)
            yield listing
            with contextlib.closing(self._client.watch(prefix, listing.revision)) as watch:
                for events in watch:
                    if self._again.is_set():
                        return
                    if events:
                        yield events
        except EtcdError:
            if not self._again.is_set():
                raise

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt. `again` and `close` end the wait early."""
        self._again.wait(seconds)

    def again(self) -> None:
        """End `changes`, so that its caller lists the keys again."""
        self._again.set()
        self._client.interrupt()

    def close(self) -> None:
        self.over = True
        self.again()


class Board:
    """A member's side of the rendezvous; see `member_client.Board`."""

    def __init__(self, where: gateway.Address, who: Identity, *, name: str = "") -> None:
        """`name` is the run's name in etcd; the default is `who.run`."""
        self.etcd = gateway.Etcd(where, answer_s=_answer_s(who.ttl))
        self.keys = key_schema.Keys.of(where.prefix, name or who.run)
        self.membership = EtcdMember(self.etcd, self.keys, who)
        self.run, self._ttl = who.run, who.ttl
        self.put_log = ConnectionLog("this worker does not reach the others", "this worker reaches the others again")
        self.watch_log = ConnectionLog()  # silent because `put` notices an outage, too
        self._listener, self._listed_at = Listener(self.etcd), time.monotonic()

    @property
    def id(self) -> int:
        return self.membership.id

    def put(self, report: Report) -> float | None:
        try:
            if not self.membership.synced:
                self.etcd.range(self.keys.published)  # etcd is reachable: wait for the listing before we write
                return None
            if time.monotonic() - self._listed_at >= LIST_S:
                self._listed_at = time.monotonic()
                self._listener.again()
            self.membership.report = report
            self.membership.publish()
        except EtcdError:
            self.etcd.interrupt()  # the watched endpoint may be dead
            raise
        return self._ttl / 3

    def watch(self) -> Generator[bool]:
        for change in self._listener.changes(self.keys.decided):
            if isinstance(change, gateway.Outcome):
                self.membership.listed(change)
            else:
                self.membership.happened(change)
            yield False

    def published(self) -> Published:
        known = self.membership
        return Published(known.called, known.world, known.closed, known.why)

    def pause_s(self, failures: int, *, changed: bool) -> float:
        return pause(failures, LONGEST_PAUSE_S)

    def close(self) -> None:
        self._listener.close()

    def leave(self, *, reachable: bool) -> None:
        """Remove our key, and disconnect. A final report remains until its lease expires."""
        if reachable:
            with contextlib.suppress(EtcdError):
                self.membership.leave()
        self.etcd.close()


class Running:
    """A candidate and its threads. `id` returns the process's member index; None until it has one."""

    def __init__(
        self, where: gateway.Address, name: str, config: ElectionConfig, *, id: Callable[[], int | None] = lambda: None
    ) -> None:
        from outlast.rendezvous.etcd import election

        self.etcd = gateway.Etcd(where, answer_s=_answer_s(config.ttl))
        keys = key_schema.Keys.of(where.prefix, name)
        self._candidate = election.Candidate(self.etcd, keys, config, host=socket.gethostname(), id=id)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listener = Listener(self.etcd)
        self._listening = threading.Thread(target=self._listen, name="outlast-etcd-watch", daemon=True)
        self._close_by: float | None = None
        self._printed_bug = False
        self._thread = threading.Thread(target=self._run, name="outlast-candidate", daemon=True)

    @property
    def ended(self) -> bool:
        return self._candidate.ended

    def start(self) -> None:
        self._listening.start()
        self._thread.start()

    def close(self, *, done: bool = False) -> None:
        """Decide one last time if etcd answers promptly, then resign. If training is done, first wait up to CLOSE_S for a
        coordinator to close the run."""
        self._close_by = time.monotonic() + (CLOSE_S if done else 0.0)
        self._inbox.put(None)
        if self._thread.ident:
            self._thread.join((CLOSE_S if done else 0.0) + LAST_S)
        self.etcd.close()

    def _listen(self) -> None:
        failures = 0
        while not self._listener.over:
            try:
                prefix = self._candidate.prefix
                for change in self._listener.changes(prefix):
                    failures = 0
                    self._inbox.put(functools.partial(self._on_change, change, prefix))
            except Exception as problem:
                failures += 1
                if failures == 1 and not isinstance(problem, EtcdError):  # the deciding thread prints EtcdErrors
                    print(f"outlast | the keys in etcd cannot be read; trying again:\n{traceback.format_exc()}", flush=True)
                self._listener.pause(pause(failures, LONGEST_PAUSE_S))

    def _on_change(self, change: gateway.Outcome | Sequence[gateway.KeyValue | gateway.Gone], prefix: str) -> None:
        if isinstance(change, gateway.Outcome):
            self._candidate.listed(change, prefix)
        else:
            self._candidate.happened(change)

    def _run(self) -> None:
        line, failures = ConnectionLog("the rendezvous cannot be decided", "the rendezvous can be decided again"), 0
        prefix, listed = self._candidate.prefix, time.monotonic()
        while True:
            try:
                pause_s = self._candidate.turn()
                line.restored()
                failures = 0
            except EtcdError as problem:
                failures += 1
                if self._candidate.term:
                    line.broken(problem)
                self.etcd.interrupt()
                pause_s = pause(failures, LONGEST_PAUSE_S)
            except Exception:
                failures += 1
                self._on_bug()
                pause_s = LONGEST_PAUSE_S
            if prefix != self._candidate.prefix or time.monotonic() - listed >= LIST_S:
                prefix, listed = self._candidate.prefix, time.monotonic()
                self._listener.again()
            if self._close_by is not None and (self.ended or failures or time.monotonic() >= self._close_by):
                break
            self._take_inbox(min(pause_s, LIST_S if self._close_by is None else 0.1))
        self._listener.close()
        with contextlib.suppress(EtcdError):
            self._candidate.last()

    def _take_inbox(self, timeout_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            task = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if task:
                    try:
                        task()
                    except Exception:
                        self._on_bug()
                task = self._inbox.get_nowait()

    def _on_bug(self) -> None:
        """Resign after an unexpected exception, so that another candidate tries."""
        if not self._printed_bug:
            print(
                f"outlast | this worker could not decide, and resigns for another worker:\n{traceback.format_exc()}", flush=True
            )
        self._printed_bug = True
        with contextlib.suppress(EtcdError):
            self._candidate.resign()


# The interface of a transport; see `rendezvous.transport`


def board(endpoint: str, member: Member) -> Board:
    """Return the member's side of an endpoint. Raises OutlastError in a pod from an older operator, which relied on an etcd."""
    if Env.MEMBER in member.environ:
        raise OutlastError(f"this pod's operator requires a rendezvous at {endpoint}, which is gone; upgrade it: outlast install")
    name = key_schema.run_name(member.run, member.environ)
    return Board(gateway.address(endpoint), Identity(member.run, member.id, generation=member.generation), name=name)


# The state of runs, for people


@dataclass(frozen=True)
class Present:
    report: Report
    left_s: int | None
    """Seconds left in the member's lease; None if the lease has just expired."""
    decides: bool


@dataclass(frozen=True)
class Run:
    name: str
    members: tuple[Present, ...]
    coordinator: key_schema.Leader | None
    """The coordinator; None before an election and after the end."""
    world: World | None = None
    called: Call | None = None
    """The pending call, if any."""
    closed: Closed | None = None
    why: str = ""
    """The coordinator's reason for waiting, or a description of normal training."""
    nnodes: str = ""
    """`min:max` of torchrun's --nnodes."""
    left_s: int | None = None
    """Seconds until the published state expires unless it is renewed; None if nothing is published."""


def look(client: gateway.Etcd, run: str | None = None) -> list[Run]:
    """Read all runs below an etcd's prefix, or only those that `run` names: a single run, or a job's runs (`team/job`). Raises
    EtcdError.

        with contextlib.closing(gateway.Etcd(gateway.address("etcd://host:2379"))) as client: ...
    """
    prefix = client.address.prefix
    kvs = client.range(f"{prefix}/" if run is None else key_schema.Keys.of(prefix, run).root, prefix=True).kvs
    names = sorted({name for kv in kvs if (name := key_schema.run_of(prefix, kv.key))})
    if run is not None:
        names = [name for name in names if name == run or name.startswith(f"{run}/")]

    @functools.cache
    def left(lease: int) -> int | None:
        return client.left(lease) if lease else None

    runs = []
    for name in names:
        of = key_schema.Keys.of(prefix, name)
        own = {kv.key: kv for kv in kvs if kv.key.startswith(f"{of.root}/")}
        leader = key_schema.Leader.loads(own[of.leader].value) if of.leader in own else None
        state = key_schema.Published.loads(own[of.published].value) if of.published in own else None
        records = [(key_schema.Record.loads(kv.value), kv.lease) for key, kv in own.items() if key.startswith(of.members)]
        members = [
            Present(record.report, left(lease), leader is not None and leader.id == record.report.id)
            for record, lease in records
            if record
        ]
        run_ = Run(name, tuple(sorted(members, key=lambda member: member.report.id)), leader)
        if state:
            published = {each: getattr(state, each) for each in ("world", "called", "closed", "why", "nnodes")}
            run_ = dataclasses.replace(run_, **published, left_s=left(own[of.published].lease))
        runs.append(run_)
    return runs
