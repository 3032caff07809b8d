"""Doing a plan, against a small API server over real HTTP: what is written, on which condition, and what when it fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
from outlast import errors, kinds, kube
from outlast.contract import Label
from outlast.controller.act import AGAIN_S, Done, act, event
from outlast.controller.plan import Deletion, Note, Plan

NOW = 1_767_225_600.0
Document = dict[str, Any]


@pytest.fixture
def api() -> apiserver.ApiServer:
    return apiserver.ApiServer(unserved=())


@pytest.fixture
def cluster(api: apiserver.ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kube.Cluster]:
    with apiserver.serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url)))
        cluster = kube.connect(namespace="default")
        yield cluster
        cluster.close()


def a_job(api: apiserver.ApiServer, name: str = "train", **status: Any) -> Document:
    """An ElasticJob that is there."""
    head = {"apiVersion": kinds.ELASTIC_JOB.api_version, "kind": "ElasticJob", "metadata": {"name": name}}
    return api.put({**head, "spec": {"image": "i"}, **({"status": status} if status else {})})


def a_pod(job: Document, index: int = 0, **more: Any) -> Document:
    """A worker of a job."""
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    name = job["metadata"]["name"]
    meta = {
        "name": f"{name}-worker-{index}",
        "namespace": "default",
        "labels": {Label.JOB: name, Label.WORKER: str(index)},
        "ownerReferences": [owner],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": []}, **more}


def a_service() -> Document:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "train", "namespace": "default"}, "spec": {}}


def writes(api: apiserver.ApiServer) -> list[str]:
    """What was asked to be changed: method and the end of the path."""
    asked = (each.partition("?")[0].split(" ") for each in api.asked)
    return [f"{method} {path.split('/namespaces/default/')[1]}" for method, path in asked if method != "GET"]


def test_a_plan_is_done_in_its_order(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = a_job(api)
    old = api.put(a_pod(job, 1))
    plan = Plan(
        setup=(a_service(),),
        apply=({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "default"}},),
        status={"state": "Running"},
        deletes=(Deletion("train-worker-1", old["metadata"]["uid"], "it is surplus"),),
        creates=(a_pod(job, 0),),
        notes=(Note("Normal", "WorkersStarted", "worker 0 is started"),),
        look_again=NOW + 30,
    )
    assert act(cluster, job, plan, NOW) == Done(NOW + 30)
    assert writes(api) == [
        "POST services",
        "PATCH configmaps/c",
        "PUT elasticjobs/train/status",
        "DELETE pods/train-worker-1",
        "POST pods",
        "POST events",
    ]


def test_the_status_is_replaced_as_a_whole(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = a_job(api, state="Restarting", failure={"code": 1}, rendezvous={"called": {"generation": 2}})
    act(cluster, job, Plan(status={"state": "Running", "rendezvous": {}}), NOW)
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Running", "rendezvous": {}}


def test_a_stale_look_overwrites_nothing_and_does_nothing_more(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = {**a_job(api, state="Pending")}
    seen = {**job, "metadata": dict(job["metadata"])}
    a_job(api, state="Failed")
    done = act(cluster, seen, Plan(status={"state": "Running"}, creates=(a_pod(job),), look_again=NOW + 5), NOW)
    assert done == Done(NOW + 5, "the job has changed meanwhile")
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Failed"}
    assert not cluster.list_(kinds.POD)


def test_a_job_that_is_gone_gets_nothing_more(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = a_job(api)
    api.remove(kinds.ELASTIC_JOB.resource, "train")
    assert act(cluster, job, Plan(status={}, creates=(a_pod(job),)), NOW) == Done(None, "the job is gone")
    assert not cluster.list_(kinds.POD)


def test_doing_it_twice_does_no_harm(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = a_job(api)
    old = api.put(a_pod(job, 1))
    gone = Deletion("train-worker-1", old["metadata"]["uid"], "it is surplus")
    plan = Plan(setup=(a_service(),), deletes=(gone,), creates=(a_pod(job),), notes=(Note("Normal", "A", "a"),))
    assert [act(cluster, job, plan, NOW), act(cluster, job, plan, NOW)] == [Done(None), Done(None)]
    assert [pod["metadata"]["name"] for pod in cluster.list_(kinds.POD)] == ["train-worker-0"]
    assert len(cluster.list_(kinds.EVENT)) == 1


def test_a_deletion_means_one_pod_and_not_its_successor(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = a_job(api)
    api.put(a_pod(job))
    act(cluster, job, Plan(deletes=(Deletion("train-worker-0", "the-uid-of-its-predecessor", "it failed"),)), NOW)
    assert len(cluster.list_(kinds.POD)) == 1


def test_the_grace_of_a_deletion_is_passed_on(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    api.graceful, job = True, a_job(api)
    uids = [api.put(a_pod(job, index))["metadata"]["uid"] for index in (0, 1)]
    deletes = (Deletion("train-worker-0", uids[0], "it left"), Deletion("train-worker-1", uids[1], "its node is lost", grace_s=0))
    act(cluster, job, Plan(deletes=deletes), NOW)
    assert [(pod["metadata"]["name"], "deletionTimestamp" in pod["metadata"]) for pod in cluster.list_(kinds.POD)] == [
        ("train-worker-0", True)
    ]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"mine": True, "going": True}, "Pod train-worker-0 is still going; it is made anew when it has gone"),
        ({"mine": False, "going": True}, "Pod train-worker-0 of another job is still going; this job's is made when it has gone"),
        (
            {"mine": False, "going": False},
            "Pod train-worker-0 is there and not of this job; delete it, or give the job another name",
        ),
        ({"mine": True, "going": False}, ""),
    ],
)
def test_a_pod_in_the_way_is_named_and_looked_for_again(
    there: dict[str, bool], said: str, api: apiserver.ApiServer, cluster: kube.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    job, other = a_job(api), a_job(api, "other")
    pod = a_pod(job)
    found = {**pod, "metadata": {**pod["metadata"]}}
    if not there["mine"]:
        found["metadata"]["ownerReferences"] = a_pod(other)["metadata"]["ownerReferences"]
    if there["going"]:
        found["metadata"]["deletionTimestamp"] = apiserver.NOW
    api.put(found)
    with caplog.at_level(logging.WARNING):
        done = act(cluster, job, Plan(creates=(pod,), look_again=NOW + 60), NOW)
    assert [record.getMessage() for record in caplog.records] == ([said] if said else [])
    assert done == Done(NOW + AGAIN_S if said else NOW + 60)


def test_what_the_server_refuses_ends_the_plan(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    job = a_job(api)
    title = 'pods "train-worker-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    api.prescribe("POST .*/pods", apiserver.status(403, "Forbidden", title))
    with pytest.raises(errors.Refused, match="exceeded quota: q"):
        act(cluster, job, Plan(status={"state": "Pending"}, creates=(a_pod(job, 0), a_pod(job, 1))), NOW)
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Pending"}
    assert not cluster.list_(kinds.POD)


def test_an_event_that_cannot_be_written_is_only_said(
    api: apiserver.ApiServer, cluster: kube.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    job = a_job(api)
    api.prescribe("POST .*/events", apiserver.status(403, "Forbidden", "events is forbidden"))
    assert act(cluster, job, Plan(notes=(Note("Warning", "WorkerLost", "lost worker 3"),)), NOW) == Done(None)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "an Event could not be written (lost worker 3)"
    ]


def test_the_same_event_within_ten_minutes_is_one() -> None:
    job = {"apiVersion": "a/v1", "kind": "ElasticJob", "metadata": {"name": "train", "namespace": "team", "uid": "u"}}
    note = Note("Warning", "WorkerLost", "lost worker 3")
    names = [event(job, note, NOW + after)["metadata"]["name"] for after in (0, 599, 600)]
    assert names[0] == names[1] != names[2]
    made = event(job, note, NOW)
    assert made["involvedObject"] == {
        "apiVersion": "a/v1",
        "kind": "ElasticJob",
        "name": "train",
        "namespace": "team",
        "uid": "u",
    }
    assert (made["type"], made["reason"], made["message"]) == ("Warning", "WorkerLost", "lost worker 3")
    assert made["firstTimestamp"] == made["lastTimestamp"] == "2026-01-01T00:00:00Z"
