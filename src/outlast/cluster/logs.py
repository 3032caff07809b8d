"""The logs of a job's pods: of all that there are, merged; or followed, each line once, through restarts and new pods.

`KubernetesBackend.logs` calls it. Lines carry the time at which the node had them, and that is how a reader that has lost its
connection knows where to go on: no line is lost while the node still has it, and none is said twice.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from outlast import backoff, kube
from outlast.backends import LogLine
from outlast.errors import Absent, Refused, Unanswered
from outlast.kube import pods

_QUEUE = 10_000
"""Lines that may wait for the reader of all."""
_LOOK_S = 1.0
"""How often it is looked whether the job is over."""
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
"""RFC 3339, as nodes write it."""
_QUIET_S = 30.0
"""A worker of a job that has ended is waited for until it has said nothing for so long: it may push its output still. That its
pod is said to run means little: its node may be lost, or nobody be there to delete it."""
_LAST_S = 300.0
"""How long such a worker is listened to at most."""
_PAUSE_S = 0.5
"""Before a log whose connection ended is asked for again."""


def merged(
    cluster: kube.Cluster,
    found: Sequence[kube.Document],
    *,
    tail: int | None = None,
    since_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[LogLine]:
    """The lines of all pods, in the order of time; with `tail`, the last so many of the newest pod of each worker.

    `say` is told of pods whose nodes do not answer; when none does, that is raised.
    """
    begun = sorted((pod for pod in found if pods.began(pod)), key=pods.born)
    if tail is not None:
        begun = list({pods.index(pod): pod for pod in begun}.values())
    unread: list[Unanswered] = []

    def past(pod: kube.Document) -> Iterator[tuple[tuple[str, str], LogLine]]:
        try:
            yield from _past(cluster, pod, tail=tail, since_s=since_s)
        except Unanswered as error:
            unread.append(error)
            if len(unread) == len(begun):
                raise
            say(f"worker {pods.index(pod)} cannot be read to its end: {error}")

    for _, line in heapq.merge(*map(past, begun), key=lambda each: each[0]):
        yield line


def _past(
    cluster: kube.Cluster, pod: kube.Document, *, tail: int | None, since_s: float | None
) -> Iterator[tuple[tuple[str, str], LogLine]]:
    """Times and lines of a pod: of its container as it was before it was last started again, too."""
    meta, index = pod["metadata"], pods.index(pod)
    before = tail is None and int(pods.container_status(pod).get("restartCount", 0)) > 0
    for previous in (True, False) if before else (False,):
        with contextlib.suppress(Absent, Refused):  # gone meanwhile, or its node has forgotten that log
            options = kube.LogOptions(
                container=pods.container_name(pod), tail=tail, since_s=since_s, previous=previous, timestamps=True
            )
            for line in cluster.logs(meta["name"], options, namespace=meta["namespace"]):
                if stamped := _split(line):
                    yield stamped[0], LogLine(index, stamped[1])


def follow(
    cluster: kube.Cluster,
    labels: str,
    *,
    over: Callable[[], bool],
    wanted: Callable[[kube.Document], bool],
    finished: Callable[[str], bool] = lambda _: False,
    why: Callable[[], str] = lambda: "they are not made yet",
    tail: int | None = None,
    since_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[LogLine]:
    """The lines of all `wanted` pods that there are and will be, until the job is `over` and all is said.

    `over` is asked every second by a thread of its own, and `why` there are no pods while there are none. `finished` is asked of
    a pod's name when the job is over: whether it has said all, although it stays up. `say` is told what is waited for, whenever
    that changes, and that the cluster does not answer; it is waited for. Once the job is over this ends, whatever becomes of
    pods: with those that end, or say nothing for `_QUIET_S`.
    """
    stop, ended, there = kube.Stop(), threading.Event(), threading.Event()
    news: queue.Queue[LogLine | kube.Change | str | BaseException | None] = queue.Queue(_QUEUE)
    readers: dict[str, _Reader] = {}
    threads: list[threading.Thread] = []
    said: dict[str, str] = {}
    last = 0.0
    """When those that are read still are waited for no longer; 0 while the job is not over."""

    def put(item: LogLine | kube.Change | str | BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                news.put(item, timeout=_PAUSE_S)
                return

    def run(work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
                put(None)  # so that its end is noticed
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=guarded, name="logs", daemon=True)
        thread.start()
        return thread

    def watch() -> None:
        while not stop.is_set():
            with contextlib.suppress(Unanswered):  # its first list; later it tries again itself, and `judge` says so
                for change in cluster.watch(kube.POD, labels=labels, stop=stop):
                    put(change)
            stop.wait(_PAUSE_S)

    def judge() -> None:
        waiting = ""

        def remaining() -> Sequence[kube.Document] | None:
            """All pods, of some of which the watch may not have told yet, when the job is over."""
            nonlocal waiting
            if stop.is_set():
                return ()
            if over():
                return cluster.list_(kube.POD, labels=labels)
            if not there.is_set() and waiting != (waiting := f"waiting for pods: {why()}"):
                put(waiting)
            return None

        while (found := backoff.until_answered(remaining, put, every_s=_LOOK_S)) is None:
            stop.wait(_LOOK_S)
        for pod in found:
            put(kube.Change("added", pod))
        ended.set()

    def look(pod: kube.Document, *, first: bool) -> None:
        there.set()
        uid = pod["metadata"]["uid"]
        if uid in readers or not wanted(pod):
            return
        if pods.began(pod):
            readers[uid] = _Reader(cluster, pod, put, stop, tail=tail if first else None, since_s=since_s if first else None)
            threads.append(run(readers[uid].read))
        elif (why := pods.waits(pod)) and said.get(uid) != why:
            said[uid] = why
            say(f"worker {pods.index(pod)} {why}")

    try:
        present = backoff.until_answered(lambda: cluster.list_(kube.POD, labels=labels), say, every_s=_LOOK_S)
        for pod in present:
            look(pod, first=True)
        run(watch)
        run(judge)
        while not (ended.is_set() and news.empty() and not any(thread.is_alive() for thread in threads) and news.empty()):
            item: object = None
            with contextlib.suppress(queue.Empty):
                item = news.get(timeout=_PAUSE_S)
            if isinstance(item, LogLine):
                yield item
            elif isinstance(item, kube.Change):
                if item.type != "deleted":
                    look(item.document, first=False)
            elif isinstance(item, str):
                say(item)
            elif isinstance(item, BaseException):
                raise item
            if ended.is_set():
                last = last or time.monotonic() + _LAST_S
                for reader in readers.values():
                    if finished(reader.name) or reader.quiet_s() > _QUIET_S or time.monotonic() > last:
                        reader.finish()
    finally:
        stop.set()
        for reader in readers.values():
            reader.finish()


class _Reader:
    """Reads the log of one pod to its end, whatever happens to connections and containers."""

    def __init__(
        self,
        cluster: kube.Cluster,
        pod: kube.Document,
        put: Callable[[LogLine], None],
        stop: kube.Stop,
        *,
        tail: int | None,
        since_s: float | None,
    ) -> None:
        self._cluster, self._put, self._stop = cluster, put, stop
        self._tail, self._since_s = tail, since_s
        self._finished = kube.Stop()
        self.name, self.namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self._uid, self._container, self._index = pod["metadata"]["uid"], pods.container_name(pod), pods.index(pod)
        self._starts = int(pods.container_status(pod).get("restartCount", 0))
        """Which of the container's starts is read."""
        self._heard = time.monotonic()
        self._last, self._same = "", 0
        """When the newest line was written, and how many lines were at that moment. Kept through starts of the container: what
        was read of one before it was known to be another is not said again."""

    def read(self) -> None:
        if self._starts and self._tail is None:
            self._lines(previous=True)
        while not self._stop.is_set():
            self._lines(follow=True)
            if self._finished.wait(_PAUSE_S):
                self._lines()
                return
            if (pod := self._look()) is None:
                return
            starts = int(pods.container_status(pod).get("restartCount", 0))
            if starts == self._starts + 1:
                self._lines(previous=True)  # what came after the connection was lost
            self._starts = starts
            if pods.over(pod) or (not pods.running(pod) and pod["metadata"].get("deletionTimestamp")):
                self._lines()
                return

    def finish(self) -> None:
        """Take what has been written, and wait for no more."""
        self._finished.set()

    def quiet_s(self) -> float:
        """For how long it has said nothing."""
        return time.monotonic() - self._heard

    def _look(self) -> kube.Document | None:
        """The pod as it is now; None when it is gone."""
        while not self._stop.is_set():
            try:
                pod = self._cluster.get(kube.POD, self.name, namespace=self.namespace)
                return pod if pod["metadata"]["uid"] == self._uid else None
            except Absent:
                return None
            except Unanswered:
                self._stop.wait(_PAUSE_S)
        return None

    def _lines(self, *, follow: bool = False, previous: bool = False) -> None:
        """Say the lines that were not said yet."""
        skip, begin = self._same, self._last
        if self._stop.is_set():
            return
        try:
            options = kube.LogOptions(
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
                if begin and when < _moment(begin):
                    continue
                if begin and when == _moment(begin) and skip:
                    skip -= 1
                    continue
                stamp = line.partition(" ")[0]
                self._same = self._same + 1 if stamp == self._last else 1
                self._last = stamp
                self._heard = time.monotonic()
                self._put(LogLine(self._index, text))
        except (Absent, Refused, Unanswered):  # gone, not begun again yet, or out of reach: `read` looks which
            return


def _split(line: str) -> tuple[tuple[str, str], str] | None:
    """The moment and the text of a line with its time. None for one without: that is the kubelet's own, such as that it has
    forgotten the log of a container (`unable to retrieve container logs for containerd://...`)."""
    stamp, _, text = line.partition(" ")
    return (_moment(stamp), text) if _STAMP.fullmatch(stamp) else None


def _moment(stamp: str) -> tuple[str, str]:
    """A time that can be compared with others of its node: Go leaves out zeros at the end of fractions."""
    fraction = re.search(r"\.(\d+)", stamp)
    return stamp[:19], (fraction[1] if fraction else "").ljust(9, "0")
