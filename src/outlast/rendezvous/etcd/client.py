"""A member's client of a rendezvous by etcd v3: under torchrun anywhere, and in pods without an operator.
Docs: docs/decisions/0014-rendezvous-by-etcd.md, docs/guide/torchrun.md.

The threads around `member.Membership` and `election.Candidate`, and `look`, which shows people what they have written. While etcd
is away, the last published state stays valid and training goes on; no error is raised here.
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
"""What an etcd grants at least, with its usual election timeout of 1 s."""
LONGEST_PAUSE_S = 0.5
"""Between two attempts while etcd is away."""
LIST_S = 10.0
"""How often what is watched is read again, in case a watch has died without a word. Arbitrary."""
LAST_S = 1.0
"""How long a member that goes waits for its last report to be taken."""
CLOSE_S = 2.0
"""How long one that has finished stays a candidate: all finish at about the same time, and one has to say that it is over."""


def _answer_s(ttl: int) -> float:
    """How long an endpoint may take: if it hangs, another can renew a lease that is renewed every third of its time."""
    return min(gateway.ANSWER_S, ttl / 3)


class Listener:
    """Lists what begins with a prefix and watches it, from a thread, until it is stopped; again whenever the watch breaks."""

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
        """List again, and perhaps something else."""
        self._again.set()
        self._client.interrupt()

    def stop(self) -> None:
        self._stop.set()
        self.again()

    def _run(self) -> None:
        failures = 0
        while True:
            self._again.clear()
            if self._stop.is_set():  # looked at after that, or a call to stop would be forgotten
                return
            try:
                prefix = self._prefix()
                found = self._client.range(prefix, prefix=True)
                self._listed(found, prefix)
                failures = 0
                with contextlib.closing(self._client.watch(prefix, found.revision)) as watch:
                    for events in watch:
                        if self._again.is_set():
                            break
                        if events:
                            self._happened(events)
            except EtcdError:  # who tells says it
                if not self._again.is_set():
                    failures += 1
                    self._again.wait(pause(failures, LONGEST_PAUSE_S))
            except Exception:  # without this thread its process would hear nothing any more, and go on as if all were well
                failures += 1
                if failures == 1:
                    print(
                        f"outlast | what stands in etcd could not be taken in; trying again:\n{traceback.format_exc()}",
                        flush=True,
                    )
                self._again.wait(LONGEST_PAUSE_S)


class Client:
    """A member's side. Nothing connects before `report`."""

    def __init__(self, where: gateway.Address, who: Identity, *, name: str = "") -> None:
        """`name` is what the run is called in etcd, if that is not `who.run`."""
        self.etcd = gateway.Etcd(where, answer_s=_answer_s(who.ttl))
        of = schema.Keys.of(where.prefix, name or who.run)
        self._membership = Membership(self.etcd, of, who)
        self._of, self._ttl = of, who.ttl
        self._changed = threading.Condition()
        self._asked, self._taken = 0, 0
        """How many times the report has changed, and which of these etcd has."""
        self._stop = threading.Event()
        self._reachable = True
        self._listener = Listener(self.etcd, lambda: of.decided, self._listed, self._happened)
        self._teller = threading.Thread(target=self._tell, name="outlast-etcd", daemon=True)

    # As `transport.Client`

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
        """What the coordinator waits for."""
        return self._membership.why

    def report(self, standing: str, **fields: Any) -> None:
        """Say what this member is now; fields as in `local.Report`, the others stay. Returns before it has been said."""
        with self._changed:
            self._membership.report = self._membership.report.changed(standing, **fields)
            self._asked += 1
            self._changed.notify_all()
        if not self._teller.ident:
            self._listener.thread.start()
            self._teller.start()

    def amend(self, **fields: Any) -> None:
        """Change what is reported beside the standing; nothing is said before the first `report`."""
        with self._changed:
            self._membership.report = dataclasses.replace(self._membership.report, **fields)
            self._asked += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when something was decided, or after the timeout."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Go, once the last report has been taken if etcd is there. Who has finished stays known for a while."""
        with self._changed:
            if self._teller.ident and not self._stop.is_set() and self._reachable:
                self._changed.wait_for(lambda: self._taken == self._asked or not self._reachable, LAST_S)
            first = not self._stop.is_set()
            self._stop.set()
            self._changed.notify_all()
        self._listener.stop()
        if self._teller.ident and first:
            self._teller.join(LAST_S)
            if not self._teller.is_alive() and self._reachable:
                with contextlib.suppress(EtcdError):
                    self._membership.leave()
        self.etcd.close()

    # Threads

    def _listed(self, found: gateway.Outcome, prefix: str) -> None:
        with self._changed:
            self._membership.listed(found)
            self._changed.notify_all()

    def _happened(self, events: Sequence[gateway.KeyValue | gateway.Gone]) -> None:
        with self._changed:
            self._membership.happened(events)
            self._changed.notify_all()

    def _tell(self) -> None:
        line = Line("this worker does not reach the others", "this worker reaches the others again")
        failures, listed = 0, time.monotonic()
        while not self._stop.is_set():
            with self._changed:
                number = self._asked
            try:
                if not self._membership.heard:
                    self.etcd.range(self._of.said)  # it is there: to be listened to before anything is said
                    with self._changed:
                        self._changed.wait_for(lambda: self._membership.heard or self._stop.is_set(), LAST_S)
                    continue
                if time.monotonic() - listed >= LIST_S:
                    listed = time.monotonic()
                    self._listener.again()
                self._membership.tell()
            except Superseded as problem:
                self._end(str(problem), contract.Exit.INTERRUPTED)
                return
            except EtcdError as problem:
                failures += 1
                line.broken(problem)
                self.etcd.interrupt()  # what we listen to may be no more
                with self._changed:
                    self._reachable = False
                    self._changed.notify_all()
                self._stop.wait(pause(failures, LONGEST_PAUSE_S))
                continue
            except Exception as bug:  # without this thread the worker reports no more
                self._end(f"the rendezvous has failed: {bug!r}", contract.Exit.FAILED)
                raise
            line.well()
            with self._changed:
                failures, self._taken, self._reachable = 0, number, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._asked != self._taken or self._stop.is_set(), self._ttl / 3)

    def _end(self, reason: str, code: int) -> None:
        with self._changed:
            if not self.closed:
                print(f"outlast | {reason}", flush=True)
                self._membership.closed = Closed(reason, code)
            self._reachable = False
            self._changed.notify_all()


class Running:
    """A candidate with its threads: each process that may coordinate a run has one. `id` is its member's, once it has one."""

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
        """Whether the run is over."""
        return self._candidate.ended

    def start(self) -> None:
        """Run for election in the background."""
        self._listener.thread.start()
        self._thread.start()

    def wait(self) -> None:
        """Resign, after a last decision; wait until that is done, as long as etcd answers at once."""
        self.close()

    def close(self, *, done: bool = False) -> None:
        """As `wait`; if training is done, first wait until a coordinator has closed the run, for up to CLOSE_S."""
        self._close_by = time.monotonic() + (CLOSE_S if done else 0.0)
        self._inbox.put(None)
        if self._thread.ident:
            self._thread.join((CLOSE_S if done else 0.0) + LAST_S)
        self.etcd.close()

    def _listed(self, found: gateway.Outcome, prefix: str) -> None:
        self._inbox.put(lambda: self._candidate.listed(found, prefix))

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
                self._mistaken()
                pause_s = LONGEST_PAUSE_S
            if prefix != self._candidate.prefix or time.monotonic() - listed >= LIST_S:
                prefix, listed = self._candidate.prefix, time.monotonic()
                self._listener.again()
            if self._close_by is not None and (self.ended or failures or time.monotonic() >= self._close_by):
                break
            self._hear(min(pause_s, LIST_S if self._close_by is None else 0.1))
        self._listener.stop()
        with contextlib.suppress(EtcdError):
            self._candidate.last()

    def _hear(self, timeout_s: float) -> None:
        """All that has come, after a wait for the first of it."""
        with contextlib.suppress(queue.Empty):
            heard = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if heard:
                    try:
                        heard()
                    except Exception:
                        self._mistaken()
                heard = self._inbox.get_nowait()

    def _mistaken(self) -> None:
        """What is there, or this program, is not as it should be. Another may decide; so may we, later: nothing one writes may
        end all who could."""
        if not self._complained:
            print(f"outlast | this worker could not decide, and lets another try:\n{traceback.format_exc()}", flush=True)
        self._complained = True
        with contextlib.suppress(EtcdError):
            self._candidate.resign()


# For people who look


@dataclass(frozen=True)
class Present:
    """A member that has a key."""

    report: Report
    """Its standing, generation, address, failure."""
    left_s: int | None
    """How long its lease lasts if it is not renewed; None for one that ended while we looked."""
    decides: bool


@dataclass(frozen=True)
class Run:
    """What etcd knows of a run."""

    name: str
    members: tuple[Present, ...]
    """By id."""
    coordinator: schema.Leader | None
    """None until one is elected, and after the end."""
    world: World | None = None
    called: Call | None = None
    """A call that is pending: its generation is newer than the world's."""
    closed: Closed | None = None
    why: str = ""
    """What is waited for, or that all is well, as the coordinator has published it."""
    terms: str = ""
    """`min:max`, if members have to agree on it (torchrun's --nnodes)."""
    left_s: int | None = None
    """Seconds until the published state expires if it is not renewed; None if there is none."""


def look(client: gateway.Etcd, run: str | None = None) -> list[Run]:
    """What etcd knows of all runs below its prefix, or of one, or of a job (`team/job`). Changes nothing. Raises EtcdError.

    with contextlib.closing(gateway.Etcd(gateway.address("etcd://host:2379"))) as client: ...
    """
    prefix = client.address.prefix
    found = client.range(f"{prefix}/" if run is None else schema.Keys.of(prefix, run).root, prefix=True).found
    names = sorted({name for kv in found if (name := schema.run_of(prefix, kv.key))})
    if run is not None:
        names = [name for name in names if name == run or name.startswith(f"{run}/")]

    @functools.cache
    def left(lease: int) -> int | None:
        return client.left(lease) if lease else None

    runs = []
    for name in names:
        of = schema.Keys.of(prefix, name)
        mine = {kv.key: kv for kv in found if kv.key.startswith(f"{of.root}/")}
        leader = schema.Leader.loads(mine[of.leader].value) if of.leader in mine else None
        said = schema.Said.loads(mine[of.said].value) if of.said in mine else None
        records = [(schema.Record.loads(kv.value), kv.lease) for key, kv in mine.items() if key.startswith(of.members)]
        members = [
            Present(record.report, left(lease), leader is not None and leader.id == record.report.id)
            for record, lease in records
            if record
        ]
        published = (said.world, said.called, said.closed, said.why, said.terms, left(mine[of.said].lease)) if said else ()
        runs.append(Run(name, tuple(sorted(members, key=lambda member: member.report.id)), leader, *published))
    return runs
