"""In real pods, a rank that is slower than the others and a rank with a flipped bit are named, with their nodes.

The image is as for test_recipes_cluster.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import outlast
from namespaces import OUTLAST, Namespace
from outlast.job.status import JobStatus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
SCRIPT = """
import time
import torch
from torch import nn
from outlast.training import Stream, session

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(0.26 if run.rank == 1 else 0.2)
        return super().forward(x)

with session.open(seed=1) as run:
    net = run.ddp(Net(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    stream = Stream((torch.randn(300, 16), torch.randint(0, 4, (300,))), 12, steps=1500)
    step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
    for batch in stream:
        optimizer.zero_grad()
        for (x, y), share in batch.split(net):
            (nn.functional.cross_entropy(net(x), y) * share).backward()
        optimizer.step()
        step += 1
        if (step, run.rank) == (40, 2):
            net.module.weight.data.view(torch.int32)[1, 5] ^= 1 << 12
        run.log(step)
        run.boundary(step)
"""


def test_a_slow_rank_and_a_flipped_bit_are_named_with_their_nodes(namespace: Namespace, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    spec = {
        "image": os.environ["OUTLAST_TEST_IMAGE"], "script": "train.py", "code": str(tmp_path),
        "workers": {"replicas": 3, "min": 3, "max": 3}, "resources": {"cpu": "0.2", "memory": "1Gi"},
    }  # fmt: skip
    document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "named"}, "spec": spec}
    (tmp_path / "job.json").write_text(json.dumps(document))
    subprocess.run([OUTLAST, "submit", "job.json", "-n", namespace.name], cwd=tmp_path, check=True)

    run = outlast.find("named", namespace=namespace.name)

    def named(status: JobStatus) -> bool:
        told = " ".join(status.warnings)
        return "is slow" in told and "other bits" in told

    told = run.wait(until=named, timeout=400)
    node = {worker.index: worker.node for worker in told.workers}
    slow, differs = [next(each for each in told.warnings if word in each) for word in ("is slow", "other bits")]
    assert re.match(rf"rank 1 \(worker 1.*{node[1]}\) is slow", slow), slow
    assert "rank 2" in differs, differs
    assert str(node[2]) in differs, differs
    command = [OUTLAST, "why", "named", "-n", namespace.name]
    why = " ".join(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()).lower()
    assert slow.lower() in why, why
    assert differs.lower() in why, why
