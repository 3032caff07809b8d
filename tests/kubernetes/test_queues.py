"""Jobs in a queue of Kueue: what is asked for, and what is done about its answers. A Kueue in memory admits and evicts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

import settling
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests.scheduling import kueue
from outlast.kubernetes.operator.kueue_workloads import WorkloadSlice
from settling import Settling
from simulated import Cluster, Kueue, trains


def a_cluster(replicas: int = 3, *, quota: int = 4, low: int = 2, high: int = 6, partly: bool = True, **fields: Any) -> Cluster:
    """A cluster with a Kueue of so much quota, and a job that waits for some of it."""
    fields = {"steps": 10**6, "scheduling": {"queue": "research"}, **fields}
    cluster = Cluster({"replicas": replicas, "min": low, "max": high}, **fields)
    Kueue(cluster, quota, partly=partly)
    return cluster


def kueue_of(cluster: Cluster) -> Kueue:
    assert cluster.kueue
    return cluster.kueue


def asked(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """The Workloads that count: for how many workers each was made, and how many it has quota for."""
    shares = [share for share in kueue_of(cluster).shares() if not share.is_finished]
    return {share.name.rpartition("-")[2]: (share.requested, share.count if share.is_admitted else 0) for share in shares}


def share(cluster: Cluster, number: int = 0) -> WorkloadSlice:
    return next(share for share in kueue_of(cluster).shares() if share.name.endswith(f"-{number}"))


def training(replicas: int = 3, **fields: Any) -> Cluster:
    cluster = a_cluster(replicas, **fields)
    cluster.until(trains(replicas))
    cluster.run(10)
    return cluster


def settled(cluster: Cluster) -> bool:
    """Whether nothing more is done although time passes."""
    cluster.run(10)
    before = [write for write in cluster.writes if not write.startswith("status ")]
    cluster.run(60)
    return before == [write for write in cluster.writes if not write.startswith("status ")]


def test_a_job_waits_for_quota_and_trains_once_it_is_admitted() -> None:
    cluster = a_cluster(3, quota=1)
    cluster.run(60)
    assert cluster.pods == []
    reason = "waits in the queue research to be admitted: 3 more pods are needed, 1 are free"
    assert (cluster.status["state"], cluster.status["reason"], cluster.status["queue"]) == ("Queued", reason, "research")
    assert asked(cluster) == {"0": (3, 0)}
    assert settled(cluster)
    kueue_of(cluster).quota = 3
    cluster.until(trains(3))
    assert asked(cluster) == {"0": (3, 3)}
    assert settled(cluster)
    assert share(cluster).is_true("PodsReady")


def test_what_is_asked_for_is_the_jobs_pods() -> None:
    cluster = a_cluster(3, resources={"cpu": 2}, quota=0)
    cluster.run(3)
    (document,) = cluster.all("Workload")
    uid = cluster.job["metadata"]["uid"]
    assert document["metadata"]["name"] == f"train-{uid[:8]}-0"
    assert document["metadata"]["ownerReferences"][0]["uid"] == document["metadata"]["labels"][kueue.JOB_UID] == uid
    pods = document["spec"]["podSets"][0]
    assert (document["spec"]["queueName"], pods["name"], pods["count"], pods["minCount"]) == ("research", "main", 3, 2)
    assert pods["template"]["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "2"}


def test_what_was_admitted_in_part_trains_and_grows_by_a_workload_of_its_own() -> None:
    cluster = a_cluster(4, quota=3)
    cluster.until(trains(3))
    assert asked(cluster) == {"0": (4, 3), "1": (1, 0)}
    assert settled(cluster)
    kueue_of(cluster).quota = 4
    cluster.until(trains(4))
    assert asked(cluster) == {"0": (4, 3), "1": (1, 1)}
    assert cluster.status["interruptions"] == 0
    assert settled(cluster)


def test_where_nothing_is_admitted_in_part_all_are_waited_for() -> None:
    cluster = a_cluster(4, quota=3, partly=False)
    cluster.run(60)
    assert (cluster.pods, cluster.status["state"]) == ([], "Queued")
    kueue_of(cluster).quota = 4
    cluster.until(trains(4))


def test_an_evicted_job_saves_leaves_and_only_then_gives_its_quota_back() -> None:
    cluster = training(3)
    step = cluster.step
    kueue_of(cluster).held = True
    kueue_of(cluster).evict(share(cluster))
    cluster.run(1)
    assert cluster.status["state"] == "Queued"
    assert cluster.status["reason"] == "the queue research takes its quota back: Preempted to accommodate a workload"
    assert kueue_of(cluster).used == 3
    cluster.until(lambda c: not c.pods and not kueue_of(c).used)
    assert cluster.committed >= step
    told = share(cluster)
    assert "admission" not in told.document["status"]
    found = {each["type"]: (each["status"], each["reason"]) for each in told.document["status"]["conditions"]}
    assert found == {
        "QuotaReserved": ("False", "Pending"),
        "Evicted": ("True", "Preempted"),
        "Admitted": ("False", "NoReservation"),
        "PodsReady": ("False", "WaitForStart"),
        "Requeued": ("True", "Preempted"),
    }
    assert settled(cluster)
    kueue_of(cluster).held = False
    cluster.until(trains(3))
    cluster.run(10)
    steps = [step for _, step in cluster.done_steps]
    assert len(steps) == len(set(steps)) == max(steps), "no step is lost or done twice"
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 0)


def grown(first: int, then: int, evicted: int) -> Cluster:
    """A job that has grown by a Workload of its own; that of this number is evicted, and nothing is admitted."""
    cluster = training(first)
    cluster.change(replicas=then)
    cluster.until(trains(then))
    kueue_of(cluster).held = True
    kueue_of(cluster).evict(share(cluster, evicted))
    return cluster


@pytest.mark.parametrize(("evicted", "stay"), [(1, [0, 1]), (0, [2, 3])])
def test_of_two_workloads_one_is_evicted_and_only_its_workers_leave(evicted: int, stay: list[int]) -> None:
    cluster = grown(2, 4, evicted)
    cluster.until(trains(2))
    step = cluster.step
    cluster.run(20)
    assert cluster.step >= step + 19
    assert sorted(pod["metadata"]["name"] for pod in cluster.pods) == [f"train-worker-{index}" for index in stay]
    assert asked(cluster) == {"0": (2, 2), "1": (2, 2), str(evicted): (2, 0)}
    assert (cluster.status["restarts"], cluster.status["interruptions"]) == (0, 2)
    kueue_of(cluster).held = False
    cluster.until(trains(4))


def test_too_few_to_train_with_hold_no_quota_while_they_wait_for_the_others() -> None:
    cluster = grown(2, 3, 0)
    cluster.until(lambda c: not c.pods and not kueue_of(c).used)
    cluster.run(5)
    assert asked(cluster) == {"0": (3, 0)}
    kueue_of(cluster).held = False
    cluster.until(trains(3))


def test_scaling_down_gives_back_what_is_not_needed_when_its_pods_have_gone() -> None:
    cluster = training(4)
    cluster.change(replicas=2)
    cluster.until(trains(2))
    cluster.run(5)
    assert (asked(cluster), kueue_of(cluster).used) == ({"0": (4, 2)}, 2)
    cluster.change(replicas=3)
    cluster.until(trains(3))
    assert (asked(cluster), kueue_of(cluster).used) == ({"0": (4, 2), "1": (1, 1)}, 3)
    cluster.change(replicas=2)
    cluster.until(lambda c: kueue_of(c).used == 2)
    assert settled(cluster)
    assert sum(count for _, count in asked(cluster).values()) == 2


def test_what_waits_follows_the_number_that_is_wanted() -> None:
    cluster = a_cluster(3, quota=0)
    cluster.run(5)
    cluster.change(replicas=5)
    cluster.run(5)
    assert asked(cluster) == {"0": (5, 0)}
    assert settled(cluster)


def test_a_suspended_job_holds_no_quota() -> None:
    cluster = training(3)
    cluster.change(suspend=True)
    cluster.until(lambda c: not c.pods)
    cluster.run(5)
    assert (cluster.status["state"], cluster.all("Workload")) == ("Suspended", [])
    cluster.change(suspend=False)
    cluster.until(trains(3))


def test_when_the_job_ends_its_quota_is_free() -> None:
    cluster = training(3, steps=30)
    cluster.until(lambda c: c.status["state"] == "Succeeded")
    cluster.run(5)
    (finished,) = kueue_of(cluster).shares()
    said = finished.condition("Finished")
    assert said
    assert (said["status"], said["reason"], said["message"]) == ("True", "Succeeded", "workers 0, 1 and 2 are done")
    assert settled(cluster)


def test_somebody_deletes_the_workload_and_the_job_is_queued_again() -> None:
    cluster = training(3)
    kueue_of(cluster).held = True
    cluster.delete(kinds.WORKLOAD_V1BETA2, share(cluster).name, share(cluster).uid)
    cluster.until(lambda c: not c.pods)
    assert (cluster.status["state"], asked(cluster)) == ("Queued", {"1": (3, 0)})
    kueue_of(cluster).held = False
    cluster.until(trains(3))


def test_a_deactivated_workload_stays_so() -> None:
    cluster = training(3)
    share(cluster).document["spec"]["active"] = False
    kueue_of(cluster).evict(share(cluster), "The workload is deactivated")
    cluster.until(lambda c: not c.pods)
    cluster.run(5)
    assert share(cluster).document["spec"]["active"] is False
    assert cluster.status["reason"] == "waits in the queue research to be admitted: The workload is deactivated"
    assert settled(cluster)


def test_deadlines_do_not_run_in_a_queue() -> None:
    cluster = a_cluster(3, quota=0, activeDeadlineSeconds=60, startupDeadlineSeconds=30)
    cluster.run(200)
    assert cluster.status["state"] == "Queued"
    kueue_of(cluster).quota = 3
    cluster.until(trains(3))
    cluster.run(70)
    assert cluster.status["reason"] == "the job has run for activeDeadlineSeconds (60)"


def test_a_kueue_that_comes_while_a_job_trains_gets_it_into_its_queue() -> None:
    cluster = Cluster({"replicas": 2, "min": 2, "max": 4}, steps=10**6, scheduling={"queue": "research"})
    cluster.until(trains(2))
    cluster.found = frozenset([kueue.GROUP])  # it is there, and not yet known what it says
    cluster.run(10)
    assert cluster.status["state"] == "Running"
    Kueue(cluster, 0)
    cluster.until(lambda c: not c.pods)
    assert cluster.status["state"] == "Queued"
    kueue_of(cluster).quota = 2
    cluster.until(trains(2))


def test_a_job_of_no_queue_needs_none() -> None:
    cluster = a_cluster(2, quota=0, scheduling={})
    kueue_of(cluster).allows = lambda pod: None  # type: ignore[method-assign]
    cluster.until(trains(2))
    assert cluster.all("Workload") == []


def test_the_label_of_a_job_names_its_queue_and_its_priority() -> None:
    cluster = a_cluster(2, scheduling={})
    cluster.job["metadata"]["labels"] = {kueue.QUEUE: "team", kueue.PRIORITY: "urgent"}
    cluster.run(5)
    reason = "there is no WorkloadPriorityClass called urgent; ask for one, or delete the job and name another"
    assert (cluster.status["reason"], cluster.all("Workload")) == (reason, [])
    kueue_of(cluster).classes = [{"kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 7}]
    cluster.until(trains(2))
    (document,) = cluster.all("Workload")
    assert (document["spec"]["queueName"], document["spec"]["priority"]) == ("team", 7)
    wanted = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"}
    assert document["spec"]["priorityClassRef"] == wanted


def test_in_the_older_version_a_priority_is_said_in_two_fields() -> None:
    priority = kueue.Priority(5, "high", "scheduling.k8s.io")
    made = kueue.workload(kinds.WORKLOAD, {}, queue="q", template={}, count=2, min_count=2, priority=priority)
    said = {"priority": 5, "priorityClassName": "high", "priorityClassSource": "scheduling.k8s.io/priorityclass"}
    assert made["spec"] == {"queueName": "q", "podSets": [{"name": "main", "count": 2, "template": {}}], **said}
    default = {"kind": "PriorityClass", "metadata": {"name": "low"}, "value": -1, "globalDefault": True}
    assert kueue.priority({"metadata": {}, "spec": {}}, [default]) == kueue.Priority(-1, "low", "scheduling.k8s.io")


def test_pods_go_where_their_flavor_and_admission_checks_say() -> None:
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": [{"key": "x"}], "nodeSelector": {"gpu": "yes"}}}
    updates = [
        {"name": "main", "annotations": {"check": "1"}, "nodeSelector": {"zone": "b"}},
        {"name": "other", "labels": {"n": "o"}},
    ]
    status = {
        "admission": {"podSetAssignments": [{"name": "main", "flavors": {"cpu": "spot", "gpu": "spot"}, "count": 2}]},
        "admissionChecks": [{"name": "c", "state": "Ready", "podSetUpdates": updates}],
    }
    flavor = {"spec": {"nodeLabels": {"pool": "spot"}, "tolerations": [{"key": "x"}, {"key": "spot"}]}}
    assert kueue.with_admission(pod, {"metadata": {"name": "w"}, "status": status}, {"spot": flavor}) == {
        "metadata": {"labels": {"a": "b"}, "annotations": {kueue.WORKLOAD: "w", "check": "1"}},
        "spec": {"tolerations": [{"key": "x"}, {"key": "spot"}], "nodeSelector": {"gpu": "yes", "pool": "spot", "zone": "b"}},
    }


def test_a_flavor_that_is_not_there_is_waited_for() -> None:
    cluster = a_cluster(2)
    spot = kueue_of(cluster).flavors.pop("spot")
    cluster.run(5)
    assert cluster.pods == []
    assert cluster.status["reason"] == "the queue research has assigned the ResourceFlavor spot, which does not exist"
    kueue_of(cluster).flavors["spot"] = spot
    cluster.until(trains(2))


class Quota(Settling):
    least = 2

    @initialize(replicas=st.integers(2, 4), quota=st.integers(0, 5), partly=st.booleans())
    def begin(self, replicas: int, quota: int, partly: bool) -> None:
        self.cluster = a_cluster(replicas, quota=quota, high=4, partly=partly, steps=400, restarts={"limit": 1000})
        self.wanted = replicas

    @rule(quota=st.integers(0, 5))
    def there_is_another_quota(self, quota: int) -> None:
        kueue_of(self.cluster).quota = quota

    @rule(number=st.integers(0, 3))
    def a_workload_is_evicted(self, number: int) -> None:
        if holding := [each for each in kueue_of(self.cluster).shares() if each.is_admitted]:
            kueue_of(self.cluster).evict(holding[number % len(holding)])

    @rule(number=st.integers(0, 3))
    def a_workload_is_deleted(self, number: int) -> None:
        if shares := kueue_of(self.cluster).shares():
            chosen = shares[number % len(shares)]
            self.cluster.delete(kinds.WORKLOAD_V1BETA2, chosen.name, chosen.uid)

    @invariant()
    def no_pod_is_without_quota(self) -> None:
        if hasattr(self, "cluster"):  # nor when it is made, see Kueue.allows
            for each in kueue_of(self.cluster).shares():
                assert kueue_of(self.cluster).using(each.name) <= (each.count if each.is_true("QuotaReserved") else 0)

    def teardown(self) -> None:
        if not hasattr(self, "cluster") or not self.cluster.documents:
            return
        cluster = self.cluster
        kueue_of(cluster).quota = 0
        for each in kueue_of(cluster).shares():
            if each.is_admitted:
                kueue_of(cluster).evict(each)
        cluster.until(lambda c: c.status.get("state") in ("Succeeded", "Failed") or not c.pods, 900)
        if cluster.status.get("state") not in ("Succeeded", "Failed"):
            cluster.run(10)
            assert kueue_of(cluster).used == 0
        kueue_of(cluster).quota = 4
        cluster.change(suspend=False)
        cluster.until(lambda c: c.status["state"] == "Succeeded", 3000)
        cluster.run(70)
        assert all(each.is_finished for each in kueue_of(cluster).shares())
        assert {step for _, step in cluster.done_steps} == set(range(1, cluster.steps + 1))


@pytest.mark.hypothesis
def test_whatever_happens_to_quota_the_job_settles() -> None:
    settling.play(Quota, share=0.08, steps=12)
