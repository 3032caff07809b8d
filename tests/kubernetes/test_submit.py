"""`outlast submit` and its like, against a small API server."""

from __future__ import annotations

import copy
import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import apiserver
from outlast.base.errors import Superseded
from outlast.job.status import JobStatus, State
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds
from outlast.kubernetes.jobs import job_documents
from outlast.storage import runs, store
from outlast.storage.checkpoints import register, register_rules
from outlast.storage.runs import output as stored
from outlast.worker.agent import join_run

JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec:
  image: example.org/outlast:1
  module: outlast.recipes.smoke
  output: s3://bucket/runs
  env: {AWS_PROFILE: team}
  workers: {replicas: 2, min: 1, max: 2}
"""

NO_SECRET = 'secrets is forbidden: User "eve" cannot create resource "secrets" in API group "" in the namespace "default"'

Outlast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    api = apiserver.ApiServer()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    with apiserver.entered(api, tmp_path, monkeypatch):
        yield api


def resources(api: apiserver.ApiServer) -> list[str]:
    return sorted(resource for resource, namespace, _ in api.documents if namespace)


def the(api: apiserver.ApiServer, resource: str) -> list[kube.Document]:
    found = (document for (kind, *_), document in api.documents.items() if kind == resource)
    return sorted(found, key=lambda each: int(each["metadata"]["resourceVersion"]))


def test_a_dry_run_says_what_would_be_made_and_makes_nothing(api: apiserver.ApiServer, outlast: Outlast) -> None:
    code, out, _ = outlast("submit", "job.yaml", "--as", "indexed-job", "--dry-run")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ConfigMap", "Service", "Job"]
    assert all(line.endswith("would be created") for line in out.splitlines())
    assert resources(api) == []


def test_a_job_is_applied_and_the_same_again_changes_nothing(api: apiserver.ApiServer, outlast: Outlast) -> None:
    code, out, _ = outlast("submit", "job.yaml", "--as", "statefulset")
    assert code == 0
    assert "StatefulSet train created" in out
    assert out.endswith("look at train in namespace default with: outlast logs -f train\n")
    assert resources(api) == ["configmaps", "secrets", "services", "statefulsets.apps"]
    _, out, _ = outlast("submit", "job.yaml", "--as", "statefulset")
    assert out.splitlines()[0] == "StatefulSet train runs this very file already"
    _, out, _ = outlast("submit", "job.yaml", "--as", "statefulset", "--dry-run", "--set", "workers.replicas=1")
    assert "StatefulSet train would be changed" in out
    assert "-  replicas: 2\n  +  replicas: 1" in out


def test_workers_that_meet_at_worker_0_are_given_a_key_that_stays_while_the_job_does(
    api: apiserver.ApiServer, outlast: Outlast
) -> None:
    outlast("submit", "job.yaml", "--as", "statefulset")
    secret = api.documents["secrets", "default", "train-rdzv"]
    assert not secret.get("immutable"), "a kubelet would keep it for the next job of this name"
    workload = api.documents["statefulsets.apps", "default", "train"]
    assert len(secret["stringData"]["key"]) == 64
    assert secret["metadata"]["ownerReferences"][0]["uid"] == workload["metadata"]["uid"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    source = {"secretKeyRef": {"name": "train-rdzv", "key": "key", "optional": True}}
    assert {"name": "OUTLAST_RENDEZVOUS_KEY", "valueFrom": source} in container["env"]
    _, out, _ = outlast("submit", "job.yaml", "--as", "statefulset", "--set", "workers.replicas=1")
    assert "Secret train-rdzv unchanged" in out
    assert api.documents["secrets", "default", "train-rdzv"]["stringData"] == secret["stringData"]
    outlast("cancel", "train", "-n", "default")
    assert resources(api) == []


@pytest.mark.parametrize("had", [True, False])
def test_the_key_of_a_job_that_runs_is_neither_made_nor_given_up(api: apiserver.ApiServer, outlast: Outlast, had: bool) -> None:
    api.unserved = ()
    if not had:
        api.prescribe("POST .*/secrets", apiserver.status(403, "Forbidden", NO_SECRET))
    code, _, err = outlast("submit", "job.yaml")
    assert code == 0, err
    if had:
        api.remove("secrets", "train-rdzv")
    _, out, _ = outlast("submit", "job.yaml", "--set", "workers.max=4")
    assert "Secret train-rdzv left as it is, since workers of a running job keep their key" in out
    assert "secrets" not in resources(api), "its workers have another key"
    (job,) = the(api, kinds.ELASTIC_JOB.resource)
    assert (job["metadata"].get("annotations") or {}).get("outlast.dev/key") == (job["metadata"]["uid"] if had else None)


def test_who_may_make_no_secret_is_told_what_that_means(api: apiserver.ApiServer, outlast: Outlast) -> None:
    api.prescribe("POST .*/secrets", apiserver.status(403, "Forbidden", NO_SECRET))
    code, out, err = outlast("submit", "job.yaml", "--as", "indexed-job")
    assert (code, err) == (0, "")
    assert "you may not create Secret train-rdzv: anyone who knows the job file can connect to its workers" in out


@pytest.mark.parametrize("topology", ["statefulset", "indexed-job"])
def test_the_same_file_again_goes_on_with_what_was_suspended_and_keeps_what_was_scaled(
    api: apiserver.ApiServer, outlast: Outlast, topology: str
) -> None:
    outlast("submit", "job.yaml", "--as", topology)
    assert outlast("scale", "train", "1", "-n", "default")[0] == 0
    assert outlast("suspend", "train", "-n", "default")[0] == 0
    code, out, _ = outlast("submit", "job.yaml", "--as", topology)
    assert (code, out.splitlines()[0].split()[2:]) == (0, ["is", "resumed"])
    (spec,) = (document["spec"] for (kind, *_), document in api.documents.items() if kind in ("statefulsets.apps", "jobs.batch"))
    assert not spec.get("suspend")
    assert 1 in (spec.get("replicas"), spec.get("completions"))


def a_place() -> store.Store:
    return store.open_(f"memory://{uuid.uuid4().hex}/train")


def taken(place: store.Store, job: kube.Document, home: str = "") -> object:
    """The run that a worker of this Job takes up."""
    word = job["metadata"]["labels"]["outlast.dev/run"]
    return join_run.take(place, join_run.record("train", word), home=home)


def test_a_job_that_has_failed_goes_on_when_the_same_file_is_submitted(api: apiserver.ApiServer, outlast: Outlast) -> None:
    place = a_place()
    outlast("submit", "job.yaml", "--as", "indexed-job")
    (first,) = the(api, "jobs.batch")
    run = taken(place, first)
    runs.end(place, str(run), "Failed", "a bug", 1)
    first["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    code, _, err = outlast("resume", "train", "-n", "default")
    assert (code, err) == (2, "Error: train has ended (Failed); outlast submit FILE goes on with it\n")
    code, out, _ = outlast("submit", "job.yaml", "--as", "indexed-job")
    title = first["metadata"]["name"]
    said = f"Job {title} has failed; its run goes on from its newest checkpoint; --fresh starts anew"
    assert (code, out.splitlines()[0]) == (0, said)
    (second,) = (job for job in the(api, "jobs.batch") if job["metadata"]["name"] != title)
    assert taken(place, second) == run
    with pytest.raises(Superseded):
        taken(place, first)
    assert outlast("submit", "job.yaml", "--as", "indexed-job")[1].splitlines()[0].endswith("runs this very file already")
    second["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    runs.end(place, str(run), "Succeeded", "", 0)
    assert "is not run again; --fresh does" in outlast("submit", "job.yaml", "--as", "indexed-job")[1]
    outlast("submit", "job.yaml", "--as", "indexed-job", "--set", "env={A: b}")
    assert taken(place, the(api, "jobs.batch")[-1]) != run


@pytest.mark.parametrize("topology", ["indexed-job", "elasticjob"])
def test_a_job_that_has_succeeded_goes_on_when_it_asks_for_more_steps(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    api.unserved = ()
    place = a_place()
    monkeypatch.setattr(stored.store, "open_", lambda url: place)
    submit = functools.partial(outlast, "submit", "job.yaml", "--as", topology, "--set")

    def newest() -> kube.Document:
        return the(api, kinds.ELASTIC_JOB.resource if topology == "elasticjob" else "jobs.batch")[-1]

    def ended(word: str) -> str:
        """The run that its workers take up; it ends with success, at step 60."""
        run = str(join_run.take(place, join_run.record("train", word)))
        book = register.open_(place, run)
        book.acquire(1)
        book.add(register_rules.Place(60, 1, "parts"), 1)
        runs.end(place, run, "Succeeded", "", 0)
        newest()["status"] = {"state": "Succeeded", "conditions": [{"type": "Complete", "status": "True"}]}
        return run

    submit("args=[--steps=60]")
    run = ended("a")
    code, out, err = submit("args=[--steps=90]", "--set", "workers={replicas: 1, min: 1, max: 2}")
    said = "train has succeeded; as it asks for more now, its run goes on from step 60; --fresh starts anew"
    assert (code, out.splitlines()[0]) == (0, said), err
    assert ended("b") == run
    assert said not in submit("args=[--steps=30]")[1]
    assert ended("c") != run, "fewer steps are another training"
    assert said not in submit("args=[--steps=40]", "--fresh")[1]
    ended("d")
    code, out, _ = submit("args=[--steps=50]", "--set", "output=/out")
    assert out.splitlines()[0].startswith("train has succeeded, and begins anew: only a run whose output is in a store")


def test_workers_of_a_statefulset_that_stay_up_after_a_failure_are_replaced(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlast("submit", "job.yaml", "--as", "statefulset")
    (before,) = the(api, "statefulsets.apps")
    said = [State.FAILED, State.SUCCEEDED]
    told = lambda _, name: JobStatus(name=name, run="", state=said[0])  # noqa: E731  # as its agents say, who are not here
    monkeypatch.setattr(job_documents.Workloads, "status", told)
    _, out, _ = outlast("submit", "job.yaml", "--as", "statefulset")
    assert out.splitlines()[0].startswith("StatefulSet train has failed; its run goes on from its newest checkpoint")
    assert "StatefulSet train changed" in out
    (after,) = the(api, "statefulsets.apps")
    words = {each["spec"]["template"]["metadata"]["labels"]["outlast.dev/run"] for each in (before, after)}
    assert len(words) == 2
    del said[0]
    assert "has ended (Succeeded) and is not run again" in outlast("submit", "job.yaml", "--as", "statefulset")[1]


@pytest.mark.parametrize(
    ("state", "options", "said"),
    [
        ("Failed", (), "ElasticJob train has failed; its run goes on from its newest checkpoint; --fresh starts anew"),
        ("Failed", ("--fresh",), "ElasticJob train is ended first"),
        ("Succeeded", (), "ElasticJob train has ended (Succeeded) and is not run again; --fresh does"),
        ("Succeeded", ("--set", "env={A: b}"), "Secret train-rdzv created"),
    ],
)
def test_an_elastic_job_that_has_ended_is_made_anew_and_its_run_goes_on(
    api: apiserver.ApiServer, outlast: Outlast, state: str, options: tuple[str, ...], said: str
) -> None:
    api.unserved = ()
    outlast("submit", "job.yaml")
    (first,) = the(api, kinds.ELASTIC_JOB.resource)
    first["status"] = {"state": state}
    code, out, err = outlast("submit", "job.yaml", *options)
    assert (code, out.splitlines()[0]) == (0, said), err
    (second,) = the(api, kinds.ELASTIC_JOB.resource)
    assert (second["metadata"]["uid"] == first["metadata"]["uid"]) == ("is not run again" in said)
    assert ((second["metadata"].get("annotations") or {}).get("outlast.dev/fresh") == "true") == ("--fresh" in options)


def test_a_changed_file_is_refused_while_the_job_is_there(api: apiserver.ApiServer, outlast: Outlast) -> None:
    outlast("submit", "job.yaml", "--as", "indexed-job")
    code, _, err = outlast("submit", "job.yaml", "--as", "indexed-job", "--set", "env={A: b}")
    assert code == 2
    assert "Error: train is there already, as Job train-" in err
    assert "or submit with --fresh, which ends it first" in err
    code, out, _ = outlast("submit", "job.yaml", "--as", "indexed-job", "--set", "env={A: b}", "--fresh")
    assert code == 0
    assert "is ended first" in out
    assert resources(api).count("jobs.batch") == 1


def test_who_takes_over_is_another_owner_although_the_file_is_the_same(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = a_place()
    monkeypatch.setattr(stored.store, "open_", lambda url: place)

    def word() -> str:
        (job,) = the(api, "jobs.batch")
        assert "OUTLAST_FRESH" not in str(job)
        return str(job["metadata"]["labels"]["outlast.dev/run"])

    def taken(word: str, home: str) -> object:
        return join_run.take(place, join_run.record("train", word), home=home)

    assert outlast("submit", "job.yaml", "--as", "indexed-job")[0] == 0
    run = taken(word(), "team-a/train")
    code, _, err = outlast("submit", "job.yaml", "--as", "indexed-job", "--take-over")
    assert (code, "outlast cancel train removes it" in err) == (2, True)
    assert taken(word(), "team-a/train") == run  # nobody was made to stop
    first = word()
    api.documents.clear()  # another cluster
    api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}})
    code, out, _ = outlast("submit", "job.yaml", "--as", "indexed-job", "--take-over")
    assert (code, "took the run in" in out) == (0, True)
    assert taken(word(), "team-b/train") == run
    with pytest.raises(Superseded):
        taken(first, "team-a/train")
    assert outlast("submit", "job.yaml", "--as", "indexed-job")[1].splitlines()[0].endswith("runs this very file already")


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_name_that_somebody_else_has_is_not_taken_over(api: apiserver.ApiServer, outlast: Outlast, meanwhile: bool) -> None:
    theirs = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "train"}, "spec": {"replicas": 1}}
    if meanwhile:  # after it was seen that the name is free
        api.prescribe("GET .*/statefulsets/train", lambda _: False)
        api.prescribe("GET .*/statefulsets/train", lambda _: bool(api.put(theirs)) and False)
    else:
        api.put(theirs)
    code, _, err = outlast("submit", "job.yaml", "--as", "statefulset")
    assert code == 2
    assert (
        "StatefulSet train in namespace default belongs to somebody else and stays as it is; submit under another --name" in err
    )


CLAIMING = ("--as", "indexed-job", "--set", "volumes=[{claim: data, to: /data, size: 20Gi, storageClass: fast}]")


def test_a_claim_that_is_there_is_used_and_never_changed(api: apiserver.ApiServer, outlast: Outlast) -> None:
    labels = {"outlast.dev/job": "other"}
    wanted = {"accessModes": ["ReadWriteMany"], "storageClassName": "slow", "resources": {"requests": {"storage": "10Gi"}}}
    there = copy.deepcopy(api.put(kinds.CLAIM.document({"name": "data", "labels": labels}, spec=wanted)))
    said = "PersistentVolumeClaim data exists and is used as it is"
    for options in (("--dry-run",), ()):
        code, out, _ = outlast("submit", "job.yaml", *CLAIMING, *options)
        assert (code, out.splitlines()[0]) == (0, f"{said}, with 10Gi")
    assert api.documents["persistentvolumeclaims", "default", "data"] == there


def test_a_claim_that_is_not_there_is_made_and_stays(api: apiserver.ApiServer, outlast: Outlast) -> None:
    assert "PersistentVolumeClaim data created" in outlast("submit", "job.yaml", *CLAIMING)[1]
    assert "ownerReferences" not in api.documents["persistentvolumeclaims", "default", "data"]["metadata"]
    outlast("cancel", "train", "-n", "default")
    assert resources(api) == ["persistentvolumeclaims"]


def test_what_is_made_beside_a_job_goes_with_it(api: apiserver.ApiServer, outlast: Outlast) -> None:
    outlast("submit", "job.yaml", "--as", "indexed-job")
    (job,) = the(api, "jobs.batch")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    beside = [*the(api, "configmaps"), *the(api, "services")]
    assert [each["metadata"]["ownerReferences"] for each in beside] == [[owner], [owner]]
    api.remove("jobs.batch", job["metadata"]["name"])  # as when its time after its end is over
    assert resources(api) == []


def test_what_an_earlier_run_leaves_is_not_lost_by_the_next(api: apiserver.ApiServer, outlast: Outlast) -> None:
    """The cluster deletes what belongs to nobody any more a while after its owner."""
    outlast("submit", "job.yaml", "--as", "indexed-job")
    key = ("services", "default", "train-rdzv")
    gone = {"apiVersion": "batch/v1", "kind": "Job", "name": "train-00000000", "uid": "gone"}
    (job,), (service,) = the(api, "jobs.batch"), the(api, "services")
    service["metadata"]["ownerReferences"] = [gone]
    api.remove("jobs.batch", job["metadata"]["name"])
    before = api.documents[key]["metadata"]["uid"]
    assert "Service train-rdzv created" in outlast("submit", "job.yaml", "--as", "indexed-job")[1]
    after = api.documents[key]["metadata"]
    assert after["uid"] != before
    assert gone not in after["ownerReferences"]


def test_what_is_left_of_a_job_that_is_gone_can_be_cancelled(api: apiserver.ApiServer, outlast: Outlast) -> None:
    labels = {"outlast.dev/job": "train"}
    for kind in (kinds.CONFIG_MAP, kinds.SERVICE):
        api.put(kind.document({"name": "train-rest", "labels": labels}))
    code, out, _ = outlast("cancel", "train", "-n", "default")
    assert (code, out) == (0, "train was gone already; its remaining objects are deleted\n")
    assert resources(api) == []
    code, _, err = outlast("cancel", "train", "-n", "default")
    assert (code, err.partition(";")[0]) == (2, "Error: there is no job train in namespace default of here")


def test_what_the_cluster_refuses_is_one_sentence_and_exits_with_1(api: apiserver.ApiServer, outlast: Outlast) -> None:
    code, _, err = outlast("submit", "job.yaml")
    assert (code, err.count("\n")) == (1, 1)
    assert "ElasticJob (outlast.dev/v1alpha1) is not known to this cluster; install it with: outlast install" in err
    denied = apiserver.status(400, "BadRequest", 'admission webhook "policy" denied the request: no jobs on Fridays')
    api.prescribe("PATCH .*/jobs/", denied)
    code, _, err = outlast("submit", "job.yaml", "--as", "indexed-job")
    assert (code, err.count("\n")) == (1, 1)
    assert 'admission webhook "policy" denied the request: no jobs on Fridays' in err


@pytest.mark.parametrize("words", [("list",), ("status",), ("logs", "-f", "train")])
def test_a_namespace_that_does_not_exist_is_named(api: apiserver.ApiServer, outlast: Outlast, words: tuple[str, ...]) -> None:
    said = "Error: there is no namespace nosuch in here; create it (kubectl create namespace nosuch), or choose another with -n\n"
    assert outlast(*words, "-n", "nosuch") == (2, "", said)


def test_a_job_that_is_not_here_is_looked_for_in_the_cluster(api: apiserver.ApiServer, outlast: Outlast) -> None:
    outlast("submit", "job.yaml", "--as", "statefulset")
    code, out, _ = outlast("status")
    said = "its pods are not created yet; if it stays so, outlast why train says why"
    assert (code, out.splitlines()[0]) == (0, f"train: Pending: {said}")
    code, out, _ = outlast("scale", "train", "1")
    assert (code, out) == (0, "train is scaled to 1 worker\n")
    code, _, err = outlast("status", "other")
    assert code == 2
    assert err == "Error: there is no job other in namespace default of here; there are train\n"
    code, out, _ = outlast("cancel", "train", "-n", "default")
    stays = "its output stays in s3://bucket/runs/train"
    assert (code, out) == (0, f"train is cancelled; {stays}; outlast submit FILE goes on from what is saved\n")
    assert resources(api) == []


def test_an_evaluation_takes_the_agent_from_the_image_that_the_operator_gave_the_jobs_pods(
    api: apiserver.ApiServer, outlast: Outlast
) -> None:
    api.unserved = ()
    Path("job.yaml").write_text(JOB.replace("outlast:1", "torch:1"))
    outlast("submit", "job.yaml")
    (job,) = the(api, "elasticjobs.outlast.dev")
    worker = {"app.kubernetes.io/component": "worker", "outlast.dev/job": "train"}
    owner = [{"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "name": "train", "uid": job["metadata"]["uid"]}]
    agent = {"name": "outlast-agent", "image": "example.org/operator:7"}
    meta = {"name": "train-worker-0", "labels": worker, "ownerReferences": owner}
    api.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"initContainers": [agent], "containers": []}})

    def fail() -> None:
        api.until(lambda: the(api, "jobs.batch"))
        (created,) = the(api, "jobs.batch")
        api.put({**created, "status": {"conditions": [{"type": "Failed", "status": "True"}]}})

    thread = threading.Thread(target=fail)
    thread.start()
    assert "ended without a pod" in outlast("evaluate", "train")[2]
    thread.join()
    (evaluation,) = the(api, "jobs.batch")
    assert [each["image"] for each in evaluation["spec"]["template"]["spec"]["initContainers"]] == ["example.org/operator:7"]
