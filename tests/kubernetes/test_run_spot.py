"""A spot machine goes under a real training: metadata service, watcher, operator, agents are real, the kubelets are ours."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
import imds
from apiserver import ApiServer
from bare_pods import Pods
from imds import Imds
from outlast.job import contract
from outlast.job.contract import Env
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.nodewatch.metadata import Metadata
from outlast.kubernetes.nodewatch.node_watcher import Watcher
from outlast.kubernetes.operator import reconciler_by_kind
from outlast.kubernetes.operator.leader import Leadership
from outlast.kubernetes.operator.observed_job import Limits
from outlast.kubernetes.operator.operator import Operator
from outlast.kubernetes.operator.watches import Settings

Document = dict[str, Any]
Final = Callable[..., dict[str, object]]
ARGS = ("--steps=150", "--pause=0.1", "--gate")


class Kubelets:
    """Binds pods to nodes that take them, runs an agent for each, and reports how it ends."""

    def __init__(self, api: ApiServer, pods: Pods, kubeconfig: Path) -> None:
        self.api, self.pods, self.kubeconfig = api, pods, kubeconfig
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By the uid of the pod."""
        self.nodes: dict[str, str] = {}
        self.ended: list[tuple[str, str, int, float]] = []
        """Pod, node, exit code, time."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.over.wait(0.02):
            with self.api.lock:
                for pod in [each for key, each in self.api.documents.items() if key[0] == "pods"]:
                    self._look(pod)

    def _look(self, pod: Document) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if uid not in self.processes:
            if node := self._free():
                self._start(pod, node)
            return
        process = self.processes[uid]
        going = "deletionTimestamp" in pod["metadata"]
        if process.poll() is None:
            if going and uid in self.nodes and not hasattr(process, "told"):
                process.told = True  # type: ignore[attr-defined]
                process.terminate()
        elif not any(each[0] == uid for each in self.ended):
            self.ended.append((uid, self.nodes[uid], process.returncode, time.time()))
            if going:
                self.api.remove("pods", name)
            else:
                done = {"exitCode": process.returncode, "finishedAt": pod_status.rfc3339(time.time())}
                phase = "Failed" if process.returncode else "Succeeded"
                self._report(pod, phase, {"terminated": done}, pod["spec"]["nodeName"])

    def _free(self) -> str:
        """The node with the fewest pods that takes one."""
        found = [each for key, each in self.api.documents.items() if key[0] == "nodes" and not each["spec"].get("unschedulable")]
        names = [each["metadata"]["name"] for each in found]
        live = [self.nodes[uid] for uid, process in self.processes.items() if process.poll() is None]
        return min(names, key=live.count, default="")

    def _start(self, pod: Document, node: str) -> None:
        meta = pod["metadata"]
        given = {each["name"]: each.get("value", "") for each in pod["spec"]["containers"][0]["env"]}
        index = int(meta["labels"]["outlast.dev/worker"])
        shutil.rmtree(self.pods.directory / f"state-{index}", ignore_errors=True)  # an emptyDir
        own = {name: given[name] for name in (Env.RUN, Env.RENDEZVOUS)}
        own |= {Env.NAMESPACE: "default", Env.MEMBER: meta["uid"], Env.NODE: node, "KUBECONFIG": str(self.kubeconfig)}
        self.pods.start(index, **own)
        self.processes[meta["uid"]], self.nodes[meta["uid"]] = self.pods.running[index], node
        self._report(pod, "Running", {"running": {}}, node)

    def _report(self, pod: Document, phase: str, state: Document, node: str) -> None:
        status = {"phase": phase, "podIP": "127.0.0.1", "containerStatuses": [{"name": "trainer", "state": state, "ready": True}]}
        new = json.loads(json.dumps(pod))
        self.api.put({**new, "spec": {**new["spec"], "nodeName": node}, "status": status})


def a_node(name: str) -> Document:
    ready = {"type": "Ready", "status": "True"}
    meta = {"name": name, "labels": {"topology.kubernetes.io/zone": "a"}}
    spec = {"providerID": f"aws:///a/{name}"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": spec, "status": {"conditions": [ready]}}


@pytest.fixture
def training(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubelets]:
    """A job of two workers on two of three nodes, with its operator."""
    api = ApiServer(unserved=("kueue.x-k8s.io", "scheduling.volcano.sh", "scheduling.x-k8s.io"))
    api.graceful = True
    for name in ("n1", "n2", "n3"):
        api.put(a_node(name))
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(apiserver.serving(api))
        config = apiserver.kubeconfig(machine.directory / "kubeconfig", url)
        monkeypatch.setenv("KUBECONFIG", str(config))
        pods = Pods(machine.directory, machine.job(args=ARGS, interruption={"grace": "10s"}))
        kubelets = Kubelets(api, pods, config)
        cluster = stack.enter_context(contextlib.closing(kube.connect(namespace="default")))
        leadership = Leadership(cluster, "operator", "default")
        operator = Operator(cluster, reconciler_by_kind.reconcilers(Limits()), leadership, Settings(host="127.0.0.1"))
        stop = threading.Event()
        deciding = threading.Thread(target=operator.run, args=(stop,))
        spec = {"image": "i", "script": "exact.py", "args": list(ARGS), "workers": {"replicas": 2, "min": 2, "max": 2}}
        spec |= {"interruption": {"grace": "10s"}}
        meta = {"name": "job", "namespace": "default", "generation": 1}
        api.put({"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": meta, "spec": spec})
        deciding.start()
        kubelets.thread.start()
        try:
            yield kubelets
        finally:
            kubelets.over.set()
            kubelets.thread.join()
            stop.set()
            deciding.join()
            for process in kubelets.processes.values():
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, 9)
                    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("notice_s", [15, 120])
def test_training_goes_on_elsewhere_without_a_step_lost_and_no_restart_is_counted(
    training: Kubelets, undisturbed: Final, notice_s: int
) -> None:
    api, pods = training.api, training.pods
    pods.wait(lambda: len(pods.running) == 2 and pods.step() >= 25, "step 25")
    (going,) = {node for uid, node in training.nodes.items() if node != "n1" and training.processes[uid].poll() is None}
    before = set(training.nodes)
    stop = threading.Event()
    with imds.serving(Imds()) as service, contextlib.closing(kube.connect(namespace="default")) as cluster:
        found = cluster.get(kinds.NODE, going)
        watcher = Watcher(found, Metadata(service.address, timeout_s=30), cluster, clock=time.time)

        def watch() -> None:
            while not stop.wait(watcher.tick()):
                pass

        watching = threading.Thread(target=watch)
        watching.start()
        begun = time.time()
        service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(begun + notice_s))
        pods.wait(lambda: api.documents["nodes", "", going]["spec"].get("taints"), "the taint")
        print(f"tainted after {time.time() - begun:.2f} s")
        pods.wait(lambda: training.ended, "the end of its worker")
        stop.set()
        watching.join()
    uid, node, code, at = training.ended[0]
    assert (node, code) == (going, contract.Exit.INTERRUPTED)
    assert uid in before
    print(f"saved and left after {at - begun:.2f} s")
    assert at < begun + notice_s
    pods.wait(lambda: set(training.nodes) - before, "its replacement")
    (moved,) = set(training.nodes) - before
    assert training.nodes[moved] != going
    (pods.output / "hurry").touch()
    pods.wait(
        lambda: api.documents["elasticjobs.outlast.dev", "default", "job"].get("status", {}).get("state") == "Succeeded",
        "the end",
    )
    status = api.documents["elasticjobs.outlast.dev", "default", "job"]["status"]
    assert status.get("restarts", 0) == 0
    steps = [json.loads(line)["step"] for line in (pods.output / contract.METRICS).read_text().splitlines()]
    assert steps == list(range(1, 151))  # none lost, none twice
    assert pods.final() == undisturbed(ARGS, 2)
