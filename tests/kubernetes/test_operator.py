"""The operator: what it knows (pure), who leads (pure), and the whole of it against a small API server over real HTTP, with a
decider of a few lines."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import apiserver
import operators
import prometheus_text
from operators import World, pods_of
from outlast.base import loglines
from outlast.base.clock import Clock
from outlast.base.errors import ClusterError, OutlastError, Unanswered
from outlast.job import contract, prometheus_metrics
from outlast.job.contract import Annotation, Label
from outlast.job.report.incidents import CAUSES
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEASE, NODE, POD
from outlast.kubernetes.operator import cluster_cache, main, operator, prometheus
from outlast.kubernetes.operator.cluster_cache import Cache, CachedJob, Key
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.leader import Leadership, LeaseObservation, next_action
from outlast.kubernetes.operator.observed_job import RECEIVED_AT, Limits
from outlast.kubernetes.operator.operator import Operator
from outlast.kubernetes.operator.plan import Document, Event, Plan
from outlast.kubernetes.operator.prometheus import Metrics
from outlast.kubernetes.operator.workqueue import WorkQueue

NOW = 1_767_225_600.0
TRAIN = Key(ELASTIC_JOB, "default", "train")


def a_document(kind: kinds.Kind, name: str, version: int, *, uid: str = "", job: str = "train", **more: Any) -> Document:
    meta = {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version), **more.pop("metadata", {})}
    if kind.namespaced:
        meta |= {"namespace": "default"}
    if kind in (POD, LEASE):
        meta |= {"labels": {Label.JOB: job}}
    return cluster_cache.trimmed(kind, kind.document(meta, **more))


# ------------------------------------------------------------------------------------------------------------- what is known


class Known:
    """A cache in which everything was heard up to version 100, and what it has told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.cache = Cache([ELASTIC_JOB], lambda key, urgency: self.told.append((key.name, urgency)))
        for kind in (ELASTIC_JOB, POD, LEASE, NODE):
            self.cache.begin_listing(kind)
        self.cache.put(ELASTIC_JOB, a_document(ELASTIC_JOB, "train", 10, status={"n": 0}))
        for kind in (ELASTIC_JOB, POD, LEASE, NODE):
            self.cache.set_version(kind, "100", NOW)
        self.told.clear()

    def pods(self) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self.cache.job(TRAIN, NOW).pods]

    def status(self) -> Any:
        job = self.cache.job(TRAIN, NOW).job
        return None if job is None else job["status"]


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ([("heard", 105), ("written", 104)], 105, ["now"]),  # a late answer does not hide what the watch said since
        ([("written", 110), ("heard", 105), ("heard", 110)], 110, []),  # an old event does not undo our write
        ([("written", 110), ("heard", 111)], 111, ["now"]),  # what others write after us is news
    ],
)
def test_the_newest_version_counts_whoever_brings_it(
    known: Known, changes: list[tuple[str, int]], status: int, told: list[str]
) -> None:
    for how, version in changes:
        bring = known.cache.put if how == "heard" else known.cache.add_written
        bring(ELASTIC_JOB, a_document(ELASTIC_JOB, "train", version, status={"n": version}))
    assert (known.status(), known.told) == ({"n": status}, [("train", urgency) for urgency in told])


Step = tuple[str, int, str, list[str], list[str]]
"""What happens to a pod, its version and uid; which pods are known then, and what the job is told."""
STORIES: dict[str, list[Step]] = {
    "what we created is known before the watch brings it, and is no news then": [
        ("written", 101, "a", ["a"], []),
        ("heard", 101, "a", ["a"], []),
    ],
    "what came and went before its answer does not come back": [
        ("heard", 101, "a", ["a"], ["now"]),
        ("gone", 103, "a", [], ["now"]),
        ("written", 101, "a", [], []),
    ],
    "what we deleted is gone before the watch says so": [
        ("heard", 101, "a", ["a"], ["now"]),
        ("deleted", 101, "a", [], []),
        ("heard", 102, "a", [], []),
        ("gone", 103, "a", [], []),
    ],
    "the successor of what we deleted is there": [
        ("heard", 101, "a", ["a"], ["now"]),
        ("deleted", 101, "a", [], []),
        ("written", 104, "b", ["b"], []),
        ("gone", 103, "a", ["b"], []),
        ("heard", 104, "b", ["b"], []),
    ],
    "a creation that the watch does not show is forgotten when the watch is past it": [
        ("written", 104, "a", ["a"], []),
        ("past", 104, "", [], []),
    ],
}


@pytest.mark.parametrize("story", STORIES)
def test_pods_are_known_by_our_writes_and_by_the_watch(known: Known, story: str) -> None:
    cache, name = known.cache, "train-worker-0"
    happens: dict[str, Callable[[Document], object]] = {
        "written": lambda pod: cache.add_written(POD, pod),
        "heard": lambda pod: cache.put(POD, pod),
        "gone": lambda pod: cache.remove(POD, pod),
        "deleted": lambda pod: cache.mark_deleted(POD, "default", name, pod["metadata"]["uid"]),
        "past": lambda pod: cache.set_version(POD, pod["metadata"]["resourceVersion"], NOW),
    }
    for what, version, uid, pods, told in STORIES[story]:
        happens[what](a_document(POD, name, version, uid=uid, status={"n": version}))
        assert (known.pods(), known.told) == (pods, [("train", urgency) for urgency in told]), what
        known.told.clear()


def test_a_list_that_comes_in_no_order_does_not_say_how_far_it_is(known: Known) -> None:
    known.cache.set_version(POD, None, NOW)
    known.cache.add_written(POD, a_document(POD, "train-worker-1", 104))
    known.cache.put(POD, a_document(POD, "train-worker-0", 110))
    assert known.pods() == ["uid-train-worker-0", "uid-train-worker-1"]


def test_what_vanished_while_a_new_watch_began_is_news(known: Known) -> None:
    known.cache.put(POD, a_document(POD, "train-worker-0", 101))
    known.cache.put(POD, a_document(POD, "train-worker-1", 102))
    known.told.clear()
    known.cache.set_version(POD, None, NOW)
    known.cache.begin_listing(POD)
    known.cache.put(POD, a_document(POD, "train-worker-1", 102))
    assert known.pods() == ["uid-train-worker-0", "uid-train-worker-1"]
    known.cache.set_version(POD, "120", NOW + 40)
    assert (known.pods(), known.told) == (["uid-train-worker-1"], [("train", "now")])


def test_while_a_watch_is_lost_nothing_was_listened_to_and_afterwards_only_since_then(known: Known) -> None:
    assert known.cache.job(TRAIN, NOW + 10).observed_since == NOW
    known.cache.set_version(LEASE, None, NOW + 20)
    assert known.cache.job(TRAIN, NOW + 50).observed_since == NOW + 50
    known.cache.set_version(LEASE, "130", NOW + 60)
    assert known.cache.job(TRAIN, NOW + 70).observed_since == NOW + 60
    known.cache.set_version(LEASE, "140", NOW + 80)  # a bookmark, or the ordinary end of a watch and the next
    assert known.cache.job(TRAIN, NOW + 90).observed_since == NOW + 60


def a_lease(version: int, renewed: str = "t0", report: str = "r", progress: str = "p") -> Document:
    annotations = {Annotation.REPORT: report, Annotation.PROGRESS: progress}
    return a_document(LEASE, "train-worker-0", version, metadata={"annotations": annotations}, spec={"renewTime": renewed})


def test_a_lease_that_is_only_renewed_is_no_news_but_is_known(known: Known) -> None:
    known.cache.put(LEASE, a_lease(101))
    known.told.clear()
    known.cache.put(LEASE, a_lease(102, "t1"))
    assert (known.told, known.cache.job(TRAIN, NOW).leases[0]["spec"]) == ([], {"renewTime": "t1"})
    known.cache.put(LEASE, a_lease(103, "t1", progress='{"generation": 1, "step": 7}'))
    assert known.told == [("train", "later")], "the first step of a world"
    known.cache.put(LEASE, a_lease(104, "t1", progress='{"generation": 1, "step": 900}'))
    assert known.told == [("train", "later")]
    known.cache.put(LEASE, a_lease(105, "t1", report="s", progress='{"generation": 1, "step": 901}'))
    assert known.told == [("train", "later"), ("train", "now")]


def test_a_lease_is_of_the_job_in_its_name_whatever_labels_its_worker_writes(known: Known) -> None:
    cached = known.cache._kinds[LEASE]
    for version in range(101, 201):
        known.cache.put(LEASE, a_document(LEASE, "train-worker-0", version, job=f"job-{version}", spec={"n": version}))
    assert list(cached.jobs) == [("default", "train")]
    assert len(known.cache.job(TRAIN, NOW).leases) == 1
    assert {name for name, _ in known.told} == {"train"}
    known.cache.remove(LEASE, a_document(LEASE, "train-worker-0", 201, job="job-201"))
    assert (cached.jobs, known.cache.job(TRAIN, NOW).leases) == ({}, [])


def test_a_pod_whose_label_changes_is_of_its_new_job_only(known: Known) -> None:
    cached = known.cache._kinds[POD]
    known.cache.put(POD, a_document(POD, "p", 101, job="first"))
    known.cache.put(POD, a_document(POD, "p", 102, job="second"))
    assert known.told[-2:] == [("first", "now"), ("second", "now")]
    known.cache.add_written(POD, a_document(POD, "p", 210, job="ours"))
    known.cache.put(POD, a_document(POD, "p", 205, job="theirs"))
    assert list(cached.jobs) == [("default", "ours"), ("default", "theirs")]
    known.cache.put(POD, a_document(POD, "p", 211, job="theirs"))
    assert known.cache.job(Key(ELASTIC_JOB, "default", "ours"), NOW).pods == []
    known.cache.remove(POD, a_document(POD, "p", 212, job="theirs"))
    assert cached.jobs == {}


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "wrote", "remove", "look"]), st.integers(0, 2), st.integers(0, 3)), max_size=30)
)
def test_whatever_labels_change_the_index_has_what_is_there_and_nothing_else(changes: list[tuple[str, int, int]]) -> None:
    known = Known()
    cached = known.cache._kinds[POD]
    for version, (what, pod, job) in enumerate(changes, 101):
        document = a_document(POD, f"p{pod}", version, job=f"job-{job}")
        if what == "put":
            known.cache.put(POD, document)
        elif what == "remove":
            known.cache.remove(POD, document)
        elif what == "wrote":
            known.cache.add_written(POD, document)
        else:
            known.cache.job(Key(ELASTIC_JOB, "default", f"job-{job}"), NOW)
        listed = {(job, place) for (_, job), places in cached.jobs.items() for place in places}
        assert listed == {(each.job, place) for shelved in (cached.watched, cached.written) for place, each in shelved.items()}
    known.cache.set_version(POD, "500", NOW)
    for job in range(4):
        for found in known.cache.job(Key(ELASTIC_JOB, "default", f"job-{job}"), NOW).pods:
            assert found["metadata"]["labels"][Label.JOB] == f"job-{job}"


def a_node(version: int, ready: str = "True", beat: str = "1", taints: Sequence[Document] = ()) -> Document:
    conditions = [{"type": "Ready", "status": ready, "lastHeartbeatTime": beat}]
    images = [{"names": ["x"] * 50}]
    return a_document(NODE, "n1", version, spec={"taints": list(taints)}, status={"conditions": conditions, "images": images})


def test_a_node_concerns_the_jobs_on_it_when_it_is_another(known: Known) -> None:
    put = functools.partial(known.cache.put, NODE)
    put(a_node(101))
    known.cache.put(POD, a_document(POD, "train-worker-0", 102, spec={"nodeName": "n1"}))
    known.cache.put(POD, a_document(POD, "else-worker-0", 103, job="else", spec={"nodeName": "n2"}))
    known.told.clear()
    put(a_node(104, beat="2"))
    assert known.told == []
    put(a_node(105, ready="Unknown"))
    put(a_node(106, ready="Unknown", taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]))
    known.cache.remove(NODE, a_node(107))
    assert known.told == [("train", "now")] * 3
    assert known.cache.job(TRAIN, NOW).nodes == {}


def test_a_pod_is_kept_without_what_it_was_told_to_run() -> None:
    meta = {"annotations": {Annotation.JOB_FILE: "x" * 9999, "a": "b"}, "managedFields": [{}]}
    limited = {"name": "worker", "resources": {"limits": {"memory": "1Gi"}}}
    worker = {**limited, "env": [{}], "resources": {"limits": {"memory": "1Gi", "cpu": "1"}, "requests": {"memory": "1Gi"}}}
    spec = {"nodeName": "n", "volumes": [{}], "containers": [worker, {"name": "sidecar", "image": "i"}]}
    kept = a_document(POD, "p", 1, metadata=meta, spec=spec, status={"phase": "Running"})
    assert kept["spec"] == {"nodeName": "n", "containers": [limited, {"name": "sidecar"}]}
    assert (kept["metadata"]["annotations"], "managedFields" in kept["metadata"]) == ({"a": "b"}, False)
    assert kept["status"] == {"phase": "Running"}


# ------------------------------------------------------------------------------------------------------------------- queue


def test_a_job_that_changes_during_its_turn_gets_another_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a")
    queue.add("b")
    assert queue.get() == "b"
    queue.done("a")
    assert queue.get() == "a"


def test_of_several_later_turns_the_earliest_counts_and_is_one() -> None:
    now = [0.0]
    queue: WorkQueue[str] = WorkQueue(lambda: now[0])
    for when in (9.0, 5.0, 7.0):
        queue.add_at("a", when)
    now[0] = 4.9
    assert queue.idle()
    now[0] = 5.0
    assert queue.get() == "a"
    queue.done("a")
    now[0] = 20.0
    assert queue.idle()


def test_what_rests_has_no_turn_before_whatever_changes() -> None:
    now = [0.0]
    queue: WorkQueue[str] = WorkQueue(lambda: now[0])
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a")
    queue.hold("a", 5.0)
    queue.done("a")
    queue.add("a")
    assert queue.idle()
    now[0] = 5.0
    assert queue.get() == "a"
    queue.add("a")
    queue.done("a")
    assert queue.get() == "a"


def test_closing_ends_the_wait_for_a_turn() -> None:
    queue: WorkQueue[str] = WorkQueue()
    threading.Timer(0.02, queue.shut_down).start()
    assert queue.get() is None


def test_a_turn_in_ten_thousand_years_is_waited_for() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_at("a", time.time() + 3e11)  # a job's activeDeadlineSeconds may be any number
    threading.Timer(0.02, queue.add, ["b"]).start()
    assert queue.get() == "b"


# ------------------------------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_steps_makes_nobody_silent_and_moves_no_turn(world: World, step: float) -> None:
    seen: list[tuple[float, float]] = []
    stepped = [0.0]

    def decider(looked: CachedJob, now: float, found: ClusterFeatures) -> Plan:
        silences = [now - max(lease[RECEIVED_AT], looked.observed_since) for lease in looked.leases]
        seen.append((now, max(silences, default=-1.0)))
        return Plan()

    lease = a_document(LEASE, "train-worker-0", 1)
    world.api.put(lease | {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}})
    world.apply("train")
    operator = world.start(reconcilers={ELASTIC_JOB: decider}, clock=Clock(lambda: time.time() + stepped[0]))
    world.api.until(lambda: (bool(seen) and seen[-1][1] > 0.3) or operator.queue.add(TRAIN))  # its silence is counted
    before = seen[-1]
    stepped[0] = step
    operator.queue.add_at(TRAIN, operator._clock() + 0.1)
    world.api.until(lambda: seen[-1] is not before)
    now, silence = seen[-1]
    assert 0.1 <= now - before[0] < 5
    assert silence <= 0.2, "what was heard before the step proves no silence"


@pytest.mark.parametrize("wrong", [3600.0, -3600.0])
def test_the_operator_goes_by_the_time_of_the_api_server(world: World, wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    clock = main.clock(world.connect(), lambda: time.time() + wrong)
    assert abs(clock() - time.time()) < 2
    assert clock.broken_at < 0
    (offset_s,) = re.findall(r"this machine's clock is (\d+) s", caplog.text)
    assert abs(int(offset_s) - 3600) < 5


def test_an_api_server_that_says_no_time_leaves_the_operator_its_own_clock() -> None:
    class Away:
        def time(self) -> float:
            raise Unanswered("the API server does not answer")

    assert abs(main.clock(cast(kube.Cluster, Away()))() - time.time()) < 1


def test_a_process_that_was_stopped_for_an_hour_writes_nothing_more_and_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, true = [0.0], time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: true(which) + stopped[0])  # SIGSTOP: all clocks go on
    silences: list[float] = []

    def decider(looked: CachedJob, now: float, found: ClusterFeatures) -> Plan:
        silences.append(now - looked.observed_since)
        return Plan(requeue_at=now + 0.01)

    world.apply("train")
    world.start(reconcilers={ELASTIC_JOB: decider})
    world.api.until(lambda: bool(silences))
    before = world.writes()
    stopped[0] = 3600.0
    _, _, thread, codes = world.running[-1]
    thread.join(60)
    assert (codes, world.writes()) == ([1], before)
    assert silences[-1] < 3600


def test_a_machine_that_slept_does_not_believe_that_it_still_leads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, true = [0.0], time.clock_gettime
    counted = getattr(time, "CLOCK_BOOTTIME", None)
    monkeypatch.setattr(time, "clock_gettime", lambda which: true(which) + (asleep[0] if which == counted else 0.0))
    a = Leadership(world.connect(), "a", "default")
    a.acquire_or_renew()
    assert a.is_leader()
    asleep[0] = 3600.0
    assert a.lost_leadership or counted is None
    assert a.answered_for_s() == 0 or counted is None


# ------------------------------------------------------------------------------------------------------------------ leader


def held(by: str, version: str = "1") -> Document:
    return {"metadata": {"resourceVersion": version}, "spec": {"holderIdentity": by, "leaseDurationSeconds": 15}}


@pytest.mark.parametrize(
    ("lease", "seen", "clock", "verdict", "why"),
    [
        (None, None, 0.0, "create", "there was no Lease yet"),
        (held("me"), None, 0.0, "renew", "this operator holds the Lease"),
        (held(""), None, 0.0, "take", "the Lease was released"),
        (held("you"), None, 99.0, "wait", "you is the leader"),
        (held("you"), LeaseObservation("1", 0.0), 14.9, "wait", "you is the leader"),
        (held("you"), LeaseObservation("1", 0.0), 15.0, "take", "you has not renewed the Lease for 15 s"),
        (held("you", "2"), LeaseObservation("1", 0.0), 99.0, "wait", "you is the leader"),
    ],
)
def test_a_lease_is_taken_only_when_it_has_lapsed_by_the_own_clock(
    lease: Document | None, seen: LeaseObservation | None, clock: float, verdict: str, why: str
) -> None:
    assert next_action(lease, "me", seen, clock)[::2] == (verdict, why)


def test_one_leads_at_a_time_and_another_takes_over_when_it_falls_silent(world: World) -> None:
    clock = [0.0]
    a, b = (Leadership(world.connect(), name, "default", clock=lambda: clock[0]) for name in "ab")
    for clock[0] in (0.0, 4.0):
        a.acquire_or_renew()
        b.acquire_or_renew()
        assert (a.is_leader(), b.is_leader()) == (True, False)
    clock[0] = 8.9  # a is paused; it stops acting before anybody else begins
    assert (a.is_leader(), b.is_leader()) == (True, False)
    clock[0] = 9.1
    b.acquire_or_renew()
    assert (a.is_leader(), a.lost_leadership, b.is_leader()) == (False, True, False)
    clock[0] = 11.1
    b.acquire_or_renew()
    assert (a.is_leader(), b.is_leader()) == (False, True)
    a.acquire_or_renew()
    assert (a.is_leader(), a.lost_leadership, b.is_leader()) == (False, True, True)


def test_an_api_server_that_stood_still_was_not_heard_although_no_connection_broke(world: World) -> None:
    clock = [0.0]
    a, b = (Leadership(world.connect(), name, "default", clock=lambda: clock[0]) for name in "ab")
    assert b.answered_for_s() == 0
    for clock[0] in (100.0, 105.0, 110.0):
        a.acquire_or_renew()
        b.acquire_or_renew()
    assert (a.answered_for_s(), b.answered_for_s()) == (10, 10)
    clock[0] = 120.1
    assert b.answered_for_s() == 0
    b.acquire_or_renew()
    clock[0] = 122.1
    assert b.answered_for_s() == 2


def test_what_is_heard_counts_from_the_end_of_a_break(world: World) -> None:
    heard: list[float] = []

    def decider(looked: CachedJob, now: float, found: frozenset[str]) -> Plan:
        heard.append(now - looked.observed_since)
        return Plan()

    operator = world.start(reconcilers={ELASTIC_JOB: decider})
    operator.leadership.answered_for_s = lambda: 0.25  # type: ignore[method-assign]
    world.apply("train")
    world.api.until(lambda: bool(heard))
    assert heard[-1] <= 0.25


def test_a_leader_whose_first_request_is_answered_late_renews_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an API server goes on after a standstill."""
    clock, left, cluster = [0.0], [], world.connect()
    a = Leadership(cluster, "a", "default", clock=lambda: clock[0])
    ask = cluster.get

    def late(*args: Any, **options: Any) -> Document:
        clock[0] += 3.5 if not left else 0.0
        left.append(a.lost_leadership)
        return ask(*args, **options)

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        left.append(a.lost_leadership)
        return False

    monkeypatch.setattr(cluster, "get", late)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", wait)
    monkeypatch.setattr(stop, "is_set", lambda: len(left) >= 10)
    a.run(stop)
    assert left == [False] * 10


def test_a_leader_that_cannot_renew_its_lease_acts_no_more(world: World) -> None:
    clock = [0.0]
    a = Leadership(world.connect(), "a", "default", clock=lambda: clock[0])
    a.acquire_or_renew()
    world.api.well = False
    clock[0] = 4.9
    with pytest.raises(ClusterError):
        a.acquire_or_renew()
    assert a.is_leader()
    clock[0] = 5.0
    assert (a.is_leader(), a.lost_leadership) == (False, True)


# --------------------------------------------------------------------------------------------------------------- metrics


AB = ("job", 'a"b'), ("namespace", "team")


def test_metrics_are_what_prometheus_scrapes() -> None:
    counted = Metrics()
    counted.count_write("Pod", "create")
    counted.time_reconcile(0.003)
    progress = {"step": 40, "restarts": 2, "progressTime": "2026-01-01T00:00:00Z", "checkpoint": {"time": NOW - 90}}
    progress |= {"accounting": {"lost": {"seconds": {"oom": 2.5}, "steps": 7}}}
    counted.set_job("j", "team", 'a"b', {"state": "Running", "goodput": 0.75, **progress})
    counted.set_job("j", "team", "c", {})
    counted.set_job("j", "team", "d", {**progress, "state": "Succeeded", "accounting": {}})
    failed = {"restarts": 1, "lastFailure": {"code": 137, "generation": 1, "time": NOW}}
    failing = {"state": "Restarting", "generation": 1, "rendezvous": {"called": {"at": NOW + 1}}, **failed}
    counted.count_changes({"state": "Running", "generation": 1}, failing, [], NOW)
    told = [Event("Normal", "WorkerInterrupted", ""), Event("Warning", "NodeLost", ""), Event("Normal", "Training", "")]
    counted.count_changes(failing, {"state": "Running", "generation": 2, **failed}, told, NOW + 4)
    assert "_age_seconds{" not in counted.text(leads=True)
    families = list(text_string_to_metric_families(counted.text(leads=True, now=NOW + 10)))
    prometheus_text.check(families, prometheus_metrics.OPERATOR)
    samples = {(each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples}
    buckets = {key for key in samples if key[0].endswith("_bucket")}
    assert {key: value for key, value in samples.items() if key not in buckets} == {
        ("outlast_jobs", ("state", "Pending")): 1,
        ("outlast_jobs", ("state", "Running")): 1,
        ("outlast_jobs", ("state", "Succeeded")): 1,
        ("outlast_reconcile_seconds_sum",): 0.003,
        ("outlast_reconcile_seconds_count",): 1,
        ("outlast_restarts_total", ("cause", "killed")): 1,
        ("outlast_interruptions_total", ("cause", "node-lost")): 1,
        ("outlast_interruptions_total", ("cause", "told")): 1,
        ("outlast_recovery_seconds_sum", ("cause", "killed")): 4,
        ("outlast_recovery_seconds_count", ("cause", "killed")): 1,
        ("outlast_goodput_ratio", *AB): 0.75,
        ("outlast_job_step", *AB): 40,
        ("outlast_job_step", ("job", "d"), ("namespace", "team")): 40,
        ("outlast_job_restarts", *AB): 2,
        ("outlast_job_restarts", ("job", "c"), ("namespace", "team")): 0,
        ("outlast_job_restarts", ("job", "d"), ("namespace", "team")): 2,
        ("outlast_lost_steps_total", *AB): 7,
        **{("outlast_lost_seconds_total", ("cause", each), *AB): 2.5 if each == "oom" else 0 for each in CAUSES},
        ("outlast_progress_age_seconds", *AB): 10,
        ("outlast_commit_age_seconds", *AB): 100,
        ("outlast_operator_writes_total", ("kind", "Pod"), ("verb", "create")): 1,
        ("outlast_operator_errors_total",): 0,
        ("outlast_operator_leader",): 1,
    }
    recovered = (samples["outlast_recovery_seconds_bucket", ("cause", "killed"), ("le", le)] for le in ("2.0", "5.0", "+Inf"))
    assert [*recovered] == [0, 1, 1]


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ({"code": 137, "cause": "oom"}, "oom"),
        ({"code": -9, "cause": "hang"}, "hang"),
        ({"code": -9, "reason": "rank 1 on worker 1 was killed by SIGKILL"}, "killed"),
        ({"code": 1, "reason": "rank 1 on worker 1 raised OSError: it hung: out of memory"}, "error"),
        ({"code": 1, "cause": "of another version"}, "error"),
    ],
)
def test_what_a_failure_was_is_one_of_few_words(failure: dict[str, Any], cause: str) -> None:
    assert prometheus.failure_cause({"lastFailure": failure}) == cause


# --------------------------------------------------------------------------------------------------------------- the whole


def connected(operator: Operator) -> bool:
    return all(each.connected for each in operator.cache._kinds.values())


def test_each_job_gets_exactly_its_pods_each_asked_for_once_and_then_nothing_is_written(world: World) -> None:
    names = [f"job-{n}" for n in range(5)]
    world.apply(*names[:3])
    world.start()
    world.settled(names[:3])
    world.apply(*names[3:])
    world.settled(names)
    assert sorted(each.partition(" ")[0] for each in world.writes()) == ["POST"] * 10 + ["PUT"] * 5
    before = len(world.writes())
    world.api.cut()  # what the watches bring again is no news
    world.api.until(lambda: len(world.api.watchers) == 4)
    world.settled(names)
    assert len(world.writes()) == before


@pytest.mark.parametrize("forget", [False, True])
def test_an_api_server_that_is_away_is_waited_for_and_nothing_is_missed(world: World, forget: bool) -> None:
    world.apply("a")
    operator = world.start()
    world.settled(["a"])
    world.api.well = False
    world.api.cut()
    world.api.until(lambda: not connected(operator))
    world.apply("b")
    world.api.remove("pods", "a-worker-1")
    world.api.cut(forget=forget)
    world.api.well = True
    world.settled(["a", "b"])
    world.api.until(lambda: connected(operator))


@pytest.mark.parametrize("broken", range(6))
def test_whatever_write_fails_or_is_lost_on_its_way_the_end_is_the_same(world: World, broken: int) -> None:
    """The n-th write is done and its answer lost, or it is refused; by turns."""
    count = [0]

    def lost(handler: BaseHTTPRequestHandler) -> bool:
        count[0] += 1
        if count[0] - 1 != broken:
            return False
        if broken % 2:
            apiserver.send(handler, *apiserver.status(403, "Forbidden", "not now"))
        else:
            world.api.prescribed.clear()
            handler.wfile = open("/dev/null", "wb")  # type: ignore[assignment]  # noqa: SIM115
            world.api.answer(handler)
            handler.wfile.close()
            handler.close_connection = True
        return True

    world.api.prescribe("^(POST|PUT|DELETE) .*(pods|elasticjobs)", *[lost] * 50)
    world.apply("a", "b")
    world.start()
    world.settled(["a", "b"])
    # 4, the one that is done without an answer (it is noted twice), and perhaps that again before the watch brings it
    assert sum("POST" in each and "/pods" in each for each in world.writes()) <= 6


def test_operators_that_are_stopped_anywhere_and_started_again_make_no_second_pod(world: World) -> None:
    """Each life ends after one more write: nothing is remembered but what the server has."""
    world.apply("a", "b")
    for _ in range(6):
        operator = world.start(me="a")
        written = len(world.writes())
        world.api.until(lambda written=written: len(world.writes()) > written)
        operator.leadership._renewed_at = float("-inf")  # from here on it may write nothing, as if it had been killed
        *_, thread, codes = world.running[-1]
        thread.join(60)
        assert codes == [1]
        if len(world.pods()) == 4 and len(world.writes()) >= 6:
            break
    world.start(me="a")
    world.settled(["a", "b"])
    posted = [each for each in world.writes() if each.startswith("POST")]
    assert len(posted) <= 4 + 6 * 4  # what a life had on its way when it ended, two for each job, may be asked for again


def test_a_kueue_that_was_installed_a_moment_ago_is_found_by_the_first_job_that_names_a_queue(world: World) -> None:
    world.api.unserved = ("kueue.x-k8s.io", "elastic.pytorch.org")  # nobody waits for the archived kind
    world.start(reconcilers=main.reconcilers(Limits()))  # looks around once a minute
    world.api.until(lambda: any("scheduling.x-k8s.io" in asked for asked in world.api.asked))
    world.api.unserved = ()
    world.submit("train", scheduling={"queue": "q"})
    world.api.until(lambda: world.api.objects("workloads.kueue.x-k8s.io"))
    assert world.pods() == []


def test_a_kueue_that_is_installed_later_is_found_asked_and_obeyed(world: World) -> None:
    api = world.api
    world.start(reconcilers=main.reconcilers(Limits()), discovery_s=0.05)
    scheduling = {"queue": "research", "priorityClassName": "high"}
    world.submit("train", workers={"replicas": 2, "min": 2}, scheduling=scheduling)
    world.settled(["train"])

    api.put(kinds.FLAVOR_V1BETA2.document({"name": "spot"}, spec={"nodeLabels": {"pool": "spot"}}))
    api.put(kinds.PRIORITY_CLASS.document({"name": "high"}, value=9))
    api.unserved = ()

    api.until(lambda: api.objects("workloads.kueue.x-k8s.io") and not world.pods())
    (document,) = api.objects("workloads.kueue.x-k8s.io")
    assert document["apiVersion"].startswith("kueue.x-k8s.io/v1beta")  # the older one, if it looked when that was served first
    assert document["spec"]["priority"] == 9
    said = {"status": "True", "reason": "r", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    conditions = [{"type": type_, **said} for type_ in ("QuotaReserved", "Admitted")]
    admission = {"podSetAssignments": [{"name": "main", "flavors": {"cpu": "spot"}, "count": 2}]}
    api.put({**document, "status": {"conditions": conditions, "admission": admission}})
    world.settled(["train"])
    pod = api.documents["pods", "default", "train-worker-0"]
    assert pod["spec"]["nodeSelector"] == {"pool": "spot"}
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == document["metadata"]["name"]


def test_a_stand_by_takes_over_when_the_leader_stops(world: World) -> None:
    first = world.start(me="a", every_s=0.2, duration_s=6.0)
    world.api.until(lambda: first.leadership.is_leader())
    second = world.start(me="b", every_s=0.2, duration_s=6.0)
    world.apply("a")
    world.settled(["a"])
    assert (first.leadership.is_leader(), second.leadership.is_leader()) == (True, False)
    world.api.until(lambda: second.leadership.is_standby and not first.leadership.is_standby)
    assert operators.writes(second) == {}
    assert world.stop(0) == 0
    world.api.until(lambda: second.leadership.is_leader())
    assert the_lease(world)["spec"]["leaseTransitions"] == 1
    world.apply("b")
    world.settled(["a", "b"])
    assert operators.writes(second) == {"create Pod": 2, "update ElasticJob": 1}


def the_lease(world: World) -> Document:
    return world.api.documents[LEASE.resource, "default", contract.OPERATOR]


def test_who_loses_the_lease_ends_and_writes_nothing_more(world: World) -> None:
    operator = world.start(me="a", every_s=0.05, duration_s=3.0)
    world.api.until(lambda: operator.leadership.is_leader())
    lease = the_lease(world)
    world.api.put({**lease, "metadata": dict(lease["metadata"]), "spec": {**lease["spec"], "holderIdentity": "b"}})
    *_, thread, codes = world.running[0]
    thread.join(60)
    assert codes == [1]
    world.apply("a")
    assert world.pods() == []


def test_the_process_ends_with_its_code_its_whole_log_and_a_write_that_hangs(world: World) -> None:
    released = threading.Event()

    def hangs(handler: BaseHTTPRequestHandler) -> bool:
        released.wait(60)
        return False

    world.api.prescribe("POST .*/pods", hangs, hangs)
    world.submit()
    here = {contract.Env.NAMESPACE: "default", contract.Env.PROBE_PORT: "0"}
    program = "from outlast.kubernetes.operator import operator as o; o.STOP_TIMEOUT_S = 1.0; from outlast import cli; cli.main()"
    command = [sys.executable, "-c", program, "operator"]
    with subprocess.Popen(command, env={**os.environ, **here}, stdout=subprocess.PIPE, text=True) as process_:
        try:
            world.api.until(lambda: not world.api.prescribed)
            process_.send_signal(signal.SIGTERM)
            log, _ = process_.communicate(timeout=30)
        finally:
            released.set()
            process_.kill()
    assert (process_.returncode, json.loads(log.splitlines()[-1])["message"]) == (0, "stopped")
    assert the_lease(world)["spec"]["holderIdentity"] == ""


def test_a_definition_that_is_not_there_yet_is_waited_for_and_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.api.unserved = ("outlast.dev", "kueue.x-k8s.io")
    with caplog.at_level(logging.INFO, "outlast"):
        operator = world.start()
        world.api.until(lambda: "waiting for elasticjobs.outlast.dev" in caplog.text)
        world.api.until(lambda: operator.cache.unsynced() == [ELASTIC_JOB])
        assert get(operator, "/readyz") == (503, "waiting for the first list of elasticjobs.outlast.dev\n")
        assert get(operator, "/healthz")[0] == 200
        world.api.unserved = ("kueue.x-k8s.io",)
        world.apply("a")
        world.settled(["a"])
    assert get(operator, "/healthz") == get(operator, "/readyz") == (200, "acting\n")
    text = get(operator, "/metrics")[1]
    assert 'outlast_jobs{state="Running"} 1.0\n' in text
    assert 'outlast_operator_writes_total{kind="Pod",verb="create"} 2.0\n' in text


def test_what_fails_for_one_job_does_not_stop_the_others(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def broken(looked: CachedJob, *_: Any) -> Plan:
        if looked.job and looked.job["metadata"]["name"] == "bad":
            raise ZeroDivisionError("a bug")
        return pods_of(looked, count=1)

    world.apply("bad", "good")
    operator = world.start(reconcilers={ELASTIC_JOB: broken})
    world.api.until(lambda: world.pods() == ["good-worker-0"])
    world.api.until(lambda: len([each for each in caplog.records if "a bug" in each.getMessage()]) >= 2)
    assert "outlast_operator_errors_total 0.0" not in operator.metrics.text(leads=True)
    bugs = [record for record in caplog.records if "a bug" in record.getMessage()]
    assert bugs[0].exc_info is not None
    assert (getattr(bugs[0], "job", ""), bugs[0].getMessage()) == ("bad", "a bug; the next try is in 0 s")


def test_a_decider_that_never_settles_is_slowed_down_and_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def restless(looked: CachedJob, *_: Any) -> Plan:
        assert looked.job is not None
        return Plan(status={"n": (looked.job.get("status") or {}).get("n", 0) + 1})

    running = world.start(reconcilers={ELASTIC_JOB: restless})
    running._busy_passes[Key(ELASTIC_JOB, "default", "b")] = 10_000  # for some days already
    world.apply("b")
    world.api.until(lambda: "10001 passes in a row found something to do; the next is in 60 s" in caplog.text)
    caplog.clear()
    world.apply("a")
    world.api.until(lambda: "passes in a row found something to do" in caplog.text)
    assert len(world.writes()) <= operator.BUSY_PASSES + 3
    job = world.api.documents[ELASTIC_JOB.resource, "default", "a"]
    world.api.put({**job, "spec": {"image": "j"}, "metadata": dict(job["metadata"])})
    time.sleep(0.1)  # during which it would be looked at again, because it has changed
    assert len(world.writes()) <= operator.BUSY_PASSES + 3


QUOTA = apiserver.status(403, "Forbidden", 'pods "a-worker-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2')


NO_SERVICE = 'services "a-rdzv" is forbidden: exceeded quota: q, requested: services=1, used: services=0, limited: services=0'


@pytest.mark.parametrize(
    ("refused", "answer", "writes"),
    [
        ("pods", QUOTA, 2),  # when it is taken up, and when it is known that they are refused
        ("services", apiserver.status(403, "Forbidden", NO_SERVICE), 1),
    ],
)
def test_what_is_refused_is_said_once_by_its_job_and_made_later(world: World, refused: str, answer: Any, writes: int) -> None:
    world.api.prescribe(f"^POST .*/{refused}", *[answer] * 1000)
    world.submit()
    operator = world.start(reconcilers=main.reconcilers(Limits()))
    world.api.until(lambda: "exceeded quota: q" in world.status("a").get("reason", ""))
    before, looks = world.status("a"), operators.looks(operator)
    world.api.until(lambda: operators.looks(operator) >= looks + 3)
    assert (before["state"], before["replicas"], world.status("a")) == ("Pending", 0, before)
    assert sum("/a/status" in write for write in world.writes()) == writes
    (failed,) = [each for each in world.api.objects("events") if each["reason"] == "FailedCreate"]
    with world.api.lock:
        world.api.prescribed.clear()
    assert (failed["type"], failed["message"] in before["reason"]) == ("Warning", True)
    world.api.until(lambda: world.status("a")["replicas"] == 2)
    assert "quota" not in world.status("a")["reason"]


def test_pods_get_the_agent_from_the_image_that_the_operator_runs_in(world: World) -> None:
    containers = [{"name": "istio-proxy", "image": "proxy:1"}, {"name": "operator", "image": "mirror.example.com/operator:7"}]
    world.api.put(POD.document({"name": "me"}, spec={"containers": containers}))
    world.submit(image="pytorch/pytorch")
    world.api.prescribe("^GET .*/pods/me", *[apiserver.status(500, "InternalError", "a bad moment")] * 6)
    environ = {contract.Env.POD: "me", contract.Env.NAMESPACE: "default"}
    image = functools.cache(functools.partial(main.own_image, world.connect(), environ))
    world.start(reconcilers=main.reconcilers(Limits(), image))
    world.api.until(lambda: "a-worker-0" in world.pods())
    with world.api.lock:
        (init,) = world.api.documents["pods", "default", "a-worker-0"]["spec"]["initContainers"]
    assert init["image"] == "mirror.example.com/operator:7"
    assert main.own_image(world.connect(), {}) == Limits().agent_image, "a process outside of pods"


@pytest.mark.parametrize("labels", [{}, {Label.JOB: "a", Label.WORKER: "0"}])
def test_a_pod_that_is_not_of_the_job_is_named_in_its_status_and_not_counted(world: World, labels: Document) -> None:
    meta = {"name": "a-worker-0", "namespace": "default", "labels": labels}  # with ours, a job that was deleted left it an orphan
    world.api.put(POD.document(meta, spec={"containers": []}))
    world.submit()
    world.start(reconcilers=main.reconcilers(Limits()))
    world.api.until(lambda: "Pod a-worker-0 exists and does not belong to this job" in world.status("a").get("reason", ""))
    assert (world.status("a")["state"], world.status("a")["replicas"]) == ("Pending", 1)
    world.settled(["a"])


def test_a_job_whose_pod_is_refused_is_looked_at_when_it_is_due(world: World) -> None:
    times: list[float] = []

    def waits(looked: CachedJob, now: float, _: Any) -> Plan:
        times.append(now)
        return dataclasses.replace(pods_of(looked, count=1), requeue_at=now + 0.2)

    world.api.prescribe("^POST .*/pods", *[QUOTA] * 1000)
    operator = world.start(reconcilers={ELASTIC_JOB: waits})
    operator._failures[Key(ELASTIC_JOB, "default", "a")] = 20  # it has been refused for long: the next try by itself is in 20 s
    world.apply("a")
    world.api.until(lambda: len(times) >= 4)
    assert times[3] - times[0] < 10


def get(operator: Operator, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{operator.address}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_told_to_stop_it_ends_what_has_begun_and_gives_its_lease_back(world: World) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(looked: CachedJob, *_: Any) -> Plan:
        begun.set()
        go_on.wait(60)
        return pods_of(looked, count=2)

    world.apply("a")
    world.start(reconcilers={ELASTIC_JOB: slow})
    assert begun.wait(60)
    _, stop, thread, codes = world.running[0]
    stop.set()
    time.sleep(0.05)  # it is told while the look goes on
    go_on.set()
    thread.join(60)
    assert codes == [0]
    assert world.pods() == ["a-worker-0", "a-worker-1"]
    assert the_lease(world)["spec"]["holderIdentity"] == ""


# ------------------------------------------------------------------------------------------------------------- the process


def test_a_line_of_the_log_is_a_document() -> None:
    record = logging.LogRecord("outlast", logging.WARNING, "", 0, "lost %s", ("worker 3",), None)
    record.created, record.job, record.namespace = NOW, "train", "team"
    assert json.loads(loglines.Lines().format(record)) == {
        "time": "2026-01-01T00:00:00.000Z",
        "level": "warning",
        "namespace": "team",
        "job": "train",
        "message": "lost worker 3",
    }
    assert loglines.Text().format(record) == "2026-01-01T00:00:00.000Z team/train: warning: lost worker 3"


def test_the_port_and_the_name_come_from_the_environment() -> None:
    assert (main.port({}), main.port({"OUTLAST_PROBE_PORT": "0"})) == (8080, 0)
    with pytest.raises(OutlastError, match=r"OUTLAST_PROBE_PORT \(http\) is not a port; set it to one from 0"):
        main.port({"OUTLAST_PROBE_PORT": "http"})
    assert main.identity({"OUTLAST_POD": "operator-1"}) == "operator-1"
    assert main.identity({}) != main.identity({})


SILENT = {"status": {"conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}
"""A node that has not answered since NOW."""


def test_only_pods_of_ours_that_go_on_a_lost_node_are_deleted_when_their_job_is_gone() -> None:
    def a_pod(name: str, kind: str = "ElasticJob", *, going: bool = True, node: str = "n1") -> Document:
        meta: Document = {"name": name, "uid": f"uid-{name}", "ownerReferences": [{"kind": kind, "uid": "gone"}]}
        meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if going else {}
        return {"metadata": meta, "spec": {"nodeName": node}}

    nodes = {"n1": SILENT, "n2": {"status": {"conditions": []}}}
    looked = CachedJob(None, [a_pod("a"), a_pod("b", "Job"), a_pod("c", going=False), a_pod("d", node="n2")], [], nodes, NOW)
    plan = main.orphans(Limits(), looked, NOW + 31)
    assert [(each.name, each.uid, each.grace_s) for each in plan.deletes] == [("a", "uid-a", 0)]
    early = main.orphans(Limits(), looked, NOW + 10)
    assert (early.deletes, early.requeue_at) == ((), NOW + 30)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("soon", "--lost-after soon is not a duration; write 90s, 5m, 1h30m or 2d"),
        ("4s", "--lost-after 4s is below 5s; a node whose kubelet only restarts would lose its workers: give 5s or more"),
    ],
)
def test_how_long_a_node_may_be_silent_is_checked(given: str, sentence: str) -> None:
    assert main.limits("2m") == Limits(lost_s=120)
    with pytest.raises(OutlastError, match=f"^{sentence}$"):
        main.limits(given)
