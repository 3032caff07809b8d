"""The rendezvous transport between a worker's pod in an ElasticJob and the operator (`kubernetes://<job>`). Both write to the API
server, and each keeps working while the other is down.

    member -> operator   the Lease <job>-worker-<id>: its report and its progress as annotations, renewed every RENEW_S
    operator -> member   .status.rendezvous of the ElasticJob: {run, world, called, closed}, by a watch

The pod that started last owns the Lease. A pod that comes back on a lost node finds that another pod has written the Lease, and
exits. See docs/decisions/0013-the-operator.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base import files
from outlast.base.backoff import ConnectionLog, pause
from outlast.base.errors import Absent, Conflict, OutlastError, Superseded, Unauthorized
from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.ledger import Ledger
from outlast.job.workerfiles import progress_file
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEASE
from outlast.rendezvous import sentences
from outlast.rendezvous.messages import Called, Closed, Published, Report
from outlast.rendezvous.who_trains import World

if TYPE_CHECKING:
    from outlast.rendezvous.transport import Member

RENEW_S = contract.RENEW_S
PROGRESS_S = 3.0
"""Interval between progress reports from rank 0's worker. Users see the current step through these reports."""
LONGEST_PAUSE_S = 1.0
"""Maximum pause between attempts to send a changed report or to watch. Between attempts to renew the Lease with an unchanged
report, the maximum is the renewal interval."""
ANSWER_S = 10.0
"""Timeout for the API server's response to a report. It may be short, as another report follows soon."""


def board(endpoint: str, member: Member) -> Board:
    """Return the board for an endpoint; see `rendezvous.transport`. Raises OutlastError if the pod's uid is unknown."""
    if not member.environ.get(Env.MEMBER):
        raise OutlastError(f"{Env.MEMBER} is not set; set it to the uid of this pod (fieldRef metadata.uid)")
    return Board(endpoint.removeprefix(contract.KUBERNETES), member)


def renewal_interval_s(workers: int, *, mesh: bool) -> float:
    """Return the seconds between Lease renewals for this many workers. With `mesh`, the workers watch one another, and renewals
    may be rarer."""
    return max(contract.MESH_RENEW_S if mesh else RENEW_S, workers / contract.RENEWALS_PER_S)


@dataclass(frozen=True)
class _Leaving:
    uid: str
    deadline: float
    reason: str = ""


@dataclass(frozen=True)
class _Rendezvous(Published):
    """An ElasticJob's `.status.rendezvous`; see `operator.elasticjob_status`."""

    run: str = ""
    leaving: tuple[_Leaving, ...] = ()


class Board:
    """A member's connection to the operator through the API server; see `member_client.Board`."""

    def __init__(self, job: str, member: Member) -> None:
        environ = member.environ
        self.run = environ.get(Env.OWNER, member.run)  # the operator knows the run by the name that it gave its pods
        self.id = member.id
        self.put_log = ConnectionLog("the operator does not hear this worker", "the operator hears this worker again")
        self.watch_log = ConnectionLog(sentences.DEAF, sentences.HEARS)
        self._job, self._member, self._namespace = job, environ[Env.MEMBER], environ.get(Env.NAMESPACE, "")
        self._state, self._processes = member.state, member.processes
        self._must_leave, self._run_ended = member.must_leave, member.run_ended
        self._output = Path(environ[Env.OUTPUT]) if Env.OUTPUT in environ else None
        self._copied_entries: list[Any] = []
        """The operator's ledger entries that the run's ledger already contains."""
        self._min_generation = member.generation
        self._owner: dict[str, Any] | None = None
        """Owner reference to the ElasticJob; None until the watch has shown the job. Until then, no reports are written."""
        self._workers = 1
        self._previous_generation = 0
        """Newest generation before this member started. No world up to that generation includes this member, even if the world
        lists this member's id."""
        self._resource_version = ""
        self._report: Report | None = None
        self._changed_at = 0.0
        self._away = False
        self._deadline: _Leaving | None = None
        """The last deadline that the operator published for this pod."""
        self._published = Published()
        self._cluster: api.Cluster | None = None
        """The client for `put`. No other thread uses it, so `put` may close it when its login expires."""
        self._guard, self._watching, self._over = threading.Lock(), api.Stop(), threading.Event()
        self._deleted = False

    def put(self, report: Report) -> float | None:
        if self._owner is None or self._deleted:
            return None
        if report != self._report:
            self._report, self._changed_at = report, time.monotonic()
        away, self._away = self._away, True
        try:
            self._cluster = self._cluster or _connected(self._namespace)
            self._renew(self._cluster, self._lease(report))
        except Unauthorized:  # the login has expired, and the account's file has a newer token
            self.leave(reachable=True)
            raise
        self._away = False
        if away:
            self._watching.set()  # the watch may be connected to a dead server
        return self._interval_s(report)

    def watch(self) -> Generator[bool]:
        existing = set[str]()

        def check_exists(version: str | None) -> None:
            if version is not None and not existing:  # a watch does not report deletions from before it began
                raise Absent(f"there is no ElasticJob {self._job}")

        with self._guard:
            if self._over.is_set():
                return
            stop = self._watching = api.Stop()
        try:
            with contextlib.closing(_connected(self._namespace)) as cluster:
                for change in cluster.watch(ELASTIC_JOB, stop=stop, fields=f"metadata.name={self._job}", on_version=check_exists):
                    if change.type == "deleted":
                        raise Absent(f"ElasticJob {self._job} does not exist any more")
                    existing.add(self._job)
                    self._receive(change.document)
                    yield False
        except Absent:
            # An interruption, of which pods are told a moment later. A new job of this name waits for the name of this pod.
            self._deleted = True
            self._must_leave(None, "the job was deleted")
            self._over.wait()

    def published(self) -> Published:
        return self._published

    def pause_s(self, failures: int, *, changed: bool) -> float:
        return pause(failures, LONGEST_PAUSE_S if changed or self._report is None else self._interval_s(self._report))

    def close(self) -> None:
        with self._guard:
            self._over.set()
            self._watching.set()

    def leave(self, *, reachable: bool) -> None:
        """Disconnect without changing the Lease."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _receive(self, document: Mapping[str, Any]) -> None:
        meta = document["metadata"]
        status = document.get("status") or {}
        try:
            state = decode(_Rendezvous, status.get("rendezvous") or {}, "the state from the operator")
        except ValueError as problem:
            print(f"outlast | {problem}; does the operator have another version?", flush=True)
            state = _Rendezvous()
        run, world, called, closed = state.run or self.run, state.world, state.called, state.closed
        for each in state.leaving:
            if each.uid == self._member and each != self._deadline:
                self._must_leave(each.deadline, each.reason)
                self._deadline = each
        self._copy_ledger(status.get("ledger"), world)
        self._workers = int(((document.get("spec") or {}).get("workers") or {}).get("replicas") or 1)
        if self._owner is None:
            self._previous_generation = world.generation if world and run == self.run else 0
            newest = max(self._previous_generation, called.generation - 1 if called and run == self.run else 0)
            self._min_generation = self._min_generation if self._min_generation > newest else 0  # 0 if the operator knows it
            reference = {"apiVersion": ELASTIC_JOB.api_version, "kind": ELASTIC_JOB.kind, "controller": False}
            self._owner = {**reference, "name": meta["name"], "uid": meta["uid"]}
        if run != self.run:
            reason = f"run {self.run} is over"
            print(f"outlast | {reason}", flush=True)
            self._published = dataclasses.replace(self._published, closed=Closed(reason, contract.Exit.FAILED))
            raise Superseded(reason)
        if world and (called is None or called.generation < world.generation):
            called = Called(world.generation, world.reason, False, world.at)  # the call happened, even if we did not receive it
        if closed and closed != self._published.closed and closed.code != contract.Exit.INTERRUPTED:
            self._run_ended(closed)
        ours = world if world and world.generation > self._previous_generation else self._published.world
        self._published = Published(called, ours, closed or self._published.closed)

    def _copy_ledger(self, entries: object, world: World | None) -> None:
        """On rank 0's worker, copy the operator's new entries into the run's ledger."""
        if self._output is None or world is None or world.members[0] != self.id or not isinstance(entries, list):
            return
        new = [entry for entry in entries if entry not in self._copied_entries]
        self._copied_entries = entries
        if new:
            ledger = Ledger(self._output / contract.LEDGER, f"operator-{self.id}")
            ledger.copy(new)
            ledger.close()

    # This member's reports

    def _renew(self, cluster: api.Cluster, lease: dict[str, Any]) -> None:
        """Write the Lease. Raises Superseded if another pod has written it since this pod's first write."""
        meta = lease["metadata"]
        while True:
            precondition = {"resourceVersion": self._resource_version} if self._resource_version else {}
            try:
                written = cluster.apply({**lease, "metadata": {**meta, **precondition}}, tries=1, timeout_s=ANSWER_S)
                self._resource_version = written["metadata"]["resourceVersion"]
                return
            except Conflict:
                try:  # an empty patch returns the current Lease, and needs no right to read
                    current = cluster.patch(LEASE, meta["name"], {})
                except Absent:  # somebody has deleted the Lease
                    self._resource_version = ""
                    continue
                holder = current["spec"].get("holderIdentity")
                if holder != self._member:
                    raise Superseded(f"pod {holder} is worker {self.id} now, in the place of this one") from None
                self._resource_version = current["metadata"]["resourceVersion"]  # we wrote it, and the answer was lost

    def _interval_s(self, report: Report) -> float:
        """Return the seconds until the next renewal. The interval is short for rank 0's worker and soon after a change, so that
        the operator sees a world's first steps early. It is longer if peers watch this member."""
        world = self._published.world
        if world is not None and world.members[:1] == (self.id,):
            return min(PROGRESS_S, RENEW_S)
        mesh = report.mesh and time.monotonic() - self._changed_at > contract.MESH_RENEW_S / 2
        return renewal_interval_s(self._workers, mesh=mesh)

    def _lease(self, report: Report) -> dict[str, Any]:
        report = report if report.generation else dataclasses.replace(report, generation=self._min_generation)
        progress_record, duration_s = self._progress(), contract.MESH_LEASE_S if report.mesh else contract.LEASE_S
        labels = {contract.Label.JOB: self._job, contract.Label.WORKER: str(self.id), "app.kubernetes.io/managed-by": "outlast"}
        annotations = {contract.Annotation.REPORT: json.dumps(dataclasses.asdict(report))}
        if progress_record:
            annotations[contract.Annotation.PROGRESS] = json.dumps(progress_record)
        name = contract.worker_name(self._job, self.id)
        meta = {"name": name, "labels": labels, "annotations": annotations, "ownerReferences": [self._owner]}
        fields = {
            "holderIdentity": self._member,
            "leaseDurationSeconds": math.ceil(max(duration_s, 3 * self._workers / contract.RENEWALS_PER_S)),
            "renewTime": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        return LEASE.document(meta, spec=fields)

    def _progress(self) -> dict[str, Any] | None:
        """Return the progress of the training processes. None for scripts that do not call `training.progress`, and before the
        checkpoint is restored, as step 0 would look like lost steps."""
        all_records = [progress_file.read(self._state, local_rank) for local_rank in range(self._processes)]
        records = [
            record for record in all_records if record and (record.phase not in ("started", "open", "restore") or record.step)
        ]
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
            **_account(files.mapping(self._state / contract.WORKER).get("pushed") or {}),
            **({"snapshot": furthest.snapshot, "every": furthest.every} if furthest.snapshot else {}),
            "time": max(record.time for record in records),
        }


def _account(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the goodput and losses in a `worker.agent.upload.Report`; empty if the uploader does not compute them."""
    if report.get("goodput") is None:
        return {}
    return {"goodput": report["goodput"], "lost": report.get("lost"), "lostSteps": report.get("lost_steps")}


def report_account(job: str, worker: int, environ: Mapping[str, str], report: Mapping[str, Any]) -> None:
    """Report a finished run's goodput and losses to the operator. Raises ClusterError."""
    with contextlib.closing(_connected(environ.get(Env.NAMESPACE, ""))) as cluster:
        name = contract.worker_name(job, worker)
        lease = cluster.patch(LEASE, name, {})
        if lease["spec"].get("holderIdentity") == environ[Env.MEMBER]:
            progress_record = json.loads((lease["metadata"].get("annotations") or {}).get(contract.Annotation.PROGRESS) or "{}")
            final_record = json.dumps({**progress_record, **_account(report), "whole": True})
            cluster.patch(LEASE, name, {"metadata": {"annotations": {contract.Annotation.PROGRESS: final_record}}})


def _connected(namespace: str) -> api.Cluster:
    return api.connect(namespace=namespace or None, prefer_pod=True)
