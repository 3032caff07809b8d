"""Mistakes of people who use Outlast for the first time: each is answered by one whole sentence, or a sentence a mistake.

Others are elsewhere: what is wrong in a job file (`test_spec`), an error on one rank and a rank that waits
(`test_restarts`, `test_run_mistakes`), a full disk (`test_full_disks`), images and nodes of a real cluster (`test_why`).
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

import situations
from outlast import cli
from outlast.kubernetes import diagnosis
from outlast.local.backend import LocalBackend

HEAD = "apiVersion: outlast.dev/v1alpha1\nkind: ElasticJob\nmetadata: {name: exact}\nspec:\n"
JOB = HEAD + "  script: exact.py\n"
OF_COMMANDS = {
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
def test_a_mistake_on_the_command_line_or_in_a_job_file_is_answered_by_a_sentence(mistake: str, tmp_path: Path, monkeypatch):
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
