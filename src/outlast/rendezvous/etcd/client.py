"""A member's client of the etcd v3 rendezvous, for torchrun anywhere and for pods without an operator.
Docs: docs/decisions/0014-rendezvous-by-etcd.md, docs/guide/torchrun.md.

This module has the threads around `member.Membership` and `election.Candidate`, and `look`, which reads the state of runs for
people. While etcd is unreachable, the last published state stays valid and training continues; no error is raised here.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.base.backoff import ConnectionLog, pause
from outlast.base.errors import EtcdError, Superseded
from outlast.job import contract
from outlast.rendezvous.etcd import gateway, key_schema
from outlast.rendezvous.etcd.member import Identity, Membership
from outlast.rendezvous.transports.sockets import Called, Closed, Report
from outlast.rendezvous.world import Call, World

if TYPE_CHECKING:
    from outlast.rendezvous.etcd.election import ElectionConfig

LEAST_TTL_S = 2
"""The shortest TTL that etcd grants with its usual election timeout of 1 s, in seconds."""
LONGEST_PAUSE_S = 0.5
"""Longest pause between two attempts while etcd is unreachable, in seconds."""
LIST_S = 10.0
"""Interval between listings of watched keys in seconds, since a watch may die silently. Arbitrary."""
LAST_S = 1.0
"""Time in seconds that a leaving member waits for the write of its last report."""
CLOSE_S = 2.0
"""Time in seconds that a finished member remains a candidate, since one of the members must close the run."""


def _answer_s(ttl: int) -> float:
    """Return the timeout of a request to one endpoint. Another endpoint must still be able to renew a lease, which is due every
    third of its TTL."""
    return min(gateway.ANSWER_S, ttl / 3)


class Listener:
    """A thread that lists and watches all keys with a prefix, and lists them again after each broken watch."""

    def __init__(
        self,
        client: gateway.Etcd,
        prefix: Callable[[], str],
        listed: Callable[[gateway.Outcome, str], None],
        happened: Callable[[Sequence[gateway.KeyValue | gateway.Gone]], None],
    ) -> None:
        self._client, self._prefix, self._listed, self._happened = client, prefix, listed, happened
        self._stop = threading.Event()
        self._again = threading.Event()
        self.thread = threading.Thread(target=self._run, name="outlast-etcd-watch", daemon=True)

    def again(self) -> None:
        """List the keys again, with the current prefix."""
        self._again.set()
        self._client.interrupt()

    def stop(self) -> None:
        self._stop.set()
        self.again()

    def _run(self) -> None:
        failures = 0
        while True:
            self._again.clear()
            if self._stop.is_set():  # after `clear`, to notice a concurrent `stop`
                return
            try:
                prefix = self._prefix()
                listing = self._client.range(prefix, prefix=True)
                self._listed(listing, prefix)
                failures = 0
                with contextlib.closing(self._client.watch(prefix, listing.revision)) as watch:
                    for events in watch:
                        if self._again.is_set():
                            break
                        if events:
                            self._happened(events)
            except EtcdError:  # the writing thread prints it
                if not self._again.is_set():
                    failures += 1
                    self._again.wait(pause(failures, LONGEST_PAUSE_S))
            except Exception:  # without this thread the process would silently miss all news
                failures += 1
                if failures == 1:
                    print(
                        f"outlast | the keys in etcd could not be processed; trying again:\n{traceback.format_exc()}", flush=True
                    )
                self._again.wait(LONGEST_PAUSE_S)


class Client:
    """A member's client, which connects at its first `report`."""

    def __init__(self, where: gateway.Address, who: Identity, *, name: str = "") -> None:
        """`name` is the run's name in etcd, by default `who.run`."""
        self.etcd = gateway.Etcd(where, answer_s=_answer_s(who.ttl))
        of = key_schema.Keys.of(where.prefix, name or who.run)
        self._membership = Membership(self.etcd, of, who)
        self._of, self._ttl = of, who.ttl
        self._changed = threading.Condition()
        self._version, self._written_version = 0, 0
        """Version of our report, incremented by each change, and the version in etcd."""
        self._stop = threading.Event()
        self._reachable = True
        self._listener = Listener(self.etcd, lambda: of.decided, self._listed, self._happened)
        self._writer = threading.Thread(target=self._write_loop, name="outlast-etcd", daemon=True)

    # Interface of `transport.Client`

    @property
    def id(self) -> int:
        return self._membership.id

    @property
    def called(self) -> Called | None:
        return self._membership.called

    @property
    def world(self) -> World | None:
        return self._membership.world

    @property
    def closed(self) -> Closed | None:
        return self._membership.closed

    @property
    def why(self) -> str:
        """The coordinator's reason to wait."""
        return self._membership.why

    def report(self, standing: str, **fields: Any) -> None:
        """See `transport.Client.report`. Returns before the report is written."""
        with self._changed:
            self._membership.report = self._membership.report.changed(standing, **fields)
            self._version += 1
            self._changed.notify_all()
        if not self._writer.ident:
            self._listener.thread.start()
            self._writer.start()

    def amend(self, **fields: Any) -> None:
        """See `transport.Client.amend`."""
        with self._changed:
            self._membership.report = dataclasses.replace(self._membership.report, **fields)
            self._version += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """See `transport.Client.wait`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Leave; first write the last report if etcd is reachable. A final report remains until the lease expires."""
        with self._changed:
            if self._writer.ident and not self._stop.is_set() and self._reachable:
                self._changed.wait_for(lambda: self._written_version == self._version or not self._reachable, LAST_S)
            first = not self._stop.is_set()
            self._stop.set()
            self._changed.notify_all()
        self._listener.stop()
        if self._writer.ident and first:
            self._writer.join(LAST_S)
            if not self._writer.is_alive() and self._reachable:
                with contextlib.suppress(EtcdError):
                    self._membership.leave()
        self.etcd.close()

    # Threads

    def _listed(self, listing: gateway.Outcome, prefix: str) -> None:
        with self._changed:
            self._membership.listed(listing)
            self._changed.notify_all()

    def _happened(self, events: Sequence[gateway.KeyValue | gateway.Gone]) -> None:
        with self._changed:
            self._membership.happened(events)
            self._changed.notify_all()

    def _write_loop(self) -> None:
        line = ConnectionLog("this worker does not reach the others", "this worker reaches the others again")
        failures, listed = 0, time.monotonic()
        while not self._stop.is_set():
            with self._changed:
                number = self._version
            try:
                if not self._membership.synced:
                    self.etcd.range(self._of.published)  # etcd is reachable: wait for the listing before we write
                    with self._changed:
                        self._changed.wait_for(lambda: self._membership.synced or self._stop.is_set(), LAST_S)
                    continue
                if time.monotonic() - listed >= LIST_S:
                    listed = time.monotonic()
                    self._listener.again()
                self._membership.publish()
            except Superseded as problem:
                self._end(str(problem), contract.Exit.INTERRUPTED)
                return
            except EtcdError as problem:
                failures += 1
                line.broken(problem)
                self.etcd.interrupt()  # the watched endpoint may be dead
                with self._changed:
                    self._reachable = False
                    self._changed.notify_all()
                self._stop.wait(pause(failures, LONGEST_PAUSE_S))
                continue
            except Exception as bug:  # without this thread the worker cannot report
                self._end(f"the rendezvous has failed: {bug!r}", contract.Exit.FAILED)
                raise
            line.restored()
            with self._changed:
                failures, self._written_version, self._reachable = 0, number, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._version != self._written_version or self._stop.is_set(), self._ttl / 3)

    def _end(self, reason: str, code: int) -> None:
        with self._changed:
            if not self.closed:
                print(f"outlast | {reason}", flush=True)
                self._membership.closed = Closed(reason, code)
            self._reachable = False
            self._changed.notify_all()


class Running:
    """A candidate and its threads, in a process that may coordinate a run. `id` returns the index of the process's member; None
    before it has one."""

    def __init__(
        self, where: gateway.Address, name: str, config: ElectionConfig, *, id: Callable[[], int | None] = lambda: None
    ) -> None:
        from outlast.rendezvous.etcd import election

        self.etcd = gateway.Etcd(where, answer_s=_answer_s(config.ttl))
        keys = key_schema.Keys.of(where.prefix, name)
        self._candidate = election.Candidate(self.etcd, keys, config, host=socket.gethostname(), id=id)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listener = Listener(self.etcd, lambda: self._candidate.prefix, self._listed, self._happened)
        self._close_by: float | None = None
        self._printed_bug = False
        self._thread = threading.Thread(target=self._run, name="outlast-candidate", daemon=True)

    @property
    def ended(self) -> bool:
        """True if the run is over."""
        return self._candidate.ended

    def start(self) -> None:
        """Run for election in the background."""
        self._listener.thread.start()
        self._thread.start()

    def wait(self) -> None:
        """Decide a last time, and resign. Gives up the decision if etcd does not answer at once."""
        self.close()

    def close(self, *, done: bool = False) -> None:
        """Decide a last time, and resign. If training is done, first wait up to CLOSE_S for a coordinator to close the run."""
        self._close_by = time.monotonic() + (CLOSE_S if done else 0.0)
        self._inbox.put(None)
        if self._thread.ident:
            self._thread.join((CLOSE_S if done else 0.0) + LAST_S)
        self.etcd.close()

    def _listed(self, listing: gateway.Outcome, prefix: str) -> None:
        self._inbox.put(lambda: self._candidate.listed(listing, prefix))

    def _happened(self, events: Sequence[gateway.KeyValue | gateway.Gone]) -> None:
        self._inbox.put(lambda: self._candidate.happened(events))

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
        self._listener.stop()
        with contextlib.suppress(EtcdError):
            self._candidate.last()

    def _take_inbox(self, timeout_s: float) -> None:
        """Wait for an entry in the inbox, then process all entries."""
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
        """Handle an unexpected exception, from a bug or from unreadable data in etcd: resign, so that another candidate tries,
        and retry later."""
        if not self._printed_bug:
            print(
                f"outlast | this worker could not decide, and resigns for another worker:\n{traceback.format_exc()}", flush=True
            )
        self._printed_bug = True
        with contextlib.suppress(EtcdError):
            self._candidate.resign()


# The state of runs, for people


@dataclass(frozen=True)
class Present:
    """A member with a key in etcd."""

    report: Report
    left_s: int | None
    """Remaining seconds of the member's lease; None if the lease has just expired."""
    decides: bool


@dataclass(frozen=True)
class Run:
    """The state of a run in etcd."""

    name: str
    members: tuple[Present, ...]
    """The members, sorted by id."""
    coordinator: key_schema.Leader | None
    """The coordinator; None before an election and after the end."""
    world: World | None = None
    called: Call | None = None
    """The pending call, for a newer generation than the world's."""
    closed: Closed | None = None
    why: str = ""
    """The coordinator's reason to wait, or a description of normal training."""
    nnodes: str = ""
    """`min:max` of torchrun's --nnodes, on which members must agree."""
    left_s: int | None = None
    """Seconds until the published state expires without renewal; None without a published state."""


def look(client: gateway.Etcd, run: str | None = None) -> list[Run]:
    """Read all runs below the prefix of an etcd, or only the run or the runs of the job (`team/job`) named by `run`. Raises
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
