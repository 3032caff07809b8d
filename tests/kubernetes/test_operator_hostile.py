"""The operator against whatever users may write into a cluster: one job's document, object or label harms no other job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import apiserver
import large_jobs
from operators import World
from outlast.job import contract
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEGACY_JOB, Kind
from outlast.kubernetes.jobs.backend import KubernetesBackend
from outlast.kubernetes.operator import main, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.decide import decide
from outlast.kubernetes.operator.observed_job import Limits

Document = dict[str, Any]
SENTENCES = {
    apiserver.DEEP: "its spec is nested more than 100 levels deep; make it flatter",
    apiserver.FAT: "its spec takes 1318 KiB; at most 128 KiB are read: make it smaller",
}


def a_job(name: str, kind: Kind = ELASTIC_JOB, template: Any = None) -> Document:
    meta = {"name": name, "namespace": "default", "generation": 1}
    if kind == LEGACY_JOB:
        pods = {"spec": {"containers": [{"name": "w", "image": "i"}]}, **({"metadata": template} if template else {})}
        spec: Document = {"minReplicas": 1, "maxReplicas": 2, "replicaSpecs": {"Worker": {"replicas": 2, "template": pods}}}
    else:
        spec = {"image": "i", "module": "m", "workers": {"replicas": 2}, **({"template": template} if template else {})}
    return kind.document(meta, spec=spec)


UNREADABLE = [
    (ELASTIC_JOB, apiserver.FAT),
    (LEGACY_JOB, apiserver.DEEP),
    pytest.param(ELASTIC_JOB, apiserver.DEEP, marks=pytest.mark.slow),
    pytest.param(LEGACY_JOB, apiserver.FAT, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "template"), UNREADABLE)
def test_a_job_that_cannot_be_read_fails_and_the_others_go_on(world: World, kind: Kind, template: str) -> None:
    sentence = SENTENCES[template]
    world.api.unserved = ("kueue.x-k8s.io", "scheduling.x-k8s.io", "scheduling.volcano.sh")
    world.api.put(a_job("bad", kind, template))
    operator = world.start(reconcilers=main.reconcilers(Limits()))
    world.api.put(a_job("good", kind))
    world.api.until(lambda: world.pods() == ["good-worker-0", "good-worker-1"])
    world.api.put(a_job("worse", kind, template))  # the watch brings this one
    for name in ("bad", "worse"):
        world.api.until(lambda name=name: world.status(name, kind).get("state") == "Failed")
        status = world.status(name, kind)
        (failed,) = [each for each in status["conditions"] if each["type"] == "Failed"]
        assert (failed["status"], failed["reason"]) == ("True", "InvalidJob")
        assert sentence in failed["message"]
    world.api.remove("pods", "good-worker-1")
    world.api.until(lambda: world.pods() == ["good-worker-0", "good-worker-1"])

    def said() -> list[Document]:
        return [each for each in world.api.objects("events") if sentence in each["message"]]

    world.api.until(lambda: len(said()) == 2)
    assert world.api.documents[kind.resource, "default", "bad"]["spec"] == a_job("bad", kind, template)["spec"]
    assert all(thread.is_alive() for thread in operator._threads)


@pytest.mark.parametrize(("kind", "template"), UNREADABLE)
def test_a_job_that_cannot_be_read_is_listed_among_the_others(world: World, kind: Kind, template: str) -> None:
    world.api.put(a_job("bad", kind, template))
    world.api.put(a_job("good", kind))
    world.api.may = lambda *_: True  # a user asks, not the operator
    backend = KubernetesBackend(world.connect())
    assert SENTENCES[template] in backend.status("bad").reason
    assert {status.name: status.reason for status in backend.list()} == {
        "bad": f"it cannot be read: {SENTENCES[template]}",
        "good": "no operator has taken it up yet; is one installed? (outlast install)",
    }


def test_a_bug_that_one_document_meets_keeps_no_other_from_being_heard(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from outlast.kubernetes.operator import cluster_cache

    whole = cluster_cache.trimmed

    def trimmed(kind: Kind, document: Document) -> Document:
        if document["metadata"]["name"] == "bad":
            raise ZeroDivisionError("a bug")
        return whole(kind, document)

    monkeypatch.setattr(cluster_cache, "trimmed", trimmed)
    world.apply("bad", "a")
    operator = world.start()
    world.settled(["a"])
    world.apply("b")
    world.settled(["a", "b"])
    assert all(thread.is_alive() for thread in operator._threads)


def test_a_bug_of_a_watch_is_said_and_the_watch_begun_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = api.Cluster.watch, [True] * 3

    def watch(self: api.Cluster, kind: Kind, **how: Any) -> Any:
        if kind == ELASTIC_JOB and broken:
            broken.pop()
            raise ZeroDivisionError("a bug")
        return whole(self, kind, **how)

    monkeypatch.setattr(api.Cluster, "watch", watch)
    world.apply("a")
    world.start()
    world.settled(["a"])


@pytest.mark.slow
def test_a_hundred_jobs_of_more_than_a_mib_fit_into_the_operators_memory(world: World, tmp_path: Path) -> None:
    """Its container may use 512 MiB; whole, they take 3.3 GiB."""
    for number in range(100):
        world.api.put(a_job(f"bad-{number}", template=apiserver.FAT))
    world.api.put(a_job("good"))
    log = tmp_path / "log"
    with log.open("wb") as output:
        running = subprocess.Popen(
            [str(Path(sys.executable).with_name("outlast")), "operator", "--log", "text"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, contract.Env.PROBE_PORT: "0", contract.Env.NAMESPACE: "default"},
        )
        try:
            world.api.until(lambda: len(world.pods()) == 2)
            for number in range(100):
                world.api.until(lambda name=f"bad-{number}": world.status(name).get("state") == "Failed")
            status = Path(f"/proc/{running.pid}/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0])
        finally:
            running.terminate()
            running.wait(60)
    print(f"{peak} KiB at most")
    assert peak < 256 * 1024


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("report", '{"generation": 1e999}'),
        ("report", '{"failed": true, "failure": {"code": 1e30, "reason": "r", "time": NaN, "step": 1e999}}'),
        ("progress", '{"generation": 1, "step": Infinity, "time": NaN}'),
        ("progress", '{"generation": 1, "step": "many", "time": 1.0}'),
    ],
)
def test_numbers_in_a_lease_that_are_none_cost_its_job_no_look(where: str, said: str) -> None:
    job, pods, leases, nodes = large_jobs.documents(2)
    key = {"report": contract.Annotation.REPORT, "progress": contract.Annotation.PROGRESS}[where]
    notes = leases[0]["metadata"]["annotations"]
    notes[key] = json.dumps({**json.loads(notes.get(key, "{}")), **json.loads(said)})
    plan = decide(observed_job.take_snapshot(CachedJob(job, pods, leases, nodes, large_jobs.NOW - 1000), large_jobs.NOW))
    json.dumps(plan.status, allow_nan=False)
