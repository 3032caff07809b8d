"""Commands that show a job of a cluster: what its pods ask for, and what its store holds."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import apiserver
from outlast import client
from outlast.base import units
from outlast.cli.look import live_pages
from outlast.job import accelerators
from outlast.job.report import goodput
from outlast.kubernetes import api
from outlast.kubernetes.jobs.backend import KubernetesBackend
from outlast.storage import runs, store

Document = dict[str, Any]
LABELS = {"outlast.dev/job": "train", "app.kubernetes.io/component": "worker", "outlast.dev/worker": "0"}
EVENTS = [
    {"t": 100.0, "kind": "submitted", "source": "cli"},
    {"t": 101.0, "kind": "worker", "source": "agent-0", "worker": 0},
    {"t": 102.0, "kind": "world", "source": "decider", "generation": 1, "members": [0]},
    *({"t": 102.0 + step, "kind": "step", "source": "rank-0", "generation": 1, "step": step} for step in range(1, 9)),
    {"t": 112.0, "kind": "finished", "source": "decider", "state": "Succeeded"},
]
Outlast = Callable[..., tuple[int, str, str]]


def a_job(output: str, **status: Any) -> Document:
    """An ElasticJob that has succeeded, as its operator has written it."""
    spec = {"module": "outlast.recipes.smoke", "output": output, "workers": {"replicas": 1}, "image": "i"}
    spec |= {"resources": {"gpu": 8}, "processesPerWorker": "auto"}
    meta = {"name": "train", "namespace": "n", "creationTimestamp": "1970-01-01T00:01:40Z"}
    written = {"state": "Succeeded", "run": "run-1", "reason": "done", **status}
    return api.kinds.ELASTIC_JOB.document(meta, spec=spec, status=written)


def a_pod(namespace: str, containers: list[Document], status: Document) -> Document:
    spec = {"nodeName": f"node-{namespace}", "containers": containers}
    return api.kinds.POD.document({"name": "train-worker-0", "namespace": namespace, "labels": LABELS}, spec=spec, status=status)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of a job in a store, with its ledger."""
    # A directory stands for a bucket, which the job's file may not name as one for pods.
    opened = store.open_
    monkeypatch.setattr(store, "open_", lambda place, **how: opened(place.replace("s3://bucket", tmp_path.as_uri()), **how))
    place = opened(f"{tmp_path.as_uri()}/runs/train")
    runs.claim(place, runs.Run("run-1", "train", 100.0, state="Succeeded"), replace=True)
    ledger = "".join(f"{json.dumps(event)}\n" for event in EVENTS).encode()
    place.put(f"ledger/decider-0.parts/00000000-0-{zlib.crc32(ledger):08x}.jsonl", ledger)
    return "s3://bucket/runs"


def test_the_report_of_a_job_in_a_cluster_is_read_from_its_store(team: apiserver.ApiServer, url: str, outlast: Outlast) -> None:
    account = goodput.buckets(EVENTS, None)
    same = round(account.goodput, 4)
    team.put(a_job(url, goodput=same, step=8))
    code, out, err = outlast("report", "train", "-n", "n", "-o", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["name"], found["run"], found["steps_kept"], found["goodput"]) == ("train", "run-1", 8, account.goodput)
    assert f"goodput {units.percent(same)}" in outlast("report", "train", "--context", "here", "-n", "n")[1].replace("  ", " ")
    page = outlast("status", "train", "-n", "n")[1]
    assert re.search(rf"^goodput +{units.percent(same)}$", page, re.MULTILINE)
    assert "nothing pushed" not in page, "that is not known here"
    assert units.percent(same) in outlast("list", "-n", "n")[1]
    assert json.loads(outlast("report", f"{url}/train", "-o", "json")[1])["goodput"] == account.goodput


def test_a_page_is_made_of_a_job_in_a_cluster_and_of_the_url_of_its_output(team: apiserver.ApiServer, url: str, outlast: Outlast):
    document = a_job(url)
    document["spec"]["env"] = {"API_TOKEN": "hunter2", "SEED": "7"}
    team.put(document)
    place = store.open_(f"{url}/train")
    place.put("job.yaml", b"kind: ElasticJob # in the store\n")
    for where, said in ((("train", "-n", "n"), ("API_TOKEN: (not kept)", "SEED:")), ((f"{url}/train",), ("# in the store",))):
        code, page, err = outlast("report", *where, "-o", "html")
        assert (code, err, page.splitlines()[0]) == (0, "", "<!doctype html>")
        assert all(words in page for words in ("<dd>Succeeded</dd>", "8 kept", *said))
        assert "hunter2" not in page


def test_the_live_pages_show_a_cluster_with_or_without_a_store_and_wait_for_one_that_is_away(
    team: apiserver.ApiServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with apiserver.serving(team) as address:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "another", address)))
        cluster = api.connect(None, "n")
        pages = live_pages.Pages(KubernetesBackend(cluster), pause_s=lambda _: 0.0)
        team.put(a_job("/pvc/runs", step=8))
        assert '<a href="job/train/">train</a>' in pages.page("", part=True)[1]
        code, text = pages.page("job/train/", part=True)
        assert (code, "Succeeded" in text, "the ledger of train is in its pods only" in text) == (200, True, True)
        team.put(a_job(url, step=8))
        code, text = pages.page("job/train/", part=True)
        assert (code, "8 kept" in text, "pods only" in text) == (200, True, False)
        cluster.close()
    with contextlib.closing(api.connect(None, "n")) as cluster:
        code, text = live_pages.Pages(KubernetesBackend(cluster)).page("job/train/", part=True)
        assert (code, "; trying again" in text, "Traceback" in text) == (503, True, False)


def test_the_report_of_a_job_in_a_cluster_also_has_what_its_operator_knows(team: apiserver.ApiServer, url: str, outlast: Outlast):
    noted = [
        {"t": 90.0, "kind": "submitted", "source": "operator", "job": "train"},
        {"t": 95.0, "kind": "asked", "source": "operator"},
        {"t": 106.5, "kind": "failure", "source": "operator", "generation": 1, "worker": 1, "reason": "worker 1 was evicted"},
        {"t": 112.0, "kind": "finished", "source": "operator", "state": "Succeeded"},
    ]
    team.put(a_job(url, ledger=noted))
    found = json.loads(outlast("report", "train", "-n", "n", "-o", "json")[1])
    assert (found["state"], found["wall_s"]) == ("Succeeded", 22)
    assert (found["seconds"]["queue"], found["seconds"]["pod start"]) == (5, 6)
    assert [each["text"] for each in found["incidents"]] == ["worker 1 was evicted"]


def test_the_checkpoints_of_a_job_in_a_cluster_are_those_in_its_store(team: apiserver.ApiServer, url: str, outlast: Outlast):
    team.put(a_job(url))
    assert outlast("checkpoints", "list", "train", "-n", "n", "-o", "json")[:2] == (0, "[]\n")
    assert outlast("checkpoints", "show", "train", "-n", "n") == (2, "", "Error: nothing has been saved yet\n")
    assert outlast("checkpoints", "prune", "train", "-n", "n", "--yes")[1] == "nothing to remove: there are no more than 2\n"
    team.put(a_job("file:///out"))
    said = "Error: the checkpoints of train are in its pods only (/out/train in its pods); give the job an output in a store\n"
    assert outlast("checkpoints", "verify", "train", "-n", "n")[::2] == (2, said)


def test_jobs_of_all_namespaces_and_those_with_a_label(team: apiserver.ApiServer, url: str, outlast: Outlast) -> None:
    for namespace, labels in (("n", {"team": "a"}), ("m", {})):
        job = a_job(url, state="Running")
        job["metadata"] |= {"namespace": namespace, "labels": labels}
        team.put(job)
        team.put(a_pod(namespace, [{"name": "trainer"}], {"phase": "Running"}))
    heading, *rows = [line.split() for line in outlast("list", "-A", "-o", "wide")[1].splitlines()]
    assert heading[:2] == ["NAMESPACE", "NAME"]
    assert [row[:3] for row in sorted(rows)] == [["m", "train", "Running"], ["n", "train", "Running"]]
    assert ["node-m" in row for row in sorted(rows)] == [True, False], "a worker is in one of two namespaces with such a job"
    assert [job["namespace"] for job in json.loads(outlast("list", "-A", "-l", "team=a", "-o", "json")[1])] == ["n"]
    assert outlast("list", "-n", "m", "-l", "team!=a", "-o", "name")[1] == "train\n"
    code, out, err = outlast("list", "-A", "-l", "team=b")
    assert (code, out, err.partition(" of ")[0]) == (0, "", "there is no job with labels team=b in any namespace")
    assert sorted(run.status.namespace for run in client.runs(all_namespaces=True)) == ["m", "n"]


@pytest.mark.parametrize(
    "words", [["report"], ["chaos", "term"], ["checkpoints", "list"], ["checkpoints", "prune"], ["evaluate"]]
)
def test_every_command_says_that_there_is_no_such_context(team: apiserver.ApiServer, outlast: Outlast, words: list[str]) -> None:
    code, _, err = outlast(*words, "--context", "nowhere")
    assert code == 2
    assert "nowhere" in err


def test_auto_is_one_process_for_each_gpu(team: apiserver.ApiServer, url: str, outlast: Outlast) -> None:
    team.put(a_job(url))
    assert "8 per worker" in outlast("status", "train", "-n", "n")[1]


def test_top_shows_any_accelerator(team: apiserver.ApiServer, url: str, outlast: Outlast) -> None:
    ours = ("nvidia.com/gpu", "google.com/tpu", "gpu.intel.com/xe", "aws.amazon.com/neuron", "nvidia.com/mig-1g.5gb")
    others = ("cpu", "memory", "hugepages-2Mi", "vpc.amazonaws.com/efa", "nvidia.com/gpu.count")
    assert [each for each in (*ours, *others) if accelerators.is_accelerator(each)] == [*ours]
    device = "aws.amazon.com/neuroncore"
    team.put(a_job(url, state="Running"))
    limits = {device: 4, "rdma/hca": 8, "gpu.intel.com/memory.max": 100}
    runs = {"phase": "Running", "containerStatuses": [{"name": "worker", "state": {"running": {}}}]}
    team.put(a_pod("n", [{"name": "worker", "resources": {"limits": limits}}], runs))
    team.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-n"}, "status": {"allocatable": {device: "8"}}})
    found = json.loads(outlast("top", "train", "-n", "n", "-o", "json")[1])
    assert [found[title][0]["accelerators"] for title in ("workers", "nodes")] == [{device: 4}, {device: 8}]
    out = outlast("top", "train", "-n", "n")[1]
    assert f"4 {device}" in out
    assert f"8 {device}" in out
