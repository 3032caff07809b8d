"""Mistakes of people who use Outlast for the first time: each is answered by one whole sentence, or a sentence a mistake.

Others are elsewhere: what is wrong in a job file (`test_spec`), an error on one rank and a rank that waits
(`test_restarts`, `test_run_mistakes`), a full disk (`test_full_disks`), what a cluster has recorded (`test_why`).
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from outlast import cli
from outlast.local.backend import LocalBackend

JOB = "apiVersion: outlast.dev/v1alpha1\nkind: ElasticJob\nmetadata: {name: exact}\nspec:\n  script: exact.py\n"
SHELL = "a shell script; name the Python file that it starts, and what else it does with environment, data, output and env"
OF_COMMANDS = {
    "a file that is not there": ("run trian.py",
        "Error: HERE/trian.py: there is no such file; give the path of a script or of a job file"),
    "a shell script": ("validate a.yaml", f"a.yaml:5: script (job.sh) is {SHELL}"),
    "a shell script instead of a job file": ("run job.sh", f"Error: job.sh is {SHELL}"),
    "an output that cannot be written": ("run a.yaml --set output=/proc/x",
        "Error: output: cannot write to /proc/x/exact: No such file or directory; choose another directory or "
        "change its permissions"),
    "no image": ("submit exact.py -n x", "Error: exact.py needs an image in a cluster, with torch: add --image NAME before it"),
    "no image in a job file": ("render a.yaml",
        "a.yaml: image is missing; say which one pods run, e.g. image: ghcr.io/outlast/outlast:0.1"),
    "a job that nobody knows": ("status other",
        "Error: no job has been run here; start one with `outlast run FILE`, in this directory"),
    "a command that does not exist": ("statsu",
        "Usage: outlast [OPTIONS] COMMAND [ARGS]...\nTry 'outlast -h' for help.\n\n"
        "Error: No such command 'statsu'. Did you mean 'status'?"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OF_COMMANDS)
def test_a_mistake_on_the_command_line_or_in_a_job_file_is_answered_by_a_sentence(mistake: str, tmp_path: Path, monkeypatch):
    words, sentence = OF_COMMANDS[mistake]
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(JOB.replace("exact.py", "job.sh") if mistake == "a shell script" else JOB)
    Path("exact.py").write_text("")
    told = io.StringIO()
    backend = LocalBackend(tmp_path / "state", start=lambda *_, **_env: None)
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        cli.main(words.split(), backend=backend)
    assert (ended.value.code, told.getvalue().replace(str(tmp_path), "HERE")) == (2, sentence + "\n")
