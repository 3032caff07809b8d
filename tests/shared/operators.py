"""Operator with the test's decider, against a small API server over real HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import apiserver
import rights
from outlast.job.contract import Label
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import owner_references
from outlast.kubernetes.api.kinds import ELASTIC_JOB, POD, Kind
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.leader import Leadership
from outlast.kubernetes.operator.operator import Operator
from outlast.kubernetes.operator.plan import Document, Plan
from outlast.kubernetes.operator.watches import Settings


def pods_of(looked: CachedJob, *, count: int) -> Plan:
    """Decide a plan of `count` pods per job."""
    job = looked.job
    assert job is not None
    meta, known = job["metadata"], job.get("status") or {}
    ours = [pod for pod in looked.pods if any(owner["uid"] == meta["uid"] for owner in pod["metadata"]["ownerReferences"])]
    names = {pod["metadata"]["name"] for pod in ours}
    status = {**known, "state": "Running"}
    there = {"namespace": meta["namespace"], "ownerReferences": [owner_references.reference(job)]}
    labels = {f"{meta['name']}-worker-{index}": {Label.JOB: meta["name"], Label.WORKER: str(index)} for index in range(count)}
    missing = [{**there, "name": name, "labels": labels[name]} for name in labels if name not in names]
    creates = tuple(POD.document(each, spec={"containers": []}) for each in missing)
    return Plan(status=status if status != known else None, creates=creates)


def writes(operator: Operator) -> dict[str, int]:
    samples = [each for metric in operator.metrics.registry.collect() for each in metric.samples]
    counts = [each for each in samples if each.name == "outlast_operator_writes_total"]
    return {f"{each.labels['verb']} {each.labels['kind']}": int(each.value) for each in counts}


def looks(operator: Operator) -> int:
    return int(operator.metrics.registry.get_sample_value("outlast_reconcile_seconds_count") or 0)


class World:
    def __init__(self, api: apiserver.ApiServer, connect: Callable[[], kube.Cluster]) -> None:
        self.api, self.connect = api, connect
        self.running: list[tuple[Operator, threading.Event, threading.Thread, list[int]]] = []

    def start(self, count: int = 2, *, me: str = "a", every_s: float = 5.0, duration_s: float = 15.0, **how: Any) -> Operator:
        cluster = self.connect()

        def decider(looked: CachedJob, now: float, found: ClusterFeatures) -> Plan:
            return pods_of(looked, count=count)

        leadership = Leadership(cluster, me, "default", interval_s=every_s, duration_s=duration_s)
        reconcilers = how.pop("reconcilers", {ELASTIC_JOB: decider})
        settings = Settings(host="127.0.0.1", retry_s=0.02, discovery_s=how.pop("discovery_s", 60.0))
        operator = Operator(cluster, reconcilers, leadership, settings, **how)
        stop, codes = threading.Event(), list[int]()
        thread = threading.Thread(target=lambda: codes.append(operator.run(stop)))
        thread.start()
        self.running.append((operator, stop, thread, codes))
        return operator

    def stop(self, number: int = -1) -> int:
        _, stop, thread, codes = self.running[number]
        stop.set()
        thread.join(60)
        assert codes, "it did not stop"
        return codes[0]

    def status(self, name: str, kind: Kind = ELASTIC_JOB) -> Document:
        with self.api.lock:
            return dict(self.api.documents[kind.resource, "default", name].get("status") or {})

    def apply(self, *names: str) -> None:
        for name in names:
            self.api.put(ELASTIC_JOB.document({"name": name}, spec={"image": "i"}))

    def submit(self, name: str = "a", **fields: Any) -> None:
        """Create a job that can be rendered: of two workers, unless `fields` of its specification say otherwise."""
        spec = {"image": "i", "module": "m", "workers": {"replicas": 2}, **fields}
        self.api.put(ELASTIC_JOB.document({"name": name, "generation": 1}, spec=spec))

    def pods(self) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.api.objects("pods"))

    def settled(self, names: Sequence[str], count: int = 2) -> None:
        """Wait until each job has its pods and no operator has work."""
        wanted = sorted(f"{name}-worker-{index}" for name in names for index in range(count))
        self.api.until(lambda: self.pods() == wanted)
        self.api.until(lambda: all(each.queue.idle() for each, *_ in self.running if each.leadership.is_leader()))

    def writes(self) -> list[str]:
        with self.api.lock:
            return [each for each in self.api.asked if not each.startswith("GET ") and "/leases" not in each]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    api = apiserver.ApiServer(unserved=("kueue.x-k8s.io",))
    api.may = rights.may
    with apiserver.entered(api, tmp_path, monkeypatch), contextlib.ExitStack() as open_:
        world = World(api, lambda: open_.enter_context(contextlib.closing(kube.connect(namespace="default"))))
        yield world
        for number in range(len(world.running)):
            world.stop(number)
