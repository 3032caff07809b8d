"""Prepares a new or resumed run on this machine. `local.backend` then starts the run's launcher. A run exists once `run.json` is
written. Since this file is written last, a submission that is killed half-way leaves the old state in place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.job import contract, ledger, spec
from outlast.job.shipping import code_files
from outlast.job.spec import version_differences
from outlast.job.status import JobStatus, State
from outlast.local import output_dir, resume_messages, store_takeover
from outlast.local.state_dir import Request, Run, StateDir
from outlast.storage import checkpoints, runs
from outlast.storage.store import Store
from outlast.worker.prepare import code_placement, phases, python_env


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job to submit, with its options; see `job.backend.Backend.submit`."""

    job: spec.Job
    source: Path
    fresh: bool
    take_over: bool
    command: str
    say: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Earlier:
    status: JobStatus | None = None
    here: Run | None = None
    """The earlier run, if it was on this machine."""
    elsewhere: runs.Run | None = None
    """The earlier run's record in the store, if another machine began it."""
    place: Store | None = None
    replace: bool = False
    """Whether the run may replace another run at its place in the store."""

    @property
    def run(self) -> Run | runs.Run | None:
        return self.here or self.elsewhere


def submit(root: Path, state_dir: StateDir, request: Submission, last: JobStatus | None) -> tuple[str, list[str]]:
    """Prepare a run in `root`, the directory of all jobs. `last` is the status of the job's last run, or None to ignore that run.
    Returns the run's id, and messages for the user."""
    job = _with_output(request.job, root)
    earlier = _earlier(state_dir, job, request, last)
    new_id = time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)
    run, submitted = (earlier.run.run, earlier.run.submitted) if earlier.run else (new_id, time.time())
    output = Path(earlier.here.output) if earlier.here else output_dir.directory(job, root)
    output_dir.check_unused(output)
    warnings = [] if earlier.here else _clear(state_dir, job, request, output, run)
    generation = _reset(state_dir, earlier.here, earlier.status) if earlier.here and earlier.status else 0
    owner = secrets.token_hex(8)
    if earlier.place:
        new = runs.Run(run, job.metadata.name, submitted, owner=owner)
        generation = store_takeover.take_over(earlier.place, output, new, last=earlier.here, replace=earlier.replace)
    state_dir.path.mkdir(parents=True, exist_ok=True)
    _ignore_in_git(root)
    work = output / contract.WORK
    copy = _copy_code(job, request.source, work, state_dir.path, (root, output), submitted)
    environment = python_env.frozen(job.spec.environment, state_dir.path)  # so that edits do not change a run in progress
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"environment": environment})})
    resumed = resume_messages.find(output, run, earlier.place, earlier.status, earlier.elsewhere) if earlier.run else None
    notices = [*copy.notices, *warnings]
    if resumed:
        notices = [resumed.sentence, *_changes(root, state_dir, job, earlier, copy, output), *notices]
    status = earlier.status or JobStatus(name=job.metadata.name, run=run, submitted=submitted, output=str(output))
    files.replace(state_dir.job, spec.dump(job), durable=True)
    files.replace(output / contract.JOB_FILE, spec.dump(spec.without_secrets(job)), durable=True)
    Request(job.spec.workers.replicas).write(state_dir)
    _write_pending(state_dir, status, resumed.short if resumed else "starting", job.spec.workers.replicas)
    url = earlier.here.store if earlier.here else output_dir.store_url(job)
    file = str(request.source.absolute())
    Run(run, submitted, file, str(output), str(copy.directory), url, generation, owner, request.command).write(state_dir)
    _record(output, None if earlier.run else job, run, copy.digest)
    return run, notices


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A copy of a run's code, unaffected by edits of the original."""

    directory: Path
    changed: tuple[str, ...] = ()
    """Files added or changed since the last submission."""
    notices: tuple[str, ...] = ()
    digest: str = ""


def _copy_code(job: spec.Job, source: Path, into: Path, state: Path, exclude: tuple[Path, ...], submitted: float) -> _Copy:
    """Copy a job's code to its working directory, but not the directories in `exclude`. Without `code`, the job runs in the
    directory of its job file. If the code is in a store, the first worker fetches it."""
    if not job.spec.code:
        return _Copy(source.absolute().parent)
    place, checksum = spec.pinned(job.spec.code)
    path = spec.local(place)
    if path and path.is_dir():
        return _copy_directory(job, path, into, (source, *exclude), submitted)
    into.mkdir(exist_ok=True)
    code_placement.submitted_again(state)
    if path:
        phases.place_code(job, into, state, say=lambda _: None, stop=threading.Event())
    return _Copy(into, digest=checksum)


def _copy_directory(job: spec.Job, path: Path, into: Path, exclude: tuple[Path, ...], submitted: float) -> _Copy:
    """Copy a code directory, except for files that a pod would not get either."""
    listing = code_files.listed(path, code_files.not_code(job.spec, path, exclude), links_out=True)
    entries, ignored, outside = listing.entries, listing.ignored, listing.outside
    code_files.check_script(job.spec, path, {entry.name for entry in entries})
    changed = code_placement.copy(path, entries, into, submitted)
    notices = []
    if listing.withheld:
        notices.append(f"code: {code_files.without_credentials(listing.withheld)}; pods do not get it either")
    if ignored:
        notices.append(
            f"code: without {code_files.some(ignored)}, as .gitignore or .outlastignore says ({code_files.bring_back(ignored)})"
        )
    if outside:
        links = f"links that lead out of {path} ({code_files.some(outside)}) work on this machine, and pods would not have them"
        notices.append(f"code: {links}; name what they lead to under data, or put copies in their place")
    return _Copy(into, tuple(changed), tuple(notices), code_files.digest(into, entries))


def resume(state_dir: StateDir, name: str, status: JobStatus) -> list[str]:
    """Prepare to resume a run with the same code and job file. Returns messages for the user."""
    run = Run.read(state_dir)
    if status.state.final and not output_dir.resumable(run, state_dir):
        raise OutlastError(f"the output of run {run.run} is gone, or another run has it; `{status.again}` starts job {name} anew")
    run = dataclasses.replace(run, generation=_reset(state_dir, run, status))
    place = store_takeover.reach(run.store) if run.store else None
    if place:
        owner = secrets.token_hex(8)
        store_takeover.unfinished(place, run, ended=None, home=store_takeover.home(state_dir.path))
        new = runs.Run(run.run, name, run.submitted, owner=owner)
        generation = store_takeover.take_over(place, Path(run.output), new, last=run)
        run = dataclasses.replace(run, generation=generation, owner=owner)
    Request.read(state_dir).replaced(state_dir, end="")
    resumed = resume_messages.find(Path(run.output), run.run, place, status)
    _write_pending(state_dir, status, resumed.short, status.replicas)
    run.write(state_dir)
    _record(Path(status.output), None, run.run)
    return [resumed.sentence]


def _earlier(state_dir: StateDir, job: spec.Job, request: Submission, last: JobStatus | None) -> _Earlier:
    """Find the earlier run, on this machine and in the store. Raises AlreadyRunning if another machine trains it."""
    ended = Run.read(state_dir) if last and last.state is State.SUCCEEDED else None  # its store may not know yet
    unfinished = last if not (last and ended) or _longer(state_dir, job, ended, last) else None
    here = Run.read(state_dir) if unfinished else None
    if unfinished and here and (unfinished.state.final or not here.store) and not output_dir.resumable(here, state_dir):
        unfinished = here = None  # the output is gone, or another run has it
    url = here.store if here else output_dir.store_url(job)
    place = store_takeover.reach(url) if url else None
    elsewhere = None
    if place and not request.fresh:
        home = store_takeover.home(state_dir.path)
        elsewhere = store_takeover.unfinished(place, here, ended=ended, home=home, take_over=request.take_over, say=request.say)
    replace = request.fresh or (here is None and elsewhere is None and ended is not None)
    return _Earlier(unfinished, here, elsewhere, place, replace)


def _longer(state_dir: StateDir, job: spec.Job, run: Run, last: JobStatus) -> bool:
    """Return whether the job requests more steps or epochs from a run that has succeeded on this machine and has a checkpoint."""
    resumed = resume_messages.find(Path(run.output), run.run, None, last)
    return bool(resumed.step or resumed.saved) and version_differences.longer(spec.load(state_dir.job), job, resumed.step)


def _clear(state_dir: StateDir, job: spec.Job, request: Submission, output: Path, run: str) -> list[str]:
    """Clear the directories for a new run. Returns at most one message, about files from an unknown run."""
    source = spec.local(spec.pinned(job.spec.code)[0]) if job.spec.code else None
    output_dir.check_apart(output, request.source, *([source] if source else []))
    moved = output_dir.make_room(output, run)
    unknown = moved and not request.fresh and not state_dir.run.exists()
    state_dir.run.unlink(missing_ok=True)  # first, since without this file the job does not exist
    if state_dir.path.exists():
        shutil.rmtree(state_dir.path)
    sentence = f"output: {output} held a run that is not known here; it is kept in {moved}, and this one starts anew"
    return [sentence] if unknown else []


def _changes(root: Path, state_dir: StateDir, job: spec.Job, earlier: _Earlier, copy: _Copy, output: Path) -> list[str]:
    old = state_dir.job if earlier.here else output / contract.JOB_FILE
    current = (earlier.here.store or earlier.here.output) if earlier.here else ""
    new = output_dir.store_url(job) or str(output_dir.directory(job, root))
    return list(resume_messages.since(old, job, copy.changed, current, new))


def _record(output: Path, new: spec.Job | None, run: str, digest: str = "") -> None:
    """Record in the ledger that the job `new` was submitted or, if `new` is None, that the run was resumed."""
    book = ledger.Ledger(output / contract.LEDGER, "cli")
    code = {"code_digest": digest} if digest else {}
    if new:
        workers, sizes = new.spec.workers, new.spec.workers.allowed()
        book.write("submitted", run=run, job=new.metadata.name, replicas=workers.replicas, min=sizes[0], max=sizes[-1], **code)
    else:
        book.write("resumed", **code)
    book.close()


def _reset(state_dir: StateDir, run: Run, status: JobStatus) -> int:
    """Return a resumed run's newest generation. If the run had ended, discard its failures, restarts and end."""
    generations = [run.generation, checkpoints.generation(Path(run.output) / contract.CHECKPOINTS, run.run)]
    if status.state.final:
        with contextlib.suppress(OSError, ValueError, KeyError):
            generations.append(json.loads(state_dir.recovery.read_text())["generation"])
        state_dir.recovery.unlink(missing_ok=True)
    return max(generations)


def _write_pending(state_dir: StateDir, status: JobStatus, reason: str, replicas: int) -> None:
    """Replace the ended run's status with a pending one. `activeDeadlineSeconds` counts from the next world."""
    pending: dict[str, Any] = dict.fromkeys(("started", "finished", "exit_code", "rate", "snapshot", "launcher"))
    pending |= {"state": State.PENDING, "reason": reason, "waits": "", "end": contract.End.UNKNOWN, "replicas": replicas}
    files.replace(state_dir.status, status.model_copy(update=pending).model_dump_json(), durable=True)


def _with_output(job: spec.Job, root: Path) -> spec.Job:
    """Check the job, and fill in the default output. Raises OutlastError if something required is missing."""
    phases.check(job, root / "jobs" / job.metadata.name / phases.PINS)
    fields = job.spec
    here = spec.local(fields.output) if fields.output else root / "runs"
    output = str(here or fields.output)
    return job.model_copy(update={"spec": fields.model_copy(update={"output": output})})


def _ignore_in_git(root: Path) -> None:
    """Make git ignore the directory of all jobs, unless it contains more than `jobs` and `runs`."""
    if {entry.name for entry in root.iterdir()} <= {"jobs", "runs"}:
        (root / ".gitignore").write_text("*\n")
