"""ElasticJobs of elastic.pytorch.org: what is made for one, and its life in a small cluster that is played here."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_validate import utils as schemas

from elastic_jobs import START, a_job, text
from operators import World
from outlast.job.spec import job_file as job_files
from outlast.kubernetes.api import kinds, owner_references, pod_status
from outlast.kubernetes.operator import main
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.observed_job import NNODES, Limits
from outlast.kubernetes.operator.plan import Document, Plan
from outlast.kubernetes.torchelastic import adapter, torchrun_pod
from outlast.rendezvous.root_cause import PLAIN_PODS
from published_schemas import each_minor


def without(job: Document, *fields: str) -> Document:
    return {**job, "spec": {key: value for key, value in job["spec"].items() if key not in fields}}


# What is made


def limits(job: Document) -> list[str]:
    return [*adapter.unsupported(job)]


def variables(pod: Document, container: int = 0) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][container].get("env", [])}


def test_a_worker_is_the_users_pod_and_is_told_where_to_meet() -> None:
    pod = torchrun_pod.pod(a_job(), 1)
    assert pod["metadata"] == {
        "name": "cifar-worker-1",
        "namespace": "team",
        "labels": {
            "group-name": "elastic.pytorch.org",
            "job-name": "cifar",
            "replica-type": "worker",
            "replica-index": "1",
            "outlast.dev/job": "cifar",
            "outlast.dev/worker": "1",
        },
        "annotations": {
            "karpenter.sh/do-not-disrupt": "true",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "outlast.dev/nnodes": "1:128",
        },
        "ownerReferences": [owner_references.reference(a_job())],
    }
    assert variables(pod) == {
        "PET_NNODES": "1:128",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "cifar-worker-0.cifar-rdzv.team.svc.cluster.local:29400",
        "PET_RDZV_ID": "cifar-12345678",
        "PET_RDZV_CONF": "last_call_timeout=5,join_timeout=600,read_timeout=300,keep_alive_interval=1,keep_alive_max_attempt=5,"
        "is_host=false",
        "PET_MAX_RESTARTS": "100",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("cifar-worker-1", "cifar-rdzv")
    assert pod["spec"]["containers"][0]["command"] == ["torchrun"]
    assert variables(torchrun_pod.pod(a_job(), 0))["PET_RDZV_CONF"].endswith("is_host=true")
    assert torchrun_pod.service(a_job())["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_what_the_user_has_set_stays_and_other_containers_are_left_alone() -> None:
    own = [{"name": "PET_MAX_RESTARTS", "value": "3"}, {"name": "A", "value": "b"}]
    containers = [{"name": "sidecar", "image": "s"}, {"name": "elasticjob-worker", "image": "i", "env": own}]
    template = {"metadata": {"labels": {"mine": "1"}}, "spec": {"containers": containers, "nodeSelector": {"a": "b"}}}
    pod = torchrun_pod.pod(a_job(worker={"template": template}), 0)
    assert pod["spec"]["containers"][0] == {"name": "sidecar", "image": "s"}
    assert (variables(pod, 1)["PET_MAX_RESTARTS"], variables(pod, 1)["A"]) == ("3", "b")
    assert (pod["metadata"]["labels"]["mine"], pod["spec"]["nodeSelector"]) == ("1", {"a": "b"})
    assert [each["name"] for each in pod["spec"]["containers"][1]["env"]][:2] == ["PET_MAX_RESTARTS", "A"]


@pytest.mark.parametrize(
    ("said", "place", "told"),
    [
        ("etcd", "etcd-service:2379", "etcd://etcd-service:2379"),
        ("etcd", "https://etcd:2379", "etcds://etcd:2379"),
        ("zookeeper", "etcd:2379", "it must be etcd"),
        ("etcd", None, "it needs a rdzvEndpoint, e.g. etcd:2379"),
    ],
)
def test_a_job_that_asks_for_it_meets_at_its_etcd(said: str, place: str | None, told: str) -> None:
    job = a_job(**({"rdzvEndpoint": place} if place else {}))
    job["metadata"]["annotations"] = {"outlast.dev/rendezvous": said}
    by_name = variables(torchrun_pod.pod(job, 0))
    if "://" in told:
        assert (by_name["PET_RDZV_BACKEND"], by_name["PET_RDZV_ENDPOINT"]) == ("outlast", told)
        assert by_name["PET_RDZV_CONF"] == "last_call_timeout=5,join_timeout=600"
        assert (by_name["PET_NNODES"], "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in by_name, limits(job)) == ("1:128", False, [])
    else:
        assert by_name["PET_RDZV_BACKEND"] == "c10d"
        assert limits(job) == [f"the annotation outlast.dev/rendezvous ({said}) is not used: {told}; workers meet at {WORKER_0}"]


@pytest.mark.parametrize("policy", ["ExitCode", "OnFailure", "Never", "Always", None])
def test_the_restart_policy_of_pods(policy: str | None) -> None:
    wanted = "Never" if policy in ("ExitCode", None) else policy
    assert torchrun_pod.pod(a_job(policy=policy), 0)["spec"]["restartPolicy"] == wanted


def test_worker_0_can_be_kept_off_spot_machines_and_the_templates_affinity_stays() -> None:
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}
    own = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}}
    containers = [{"name": "main", "image": "i"}]
    template = {"spec": {"containers": containers, "affinity": {"nodeAffinity": own, "podAffinity": {}}}}
    job = a_job(worker={"template": template})
    assert torchrun_pod.pod(job, 0)["spec"]["affinity"] == template["spec"]["affinity"]
    job["metadata"]["annotations"] = {"outlast.dev/worker-0": "on-demand"}
    affinity = torchrun_pod.pod(job, 0)["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": "lifecycle", "operator": "NotIn", "values": ["Ec2Spot"]} in term["matchExpressions"]
    assert (term["matchExpressions"][0], affinity["podAffinity"]) == (zone, {})
    assert torchrun_pod.pod(job, 1)["spec"]["affinity"] == template["spec"]["affinity"]
    assert not [said for said in limits(job) if "worker-0" in said]
    job["metadata"]["annotations"] = {"outlast.dev/worker-0": "spot"}
    assert "the annotation outlast.dev/worker-0 (spot) is not used: it must be on-demand" in limits(job)


@each_minor
def test_kubernetes_takes_what_is_made(version: str) -> None:
    for document in (adapter.definition(), torchrun_pod.pod(a_job(), 0), torchrun_pod.service(a_job())):
        schemas.validate(document, version, strict=True)
        assert str(kinds.kind_of(document))


def test_long_names_and_names_with_dots_have_host_names() -> None:
    job = a_job()
    job["metadata"]["name"] = f"a.{'b' * 61}"
    pod = torchrun_pod.pod(job, 127)
    assert len(pod["spec"]["hostname"]) <= 63
    assert len(pod["spec"]["subdomain"]) <= 63
    assert "." not in pod["spec"]["hostname"] + pod["spec"]["subdomain"]
    assert pod["spec"]["hostname"].endswith("-worker-127")
    assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())


def test_a_job_whose_name_is_no_label_has_no_workers_and_says_so() -> None:
    job = a_job()
    job["metadata"]["name"] = "a" * 64
    cluster = Cluster(job)
    cluster.settle()
    assert (cluster.pods, cluster.status["state"]) == ({}, "Created")
    assert cluster.message("Limited") == (
        "no worker is created: the job's name has 64 characters, and labels hold at most 63; give it a shorter one"
    )


def test_the_range_of_workers() -> None:
    def sizes(*unset: str, **spec: Any) -> tuple[int, int, int]:
        return adapter.sizes(without(a_job(**spec), *unset))

    assert sizes() == (1, 2, 128)
    assert sizes("minReplicas", "maxReplicas") == (2, 2, 2)
    assert sizes("maxReplicas") == (1, 2, 2)
    assert sizes(replicas=None) == (1, 1, 128)
    assert sizes(replicas=0) == (1, 0, 128)
    assert sizes("minReplicas", "maxReplicas", replicas=0) == (1, 0, 1)
    assert sizes(replicas=9, maxReplicas=4) == (1, 4, 4)
    assert sizes(replicas=1, minReplicas=2) == (2, 2, 128)
    assert sizes(minReplicas=None, maxReplicas=None, worker={"replicas": None}) == (1, 1, 1)


def test_a_field_that_is_null_is_absent_and_one_that_is_no_number_is_said_of_the_job() -> None:
    optional = ("rdzvEndpoint", "minReplicas", "maxReplicas", "activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy")
    optional += ("schedulingPolicy", "ttlSecondsAfterFinished")
    there, absent = a_job(**dict.fromkeys(optional)), without(a_job(), *optional)
    torchrun_pod.worker(there).update({"replicas": None, "restartPolicy": None})
    for name in ("replicas", "restartPolicy"):
        del torchrun_pod.worker(absent)[name]
    assert adapter.translate(there).job == adapter.translate(absent).job
    assert (limits(there), torchrun_pod.pod(there, 0)) == (limits(absent), torchrun_pod.pod(absent, 0))
    for job in (a_job(backoffLimit="three"), a_job(minReplicas="three"), a_job(worker={"replicas": "three"})):
        name = next(key for key, value in {**job["spec"], **torchrun_pod.worker(job)}.items() if value == "three")
        plan = adapter.reconcile(Limits(), CachedJob(job, [], [], {}, START - 1000), START, ClusterFeatures())
        assert plan.status
        said = f"the job cannot be read: its {name} ('three') is not a whole number; correct it"
        assert (plan.status["state"], plan.status["conditions"][-1]["message"]) == ("Failed", said)


WORKER_0 = "worker 0 (cifar-worker-0.cifar-rdzv.team.svc.cluster.local:29400)"


def test_a_deadline_of_0_which_the_archived_definition_let_in_is_none() -> None:
    assert job_files.of(adapter.translate(a_job(activeDeadlineSeconds=0)).job).spec.active_deadline_seconds is None
    assert job_files.of(adapter.translate(a_job(activeDeadlineSeconds=9)).job).spec.active_deadline_seconds == 9


def test_what_cannot_be_honoured_is_said() -> None:
    job = a_job(200, policy="Always", rdzvEndpoint="etcd-service:2379", schedulingPolicy={"minAvailable": 2})
    job["spec"]["replicaSpecs"] |= {"Master": {"replicas": 1}}
    spec = job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    spec["restartPolicy"] = "Never"
    spec["containers"][0]["args"].insert(0, "--rdzv_backend=etcd")
    assert limits(job) == [
        f"rdzvEndpoint etcd-service:2379 is not used: workers meet at {WORKER_0}",
        "replicaSpecs.Master is not used: torchrun has workers only; add its replicas to those of replicaSpecs.Worker",
        "schedulingPolicy.minAvailable (2) is not used: workers start one by one, and training with minReplicas",
        "replicas (200) is not within minReplicas and maxReplicas (1 to 128): 128 is used",
        "restartPolicy Never of the template is not used: replicaSpecs.Worker.restartPolicy is Always",
        "restartPolicy Always restarts workers that have succeeded, so the job never ends; write ExitCode or OnFailure",
        "arguments of torchrun override the job: --rdzv_backend=etcd stay as they are",
    ]
    spec["containers"] = [{"name": "a"}, {"name": "b"}]
    assert limits(job)[-1] == (
        "none of the containers (a, b) is called elasticjob-worker, so none is set up for torchrun; rename its container"
    )
    assert limits(a_job()) == []


# The definition

(VERSION,) = adapter.definition()["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def test_the_definition_takes_the_jobs_that_there_are() -> None:
    check = jsonschema.Draft202012Validator(SCHEMA)
    assert list(check.iter_errors(a_job(rdzvEndpoint="etcd-service:2379"))) == []
    assert list(check.iter_errors(a_job(worker={"replicas": -1}, replicas=None)))
    assert list(check.iter_errors(a_job(policy="Sometimes")))
    assert list(check.iter_errors({**a_job(), "spec": {"replicaSpecs": {}}}))
    for template in (
        {"metadata": {"labels": "team=vision"}, "spec": {"containers": [{"name": "a"}]}},
        {"metadata": {"annotations": ["x"]}, "spec": {"containers": [{"name": "a"}]}},
        {"spec": {"containers": [{"name": "a", "env": {"NCCL_DEBUG": "INFO"}}]}},
        {"spec": {"containers": [{"name": "a", "env": [{"value": "INFO"}]}]}},
    ):
        assert list(check.iter_errors(a_job(worker={"template": template}))), template


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, None),
        ({"replicas": 0}, None),
        ({"minReplicas": 3, "maxReplicas": 2, "replicas": 0}, "minReplicas is above maxReplicas; swap them or raise maxReplicas"),
        ({"minReplicas": 3, "replicas": 2}, "replicas is below minReplicas; raise replicas or lower minReplicas"),
        ({"maxReplicas": 3, "replicas": 4}, "replicas is above maxReplicas; lower replicas or raise maxReplicas"),
    ],
    ids=str,
)
def test_numbers_of_workers_that_cannot_be_are_refused(spec: Document, sentence: str | None) -> None:
    import celpy

    environment = celpy.Environment()
    value = {"self": celpy.json_to_cel(a_job(**spec)["spec"])}
    rules = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    broken = [each["message"] for each in rules if not environment.program(environment.compile(each["rule"])).evaluate(value)]
    assert broken == ([sentence] if sentence else [])


# A cluster


class Cluster:
    """One job and its pods. What a plan says is done; containers do what the test says."""

    def __init__(self, job: Document) -> None:
        self.job, self.now, self.uids = copy.deepcopy(job), START, itertools.count()
        self.pods: dict[str, Document] = {}
        self.services: set[str] = set()
        self.lost: set[str] = set()
        self.taints: dict[str, Document] = {}
        """Metadata and taint of nodes that are about to be terminated."""
        self.refused = ""
        """What the API server said of the last pods."""
        self.removed: list[str] = []
        self.notes: list[str] = []
        self.writes = 0
        self.checker = jsonschema.Draft202012Validator(SCHEMA)

    def decide(self) -> Plan:
        silent = [{"type": "Ready", "status": "Unknown", "lastTransitionTime": text(START - 1000)}]
        nodes = {f"node-{n}": {"metadata": {"name": f"node-{n}"}, **self.taints.get(f"node-{n}", {})} for n in range(10)}
        nodes |= {name: {**nodes[name], "status": {"conditions": silent}} for name in self.lost}
        cached = CachedJob(self.job, [*self.pods.values()], [], nodes, START - 1000, self.refused)
        before = copy.deepcopy(cached)
        plan = adapter.reconcile(Limits(), cached, self.now, ClusterFeatures())
        assert cached == before
        assert plan == adapter.reconcile(Limits(), cached, self.now, ClusterFeatures())
        return plan

    def look(self, *, parts: int = 4) -> Plan:
        """One look, of which the first so many parts are done before the operator dies."""
        plan = self.decide()
        if parts > 0:
            self.services |= {each["metadata"]["name"] for each in plan.prerequisites}
        if parts > 1 and plan.status is not None:
            self.job["status"] = copy.deepcopy(dict(plan.status))
            self.checker.validate(self.job)
            self.writes += 1
        if parts > 2:
            for deletion in plan.deletes:
                pod = self.pods[deletion.name]
                assert pod["metadata"]["uid"] == deletion.uid
                if deletion.grace_s == 0 or "nodeName" not in pod["spec"]:
                    del self.pods[deletion.name]
                else:
                    pod["metadata"]["deletionTimestamp"] = text(self.now + 30)
        if parts > 3:
            self.refused = ""
            for pod in plan.creates:
                there = self.pods.get(pod["metadata"]["name"], {}).get("metadata", {})
                if there:
                    assert there["ownerReferences"] == [], "it is of somebody else"
                    self.refused = f"Pod {there['name']} exists and does not belong to this job"
                    continue
                made = copy.deepcopy(pod)
                made["metadata"] |= {"uid": f"uid-{next(self.uids)}", "creationTimestamp": text(self.now)}
                self.pods[pod["metadata"]["name"]] = made | {"status": {"phase": "Pending"}}
            if plan.remove is not None:
                assert (plan.remove.kind, plan.remove.uid) == (kinds.LEGACY_JOB, self.job["metadata"]["uid"])
                self.removed.append(plan.remove.name)
                self.job["metadata"]["deletionTimestamp"] = text(self.now)
            self.notes += [note.reason for note in plan.events]
        return plan

    def kubelet(self) -> None:
        """Pods start; those that are deleted go, unless their node is lost."""
        for name, pod in list(self.pods.items()):
            pod["spec"].setdefault("nodeName", f"node-{name[-1]}")
            if pod["spec"]["nodeName"] in self.lost:
                continue
            if pod["metadata"].get("deletionTimestamp"):
                del self.pods[name]
            elif pod["status"]["phase"] == "Pending":
                state = {"name": "elasticjob-worker", "state": {"running": {}}}
                pod["status"] = {"phase": "Running", "containerStatuses": [state]}

    def settle(self) -> int:
        """Look until nothing is to be done, and return the number of looks."""
        for looks in range(50):
            plan, before = self.look(), self.running_workers()
            self.kubelet()
            if not plan and before == self.running_workers() and not self.decide():
                return looks
        raise AssertionError("this never settles")

    def settled(self) -> tuple[str, int, list[int]]:
        self.settle()
        return self.status["state"], self.status["restarts"], self.indices

    def running_workers(self) -> list[int]:
        return [index for index in self.indices if self.pods[f"cifar-worker-{index}"]["status"]["phase"] == "Running"]

    def end(self, index: int, code: int | None, *, reason: str = "", condition: str = "", began: float | None = None) -> None:
        """A worker's container ends; without a code its pod is lost."""
        phase = "Succeeded" if code == 0 and not reason else "Failed"
        status: Document = {"phase": phase, **({"reason": reason} if reason else {})}
        if code is not None:
            ended = {"exitCode": code, "finishedAt": text(self.now), "startedAt": text(began or START)}
            status["containerStatuses"] = [{"name": "elasticjob-worker", "state": {"terminated": ended}}]
        if condition:
            status["conditions"] = [
                {"type": "DisruptionTarget", "status": "True", "reason": condition, "lastTransitionTime": text(self.now)}
            ]
        self.pods[f"cifar-worker-{index}"]["status"] = status

    def scale(self, replicas: int) -> None:
        self.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = replicas

    @property
    def indices(self) -> list[int]:
        return sorted(int(name.rpartition("-")[2]) for name in self.pods)

    @property
    def status(self) -> Document:
        found: Document = self.job["status"]
        return found

    def conditions(self) -> dict[str, str]:
        return {each["type"]: each["status"] for each in self.status["conditions"]}

    def message(self, kind: str) -> str:
        return next(str(each["message"]) for each in self.status["conditions"] if each["type"] == kind)


def running(job: Document | None = None) -> Cluster:
    cluster = Cluster(job or a_job())
    assert cluster.settled()[0] == "Running"
    cluster.now += 60
    return cluster


def test_the_workshops_manifest_trains_loses_workers_grows_and_ends() -> None:
    given = a_job(rdzvEndpoint="etcd-service:2379")
    cluster = Cluster(given)
    plan = cluster.look()
    assert [each["metadata"]["name"] for each in plan.creates] == ["cifar-worker-0", "cifar-worker-1"]
    assert (cluster.services, cluster.status["state"]) == ({"cifar-rdzv"}, "Created")
    template = torchrun_pod.worker(given)["template"]["spec"]
    for pod in plan.creates:
        (container,) = pod["spec"]["containers"]
        assert {key: each for key, each in container.items() if key != "env"} == template["containers"][0]
        assert (pod["spec"]["nodeSelector"], pod["spec"]["volumes"]) == (template["nodeSelector"], template["volumes"])
    cluster.settle()
    assert cluster.conditions() == {"Limited": "True", "Created": "True", "Running": "True"}
    assert cluster.message("Limited") == f"rdzvEndpoint etcd-service:2379 is not used: workers meet at {WORKER_0}"
    assert cluster.status["replicaStatuses"] == {"Worker": {"active": 2, "succeeded": 0, "failed": 0}}
    assert cluster.status["selector"] == "group-name=elastic.pytorch.org,job-name=cifar"
    for victim in (1, 0):
        cluster.now += 60
        del cluster.pods[f"cifar-worker-{victim}"]
        if victim == 0:
            cluster.end(1, 1)  # it has lost its store
        assert cluster.settled() == ("Running", 0, [0, 1])
    there = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.scale(4)
    cluster.settle()
    assert cluster.indices == [0, 1, 2, 3]
    assert there.items() <= {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}.items()
    cluster.end(0, 0)
    assert cluster.settled()[0] == "Running"
    for index in (1, 2, 3):
        cluster.end(index, 0)
    cluster.settle()
    assert cluster.conditions() == {"Limited": "True", "Created": "True", "Running": "False", "Succeeded": "True"}
    assert cluster.message("Succeeded") == "all workers are done"
    assert (cluster.status["startTime"], cluster.status["completionTime"]) == (text(START), text(cluster.now))
    assert cluster.status["replicaStatuses"] == {"Worker": {"active": 0, "succeeded": 4, "failed": 0}}
    cluster.scale(5)
    assert cluster.settled() == ("Succeeded", 0, [0, 1, 2, 3])
    assert cluster.notes == ["WaitingForWorkers", "Training", "WorkerInterrupted", "WorkerLost", "Training", "JobSucceeded"]


@pytest.mark.parametrize("how", ["lost", "late"])
def test_a_worker_that_is_lost_or_comes_when_others_are_done_is_not_made_again_and_fails_nothing(how: str) -> None:
    cluster = running(a_job(3))
    cluster.end(0, 0)
    cluster.now += 5
    if how == "lost":
        cluster.end(1, None, reason="Evicted")
    else:
        cluster.end(1, 1, began=cluster.now - 1)
    assert cluster.settled() == ("Running", 0, [0, 2] if how == "lost" else [0, 1, 2])
    cluster.end(2, 0)
    assert cluster.settled()[0] == "Succeeded"


@pytest.mark.parametrize(("ended", "state"), [(-1, "Succeeded"), (0, "Restarting"), (5, "Restarting")])
def test_workers_that_end_with_0_since_they_were_told_to_leave_are_not_done(ended: int, state: str) -> None:
    cluster = running()
    cluster.job["spec"]["maxReplicas"] = 4
    assert len(cluster.look().deletes) == 2, "--nnodes differs"
    for pod in cluster.pods.values():
        pod["metadata"]["deletionGracePeriodSeconds"] = 30
        over = {"exitCode": 0, "finishedAt": text(cluster.now + ended)}
        name = pod["spec"]["containers"][0]["name"]
        pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": name, "state": {"terminated": over}}]}
    cluster.now += 6
    cluster.look()
    assert cluster.job["status"]["state"] == state


def test_a_worker_that_has_not_begun_when_others_are_done_is_not_waited_for() -> None:
    cluster = running()
    cluster.scale(4)
    cluster.look()
    cluster.end(0, 0)
    cluster.end(1, 0)
    cluster.kubelet()
    for index, began in ((2, -5.0), (3, 1.0)):
        state = {"running": {"startedAt": text(cluster.now + began)}}
        cluster.pods[f"cifar-worker-{index}"]["status"]["containerStatuses"] = [{"name": "elasticjob-worker", "state": state}]
    (deletion,) = cluster.look().deletes
    assert (deletion.name, deletion.reason) == ("cifar-worker-3", "others have succeeded: nothing is left to train")
    assert (cluster.status["state"], cluster.indices) == ("Running", [0, 1, 2])
    cluster.end(2, 0)
    assert cluster.settled()[0] == "Succeeded"


@pytest.mark.parametrize("code", [130, 137, 138, 143])
def test_a_worker_that_was_killed_is_made_again(code: int) -> None:
    cluster = running()
    before = cluster.pods["cifar-worker-1"]["metadata"]["uid"]
    cluster.end(1, code)
    cluster.look()
    said = {143: "was told to leave"}.get(code, "was killed")
    assert cluster.message("Restarting") == f"worker 1 {said} (exit code {code}); restart 1 of 100"
    assert cluster.conditions() == {"Created": "True", "Running": "False", "Restarting": "True"}
    cluster.settle()
    assert cluster.conditions() == {"Created": "True", "Running": "True"}
    assert cluster.pods["cifar-worker-1"]["metadata"]["uid"] != before
    assert cluster.status["restarts"] == 1
    assert cluster.notes[-2:] == ["WorkerFailed", "Training"]


@pytest.mark.parametrize(
    "how",
    [
        {"code": None, "reason": "Evicted"},
        {"code": 137, "reason": "Evicted"},
        {"code": 0, "reason": "Evicted"},  # it has saved since it was told to go, and is not done
        {"code": 1, "condition": "EvictionByEvictionAPI"},
        {"code": None, "reason": "NodeLost"},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["ExitCode", "OnFailure", "Never"])
def test_a_worker_that_its_node_ended_is_made_again_and_does_not_count(how: Document, policy: str) -> None:
    cluster = running(a_job(policy=policy, backoffLimit=0))
    cluster.end(0, **how)
    assert cluster.settled() == ("Running", 0, [0, 1])


def init_fails(cluster: Cluster, index: int, code: int) -> None:
    """An init container of a worker fails, beside one that runs as long as the pod."""
    pod = cluster.pods[f"cifar-worker-{index}"]
    pod["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "link"}, {"name": "fetch"}]
    ends = {"proxy": 137, "link": 0, "fetch": code}
    pod["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [
            {"name": name, "state": {"terminated": {"exitCode": end, "finishedAt": text(cluster.now)}}}
            for name, end in ends.items()
        ],
        "containerStatuses": [{"name": "elasticjob-worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }


PERMANENT = "which is permanent: restartPolicy ExitCode restarts after 130, 137, 138, 143"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("policy", "code", "how", "sentence"),
    [
        *(("ExitCode", code, "", f"failed with exit code {code}, {PERMANENT}") for code in (1, 2, 126, 127, 128, 139, 3)),
        ("ExitCode", 1, "init", f"failed with exit code 1 in its init container fetch, {PERMANENT}"),
        ("Never", 1, "init", "failed with exit code 1 in its init container fetch, and restartPolicy is Never"),
        ("Never", 137, "", "was killed (exit code 137), and restartPolicy is Never"),
        (
            "Never",
            137,
            "OOMKilled",
            "was OOMKilled: it used more than its limit of 2Gi; raise resources.limits.memory of its container "
            "elasticjob-worker, and restartPolicy is Never",
        ),
    ],
)
def test_a_failure_that_is_not_restarted_fails_the_job(policy: str, code: int, how: str, sentence: str, index: int) -> None:
    job = a_job(policy=policy)
    torchrun_pod.containers(job)[0]["resources"] = {"limits": {"memory": "2Gi"}}
    cluster = running(job)
    if how == "init":
        init_fails(cluster, index, code)
    else:
        cluster.end(index, code)
        status = cluster.pods[f"cifar-worker-{index}"]["status"]
        status["containerStatuses"][0]["state"]["terminated"]["reason"] = how
    cluster.now += PLAIN_PODS.cause
    cluster.settle()
    assert cluster.conditions() == {"Created": "True", "Running": "False", "Failed": "True"}
    assert cluster.message("Failed") == f"worker {index} {sentence}"
    assert cluster.status["conditions"][-1]["reason"] == "PodFailurePolicy"
    assert cluster.indices == [index], "the one that failed keeps its log, the other trains no more"
    assert cluster.status["completionTime"]


@pytest.mark.parametrize("how", ["killed", "refused"])
def test_a_worker_that_never_begins_is_made_again_until_the_budget_is_used_up(how: str) -> None:
    cluster, said = running(a_job(backoffLimit=1)), []
    for _ in range(2):
        if how == "killed":
            init_fails(cluster, 1, 137)
        else:
            cluster.end(1, None, reason="SysctlForbidden")
        said += [each.reason for each in cluster.decide().deletes]
        cluster.settle()
    sentence = "failed with exit code 137 in its init container fetch" if how == "killed" else "failed before it began"
    assert said == [f"it has ended: worker 1 {sentence}"]
    assert cluster.message("Failed") == f"worker 1 {sentence}, and backoffLimit (1) is used up by 2 restarts"


def ends_beside_another(cluster: Cluster, index: int, code: int, *, other: int | None) -> None:
    """The torchrun of a worker ends; a container beside it ends with a code, or runs on."""
    cluster.end(index, code)
    status = cluster.pods[f"cifar-worker-{index}"]["status"]
    state = {"running": {}} if other is None else {"terminated": {"exitCode": other, "finishedAt": text(cluster.now)}}
    status["containerStatuses"].insert(0, {"name": "proxy", "state": state})
    status["phase"] = "Running" if other is None else "Failed" if code or other else "Succeeded"


@pytest.mark.parametrize(("other", "left"), [(2, [0, 1]), (None, [])])
def test_a_worker_is_done_when_its_torchrun_is_whatever_runs_beside_it(other: int | None, left: list[int]) -> None:
    cluster = running()
    ends_beside_another(cluster, 0, 0, other=other)
    ends_beside_another(cluster, 1, 0, other=other)
    cluster.look()
    assert (cluster.status["state"], cluster.status["replicaStatuses"]["Worker"]["succeeded"]) == ("Succeeded", 2)
    cluster.settle()
    assert cluster.indices == left, "what runs on when the job is over is ended"


def test_a_worker_leaves_a_node_that_will_soon_be_gone_and_that_does_not_count() -> None:
    cluster = running()
    by = pod_status.rfc3339(cluster.now + 15)
    meta = {"name": "node-1", "annotations": {"outlast.dev/leaving-at": by}}
    cluster.taints = {"node-1": {"metadata": meta, "spec": {"taints": [{"key": "outlast.dev/leaving"}]}}}
    reason = f"worker 1 leaves: its node node-1 is about to be terminated (outlast.dev/leaving, by {by})"
    assert [(each.name, each.grace_s, each.reason) for each in cluster.look().deletes] == [("cifar-worker-1", 13, reason)]
    assert cluster.settled() == ("Running", 0, [0, 1])
    plan = cluster.look()  # it was put on the same node again
    assert (plan.deletes, plan.requeue_at) == ((), cluster.now + 10)


def test_a_worker_that_does_not_go_is_forced_to_after_a_while() -> None:
    cluster = running()
    cluster.pods["cifar-worker-0"]["metadata"]["deletionTimestamp"] = text(cluster.now)
    plan = cluster.look()
    assert (plan.deletes, plan.creates, plan.requeue_at) == ((), (), cluster.now + 60)
    cluster.now += 60
    (deletion,) = cluster.look().deletes
    assert (deletion.grace_s, deletion.reason) == (0, "its node node-0 has not ended it in time")


@pytest.mark.parametrize("how", ["gone", "goes", "evicted", "killed", "made again"])
def test_workers_that_fail_since_worker_0_is_lost_are_made_again(how: str) -> None:
    """It hosts the store of all: their torchrun ends with 1, which is no fault of theirs."""
    cluster = running(a_job(3))
    host = cluster.pods["cifar-worker-0"]
    match how:
        case "gone":
            del cluster.pods["cifar-worker-0"]
        case "goes":
            host["metadata"]["deletionTimestamp"] = text(cluster.now + 30)
        case "evicted":
            cluster.end(0, None, reason="Evicted")
        case "killed":
            cluster.end(0, 137)
        case "made again":
            host["metadata"] |= {"uid": "new", "creationTimestamp": text(cluster.now)}
    cluster.end(1, 1)
    (deletion,) = [each for each in cluster.decide().deletes if each.name == "cifar-worker-1"]
    assert deletion.reason == "it has ended: worker 1 failed with exit code 1 since worker 0, where workers meet, was lost"
    assert cluster.settled() == ("Running", how == "killed", [0, 1, 2])
    cluster.end(1, 1, began=cluster.now + 1)
    cluster.now += PLAIN_PODS.cause
    assert cluster.settled()[0] == "Failed"


@pytest.mark.parametrize(("policy", "state"), [("ExitCode", "Running"), ("Never", "Failed")])
def test_a_worker_that_lost_the_store_is_not_judged_before_worker_0_is_heard_of(policy: str, state: str) -> None:
    cluster = running(a_job(policy=policy))
    cluster.end(1, 1)
    plan = cluster.look()
    assert (plan.deletes, plan.events, plan.requeue_at) == ((), (), cluster.now + PLAIN_PODS.cause)
    assert (cluster.status["state"], cluster.status["restarts"]) == ("Running", 0)
    cluster.now += PLAIN_PODS.cause - 1
    cluster.end(0, 137)
    cluster.settle()
    assert (cluster.status["state"], cluster.status["restarts"]) == (state, 1)
    if state == "Failed":
        assert cluster.message("Failed").startswith("worker 0 was killed (exit code 137), ")


def started_again(cluster: Cluster, index: int, code: int, count: int, *, reason: str = "Error") -> None:
    (status,) = cluster.pods[f"cifar-worker-{index}"]["status"]["containerStatuses"]
    status |= {"restartCount": count, "lastState": {"terminated": {"exitCode": code, "reason": reason}}}


def test_a_drain_of_worker_0_uses_up_no_restarts_though_nodes_start_all_others_again() -> None:
    cluster = running(a_job(4, policy="OnFailure", backoffLimit=0))
    for drains in (1, 2):
        del cluster.pods["cifar-worker-0"]
        for index in (1, 2, 3):
            started_again(cluster, index, 1, drains)
        cluster.settle()
    started_again(cluster, 0, 255, 1, reason="Unknown")
    assert cluster.settled() == ("Running", 0, [0, 1, 2, 3])
    started_again(cluster, 3, 137, 3)
    cluster.settle()
    assert cluster.message("Failed").endswith("backoffLimit (0) is used up by 1 restarts")


def test_a_worker_that_its_node_refuses_is_not_made_again_at_once() -> None:
    cluster = Cluster(a_job(1))
    cluster.look()
    cluster.end(0, None, reason="NodeAffinity")
    cluster.pods["cifar-worker-0"]["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": text(cluster.now)}
    ]
    plan = cluster.look()
    assert (plan.deletes, plan.requeue_at) == ((), START + 10)


@pytest.mark.parametrize("unset", [(), ("minReplicas", "maxReplicas")], ids=str)
def test_scaling_makes_exactly_the_workers_that_are_wanted(unset: tuple[str, ...]) -> None:
    cluster = running(without(a_job(), *unset))
    first = cluster.pods["cifar-worker-0"]["metadata"]["uid"]
    for replicas in (4, 1, 0, 2):
        cluster.scale(replicas)
        assert cluster.settle() < 8
        assert cluster.indices == [*range(replicas)]
        assert cluster.status["state"] == ("Running" if replicas else "Suspended")
        assert (cluster.conditions().get("Suspended") == "True") == (not replicas)
        said = {pod["metadata"]["annotations"][NNODES] for pod in cluster.pods.values()}
        assert said == ({torchrun_pod.nnodes(cluster.job)} if replicas else set())
        kept = bool(replicas) and cluster.pods["cifar-worker-0"]["metadata"]["uid"] == first
        assert kept == (not unset and replicas in (4, 1)), "worker 0 hosts the rendezvous"
    assert cluster.status["restarts"] == 0
    del cluster.pods["cifar-worker-0"]
    cluster.scale(1)
    plan = cluster.look()
    assert [each.name for each in plan.deletes] == ["cifar-worker-1"], "a gap is not filled by it"


def test_workers_of_the_archived_controller_train_on_until_one_is_to_be_made() -> None:
    cluster = running(a_job(3))
    for pod in cluster.pods.values():
        del pod["metadata"]["annotations"][NNODES]
    old = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    assert not cluster.look()
    del cluster.pods["cifar-worker-2"]
    plan = cluster.look()
    assert plan.creates == ()
    assert {each.name: each.reason for each in plan.deletes} == dict.fromkeys(
        ("cifar-worker-0", "cifar-worker-1"), "all workers are restarted: its rendezvous differs from that of new ones"
    )
    assert cluster.settled() == ("Running", 0, [0, 1, 2])
    assert not old & {pod["metadata"]["uid"] for pod in cluster.pods.values()}


def test_running_pods_of_the_archived_controller_are_adopted_and_then_nothing_is_written(world: World) -> None:
    job = a_job()
    job["metadata"]["namespace"] = "default"
    world.api.put(job)
    owner = world.api.documents[kinds.LEGACY_JOB.resource, "default", "cifar"]
    for index in range(2):
        pod = torchrun_pod.pod(owner, index)
        labels = {key: value for key, value in pod["metadata"]["labels"].items() if not key.startswith("outlast.dev/")}
        pod["metadata"] |= {"labels": labels, "annotations": {}}
        world.api.put({**pod, "status": {"phase": "Running"}})
    world.start(reconcilers=main.reconcilers(Limits()))

    world.api.until(
        lambda: (world.status("cifar", kinds.LEGACY_JOB).get("replicaStatuses") or {}).get("Worker", {}).get("active") == 2
    )
    world.settled(["cifar"])

    def writes() -> list[str]:
        return sorted(each.split("?")[0] for each in world.writes() if "/events" not in each)

    before, prefix = writes(), "/api/v1/namespaces/default/pods/cifar-worker"
    assert [each for each in before if not each.startswith(("POST", "PUT"))] == [f"PATCH {prefix}-0", f"PATCH {prefix}-1"]
    assert world.status("cifar", kinds.LEGACY_JOB)["state"] == "Running"
    world.running[0][0]._queue_all()
    world.settled(["cifar"])
    assert writes() == before


def test_a_stored_job_that_is_none_of_ours_says_why_and_its_pods_stay() -> None:
    cluster = running()
    cluster.job["spec"]["backoffLimit"] = -1  # the archived controller's definition may have let it in
    plan = cluster.decide()
    assert (plan.creates, plan.deletes) == ((), ())
    sentence = "the job cannot be understood: restarts.limit (-1) must be at least 0"
    assert [(each.reason, each.message) for each in plan.events] == [("InvalidJob", sentence)]


@pytest.mark.parametrize(("policy", "left"), [(None, [0, 1]), ("Running", [0, 1]), ("All", [])])
def test_pods_of_a_job_that_is_over_are_cleaned_up_as_it_says(policy: str | None, left: list[int]) -> None:
    cluster = running(a_job(cleanPodPolicy=policy) if policy else a_job())
    cluster.end(0, 0)
    cluster.end(1, 0)
    assert cluster.settled() == ("Succeeded", 0, left)
    assert cluster.status["replicaStatuses"] == {"Worker": {"active": 0, "succeeded": 2, "failed": 0}}


def test_a_job_that_failed_under_the_archived_controller_is_deleted_in_its_time() -> None:
    """That one gave jobs that failed no completionTime, and died of it."""
    cluster = Cluster(a_job(ttlSecondsAfterFinished=50))
    failed = {"type": "Failed", "status": "True", "reason": "ElasticJobFailed", "message": "", "lastTransitionTime": text(START)}
    cluster.job["status"] = {"conditions": [failed], "replicaStatuses": {"Worker": {"failed": 1}}}
    cluster.settle()
    assert cluster.status["replicaStatuses"] == {"Worker": {"active": 0, "succeeded": 0, "failed": 1}}
    assert cluster.status["conditions"] == [failed]
    assert cluster.decide().requeue_at == START + 50
    cluster.now = START + 50
    cluster.look()
    assert cluster.removed == ["cifar"]


def test_a_job_of_an_earlier_operator_goes_on_with_what_that_has_counted() -> None:
    """Its status has no `job` yet: it has counted a failure and a container that was started again."""
    cluster = running(a_job(backoffLimit=4, policy="OnFailure"))
    started_again(cluster, 0, 137, 1)
    cluster.end(1, 137)
    uids = [pod["metadata"]["uid"] for pod in cluster.pods.values()]
    earlier = {"restarts": 3, "judged": uids[1:], "started": {uids[0]: 1}, "state": "Restarting"}
    cluster.job["status"] = {**{key: cluster.status[key] for key in ("conditions", "startTime")}, **earlier}
    assert cluster.settled() == ("Running", 3, [0, 1])
    assert cluster.status["startTime"] == text(START)


def test_a_job_that_cannot_be_read_any_more_trains_on() -> None:
    cluster = running()
    cluster.job |= {"spec": {}, "unreadable": "its spec is nested more than 100 levels deep; make it flatter"}
    cluster.lost.add("node-0")
    assert cluster.decide() == Plan()


def test_a_job_whose_done_workers_are_scaled_away_has_not_succeeded() -> None:
    cluster = running(a_job(3))
    cluster.end(1, 0)
    cluster.end(2, 0)
    for replicas, state in ((1, "Running"), (0, "Suspended")):
        cluster.scale(replicas)
        cluster.settle()
        assert cluster.status["state"] == state
    assert "Succeeded" not in cluster.conditions()


def test_the_definition_keeps_what_users_and_the_operator_write_apart() -> None:
    assert VERSION["subresources"]["status"] == {}
    assert SCHEMA["properties"]["spec"]["properties"]["replicaSpecs"]["x-kubernetes-preserve-unknown-fields"], "a Master is said"
    assert not {"shortNames", "categories"} & adapter.definition()["spec"]["names"].keys(), "those are of elasticjobs.outlast.dev"


def test_a_pod_of_somebody_else_is_not_touched_and_told() -> None:
    cluster = Cluster(a_job())
    other = {**torchrun_pod.pod(a_job(), 1), "status": {"phase": "Failed"}}
    other["metadata"] = {**other["metadata"], "uid": "x", "creationTimestamp": text(START), "ownerReferences": []}
    cluster.pods["cifar-worker-1"] = other
    for _ in range(3):
        cluster.look()
        cluster.kubelet()
    assert (cluster.pods["cifar-worker-1"], cluster.indices) == (other, [0, 1])
    assert cluster.message("Limited") == "Pod cifar-worker-1 exists and does not belong to this job"


def test_a_job_that_is_deleted_is_left_to_the_cluster() -> None:
    cluster = running()
    cluster.job["metadata"]["deletionTimestamp"] = text(cluster.now)
    assert not cluster.look()
    cluster.lost.add("node-0")
    cluster.pods["cifar-worker-0"]["metadata"]["deletionTimestamp"] = text(cluster.now)
    assert [each.name for each in cluster.look().deletes] == ["cifar-worker-0"]


# Anything


def happen(cluster: Cluster, event: tuple[str, int, int]) -> None:
    what, index, parts = event
    there = cluster.running_workers()
    if what == "scale":
        cluster.scale(index)
    elif what == "look":
        cluster.look(parts=parts)
    elif what == "kubelet":
        cluster.kubelet()
    elif what == "time":
        cluster.now += 10**index
    elif there:
        one = there[index % len(there)]
        match what:
            case "kill":
                cluster.end(one, 137)
            case "evict":
                cluster.end(one, None, reason="Evicted")
            case "delete":
                cluster.pods[f"cifar-worker-{one}"]["metadata"]["deletionTimestamp"] = text(cluster.now + 30)
            case "lose":
                cluster.lost ^= {cluster.pods[f"cifar-worker-{one}"]["spec"]["nodeName"]}


def events() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    what = st.sampled_from(["scale", "look", "look", "kubelet", "kubelet", "time", "kill", "evict", "delete", "lose"])
    return st.lists(st.tuples(what, st.integers(0, 4), st.integers(0, 4)), max_size=30)


@given(events())
def test_whatever_happens_it_settles_with_the_workers_that_are_wanted(story: list[tuple[str, int, int]]) -> None:
    cluster = Cluster(a_job())
    most = 2
    for event in story:
        happen(cluster, event)
        most = max(most, event[1] if event[0] == "scale" else 0)
        assert len(cluster.indices) <= most
    cluster.lost.clear()
    for _ in range(3):
        cluster.now += 400
        cluster.settle()
    asked = cluster.job["spec"]["replicaSpecs"]["Worker"]["replicas"]
    assert cluster.status["state"] == ("Running" if asked else "Suspended")
    assert cluster.indices == [*range(asked)]
    writes = cluster.writes
    assert not cluster.look()
    assert cluster.writes == writes


def test_the_operator_may_die_between_any_two_parts() -> None:
    def life(*parts: int) -> Document:
        cluster = running()
        for index, code in ((1, 137), (0, 143)):
            cluster.end(index, code)
            for part in parts:
                cluster.look(parts=part)
                cluster.kubelet()
            cluster.settle()
        return {key: cluster.status[key] for key in ("state", "restarts", "replicaStatuses")}

    expected = life()
    assert expected["restarts"] == 2
    for parts in itertools.product(range(5), repeat=2):
        assert life(*parts) == expected
