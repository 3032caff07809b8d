"""The recipes in real pods: a pod is lost on the way, and the weights and the evaluation are those of an undisturbed run.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/kubernetes/test_recipes_cluster.py

The image is as for test_pods_cluster.py, with the packages of the extras `llm` and `data` as well, and of the same versions as
here: the undisturbed run is one of two workers on this machine. Works in a restricted namespace of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from namespaces import Document, Namespace, a_server, kind
from outlast import cli
from outlast.data import cifar, digits
from outlast.job.status import State
from outlast.kubernetes import api
from outlast.kubernetes.jobs.backend import KubernetesBackend

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
PATIENCE_S = 500
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def nothing(directory: Path) -> None:
    """The recipe makes its own data."""


def some_digits(directory: Path) -> None:
    """400 images to train on and 100 held out, as CIFAR-10's files."""
    (directory / "all").mkdir()
    digits.write(directory / "all")
    directory.joinpath("set").mkdir()
    for file, count in (*((file, 80) for file in cifar.TRAIN), (cifar.TEST, 100)):
        found = cifar.read(directory / "all", [file])
        cifar.write(directory / "set", file, found.x[:count], found.y[:count].tolist(), file)
    cifar.write_meta(directory / "set", found.names, 80)


def questions(directory: Path) -> None:
    """A tiny Llama, its tokenizer, and 60 questions."""
    from outlast.recipes import llm_tiny

    llm_tiny.main([str(directory / "all"), "--width=32", "--vocab-size=400", "--positions=256"])
    directory.joinpath("set").mkdir()
    (directory / "all" / "model").rename(directory / "set" / "model")
    for part, count in (("train", 60), ("val", 12)):
        lines = (directory / "all" / f"{part}.jsonl").read_text().splitlines(keepends=True)
        (directory / "set" / f"{part}.jsonl").write_text("".join(lines[:count]))


@dataclass(frozen=True)
class Case:
    """A recipe, and a run of it that takes half a minute on two quiet cores."""

    module: str
    args: Sequence[str]
    write: Callable[[Path], None]
    lost: int
    every: int
    """Steps between checkpoints."""


CASES = {
    "cifar10": Case("cifar10", ["--batch=64", "--epochs=12", "--no-flip"], some_digits, lost=0, every=10),
    "llm": Case(
        "llm",
        ["--model-local-dir=$DATA/model", "--local-files-only", "--batch=2", "--grad-accum=4", "--seq-len=128", "--epochs=12",
         "--lr=3e-3", "--no-epoch-results"],
        questions,
        lost=1,
        every=10,
    ),
    "imagenet": Case(
        "imagenet",
        ["--synthetic", "--synthetic-images=160", "--num-classes=10", "--image-size=32", "--batch-size=16", "--microbatch=8",
         "--epochs=8"],
        nothing,
        lost=0,
        every=10,
    ),
    "perceiver": Case(
        "perceiver",
        ["--dataset=synthetic", "--size=tiny", "--frames=2", "--image-size=16", "--num-latents=16", "--batch=8", "--lr=5e-3",
         "--epochs=40", "--eval-every=100"],
        nothing,
        lost=1,
        every=25,
    ),
}  # fmt: skip


def fields(case: Case, place: str, data: str) -> Document:
    """Of a job file. `place`: where the data are; `data`: where a worker finds them."""
    return {
        "module": f"outlast.recipes.{case.module}",
        "args": [each.replace("$DATA", data) for each in case.args],
        "env": ENV,
        "checkpoint": {"every": f"{case.every} steps", "best": 1, "by": "loss"},
        **({"data": [{"from": place}]} if place else {}),
    }


@pytest.fixture(scope="module")
def server(namespace: Namespace) -> Namespace:
    """The namespace, with an S3 server in it."""
    namespace.apply(a_server(namespace.name))
    namespace.kubectl("wait", "--for=condition=Ready", "pod/s3", "--timeout=300s")
    return namespace


def brought(namespace: Namespace, directory: Path, name: str) -> str:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(directory, arcname=name)
    words = ["kubectl", "-n", namespace.name, "exec", "-i", "s3", "--", "tar", "xf", "-", "-C", "/tmp"]
    subprocess.run(words, input=made.getvalue(), check=True)
    here = {**keys(namespace), "AWS_ENDPOINT_URL": "http://localhost:8080", "HOME": "/tmp"}  # not each network leads back
    env = [f"{key}={value}" for key, value in here.items()]
    namespace.kubectl("exec", "s3", "--", "env", *env, "outlast", "sync", f"/tmp/{name}", f"s3://bucket/{name}")
    return f"s3://bucket/{name}"


def keys(namespace: Namespace) -> dict[str, str]:
    url = f"http://s3.{namespace.name}.svc:8080"
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def stored(namespace: Namespace, path: str) -> Any:
    return json.loads(namespace.kubectl("exec", "s3", "--", "cat", f"/buckets/bucket/{path}"))


def evaluated(namespace: Namespace, name: str, *options: str) -> Document:
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", name, "-n", namespace.name, *options])
    assert ended.value.code == 0, namespace.logs(name)
    return dict(stored(namespace, f"runs/{name}/evaluation.json"))


@pytest.mark.parametrize("name", CASES)
def test_a_pod_is_lost_and_weights_and_evaluation_are_those_of_an_undisturbed_run(
    name: str, server: Namespace, machine: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    data = tmp_path / "data"
    data.mkdir()
    case.write(data)
    local = str(data / "set") if (data / "set").exists() else ""
    machine.submit(machine.job("calm", **fields(case, local, local), script=None, code=None, hang={"limit": "10m"}))
    given = fields(case, brought(server, data / "set", name) if local else "", "/data")
    given["env"] = {**ENV, **keys(server)}
    resources = {"cpu": "0.2", "memory": "2Gi"}
    documents = server.run(name, "indexed-job", **given, output="s3://bucket/runs", resources=resources)
    find = ("find", f"/buckets/bucket/runs/{name}", "-name", "COMMIT")
    server.wait(lambda: "COMMIT" in server.kubectl("exec", "s3", "--", *find, fails=True), lambda: server.logs(name), PATIENCE_S)
    victim = next(
        pod["metadata"]["name"]
        for pod in server.pods(name)
        if pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(case.lost)
    )
    server.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
    with contextlib.closing(api.connect(namespace=server.name)) as cluster:
        backend = KubernetesBackend(cluster)
        server.wait(lambda: backend.status(name).state.final, lambda: server.logs(name), PATIENCE_S)
        assert backend.status(name).state is State.SUCCEEDED, server.logs(name)
    server.ended(kind(documents, "Job"), "Complete")
    ledger = f"/buckets/bucket/runs/{name}/ledger"
    events = server.kubectl("exec", "s3", "--", "grep", "-rh", '"kind": "restored"', ledger)
    assert any(json.loads(event)["step"] > 0 for event in events.splitlines()), "the new pod came to a training that was over"

    assert machine.end("calm", timeout_s=PATIENCE_S).state is State.SUCCEEDED
    assert machine.backend.evaluate("calm", []) == 0
    calm = machine.backend.output("calm")
    final, undisturbed = stored(server, f"runs/{name}/final.json"), json.loads((calm / "final.json").read_text())
    assert final["weights_sha256"] == undisturbed["weights_sha256"]
    assert evaluated(server, name) == json.loads((calm / "evaluation.json").read_text())
