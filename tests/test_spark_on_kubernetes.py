"""`outlast data prepare --engine spark --master k8s://`: the driver's Job, the executors' template, the account."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

import apiserver
from outlast import contract, diagnosis, kube, spec
from outlast.contract import Annotation, Label
from outlast.diagnosis import Snapshot, admission
from outlast.errors import OutlastError
from outlast.manifests import spark, spark_conf
from rights import needed, rights

Outlast = Callable[..., tuple[int, str, str]]
Document = dict[str, Any]
NEWEST = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-1]
JOB = (kube.JOB.resource, "n", "prepare-out")
QUOTA = (
    'pods "outlast-dry-run" is forbidden: exceeded quota: q, requested: requests.memory=2Gi, used: requests.memory={used}, '
    "limited: requests.memory={limited}"
)
ASKED = (
    "GET /api/v1/namespaces/n/pods/prepare-out-x",  # the driver's own, as the owner of executors
    "GET /api/v1/namespaces/n/pods?fieldSelector=metadata.name%3Dprepare-out-x",  # until it is ready
    "GET /api/v1/namespaces/n/pods?labelSelector=spark-role%3Dexecutor&allowWatchBookmarks=true&watch=true",
    "GET /api/v1/namespaces/n/pods?labelSelector=spark-role%3Dexecutor%2Cspark-exec-inactive%21%3Dtrue",
    "POST /api/v1/namespaces/n/pods",
    "DELETE /api/v1/namespaces/n/pods/outlast-data-prepare-1-exec-1",  # one that has failed or ended
    "DELETE /api/v1/namespaces/n/pods?labelSelector=spark-role%3Dexecutor",  # at the end, and when there are too many
)
"""Requests of Spark's driver in client mode: recorded from 3.5.9, but for the deletion of one pod, which is in its source
(ExecutorPodsLifecycleManager)."""


def a_job(**fields: Any) -> spec.Job:
    whole = {"image": "i:1", "module": "train", "volumes": [{"claim": "efs", "to": "/data"}], **fields}
    meta = {"name": "train", "namespace": "team"}
    return spec.parse(json.dumps({"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": meta, "spec": whole}))


def wanted(job: spec.Job | None = None, *, claim: str = "efs:/data", to: str = "/data/out", **more: Any) -> spark.Wanted:
    described = spark.described(job, spark.name(to), image="", claim=claim, secrets=())
    found = {"words": ["text"], "source": "/data/in", "to": to, "work": "", "job": described, "namespace": "n", **more}
    return spark.Wanted(**found)


def driver(made: Document) -> Document:
    return dict(made["spec"]["template"]["spec"])


def test_driver_and_executors_are_valid_and_restricted() -> None:
    documents = spark.documents(
        wanted(a_job(secrets=[{"name": "aws"}, {"name": "files", "to": "/keys"}], env={"A": "$(HOME)/x"}))
    )
    assert [each["kind"] for each in documents] == ["ServiceAccount", "Role", "RoleBinding", "Job"]
    executor = spark.executor_of(documents[-1])
    for each in (*documents, {**executor, "metadata": {**executor["metadata"], "name": "x"}}):
        schemas.validate(each, NEWEST, strict=True)
    for pod in (driver(documents[-1]), executor["spec"]):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"mountPath": "/data", "name": "claim-0"} in container["volumeMounts"]
        assert {"/tmp", "/home/outlast", "/keys"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"name": "A", "value": "/home/outlast/x"} in container["env"]
        assert container["envFrom"] == [{"secretRef": {"name": "aws"}}]
    assert executor["spec"]["automountServiceAccountToken"] is False
    assert driver(documents[-1])["serviceAccountName"] == "spark"


def test_no_proxy_of_istio_stands_between_them() -> None:
    made = spark.job(wanted())
    for meta in (made["spec"]["template"]["metadata"], spark.executor_of(made)["metadata"]):
        assert meta["labels"]["sidecar.istio.io/inject"] == meta["annotations"]["sidecar.istio.io/inject"] == "false"


def test_executors_may_be_on_spot_and_the_driver_may_not() -> None:
    made = spark.job(wanted(a_job(scheduling={"spot": "require"})))
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    one, other = (
        pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"] for pod in (driver(made), spark.executor_of(made)["spec"])
    )
    assert {each["operator"] for term in one for each in term["matchExpressions"]} == {"NotIn"}
    assert {each["operator"] for term in other for each in term["matchExpressions"]} == {"In"}
    keys = {each["key"] for each in spark.executor_of(made)["spec"]["tolerations"]}
    assert {"spotInstance", "karpenter.sh/capacity-type"} <= keys


def test_the_role_is_what_spark_asks_for() -> None:
    rules = spark.account("n")[1]["rules"]
    assert rights(rules) == {found[0] for each in ASKED if (found := needed(each))}
    assert not [verb for rule in rules for verb in (*rule["verbs"], *rule["resources"], *rule["apiGroups"]) if verb == "*"]


def test_the_resources_of_a_job_file_are_those_of_executors() -> None:
    made = spark.job(wanted(a_job(resources={"cpu": "2500m", "memory": "6Gi", "cpuLimit": "4"})))
    asks = spark.executor_of(made)["spec"]["containers"][0]["resources"]
    assert asks == {"requests": {"cpu": "2500m", "memory": "6144Mi"}, "limits": {"cpu": "4", "memory": "6144Mi"}}
    assert "spark.executor.cores 2\n" in made["spec"]["template"]["metadata"]["annotations"][Annotation.SPARK_DEFAULTS]


@pytest.mark.parametrize(
    ("conf", "asks"),
    [
        ({}, ("1", "2048Mi")),
        ({"spark.executor.memory": "2g", "spark.executor.memoryOverhead": "512"}, ("1", "2560Mi")),
        ({"spark.kubernetes.executor.request.cores": "4", "spark.executor.pyspark.memory": "1g"}, ("4", "3072Mi")),
    ],
)
def test_what_an_executor_asks_for_is_what_spark_computes(conf: dict[str, str], asks: tuple[str, str]) -> None:
    found = spark.executor_of(spark.job(wanted(conf=conf)))["spec"]["containers"][0]["resources"]["requests"]
    assert (found["cpu"], found["memory"]) == asks


def test_their_number_is_the_users_or_follows_the_work() -> None:
    def defaults(conf: dict[str, str]) -> str:
        return str(spark.job(wanted(conf=conf))["spec"]["template"]["metadata"]["annotations"][Annotation.SPARK_DEFAULTS])

    assert "spark.dynamicAllocation.enabled true" in defaults({})
    assert "spark.dynamicAllocation.shuffleTracking.enabled true" in defaults({})
    assert "spark.dynamicAllocation.enabled false" in defaults({"spark.executor.instances": "50"})


@pytest.mark.parametrize(("executors", "failures"), [({"spark.executor.instances": "2"}, 20), ({}, 200)])
def test_machines_that_are_taken_away_for_days_do_not_end_the_work(executors: dict[str, str], failures: int) -> None:
    made = spark_conf.defaults(a_job().spec, executors, "n")
    assert made["spark.executor.maxNumFailures"] == str(failures)
    assert made["spark.executor.failuresValidityInterval"] == "1h"


def test_what_the_user_gives_executors_is_tried_with_them() -> None:
    conf = {"spark.kubernetes.executor.label.team": "vision", "spark.kubernetes.executor.annotation.note": "x"}
    meta = spark.executor_of(spark.job(wanted(conf=conf)))["metadata"]
    assert (meta["labels"]["team"], meta["annotations"]["note"]) == ("vision", "x")
    assert meta["labels"][Label.SPARK_ROLE] == "executor"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.submit.deployMode", "cluster"),
        ("spark.driver.host", "h"),
        ("spark.kubernetes.driver.pod.name", "spark-python-pi-driver"),
        ("spark.kubernetes.namespace", "zip"),
        ("spark.kubernetes.container.image", "other"),
        ("spark.kubernetes.executor.podTemplateFile", "/x"),
        ("spark.kubernetes.authenticate.driver.serviceAccountName", "admin"),
        ("spark.kubernetes.executor.volumes.hostPath.x.mount.path", "/"),
    ],
)
def test_configuration_that_would_break_the_arrangement_is_refused(key: str, value: str) -> None:
    with pytest.raises(OutlastError, match=rf"^--conf {key}={value} cannot be given with --master k8s://: \w+"):
        spark.job(wanted(conf={key: value}))


def test_the_documents_own_configuration_is_taken() -> None:
    conf = {
        "spark.executor.instances": "50",
        "spark.kubernetes.namespace": "n",
        "spark.kubernetes.driver.annotation.sidecar.istio.io/inject": "false",
        "spark.kubernetes.executor.annotation.sidecar.istio.io/inject": "false",
        "spark.kubernetes.executor.request.cores": "4",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
    }
    assert spark.job(wanted(conf=conf))["metadata"]["name"] == "prepare-out"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"claim": ""}, "on Kubernetes the source and the work have to be on a volume"),
        ({"source": "/raw"}, "SOURCE /raw is not on a claim of driver and executors, which are at /data; give a path there"),
        ({"to": "/out"}, "--to /out is not on a claim"),
        ({"to": "s3://b/x"}, "--to s3://b/x is in a store; give --work DIRECTORY on a claim"),
        ({"to": "s3://b/x", "work": "/w"}, "--work /w is not on a claim"),
        ({"claim": "efs:/etc"}, "volumes[0].to (/etc) is reserved"),
        ({"claim": "efs"}, "--claim efs is no claim with a path"),
        (
            {"conf": {"spark.executor.instances": "0"}},
            "--conf spark.executor.instances=0 is no number of executors; give 1 or more",
        ),
        ({"conf": {"spark.executor.memory": "much"}}, "--conf spark.executor.memory=much is no size as Spark reads it"),
    ],
)
def test_places_that_pods_do_not_share_are_refused(fields: Document, sentence: str) -> None:
    with pytest.raises(OutlastError) as refused:
        spark.job(wanted(**fields))
    assert sentence in str(refused.value)


def test_a_quota_that_is_used_up_may_have_room_later_and_one_that_is_too_small_never() -> None:
    assert admission.may_pass(QUOTA.format(used="3Gi", limited="4Gi"))
    assert not admission.may_pass(QUOTA.format(used="0", limited="1Gi"))
    assert not admission.may_pass('violates PodSecurity "restricted:latest": x')


# ---- the command


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    """A namespace `n` with a claim and a Secret, and no job on this machine."""
    api = apiserver.ApiServer()
    with apiserver.serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url)))
        monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setenv("URL", url)
        monkeypatch.chdir(tmp_path)
        api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
        api.put(claim("efs"))
        api.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "aws", "namespace": "n"}})
        api.prescribe("POST .*/pods.*dryRun", *((201, {"metadata": {}}) for _ in range(20)))
        yield api


WORDS = ("data", "prepare", "images", "/data/in", "--to", "/data/out", "--size", "64", "--engine", "spark", "-n", "n")
IN_PODS = ("--master", "k8s://https://kubernetes.default.svc")
CLAIM = ("--claim", "efs:/data")


def claim(name: str) -> Document:
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "n"}}


def ended(api: apiserver.ApiServer, condition: str) -> None:
    api.put({**api.documents[JOB], "status": {"conditions": [{"type": condition, "status": "True"}]}})


def test_the_driver_is_submitted_once_and_again_after_a_failure(team: apiserver.ApiServer, outlast: Outlast) -> None:
    assert outlast(*WORDS, *IN_PODS, *CLAIM, "--conf", "spark.executor.instances=2") == (
        0,
        "Job prepare-out prepares /data/out with Spark\nlook at it with: outlast logs -f prepare-out -n n\n",
        "",
    )
    first = team.documents[JOB]
    assert driver(first)["containers"][0]["command"] == [
        *("outlast", "data", "prepare", "images", "--to", "/data/out", "--size", "64", "--engine", "spark"),
        *("--conf", "spark.executor.instances=2", "/data/in", "--master", spark_conf.MASTER),
    ]
    assert {key[0].partition(".")[0] for key in team.documents if key[2] == "spark"} == {
        "serviceaccounts",
        "roles",
        "rolebindings",
    }
    again = (*WORDS, *IN_PODS, *CLAIM, "--conf", "spark.executor.instances=2")
    assert outlast(*again)[1].startswith("Job prepare-out prepares it already\n")
    sentence = "other settings, and makes /data/out; wait for its end, or: outlast cancel prepare-out"
    for other in ((*WORDS, *IN_PODS, *CLAIM), (*again, "--secret", "aws")):
        assert sentence in outlast(*other)[2]
    ended(team, "Complete")
    assert outlast(*again)[1].startswith("already there: Job prepare-out has made /data/out")
    team.put(claim("other"))
    assert outlast(*again, "--claim", "other:/data")[1].startswith("Job prepare-out prepares /data/out with Spark\n")
    ended(team, "Failed")
    assert outlast(*again)[1].startswith("Job prepare-out prepares /data/out with Spark\n")
    assert team.documents[JOB]["metadata"]["uid"] != first["metadata"]["uid"]


def test_the_same_command_twice_at_once_is_submitted_once(team: apiserver.ApiServer, outlast: Outlast) -> None:
    outlast(*WORDS, *IN_PODS, *CLAIM)
    team.prescribe("GET .*/jobs/prepare-out", apiserver.status(404, "NotFound", "not yet", name="prepare-out", kind="jobs"))
    code, out, err = outlast(*WORDS, *IN_PODS, *CLAIM)
    assert (code, out.partition("\n")[0]) == (0, "Job prepare-out prepares it already"), err


def test_what_somebody_else_has_made_stays(team: apiserver.ApiServer, outlast: Outlast) -> None:
    outlast(*WORDS, *IN_PODS, *CLAIM)
    job, role = team.documents[JOB], ("roles.rbac.authorization.k8s.io", "n", "spark")
    team.put({**job, "metadata": {**job["metadata"], "labels": {}}})
    ended(team, "Complete")
    assert "Job prepare-out in namespace n belongs to" in outlast(*WORDS, *IN_PODS, *CLAIM)[2]
    assert JOB in team.documents
    del team.documents[JOB]
    foreign = {**team.documents[role], "rules": [{"apiGroups": [""], "resources": ["services"], "verbs": ["*"]}]}
    team.put({**foreign, "metadata": {"name": "spark", "namespace": "n"}})
    code, _, err = outlast(*WORDS, *IN_PODS, *CLAIM)
    assert (code, "Role spark in namespace n belongs to somebody else and stays as it is; it does not allow" in err) == (
        2,
        True,
    ), err
    assert team.documents[role]["rules"] == foreign["rules"]
    team.put({**team.documents[role], "rules": [{"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["*"]}]})
    assert outlast(*WORDS, *IN_PODS, *CLAIM)[0] == 0


def test_status_counts_executors_and_does_not_take_them_for_workers(team: apiserver.ApiServer, outlast: Outlast) -> None:
    outlast(*WORDS, *IN_PODS, *CLAIM)
    job = team.documents[JOB]

    def pod(name: str, labels: dict[str, str], phase: str) -> None:
        state = {"running": {"startedAt": apiserver.NOW}} if phase == "Running" else {"waiting": {"reason": "ImagePullBackOff"}}
        status = {"phase": phase, "containerStatuses": [{"name": "worker", "ready": True, "state": state}]}
        meta = {"name": name, "namespace": "n", "labels": labels}
        team.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": driver(job), "status": status})

    pod("prepare-out-x", job["spec"]["template"]["metadata"]["labels"], "Running")
    for number, phase in enumerate(("Running", "Pending")):
        pod(f"e-{number}", spark.executor_of(job)["metadata"]["labels"], phase)
    page = outlast("status", "prepare-out", "-n", "n")[1]
    assert page.startswith("prepare-out: Running: prepares the data; its log says how far it is\n")
    assert "executors  1 running, 1 pending: the first " in page
    assert "e-0" not in page
    assert "/data/out" in page
    assert json.loads(outlast("status", "prepare-out", "-n", "n", "-o", "json")[1])["executors"]["pending"] == 1

    said = "outlast | 3 of 9\nError: a.txt is not UTF-8: byte 7 is 0xff; convert it\n"
    ended = {"exitCode": 2, "reason": "Error", "message": said, "finishedAt": apiserver.NOW}
    status = {"phase": "Failed", "containerStatuses": [{"name": "worker", "ready": False, "state": {"terminated": ended}}]}
    meta = {"name": "prepare-out-x", "namespace": "n", "labels": job["spec"]["template"]["metadata"]["labels"]}
    team.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": driver(job), "status": status})
    failed = {
        "type": "Failed",
        "status": "True",
        "message": "Container worker failed with exit code 2 matching FailJob rule at index 0",
    }
    team.put({**job, "status": {"conditions": [failed]}})
    assert outlast("status", "prepare-out", "-n", "n")[1].startswith(
        "prepare-out: Failed: a.txt is not UTF-8: byte 7 is 0xff; convert it\n"
    )


@pytest.mark.parametrize(
    ("answer", "code", "sentence"),
    [
        (
            QUOTA.format(used="3Gi", limited="4Gi"),
            0,
            "the driver cannot be created now: the quota q of the namespace leaves too little",
        ),
        (
            QUOTA.format(used="0", limited="1Gi"),
            2,
            "Error: the driver cannot be created: the quota q of the namespace leaves too little",
        ),
        (
            'pods "x" is forbidden: violates PodSecurity "x": y',
            2,
            "Error: the driver cannot be created: the Pod Security level x",
        ),
        (
            'pods "x" is forbidden: error looking up service account n/spark: serviceaccount "spark" not found',
            2,
            "ServiceAccount spark",
        ),
    ],
)
def test_what_the_cluster_would_not_let_in_is_one_sentence(
    team: apiserver.ApiServer, outlast: Outlast, answer: str, code: int, sentence: str
) -> None:
    team.prescribed.insert(0, ("POST .*dryRun", lambda handler: refuse(handler, answer)))
    found, _, err = outlast(*WORDS, *IN_PODS, *CLAIM)
    assert (found, sentence in err) == (code, True), err
    assert (JOB in team.documents) == (code == 0)


def refuse(handler: Any, message: str) -> bool:
    handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    apiserver.send(handler, *apiserver.status(403, "Forbidden", message))
    return True


def test_who_may_not_make_roles_is_told_what_an_administrator_applies(team: apiserver.ApiServer, outlast: Outlast) -> None:
    cannot = 'forbidden: User "u" cannot get resource "{0}" in API group "rbac.authorization.k8s.io" in the namespace "n"'
    for what in ("roles", "rolebindings") * 2:  # a look before anything is made, and another
        refusal = apiserver.status(403, "Forbidden", f"{what} is {cannot.format(what)}")
        team.prescribe(f"GET .*/{what}/spark", refusal)
    code, _, err = outlast(*WORDS, *IN_PODS, *CLAIM)
    assert code == 1
    assert "you may not create Role spark and RoleBinding spark in namespace n" in err
    printed = outlast(*WORDS, *IN_PODS, *CLAIM, "--print")[1]
    assert [line for line in printed.splitlines() if line.startswith("kind:")] == [
        f"kind: {kind}" for kind in ("ServiceAccount", "Role", "RoleBinding", "Job")
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--master", "k8s://https://other:443", *CLAIM),
            "--master k8s://https://other:443 is not the cluster of here, which is http://127",
        ),
        ((*IN_PODS, "--claim", "other:/data"), "there is no claim other in namespace n; create it, or choose another"),
        ((*IN_PODS, *CLAIM, "--secret", "other"), "there is no Secret other in namespace n; create it, or choose another"),
        (IN_PODS, "on Kubernetes the source and the work have to be on a volume"),
        (
            (*IN_PODS, *CLAIM, "--work", "here"),
            "--work here is a path in the pods of driver and executors, which has to begin with /",
        ),
        (CLAIM, "--job, --claim, --image, --secret, --follow, --print, --namespace and --context are for Spark in a cluster"),
    ],
)
def test_what_cannot_be_submitted_is_one_sentence(
    team: apiserver.ApiServer, outlast: Outlast, words: tuple[str, ...], sentence: str
) -> None:
    code, out, err = outlast(*WORDS, *words)
    assert (code, out) == (2, ""), err
    assert err.startswith(f"Error: {sentence}"), err
    assert JOB not in team.documents


# ---- why


def test_why_names_the_quota_that_keeps_executors_away() -> None:
    job = spark.job(wanted())
    running = {"phase": "Running", "containerStatuses": [{"name": "worker", "state": {"running": {}}}]}
    labels = job["spec"]["template"]["metadata"]["labels"]
    pod = {"kind": "Pod", "metadata": {"name": "d", "labels": labels}, "spec": driver(job), "status": running}
    full = {
        "metadata": {"name": "q"},
        "status": {"hard": {"requests.memory": "3Gi", "pods": "9"}, "used": {"requests.memory": "2Gi"}},
    }
    (cause,) = diagnosis.causes(Snapshot("prepare-out", "n", job, (pod,), quotas=(full,)), 0.0)
    assert cause.what == (
        "Spark's driver gets no executor: the quota q leaves too little: requests.memory (an executor asks for 2048Mi, 2Gi "
        "of 3Gi are used)"
    )
    waiting = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}],
    }
    meta = {"name": "e", "labels": {Label.SPARK_ROLE: "executor"}}
    executor = {"kind": "Pod", "metadata": meta, "spec": driver(job), "status": waiting}
    (cause,) = diagnosis.causes(Snapshot("prepare-out", "n", job, (pod,), (executor,)), 0.0)
    assert cause.what.startswith("none of Spark's 1 executors runs: the first ")
