"""Doing a plan, against a small API server over real HTTP: what is written, on which condition, and what when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
from apiserver import ApiServer
from outlast.base import errors
from outlast.job.contract import Label
from outlast.kubernetes.api import Cluster, kinds
from outlast.kubernetes.operator import apply
from outlast.kubernetes.operator.apply import RETRY_S, Outcome
from outlast.kubernetes.operator.plan import Deletion, Event, Plan
from outlast.kubernetes.operator.writer import IN_FLIGHT, Background, Parallel

NOW = 1_767_225_600.0
Document = dict[str, Any]


def act(cluster: Any, job: Any, plan: Plan, now: float, parallel: Any = None, background: Any = None, **options: Any) -> Outcome:
    """As `apply.carry_out`, by default with one write at a time, in order."""
    parallel = parallel or (lambda function, items: [function(item) for item in items])
    return apply.carry_out(cluster, job, plan, now, parallel, background or (lambda function: function()), **options)


@pytest.fixture
def api() -> ApiServer:
    return ApiServer(unserved=())


@pytest.fixture
def cluster(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with apiserver.connected(api, tmp_path, monkeypatch, "default") as cluster:
        yield cluster


def a_job(api: ApiServer, name: str = "train", **status: Any) -> Document:
    return api.put(kinds.ELASTIC_JOB.document({"name": name}, spec={"image": "i"}, **({"status": status} if status else {})))


@pytest.fixture
def job(api: ApiServer) -> Document:
    return a_job(api)


def a_pod(job: Document, index: int = 0) -> Document:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": uid}
    labels = {Label.JOB: name, Label.WORKER: str(index)}
    meta = {"name": f"{name}-worker-{index}", "namespace": "default", "labels": labels, "ownerReferences": [owner]}
    return kinds.POD.document(meta, spec={"containers": []})


def a_service() -> Document:
    return kinds.SERVICE.document({"name": "train", "namespace": "default"}, spec={})


def writes(api: ApiServer) -> list[str]:
    """Return the requests that change something: method and the end of the path."""
    asked = (each.partition("?")[0].split(" ") for each in api.asked)
    return [f"{method} {path.split('/namespaces/default/')[1]}" for method, path in asked if method != "GET"]


def told(cluster: Cluster) -> list[tuple[str, str, str]]:
    return [(each["type"], each["reason"], each["message"]) for each in cluster.list_(kinds.EVENT)]


def test_a_plan_is_done_in_its_order(api: ApiServer, cluster: Cluster) -> None:
    job = a_job(api, state="Restarting", failure={"code": 1})
    old = api.put(a_pod(job, 1))
    plan = Plan(
        prerequisites=(a_service(),),
        apply=(kinds.CONFIG_MAP.document({"name": "c", "namespace": "default"}),),
        status={"state": "Running"},
        deletes=(Deletion("train-worker-1", old["metadata"]["uid"], "it is surplus"),),
        creates=(a_pod(job, 0),),
        events=(Event("Normal", "WorkersStarted", "worker 0 is started"),),
        requeue_at=NOW + 30,
    )
    assert act(cluster, job, plan, NOW) == Outcome(NOW + 30)
    assert writes(api) == [
        *("POST services", "POST configmaps", "PUT elasticjobs/train/status"),
        *("POST events", "DELETE pods/train-worker-1", "POST pods"),
    ]
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Running"}, "the whole status is replaced"


def test_what_one_part_of_a_plan_makes_is_asked_for_at_once_and_no_binding_before_its_role(
    api: ApiServer, cluster: Cluster
) -> None:
    job, meeting = a_job(api), threading.Barrier(3, timeout=60)

    def meet(_: Any) -> bool:
        meeting.wait()  # nobody is answered before all three have asked
        return False

    api.prescribe("POST .*/(services|roles|pods)", *[meet] * 6)
    role = kinds.ROLE.document({"name": "train", "namespace": "default"}, rules=[])
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "train"}
    services = [{**a_service(), "metadata": {"name": name, "namespace": "default"}} for name in ("a", "b")]
    plan = Plan(
        prerequisites=({**role, "kind": "RoleBinding", "roleRef": ref}, role, *services),
        status={"state": "Pending"},
        creates=tuple(a_pod(job, index) for index in range(3)),
        events=(Event("Normal", "A", "a"),),
    )
    later: list[Callable[[], None]] = []
    assert act(cluster, job, plan, NOW, Parallel(2), later.append) == Outcome(None)
    asked = writes(api)
    assert sorted(asked[:3]) == ["POST roles", "POST services", "POST services"]
    assert asked[3:] == ["POST rolebindings", "PUT elasticjobs/train/status", *["POST pods"] * 3]
    for do in later:
        do()
    assert writes(api)[-1] == "POST events"


def test_a_stale_look_overwrites_nothing_and_does_nothing_more(api: ApiServer, cluster: Cluster) -> None:
    job = {**a_job(api, state="Pending")}
    seen = {**job, "metadata": dict(job["metadata"])}
    a_job(api, state="Failed")
    done = act(cluster, seen, Plan(status={"state": "Running"}, creates=(a_pod(job),), requeue_at=NOW + 5), NOW)
    assert done == Outcome(NOW + 5, "the job has changed meanwhile")
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Failed"}
    assert not cluster.list_(kinds.POD)


def test_a_job_that_is_gone_gets_nothing_more(api: ApiServer, cluster: Cluster, job: Document) -> None:
    api.remove(kinds.ELASTIC_JOB.resource, "train")
    assert act(cluster, job, Plan(status={}, creates=(a_pod(job),)), NOW) == Outcome(None, "the job is gone")
    assert not cluster.list_(kinds.POD)


def test_doing_it_twice_does_no_harm(api: ApiServer, cluster: Cluster, job: Document) -> None:
    old = api.put(a_pod(job, 1))
    gone = Deletion("train-worker-1", old["metadata"]["uid"], "it is surplus")
    plan = Plan(prerequisites=(a_service(),), deletes=(gone,), creates=(a_pod(job),), events=(Event("Normal", "A", "a"),))
    assert [act(cluster, job, plan, NOW), act(cluster, job, plan, NOW)] == [Outcome(None), Outcome(None)]
    assert [pod["metadata"]["name"] for pod in cluster.list_(kinds.POD)] == ["train-worker-0"]
    assert len(cluster.list_(kinds.EVENT)) == 1


def test_a_deletion_means_one_pod_and_not_its_successor_and_has_its_grace(
    api: ApiServer, cluster: Cluster, job: Document
) -> None:
    api.graceful = True
    uids = [api.put(a_pod(job, index))["metadata"]["uid"] for index in (0, 1, 2)]
    deletions = ((uids[0], None), (uids[1], 0), ("of-its-predecessor", 0))
    deletes = (Deletion(f"train-worker-{n}", uid, "it left", grace_s) for n, (uid, grace_s) in enumerate(deletions))
    act(cluster, job, Plan(deletes=tuple(deletes)), NOW)
    left = {pod["metadata"]["name"]: "deletionTimestamp" in pod["metadata"] for pod in cluster.list_(kinds.POD)}
    assert left == {"train-worker-0": True, "train-worker-2": False}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"mine": True, "going": True}, "is still terminating; it is created again when it is gone"),
        ({"mine": False, "going": True}, "of another job is still terminating; this one is created when it is gone"),
        ({"mine": False, "going": False}, "exists and does not belong to this job; delete it, or give the job another name"),
        ({"mine": True, "going": False}, ""),
    ],
)
def test_a_pod_in_the_way_is_named_and_looked_for_again(
    there: dict[str, bool], said: str, api: ApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
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
        done = act(cluster, job, Plan(creates=(pod,), requeue_at=NOW + 60), NOW)
    said = said and f"Pod train-worker-0 {said}"
    assert [record.getMessage() for record in caplog.records] == ([said] if said else [])
    stays = said if said.endswith("give the job another name") else ""
    assert done == Outcome(NOW + RETRY_S if said else NOW + 60, blocked_reason=stays)
    assert told(cluster) == ([("Warning", "FailedCreate", stays)] if stays else [])


def test_workers_pull_images_with_the_secrets_of_the_namespaces_default_account(
    api: ApiServer, cluster: Cluster, job: Document
) -> None:
    account = kinds.SERVICE_ACCOUNT.document({"name": "train-worker", "namespace": "default"})
    api.put(kinds.SERVICE_ACCOUNT.document({"name": "default"}, imagePullSecrets=[{"name": "registry"}]))
    act(cluster, job, Plan(prerequisites=(account,)), NOW)
    assert cluster.get(kinds.SERVICE_ACCOUNT, "train-worker")["imagePullSecrets"] == [{"name": "registry"}]


def an_owned_service(job: Document, **owner: str) -> Document:
    """Return the Service that a job needs; it belongs to this owner, or to the job."""
    whole = {**a_pod(job)["metadata"]["ownerReferences"][0], **owner}
    return {**a_service(), "metadata": {"name": "train", "namespace": "default", "ownerReferences": [whole]}}


@pytest.mark.parametrize("part", ["prerequisites", "apply"])
def test_what_goes_with_an_earlier_job_of_the_name_is_waited_for_and_made_anew(
    part: str, api: ApiServer, cluster: Cluster, job: Document
) -> None:
    api.put(an_owned_service(job, uid="of-the-earlier-job"))
    plan = Plan(**{part: (an_owned_service(job),)}, status={"state": "Pending"}, creates=(a_pod(job),))
    said = "Service train of an earlier job of this name still exists; this one is created when it is gone"
    assert act(cluster, job, plan, NOW) == Outcome(NOW + RETRY_S, said)
    assert told(cluster) == [("Normal", "NameTaken", said)]
    assert "status" not in cluster.get(kinds.ELASTIC_JOB, "train"), "what is written there is not asked for again"
    assert not cluster.list_(kinds.POD)
    api.remove("services", "train")  # by the garbage collector
    after = Plan(**{part: ({**an_owned_service(job), "spec": {"n": 2}},)})
    assert [act(cluster, job, plan, NOW + 1), act(cluster, job, after, NOW + 1)] == [Outcome(None)] * 2
    (made,) = cluster.list_(kinds.SERVICE)
    assert made["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert made["spec"] == ({"n": 2} if part == "apply" else {}), "what is applied follows the changes of the job"
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Pending"}


@pytest.mark.parametrize("kind", [kinds.SERVICE, kinds.DISRUPTION_BUDGET, kinds.POD_GROUP, kinds.VOLCANO_GROUP])
@pytest.mark.parametrize("owner", [None, {"kind": "Release", "uid": "r"}])
def test_what_others_have_made_is_not_changed_when_the_job_changes(
    owner: dict[str, str] | None, kind: kinds.Kind, api: ApiServer, cluster: Cluster
) -> None:
    """A PodDisruptionBudget of the application that has the job's name protects that, and does not go with the job."""
    job = a_job(api)
    ours = kind.document(an_owned_service(job)["metadata"], spec={"minAvailable": 1, "selector": {"a": "job"}})
    meta = (a_service() if owner is None else an_owned_service(job, **owner))["metadata"]
    theirs = kind.document(dict(meta), spec={"minAvailable": 3, "selector": {"a": "web"}})
    api.put(theirs)
    whole = Plan(prerequisites=(ours,), creates=(a_pod(job),))
    for plan in (whole, Plan(apply=(ours,)), Plan(apply=(ours,), status={"n": 1})):
        assert act(cluster, job, plan, NOW) == Outcome(None)
    assert cluster.get(kind, "train") == theirs
    there = f"{kind.kind} train exists and does not belong to this job, and stays as it is"
    said = f"{there}; give the job another name if that is not meant"
    assert told(cluster) == [("Warning", "NameTaken", said)]
    assert len(cluster.list_(kinds.POD)) == 1


@pytest.mark.parametrize("kind", [kinds.ROLE, kinds.ROLE_BINDING])
def test_rights_that_others_have_given_are_not_handed_to_pods(
    kind: kinds.Kind, api: ApiServer, cluster: Cluster, job: Document
) -> None:
    owned = kind.document(an_owned_service(job)["metadata"])
    api.put(theirs := kind.document({"name": "train", "namespace": "default"}, rules=[{"verbs": ["*"]}]))
    with pytest.raises(errors.Refused) as caught:
        act(cluster, job, Plan(prerequisites=(owned,), creates=(a_pod(job),)), NOW)
    said = f"{kind.kind} train exists and does not belong to this job; delete it, or give the job another name"
    assert (str(caught.value), told(cluster)) == (said, [("Warning", "FailedCreate", said)])
    assert cluster.get(kind, "train")["rules"] == theirs["rules"]
    assert not cluster.list_(kinds.POD)


def test_what_the_server_refuses_ends_the_plan(api: ApiServer, cluster: Cluster, job: Document) -> None:
    title = 'pods "train-worker-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    api.prescribe("POST .*/pods", apiserver.status(403, "Forbidden", title))
    lost = Event("Warning", "NodeLost", "worker 0 was lost")
    plan = Plan(status={"state": "Pending"}, creates=(a_pod(job, 0), a_pod(job, 1)), events=(lost,))
    written: list[str] = []
    with pytest.raises(errors.Refused, match="exceeded quota: q") as caught:
        act(cluster, job, plan, NOW, on_status_written=lambda: written.append("status"))
    assert cluster.get(kinds.ELASTIC_JOB, "train")["status"] == {"state": "Pending"}
    assert written == ["status"]
    assert sorted(told(cluster)) == [("Warning", "FailedCreate", str(caught.value)), ("Warning", "NodeLost", "worker 0 was lost")]
    assert not cluster.list_(kinds.POD)


@pytest.mark.parametrize("there", [True, False])
def test_a_quota_that_is_used_up_hinders_the_pods_only_if_what_they_need_is_not_there(
    there: bool, api: ApiServer, cluster: Cluster, job: Document
) -> None:
    api.prescribe("POST .*/services", apiserver.status(403, "Forbidden", 'services "train" is forbidden: exceeded quota: q'))
    plan = Plan(prerequisites=(an_owned_service(job),), status={"state": "Created"}, creates=(a_pod(job),))
    if there:
        api.put(an_owned_service(job))
        assert act(cluster, job, plan, NOW) == Outcome(None)
    else:
        with pytest.raises(errors.Refused, match="exceeded quota: q"):
            act(cluster, job, plan, NOW)
    assert ("status" in cluster.get(kinds.ELASTIC_JOB, "train"), len(cluster.list_(kinds.POD))) == (there, there)


def test_a_pod_of_the_job_without_its_label_gets_the_label_by_which_it_is_watched(
    api: ApiServer, cluster: Cluster, job: Document
) -> None:
    pod = a_pod(job, 0)
    labels = pod["metadata"]["labels"]
    old = api.put({**pod, "metadata": {**pod["metadata"], "labels": {"job-name": "train"}}})
    assert act(cluster, job, Plan(creates=(pod,)), NOW) == Outcome(None)
    there = cluster.get(kinds.POD, "train-worker-0")["metadata"]
    assert (there["uid"], there["labels"]) == (old["metadata"]["uid"], {"job-name": "train", **labels})


def test_an_event_that_cannot_be_written_is_only_said(
    api: ApiServer, cluster: Cluster, job: Document, caplog: pytest.LogCaptureFixture
) -> None:
    api.prescribe("POST .*/events", apiserver.status(403, "Forbidden", "events is forbidden"))
    assert act(cluster, job, Plan(events=(Event("Warning", "WorkerLost", "lost worker 3"),)), NOW) == Outcome(None)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "an Event could not be written (lost worker 3)"
    ]


def test_what_is_said_again_is_counted(api: ApiServer, cluster: Cluster, job: Document) -> None:
    plan = Plan(events=(Event("Normal", "WorkerInterrupted", "worker 1 was told to leave; it is created again"),))
    for after in (0, 60, 120, 600):
        act(cluster, job, plan, NOW + after)
    events = cluster.list_(kinds.EVENT)
    involved = {"apiVersion": job["apiVersion"], "kind": "ElasticJob", "name": "train", "namespace": "default"}
    assert events[0]["involvedObject"] == {**involved, "uid": job["metadata"]["uid"]}
    told = [(each["count"], each["firstTimestamp"][11:19], each["lastTimestamp"][11:19]) for each in events]
    assert sorted(told) == [(1, "00:10:00", "00:10:00"), (3, "00:00:00", "00:02:00")]


# Writes that need not wait for each other


def test_things_are_done_at_once_and_what_comes_of_them_is_in_their_order() -> None:
    meeting = threading.Barrier(IN_FLIGHT, timeout=60)

    def meet(number: int) -> int:
        meeting.wait()  # nobody passes before all are here
        return -number

    assert Parallel(IN_FLIGHT)(meet, range(2 * IN_FLIGHT)) == [-number for number in range(2 * IN_FLIGHT)]
    assert Parallel(1)(lambda number: -number, []) == []


def test_a_failure_is_raised_when_nothing_is_under_way_and_ends_what_has_not_begun() -> None:
    ended: list[int] = []
    others = threading.Event()

    def fail(number: int) -> None:
        if number == 0:
            others.set()
            raise ValueError("no quota")
        assert others.wait(60)
        ended.append(number)

    with pytest.raises(ValueError, match="no quota"):
        Parallel(2)(fail, range(2 * IN_FLIGHT))
    assert sorted(ended) == list(range(1, IN_FLIGHT))


def test_what_nobody_waits_for_is_done_in_its_order_and_too_much_of_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(2), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(60)
        raise ValueError("a bug")

    with caplog.at_level(logging.WARNING):
        background(first)
        assert begun.wait(60)
        for word in ("second", "third", "fourth"):
            background(lambda word=word: done.append(word))  # type: ignore[misc]
        background.finish(0.0)
        assert done == []
        go_on.set()
        background.finish(10.0)
    assert done == ["second", "third"]
    assert [record.getMessage() for record in caplog.records] == [
        "an Event is dropped: 2 are pending",
        "an Event could not be written",
    ]
