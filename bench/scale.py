"""Cost of many workers for the operator: a reconcile of one large job, and 10,000 training jobs of 4 workers.

    python bench/scale.py --quick         1,000 jobs, 15 s
    python bench/scale.py                 10,000 jobs, 60 s

The operator is the real one (watches, cache, turns, deciders, writes) in this process; the API server is simulated in it. Each
event of a watch is a line of JSON that is made by a template and decoded as the client decodes it, each write is encoded and its
answer decoded. HTTP and TLS are not part of this: see `operating.py` for what a write costs with them. Every worker renews its
Lease as often as one does whose peers watch it (30 s), with `--unwatched` as one without peers (10 s), evenly spread, and tells
of another step each time. Jobs, pods and Leases are those of a job of the tests' simulated cluster, with other names.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import os
import platform
import queue
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from outlast.base.errors import Absent
from outlast.job import contract
from outlast.kubernetes import api, board
from outlast.kubernetes.api import kinds, pod_status, watch
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.operator.cluster_cache import Cache, Key, trimmed
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.leader import Leadership
from outlast.kubernetes.operator.main import GC_THRESHOLD, reconcilers
from outlast.kubernetes.operator.observed_job import RECEIVED_AT, Limits
from outlast.kubernetes.operator.operator import Operator
from outlast.kubernetes.operator.watches import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
import simulated

Document = dict[str, Any]
WATCHED = (kinds.ELASTIC_JOB, kinds.LEGACY_JOB, kinds.POD, kinds.LEASE, kinds.NODE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4, help="of each job")
    parser.add_argument("--seconds", type=float, default=60.0, help="of which the CPU is measured")
    parser.add_argument(
        "--unwatched", action="store_true", help="workers do not watch one another, and renew their Leases more often"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.quick:
        args.jobs, args.seconds = 1000, 15.0
    gc.set_threshold(GC_THRESHOLD)  # as the operator's process does
    load = os.getloadavg()[0]
    lines = [
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; load {load:.1f} when this began",
        "",
        "| workers of one job | a look | a worker |",
        "|---|---|---|",
        *(f"| {workers:,} | {1000 * took:.0f} ms | {1e6 * took / workers:.0f} µs |" for workers, took in looks()),
        "",
        *trains(args.jobs, args.workers, args.seconds, watched=not args.unwatched),
    ]
    text = "\n".join(lines)
    print(text)
    args.results.mkdir(exist_ok=True)
    with open(args.results / f"{time.strftime('%Y-%m-%d')}-scale.md", "a") as file:
        file.write(f"# Scale, {time.strftime('%H:%M')}\n\n{text}\n\n")


# ------------------------------------------------------------------------------------------------------------- one large job


def looks() -> Iterator[tuple[int, float]]:
    """Yield the number of workers of a settled job and the CPU seconds of one reconcile of it, from the cache to the plan."""
    for workers in (1000, 2000, 10_000):
        known = Cache([kinds.ELASTIC_JOB], lambda key, urgency: None)
        versions, now = itertools.count(1), time.time()
        for kind in known._required:
            known.begin_listing(kind)
        for kind, document in large(workers):
            document["metadata"]["resourceVersion"] = str(next(versions))
            known.put(kind, trimmed(kind, document | ({RECEIVED_AT: now} if kind == kinds.LEASE else {})))
        for kind in known._required:
            known.set_version(kind, str(next(versions)), now - 600)
        decide, key = reconcilers(Limits())[kinds.ELASTIC_JOB], Key(kinds.ELASTIC_JOB, "team", "train")
        took = []
        for _ in range(5):
            begun = time.process_time()
            plan = decide(known.job(key, now + 5), now + 5, ClusterFeatures())
            took.append(time.process_time() - begun)
            assert not plan.deletes
            assert not plan.creates
        yield workers, statistics.median(took)


def whole(document: Document) -> Document:
    """Return a document as an API server stores it."""
    meta = document["metadata"]
    kept = {key: value for key, value in document.items() if key != RECEIVED_AT}
    return {**kept, "metadata": {**meta, "namespace": "team", "uid": meta.get("uid", f"{meta['name']}-uid")}}


def large(workers: int) -> Iterator[tuple[Kind, Document]]:
    """Return the documents of one training job."""
    cluster = simulated.Cluster({"replicas": 2, "min": 1, "max": 10_000}, steps=10**6)
    cluster.until(simulated.trains(2))
    cluster.run(30)
    job = cluster.job
    job["spec"]["workers"]["replicas"] = workers
    job["status"]["rendezvous"]["world"]["members"] = job["status"]["world"] = list(range(workers))
    yield kinds.ELASTIC_JOB, whole(job)
    for node in cluster.all("Node"):
        yield kinds.NODE, node
    for kind, name in ((kinds.POD, "Pod"), (kinds.LEASE, "Lease")):
        text = json.dumps(whole(cluster.documents[name, "train-worker-1"]))
        uid = cluster.documents["Pod", "train-worker-1"]["metadata"]["uid"]
        for index in range(workers):
            made = text.replace("train-worker-1", f"train-worker-{index}").replace(uid, f"pod-{index}")
            made = made.replace(f'"{contract.Label.WORKER}": "1"', f'"{contract.Label.WORKER}": "{index}"')
            yield kind, json.loads(made)


# ---------------------------------------------------------------------------------------------------------------- many jobs


class Simulated:
    """Simulated API server behind the operator's client interface, see `api.Cluster`: documents and watch events."""

    namespace = "default"

    def __init__(self, jobs: int, workers: int, *, watched: bool) -> None:
        """Create the documents of all jobs. With `watched`, the workers of a job watch one another."""
        self.every_s = board.renewal_interval_s(workers, mesh=watched)
        """Seconds between two renewals of each Lease."""
        self.versions = itertools.count(1000)
        self.changes: dict[Kind, queue.SimpleQueue[bytes]] = {kind: queue.SimpleQueue() for kind in WATCHED}
        self.first: dict[Kind, list[bytes]] = {kind: [] for kind in WATCHED}
        self.lease: Document | None = None
        self.written = self.deleted = 0
        self.renewals: list[tuple[float, int, bytes]] = []
        """Time of the next renewal of each Lease, index of the Lease, and template of the new document."""
        self.stop = threading.Event()
        self._fill(jobs, workers, watched=watched)

    def _fill(self, jobs: int, workers: int, *, watched: bool) -> None:
        cluster = simulated.Cluster({"replicas": workers, "min": 1, "max": workers}, steps=10**9)
        cluster.mesh = watched
        cluster.until(simulated.trains(workers))
        cluster.run(40)
        for node in cluster.all("Node"):
            self.first[kinds.NODE].append(self._line(json.dumps(node)))
        uid = cluster.job["metadata"]["uid"][:8]
        texts = [(kinds.ELASTIC_JOB, json.dumps(whole(cluster.job)))]
        texts += [(kinds.POD, json.dumps(whole(each))) for each in cluster.pods]
        texts += [(kinds.LEASE, json.dumps(whole(each))) for each in cluster.all("Lease")]
        for number in range(jobs):
            for kind, text in texts:
                told = f'"progressTime": "{pod_status.rfc3339(time.time() - number % 100)}"'  # each is told at another time
                made = re.sub(r"\btrain\b(?!ing)", f"job-{number:05}", re.sub(r'"progressTime": "[^"]*"', told, text))
                made = made.replace(uid, f"{number:08x}").replace("-uid", f"-{number}")
                line = self._line(made)
                self.first[kind].append(line)
                if kind == kinds.LEASE:
                    template = re.sub(rb'(\\"step\\": )\d+', rb"\1%d", line.replace(b"%", b"%%"))
                    template = re.sub(rb'("resourceVersion": ")\d+', rb"\1%d", template)
                    self.renewals.append((0.0, len(self.renewals), template))

    def _line(self, text: str) -> bytes:
        version = f'"metadata": {{"resourceVersion": "{next(self.versions)}", '
        return text.replace('"metadata": {', version, 1).encode()

    def renewed(self) -> Iterator[bytes]:
        """Yield the watch events of the Leases that are due for renewal."""
        begun, count = time.monotonic(), len(self.renewals)
        due = [(begun + self.every_s * n / count, n, template) for _, n, template in self.renewals]
        heapq.heapify(due)
        step = 1000
        while not self.stop.is_set():
            when, number, template = due[0]
            if (wait := when - time.monotonic()) > 0:
                self.stop.wait(max(0.005, wait))
                continue
            step += 1
            yield template % (
                (next(self.versions), step) if template.index(b"resourceVersion") < template.index(b"step") else (step, 0)
            )
            heapq.heapreplace(due, (when + self.every_s, number, template))

    def queued(self, kind: Kind) -> Iterator[bytes]:
        while not self.stop.is_set():
            try:
                yield self.changes[kind].get(timeout=0.5)
            except queue.Empty:
                continue

    # what the operator asks for

    def watch(self, kind: Kind, *, on_version: Callable[[str | None], None], **_: Any) -> Iterator[api.Change]:
        reported = watch._Reported()

        def change(line: bytes) -> api.Change:
            found = api.Change("modified", json.loads(line))
            reported.record(found)
            return found

        yield from (change(line) for line in self.first[kind])
        self.first[kind] = []
        on_version(str(next(self.versions)))
        yield from (change(line) for line in (self.renewed() if kind == kinds.LEASE else self.queued(kind)))

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        document = {**document, "metadata": {**document["metadata"], "resourceVersion": str(next(self.versions))}}
        line = json.dumps(document).encode()
        if document["kind"] == "Lease":
            self.lease = document
        else:
            self.written += 1
            self.changes[kinds.kind_of(document)].put(line)
        return dict(json.loads(line))

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document:
        if kind == kinds.LEASE and self.lease is not None:
            return self.lease
        raise Absent(f"there is no {kind} {name}")

    def create(self, document: Document) -> Document:
        if document["kind"] == "Lease":
            return self.replace(document)
        assert document["kind"] == "Event", f"jobs that train need no new {document['kind']}"
        return document

    def delete(self, kind: Kind, name: str, **_: Any) -> Document:
        self.deleted += 1
        raise Absent(f"{kind} {name} is gone")

    def serves(self, kind: Kind) -> bool:
        return False


def trains(jobs: int, workers: int, seconds: float, *, watched: bool) -> list[str]:
    """Measure the cost of training jobs. With `watched`, their workers watch one another."""
    process = psutil.Process()
    cluster = Simulated(jobs, workers, watched=watched)
    every_s, other_s = cluster.every_s, board.renewal_interval_s(workers, mesh=not watched)
    gc.collect()
    before = process.memory_info().rss
    operator = Operator(
        cluster,  # type: ignore[arg-type]
        reconcilers(Limits()),
        Leadership(cluster, "bench", "default"),  # type: ignore[arg-type]
        Settings(host="127.0.0.1"),
    )
    stop = threading.Event()
    thread = threading.Thread(target=operator.run, args=(stop,))
    thread.start()
    while not (operator.leadership.is_leader() and not operator.cache.unsynced() and operator.queue.idle()):
        time.sleep(1)
    time.sleep(40.0)  # after its first look each job is due at another time

    def looks() -> float:
        return operator.metrics.registry.get_sample_value("outlast_reconcile_seconds_count") or 0

    cpu, looked, written = process.cpu_times(), looks(), cluster.written
    begun = time.monotonic()
    time.sleep(seconds)
    took, now = time.monotonic() - begun, process.cpu_times()
    used = (now.user + now.system - cpu.user - cpu.system) / took
    looked, written, memory = looks() - looked, cluster.written - written, process.memory_info().rss
    stop.set()
    cluster.stop.set()
    thread.join(20)
    if cluster.deleted:
        sys.exit(f"{cluster.deleted} workers were taken for dead: this machine is too busy to simulate so many Leases")
    return [
        f"{jobs:,} jobs of {workers} workers that train, {took:.0f} s; API server simulated in this process, no HTTP, no TLS",
        "",
        "| what | measured | goal |",
        "|---|---|---|",
        f"| CPU, the simulation with it | {used:.2f} cores | ≤ 0.5 |",
        f"| memory, the same | {memory / 2**20:.0f} MiB ({before / 2**20:.0f} before the operator began) | ≤ 1,024 |",
        f"| Leases renewed, each every {every_s:g} s | {jobs * workers / every_s:.0f} a second | |",
        f"| computed {'without' if watched else 'with'} watching peers | {jobs * workers / other_s:.0f} a second | |",
        f"| looks | {looked / took:.0f} a second | |",
        f"| statuses written | {written / took:.0f} a second | |",
    ]


if __name__ == "__main__":
    main()
