"""One pod's evaluation of a job's model: what `outlast evaluate` runs in a cluster.

The environment is a worker's. If the output is in a store, the newest committed checkpoint, the one that is asked for, and what
the training has written itself are brought from there. Code and data are prepared as for a worker, and the job's module runs with
`--evaluate`. What it prints is the pod's log; what it writes, such as evaluation.json, is brought to the store.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outlast.base.errors import StoreError
from outlast.job import spec
from outlast.job.contract import CHECKPOINTS, EVALUATE, LEDGER, LOGS, METRICS, Env
from outlast.job.spec import substitution
from outlast.storage import runs, store
from outlast.storage.checkpoints import restore
from outlast.storage.runs.output import skipped
from outlast.storage.sync import sync, tree
from outlast.storage.sync.index import Stat
from outlast.worker.prepare import prepare

_OURS = (CHECKPOINTS, LOGS, LEDGER, METRICS, runs.PREVIOUS)


def main(args: Sequence[str]) -> int:
    """Evaluate as the environment says; the exit code of the job's module."""
    environ = dict(os.environ)
    job = spec.load(environ[Env.JOB_FILE])
    environ |= substitution.values(job.spec.env, environ)
    place, run, output = None, environ[Env.RUN], Path(environ[Env.OUTPUT])
    if Env.STORE in environ:
        place = store.open_(environ[Env.STORE])
        begun = runs.read(place)  # its name is that of the file it was begun with; ours may be a later one
        run = begun.run if begun else run
        restore.restore(output, place, run, lambda text: print(f"outlast | {text}", flush=True))
        _fetch_results(place, output)
    fetched = _results(output)
    args = restore.evaluated(output, place, run, args)
    preparation = prepare.Preparation(job, environ)
    try:
        preparation.prepare()
        del environ[Env.STATE]  # it is no worker
        command = [preparation.python, *prepare.command(job, environ), EVALUATE, *args]
        code = subprocess.run(command, env=environ, cwd=environ[Env.CODE], check=False).returncode
        if place and not code:
            _bring(place, output, fetched)
        return code
    finally:
        preparation.close()


def _skipped(path: str) -> bool:
    return path.partition("/")[0] in _OURS or skipped(path)


def _results(output: Path) -> dict[str, Stat]:
    """What is in the output besides Outlast's own files."""
    return tree.scan(str(output), skip=_skipped).files if output.is_dir() else {}


def _fetch_results(place: store.Store, output: Path) -> None:
    """Bring what the training has written besides checkpoints, such as its final weights. Raises StoreError."""
    with tempfile.TemporaryDirectory() as state:
        report = sync.pull(place, output, Path(state, "known"), sync.Options(skip=_skipped))
    if report.failed:
        raise StoreError(report.failed[0][1])


def _bring(place: store.Store, output: Path, fetched: dict[str, Stat]) -> None:
    """Bring what the evaluation has written to the store; what was there before may be newer there. Raises StoreError."""
    new = {path for path, found in _results(output).items() if fetched.get(path) != found}
    if not new:
        return
    with tempfile.TemporaryDirectory() as state:
        report = sync.push(output, place, Path(state, "known"), sync.Options(skip=_skipped), leave=lambda path: path not in new)
    if report.failed:
        raise StoreError(report.failed[0][1])
