"""The operator's process: watches fill a cache, changes give jobs a turn, workers look at one job each and do what is decided.

    Operator(cluster, {kinds.ELASTIC_JOB: decider}, ...).run(stop)

What is decided comes from a decider for each kind of job, a pure function. This process adds nothing to it but that only the
leader acts, that nobody acts before everything was heard once, and that what fails is tried again, ever more slowly. It may be
killed between any two lines.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outlast import backoff, kube, probes
from outlast.clock import Clock
from outlast.contract import Label
from outlast.errors import ClusterError, Forbidden, NotServed, Refused
from outlast.kube.kinds import ELASTIC_JOB, LEASE, NODE, POD, POD_GROUP, PRIORITY_CLASS, VOLCANO_GROUP, Kind
from outlast.manifests import kueue
from outlast.operator import apply, cache
from outlast.operator.cache import Cache, Key, Looked, Urgency
from outlast.operator.leader import Leadership
from outlast.operator.metrics import Metrics
from outlast.operator.parallel import Background, Parallel
from outlast.operator.plan import Document, Plan
from outlast.operator.queues import Found, Sight
from outlast.operator.snapshot import HEARD, answers
from outlast.operator.workqueue import Turns
from outlast.operator.writer import Deposed, Hands

log = logging.getLogger(__name__)

Decider = Callable[[Looked, float, Found], Plan]
"""(what is known of a job, now, what else the cluster has) -> what is to be done. Pure."""
Orphans = Callable[[Looked, float], Plan]
"""(what is left of a job that is not there, now) -> which of its pods are to be deleted. Pure."""

LONGEST_PAUSE_S = 60.0
"""Between two tries of what fails."""
WATCH_S = 10.0
"""The same between two tries of a watch: a definition that is installed now should not be noticed a minute later."""
STUCK_S = 300.0
"""A look that takes so long never ends: the process is to be started again."""
BUSY = 30
"""So many looks in a row that each found something to do are more than any change of a job needs."""
TOLD_S = 2.0
"""When members tell of their progress, the job is looked at within so long, once for all of them."""
STOP_S = 6.0
"""How long the looks that have begun may take after SIGTERM; the kubelet waits longer."""

WRITES = 2
"""For each job that is looked at at once there are so many threads that write for it beside its own."""

EVENTS = 1000
"""So many may wait to be written, as in client-go's recorder."""

_GANGS = (VOLCANO_GROUP, POD_GROUP)


@dataclass(frozen=True)
class Settings:
    """How the operator works."""

    namespace: str | None = None
    """Only this one. Default: all."""
    workers: int = 8
    """Jobs that are looked at at once."""
    host: str = ""
    """Where probes are served; default: on all addresses."""
    port: int = 0
    """0: any free one."""
    pause_s: float = 1.0
    """Before what failed is tried again for the first time."""
    find_s: float = 60.0
    """How often it is looked which other systems the cluster has."""


class Operator:
    """One process. `run` returns its exit code."""

    def __init__(
        self,
        cluster: kube.Cluster,
        deciders: Mapping[Kind, Decider],
        leadership: Leadership,
        settings: Settings | None = None,
        *,
        orphans: Orphans | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.cluster, self.deciders, self.leadership = cluster, dict(deciders), leadership
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.address = ""
        """Where probes are answered, from `run` on."""
        self._clock = clock or Clock()
        self.turns: Turns[Key] = Turns(self._clock)
        self.cache = Cache(self.deciders, self._changed)
        self.hands = Hands(cluster, self.cache, self.metrics, leadership.holds)
        self._orphans = orphans
        self._each, self._later = Parallel(WRITES * self.settings.workers), Background(EVENTS)
        self._found: tuple[Kind, ...] = ()
        """What the cluster has of Kueue and of schedulers of gangs."""
        self._around = threading.Lock()
        self._ending = kube.Stop()
        """Ends the watches."""
        self._failures: dict[Key, int] = {}
        self._busy: dict[Key, int] = {}
        self._refused: dict[Key, str] = {}
        """Why pods of a job could not be made when that was tried last."""
        self._listens: dict[Kind, threading.Thread] = {}
        """The watches of Kueue, by kind."""
        self._deciding = threading.Lock()
        """One look at a time is computed: several are not faster in Python, and would take their share from the watches, who read
        too late then that Leases were renewed."""
        self._unready: dict[str, float] = {}
        """Since when nodes do not answer, as far as we have heard."""
        self._looking: dict[Key, float] = {}
        self._threads: list[threading.Thread] = []

    def run(self, stop: threading.Event) -> int:
        """Work until `stop` is set (0), or until the lease is lost or something is broken (1)."""
        ending = self._ending
        leaving = threading.Event()
        """Ends the leadership."""
        self.address = probes.serve(self.health, {}, host=self.settings.host, port=self.settings.port)
        log.info("probes and metrics are served on %s", self.address)
        self._look_around()
        watches = [threading.Thread(target=self._watch, args=(kind, ending), name=f"watch {kind}") for kind in self._kinds()]
        leading = threading.Thread(target=self.leadership.run, args=(leaving,), name="lease")
        workers = [threading.Thread(target=self._work, name=f"worker {n}") for n in range(self.settings.workers)]
        finding = threading.Thread(target=self._find, args=(ending,), name="find")
        self._threads = [*watches, leading, finding]
        for thread in (*self._threads, *workers):
            thread.daemon = True  # one that hangs must not keep the process
        for thread in self._threads:
            thread.start()
        said: list[Kind] | None = None
        while not stop.is_set() and not self.leadership.lost:
            if (missing := self.cache.unsynced()) and missing != said:
                log.info("waiting until all is known of %s", ", ".join(kind.resource for kind in missing))
                said = missing
            if not missing and self.leadership.holds() and workers[0].ident is None:
                log.info("all is known: %d jobs, %d pods", len(self.cache.all()), self.cache.count(POD))
                for worker in workers:
                    worker.start()
                self._threads += workers
            if broken := [thread.name for thread in self._threads if not thread.is_alive()]:
                if not self.leadership.lost:
                    log.error("%s ended by itself; this process ends, to be started again", ", ".join(broken))
                break
            stop.wait(0.5 if workers[0].ident is not None or self.leadership.waits else 0.02)
        asked = stop.is_set()
        self.turns.close()
        until = time.monotonic() + (STOP_S if asked and self.leadership.holds() else 0.0)
        for worker in workers:
            if worker.ident is not None:
                worker.join(max(0.0, until - time.monotonic()))
        self._later.finish(max(0.0, until - time.monotonic()))
        leaving.set()  # only now: nobody else may act while one of ours does
        leading.join(1.0 if asked else 0.0)
        ending.set()
        for watch in (*watches, finding, *self._listens.values()):
            watch.join(0.5)  # who closes the cluster's connections next should find nobody using them
        log.info("stopped" if asked else "stopped: this operator may act no more")
        return 0 if asked else 1

    # what is heard

    def _changed(self, key: Key, urgency: Urgency) -> None:
        if urgency == "now":
            self.turns.add(key)
        else:
            self.turns.later(key, self._clock() + TOLD_S)

    def _kinds(self) -> tuple[Kind, ...]:
        return (*self.deciders, POD, LEASE, NODE)

    def _watch(self, kind: Kind, stop: kube.Stop) -> None:
        """Fill the cache with one kind, for good: whatever is refused is asked for again, and said."""
        failures, stands = 0, False
        where: dict[str, Any] = {}
        if kind.namespaced:
            where = {"namespace": self.settings.namespace} if self.settings.namespace else {"everywhere": True}

        def heard(version: str | None) -> None:
            nonlocal failures, stands
            if stands and version is None:
                log.warning("the watch of %s is lost; nobody is taken for dead before it stands again", kind.resource)
            elif not stands and version is not None:
                failures = 0
                log.info("%s are watched", kind.resource)
            comes, stands = not stands and version is not None, version is not None
            self.cache.heard(kind, version, self._clock())
            if comes and kind in self._listens:
                self._look_at_all()  # what was waited for may be known now

        while not stop.is_set():
            self.cache.begin(kind)
            try:
                for change in self.cluster.watch(
                    kind,
                    stop=stop,
                    labels=Label.JOB if kind in (POD, LEASE) or kind in (versions[0] for versions in kueue.VERSIONS) else "",
                    pace=kube.Pace(heard, WATCH_S),
                    **where,
                ):
                    self._hear(kind, change)
            except NotServed as error:
                if kind in self._listens:
                    log.info("%s are watched no more: %s", kind.resource, error)
                    return self.cache.heard(kind, None, self._clock())
                if kind in self.deciders and kind != ELASTIC_JOB:
                    self.cache.forgo(kind, self._clock())  # may come later, and nobody waits for it
                else:
                    heard(None)
                    if not failures:
                        log.warning("waiting for %s: %s", kind.resource, error)
            except ClusterError as error:
                heard(None)
                self.metrics.count_error()
                log.warning("%s cannot be watched: %s", kind.resource, error)
            except Exception as error:  # a bug that is met here must not end the watch, on which all jobs depend
                heard(None)
                self.metrics.count_error()
                log.error("%s cannot be watched: %s", kind.resource, error, exc_info=error)
            failures += 1
            stop.wait(min(WATCH_S, self._pause(failures)))

    def _stamped(self, kind: Kind, document: Document) -> Document:
        """A document with when we heard of what silence is counted from."""
        if kind == LEASE:
            return {**document, HEARD: self._clock()}
        if kind != NODE:
            return document
        name = document["metadata"]["name"]
        if answers(document):
            self._unready.pop(name, None)
            return document
        return {**document, HEARD: self._unready.setdefault(name, self._clock())}

    def _hear(self, kind: Kind, change: kube.Change) -> None:
        """Keep what a watch says. A bug that one document meets must not keep the others from being heard."""
        try:
            if change.type == "deleted":
                if kind == NODE:
                    self._unready.pop(change.document["metadata"]["name"], None)
                self.cache.remove(kind, change.document)
            else:
                self.cache.put(kind, self._stamped(kind, cache.trimmed(kind, change.document)))
        except Exception as error:
            self.metrics.count_error()
            meta = change.document["metadata"]
            where = {"namespace": meta.get("namespace", ""), "job": meta.get("name", "")}
            log.error("%s %s cannot be kept: %s", kind, meta.get("name"), error, extra=where, exc_info=error)

    def _find(self, stop: kube.Stop) -> None:
        """Look now and then which other systems the cluster has."""
        while not stop.wait(self.settings.find_s):
            try:
                self._look_around()
            except Exception as error:  # what else there is can wait; the process must not end for it
                self.metrics.count_error()
                log.error("what else the cluster has is not known: %s", error, exc_info=error)

    def _look_at_all(self) -> None:
        for key in self.cache.all():
            self.turns.add(key)

    def _look_around(self) -> None:
        """Look which other systems the cluster has, and listen to Kueue from then on."""
        with self._around:
            try:
                queues = next((kinds for kinds in kueue.VERSIONS if all(self.cluster.serves(kind) for kind in kinds)), ())
                found = (*queues, *(kind for kind in _GANGS if self.cluster.serves(kind)))
            except ClusterError as error:  # as before, then
                self.metrics.count_error()
                return log.warning("what else the cluster has is not known: %s", error)
            before, self._found = self._found, found
            self._listen_to_queues(queues)
        if found != before:
            log.info("this cluster has %s now", ", ".join(kind.resource for kind in found) or "neither Kueue nor gangs")
            self._look_at_all()

    def _listen_to_queues(self, queues: tuple[Kind, ...]) -> None:
        for kind in (*queues, PRIORITY_CLASS) if queues else ():
            if kind not in self._listens or not self._listens[kind].is_alive():
                self.cache.also(kind)
                watch = threading.Thread(target=self._watch, args=(kind, self._ending), name=f"watch {kind}", daemon=True)
                self._listens[kind] = watch
                watch.start()

    def _has(self, key: Key) -> Found:
        """What the cluster has beside itself, and what Kueue says of a job."""
        groups = frozenset(kind.group for kind in self._found)
        queues = next((kinds for kinds in kueue.VERSIONS if kinds[0] in self._found), ())
        if not queues or self.cache.unsynced((*queues, PRIORITY_CLASS)):
            return Found(groups)
        workload, flavor, priority = queues
        flavors = {each["metadata"]["name"]: each for each in self.cache.every(flavor)}
        classes = (*self.cache.every(priority), *self.cache.every(PRIORITY_CLASS))
        return Found(groups, Sight(workload, self.cache.of(workload, key), flavors, classes))

    # what is done

    def _work(self) -> None:
        while (key := self.turns.take()) is not None:
            try:
                with self._timed(key):
                    self.look(key)
                self._failures.pop(key, None)
            except Deposed as error:  # the process ends
                log.warning("%s", error, extra=_about(key))
            except ClusterError as error:
                self._failed(key, error)
            except Exception as error:  # a bug that one job meets must not stop the others
                self._failed(key, error, bug=True)
            finally:
                self.turns.done(key)

    def look(self, key: Key) -> None:
        """Look at a job once, and do what is to be done about it. Raises ClusterError."""
        with self._deciding:
            now = self._clock()
            looked = self.cache.look(key, now)
        since = max(looked.since, now - self.leadership.heard_for(), self._clock.broken_at)
        looked = dataclasses.replace(looked, since=since, refused=self._refused.get(key, ""))
        if looked.job is None:
            self._gone(key, looked, now)
            return
        old = looked.job.get("status") or {}
        if not old and kueue.queue(looked.job) and not any(kind.group == kueue.GROUP for kind in self._found):
            self._look_around()  # it may have been installed a moment ago
        has = self._has(key)
        with self._deciding:
            plan = self.deciders[key.kind](looked, now, has)
        done = apply.Done(plan.look_again)
        if plan or plan.notes:
            if plan.status is not None:
                log.info("%s", plan.status.get("reason") or plan.status.get("state") or "its status changes", extra=_about(key))
            written = functools.partial(self.metrics.count_changes, old, plan.status or {}, plan.notes, now)
            try:
                done = apply.act(self.hands, looked.job, plan, now, self._each, self._later, written)
            except (Forbidden, Refused) as error:
                self._refused[key] = str(error)
                if plan.look_again is not None:  # the workers that are there wait no longer because of those that are refused
                    self.turns.later(key, plan.look_again)
                raise
            if done.stale:
                log.info("%s; it is looked at anew", done.stale, extra=_about(key))
        self._refused.pop(key, None)
        if done.blocked:
            self._refused[key] = done.blocked
        self.metrics.set_job(key.kind.resource, key.namespace, key.name, plan.status if plan.status is not None else old)
        if done.look_again is not None:
            self.turns.later(key, done.look_again)
        self._settle(key, plan, done, now)

    def _settle(self, key: Key, plan: Plan, done: apply.Done, now: float) -> None:
        """Look once more after something was done: only a look that finds nothing to do says that a job is settled. One that
        never settles gets its turns ever more slowly, and is named."""
        if not plan:
            self._busy.pop(key, None)
            return
        busy = self._busy[key] = self._busy.get(key, 0) + 1
        if busy <= BUSY and (done.stale or done.blocked):  # the watch may bring what has changed; should it be late, so are we
            self.turns.later(key, now + 1.0)
        elif busy <= BUSY:
            self.turns.add(key)
        else:
            pause = backoff.exponential(busy - BUSY, 1.0, LONGEST_PAUSE_S)
            log.warning("%d looks in a row found something to do; the next is in %.0f s", busy, pause, extra=_about(key))
            self.turns.rest(key, now + pause)  # our own writes come back as changes; they must not keep us busy

    def _gone(self, key: Key, looked: Looked, now: float) -> None:
        """There is no such job any more. What it owned goes by itself, but for pods on a node that nobody hears of."""
        self.metrics.remove_job(key.kind.resource, key.namespace, key.name)
        self._busy.pop(key, None)
        self._refused.pop(key, None)
        if not looked.pods or self._orphans is None or self._exists_otherwise(key):
            return
        plan = self._orphans(looked, now)
        for deletion in plan.deletes:
            apply.delete(self.hands, deletion, key.namespace)
        if plan.look_again is not None:
            self.turns.later(key, plan.look_again)

    def _exists_otherwise(self, key: Key) -> bool:
        """Whether a job of another kind has this name, and the pods."""
        others = [Key(kind, key.namespace, key.name) for kind in self.deciders if kind != key.kind]
        return any(self.cache.look(other, self._clock()).job is not None for other in others)

    def _failed(self, key: Key, error: Exception, *, bug: bool = False) -> None:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause = self._pause(count)
        self.metrics.count_error()
        sentence = "%s; the next try is in %.0f s"
        if bug:
            log.error(sentence, error, pause, extra=_about(key), exc_info=error)
        else:
            log.warning(sentence, error, pause, extra=_about(key))
        self.turns.later(key, self._clock() + pause)

    def _pause(self, failures: int) -> float:
        return backoff.exponential(failures - 1, self.settings.pause_s, LONGEST_PAUSE_S)

    @contextmanager
    def _timed(self, key: Key) -> Iterator[None]:
        begun = self._looking[key] = time.monotonic()
        try:
            yield
        finally:
            self._looking.pop(key, None)
            self.metrics.time_reconcile(time.monotonic() - begun)

    # what is told

    def health(self) -> probes.Health:
        """What the probes answer."""
        now, missing = time.monotonic(), self.cache.unsynced()
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        stuck = [key for key, begun in list(self._looking.items()) if now - begun > STUCK_S]
        if dead:
            reason = f"{', '.join(dead)} ended"
        elif stuck:
            reason = f"a look at {stuck[0].namespace}/{stuck[0].name} takes longer than {STUCK_S:.0f} s"
        elif missing:
            reason = f"waiting until all is known of {', '.join(kind.resource for kind in missing)}"
        else:
            reason = "acting" if self.leadership.holds() else "standing by"
        text = self.metrics.text(leads=self.leadership.holds())
        return probes.Health(not dead and not stuck, not missing and not dead, reason, text=text)


def _about(key: Key) -> dict[str, str]:
    """Of which job a line of the log is."""
    return {"job": key.name, "namespace": key.namespace}
