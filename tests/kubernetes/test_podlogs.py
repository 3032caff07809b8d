"""Following the logs of pods: every line once, whatever happens to connections, containers and pods."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import apiserver
from outlast.base.errors import Absent, NotFound, Refused, Unanswered
from outlast.job.contract import Env
from outlast.job.logs import LogLine
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds
from outlast.kubernetes.jobs import backend
from outlast.kubernetes.jobs import logs as podlogs
from outlast.storage import store
from outlast.storage.sync import growing_files

Document = dict[str, Any]


def a_pod(name: str, *, index: int = 0, restarts: int = 0, state: str = "running", phase: str = "Running") -> Document:
    status = {"name": "worker", "restartCount": restarts, "state": {state: {"exitCode": 0} if state == "terminated" else {}}}
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    return kinds.POD.document(
        {"name": name, "namespace": "n", "uid": name, "annotations": annotations},
        spec={"nodeName": "a", "containers": [{"name": "worker"}]},
        status={"phase": phase, "containerStatuses": [status]},
    )


def done(name: str, **fields: int) -> Document:
    return a_pod(name, state="terminated", phase="Succeeded", **fields)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods and the ends of logs are looked for fifty times as often."""
    for name in ("_POLL_S", "_PAUSE_S"):
        monkeypatch.setattr(podlogs, name, getattr(podlogs, name) / 50)


def at(second: int, text: str, *, fraction: str = "") -> str:
    return f"2026-01-01T00:00:{second:02}{fraction}Z {text}"


class Cluster:
    """A cluster with a log of each start of each pod. Connections end after as many lines as `cuts` says, one after another."""

    def __init__(self, *pods: Document, cuts: Sequence[int] = ()) -> None:
        self.pods = {pod["metadata"]["name"]: pod for pod in pods}
        self.lines: dict[tuple[str, int], list[str]] = {}
        self.cuts = list(cuts)
        self.after_cut: list[Any] = []
        self.changes: queue.SimpleQueue[kube.Change] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def find(self, kind: kinds.Kind, name: str, *, namespace: str) -> Document | None:
        return self.pods.get(name)

    def list_(self, kind: kinds.Kind, *, labels: str) -> list[Document]:
        return list(self.pods.values())

    def watch(self, kind: kinds.Kind, *, labels: str, stop: kube.Stop) -> Iterator[kube.Change]:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                yield self.changes.get(timeout=0.01)

    def logs(self, pod: str, options: kube.LogOptions, **_: Any) -> Iterator[str]:
        previous, since, tail = options.previous, options.since, options.tail
        start = self.pods[pod]["status"]["containerStatuses"][0]["restartCount"] - previous
        if (pod, start) not in self.lines:
            raise Refused("waiting to start")
        lines = [line for line in self.lines[pod, start] if line[:19] >= since[:19]]
        lines = lines if tail is None else lines[max(0, len(lines) - tail) :]
        cut = self.cuts.pop(0) if self.cuts and not previous else len(lines)
        yield from lines[:cut]
        with self.lock:
            if self.after_cut and not previous:
                self.after_cut.pop(0)()


def followed(cluster: Cluster | kube.Cluster, **options: Any) -> tuple[list[LogLine], list[str]]:
    said: list[str] = []

    def over() -> bool:
        assert isinstance(cluster, Cluster)
        return not cluster.after_cut and all(pod["status"]["phase"] == "Succeeded" for pod in cluster.pods.values())

    follower = podlogs.Follower(cluster, "job=train", options.pop("over", over), **{"say": said.append, **options})  # type: ignore[arg-type]
    return list(follower.lines()), said


Connected = tuple[apiserver.ApiServer, kube.Cluster]


@pytest.fixture
def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connected]:
    """An API server, and what talks to it."""
    api = apiserver.ApiServer()
    with apiserver.connected(api, tmp_path, monkeypatch, "n") as cluster:
        yield api, cluster


def served(pod: Document) -> Document:
    """A pod of the job, as an API server has it."""
    return {**pod, "metadata": {**pod["metadata"], "labels": {"job": "train"}}}


def texts(lines: Sequence[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_a_lost_connection_loses_and_repeats_no_line() -> None:
    cluster = Cluster(a_pod("p"), cuts=[2, 3])  # in the middle of lines of one moment, and of one second
    cluster.lines["p", 0] = [at(1, "a"), at(1, "b"), at(1, "b"), at(1, "c", fraction=".5"), at(2, "d")]
    cluster.after_cut = [lambda: None, lambda: None, lambda: cluster.pods.update(p=done("p"))]
    assert texts(followed(cluster)[0]) == ["a", "b", "b", "c", "d"]


def test_a_container_that_is_started_again_is_read_from_its_begin() -> None:
    cluster = Cluster(a_pod("p"), cuts=[1])
    cluster.lines = {("p", 0): [at(1, "first"), at(2, "last words")], ("p", 1): [at(9, "again")]}
    again = (a_pod("p", restarts=1), done("p", restarts=1))
    cluster.after_cut = [lambda pod=pod: cluster.pods.update(p=pod) for pod in again]
    assert texts(followed(cluster)[0]) == ["first", "last words", "again"]


def test_a_container_that_is_started_again_while_it_is_asked_for_says_each_line_once(connected: Connected) -> None:
    api, cluster = connected
    starts = [[f"{start} line {n}" for n in range(6)] for start in range(3)]
    now = -1

    def log(handler: BaseHTTPRequestHandler) -> bool:
        """The node has started the container again when its log is asked for, and that was not to be seen before."""
        nonlocal now
        if "follow=true" in handler.path:
            now = min(now + 1, 2)
            api.put(served(done("p", restarts=2) if now == 2 else a_pod("p", restarts=now)))
        start = now - ("previous=true" in handler.path)
        apiserver.send(handler, 200, "".join(at(10 * start + n, f"{line}\n") for n, line in enumerate(starts[start])))
        return True

    api.put(served(a_pod("p")))
    api.prescribe("pods/p/log", *[log] * 20)
    assert texts(followed(cluster, over=lambda: now == 2)[0]) == [line for start in starts for line in start]


def test_new_pods_are_followed_and_waiting_is_explained() -> None:
    waiting = a_pod("p", state="waiting", phase="Pending")
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]
    cluster = Cluster(waiting)
    cluster.lines["p", 0] = [at(1, "here")]

    def begin() -> None:
        cluster.pods["p"] = done("p", index=3)
        cluster.changes.put(kube.Change("modified", cluster.pods["p"]))

    timer = threading.Timer(0.2, begin)
    timer.start()
    lines, said = followed(cluster)
    timer.join()
    assert lines == [LogLine(3, "here")]
    assert said == ["worker 0 cannot be scheduled: no GPU"]


def test_a_pod_that_lives_between_two_looks_at_the_job_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(a_pod("p"), a_pod("q"))
    cluster.lines = {("p", 0): [at(1, "stays")], ("q", 0): [at(2, "short")]}
    for change in ("modified", "deleted"):
        cluster.changes.put(kube.Change(change, a_pod("q")))
    monkeypatch.setattr(cluster, "list_", lambda *_, **__: [cluster.pods["p"]])
    lines = podlogs.Follower(cluster, "job=train", lambda: "short" in read).lines()  # type: ignore[arg-type]
    read: list[str] = []
    for line in lines:
        read.append(line.text)
        cluster.pods["p"] = done("p") if "short" in read else cluster.pods["p"]
        cluster.pods["q"] = done("q")
    assert sorted(read) == ["short", "stays"]


def test_what_the_kubelet_says_in_place_of_a_log_is_no_line() -> None:
    cluster = Cluster(done("p"))
    cluster.lines["p", 0] = ["unable to retrieve container logs for containerd://17", at(1, "a line"), at(2, "")]
    assert texts(followed(cluster)[0]) == ["a line", ""]
    assert texts(list(podlogs.merge(cluster, [cluster.pods["p"]]))) == ["a line", ""]  # type: ignore[arg-type]


def test_tail_is_of_pods_that_are_there_at_the_begin() -> None:
    cluster = Cluster(done("p"), cuts=[2])
    cluster.lines["p", 0] = [at(second, str(second)) for second in range(5)]
    assert texts(followed(cluster, tail=2)[0]) == ["3", "4"]


def test_past_logs_are_merged_by_time() -> None:
    cluster = Cluster(done("p"), done("q", index=1))
    cluster.lines = {("p", 0): [at(1, "p1"), at(3, "p3")], ("q", 0): [at(2, "q2"), at(3, "q3", fraction=".1")]}
    assert texts(list(podlogs.merge(cluster, list(cluster.pods.values())))) == ["p1", "q2", "p3", "q3"]  # type: ignore[arg-type]


WORKER = {"outlast.dev/job": "train", "app.kubernetes.io/component": "worker"}


def a_job(status: Document) -> Document:
    """A Job, without its pods."""
    meta = {"name": "train", "namespace": "n", "labels": WORKER}
    return kinds.JOB.document(meta, spec={"parallelism": 1, "template": {"spec": {"containers": []}}}, status=status)


COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


def a_stateful_set(api: apiserver.ApiServer, *, replicas: int = 1) -> None:
    """One whose workers run."""
    spec = {"replicas": replicas, "template": {"spec": {"containers": [{"name": "worker"}]}}}
    api.put(kinds.STATEFUL_SET.document({"name": "train", "namespace": "n", "labels": WORKER}, spec=spec))
    for index in range(replicas):
        pod = served(a_pod(f"train-{index}", index=index))
        pod["metadata"]["labels"] = WORKER
        api.put(pod)


@pytest.mark.parametrize("end", ["outlast_done 1\n", "outlast_failed 1\n"])
def test_following_a_stateful_set_ends_with_its_workers_although_they_stay_up(connected: Connected, end: str) -> None:
    api, cluster = connected
    a_stateful_set(api)
    api.prescribe("train-0/log.*follow=true", apiserver.goes_on(at(1, "trains")))
    api.logs["train-0"] = [at(1, "trains"), at(2, "last words")]
    api.metrics["train-0"] = end
    lines = backend.KubernetesBackend(cluster).logs("train", follow=True)
    assert texts(list(lines)) == ["trains", "last words"]


def test_following_waits_for_an_api_server_that_is_away(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    api, cluster = connected
    monkeypatch.setattr(kube.requests, "_ATTEMPTS", 1)
    monkeypatch.setattr(backend, "_AGENT_POLL_S", 0)
    a_stateful_set(api)
    api.prescribe("train-0/log.*follow=true", apiserver.goes_on(at(1, "before")))
    api.logs["train-0"] = [at(1, "before"), at(2, "after")]
    said: list[str] = []
    lines = backend.KubernetesBackend(cluster).logs("train", follow=True, say=said.append)
    assert next(iter(lines)).text == "before"
    api.well = False
    api.cut()

    def back() -> None:
        api.until(lambda: said)
        api.metrics["train-0"] = "outlast_done 1\n"
        api.well = True

    thread = threading.Thread(target=back)
    thread.start()
    assert texts(list(lines)) == ["after"]
    thread.join()
    assert [sentence.rpartition("; ")[2] for sentence in said] == ["trying again", "the cluster answers again"]
    assert "is not well (HTTP 503: down)" in said[0]


def test_a_node_that_does_not_answer_hides_no_other_logs(connected: Connected) -> None:
    api, cluster = connected
    a_stateful_set(api, replicas=2)
    api.logs |= {"train-0": [at(1, "here")], "train-1": [at(1, "there")]}
    refused = apiserver.status(500, "InternalError", 'Get "https://10.0.0.2:10250/containerLogs": connection refused')
    api.prescribe("train-1/log", refused)
    said: list[str] = []
    place = backend.KubernetesBackend(cluster)
    assert texts(list(place.logs("train", say=said.append))) == ["here"]
    (sentence,) = said
    assert sentence.startswith(
        "worker 1 cannot be read to its end: Pod train-1 in namespace n cannot be reached: its node does not"
    )
    api.prescribe("/log", refused, refused)
    with pytest.raises(Unanswered, match="its node does not answer"):
        list(place.logs("train"))


def test_what_is_waited_for_is_said_when_it_changes(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    api, cluster = connected
    monkeypatch.setattr(podlogs, "_POLL_S", 0.02)
    monkeypatch.setattr(backend.KubernetesBackend, "poll_s", 0.02)
    with pytest.raises(Absent, match="there is no namespace n in here"):
        list(backend.KubernetesBackend(cluster).logs("train", follow=True))
    api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
    said: list[str] = []
    quota = {"conditions": [{"type": "FailedCreate", "status": "True", "message": "exceeded quota"}]}

    def happens() -> None:
        for number, document in enumerate((a_job({}), a_job(quota), a_job(COMPLETE)), 1):
            api.until(lambda number=number: len(said) == number)
            asked = len(api.asked)
            api.until(lambda asked=asked: len(api.asked) > asked + 8)  # it looks again and again, and says nothing
            api.put(document)

    thread = threading.Thread(target=happens)
    thread.start()
    assert list(backend.KubernetesBackend(cluster).logs("train", follow=True, say=said.append)) == []
    thread.join()
    assert said == [
        "waiting for train: there is no such job in namespace n yet",
        "waiting for pods: its pods are not created yet; if it stays so, outlast why train says why",
        "waiting for pods: its pods cannot be created: exceeded quota",
    ]


def test_a_job_that_has_ended_and_whose_pods_are_gone_is_not_followed(connected: Connected, tmp_path: Path) -> None:
    api, cluster = connected
    job = a_job(COMPLETE)
    api.put(job)
    place = backend.KubernetesBackend(cluster)
    with pytest.raises(NotFound, match="train has no pods now, and its output is in no store"):
        list(place.logs("train", follow=True))
    url = (tmp_path / "runs" / "train").as_uri()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("a line\n")
    growing_files.Sender(store.open_(url), tmp_path).push(["logs/worker-0.log"], threading.Event())
    env = [{"name": Env.STORE, "value": url}]
    job["spec"]["template"]["spec"]["containers"] = [{"name": "worker", "env": env}]
    said: list[str] = []
    assert texts(list(place.logs("train", follow=True, say=said.append))) == ["a line"]
    assert said == [f"no pod of train has a log; these lines are from {url}"]


def test_a_worker_that_there_is_not_is_named_with_those_that_there_are(connected: Connected) -> None:
    api, cluster = connected
    a_stateful_set(api, replicas=2)
    with pytest.raises(NotFound, match="train has no worker 5; there are 0, 1"):
        list(backend.KubernetesBackend(cluster).logs("train", worker=5))
