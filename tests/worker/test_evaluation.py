"""An evaluation in a pod: with the newest checkpoint of the run, whichever version of the job began it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.job import contract
from outlast.job.contract import Env
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store
from outlast.worker.agent import evaluation_in_pod, join_run

SCRIPT = """
import os, pathlib, sys
steps = sorted(path.name for path in pathlib.Path(os.environ["OUTLAST_OUTPUT"], "checkpoints").glob("step-*"))
output = pathlib.Path(os.environ["OUTLAST_OUTPUT"])
print(sys.argv[1:], steps, (output / "model.pt").read_text(), os.environ["OUTLAST_EVALUATION"], flush=True)
(output / "evaluation.json").write_text("{}")
pathlib.Path(os.environ["OUTLAST_STORE"].removeprefix("file://"), "model.pt").write_text("a later model")
"""


def stored(place: store.Store, directory: Path, run: str) -> None:
    """A run in the store with a checkpoint of step 7."""
    runs.claim(place, join_run.record("job", run), replace=False)
    checkpoints.acquire(directory, run, 1)
    draft = checkpoints.saving(directory, 7, 1)
    draft.mkdir(parents=True)
    (draft / "weights").write_bytes(b"weights")
    files = {"weights": {"size": 7, "crc32": checkpoints.checksum(draft / "weights")}}
    new = checkpoints.Checkpoint(7, directory / contract.checkpoint_name(7), run, 1, 1, 5.0)
    there = in_store.Checkpoints(place, run)
    there.acquire(1)
    there.push(checkpoints.commit(draft, new, files), journals=directory)
    place.put("model.pt", b"the model")


@pytest.mark.parametrize("word", ["job-a", "job-b"], ids=["same-file", "later-file"])
def test_the_newest_checkpoint_of_the_run_and_its_results_are_there(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store/job"
    stored(store.open_(url), tmp_path / "machine", "job-a")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "judge.py").write_text(SCRIPT)
    spec = {"script": "judge.py", "code": str(tmp_path / "code"), "args": ["--size=3"]}
    document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "job"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    places = {Env.OUTPUT: "out", Env.STATE: "state", Env.CODE: "code", Env.CACHE: "cache"}
    for name, value in {Env.JOB_FILE: f"{tmp_path}/job.yaml", Env.STORE: url, Env.RUN: word, Env.WORKER: "0"}.items():
        monkeypatch.setenv(name, value)
    for name, value in places.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert evaluation_in_pod.main(["--checkpoint=7", "--batch=5"]) == 0
    said = f"['--size=3', '--evaluate', '--batch=5', '--checkpoint=7'] ['{contract.checkpoint_name(7)}'] the model 1"
    assert capfd.readouterr().out.splitlines()[-1] == said
    after = store.open_(url)
    assert after.get("evaluation.json") == b"{}", "what it writes outlasts its pod"
    assert after.get("model.pt") == b"a later model", "what the training writes meanwhile stays"
