"""Submitting a job on this machine: what a run needs before its launcher starts, whether it is new or goes on.

A run exists once `run.json` is written, which happens last: a submission that is killed half-way leaves the old truth. Waits for
nothing but a store and a lock that is about to be released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.job import contract, ledger, spec
from outlast.job.spec import changes
from outlast.job.status import JobStatus, State
from outlast.local import code_copy, output_dir, resumption, stored
from outlast.local.state_dir import Request, Run, StateDir
from outlast.storage import checkpoints, runs
from outlast.storage.store import Store
from outlast.worker.prepare import prepare, python_env


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job to submit, and how: see `backend.Backend.submit`."""

    job: spec.Job
    source: Path
    fresh: bool
    take_over: bool
    command: str
    say: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Found:
    """What there is of earlier runs of the job."""

    status: JobStatus | None = None
    """Of the run on this machine that goes on."""
    here: Run | None = None
    """That run."""
    elsewhere: runs.Run | None = None
    """The run in the store that goes on, when another machine began it."""
    place: Store | None = None
    """The output in its store."""
    replace: bool = False
    """Whether a run that owns the place in the store may be replaced."""

    @property
    def run(self) -> Run | runs.Run | None:
        return self.here or self.elsewhere


def submit(root: Path, state_dir: StateDir, wanted: Submission, last: JobStatus | None) -> tuple[str, list[str]]:
    """Prepare a run up to the start of its launcher; returns its id and what users should know.

    `root` is the state directory of all jobs, `last` the status of the job's last run unless that is to be ignored.
    """
    job = _with_output(wanted.job, root)
    found = _earlier(state_dir, job, wanted, last)
    new_id = time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)
    run, submitted = (found.run.run, found.run.submitted) if found.run else (new_id, time.time())
    output = Path(found.here.output) if found.here else output_dir.directory(job, root)
    output_dir.check_unused(output)
    warnings = [] if found.here else _clear(state_dir, job, wanted, output, run)
    generation = _reset(state_dir, found.here, found.status) if found.here and found.status else 0
    owner = secrets.token_hex(8)
    if found.place:
        new = runs.Run(run, job.metadata.name, submitted, owner=owner)
        generation = stored.take_over(found.place, output, new, before=found.here, replace=found.replace)
    state_dir.path.mkdir(parents=True, exist_ok=True)
    _ignore_in_git(root)
    work = output / contract.WORK
    code = code_copy.copy(job, wanted.source, work, state_dir.path, (root, output), submitted)
    environment = python_env.frozen(job.spec.environment, state_dir.path)  # so that edits do not change a run in progress
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"environment": environment})})
    how = resumption.find(output, run, found.place, found.status, found.elsewhere) if found.run else None
    notices = [*code.notices, *warnings]
    if how:
        notices = [how.sentence, *_changes(root, state_dir, job, found, code, output), *notices]
    notices += _shell_changes(state_dir, run, job)
    status = found.status or JobStatus(name=job.metadata.name, run=run, submitted=submitted, output=str(output))
    files.replace(state_dir.job, spec.dump(job), durable=True)
    files.replace(output / "job.yaml", spec.dump(output_dir.without_secrets(job)), durable=True)
    Request(job.spec.workers.replicas).write(state_dir)
    _write_pending(state_dir, status, how.short if how else "starting", job.spec.workers.replicas)
    url = found.here.store if found.here else output_dir.store_url(job)
    file = str(wanted.source.absolute())
    Run(run, submitted, file, str(output), str(code.directory), url, generation, owner, wanted.command).write(state_dir)
    _record(output, None if found.run else job, run)
    return run, notices


def resume(state_dir: StateDir, name: str, status: JobStatus) -> list[str]:
    """Prepare a run that goes on with its code and job file unchanged; returns what users should know."""
    run = Run.read(state_dir)
    if status.state.final and not output_dir.resumable(run, state_dir):
        raise OutlastError(f"the output of run {run.run} is gone, or another run has it; `{status.again}` starts job {name} anew")
    run = dataclasses.replace(run, generation=_reset(state_dir, run, status))
    place = stored.reach(run.store) if run.store else None
    if place:
        owner = secrets.token_hex(8)
        stored.unfinished(place, run, ended=None, home=stored.home(state_dir.path))
        new = runs.Run(run.run, name, run.submitted, owner=owner)
        generation = stored.take_over(place, Path(run.output), new, before=run)
        run = dataclasses.replace(run, generation=generation, owner=owner)
    Request.read(state_dir).replaced(state_dir, end="")
    how = resumption.find(Path(run.output), run.run, place, status)
    notices = [how.sentence, *_shell_changes(state_dir, run.run, spec.load(state_dir.job))]
    _write_pending(state_dir, status, how.short, status.replicas)
    run.write(state_dir)
    _record(Path(status.output), None, run.run)
    return notices


def _earlier(state_dir: StateDir, job: spec.Job, wanted: Submission, last: JobStatus | None) -> _Found:
    """What there is of earlier runs, here and in the store. Raises AlreadyRunning when another machine trains the run."""
    ended = Run.read(state_dir) if last and last.state is State.SUCCEEDED else None  # its store may not know that yet
    unfinished = last if not (last and ended) or _longer(state_dir, job, ended, last) else None
    here = Run.read(state_dir) if unfinished else None
    if unfinished and here and (unfinished.state.final or not here.store) and not output_dir.resumable(here, state_dir):
        unfinished = here = None  # its output is gone, or another run has it
    url = here.store if here else output_dir.store_url(job)
    place = stored.reach(url) if url else None
    elsewhere = None
    if place and not wanted.fresh:
        home = stored.home(state_dir.path)
        elsewhere = stored.unfinished(place, here, ended=ended, home=home, take_over=wanted.take_over, say=wanted.say)
    replace = wanted.fresh or (here is None and elsewhere is None and ended is not None)
    return _Found(unfinished, here, elsewhere, place, replace)


def _longer(state_dir: StateDir, job: spec.Job, run: Run, last: JobStatus) -> bool:
    """Whether the job asks a run that has succeeded here for more steps or epochs, and there is a checkpoint to go on from."""
    how = resumption.find(Path(run.output), run.run, None, last)
    return bool(how.step or how.saved) and changes.longer(spec.load(state_dir.job), job, how.step)


def _clear(state_dir: StateDir, job: spec.Job, wanted: Submission, output: Path, run: str) -> list[str]:
    """Make room for a new run in its output and state directories."""
    code = spec.local(spec.pinned(job.spec.code)[0]) if job.spec.code else None
    output_dir.check_apart(output, wanted.source, *([code] if code else []))
    moved = output_dir.make_room(output, run)
    unknown = moved and not wanted.fresh and not state_dir.run.exists()
    state_dir.run.unlink(missing_ok=True)  # first: half a state directory is no job
    if state_dir.path.exists():
        shutil.rmtree(state_dir.path)
    sentence = f"output: {output} held a run that is not known here; it is kept in {moved}, and this one starts anew"
    return [sentence] if unknown else []


def _changes(root: Path, state_dir: StateDir, job: spec.Job, found: _Found, code: code_copy.Copy, output: Path) -> list[str]:
    """What has changed in the job since the run was last submitted."""
    before = state_dir.job if found.here else output / "job.yaml"
    kept = (found.here.store or found.here.output) if found.here else ""
    to = output_dir.store_url(job) or str(output_dir.directory(job, root))
    return list(resumption.since(before, job, code.changed, kept, to))


def _record(output: Path, new: spec.Job | None, run: str) -> None:
    """Write to the ledger that a run was submitted (`new` is its job), or resumed."""
    book = ledger.Ledger(output / contract.LEDGER, "cli")
    if new:
        workers, sizes = new.spec.workers, new.spec.workers.allowed()
        book.write("submitted", run=run, job=new.metadata.name, replicas=workers.replicas, min=sizes[0], max=sizes[-1])
    else:
        book.write("resumed")
    book.close()


def _reset(state_dir: StateDir, run: Run, status: JobStatus) -> int:
    """The newest generation of a run that goes on. If it had ended, its failures, restarts and end are forgotten."""
    found = [run.generation, checkpoints.generation(Path(run.output) / contract.CHECKPOINTS, run.run)]
    if status.state.final:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.append(json.loads(state_dir.recovery.read_text())["generation"])
        state_dir.recovery.unlink(missing_ok=True)
    return max(found)


def _write_pending(state_dir: StateDir, status: JobStatus, reason: str, replicas: int) -> None:
    """Replace the status of how the run ended. Its deadlines count from its next world."""
    pending: dict[str, Any] = dict.fromkeys(("started", "finished", "exit_code", "rate", "snapshot", "launcher"))
    pending |= {"state": State.PENDING, "reason": reason, "waits": "", "end": contract.End.UNKNOWN, "replicas": replicas}
    files.replace(state_dir.status, status.model_copy(update=pending).model_dump_json(), durable=True)


def _shell_changes(state_dir: StateDir, run: str, job: spec.Job) -> list[str]:
    """Record the environment of this shell; what of it has changed since the run was last submitted or resumed."""
    now = resumption.marks(os.environ, run)
    try:
        was = dict(json.loads(state_dir.shell.read_bytes()))
    except (OSError, ValueError, TypeError):  # a new run, or one of an earlier version
        was = {}
    files.replace(state_dir.shell, json.dumps(now))
    return list(resumption.shell(was, now, job.spec.env))


def _with_output(job: spec.Job, root: Path) -> spec.Job:
    """The job with its default output filled in. Raises OutlastError for anything it needs that is missing."""
    prepare.check(job, root / "jobs" / job.metadata.name / prepare.PINS)
    fields = job.spec
    here = spec.local(fields.output) if fields.output else root / "runs"
    output = str(here or fields.output)
    return job.model_copy(update={"spec": fields.model_copy(update={"output": output})})


def _ignore_in_git(root: Path) -> None:
    """Have git ignore the state directory of all jobs, unless it holds anything else."""
    if {entry.name for entry in root.iterdir()} <= {"jobs", "runs"}:
        (root / ".gitignore").write_text("*\n")
