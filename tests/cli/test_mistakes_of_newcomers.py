"""Mistakes of people who use Outlast for the first time: each is answered by one whole sentence, or a sentence a mistake.

Rows that need whole jobs are elsewhere: an error on one rank and a rank that waits (`test_run_mistakes`), a full disk
(`test_full_disks`), images and nodes of a real cluster (`test_why`, from recordings).
"""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta
from pathlib import Path

import pytest

import situations
from outlast import cli
from outlast.job import spec
from outlast.job.failure import Failure
from outlast.kubernetes import diagnosis, manifests
from outlast.local.backend import LocalBackend
from outlast.rendezvous import restart_budget

HEAD = "apiVersion: outlast.dev/v1alpha1\nkind: ElasticJob\nmetadata: {name: exact}\nspec:\n"
JOB = HEAD + "  script: exact.py\n"
OF_COMMANDS = {
    "a field that is written wrong": (
        JOB + "  wokers: {replicas: 2}\n",
        "validate a.yaml",
        "a.yaml:6: wokers is unknown; did you mean workers?",
    ),
    "a field below another": (
        JOB + "  workers: {replica: 2}\n",
        "validate a.yaml",
        "a.yaml:6: workers.replica is unknown; did you mean workers.replicas?",
    ),
    "a bracket that is not closed": (
        JOB + "  workers: {replicas: 2\n",
        "validate a.yaml",
        "a.yaml:7: this is not YAML: expected ',' or '}', but got '<stream end>' while parsing a flow mapping (column 1)",
    ),
    "a tab": (
        JOB + "\tworkers: {}\n",
        "validate a.yaml",
        "a.yaml:6: this is not YAML: a tab cannot indent; use spaces (column 1)",
    ),
    "a script that is not there": (
        HEAD + "  script: exakt.py\n",
        "validate a.yaml",
        "a.yaml:5: script (exakt.py) is not in HERE; correct it, or set code: to its directory",
    ),
    "a file that is not there": (
        JOB,
        "run trian.py",
        "Error: HERE/trian.py: there is no such file; give the path of a script or of a job file",
    ),
    "a shell script": (
        HEAD + "  script: job.sh\n",
        "validate a.yaml",
        "a.yaml:5: script (job.sh) is a shell script; name the Python file that it starts, "
        "and what else it does with environment, data, output and env",
    ),
    "a shell script instead of a job file": (
        JOB,
        "run job.sh",
        "Error: job.sh is a shell script; name the Python file that it starts, "
        "and what else it does with environment, data, output and env",
    ),
    "a number in words": (
        JOB,
        "run a.yaml --set workers.replicas=two",
        "a.yaml with the command line's values: workers.replicas (two) must be a whole number",
    ),
    "a value that lacks": (
        JOB,
        "run a.yaml --set workers.replicas",
        "Error: --set workers.replicas: expected KEY=VALUE, such as checkpoint.every=1m",
    ),
    "min above replicas": (
        JOB + "  workers: {replicas: 2, min: 3}\n",
        "validate a.yaml",
        "a.yaml:6: workers.replicas (2) is below workers.min (3); raise replicas or lower min",
    ),
    "another API, kind and name": (
        "apiVersion: outlast.dev/v1\nkind: ElasticTrain\nmetadata: {name: Exact_1}\nspec: {script: exact.py}\n",
        "validate a.yaml",
        "a.yaml:1: apiVersion (outlast.dev/v1) must be outlast.dev/v1alpha1\n"
        "a.yaml:2: kind (ElasticTrain) must be ElasticJob\n"
        "a.yaml:3: metadata.name (Exact_1) must be lower-case letters, digits and dashes, from a letter on, "
        "at most 51 characters",
    ),
    "a duration of another tool": (
        JOB,
        "run a.yaml --set checkpoint.every=5min",
        "a.yaml with the command line's values: checkpoint.every (5min) is neither a duration nor a number of steps; "
        'write 5m or "200 steps"',
    ),
    "an output that cannot be written": (
        JOB,
        "run a.yaml --set output=/proc/x",
        "Error: output: cannot write to /proc/x/exact: No such file or directory; choose another directory or "
        "change its permissions",
    ),
    "no image": (
        JOB,
        "submit exact.py -n x",
        "Error: exact.py needs an image in a cluster, with torch: add --image NAME before it",
    ),
    "no image in a job file": (
        JOB,
        "render a.yaml",
        "a.yaml: image is missing; say which one pods run, e.g. image: ghcr.io/outlast/outlast:0.1",
    ),
    "a job that nobody knows": (
        JOB,
        "status other",
        "Error: no job has been run here; start one with `outlast run FILE`, in this directory",
    ),
    "a command that does not exist": (
        JOB,
        "statsu",
        "Usage: outlast [OPTIONS] COMMAND [ARGS]...\nTry 'outlast -h' for help.\n\n"
        "Error: No such command 'statsu'. Did you mean 'status'?",
    ),
}


@pytest.mark.parametrize("mistake", OF_COMMANDS)
def test_a_mistake_on_the_command_line_or_in_a_job_file_is_answered_by_a_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, words, sentence = OF_COMMANDS[mistake]
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    Path("exact.py").write_text("")
    told = io.StringIO()
    backend = LocalBackend(tmp_path / "state", start=lambda *_, **_env: None)
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        cli.main(words.split(), backend=backend)
    assert (ended.value.code, told.getvalue().replace(str(tmp_path), "HERE")) == (2, sentence + "\n")


OF_CLUSTERS = {
    "image-invalid": "workers 0 and 1 wait for the image Team/Train:v9, which is no name of an image",
    "cpu": "workers 0 and 1 find no node that is large enough: each asks for 64 cores",
    "gpu": "workers 0 and 1 find no node: none has any nvidia.com/gpu",
    "secret-missing": "workers 0 and 1 wait for the Secret hf-token, which does not exist in namespace team",
    "quota": "1 of 2 workers has no pod: the quota team of the namespace leaves too little: pods: "
    "a pod asks for 1, 1 of 1 are used",
}
"""As real clusters were recorded."""


@pytest.mark.parametrize("mistake", OF_CLUSTERS)
def test_a_mistake_that_a_cluster_finds_is_named_first_by_why(mistake: str) -> None:
    assert diagnosis.causes(situations.seen(mistake), 1_800_000_000.0)[0].what == OF_CLUSTERS[mistake]


def raised(step: int, *, early: str = "") -> Failure:
    return Failure(worker=1, rank=1, code=1, reason="rank 1 on worker 1 raised ValueError: bad batch 17", step=step, early=early)


def judged(failure: Failure, *before: restart_budget.Record, everywhere: bool = False) -> str:
    policy = restart_budget.Policy(10, timedelta(hours=1))
    return restart_budget.judge(before, failure, 0, 100.0, policy, everywhere=everywhere).reason


def test_a_mistake_in_a_script_ends_the_job_with_its_cause() -> None:
    twice = (restart_budget.Record(80.0, 0, 0), restart_budget.Record(90.0, 0, 0))
    assert judged(raised(0), *twice) == (
        "rank 1 on worker 1 raised ValueError: bad batch 17; it has failed soon after its start 3 times in a row"
    )
    assert judged(raised(0, early="ValueError"), everywhere=True) == (
        "rank 1 on worker 1 raised ValueError: bad batch 17; every rank raises it before the first step, a restart would not help"
    )


def test_pods_without_credentials_are_told_before_they_start() -> None:
    job = spec.parse(JOB + "  image: i:1\n  output: s3://bucket/runs\n")
    assert manifests.warnings(job, "elasticjob") == [
        "pods are given no credentials for s3://bucket/runs: env, secrets and serviceAccountName are empty; "
        "unless the role of their nodes may use it: kubectl create secret generic s3 --from-literal=AWS_ACCESS_KEY_ID=... "
        "--from-literal=AWS_SECRET_ACCESS_KEY=..., and secrets: [{name: s3}] in the job file"
    ]
