"""Evaluates a job's model in a separate pod, for `outlast evaluate` in a cluster.

The pod has a worker's environment. It fetches the newest committed checkpoint, the requested one and the training's results from
the store, prepares code and data, runs the job's module with `--evaluate`, and uploads new files such as evaluation.json. The
module's standard output becomes the pod's log.
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
from outlast.storage.checkpoints import both_places
from outlast.storage.runs.output import skipped
from outlast.storage.sync import push_and_pull, tree
from outlast.storage.sync.index import Stat
from outlast.worker.prepare import phases

_NO_RESULTS = (CHECKPOINTS, LOGS, LEDGER, METRICS, runs.PREVIOUS)
"""Outlast's own entries in the output. An evaluation does not need them."""


def main(args: Sequence[str]) -> int:
    """Evaluate the job in this environment. Returns the exit code from the job's module."""
    environ = dict(os.environ)
    job = spec.load(environ[Env.JOB_FILE])
    environ |= substitution.values(job.spec.env, environ)
    place, run, output = None, environ[Env.RUN], Path(environ[Env.OUTPUT])
    if Env.STORE in environ:
        place = store.open_(environ[Env.STORE])
        record = runs.read(place)  # the run's id comes from its first job file; ours may be a later version
        run = record.run if record else run
        both_places.restore(output, place, run, lambda text: print(f"outlast | {text}", flush=True))
        _fetch_results(place, output)
    fetched = _results(output)
    args = both_places.evaluated(output, place, run, args)
    code = phases.evaluate(job, environ, args)
    if place and not code:
        _upload(place, output, fetched)
    return code


def _skipped(path: str) -> bool:
    return path.partition("/")[0] in _NO_RESULTS or skipped(path)


def _results(output: Path) -> dict[str, Stat]:
    return tree.scan(str(output), skip=_skipped).files if output.is_dir() else {}


def _fetch_results(place: store.Store, output: Path) -> None:
    """Fetch the files that training wrote, such as the final weights, but no checkpoints. Raises StoreError."""
    with tempfile.TemporaryDirectory() as state:
        report = push_and_pull.pull(place, output, Path(state, "known"), push_and_pull.Options(skip=_skipped))
    if report.failed:
        raise StoreError(report.failed[0][1])


def _upload(place: store.Store, output: Path, fetched: dict[str, Stat]) -> None:
    """Upload the evaluation's files, but no `fetched` files that are unchanged, since they may be outdated. Raises StoreError."""
    new = {path for path, stat in _results(output).items() if fetched.get(path) != stat}
    if not new:
        return
    with tempfile.TemporaryDirectory() as state:
        report = push_and_pull.push(
            output, place, Path(state, "known"), push_and_pull.Options(skip=_skipped), leave=lambda path: path not in new
        )
    if report.failed:
        raise StoreError(report.failed[0][1])
