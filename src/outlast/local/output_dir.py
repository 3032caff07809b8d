"""Finds a job's output directory on this machine and its owner, and moves earlier files out of the way."""

from __future__ import annotations

import time
from pathlib import Path

from outlast.base import file_locks
from outlast.base.errors import AlreadyRunning, OutlastError
from outlast.job import contract, spec
from outlast.local import store_takeover
from outlast.local.state_dir import Run, StateDir
from outlast.storage import checkpoints, runs

_POLL_S = 0.1
_UNLOCK_TIMEOUT_S = 2.0
"""Maximum seconds that an output stays locked after its launcher has exited."""


def store_url(job: spec.Job) -> str:
    """Return the URL of the job's output in a store; empty if the output is a directory on this machine."""
    place = str(job.spec.output)
    return f"{place.rstrip('/')}/{job.metadata.name}" if spec.local(place) is None else ""


def directory(job: spec.Job, state: Path) -> Path:
    return (spec.local(str(job.spec.output)) or state / "runs") / job.metadata.name


def check_unused(output: Path) -> None:
    """Raise AlreadyRunning if a launcher with another state directory uses this output. Waits a moment for it to exit."""
    deadline = time.monotonic() + _UNLOCK_TIMEOUT_S
    while not _free(output):
        if time.monotonic() > deadline:
            owner = (output / contract.OWNER).read_text() or "another launcher"
            raise AlreadyRunning(
                f"output {output} is in use by the job in {owner}; end it there, or give this job another name or output"
            )
        time.sleep(_POLL_S)


def resumable(run: Run, state_dir: StateDir) -> bool:
    """Return whether a run can be resumed: it owns its output (`store_takeover.owned`), which no other job has used since."""
    return store_takeover.owned(run) and not last_owner(Path(run.output), state_dir)


def last_owner(output: Path, state_dir: StateDir) -> str:
    """Return the state directory of the job that used an output last; empty if it was the job with this `state_dir`. A state
    directory that no longer exists is ignored, since it may be this job's own under an earlier name."""
    try:
        owner = (output / contract.OWNER).read_text()
    except FileNotFoundError:
        return ""
    return owner if owner and Path(owner).exists() and Path(owner).resolve() != state_dir.path.resolve() else ""


def check_apart(output: Path, *sources: Path) -> None:
    """Raise OutlastError if the output, which is cleared for a new run, contains the job file or the code."""
    for path in sources:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise OutlastError(
                f"output: {output}, the job's name below output, holds {path}; give the job another name or another output"
            )


def make_room(output: Path, run: str) -> Path | None:
    """Create the output directory for `run`. Moves any earlier run's files below `previous/`, and returns their new directory."""
    archived = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        if checkpoints.generation(output / contract.CHECKPOINTS, run):
            return None  # this run's own output: only the state directory was lost
        earlier = [entry for entry in output.iterdir() if entry.name != runs.PREVIOUS]
        if earlier:
            archived = store_takeover.archive(
                output, earlier, time.strftime("%Y%m%d-%H%M%S", time.gmtime(output.stat().st_mtime))
            )
        (output / contract.LEDGER).mkdir(exist_ok=True)
    except OSError as problem:
        raise _unwritable(output, problem) from problem
    return archived


def _free(output: Path) -> bool:
    try:
        return file_locks.free(output / contract.OWNER)
    except OSError as problem:
        raise _unwritable(output, problem) from problem


def _unwritable(output: Path, problem: OSError) -> OutlastError:
    why = problem.strerror or problem
    return OutlastError(f"output: cannot write to {output}: {why}; choose another directory or change its permissions")
