"""A stored job that asks for an etcd is run like any other. All is real but the API server, the kubelet and the network: the
operator is a process, and so are the agents and their training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
import machines
import processes
import prometheus_text
from outlast.job import contract
from outlast.job.contract import Annotation, Env, Label, Pod
from servers import Place

Document = dict[str, Any]
ARGS = ("--steps=150", "--pause=0.04", "--gate")
WITHIN_S = 120.0
OPERATOR = "operator-0"
"""The operator's pod, whose image it reads."""


class Kubelet:
    """Runs the pods of one namespace as processes of this machine. Only places, ports and addresses are those of this machine."""

    def __init__(self, api: apiserver.ApiServer, directory: Path, kubeconfig: Path) -> None:
        self.api, self.directory, self.kubeconfig = api, directory, kubeconfig
        self.running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        """By uid of the pod: its name, and its first process."""
        self._told: set[str] = set()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.over.wait(0.05):
            with self.api.lock:
                pods = [
                    json.loads(json.dumps(d)) for key, d in self.api.documents.items() if key[0] == "pods" and key[2] != OPERATOR
                ]
            there = {pod["metadata"]["uid"]: pod for pod in pods}
            for uid in set(self.running) - set(there):  # deleted without grace
                processes.kill(self.running.pop(uid)[1])
            for uid, pod in there.items():
                self._look_after(uid, pod)

    def _look_after(self, uid: str, pod: Document) -> None:
        goes = "deletionTimestamp" in pod["metadata"]
        if uid not in self.running:
            if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") and not goes:
                return
            if goes:
                return self._remove(pod)
            self.running[uid] = (pod["metadata"]["name"], self._start(uid, pod))
            return self._says(pod, "Running", {"running": {}})
        process = self.running[uid][1]
        if (code := process.poll()) is not None:
            del self.running[uid]
            ended = {"terminated": {"exitCode": contract.exit_code(code), "reason": "Error", "finishedAt": apiserver.NOW}}
            self._says(pod, "Failed" if code else "Succeeded", ended)
        elif goes and uid not in self._told:
            self._told.add(uid)
            process.send_signal(signal.SIGTERM)

    def _says(self, pod: Document, phase: str, state: Document) -> None:
        with self.api.lock:
            there = self.api.documents.get(("pods", "default", pod["metadata"]["name"]))
            if there is not None and there["metadata"]["uid"] == pod["metadata"]["uid"]:
                container = {"name": Pod.CONTAINER, "ready": phase == "Running", "state": state}
                meta = dict(there["metadata"])
                self.api.put({**there, "metadata": meta, "status": {"phase": phase, "containerStatuses": [container]}})

    def _remove(self, pod: Document) -> None:
        with self.api.lock:
            there = self.api.documents.get(("pods", "default", pod["metadata"]["name"]))
            if there is not None and there["metadata"]["uid"] == pod["metadata"]["uid"]:
                self.api.remove("pods", pod["metadata"]["name"])

    def _start(self, uid: str, pod: Document) -> subprocess.Popen[bytes]:
        name, place = pod["metadata"]["name"], self.directory / uid
        (container,) = pod["spec"]["containers"]
        places = {Pod.CONFIG: place / "etc", Pod.STATE: place / "state", Pod.CACHE: place / "cache", Pod.HOME: place / "home"}
        stored = any(each["name"] == Env.STORE for each in container["env"])
        places[Pod.OUTPUT] = (place if stored else self.directory) / "out"  # without a store, pods share a volume
        fields = {
            "metadata.namespace": "default",
            "status.podIP": "127.0.0.1",
            "metadata.uid": uid,
            "spec.nodeName": "node",
            "metadata.labels['topology.kubernetes.io/zone']": "z",
        }
        env = {}
        for each in container["env"]:
            if each.get("valueFrom", {}).get("secretKeyRef", {}).get("optional"):
                continue  # that Secret is not there
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            value = fields[source] if source else each["value"]
            for there, here in places.items():
                value = re.sub(rf"^{there}(?=/|$)", str(here), value)
            env[each["name"]] = value
        for here in places.values():
            here.mkdir(parents=True, exist_ok=True)
        (place / "etc" / "job.yaml").write_text(pod["metadata"]["annotations"][Annotation.JOB_FILE])
        here = {
            Env.CODE: str(machines.PROGRAMS),
            Env.PROBE_PORT: "0",
            "KUBECONFIG": str(self.kubeconfig),
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "outlast", "agent"], env={**os.environ, **env, **here}, stdout=log, stderr=log
            )


class World:
    """All of it."""

    def __init__(self, directory: Path, url: str, api: apiserver.ApiServer) -> None:
        self.api, self.directory = api, directory
        self.kubeconfig = apiserver.kubeconfig(directory / "kubeconfig", url)
        self.kubelet = Kubelet(api, directory, self.kubeconfig)
        self.operator: subprocess.Popen[bytes] | None = None
        containers = [{"name": "operator", "image": "outlast"}]
        api.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": OPERATOR}, "spec": {"containers": containers}})

    def operate(self) -> None:
        """Start the operator."""
        env = {Env.NAMESPACE: "default", Env.PROBE_PORT: "0", Env.POD: OPERATOR, "KUBECONFIG": str(self.kubeconfig)}
        program = [sys.executable, "-m", "outlast", "operator", "--log=text"]
        with (self.directory / "operator.log").open("ab") as log:
            self.operator = subprocess.Popen(program, env={**os.environ, **env}, stdout=log, stderr=log)

    def submit(self, **fields: Any) -> None:
        job = {
            "image": "outlast", "script": "exact.py", "args": list(ARGS), "checkpoint": {"every": "10 steps"},
            "rendezvous": {"backend": "etcd", "endpoint": "127.0.0.1:9"}, **fields,
        }  # fmt: skip
        head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND}
        self.api.put({**head, "metadata": {"name": "train", "generation": 1}, "spec": job})

    def change(self, **workers: int) -> None:
        """Have other numbers of workers wanted."""
        with self.api.lock:
            job = json.loads(json.dumps(self.job))
            job["spec"]["workers"].update(workers)
            job["metadata"]["generation"] += 1
            self.api.put(job)

    @property
    def job(self) -> Document:
        with self.api.lock:
            return next(d for key, d in self.api.documents.items() if key[0] == "elasticjobs.outlast.dev")

    @property
    def status(self) -> Document:
        return self.job.get("status") or {}

    def uid(self, index: int) -> str:
        with self.api.lock:
            pod = self.api.documents["pods", "default", f"train-worker-{index}"]
        assert pod["metadata"]["labels"][Label.WORKER] == str(index)
        return str(pod["metadata"]["uid"])

    def lose(self, index: int) -> None:
        """SIGKILL everything in a pod."""
        processes.kill(self.kubelet.running[self.uid(index)][1])

    @property
    def steps(self) -> list[int]:
        """Those that have been trained, in the order in which they were."""
        with contextlib.suppress(FileNotFoundError):
            whole, _, _ = (self.directory / "out/train/metrics.jsonl").read_text().rpartition("\n")
            return [json.loads(line)["step"] for line in whole.splitlines()]
        return []

    def final(self) -> Document:
        return dict(json.loads((self.directory / "out/train/final.json").read_text()))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so."""
        pause, waited = threading.Event(), 0.0
        while not condition():
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.directory.glob("*.log")))
            assert waited < WITHIN_S, f"{what} not within {WITHIN_S:g} s: {self.status}\n{logs}"
            pause.wait(0.05)
            waited += 0.05

    def trains(self, workers: int, *, beyond: int) -> None:
        """Wait until so many train together, as the operator knows, and a step is done that is greater."""
        self.until(
            lambda: self.status.get("state") == "Running" and len(self.status.get("world") or ()) == workers, f"{workers} workers"
        )
        self.until(lambda: max(self.steps, default=0) > beyond, f"a step beyond {beyond}")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    api = apiserver.ApiServer(unserved=("kueue.x-k8s.io",))
    api.graceful = True
    with apiserver.serving(api) as url:
        world = World(tmp_path, url, api)
        world.kubelet.thread.start()
        world.operate()
        yield world
        world.kubelet.over.set()
        world.kubelet.thread.join()
        for process in [world.operator, *(each for _, each in world.kubelet.running.values())]:
            if process is not None:
                processes.kill(process)


@pytest.mark.slow
def test_rank_0_and_the_operator_are_killed_and_the_weights_are_those_of_the_undisturbed_run(
    world: World, undisturbed: Callable[..., dict[str, object]]
) -> None:
    world.submit(workers={"replicas": 2, "min": 2})
    world.trains(2, beyond=25)
    assert world.operator
    processes.kill(world.operator)
    world.lose(0)  # rank 0
    world.operate()
    world.trains(2, beyond=60)
    (world.directory / "out/train/hurry").touch()
    world.until(lambda: world.status["state"] == "Succeeded", "the end")
    assert (world.status["restarts"], world.status["lastFailure"]["reason"]) == (1, "worker 0 was killed (exit code 137)")
    assert world.final() == undisturbed(ARGS, 2)


@pytest.mark.slow
def test_workers_come_and_go_as_is_wanted_and_no_step_is_lost(world: World) -> None:
    world.submit(workers={"replicas": 2, "min": 1, "max": 4}, args=["--steps=1000000", "--pause=0.04"])
    world.trains(2, beyond=10)
    for wanted in (3, 1):
        world.change(replicas=wanted)
        world.trains(wanted, beyond=world.steps[-1])
        world.trains(wanted, beyond=world.steps[-1] + 5)
    steps = world.steps
    assert steps == list(range(1, len(steps) + 1))
    assert (world.status["restarts"], world.status.get("interruptions", 0)) == (0, 0)


@pytest.mark.slow
def test_what_fails_again_and_again_is_given_up_by_who_decides(world: World) -> None:
    world.submit(
        workers={"replicas": 2, "min": 2}, args=["--fail-at=15"], restarts={"limit": 1}, checkpoint={"every": "1000 steps"}
    )
    world.until(lambda: world.status.get("state") == "Failed", "the end")
    assert "a bug at step 15" in world.status["reason"]
    assert "restarts.limit (1 within 1h without a new checkpoint) is used up" in world.status["reason"]
    assert world.status["restarts"] == 1
    world.until(lambda: not world.kubelet.running, "the end of the pods")


@pytest.mark.slow
def test_what_a_kill_has_cost_is_counted_where_prometheus_reads_it(world: World, moto: Place) -> None:
    """The ledger of rank 0, the account beside it, the Lease, the status, the operator's `/metrics`."""

    def counted(name: str) -> dict[str, float]:
        (address,) = re.findall(r"metrics are served on (:\d+)", (world.directory / "operator.log").read_text())[-1:]
        families = prometheus_text.scrape(address)
        return {each.labels.get("cause", ""): each.value for family in families for each in family.samples if each.name == name}

    world.submit(workers={"replicas": 2, "min": 2}, output=moto.url, args=["--steps=100000", "--pause=0.04"])
    world.until(lambda: world.status.get("state") == "Running", "training")
    world.until(lambda: counted("outlast_lost_seconds_total"), "an account")
    assert set(counted("outlast_lost_seconds_total").values()) == {0.0}
    world.lose(1)
    world.until(lambda: any(counted("outlast_lost_seconds_total").values()), "the cost of a kill")
    assert {cause for cause, seconds in counted("outlast_lost_seconds_total").items() if seconds} == {"killed"}
    assert counted("outlast_recovery_seconds_count") == {"killed": 1}
    worker = json.loads((world.directory / world.uid(0) / "state" / contract.WORKER).read_text())
    (steps,) = (each for each in prometheus_text.scrape(worker["probes"]) if each.name == "outlast_step_seconds")
    seconds, count = (each.value for each in steps.samples)
    assert count > 10
    assert 0.04 <= seconds / count < 1
