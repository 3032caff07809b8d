"""The rendezvous transport between a worker in a pod of an ElasticJob and the operator (`kubernetes://<job>`): both write to the
API server, and either works while the other is away.

    member -> operator   the Lease <job>-worker-<id>: its report and its progress as annotations, renewed every RENEW_S
    operator -> member   .status.rendezvous of the ElasticJob: {run, world, called, closed}, by a watch

A report is complete, the newest report wins, and writing a report twice does no harm. The pod that started last owns the Lease:
if a pod on a lost node comes back, it sees that another pod has written the Lease, and ends. While the API server or the operator
is away, the last state received stays valid and training goes on; the client raises no error for that. Docs:
docs/decisions/0013-the-operator.md.

`rendezvous.transport` selects this transport by its scheme. No connection is made before the first report, since the process that
creates a client may be a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outlast.base import files
from outlast.base.backoff import Line, pause
from outlast.base.errors import Absent, ClusterError, Conflict, OutlastError, Superseded, Unauthorized
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.ledger import Ledger
from outlast.job.workerfiles import progress
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEASE
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.transports.sockets import Called, Closed, Report, published
from outlast.rendezvous.world import World

if TYPE_CHECKING:
    from outlast.rendezvous.transport import Member

RENEW_S = contract.RENEW_S
PROGRESS_S = 3.0
"""Interval between progress reports of rank 0's worker, whose steps people follow."""
LONGEST_PAUSE_S = 1.0
"""Maximum pause between two attempts to send a report with news, or to watch; for a renewal, it is RENEW_S."""
ANSWER_S = 10.0
"""Timeout for the API server's answer to a report. Arbitrary; by then there is a newer report to send."""
LAST_S = 1.0
"""Timeout for the last report of a leaving member."""


def client(endpoint: str, member: Member) -> Client:
    """A client for an endpoint, see `transport.Transport`."""
    if not member.environ.get(Env.MEMBER):
        raise OutlastError(f"{Env.MEMBER} is not set; set it to the uid of this pod (fieldRef metadata.uid)")
    return Client(endpoint.removeprefix(contract.KUBERNETES), member)


def preload() -> None:
    with contextlib.suppress(ImportError):  # the client reports a missing library
        api.load()


def every_s(workers: int, *, rarely: bool) -> float:
    """Renewal interval of a Lease in a job with this many workers; `rarely`: whether peers watch one another."""
    return max(contract.MESH_RENEW_S if rarely else RENEW_S, workers / contract.RENEWALS_PER_S)


class Client:
    """The member's side of the transport: renews the member's Lease, and keeps the newest state that the operator published."""

    def __init__(self, job: str, member: Member) -> None:
        environ = member.environ
        run = environ.get(Env.OWNER, member.run)  # the operator knows the run by the name that it gave its pods
        self._job, self._of, self.id = job, run, member.id
        self._member, self._namespace = environ[Env.MEMBER], environ.get(Env.NAMESPACE, "")
        self._state, self._processes = member.state, member.processes
        self._output = Path(environ[Env.OUTPUT]) if Env.OUTPUT in environ else None
        self._copied: list[Any] = []
        """The operator's entries that are already in the run's ledger."""
        self._min_generation = member.generation
        self._report = Report(run=run, id=member.id, standing="waiting", since=time.time())
        self._written, self._taken = 0, 0
        """Number of changes of the report, and the number of these changes that the API server has."""
        self._owner: dict[str, Any] | None = None
        """Owner reference to the ElasticJob, once the job has been seen; no report is sent before that."""
        self._workers = 1
        """Number of workers of the job."""
        self._previous_generation = 0
        """The generation that existed before this member started: the member is in no world up to that generation, even if a
        world names it."""
        self._version = ""
        """Version of our Lease as we last wrote it."""
        self._changed_at = 0.0
        """Time of the last change of our report."""
        self._noted = ""
        """The last deadline for this pod of which the agent was notified, as JSON."""
        self.gone = False
        """Whether the run, the job or our place in it has been lost: no more reports are sent then."""
        self._reachable = True
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._watching = api.Stop()
        self.called: Called | None = None
        self.world: World | None = None
        self.closed: Closed | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(target,), name=f"outlast-{name}", daemon=True)
            for name, target in (("operator", self._listen), ("lease", self._send))
        ]

    def report(self, standing: str, **fields: Any) -> None:
        """Report the state of this member; fields are those of `Report`, and omitted fields keep their values. Returns before the
        report has been sent."""
        with self._changed:
            self._report = self._report.changed(standing, **fields)
            self._written, self._changed_at = self._written + 1, time.monotonic()
            self._changed.notify_all()
        for thread in self._threads:
            if not thread.ident:
                thread.start()

    def amend(self, **fields: Any) -> None:
        """Change fields of the report other than the standing. Nothing is sent before the first `report`."""
        with self._changed:
            self._report = dataclasses.replace(self._report, **fields)
            self._written, self._changed_at = self._written + 1, time.monotonic()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when the operator has published something, or after the timeout."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Close, after waiting until the last report has been accepted if the API server is reachable. The Lease is not
        deleted."""
        with self._changed:
            if self._owner and self._reachable and not self._stop.is_set():
                self._changed.wait_for(lambda: self._taken == self._written or self.gone or not self._reachable, LAST_S)
            self._stop.set()
            self._watching.set()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident:
                thread.join(LAST_S)

    def _run(self, target: Callable[[Connection], None]) -> None:
        try:
            with contextlib.closing(Connection(self._namespace)) as connection:
                target(connection)
        except Exception as bug:  # without this thread the worker neither reports nor receives
            self._leave(f"the rendezvous has failed: {bug!r}", contract.Exit.FAILED)
            raise

    # State that the operator publishes

    def _listen(self, connection: Connection) -> None:
        line, failures = Line("this worker does not hear the operator", "this worker hears the operator again"), 0
        while not self._stop.is_set():
            with self._changed:
                if self._stop.is_set():
                    return
                watching = self._watching = api.Stop()
            try:
                cluster = connection.cluster()
                name, there = f"metadata.name={self._job}", set[str]()

                def stands(version: str | None, there: set[str] = there) -> None:
                    if version is not None and not there:  # a watch does not report deletions from before it began
                        raise Absent(f"there is no ElasticJob {self._job}")

                watch = cluster.watch(ELASTIC_JOB, stop=watching, fields=name, pace=api.Pace(stands, LONGEST_PAUSE_S))
                for change in watch:
                    if change.type == "deleted":
                        raise Absent(f"ElasticJob {self._job} does not exist any more")
                    there.add(self._job)
                    self._hear(change.document)
                    line.well()
                    failures = 0
            except Absent:
                self._leave("the job was deleted", contract.Exit.INTERRUPTED)
                return
            except ClusterError as problem:
                failures += 1
                if isinstance(problem, Unauthorized):
                    connection.close()
                if failures > 1 or not isinstance(problem, Unauthorized):
                    line.broken(problem)
                self._stop.wait(pause(failures, LONGEST_PAUSE_S))

    def _hear(self, document: Mapping[str, Any]) -> None:
        meta = document["metadata"]
        said = (document.get("status") or {}).get("rendezvous") or {}
        try:
            run = said.get("run") or self._of
            world, called, closed = published(World, said), published(Called, said), published(Closed, said)
        except (TypeError, AttributeError) as problem:
            print(f"outlast | what the operator says makes no sense: {problem}; is it of another version?", flush=True)
            run, world, called, closed = self._of, None, None, None
        self._note_leave(said.get("leaving"))
        self._keep((document.get("status") or {}).get("ledger"), said.get("world"))
        with self._changed:
            self._workers = int(((document.get("spec") or {}).get("workers") or {}).get("replicas") or 1)
            if self._owner is None:
                reference = {"apiVersion": ELASTIC_JOB.api_version, "kind": ELASTIC_JOB.kind, "controller": False}
                self._owner = {**reference, "name": meta["name"], "uid": meta["uid"]}
                self._previous_generation = world.generation if world and run == self._of else 0
                known = max(self._previous_generation, called.generation - 1 if called and run == self._of else 0)
                self._min_generation = self._min_generation if self._min_generation > known else 0  # it knows by itself
            if run != self._of:
                self._leave(f"run {self._of} is over", contract.Exit.FAILED)
                return
            if world and (called is None or called.generation < world.generation):
                called = Called(world.generation, world.reason, False, world.at)  # it was, whether or not we received that
            self.called = called
            if world and world.generation > self._previous_generation:
                self.world = world
            self._changed.notify_all()
        if closed and not self.closed:
            if closed.code != contract.Exit.INTERRUPTED:
                self._note_end(closed)  # recorded before anybody acts on it
            with self._changed:
                self.closed = closed
                self._changed.notify_all()

    def _note_end(self, closed: Closed) -> None:
        try:
            files.replace(self._state / contract.END, json.dumps(dataclasses.asdict(closed)))
        except OSError as problem:
            print(f"outlast | how the run has ended cannot be noted in {self._state}: {problem}", flush=True)

    def _note_leave(self, leaving: object) -> None:
        """If the operator has published a deadline for this pod, write it for the agent (`contract.LEAVE`)."""
        for each in leaving if isinstance(leaving, list) else ():
            if not isinstance(each, Mapping) or each.get("uid") != self._member or not sockets.is_number(each.get("deadline")):
                continue
            said = json.dumps({"deadline": each["deadline"], "reason": str(each.get("reason") or "")})
            if said != self._noted:
                try:
                    files.replace(self._state / contract.LEAVE, said)
                    self._noted = said
                except OSError as problem:
                    print(f"outlast | the time left cannot be noted in {self._state}: {problem}", flush=True)

    def _keep(self, entries: object, world: object) -> None:
        """On the worker of rank 0, copy the operator's entries into the run's ledger. Existing entries are skipped."""
        first = next(iter(world.get("members") or ()), None) if isinstance(world, Mapping) else None
        if self._output is None or first != self.id or not isinstance(entries, list):
            return
        new = [entry for entry in entries if entry not in self._copied]
        self._copied = entries
        if new:
            book = Ledger(self._output / contract.LEDGER, f"operator-{self.id}")
            book.copy(new)
            book.close()

    def _leave(self, reason: str, code: int) -> None:
        """Exclude this member from further worlds and stop its reports; the run may go on without it."""
        with self._changed:
            self.gone = True
            if not self.closed:
                print(f"outlast | {reason}", flush=True)
                self.closed = Closed(reason, code)
            self._changed.notify_all()

    # Reports of this member

    def _send(self, connection: Connection) -> None:
        line, failures = Line("the operator does not hear this worker", "the operator hears this worker again"), 0
        with self._changed:
            self._changed.wait_for(lambda: self._owner is not None or self._stop.is_set() or self.gone)
        while not (self._stop.is_set() or self.gone):
            with self._changed:
                number, lease = self._written, self._lease()
            try:
                cluster = connection.cluster()
                self._renew(cluster, lease)
            except Superseded as problem:
                self._leave(str(problem), contract.Exit.INTERRUPTED)
                return
            except ClusterError as problem:
                failures += 1
                if isinstance(problem, Unauthorized):
                    connection.close()
                if failures > 1 or not isinstance(problem, Unauthorized):
                    line.broken(problem)
                with self._changed:
                    self._reachable = failures == 1 and isinstance(problem, Unauthorized)
                    pause_s = pause(failures, LONGEST_PAUSE_S if self._taken != self._written else self._every_s())
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stop.is_set() or self.gone, pause_s)
                continue
            line.well()
            with self._changed:
                if failures:
                    self._watching.set()  # it may wait for a server that is gone
                failures, self._taken, self._reachable = 0, number, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._written != self._taken or self._stop.is_set() or self.gone, self._every_s())

    def _renew(self, cluster: api.Cluster, lease: dict[str, Any]) -> None:
        """Write the Lease: the first time unconditionally, after that only if no other process has written it. Raises
        Superseded."""
        meta = lease["metadata"]
        while True:
            known = {"resourceVersion": self._version} if self._version else {}
            try:
                said = cluster.apply({**lease, "metadata": {**meta, **known}}, tries=1, timeout_s=ANSWER_S)
                self._version = said["metadata"]["resourceVersion"]
                return
            except Conflict:
                try:  # an empty change returns the current Lease, without a right to read
                    there = cluster.patch(LEASE, meta["name"], {})
                except Absent:  # somebody has deleted it
                    self._version = ""
                    continue
                holder = there["spec"].get("holderIdentity")
                if holder != self._member:
                    raise Superseded(f"pod {holder} is worker {self.id} now, in the place of this one") from None
                self._version = there["metadata"]["resourceVersion"]  # we wrote it, and the answer was lost

    def _every_s(self) -> float:
        """The renewal interval of the Lease: long where peers watch this member, but short after a change, so that the operator
        sees the first steps of a world."""
        if self.world is not None and self.world.members[:1] == (self.id,):
            return min(PROGRESS_S, RENEW_S)
        rarely = self._report.mesh and time.monotonic() - self._changed_at > contract.MESH_RENEW_S / 2
        return every_s(self._workers, rarely=rarely)

    def _lease(self) -> dict[str, Any]:
        report = self._report if self._report.generation else dataclasses.replace(self._report, generation=self._min_generation)
        reached, lasts_s = self._progress(), contract.MESH_LEASE_S if report.mesh else contract.LEASE_S
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {
                "name": contract.worker_name(self._job, self.id),
                "labels": {
                    contract.Label.JOB: self._job,
                    contract.Label.WORKER: str(self.id),
                    "app.kubernetes.io/managed-by": "outlast",
                },
                "annotations": {
                    contract.Annotation.REPORT: json.dumps(dataclasses.asdict(report)),
                    **({contract.Annotation.PROGRESS: json.dumps(reached)} if reached else {}),
                },
                "ownerReferences": [self._owner],
            },
            "spec": {
                "holderIdentity": self._member,
                "leaseDurationSeconds": math.ceil(max(lasts_s, 3 * self._workers / contract.RENEWALS_PER_S)),
                "renewTime": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }

    def _progress(self) -> dict[str, Any] | None:
        """Progress of this worker's training processes. None for plain scripts that do not call `training.progress`, and until
        the checkpoint is restored, since step 0 would look like lost steps."""
        found = [progress.read(self._state, local_rank) for local_rank in range(self._processes)]
        records = [record for record in found if record and (record.phase not in ("started", "open", "restore") or record.step)]
        if not records:
            return None
        furthest = max(records, key=lambda record: (record.generation, record.step))
        newest = max(records, key=lambda record: record.committed)
        return {
            "generation": furthest.generation,
            "step": furthest.step,
            "steps": furthest.steps,
            "committed": newest.committed,
            **({"bytes": newest.bytes} if newest.bytes else {}),
            **({"goodput": account} if (account := _goodput(self._state)) is not None else {}),
            **({"snapshot": furthest.snapshot, "every": furthest.every} if furthest.snapshot else {}),
            "time": max(record.time for record in records),
        }


def _goodput(state: Path) -> float | None:
    """The goodput of the run, if this worker's upload process computes it (`agent.upload.Report`)."""
    try:
        return cast("float | None", json.loads((state / contract.WORKER).read_bytes())["pushed"].get("goodput"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def tell_goodput(job: str, worker: int, environ: Mapping[str, str], goodput: float) -> None:
    """Report the goodput of the whole run to the operator, after its end. Raises ClusterError."""
    with contextlib.closing(Connection(environ.get(Env.NAMESPACE, ""))) as connection:
        cluster, name = connection.cluster(), contract.worker_name(job, worker)
        lease = cluster.patch(LEASE, name, {})
        if lease["spec"].get("holderIdentity") == environ[Env.MEMBER]:
            said = json.loads((lease["metadata"].get("annotations") or {}).get(contract.Annotation.PROGRESS) or "{}")
            whole = json.dumps({**said, "goodput": goodput, "whole": True})
            cluster.patch(LEASE, name, {"metadata": {"annotations": {contract.Annotation.PROGRESS: whole}}})


class Connection:
    """A thread's own client of the API server. No other thread uses the client, so it can be closed as soon as its login has
    expired. The token of a pod's account is replaced in its file before it expires; a new login reads the new token.
    https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/"""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._cluster: api.Cluster | None = None

    def cluster(self) -> api.Cluster:
        """The client; logs in if there is none. Raises ClusterError."""
        if self._cluster is None:
            self._cluster = api.connect(namespace=self._namespace or None, own=True)
        return self._cluster

    def close(self) -> None:
        """Log out; the next call of `cluster` logs in again."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
