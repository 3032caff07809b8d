"""A job that a real operator runs: a process, and so are its agents and their training. The API server is a small one, and the
kubelet of its nodes is played."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import apiserver
import machines
import processes
import waits
from outlast.job import contract
from outlast.job.contract import Annotation, Env, Label, Pod
from outlast.kubernetes.api import kinds
from outlast.storage import runs

Document = dict[str, Any]
WITHIN_S = 120.0
NODES = ("n1", "n2", "n3")
OPERATOR = "operator-0"
"""The operator's pod, whose image it reads."""


def environment(
    said: list[Document], places: Mapping[str, Path], fields: Mapping[str, str], otherwise: str = ""
) -> dict[str, str]:
    """Make the directories of a container, and return its variables with them in place of its own. `fields` are those of its pod,
    each other of which is `otherwise`."""
    found = {}
    for each in said:
        if each.get("valueFrom", {}).get("secretKeyRef", {}).get("optional"):
            continue  # that Secret is not there
        source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = fields.get(source, otherwise) if source else each["value"]
        for there, here in places.items():
            value = re.sub(rf"^{there}(?=/|$)", str(here), value)
        found[each["name"]] = value
    for here in places.values():
        here.mkdir(parents=True, exist_ok=True)
    return found


class Kubelet:
    """Runs the pods of one namespace as processes of this machine. Only places, ports and addresses are those of this machine."""

    def __init__(self, api: apiserver.ApiServer, directory: Path, kubeconfig: Path) -> None:
        self.api, self.directory, self.kubeconfig = api, directory, kubeconfig
        self.running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        """By uid of the pod: its name, and its first process."""
        self.nodes: dict[str, str] = {}
        """By uid of the pod: its node."""
        self.ended: list[tuple[str, int, float]] = []
        """Pods by uid, with their exit codes, and when they ended."""
        self._told: set[str] = set()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.over.wait(0.05):
            with self.api.lock:
                pods = json.loads(json.dumps(self.api.objects("pods")))
            there = {pod["metadata"]["uid"]: pod for pod in pods if pod["metadata"]["name"] != OPERATOR}
            for uid in set(self.running) - set(there):  # deleted without grace
                processes.kill(self.running.pop(uid)[1])
            for uid, pod in there.items():
                self._look_after(uid, pod)

    def _look_after(self, uid: str, pod: Document) -> None:
        name, goes = pod["metadata"]["name"], "deletionTimestamp" in pod["metadata"]
        if uid not in self.running:
            if goes:
                with self.api.lock:
                    if self._there(pod):
                        self.api.remove("pods", name)
            elif (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed") and (node := self._free()):
                self.nodes[uid] = node
                self.running[uid] = name, self._start(uid, pod)
                self._says(pod, "Running", {"running": {}})
            return
        process = self.running[uid][1]
        if (code := process.poll()) is not None:
            del self.running[uid]
            self.ended.append((uid, code, time.time()))
            ended = {"terminated": {"exitCode": contract.exit_code(code), "reason": "Error", "finishedAt": apiserver.NOW}}
            self._says(pod, "Failed" if code else "Succeeded", ended)
        elif goes and uid not in self._told:
            self._told.add(uid)
            process.send_signal(signal.SIGTERM)

    def _there(self, pod: Document) -> Document | None:
        """The pod as it is now, if it is not another one of that name."""
        there = self.api.documents.get(("pods", "default", pod["metadata"]["name"]))
        return there if there and there["metadata"]["uid"] == pod["metadata"]["uid"] else None

    def _says(self, pod: Document, phase: str, state: Document) -> None:
        with self.api.lock:
            if there := self._there(pod):
                container = {"name": Pod.CONTAINER, "ready": phase == "Running", "state": state}
                spec = {**there["spec"], "nodeName": self.nodes[pod["metadata"]["uid"]]}
                status = {"phase": phase, "containerStatuses": [container]}
                self.api.put({**there, "metadata": dict(there["metadata"]), "spec": spec, "status": status})

    def _free(self) -> str:
        """The node with the fewest pods that takes one."""
        names = [each["metadata"]["name"] for each in self.api.objects("nodes") if not each["spec"].get("unschedulable")]
        return min(names, key=[self.nodes[uid] for uid in self.running].count, default="")

    def _start(self, uid: str, pod: Document) -> subprocess.Popen[bytes]:
        name, place = pod["metadata"]["name"], self.directory / uid
        (container,) = pod["spec"]["containers"]
        places = {Pod.CONFIG: place / "etc", Pod.STATE: place / "state", Pod.CACHE: place / "cache", Pod.HOME: place / "home"}
        stored = any(each["name"] == Env.STORE for each in container["env"])
        places[Pod.OUTPUT] = (place if stored else self.directory) / "out"  # without a store, pods share a volume
        fields = {"metadata.namespace": "default", "metadata.uid": uid, "metadata.labels['topology.kubernetes.io/zone']": "z"}
        fields |= {"status.podIP": "127.0.0.1", "spec.nodeName": self.nodes[uid]}
        env = environment(container["env"], places, fields)
        (place / "etc" / "job.yaml").write_text(pod["metadata"]["annotations"][Annotation.JOB_FILE])
        here = {Env.CODE: str(machines.PROGRAMS), Env.PROBE_PORT: "0", "KUBECONFIG": str(self.kubeconfig)}
        with (self.directory / f"{name}.log").open("ab") as log:
            program = [sys.executable, "-m", "outlast", "agent"]
            return subprocess.Popen(program, env={**os.environ, **env, **here}, stdout=log, stderr=log)


class Operated:
    def __init__(self, directory: Path, url: str, api: apiserver.ApiServer) -> None:
        self.api, self.directory = api, directory
        self.kubeconfig = apiserver.kubeconfig(directory / "kubeconfig", url)
        self.kubelet = Kubelet(api, directory, self.kubeconfig)
        self.operator: subprocess.Popen[bytes] | None = None
        containers = [{"name": "operator", "image": "outlast"}]
        api.put(kinds.POD.document({"name": OPERATOR}, spec={"containers": containers}))
        for name in NODES:
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            api.put(kinds.NODE.document({"name": name}, spec={"providerID": f"aws:///a/{name}"}, status=status))

    def operate(self) -> None:
        env = {Env.NAMESPACE: "default", Env.PROBE_PORT: "0", Env.POD: OPERATOR, "KUBECONFIG": str(self.kubeconfig)}
        program = [sys.executable, "-m", "outlast", "operator", "--log=text"]
        with (self.directory / "operator.log").open("ab") as log:
            self.operator = subprocess.Popen(program, env={**os.environ, **env}, stdout=log, stderr=log)

    def submit(self, **fields: Any) -> None:
        job = {
            "image": "outlast", "script": "exact.py", "checkpoint": {"every": "10 steps"},
            "rendezvous": {"backend": "etcd", "endpoint": "127.0.0.1:9"}, **fields,
        }  # fmt: skip
        self.api.put(kinds.ELASTIC_JOB.document({"name": "train", "generation": 1}, spec=job))

    def change(self, *, suspend: bool = False, forget: bool = False, **workers: int) -> None:
        """Have other numbers of workers wanted, or none. With `forget`, its status is lost as well."""
        with self.api.lock:
            job = json.loads(json.dumps(self.job))
            job["spec"]["workers"].update(workers)
            job["spec"]["suspend"] = suspend
            job["metadata"]["generation"] += 1
            self.api.put({**job, "status": {} if forget else job["status"]})

    @property
    def job(self) -> Document:
        return self.api.objects("elasticjobs.outlast.dev")[0]

    @property
    def status(self) -> Document:
        return self.job.get("status") or {}

    def uid(self, index: int) -> str:
        with self.api.lock:
            pod = self.api.documents["pods", "default", f"train-worker-{index}"]
        assert pod["metadata"]["labels"][Label.WORKER] == str(index)
        return str(pod["metadata"]["uid"])

    def lose(self, index: int) -> None:
        processes.kill(self.kubelet.running[self.uid(index)][1])

    @property
    def steps(self) -> list[int]:
        """Those that have been trained, in the order in which they were."""
        with contextlib.suppress(FileNotFoundError):
            whole, _, _ = (self.directory / "out/train/metrics.jsonl").read_text().rpartition("\n")
            return [json.loads(line)["step"] for line in whole.splitlines()]
        return []

    @property
    def record(self) -> runs.Run:
        return runs.Run.parse((self.directory / "out/train" / runs.RUN).read_bytes())

    def final(self) -> Document:
        return dict(json.loads((self.directory / "out/train/final.json").read_text()))

    def until(self, condition: Callable[[], object], what: str) -> None:

        def why() -> str:
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.directory.glob("*.log")))
            return f"{what} not within {WITHIN_S:g} s: {self.status}\n{logs}"

        waits.until(condition, WITHIN_S, why, pause_s=0.05)

    def trains(self, workers: int, *, beyond: int) -> None:
        """Wait until so many train together, as the operator knows, and a step is done that is greater."""
        self.until(
            lambda: self.status.get("state") == "Running" and len(self.status.get("world") or ()) == workers, f"{workers} workers"
        )
        self.until(lambda: max(self.steps, default=0) > beyond, f"a step beyond {beyond}")


@pytest.fixture
def operated(tmp_path: Path) -> Iterator[Operated]:
    api = apiserver.ApiServer(unserved=("kueue.x-k8s.io", "scheduling.volcano.sh", "scheduling.x-k8s.io"))
    api.graceful = True
    with apiserver.serving(api) as url:
        world = Operated(tmp_path, url, api)
        world.kubelet.thread.start()
        world.operate()
        yield world
        world.kubelet.over.set()
        world.kubelet.thread.join()
        for process in [world.operator, *(each for _, each in world.kubelet.running.values())]:
            if process is not None:
                processes.kill(process)
