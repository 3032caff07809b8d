"""A `TrainJob` of Kubeflow on a real cluster, submitted as it is. The image is as for test_pods_cluster.py.

The training is code of the document itself, as in Kubeflow's own examples, so the image needs no script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import outlast
from namespaces import Namespace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CODE = """\
import time
import torch
import torch.distributed as dist
from outlast.training import progress
dist.init_process_group("gloo")
for step in range(1, 201):
    number = torch.ones(1)
    dist.all_reduce(number)
    if dist.get_rank() == 0:
        print(f"step {step} of a world of {int(number)}", flush=True)
    progress(step, 200)
    time.sleep(0.2)
"""


DOCUMENT = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: multi-node}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    image: %s
    command: [torchrun, --no-python, python3, -c, %s]
    env: [{name: PET_NNODES, value: "1:2"}]
    numNodes: 2
    numProcPerNode: 1
    resourcesPerNode: {requests: {cpu: 200m, memory: 1Gi}, limits: {memory: 1Gi}}
"""


def test_a_train_job_submitted_unchanged_survives_the_loss_of_a_worker(namespace: Namespace, tmp_path: Path) -> None:
    (tmp_path / "trainjob.yaml").write_text(DOCUMENT % (os.environ["OUTLAST_TEST_IMAGE"], json.dumps(CODE)))
    command = [sys.executable, "-m", "outlast", "submit", "trainjob.yaml", "-n", namespace.name]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = outlast.find("multi-node", namespace=namespace.name)
    generation = run.wait(step=20, timeout="4m").generation
    assert "killed" in run.chaos("kill-worker", worker=1)
    run.wait(until=lambda status: status.state == "Running" and status.generation > generation, timeout="2m")
    run.scale(1)
    run.wait(until=lambda status: status.state == "Running" and len(status.world) == 1, timeout="2m")
    assert run.wait(timeout="5m").state == "Succeeded"
    lines = [line.text for line in run.logs()]
    assert any("of a world of 2" in line for line in lines)
    assert any("of a world of 1" in line for line in lines)
