"""A member's client of a rendezvous by etcd v3: under torchrun anywhere, and in pods without an operator.
Docs: docs/decisions/0014-rendezvous-by-etcd.md, docs/guide/torchrun.md.

This module has the threads around `member.Membership` and `election.Candidate`, and `look`, which shows people the state of runs.
While etcd is unreachable, the last published state stays valid and training goes on; no error is raised here.
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

from outlast.base.backoff import Line, pause
from outlast.base.errors import EtcdError, Superseded
from outlast.job import contract
from outlast.rendezvous.etcd import gateway, schema
from outlast.rendezvous.etcd.member import Identity, Membership
from outlast.rendezvous.transports.sockets import Called, Closed, Report
from outlast.rendezvous.world import Call, World

if TYPE_CHECKING:
    from outlast.rendezvous.etcd.election import ElectionConfig

LEAST_TTL_S = 2
"""The shortest TTL that etcd grants, with its usual election timeout of 1 s."""
LONGEST_PAUSE_S = 0.5
"""Longest pause between two attempts while etcd is unreachable."""
LIST_S = 10.0
"""Interval at which watched keys are listed again, in case a watch has died silently. Arbitrary."""
LAST_S = 1.0
"""How long a leaving member waits until its last report is written."""
CLOSE_S = 2.0
"""How long a finished member stays a candidate: all members finish at about the same time, and one of them has to close the
run."""


def _answer_s(ttl: int) -> float:
    """Timeout of a request to one endpoint: short enough that another endpoint can still renew a lease, which is due every third
    of its TTL."""
    return min(gateway.ANSWER_S, ttl / 3)


class Listener:
    """A thread that lists all keys with a prefix and watches them until it is stopped; it lists again whenever the watch
    breaks."""

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
        """List again; the prefix may have changed."""
        self._again.set()
        self._client.interrupt()

    def stop(self) -> None:
        self._stop.set()
        self.again()

    def _run(self) -> None:
        failures = 0
        while True:
            self._again.clear()
            if self._stop.is_set():  # checked after `clear`, or a call of `stop` would be missed
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
            except Exception:  # without this thread its process would receive nothing any more, and go on as if all were well
                failures += 1
                if failures == 1:
                    print(
                        f"outlast | what stands in etcd could not be taken in; trying again:\n{traceback.format_exc()}",
                        flush=True,
                    )
                self._again.wait(LONGEST_PAUSE_S)


class Client:
    """A member's client. It does not connect before the first `report`."""

    def __init__(self, where: gateway.Address, who: Identity, *, name: str = "") -> None:
        """`name` is the run's name in etcd; default: `who.run`."""
        self.etcd = gateway.Etcd(where, answer_s=_answer_s(who.ttl))
        of = schema.Keys.of(where.prefix, name or who.run)
        self._membership = Membership(self.etcd, of, who)
        self._of, self._ttl = of, who.ttl
        self._changed = threading.Condition()
        self._version, self._written_version = 0, 0
        """Version of our report, which grows with each change, and the version that etcd has."""
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
        """Why the coordinator waits."""
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
        """Leave, after the last report is written if etcd is reachable. The report of a finished member stays for a while."""
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
        line = Line("this worker does not reach the others", "this worker reaches the others again")
        failures, listed = 0, time.monotonic()
        while not self._stop.is_set():
            with self._changed:
                number = self._version
            try:
                if not self._membership.synced:
                    self.etcd.range(self._of.published)  # etcd is reachable: it must be listed before we write
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
            except Exception as bug:  # without this thread the worker no longer reports
                self._end(f"the rendezvous has failed: {bug!r}", contract.Exit.FAILED)
                raise
            line.well()
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
    """A candidate and its threads; each process that may coordinate a run has one. `id` returns the index of the process's
    member, or None before it has one."""

    def __init__(
        self, where: gateway.Address, name: str, config: ElectionConfig, *, id: Callable[[], int | None] = lambda: None
    ) -> None:
        from outlast.rendezvous.etcd import election

        self.etcd = gateway.Etcd(where, answer_s=_answer_s(config.ttl))
        keys = schema.Keys.of(where.prefix, name)
        self._candidate = election.Candidate(self.etcd, keys, config, host=socket.gethostname(), id=id)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listener = Listener(self.etcd, lambda: self._candidate.prefix, self._listed, self._happened)
        self._close_by: float | None = None
        self._complained = False
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
        """Resign after a last decision; waits for the decision as long as etcd answers at once."""
        self.close()

    def close(self, *, done: bool = False) -> None:
        """Like `wait`; if training is done, first wait up to CLOSE_S for a coordinator to close the run."""
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
        line, failures = Line("the rendezvous cannot be decided", "the rendezvous can be decided again"), 0
        prefix, listed = self._candidate.prefix, time.monotonic()
        while True:
            try:
                pause_s = self._candidate.turn()
                line.well()
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
        """Process everything in the inbox, after waiting for the first entry."""
        with contextlib.suppress(queue.Empty):
            received = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if received:
                    try:
                        received()
                    except Exception:
                        self._on_bug()
                received = self._inbox.get_nowait()

    def _on_bug(self) -> None:
        """Handle an unexpected exception: either etcd holds something unreadable or there is a bug. Step down, let another
        candidate try, and retry later."""
        if not self._complained:
            print(f"outlast | this worker could not decide, and lets another try:\n{traceback.format_exc()}", flush=True)
        self._complained = True
        with contextlib.suppress(EtcdError):
            self._candidate.resign()


# The state of runs, for people


@dataclass(frozen=True)
class Present:
    """A member that has a key in etcd."""

    report: Report
    left_s: int | None
    """Remaining seconds of the member's lease; None if the lease ended while we looked."""
    decides: bool


@dataclass(frozen=True)
class Run:
    """A run as recorded in etcd."""

    name: str
    members: tuple[Present, ...]
    """The members, by id."""
    coordinator: schema.Leader | None
    """The coordinator; None until one is elected, and after the end."""
    world: World | None = None
    called: Call | None = None
    """The pending call, of a newer generation than the world's."""
    closed: Closed | None = None
    why: str = ""
    """The coordinator's reason to wait, or a sentence that all is well."""
    nnodes: str = ""
    """`min:max`, if members have to agree on it (torchrun's --nnodes)."""
    left_s: int | None = None
    """Seconds until the published state expires if it is not renewed; None if there is none."""


def look(client: gateway.Etcd, run: str | None = None) -> list[Run]:
    """Return all runs below the prefix of an etcd, or only the run or the runs of the job (`team/job`) that `run` names. Changes
    nothing. Raises EtcdError.

    with contextlib.closing(gateway.Etcd(gateway.address("etcd://host:2379"))) as client: ...
    """
    prefix = client.address.prefix
    kvs = client.range(f"{prefix}/" if run is None else schema.Keys.of(prefix, run).root, prefix=True).kvs
    names = sorted({name for kv in kvs if (name := schema.run_of(prefix, kv.key))})
    if run is not None:
        names = [name for name in names if name == run or name.startswith(f"{run}/")]

    @functools.cache
    def left(lease: int) -> int | None:
        return client.left(lease) if lease else None

    runs = []
    for name in names:
        of = schema.Keys.of(prefix, name)
        own = {kv.key: kv for kv in kvs if kv.key.startswith(f"{of.root}/")}
        leader = schema.Leader.loads(own[of.leader].value) if of.leader in own else None
        state = schema.Published.loads(own[of.published].value) if of.published in own else None
        records = [(schema.Record.loads(kv.value), kv.lease) for key, kv in own.items() if key.startswith(of.members)]
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
