"""The output directory of a job on this machine: where it is, which job uses it, and room for a new run."""

from __future__ import annotations

import re
import time
from pathlib import Path

from outlast.base import file_locks
from outlast.base.errors import AlreadyRunning, OutlastError
from outlast.job import contract, spec
from outlast.local import stored
from outlast.local.state_dir import Run, StateDir
from outlast.storage import checkpoints, runs

_POLL_S = 0.1
"""Poll interval for the lock of an output."""
_UNLOCK_TIMEOUT_S = 2.0
"""How long the lock of an output may outlive the launcher that held it."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def store_url(job: spec.Job) -> str:
    """The URL of the job's output in a store; empty when the output is a directory of this machine."""
    place = str(job.spec.output)
    return f"{place.rstrip('/')}/{job.metadata.name}" if spec.local(place) is None else ""


def directory(job: spec.Job, state: Path) -> Path:
    """The directory of this machine that the job writes to."""
    return (spec.local(str(job.spec.output)) or state / "runs") / job.metadata.name


def check_unused(output: Path) -> None:
    """Raise AlreadyRunning when a launcher with another state directory uses this output; a dying one gets a moment."""
    deadline = time.monotonic() + _UNLOCK_TIMEOUT_S
    while not _free(output):
        if time.monotonic() > deadline:
            whose = (output / contract.OWNER).read_text() or "another launcher"
            raise AlreadyRunning(
                f"output {output} is in use by the job in {whose}; end it there, or give this job another name or output"
            )
        time.sleep(_POLL_S)


def resumable(run: Run, state_dir: StateDir) -> bool:
    """Whether a run can go on: see `stored.ours`; and no job with another state directory has used its output since."""
    return stored.ours(run) and not last_owner(Path(run.output), state_dir)


def last_owner(output: Path, state_dir: StateDir) -> str:
    """The state directory of another job that used an output last; empty if this job did, or none. A directory that no longer
    exists may be ours before it was moved."""
    try:
        whose = (output / contract.OWNER).read_text()
    except FileNotFoundError:
        return ""
    return whose if whose and Path(whose).exists() and Path(whose).resolve() != state_dir.path.resolve() else ""


def check_apart(output: Path, *sources: Path) -> None:
    """Raise OutlastError when the output, which is emptied for a new run, contains the job file or the code."""
    for path in sources:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise OutlastError(
                f"output: {output}, the job's name below output, holds {path}; give the job another name or another output"
            )


def make_room(output: Path, run: str) -> Path | None:
    """Make an output directory for `run`; files of an earlier run, its working directory included, are moved to `previous/`.
    Returns where they are kept, None if there were none."""
    kept = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        if checkpoints.generation(output / contract.CHECKPOINTS, run):
            return None  # it is the run's own: only its state directory was lost
        earlier = [entry for entry in output.iterdir() if entry.name != runs.PREVIOUS]
        if earlier:
            kept = stored.keep(output, earlier, time.strftime("%Y%m%d-%H%M%S", time.gmtime(output.stat().st_mtime)))
        (output / contract.LEDGER).mkdir(exist_ok=True)
    except OSError as problem:
        raise _unwritable(output, problem) from problem
    return kept


def without_secrets(job: spec.Job) -> spec.Job:
    """The job without values of `env` that look like secrets, for readers of the output."""
    env = {name: "(not kept)" if _SECRET.search(name) else value for name, value in job.spec.env.items()}
    return job.model_copy(update={"spec": job.spec.model_copy(update={"env": env})})


def _free(output: Path) -> bool:
    try:
        return file_locks.free(output / contract.OWNER)
    except OSError as problem:
        raise _unwritable(output, problem) from problem


def _unwritable(output: Path, problem: OSError) -> OutlastError:
    why = problem.strerror or problem
    return OutlastError(f"output: cannot write to {output}: {why}; choose another directory or change its permissions")
