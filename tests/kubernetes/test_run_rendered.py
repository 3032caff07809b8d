"""What is rendered for a cluster without the operator, run as its containers would be: processes of this machine with the
environment of the documents. Only places, ports and the addresses of pods are those of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import etcds
import kubelets
from bare_pods import Pods
from outlast.job import contract, spec
from outlast.job.contract import Env, Pod
from outlast.kubernetes import manifests
from outlast.kubernetes.torchelastic import torchrun_pod as torchelastic

ROOT = Path(__file__).parents[2]
Document = dict[str, Any]


class Node(Pods):
    """Runs the pods of a workload, and starts none again by itself."""

    def start_all(self, documents: list[Document]) -> None:
        workload = documents[-1]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        config = next(each for each in documents if each["kind"] == "ConfigMap")
        for index in range(workload["spec"]["replicas"]):
            place = self.directory / f"pod-{index}"
            (place / "etc").mkdir(parents=True, exist_ok=True)
            (place / "etc" / "job.yaml").write_text(config["data"]["job.yaml"])
            self.run(index, {**os.environ, **self._environment(container["env"], place, index)})

    def _environment(self, said: list[Document], place: Path, index: int) -> dict[str, str]:
        fields = {"metadata.namespace": "team", "status.podIP": "127.0.0.1"}  # all others are where the index is
        places = {Pod.CONFIG: place / "etc", Pod.STATE: place / "state", Pod.CACHE: place / "cache", Pod.HOME: place / "home"}
        places |= {Pod.OUTPUT: self.directory / "out", Pod.CODE: place / "code"}
        found = kubelets.environment(said, places, fields, str(index))
        if found[Env.RENDEZVOUS].startswith("c10d://"):
            found[Env.RENDEZVOUS] = f"c10d://localhost:{self._port}"
        return {**found, Env.PROBE_PORT: "0"}

    def says(self, pattern: str, *indices: int, timeout_s: float = 120) -> None:
        """Wait until each of these pods has said so, or with none given one of them."""

        def said() -> bool:
            found = [re.search(pattern, self.log(index)) for index in indices or self.running]
            return all(found) if indices else any(found)

        self.wait(said, f"`{pattern}`", timeout_s)

    def delete(self) -> list[int]:
        """As `kubectl delete pods`: all at once, with time to save; their exit codes."""
        for pod in self.running.values():
            pod.terminate()
        return [pod.wait(60) for pod in self.running.values()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_a_statefulset_goes_on_with_more_pods_of_more_processes_after_a_change_of_two_numbers(
    backend: str, node: Node, shared_etcd: etcds.Server
) -> None:
    args = ["--epochs=30", "--batch=96", "--samples=960"]
    where = {"backend": "etcd", "endpoint": shared_etcd.endpoint} if backend == "etcd" else {}
    common = {"args": args, "rendezvous": where, "checkpoint": {"every": "20 steps"}, "sync": {"every": "1h"}}

    def made(replicas: int, gpu: int) -> list[Document]:
        resources = {"cpu": 1, "memory": "1Gi", "gpu": gpu}
        job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "statefulset.yaml").read_text())
        kept = {name: value for name, value in job["spec"].items() if name not in ("output", "volumes", "secrets", "env")}
        fields = {**kept, **common, "workers": {"replicas": replicas}, "resources": resources}
        return manifests.render(spec.parse(yaml.safe_dump({**job, "spec": fields})), "statefulset")

    node.start_all(made(2, 1))
    node.says(r"\[DDP\] rank 1 of 2")
    node.says(r"\[EPOCH\] 5/30")
    assert node.delete() == [contract.Exit.INTERRUPTED] * 2
    node.start_all(made(3, 2))
    node.says(r"\[DDP\] rank 5 of 6")
    node.says(r"\[DONE\].* 6 ranks agree on weights")
    node.says("stays up and does nothing more", 0, 1, 2)
    epochs = [int(found) for index in range(3) for found in re.findall(r"\[EPOCH\] (\d+)/", node.log(index))]
    assert sorted(epochs) == list(range(1, 31))  # none came twice: what was trained by two was not trained again


@pytest.mark.slow
def test_workers_of_a_job_of_torchelastic_that_asks_for_its_etcd_meet_there(tmp_path: Path, shared_etcd: etcds.Server) -> None:
    script = [str(ROOT / "examples" / "train.py"), "--steps=40", "--save-every=40"]
    container = {"name": "elasticjob-worker", "command": ["torchrun"], "args": ["--nproc_per_node=1", *script]}
    worker = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    asks = {"outlast.dev/rendezvous": "etcd"}
    job = {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "cifar", "namespace": "team", "uid": "0123456789ab", "annotations": asks},
        "spec": {"rdzvEndpoint": f"127.0.0.1:{shared_etcd.port}", "minReplicas": 1, "replicaSpecs": {"Worker": worker}},
    }
    pods = []
    for index in range(2):
        (made,) = torchelastic.pod(job, index)["spec"]["containers"]
        env = {each["name"]: each["value"] for each in made["env"]}
        words = [sys.executable, "-m", "torch.distributed.run", *made["args"], f"--out={tmp_path / str(index)}"]
        with (tmp_path / f"{index}.log").open("wb") as log:
            pods.append(subprocess.Popen(words, env={**os.environ, **env}, stdout=log, stderr=log))
    codes = [pod.wait(120) for pod in pods]
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    assert sum("outlast | Running: training starts with all 2" in log for log in logs) == 1
    assert sum("step 40 loss" in log for log in logs) == 1
