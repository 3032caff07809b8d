"""A spot machine goes: a metadata service, the watcher, an API server and a queue, from the notice to the message. All times are
those of a clock that the test moves."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import apiserver
import imds
import rights
from apiserver import ApiServer
from imds import Imds
from outlast import contract, kube, probes
from outlast.cloud import aws, sqs
from outlast.contract import Annotation, Env
from outlast.errors import OutlastError
from outlast.nodewatch import notices, process, sources
from outlast.nodewatch.watch import Settings, Watcher
from outlast.rendezvous.transports import orders
from servers import Place
from test_nodewatch import T0, a_node, a_pod

Document = dict[str, Any]


class Drill:
    """One node with its watcher. Between two rounds the test plays operator, kubelet and cloud."""

    def __init__(self, api: ApiServer, cluster: kube.Cluster, service: Imds) -> None:
        self.api, self.cluster, self.service, self.now = api, cluster, service, T0
        self.sent: list[Document] = []
        self.workers_save_s = 5.0
        """How long a worker takes from the taint until it has saved and left."""
        self.heard_at = 0.0
        """When the operator saw the taint."""
        self.left: dict[str, tuple[float, int | None]] = {}
        """When each pod began to leave, and with which grace period."""
        self.make()

    def make(self, **settings: Any) -> None:
        """Start the watcher, or start it again."""
        source = sources.of("aws", address=self.service.address, timeout_s=30)
        found = self.cluster.get(kube.NODE, "n1")
        given = Settings(**settings, order_s=60, evict_s=60)  # of this machine's clock, which no test may depend on
        self.watcher = Watcher(found, source, self.cluster, given, clock=lambda: self.now, send=self.sent.append)

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
    api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    api.put(a_node())
    for pod in (
        a_pod("train-worker-0", "ElasticJob", grace=150, labels={"outlast.dev/job": "train"}),
        a_pod("web"),
        a_pod("kube-proxy", "DaemonSet"),
        a_pod("etcd", "StatefulSet", labels={"app.kubernetes.io/part-of": "outlast"}),
    ):
        api.put(pod)
    with apiserver.serving(api) as url, imds.serving(Imds()) as service:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url)))
        with contextlib.closing(kube.connect()) as cluster:
            yield Drill(api, cluster, service)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("outlast")]


def pods(drill: Drill) -> list[str]:
    return sorted(key[2] for key in drill.api.documents if key[0] == "pods")


@pytest.mark.parametrize("notice_s", [15, 120])
def test_a_node_is_told_at_once_and_empty_before_its_deadline(drill: Drill, notice_s: int) -> None:
    drill.until(T0 + 10.5)
    assert not drill.leaves
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 10 + notice_s))
    drill.until(T0 + 10 + notice_s)
    assert drill.heard_at - (T0 + 10.5) <= 2.0  # told
    said = drill.node["metadata"]["annotations"]
    assert said[Annotation.LEAVING_AT] == notices.utc(T0 + 10 + notice_s)
    assert said[Annotation.LEAVING_REASON] == "AWS terminates this spot machine"
    assert drill.node["spec"]["unschedulable"]
    assert drill.node["spec"]["taints"] == [{"key": contract.LEAVING, "value": "spot", "effect": "NoSchedule"}]
    assert pods(drill) == ["kube-proxy"]
    times = {name: round(at - drill.heard_at) for name, (at, _) in drill.left.items()}
    assert (times["web"], times["train-worker-0"]) == (0, 5)  # others at once; the worker by itself, with its state saved
    assert times["train-worker-0"] <= times["etcd"] < notice_s
    assert not [each for each in drill.api.asked if "train-worker-0/eviction" in each or each.startswith("DELETE")]
    (sent,) = drill.sent
    assert (sent["node"], sent["zone"], sent["type"], sent["group"]) == ("n1", "us-west-2a", "g5.xlarge", "gpu")
    assert (sent["kind"], sent["deadline"]) == ("spot", notices.utc(T0 + 10 + notice_s))
    assert sent["pods"] == ["team/etcd", "team/train-worker-0", "team/web"]


def test_without_a_notice_nothing_is_touched(drill: Drill) -> None:
    before = drill.api.version
    drill.until(T0 + 100)
    assert (drill.api.version, drill.sent) == (before, [])
    assert drill.watcher.health().ready


def test_a_worker_that_does_not_leave_is_evicted_with_what_is_left(drill: Drill) -> None:
    drill.workers_save_s = 1000.0
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))
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
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))
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
    assert [each["kind"] for each in drill.sent] == ["rebalance"]


def test_an_interruption_after_a_recommendation_brings_a_deadline(drill: Drill) -> None:
    drill.service.documents[imds.REBALANCE] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    drill.until(T0 + 60)
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 180))
    drill.until(T0 + 180)
    assert drill.node["spec"]["taints"][0]["value"] == "spot"
    assert drill.node["metadata"]["annotations"][Annotation.LEAVING_AT] == notices.utc(T0 + 180)
    assert pods(drill) == ["kube-proxy"]
    assert [each["kind"] for each in drill.sent] == ["rebalance", "spot"]


def test_a_dry_run_writes_nothing_and_says_what_it_would(drill: Drill, caplog: pytest.LogCaptureFixture) -> None:
    before = drill.api.version
    drill.make(dry_run=True)
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))
    with caplog.at_level(logging.INFO):
        drill.until(T0 + 120)
    assert (drill.api.version, drill.sent) == (before, [])
    assert said(caplog)[0].startswith("dry run: node n1 leaves (spot, 120 s left): AWS terminates this spot machine")
    assert "dry run: evict team/web, with 30 s to end" in said(caplog)
    assert len(said(caplog)) == 5


@pytest.mark.parametrize("how", ["refused", "slow", "tokens", "away"])
def test_a_metadata_service_that_fails_is_said_once_and_survived(
    drill: Drill, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    drill.until(T0 + 5)
    source = drill.watcher.source
    assert isinstance(source, sources.Aws)
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
        assert drill.watcher.health().healthy
        if how == "tokens":
            assert said(caplog) == []
            return
        assert len(said(caplog)) == 1
        assert "; trying again" in said(caplog)[0]
        assert len(drill.service.asked) - asked <= 20  # with growing pauses
        assert not drill.watcher.health().ready
        assert drill.watcher.health().metrics["metadata_failing_seconds"] >= 299
        drill.service.silent.clear()
        drill.service.refused, source.address, source.timeout_s = False, drill.service.address, 30
        drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 500))
        drill.until(T0 + 500)
    assert f"{source.name} answers again, after" in caplog.text
    assert pods(drill) == ["kube-proxy"]


def test_an_api_server_that_is_away_or_forbids_is_said_once_and_asked_again(
    drill: Drill, caplog: pytest.LogCaptureFixture
) -> None:
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))
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
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))
    drill.watcher.tick()
    assert drill.leaves


def test_a_watcher_that_is_killed_goes_on_where_it_was(drill: Drill) -> None:
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))

    def again() -> None:
        drill.make()

    drill.until(T0 + 30, again)
    assert pods(drill) == ["kube-proxy"]
    assert len([each for each in drill.api.asked if each.startswith("PATCH")]) == 1


# ------------------------------------------------------------------------------------------------------------------ queue


def test_the_message_arrives_in_the_queue(moto: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = aws.client("sqs", "us-east-1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    plain = client.create_queue(QueueName="notices")["QueueUrl"]
    fifo = client.create_queue(QueueName="notices.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    for url in (plain, fifo):
        target = sqs.Queue.parse(url)
        outbox = process.Outbox(lambda text, target=target: target.send(text, subject="n1"))  # type: ignore[misc]
        outbox.put({"node": "n1"})
        outbox.close(60)
        (message,) = client.receive_message(QueueUrl=url)["Messages"]
        assert json.loads(message["Body"]) == {"node": "n1"}
    client.close()
    with pytest.raises(OutlastError, match=r"queue .*/nowhere: it does not exist in us-east-1"):
        sqs.Queue(plain.replace("notices", "nowhere"), "us-east-1").send("{}", subject="n1")


def test_a_queue_is_named_by_its_url() -> None:
    url = "https://sqs.eu-west-1.amazonaws.com/123456789012/notices"
    assert sqs.Queue.parse(url).region == "eu-west-1"
    with pytest.raises(OutlastError, match=r"notices is not the URL of an SQS queue; give it whole: https://sqs\.REGION"):
        sqs.Queue.parse("notices")


def test_a_message_that_cannot_be_sent_is_tried_again_and_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    tries = []

    def deliver(text: str) -> None:
        tries.append(text)
        if len(tries) < 3:
            raise OutlastError("queue q: AWS cannot be reached")

    outbox = process.Outbox(deliver, pause_s=0.0)
    outbox.put({"node": "n1"})
    outbox.close(60)
    assert len(tries) == 3
    assert 'queue q: AWS cannot be reached (attempt 2 of 4); the message was {"node": "n1"}' in caplog.text


# ----------------------------------------------------------------------------------------------------------------- orders


def test_a_worker_without_an_operator_is_told_its_deadline_where_its_key_may_be_read(
    drill: Drill, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Document] = []
    judges = orders.Orders(b"secret", worker=3, since=T0 - 60)

    def take(headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        answer = judges.judge(headers, body, T0)
        if answer.status == 202:
            taken.append({"deadline": answer.deadline, "reason": answer.reason})
        return answer.status, answer.text

    address = probes.serve(probes.Health, {}, orders={orders.PATH: take})
    key = {"secretKeyRef": {"name": "train", "key": "key"}}
    env = [{"name": Env.RENDEZVOUS_KEY, "valueFrom": key}, {"name": Env.PROBE_PORT, "value": address.rpartition(":")[2]}]
    pod = a_pod("train-3", "Job", grace=150, labels={"outlast.dev/job": "train", "outlast.dev/worker": "3"})
    pod["spec"]["containers"] = [{"name": "worker", "env": env}]
    pod["status"] |= {"podIP": "127.0.0.1", "containerStatuses": [{"name": "worker", "state": {"running": {}}}]}
    drill.api.put(pod)
    meta = {"name": "train", "namespace": "team"}
    drill.api.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {"key": base64.b64encode(b"secret").decode()}})
    drill.service.documents[imds.SPOT] = imds.spot(notices.utc(T0 + 120))
    drill.until(T0 + 1)
    assert taken == []  # it may not read the Secret: the eviction tells the worker
    assert drill.left["train-3"][1] == 118
    drill.api.may = lambda asked: "/secrets/train" in asked or rights.node_watch(asked)
    drill.api.put({**pod, "metadata": {**pod["metadata"]}})
    drill.make()
    drill.until(T0 + 2)
    assert taken == [{"deadline": T0 + 120, "reason": "AWS terminates this spot machine"}]
    assert "team/train-3 is told by when it must have left" in said(caplog)


# ---------------------------------------------------------------------------------------------------------------- command


@pytest.mark.slow
def test_the_command_watches_until_it_is_told_to_stop(drill: Drill, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [Path(sys.executable).with_name("outlast"), "node-watch", "--metadata", drill.service.address, "--log", "text"]
    env = {**os.environ, Env.NODE: "n1", "POLL_INTERVAL": "0.2"}
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
        try:
            drill.api.until(lambda: "is watched" in log.read_text() or process.poll() is not None)
            assert "node n1 is watched: AWS's metadata service is asked every 0.2 s; probes on :" in log.read_text()
            drill.api.until(lambda: f"GET {imds.SCHEDULED}" in drill.service.asked)
            drill.service.documents[imds.SPOT] = imds.spot(notices.utc(time.time() + 800), "stop")
            drill.api.until(lambda: drill.leaves)
            port = re.findall(r"probes on :(\d+)", log.read_text())[0]
            drill.api.until(lambda: 'outlast_node_leaving{node="n1"} 1' in read(f"http://127.0.0.1:{port}/metrics"))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert re.search(r"warning: node n1 leaves \(spot, \d+ s left\): AWS stops this spot machine", log.read_text())
    assert log.read_text().endswith("stopped\n")


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())
