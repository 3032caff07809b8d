"""Evaluates a job's model in a pod of its own: the cluster side of `outlast evaluate`.

The environment is that of a worker. If the output is in a store, the newest committed checkpoint, the requested one and the files
that the training wrote are fetched from the store. Code and data are prepared as for a worker, and the job's module runs with
`--evaluate`. Its standard output becomes the pod's log; new files, such as evaluation.json, are uploaded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outlast.base.errors import StoreError
from outlast.job import spec
from outlast.job.contract import CHECKPOINTS, LEDGER, LOGS, METRICS, Env
from outlast.job.spec import substitution
from outlast.storage import runs, store
from outlast.storage.checkpoints import restore
from outlast.storage.runs.output import skipped
from outlast.storage.sync import sync, tree
from outlast.storage.sync.index import Stat
from outlast.worker.prepare import prepare

_NO_RESULTS = (CHECKPOINTS, LOGS, LEDGER, METRICS, runs.PREVIOUS)
"""Outlast's own files in the output, which an evaluation does not need."""


def main(args: Sequence[str]) -> int:
    """Evaluate the job in this environment. Returns the exit code of the job's module."""
    environ = dict(os.environ)
    job = spec.load(environ[Env.JOB_FILE])
    environ |= substitution.values(job.spec.env, environ)
    place, run, output = None, environ[Env.RUN], Path(environ[Env.OUTPUT])
    if Env.STORE in environ:
        place = store.open_(environ[Env.STORE])
        record = runs.read(place)  # named by the job file that began it; ours may be a later version of that file
        run = record.run if record else run
        restore.restore(output, place, run, lambda text: print(f"outlast | {text}", flush=True))
        _fetch_results(place, output)
    fetched = _results(output)
    args = restore.evaluated(output, place, run, args)
    code = prepare.evaluate(job, environ, args)
    if place and not code:
        _upload(place, output, fetched)
    return code


def _skipped(path: str) -> bool:
    return path.partition("/")[0] in _NO_RESULTS or skipped(path)


def _results(output: Path) -> dict[str, Stat]:
    return tree.scan(str(output), skip=_skipped).files if output.is_dir() else {}


def _fetch_results(place: store.Store, output: Path) -> None:
    """Fetch the training's results, such as its final weights, without checkpoints. Raises StoreError."""
    with tempfile.TemporaryDirectory() as state:
        report = sync.pull(place, output, Path(state, "known"), sync.Options(skip=_skipped))
    if report.failed:
        raise StoreError(report.failed[0][1])


def _upload(place: store.Store, output: Path, fetched: dict[str, Stat]) -> None:
    """Upload the files that the evaluation wrote, but not the `fetched` ones, of which the store may have newer versions. Raises
    StoreError."""
    new = {path for path, stat in _results(output).items() if fetched.get(path) != stat}
    if not new:
        return
    with tempfile.TemporaryDirectory() as state:
        report = sync.push(output, place, Path(state, "known"), sync.Options(skip=_skipped), leave=lambda path: path not in new)
    if report.failed:
        raise StoreError(report.failed[0][1])
