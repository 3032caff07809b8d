"""A spot machine goes: a metadata service, the watcher and an API server, from the notice to an empty node. The test moves the
clock."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
import imds
import rights
from apiserver import ApiServer
from imds import Imds
from nodes import T0, a_node, a_pod
from outlast.job import contract
from outlast.job.contract import Annotation, Env, LeavingKind
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.nodewatch import node_watcher, notices
from outlast.kubernetes.nodewatch.metadata import Metadata
from outlast.kubernetes.nodewatch.node_watcher import Watcher

Document = dict[str, Any]


class Drill:
    """One node with its watcher. Between two rounds the test plays operator, kubelet and cloud."""

    def __init__(self, api: ApiServer, cluster: kube.Cluster, service: Imds) -> None:
        self.api, self.cluster, self.service, self.now = api, cluster, service, T0
        self.workers_save_s = 5.0
        """How long a worker takes from the taint until it has saved and left."""
        self.heard_at = 0.0
        self.left: dict[str, tuple[float, int | None]] = {}
        """When each pod began to leave, and with which grace period."""
        self.make()

    def make(self) -> None:
        source = Metadata(self.service.address, timeout_s=30)
        self.watcher = Watcher(self.cluster.get(kinds.NODE, "n1"), source, self.cluster, clock=lambda: self.now)

    @property
    def node(self) -> Document:
        return self.api.documents["nodes", "", "n1"]

    @property
    def leaves(self) -> bool:
        return any(each["key"] == contract.LEAVING for each in self.node["spec"].get("taints") or ())

    def until(self, end: float, each: Callable[[], None] = lambda: None) -> None:
        """Go on to a time, round by round."""
        while self.now < end:
            pause = self.watcher.tick()
            self._others()
            each()
            assert pause > 0, "it does not rest"
            self.now += min(pause, end - self.now)

    def _others(self) -> None:
        """The operator deletes its workers once it sees the taint; kubelets end what is deleted."""
        if self.leaves and not self.heard_at:
            self.heard_at = self.now
        for key, pod in [(key, pod) for key, pod in self.api.documents.items() if key[0] == "pods"]:
            meta = pod["metadata"]
            operated = any(each["kind"] == "ElasticJob" for each in meta["ownerReferences"])
            going = "deletionTimestamp" in meta
            if going:
                self.left.setdefault(meta["name"], (self.now, meta["deletionGracePeriodSeconds"]))
            takes = self.workers_save_s if "outlast.dev/job" in (meta.get("labels") or {}) else 1.0
            begun = self.heard_at if operated and self.heard_at else self.left.get(meta["name"], (self.now, 0))[0]
            if (going or (operated and self.heard_at)) and self.now - begun >= takes:
                self.left.setdefault(meta["name"], (self.now, None))
                self.api.remove(key[0], key[2], key[1])


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drill]:
    api = ApiServer(unserved=())
    api.graceful, api.may = True, rights.node_watch
    monkeypatch.setattr(node_watcher, "EVICT_S", 60.0)  # of this machine's clock, which no test may depend on
    api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    api.put(a_node())
    for pod in (
        a_pod("train-worker-0", "ElasticJob", grace=150, labels={"outlast.dev/job": "train"}),
        a_pod("web"),
        a_pod("kube-proxy", "DaemonSet"),
        a_pod("operator", labels={"app.kubernetes.io/part-of": "outlast"}),
    ):
        api.put(pod)
    with apiserver.connected(api, tmp_path, monkeypatch) as cluster, imds.serving(Imds()) as service:
        yield Drill(api, cluster, service)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("outlast")]


def pods(drill: Drill) -> list[str]:
    return sorted(key[2] for key in drill.api.documents if key[0] == "pods")


def test_a_node_is_told_at_once_and_empty_before_its_deadline(drill: Drill) -> None:
    notice_s = 120
    before = drill.api.version
    drill.until(T0 + 10.5)
    assert drill.api.version == before, "without a notice nothing is touched"
    drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 10 + notice_s))
    drill.until(T0 + 10 + notice_s)
    assert drill.heard_at - (T0 + 10.5) <= 2.0  # told
    said = drill.node["metadata"]["annotations"]
    assert said[Annotation.LEAVING_AT] == pod_status.rfc3339(T0 + 10 + notice_s)
    assert said[Annotation.LEAVING_REASON] == "AWS terminates this spot machine"
    assert drill.node["spec"]["unschedulable"]
    assert drill.node["spec"]["taints"] == [{"key": contract.LEAVING, "value": "spot", "effect": "NoSchedule"}]
    assert pods(drill) == ["kube-proxy"]
    times = {name: round(at - drill.heard_at) for name, (at, _) in drill.left.items()}
    assert (times["web"], times["train-worker-0"]) == (0, 5)  # others at once; the worker by itself, with its state saved
    assert times["train-worker-0"] <= times["operator"] < notice_s
    assert not [each for each in drill.api.asked if "train-worker-0/eviction" in each or each.startswith("DELETE")]


def test_a_worker_that_does_not_leave_is_evicted_with_what_is_left(drill: Drill) -> None:
    drill.workers_save_s = 1000.0
    drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 120))
    drill.until(T0 + 120)
    at, grace_s = drill.left["train-worker-0"]
    assert T0 + 90 <= at <= T0 + 92
    assert grace_s is not None
    assert at + grace_s <= T0 + 120 - 2


def test_a_budget_is_respected_until_the_pod_would_be_lost(drill: Drill) -> None:
    def kept(handler: Any) -> bool:
        drill.api.prescribe("POST .*/pods/web/eviction", kept)
        return bool(apiserver._plain(*apiserver.status(429, "TooManyRequests", "the disruption budget web"))(handler))

    drill.api.prescribe("POST .*/pods/web/eviction", kept)
    drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 120))
    drill.until(T0 + 120)
    at, grace_s = drill.left["web"]
    assert T0 + 88 <= at <= T0 + 92
    assert grace_s is not None
    assert at + grace_s <= T0 + 118
    assert pods(drill) == ["kube-proxy"]


def test_a_recommendation_that_is_withdrawn_is_taken_back(drill: Drill) -> None:
    before = {**drill.node, "metadata": {**drill.node["metadata"]}}
    drill.service.documents[imds.REBALANCE] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    drill.until(T0 + 30)
    assert drill.node["spec"]["taints"][0]["value"] == "rebalance"
    assert Annotation.LEAVING_AT not in drill.node["metadata"]["annotations"]
    assert "web" in pods(drill)  # only workers leave: there is no deadline
    del drill.service.documents[imds.REBALANCE]
    drill.make()  # whoever starts again knows it from the node
    drill.until(T0 + 40)
    assert drill.node["spec"] == before["spec"]
    assert drill.node["metadata"]["annotations"] == before["metadata"]["annotations"]


def test_a_watcher_that_starts_in_maintenance_evicts_nobody_before_it_knows_how_long_that_lasts(drill: Drill) -> None:
    begun = notices.Notice(LeavingKind.MAINTENANCE, T0 - 3600, "maintenance")
    drill.api.put({**drill.node, "spec": {**drill.node["spec"]}})
    drill.cluster.patch(kinds.NODE, "n1", notices.node_patch(drill.cluster.get(kinds.NODE, "n1"), begun))
    drill.service.refused = True
    drill.make()
    drill.until(T0 + 10)
    assert "web" in pods(drill)


@pytest.mark.parametrize("how", ["refused", "slow", "tokens", "away"])
def test_a_metadata_service_that_fails_is_said_once_and_survived(
    drill: Drill, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    drill.until(T0 + 5)
    source = drill.watcher.metadata
    if how == "refused":
        drill.service.refused = True
    elif how == "slow":
        drill.service.silent.set()
        source.timeout_s = 0.01
    elif how == "tokens":
        drill.service.tokens.clear()
    else:
        source.address = "http://127.0.0.1:1"
    asked = len(drill.service.asked)
    with caplog.at_level(logging.INFO):
        drill.until(T0 + (20 if how == "tokens" else 305))
        if how == "tokens":
            assert said(caplog) == []
            return
        assert len(said(caplog)) == 1
        assert "; trying again" in said(caplog)[0]
        assert len(drill.service.asked) - asked <= 20  # with growing pauses
        drill.service.silent.clear()
        drill.service.refused, source.address, source.timeout_s = False, drill.service.address, 30
        drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 500))
        drill.until(T0 + 500)
    assert "AWS's metadata service answers again" in said(caplog)
    assert pods(drill) == ["kube-proxy"]


def test_an_api_server_that_is_away_or_forbids_is_said_once_and_asked_again(
    drill: Drill, caplog: pytest.LogCaptureFixture
) -> None:
    drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 120))
    drill.api.may = lambda asked: not asked.startswith("PATCH")
    with caplog.at_level(logging.INFO):
        drill.until(T0 + 20)
        assert [each for each in said(caplog) if "cannot be marked" in each] == [
            "node n1 cannot be marked: Node n1 cannot be changed: the operator may not PATCH "
            "/api/v1/nodes/n1?fieldManager=outlast&fieldValidation=Strict; trying again"
        ]
        assert "web" not in pods(drill)  # what can be done is done
        drill.api.may = rights.node_watch
        drill.until(T0 + 120)
    assert drill.leaves
    assert pods(drill) == ["kube-proxy"]


def test_a_node_that_is_written_by_others_meanwhile_is_marked_all_the_same(drill: Drill) -> None:
    drill.api.prescribe("PATCH .*/nodes/n1", *[apiserver.status(409, "Conflict", "the object has been modified")] * 3)
    drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 120))
    drill.watcher.tick()
    assert drill.leaves


def test_a_watcher_that_is_killed_goes_on_where_it_was(drill: Drill) -> None:
    drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(T0 + 120))
    drill.until(T0 + 30, drill.make)
    assert pods(drill) == ["kube-proxy"]
    assert len([each for each in drill.api.asked if each.startswith("PATCH")]) == 1


# ---------------------------------------------------------------------------------------------------------------- command


@pytest.mark.slow
def test_the_command_watches_until_it_is_told_to_stop(drill: Drill, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [Path(sys.executable).with_name("outlast"), "node-watch", "--metadata", drill.service.address]
    env = {**os.environ, Env.NODE: "n1", "POLL_INTERVAL": "0.2s"}
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
        try:
            drill.api.until(lambda: "is watched" in log.read_text() or process.poll() is not None)
            assert "node n1 is watched every 0.2 s" in log.read_text()
            drill.api.until(lambda: f"GET {imds.SCHEDULED}" in drill.service.asked)
            drill.service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(time.time() + 800), "stop")
            drill.api.until(lambda: drill.leaves)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert re.search(r"warning: node n1 leaves \(spot, \d+ s left\): AWS stops this spot machine", log.read_text())
