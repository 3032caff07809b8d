"""Runs the operator: watches fill a cache, changes put jobs into a queue, and worker threads reconcile one job each.

Nothing is decided before all watches are synced, only the leader writes, and failures are retried with backoff. It is safe to
kill the process between any two lines.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping

from outlast.base import backoff, probes
from outlast.base.clock import Clock
from outlast.base.errors import ClusterError, Forbidden, Refused
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import POD, Kind
from outlast.kubernetes.manifests.scheduling import kueue
from outlast.kubernetes.operator import apply
from outlast.kubernetes.operator.cluster_cache import Cache, CachedJob, Key, Urgency
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.leader import Leadership
from outlast.kubernetes.operator.plan import Document, Plan
from outlast.kubernetes.operator.prometheus import Metrics
from outlast.kubernetes.operator.watches import Settings, Watches
from outlast.kubernetes.operator.workqueue import WorkQueue
from outlast.kubernetes.operator.writer import Background, NotLeader, Parallel, Writer

log = logging.getLogger(__name__)

Reconciler = Callable[[CachedJob, float, ClusterFeatures], Plan]
"""(a job's objects, current time, cluster features) -> plan. Pure."""
Orphans = Callable[[CachedJob, float], Plan]
"""(a deleted job's remaining objects, current time) -> plan. Pure."""

MAX_BACKOFF_S = 60.0
"""Maximum pause before a failed reconcile pass is retried."""
STUCK_S = 300.0
"""Timeout for a reconcile pass, after which the liveness probe fails and the kubelet restarts the process."""
BUSY_PASSES = 30
"""A job is slowed down after this many consecutive passes that found something to do."""
PROGRESS_DEBOUNCE_S = 2.0
"""Changes that only report progress are collected for this long, then reconciled together."""
STOP_TIMEOUT_S = 6.0
"""How long running passes may continue after SIGTERM. It is less than the pod's terminationGracePeriodSeconds."""
WRITERS_PER_WORKER = 2
"""Additional writer threads per concurrent reconcile pass."""
PENDING_EVENTS = 1000
"""Maximum number of Events waiting to be written, as in client-go's recorder."""


class Operator:
    def __init__(
        self,
        cluster: api.Cluster,
        reconcilers: Mapping[Kind, Reconciler],
        leadership: Leadership,
        settings: Settings,
        *,
        orphans: Orphans | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.cluster, self.reconcilers, self.leadership = cluster, dict(reconcilers), leadership
        self._settings = settings
        self.metrics = Metrics()
        self.address = ""
        """Address of the probes, once `run` has started."""
        self._clock = clock or Clock()
        self.queue: WorkQueue[Key] = WorkQueue(self._clock)
        self.cache = Cache(self.reconcilers, self._on_change)
        self.writer = Writer(cluster, self.cache, self.metrics, leadership.is_leader)
        self.watches = Watches(cluster, self.cache, self.metrics, self._clock, self._queue_all, settings)
        self._orphans = orphans
        self._parallel = Parallel(WRITERS_PER_WORKER * settings.workers)
        self._background = Background(PENDING_EVENTS)
        self._failures: dict[Key, int] = {}
        self._busy_passes: dict[Key, int] = {}
        self._refusals: dict[Key, str] = {}
        """Why the last attempt to create a job's pods failed, keyed by job."""
        self._decision_lock = threading.Lock()
        """Decisions are computed one at a time. Several at once would be no faster in Python, but would delay the reading of
        Lease renewals."""
        self._pass_started_at: dict[Key, float] = {}
        self._threads: list[threading.Thread] = []

    def run(self, stop: threading.Event) -> int:
        """Run until `stop` is set, the Lease is lost or a thread ends. Returns 0 if `stop` was set, otherwise 1."""
        self.address = probes.serve(self.health, self._exposition, host=self._settings.host, port=self._settings.port)
        log.info("probes and metrics are served on %s", self.address)
        release_lease = threading.Event()
        election = threading.Thread(target=self.leadership.run, args=(release_lease,), name="lease", daemon=True)
        workers = [
            threading.Thread(target=self._work, name=f"worker {n}", daemon=True)  # a hung thread must not keep the process alive
            for n in range(self._settings.workers)
        ]
        self.watches.start()
        election.start()
        self._threads = [*self.watches.threads, election]
        self._supervise(stop, workers)
        requested = stop.is_set()
        self.queue.shut_down()
        deadline = time.monotonic() + (STOP_TIMEOUT_S if requested and self.leadership.is_leader() else 0.0)
        for worker in workers:
            if worker.ident is not None:
                worker.join(max(0.0, deadline - time.monotonic()))
        self._background.finish(max(0.0, deadline - time.monotonic()))
        release_lease.set()  # only now, as no other operator may write while our workers do
        election.join(1.0 if requested else 0.0)
        self.watches.stop()
        log.info("stopped" if requested else "stopped: this operator is not the leader any more")
        return 0 if requested else 1

    def _supervise(self, stop: threading.Event, workers: list[threading.Thread]) -> None:
        """Start the worker threads once the caches are synced and this operator leads, and return when `run` must end."""
        logged: list[Kind] | None = None
        while not stop.is_set() and not self.leadership.lost_leadership:
            if (missing := self.cache.unsynced()) and missing != logged:
                log.info("waiting for the first list of %s", ", ".join(kind.resource for kind in missing))
                logged = missing
            if not missing and self.leadership.is_leader() and workers[0].ident is None:
                log.info("the caches are synced: %d jobs, %d pods", len(self.cache.job_keys()), self.cache.count(POD))
                for worker in workers:
                    worker.start()
                self._threads += workers
            if ended := [thread.name for thread in self._threads if not thread.is_alive()]:
                if not self.leadership.lost_leadership:
                    log.error("%s ended by itself; this process exits, to be restarted", ", ".join(ended))
                return
            stop.wait(0.5 if workers[0].ident is not None or self.leadership.is_standby else 0.02)

    def _on_change(self, key: Key, urgency: Urgency) -> None:
        if urgency == "now":
            self.queue.add(key)
        else:
            self.queue.add_at(key, self._clock() + PROGRESS_DEBOUNCE_S)

    def _queue_all(self) -> None:
        for key in self.cache.job_keys():
            self.queue.add(key)

    def _work(self) -> None:
        while (key := self.queue.get()) is not None:
            started_at = self._pass_started_at[key] = time.monotonic()
            try:
                self.reconcile(key)
                self._failures.pop(key, None)
            except NotLeader as error:  # the process ends
                log.warning("%s", error, extra=_log_fields(key))
            except ClusterError as error:
                self._retry_later(key, error)
            except Exception as error:  # a bug that affects one job must not stop the others
                self._retry_later(key, error, bug=True)
            finally:
                self._pass_started_at.pop(key, None)
                self.metrics.time_reconcile(time.monotonic() - started_at)
                self.queue.done(key)

    def reconcile(self, key: Key) -> None:
        """Run one reconcile pass: decide what to do about a job, and carry out the plan. Raises ClusterError."""
        with self._decision_lock:
            now = self._clock()
            cached = self.cache.job(key, now)
        since = max(cached.observed_since, now - self.leadership.answered_for_s(), self._clock.broken_at)
        cached = dataclasses.replace(cached, observed_since=since, refusal=self._refusals.get(key, ""))
        if cached.job is None:
            self._reconcile_deleted(key, cached, now)
            return
        old = cached.job.get("status") or {}
        if not old and kueue.queue_name(cached.job) and not self.watches.serves(kueue.GROUP):
            self.watches.discover()  # Kueue may have been installed a moment ago
        features = self.watches.features(key)
        with self._decision_lock:
            plan = self.reconcilers[key.kind](cached, now, features)
        outcome = self._apply(key, cached.job, plan, now) if plan or plan.events else apply.Outcome(plan.requeue_at)
        self._refusals.pop(key, None)
        if outcome.blocked_reason:
            self._refusals[key] = outcome.blocked_reason
        self.metrics.set_job(key.kind.resource, key.namespace, key.name, plan.status if plan.status is not None else old)
        if outcome.requeue_at is not None:
            self.queue.add_at(key, outcome.requeue_at)
        self._requeue(key, plan, outcome, now)

    def _apply(self, key: Key, job: Document, plan: Plan, now: float) -> apply.Outcome:
        if plan.status is not None:
            log.info("%s", plan.status.get("reason") or plan.status.get("state") or "its status changes", extra=_log_fields(key))
        old = job.get("status") or {}
        on_status_written = functools.partial(self.metrics.count_changes, old, plan.status or {}, plan.events, now)
        try:
            outcome = apply.carry_out(self.writer, job, plan, now, self._parallel, self._background, on_status_written)
        except (Forbidden, Refused) as error:
            self._refusals[key] = str(error)
            if plan.requeue_at is not None:  # existing workers must not wait for those that are refused
                self.queue.add_at(key, plan.requeue_at)
            raise
        if outcome.stale_reason:
            log.info("%s; the job is reconciled again", outcome.stale_reason, extra=_log_fields(key))
        return outcome

    def _requeue(self, key: Key, plan: Plan, outcome: apply.Outcome, now: float) -> None:
        """Reconcile the job again if the pass did something: only a pass with nothing to do shows a steady state. A job that
        never reaches a steady state is slowed down."""
        if not plan:
            self._busy_passes.pop(key, None)
            return
        busy = self._busy_passes[key] = self._busy_passes.get(key, 0) + 1
        if busy <= BUSY_PASSES and (outcome.stale_reason or outcome.blocked_reason):  # usually the watch brings the change first
            self.queue.add_at(key, now + 1.0)
        elif busy <= BUSY_PASSES:
            self.queue.add(key)
        else:
            pause = backoff.exponential(busy - BUSY_PASSES, 1.0, MAX_BACKOFF_S)
            log.warning("%d passes in a row found something to do; the next is in %.0f s", busy, pause, extra=_log_fields(key))
            self.queue.hold(key, now + pause)  # our own writes come back as changes and must not keep us busy

    def _reconcile_deleted(self, key: Key, cached: CachedJob, now: float) -> None:
        """Force-delete a deleted job's pods on unreachable nodes. The job's other objects are garbage-collected."""
        self.metrics.remove_job(key.kind.resource, key.namespace, key.name)
        self._busy_passes.pop(key, None)
        self._refusals.pop(key, None)
        if not cached.pods or self._orphans is None or self._exists_as_other_kind(key):
            return
        plan = self._orphans(cached, now)
        for deletion in plan.deletes:
            apply.delete(self.writer, deletion, key.namespace)
        if plan.requeue_at is not None:
            self.queue.add_at(key, plan.requeue_at)

    def _exists_as_other_kind(self, key: Key) -> bool:
        others = [Key(kind, key.namespace, key.name) for kind in self.reconcilers if kind != key.kind]
        return any(self.cache.job(other, self._clock()).job is not None for other in others)

    def _retry_later(self, key: Key, error: Exception, *, bug: bool = False) -> None:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause = backoff.exponential(count - 1, self._settings.retry_s, MAX_BACKOFF_S)
        self.metrics.count_error()
        sentence = "%s; the next try is in %.0f s"
        if bug:
            log.error(sentence, error, pause, extra=_log_fields(key), exc_info=error)
        else:
            log.warning(sentence, error, pause, extra=_log_fields(key))
        self.queue.add_at(key, self._clock() + pause)

    def health(self) -> probes.Health:
        now, missing = time.monotonic(), self.cache.unsynced()
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        stuck = [key for key, started_at in list(self._pass_started_at.items()) if now - started_at > STUCK_S]
        if dead:
            reason = f"{', '.join(dead)} ended"
        elif stuck:
            reason = f"a reconcile pass of {stuck[0].namespace}/{stuck[0].name} takes longer than {STUCK_S:.0f} s"
        elif missing:
            reason = f"waiting for the first list of {', '.join(kind.resource for kind in missing)}"
        else:
            reason = "acting" if self.leadership.is_leader() else "standing by"
        return probes.Health(not dead and not stuck, not missing and not dead, reason)

    def _exposition(self) -> str:
        return self.metrics.text(leads=self.leadership.is_leader(), now=self._clock())


def _log_fields(key: Key) -> dict[str, str]:
    return {"job": key.name, "namespace": key.namespace}
