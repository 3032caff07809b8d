"""Reads the logs of a job's pods, either merged or followed across restarts and new pods.

The node's timestamps let a reader continue after a lost connection. No line is repeated, and no line is lost as long as the node
keeps it.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outlast.base import backoff
from outlast.base.errors import Absent, Refused, Unanswered
from outlast.job.logs import LogLine
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds, pod_status

_QUEUE = 10_000
_POLL_S = 1.0
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_QUIET_S = 30.0
"""How long a worker's log may be quiet after the job's end before it is no longer followed, in seconds. The worker may still
upload its output. Its pod's phase is not a reliable sign, because it may never change, for example on a lost node."""
_MAX_FOLLOW_S = 300.0
"""How long to follow a worker after the job's end, in seconds."""
_PAUSE_S = 0.5


def merge(
    cluster: api.Cluster,
    documents: Sequence[api.Document],
    *,
    tail: int | None = None,
    since_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[LogLine]:
    """Yield the pods' log lines in order of time. With `tail`, yield only the last lines of each worker's newest pod. `say` is
    called for pods whose node does not answer. Raises Unanswered if no node answers."""
    begun = sorted((pod for pod in documents if pod_status.has_started(pod)), key=pod_status.created_at)
    if tail is not None:
        begun = list({pod_status.index(pod): pod for pod in begun}.values())
    unread: list[Unanswered] = []

    def past(pod: api.Document) -> Iterator[tuple[tuple[str, str], LogLine]]:
        try:
            yield from _existing_lines(cluster, pod, tail=tail, since_s=since_s)
        except Unanswered as error:
            unread.append(error)
            if len(unread) == len(begun):
                raise
            say(f"worker {pod_status.index(pod)} cannot be read to its end: {error}")

    for _, line in heapq.merge(*map(past, begun), key=lambda each: each[0]):
        yield line


def _existing_lines(
    cluster: api.Cluster, pod: api.Document, *, tail: int | None, since_s: float | None
) -> Iterator[tuple[tuple[str, str], LogLine]]:
    """Yield a pod's log lines with their times. Without `tail`, they include the lines from before the last restart of the pod's
    container."""
    meta, index = pod["metadata"], pod_status.index(pod)
    restarted = tail is None and int(pod_status.container_status(pod).get("restartCount", 0)) > 0
    for previous in (True, False) if restarted else (False,):
        with contextlib.suppress(Absent, Refused):  # the pod is gone, or its node has deleted that log
            options = api.LogOptions(
                container=pod_status.container_name(pod), tail=tail, since_s=since_s, previous=previous, timestamps=True
            )
            for line in cluster.logs(meta["name"], options, namespace=meta["namespace"]):
                if stamped := _split(line):
                    yield stamped[0], LogLine(index, stamped[1])


_Item = LogLine | tuple[api.Document, bool] | str | BaseException | None
"""A line; a pod, and whether it was there when the following began; a sentence for `say`; an error; or the end of a thread."""


@dataclass
class Follower:
    """Follows pods' logs. One thread watches the pods, one polls whether the job is over, and one per pod reads its log."""

    cluster: api.Cluster
    labels: str
    is_over: Callable[[], bool]
    """Returns whether the job is over. It is called every second in a separate thread."""
    selected: Callable[[api.Document], bool] = lambda _: True
    is_finished: Callable[[str], bool] = lambda _: False
    """Returns whether the pod with this name will write nothing more, although it keeps running."""
    no_pods_reason: Callable[[], str] = lambda: "they are not made yet"
    tail: int | None = None
    since_s: float | None = None
    say: Callable[[str], None] = lambda _: None
    """Called with each new reason for waiting, and when the cluster does not answer."""

    def __post_init__(self) -> None:
        self._stop, self._job_is_over, self._pods_exist = api.Stop(), threading.Event(), False
        self._items: queue.Queue[_Item] = queue.Queue(_QUEUE)
        self._readers: dict[str, _Reader] = {}
        self._threads: list[threading.Thread] = []
        self._reported: dict[str, str] = {}

    def lines(self) -> Iterator[LogLine]:
        """Yield the lines of all present and future pods, until the job is over and each log has been read to its end or has been
        quiet for `_QUIET_S`."""
        deadline = 0.0  # deadline for the logs that are still open; 0 while the job is not over
        try:
            self._run(self._poll)
            while not self._all_read():
                item = None
                with contextlib.suppress(queue.Empty):
                    item = self._items.get(timeout=_PAUSE_S)
                if isinstance(item, LogLine):
                    yield item
                elif isinstance(item, tuple):
                    self._handle_pod(*item)
                elif isinstance(item, str):
                    self.say(item)
                elif isinstance(item, BaseException):
                    raise item
                if self._job_is_over.is_set():
                    deadline = deadline or time.monotonic() + _MAX_FOLLOW_S
                    for reader in self._readers.values():
                        if self.is_finished(reader.name) or reader.quiet_s() > _QUIET_S or time.monotonic() > deadline:
                            reader.finish()
        finally:
            self._stop.set()
            for reader in self._readers.values():
                reader.finish()

    def _all_read(self) -> bool:
        """Return whether nothing is left to read. Threads are checked before the queue, because a thread queues its last line
        before it ends."""
        reads = any(thread.is_alive() for thread in self._threads)
        return self._job_is_over.is_set() and not reads and self._items.empty()

    def _put(self, item: _Item) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=_PAUSE_S)
                return

    def _run(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
                self._put(None)  # wakes up `lines`, which checks whether threads are alive
            except BaseException as error:
                self._put(error)

        thread = threading.Thread(target=guarded, name="logs", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(Unanswered):  # from the first list; after that, the watch retries
                for change in self.cluster.watch(kinds.POD, labels=self.labels, stop=self._stop):
                    if change.type != "deleted":
                        self._put((change.document, False))
            self._stop.wait(_PAUSE_S)

    def _poll(self) -> None:
        first, waiting = True, ""
        while not self._stop.is_set():
            # Whether the job is over is asked first, so that the last list has all its pods. Before that, pods are watched.
            over, pods = backoff.until_answered(
                lambda: (
                    over := self.is_over(),
                    self.cluster.list_(kinds.POD, labels=self.labels) if over or not self._pods_exist else (),
                ),
                self._put,
                every_s=_POLL_S,
                hopeless=lambda error: self._stop.is_set() or not isinstance(error, Unanswered),
            )
            for pod in pods:
                self._put((pod, first))
            self._pods_exist = self._pods_exist or bool(pods)
            if over:
                self._job_is_over.set()
                return
            if first:
                self._run(self._watch)
            if not self._pods_exist and waiting != (waiting := f"waiting for pods: {self.no_pods_reason()}"):
                self._put(waiting)
            first = False
            self._stop.wait(_POLL_S)

    def _handle_pod(self, pod: api.Document, first: bool) -> None:
        """Start reading a pod's log once the pod has started; until then, report why the pod is waiting."""
        uid = pod["metadata"]["uid"]
        if uid in self._readers or not self.selected(pod):
            return
        if pod_status.has_started(pod):
            tail, since_s = (self.tail, self.since_s) if first else (None, None)
            reader = self._readers[uid] = _Reader(self.cluster, pod, self._put, self._stop, tail=tail, since_s=since_s)
            self._threads.append(self._run(reader.read))
        elif (why := pod_status.waiting_reason(pod)) and self._reported.get(uid) != why:
            self._reported[uid] = why
            self.say(f"worker {pod_status.index(pod)} {why}")


class _Reader:
    """Reads one pod's log to its end, across lost connections and container restarts."""

    def __init__(
        self,
        cluster: api.Cluster,
        pod: api.Document,
        put: Callable[[LogLine], None],
        stop: api.Stop,
        *,
        tail: int | None,
        since_s: float | None,
    ) -> None:
        self._cluster, self._put, self._stop = cluster, put, stop
        self._tail, self._since_s = tail, since_s
        self._finished = api.Stop()
        self.name, self.namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self._uid, self._container, self._index = pod["metadata"]["uid"], pod_status.container_name(pod), pod_status.index(pod)
        self._restarts = int(pod_status.container_status(pod).get("restartCount", 0))
        """Number of container restarts when this reader last read the pod."""
        self._last_line_at = time.monotonic()
        self._last, self._lines_at_last = "", 0
        """The time of the newest line, and the number of lines read with that time. Both are kept across container restarts, so
        that no line is repeated."""

    def read(self) -> None:
        if self._restarts and self._tail is None:
            self._lines(previous=True)
        while not self._stop.is_set():
            self._lines(follow=True)
            if self._finished.wait(_PAUSE_S):
                self._lines()
                return
            if (pod := self._current_pod()) is None:
                return
            starts = int(pod_status.container_status(pod).get("restartCount", 0))
            if starts == self._restarts + 1:
                self._lines(previous=True)  # the lines after the connection was lost
            self._restarts = starts
            if pod_status.finished(pod) or (not pod_status.running(pod) and pod["metadata"].get("deletionTimestamp")):
                self._lines()
                return

    def finish(self) -> None:
        self._finished.set()

    def quiet_s(self) -> float:
        return time.monotonic() - self._last_line_at

    def _current_pod(self) -> api.Document | None:
        while not self._stop.is_set():
            try:
                pod = self._cluster.find(kinds.POD, self.name, namespace=self.namespace)
                return pod if pod and pod["metadata"]["uid"] == self._uid else None
            except Unanswered:
                self._stop.wait(_PAUSE_S)
        return None

    def _lines(self, *, follow: bool = False, previous: bool = False) -> None:
        skip, begin = self._lines_at_last, self._last
        if self._stop.is_set():
            return
        try:
            options = api.LogOptions(
                container=self._container,
                follow=follow,
                previous=previous,
                timestamps=True,
                since=self._last,
                tail=None if self._last else self._tail,
                since_s=None if self._last else self._since_s,
            )
            stop = self._finished if follow else self._stop
            for line in self._cluster.logs(self.name, options, namespace=self.namespace, stop=stop):
                if (stamped := _split(line)) is None:
                    continue
                when, text = stamped
                if begin and when < _sort_key(begin):
                    continue
                if begin and when == _sort_key(begin) and skip:
                    skip -= 1
                    continue
                stamp = line.partition(" ")[0]
                self._lines_at_last = self._lines_at_last + 1 if stamp == self._last else 1
                self._last = stamp
                self._last_line_at = time.monotonic()
                self._put(LogLine(self._index, text))
        except (Absent, Refused, Unanswered):  # the pod is gone, not restarted yet, or unreachable: `read` checks
            return


def _split(line: str) -> tuple[tuple[str, str], str] | None:
    """Return a line's time and text; None for the kubelet's own messages, such as `unable to retrieve container logs`."""
    stamp, _, text = line.partition(" ")
    return (_sort_key(stamp), text) if _TIMESTAMP.fullmatch(stamp) else None


def _sort_key(stamp: str) -> tuple[str, str]:
    """Return a timestamp in a form that can be compared. Go omits trailing zeros in fractions, so they are added."""
    fraction = re.search(r"\.(\d+)", stamp)
    return stamp[:19], (fraction[1] if fraction else "").ljust(9, "0")
