"""Jobs on this machine: submits them to a launcher of their own, reads what it writes, writes what the user wants.

    <state>/jobs/<name>/      see `local.state_dir`
    <output>/<name>/          checkpoints, logs, ledger; what finished runs left is kept in `previous/<time>/`

The command line is the only caller. Nothing here waits for the launcher: wishes are files, so they survive it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outlast import chaos, checkpoints, contract, files, ledger, locks, runs, spec
from outlast.backends import LogLine
from outlast.errors import AlreadyRunning, NotFound, OutlastError
from outlast.launch import daemon
from outlast.local import resumption, stored
from outlast.local.state_dir import Request, Run, StateDir, newest_metrics
from outlast.prepare import code, prepare, python_env
from outlast.runs import output as stored_output
from outlast.spec import references
from outlast.status import JobStatus, State, WorkerStatus

_LOOK_S = 0.1
_PIECE = 1 << 20
"""Bytes of a log that are read at a time."""
_STARTING_S = 10.0
"""How long a launcher may take until it holds its lock: Python starts slowly on a busy machine."""
_DYING_S = 2.0
"""How long the lock of an output may outlive the launcher that held it."""
_LEAVING_S = 300.0
"""How long a launcher may take to leave: its workers save, and it reads the whole ledger once more, for the goodput."""
_SILENT_S = 1.0
"""After so long it is said that it is awaited."""


class LocalBackend:
    """The backend of this machine; `state` is usually `.outlast` in the working directory.

    `start` starts a command that outlives us, its output appended to a file.
    """

    look_s = 0.3

    def __init__(self, state: Path, *, start: Callable[[Sequence[str], Path], None] = daemon.start) -> None:
        self._state = state.absolute()
        self._start = start
        self.notices: list[str] = []
        """What people should know of the job that was submitted last, beside that it runs."""

    # Submitting

    def submit(
        self,
        job: spec.Job,
        *,
        source: Path,
        chaos: Path | None = None,
        fresh: bool = False,
        take_over: bool = False,
        command: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Start a job, or go on with its run unless that has succeeded; the run's id."""
        state_dir = self._state_dir(job.metadata.name)
        self._not_running(state_dir)
        if job.spec.suspend:
            raise OutlastError("suspend is true in the job file; set it to false to train")
        if not job.spec.workers.replicas:
            raise OutlastError("workers.replicas is 0, which trains nothing; say how many, e.g. with --workers 1")
        placed = _placed(job, self._state)
        unfinished = None if fresh else self._unfinished(state_dir)
        before = Run.read(state_dir) if unfinished else None
        if unfinished and before and (unfinished.state.final or not before.store) and not _ours(before, state_dir):
            unfinished = before = None  # its output is gone, or another run has it
        url = before.store if before else _store(placed)
        place = stored.reach(url) if url else None
        elsewhere = ended = None
        if place and not fresh:
            home, ended = stored.home(state_dir.path), self._ended(state_dir)
            elsewhere = stored.unfinished(place, before, ended=ended, home=home, take_over=take_over, say=say)
        earlier = before or elsewhere
        run_id, submitted = (earlier.run, earlier.submitted) if earlier else (_new_run_id(), time.time())
        output = Path(before.output) if before else _output(placed, self._state)
        _unused(output)
        displaced = ""
        if before is None:
            code_here = spec.local(spec.pinned(placed.spec.code)[0]) if placed.spec.code else None
            _apart(output, source, *([code_here] if code_here else []))
            moved = _make_room(output, run_id)
            if moved and not fresh and not state_dir.run.exists():
                displaced = f"output: {output} held a run that is not known here; it is kept in {moved}, and this one starts anew"
            state_dir.run.unlink(missing_ok=True)  # first: half a state directory is no job
            if state_dir.path.exists():
                shutil.rmtree(state_dir.path)
        generation = _afresh(state_dir, before, unfinished) if before and unfinished else 0
        owner = secrets.token_hex(8)
        if place:
            new = runs.Run(run_id, job.metadata.name, submitted, owner=owner)
            replace = fresh or (earlier is None and ended is not None)
            generation = stored.take_over(place, output, new, before=before, replace=replace)
        state_dir.path.mkdir(parents=True, exist_ok=True)
        _ignored_by_git(self._state)
        if before:
            _brought_over(Path(before.code), state_dir.path, output / contract.WORK)
        code, changed, self.notices = _snapshot(
            placed, source, output / contract.WORK, state_dir.path, (self._state, output), submitted
        )
        placed = _frozen(placed, state_dir.path)
        how = resumption.look(output, run_id, place, unfinished, elsewhere) if earlier else None
        if how:
            old = state_dir.job if before else output / "job.yaml"
            kept = (before.store or before.output) if before else ""
            to = _store(placed) or str(_output(placed, self._state))
            self.notices = [how.sentence, *resumption.since(old, placed, changed, kept, to), *self.notices]
        self.notices += [*filter(None, [displaced]), *_shell(state_dir, run_id, placed)]
        files.replace(state_dir.job, spec.dump(placed), durable=True)
        files.replace(output / "job.yaml", spec.dump(_without_secrets(placed)), durable=True)
        Request(placed.spec.workers.replicas).write(state_dir)
        workers = placed.spec.workers
        status = unfinished or JobStatus(name=job.metadata.name, run=run_id, submitted=submitted, output=str(output))
        _show_pending(state_dir, status, how.short if how else "starting", workers.replicas)
        Run(run_id, submitted, str(source.absolute()), str(output), str(code), url, generation, owner, command).write(state_dir)
        book = ledger.Ledger(output / contract.LEDGER, "cli")
        if before is None and elsewhere is None:
            book.write(
                "submitted",
                run=run_id,
                job=job.metadata.name,
                replicas=workers.replicas,
                min=workers.allowed()[0],
                max=workers.allowed()[-1],
            )
        else:
            book.write("resumed")
        book.close()
        self._launch(state_dir)
        if chaos is not None:
            self._strike(job.metadata.name, chaos)
        return run_id

    def ensure(self, name: str) -> bool:
        """Start a launcher if the job is unfinished and has none, nor one that still starts."""
        state_dir = self._known(name)
        status = self._read(state_dir)
        if not status.state.active or state_dir.has_launcher():
            return False
        if status.launcher is None and _starting(state_dir):
            return False
        self._launch(state_dir)
        return True

    def _not_running(self, state_dir: StateDir) -> None:
        """Raise AlreadyRunning if a launcher has the job; one that ends, or whose workers were told to leave, is awaited."""
        began, name, told = time.monotonic(), state_dir.path.name, False
        while state_dir.has_launcher():
            over = state_dir.run.exists() and (self._read(state_dir).finished is not None or Request.read(state_dir).end)
            waited = time.monotonic() - began
            if not over or waited > _LEAVING_S:
                raise AlreadyRunning(f"job {name} is running; `outlast status {name}` shows it, `outlast cancel {name}` ends it")
            if waited > _SILENT_S and not told:
                print(f"outlast | waiting for the workers of {name} to leave", file=sys.stderr, flush=True)
                told = True
            time.sleep(0.02)

    def _launch(self, state_dir: StateDir) -> None:
        self._start([sys.executable, "-m", "outlast.local.launcher", str(state_dir.path)], state_dir.log)

    def _strike(self, name: str, schedule: Path) -> None:
        """Carry out a chaos schedule beside the run, in a process of its own."""
        argv = [sys.executable, "-m", "outlast.local.fault_schedule", str(self._state), name, str(schedule.absolute())]
        self._start(argv, self._state_dir(name).log)

    # Looking

    def list(self) -> Sequence[JobStatus]:
        """All jobs known here, the newest last; one whose files are damaged says so as its reason."""
        found = []
        for path in (self._state / "jobs").glob("*/run.json"):
            name = path.parent.name
            try:
                found.append(self.status(name))
            except NotFound:  # it is being submitted again
                continue
            except OutlastError as problem:
                found.append(JobStatus(name=name, run="", state=State.INTERRUPTED, reason=str(problem), submitted=_written(path)))
        return sorted(found, key=lambda status: status.submitted)

    def status(self, name: str) -> JobStatus:
        """Where a job stands now."""
        state_dir = self._known(name)
        status = self._read(state_dir)
        if not status.state.active or state_dir.has_launcher():
            return status
        if any(worker.pid and state_dir.owns(worker.index, worker.pid) for worker in status.workers):
            reason = "the launcher is gone; its workers train on and will start it again"
            return status.model_copy(update={"launcher": None, "reason": reason})
        if _starting(state_dir):
            return status
        reason = f"all its processes are gone; `outlast run` goes on{status.from_step}"
        return status.model_copy(
            update={"state": State.INTERRUPTED, "reason": reason, "launcher": None, "workers": [], "world": []}
        )

    def output(self, name: str) -> Path:
        """The job's output directory."""
        return Path(Run.read(self._known(name)).output)

    def events(self, name: str) -> ledger.Events:
        """The ledger of the job's run."""
        return ledger.read(self.output(name) / contract.LEDGER)

    def logs(
        self,
        name: str,
        *,
        worker: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since_s: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """The workers' log lines, see the Protocol. Their times are not known: what is there already comes one worker after the
        other, and `since_s` is refused."""
        if since_s is not None:
            raise OutlastError(
                f"{name} runs on this machine, where lines of logs have no times; use --tail N in place of --since"
            )
        run = Run.read(self._known(name))
        directory = Path(run.output) / contract.LOGS
        if run.store and not directory.is_dir() and self._over(name):
            yield from stored_output.logs(run.store, worker=worker, tail=tail)
            return
        files: dict[int, _Tail] = {}
        while True:
            over = not follow or self._over(name)
            there = _logs(directory)
            if worker is None and not files and tail != 0 and len(there) > 1:
                say("one worker after the other up to now, since lines of logs on this machine have no times")
            for index, path in sorted(there.items()):
                if index not in files and worker in (None, index):
                    files[index] = _Tail(path, tail)
            for index, file in files.items():
                yield from (LogLine(index, text) for text in file.lines(rest=over))
            if over:
                break
            time.sleep(_LOOK_S)
        if worker is not None and not files:
            have = f"there are those of {', '.join(map(str, sorted(there)))}" if there else "no worker has begun"
            raise NotFound(f"{name} has no log of worker {worker}; {have}")
        for file in files.values():
            file.close()

    def _over(self, name: str) -> bool:
        return not self.status(name).state.active

    # Wishes

    def scale(self, name: str, replicas: int) -> None:
        """Wish for another number of workers."""
        state_dir = self._active(name)
        workers = spec.load(state_dir.job).spec.workers
        allowed = workers.allowed()
        if not replicas:
            raise OutlastError(f"0 workers train nothing; outlast suspend {name} saves, and holds the job until outlast resume")
        if replicas not in allowed:
            every = len(allowed) == allowed[-1] - allowed[0] + 1
            sizes = f"{allowed[0]} to {allowed[-1]}" if every else ", ".join(map(str, allowed))
            fixed = (
                f"the number is fixed at {allowed[0]}"
                if len(allowed) == 1
                else f"the job allows {sizes} (workers.min, max, sizes)"
            )
            said = f"{replicas} worker{'s are' if replicas > 1 else ' is'} not allowed; {fixed}"
            bound = "min" if replicas < allowed[0] else "max" if replicas > allowed[-1] else ""
            remedy = f"; to change that, suspend it and run it again with --set workers.{bound}={replicas}" if bound else ""
            raise OutlastError(said + remedy)
        self._request(state_dir, replicas=replicas)

    def suspend(self, name: str) -> None:
        """Save and give the workers back until `resume`."""
        self._request(self._active(name), end="suspend")

    def interrupt(self, name: str) -> None:
        """Save and leave."""
        self._request(self._active(name), end="interrupt")

    def resume(self, name: str) -> None:
        """Go on with a job that was suspended, interrupted or cancelled, or that failed, with its code and file as they were."""
        state_dir = self._known(name)
        self._not_running(state_dir)
        status = self.status(name)
        if status.state is State.SUCCEEDED:
            raise OutlastError(f"job {name} has succeeded; `{status.again}` starts it anew")
        run = Run.read(state_dir)
        if status.state.final and not _ours(run, state_dir):
            raise OutlastError(
                f"the output of run {run.run} is gone, or another run has it; `{status.again}` starts job {name} anew"
            )
        run = dataclasses.replace(run, generation=_afresh(state_dir, run, status))
        if run.store:
            place, owner = stored.reach(run.store), secrets.token_hex(8)
            stored.unfinished(place, run, ended=None, home=stored.home(state_dir.path))
            new = runs.Run(run.run, name, run.submitted, owner=owner)
            generation = stored.take_over(place, Path(run.output), new, before=run)
            run = dataclasses.replace(run, generation=generation, owner=owner)
        self._request(state_dir, end="")
        how = resumption.look(Path(run.output), run.run, stored.reach(run.store) if run.store else None, status)
        self.notices = [how.sentence, *_shell(state_dir, run.run, spec.load(state_dir.job))]
        _show_pending(state_dir, status, how.short, status.replicas)
        run.write(state_dir)
        book = ledger.Ledger(Path(status.output) / contract.LEDGER, "cli")
        book.write("resumed")
        book.close()
        self._launch(state_dir)

    def cancel(self, name: str) -> None:
        """End the run; what is saved stays, and `submit` goes on from there."""
        self._end(name, "cancel", State.CANCELLED, "cancelled by the user")

    def kill(self, name: str) -> None:
        """End every process of the job now."""
        self._end(name, "kill", State.INTERRUPTED, "killed by the user")

    def _end(self, name: str, how: str, state: State, reason: str) -> None:
        state_dir = self._known(name)
        if self._read(state_dir).state.final:
            raise OutlastError(f"job {name} has ended already ({self._read(state_dir).state})")
        self._request(state_dir, end=how)
        if state_dir.has_launcher():
            return
        for worker in self._read(state_dir).workers:
            with contextlib.suppress(ProcessLookupError):
                if worker.pid and state_dir.owns(worker.index, worker.pid):
                    os.killpg(worker.pid, signal.SIGKILL)
        update: dict[str, object] = {
            "state": state,
            "reason": reason,
            "workers": [],
            "world": [],
            "launcher": None,
            "finished": time.time(),
        }
        files.replace(state_dir.status, self._read(state_dir).model_copy(update=update).model_dump_json())
        book = ledger.Ledger(self.output(name) / contract.LEDGER, "cli")
        book.write("finished", state=str(state), reason=reason, step=self._read(state_dir).step, code=contract.Exit.FAILED)
        book.close()
        run = Run.read(state_dir)
        if run.store and state.final and (problem := stored.end(run, state, reason, contract.Exit.FAILED)):
            raise OutlastError(f"job {name} is {str(state).lower()} here, but {run.store} does not say so: {problem}")

    def forget(self, name: str, *, output: bool = False) -> None:
        """Remove the state of a job that has ended, and with `output` its output on this machine.

        What is in a store stays. Raises OutlastError for a job that has not ended, or whose output another job uses.
        """
        state_dir = self._known(name)
        status = self.status(name)
        if not status.state.final:
            raise OutlastError(f"job {name} has not ended ({status.state}); outlast cancel {name} ends it")
        self._not_running(state_dir)
        there = Path(Run.read(state_dir).output)
        if output:
            _unused(there)
            if whose := _taken(there, state_dir):
                raise OutlastError(f"output {there} is that of the job in {whose} now; forget {name} without --output")
        try:
            state_dir.run.unlink()  # first: half a state directory is no job
            shutil.rmtree(state_dir.path)
            if output and there.exists():
                shutil.rmtree(there.resolve())
        except OSError as problem:
            raise OutlastError(f"{problem.filename} cannot be removed: {problem.strerror}; remove it yourself") from problem

    def kept(self, name: str) -> tuple[Path, Path, str]:
        """Where what is kept of a job lies: its state, its output, and the URL of that in its store or an empty one."""
        state_dir = self._known(name)
        run = Run.read(state_dir)
        return state_dir.path, Path(run.output), run.store

    def _request(self, state_dir: StateDir, **changes: object) -> None:
        dataclasses.replace(Request.read(state_dir), **changes).write(state_dir)  # type: ignore[arg-type]

    # Harm

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        """Do one of `chaos.ACTIONS` and say what was done."""
        chaos.check(action)
        status, state_dir = self.status(name), self._known(name)
        target = _target(status, worker, rng, needs_process=action in ("kill-process", "stop", "slow"))
        number = {"kill-process": signal.SIGKILL, "kill-worker": signal.SIGKILL, "stop": signal.SIGSTOP}
        number |= {"term": signal.SIGTERM, "evict": signal.SIGTERM}
        if action in ("kill-worker", "term", "evict"):
            pid, whom = target.pid, f"worker {target.index}"
        else:
            rank = rng.choice(target.ranks)
            pid, whom = rank.pid, f"rank {rank.rank} on worker {target.index}"
        assert pid is not None
        gone = OutlastError(f"{whom} (pid {pid}) is gone already")
        if not state_dir.owns(target.index, pid):
            raise gone
        book = ledger.Ledger(Path(status.output) / contract.LEDGER, "chaos")
        book.write("chaos", action=action, worker=target.index, pid=pid)
        book.close()
        try:
            if action == "slow":
                _slow(pid)
            else:
                os.kill(pid, number[action])
        except ProcessLookupError:
            raise gone from None
        verb = {"term": "terminated", "evict": "terminated", "stop": "stopped", "slow": "slowed down"}
        return f"{verb.get(action, 'killed')} {whom} (pid {pid}) at step {status.step}"

    # Evaluation

    def evaluate(self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda _: None) -> int:
        """Run the job's module with `--evaluate` in one process of this terminal."""
        state_dir = self._known(name)
        job = spec.load(state_dir.job)
        run = Run.read(state_dir)
        environ = {
            **os.environ,
            contract.Env.JOB: name,
            contract.Env.RUN: run.run,
            contract.Env.OUTPUT: run.output,
            contract.Env.CODE: run.code,
            contract.Env.STATE: str(state_dir.path),
            contract.Env.SHARED: str(state_dir.path),
        }
        environ |= references.values(job.spec.env, environ)
        preparation = prepare.Preparation(job, environ, say=lambda text: print(f"outlast | {text}", file=sys.stderr, flush=True))
        try:
            preparation.prepare()
            del environ[contract.Env.STATE]  # it is no worker
            command = [preparation.python, *prepare.command(job, environ), "--evaluate", *args]
            return subprocess.run(command, env=environ, cwd=run.code, check=False).returncode
        finally:
            preparation.close()

    # StateDir

    def _state_dir(self, name: str) -> StateDir:
        return StateDir(self._state / "jobs" / name)

    def _known(self, name: str) -> StateDir:
        state_dir = self._state_dir(name)
        if not state_dir.run.exists():
            raise NotFound(f"no job {name!r} in {self._state}; `outlast list` shows those there are")
        return state_dir

    def _active(self, name: str) -> StateDir:
        state_dir = self._known(name)
        if self._over(name):
            raise OutlastError(
                f"job {name} does not run ({self.status(name).state}); `outlast run` or `outlast resume` starts it"
            )
        return state_dir

    def _read(self, state_dir: StateDir) -> JobStatus:
        """What the launcher wrote last. Where nothing is, the run may still be gone on with."""
        run = Run.read(state_dir)
        try:
            file = run.file if Path(run.file).exists() else ""
            return JobStatus.model_validate_json(state_dir.status.read_bytes()).model_copy(
                update={"file": file, "command": run.command, "metrics": newest_metrics(Path(run.output))}
            )
        except FileNotFoundError:
            lost = "its status is lost; `outlast run` goes on from the newest checkpoint"
            name = state_dir.path.name
            return JobStatus(
                name=name, run=run.run, state=State.INTERRUPTED, reason=lost, submitted=run.submitted, output=run.output
            )
        except (OSError, ValueError) as problem:
            remedy = "remove it and `outlast run` goes on from the newest checkpoint"
            raise OutlastError(f"{state_dir.status} is empty, damaged or may not be read; {remedy}") from problem

    def _ended(self, state_dir: StateDir) -> Run | None:
        """The run that has succeeded here, if one has: its store may not know that yet."""
        return Run.read(state_dir) if state_dir.run.exists() and self._read(state_dir).state is State.SUCCEEDED else None

    def _unfinished(self, state_dir: StateDir) -> JobStatus | None:
        if not state_dir.run.exists():
            return None
        status = self._read(state_dir)
        return None if status.state is State.SUCCEEDED else status


def _logs(directory: Path) -> dict[int, Path]:
    """The workers' logs. Other files may lie beside them."""
    found = (re.fullmatch(r"worker-(\d+)\.log", path.name) for path in directory.glob("worker-*.log"))
    return {int(named[1]): directory / named[0] for named in found if named}


class _Tail:
    """Reads the lines that are appended to a file."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        self._begun: list[bytes] = []
        """Of a line that has not ended."""
        if last is not None:
            self._file.seek(self._before(last))

    def lines(self, *, rest: bool) -> Iterator[str]:
        """The whole lines that are there now; with `rest` also an unfinished last one."""
        while piece := self._file.read(_PIECE):
            first, *others = piece.split(b"\n")
            self._begun.append(first)
            if others:
                for line in (b"".join(self._begun), *others[:-1]):
                    yield line.decode(errors="replace")
                self._begun = others[-1:]
        if rest and (line := b"".join(self._begun)):
            self._begun = []
            yield line.decode(errors="replace")

    def _before(self, last: int) -> int:
        """Where the last lines begin."""
        start = end = self._file.seek(0, os.SEEK_END)
        found = 0
        while start and last:
            start, cut = max(0, start - _PIECE), min(start, _PIECE)
            self._file.seek(start)
            piece = self._file.read(cut)
            while (cut := piece.rfind(b"\n", 0, cut)) >= 0:
                found += start + cut + 1 < end  # what comes after the last newline is a line if there is anything
                if found == last:
                    return start + cut + 1
        return start if last else end

    def close(self) -> None:
        self._file.close()


def _target(status: JobStatus, worker: int | None, rng: random.Random, *, needs_process: bool) -> WorkerStatus:
    found = [w for w in status.workers if worker in (None, w.index)]
    if worker is not None and not found:
        there = ", ".join(str(w.index) for w in status.workers)
        raise NotFound(f"{status.name} has no worker {worker}; {f'there are {there}' if there else 'no worker runs now'}")
    alive = [w for w in found if w.pid and (w.ranks or not needs_process)]
    if not alive:
        if worker is None:
            lack = f"no worker {'has a training process' if needs_process else 'runs'}"
        else:
            lack = f"worker {worker} {'has no training process' if needs_process else 'does not run'}"
        remedy = f"it has ended; start it with: {status.again}" if status.state.final else "wait until it trains"
        raise OutlastError(f"{lack} now ({status.name} is {status.state}); {remedy}")
    return rng.choice(alive)


def _slow(pid: int) -> None:
    turns, stopped_s, running_s = chaos.SLOW
    try:
        for _ in range(turns):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _shell(state_dir: StateDir, run: str, job: spec.Job) -> list[str]:
    """Remember the shell that takes up a run; what the training had from the last one and will miss."""
    now = resumption.marks(os.environ, run)
    try:
        was = dict(json.loads(state_dir.shell.read_bytes()))
    except (OSError, ValueError, TypeError):  # a new run, or one of an earlier version
        was = {}
    files.replace(state_dir.shell, json.dumps(now))
    return list(resumption.shell(was, now, job.spec.env))


def _new_run_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)


def _starting(state_dir: StateDir) -> bool:
    """Whether the run was submitted or resumed so lately that its launcher may not hold its lock yet."""
    return abs(time.time() - state_dir.started_at()) < _STARTING_S


def _placed(job: spec.Job, state: Path) -> spec.Job:
    """The job with its default output filled in; raises OutlastError for what it needs and is not there."""
    prepare.check(job, state / "jobs" / job.metadata.name / prepare.PINS)
    fields = job.spec
    here = spec.local(fields.output) if fields.output else state / "runs"
    output = str(here or fields.output)
    return job.model_copy(update={"spec": fields.model_copy(update={"output": output})})


def _frozen(job: spec.Job, state: Path) -> spec.Job:
    """The job with a copy of its requirements in `state`, so that editing them does not change a run on its way."""
    environment_ = python_env.frozen(job.spec.environment, state)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"environment": environment_})})


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def _without_secrets(job: spec.Job) -> spec.Job:
    """The job as it may be read by whoever reads the output."""
    env = {name: "(not kept)" if _SECRET.search(name) else value for name, value in job.spec.env.items()}
    return job.model_copy(update={"spec": job.spec.model_copy(update={"env": env})})


def _show_pending(state_dir: StateDir, status: JobStatus, reason: str, replicas: int) -> None:
    """Tell of a run that is taken up, and no longer of how it left. Its deadlines count from its next world."""
    pending = {
        "state": State.PENDING,
        "reason": reason,
        "replicas": replicas,
        "started": None,
        "finished": None,
        "exit_code": None,
        "rate": None,
        "launcher": None,
    }
    files.replace(state_dir.status, status.model_copy(update=pending).model_dump_json(), durable=True)


def _afresh(state_dir: StateDir, run: Run, status: JobStatus) -> int:
    """The newest generation of a run that is taken up. If it had ended, what counted against it is forgotten: its failures, its
    restarts and its end."""
    found = [run.generation, checkpoints.generation(Path(run.output) / contract.CHECKPOINTS, run.run)]
    if status.state.final:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.append(json.loads(state_dir.recovery.read_text())["generation"])
        state_dir.recovery.unlink(missing_ok=True)
    return max(found)


def _store(job: spec.Job) -> str:
    """The URL of the job's output in a store; empty when the output is a directory of this machine."""
    place = str(job.spec.output)
    return f"{place.rstrip('/')}/{job.metadata.name}" if spec.local(place) is None else ""


def _output(job: spec.Job, state: Path) -> Path:
    """The directory of this machine that the job writes to."""
    return (spec.local(str(job.spec.output)) or state / "runs") / job.metadata.name


def _unused(output: Path) -> None:
    """Raise AlreadyRunning when a launcher with its state elsewhere drives a job of this output; one that dies gets a moment."""
    deadline = time.monotonic() + _DYING_S
    while not _free(output):
        if time.monotonic() > deadline:
            whose = (output / contract.OWNER).read_text() or "another launcher"
            raise AlreadyRunning(
                f"output {output} is in use by the job in {whose}; end it there, or give this job another name or output"
            )
        time.sleep(_LOOK_S)


def _ours(run: Run, state_dir: StateDir) -> bool:
    """Whether a run that was left can go on: see `stored.ours`, and no job with its state elsewhere has had its output since."""
    return stored.ours(run) and not _taken(Path(run.output), state_dir)


def _taken(output: Path, state_dir: StateDir) -> str:
    """The state directory of another job that was the last to train in an output; empty if it was this one, or nobody. One that
    is not there may be ours, before it was moved."""
    try:
        whose = (output / contract.OWNER).read_text()
    except FileNotFoundError:
        return ""
    return whose if whose and Path(whose).exists() and Path(whose).resolve() != state_dir.path.resolve() else ""


def _free(output: Path) -> bool:
    try:
        return locks.free(output / contract.OWNER)
    except OSError as problem:
        raise _unwritable(output, problem) from problem


def _ignored_by_git(state: Path) -> None:
    """Have git ignore the directory of our state, unless it holds anything that is not ours."""
    if {entry.name for entry in state.iterdir()} <= {"jobs", "runs"}:
        (state / ".gitignore").write_text("*\n")


def _unwritable(output: Path, problem: OSError) -> OutlastError:
    why = problem.strerror or problem
    return OutlastError(f"output: cannot write to {output}: {why}; choose another directory or mend its rights")


def _apart(output: Path, *sources: Path) -> None:
    """Raise OutlastError when the output, which is emptied for a new run, holds the job's file or its code."""
    for path in sources:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise OutlastError(
                f"output: {output}, the job's name below output, holds {path}; give the job another name or another output"
            )


def _make_room(output: Path, run: str) -> Path | None:
    """An output directory for `run`; what an earlier one left there, its working directory included, is moved to `previous/`.
    Returns where that is kept, None if there was nothing."""
    kept = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        if checkpoints.generation(output / contract.CHECKPOINTS, run):
            return None  # it is the run's own: only what this machine knew of it is lost
        earlier = [entry for entry in output.iterdir() if entry.name != "previous"]
        if earlier:
            kept = output / "previous" / time.strftime("%Y%m%d-%H%M%S", time.gmtime(output.stat().st_mtime))
            while kept.exists():
                kept = kept.with_name(kept.name + "+")
            kept.mkdir(parents=True)
            for entry in earlier:
                shutil.move(entry, kept / entry.name)
        (output / contract.LEDGER).mkdir(exist_ok=True)
    except OSError as problem:
        raise _unwritable(output, problem) from problem
    return kept


def _snapshot(
    job: spec.Job, source: Path, into: Path, state: Path, not_code: Sequence[Path], submitted: float
) -> tuple[Path, list[str], list[str]]:
    """The directory that the job runs in, a copy of `code`, so that editing it does not change a run on its way; the files of
    it that are new or different, and what people should know of those that are not in it.

    Code in a store is brought there by the first worker. Without `code` the job runs where the job file lies.
    """
    if not job.spec.code:
        return source.absolute().parent, [], []
    place, _ = spec.pinned(job.spec.code)
    path = spec.local(place)
    if path and path.is_dir():
        return into, *_copied(job, path, into, (source, *not_code), submitted)
    into.mkdir(exist_ok=True)
    code.submitted_again(state)
    if path:
        prepare.place_code(job, into, state, say=lambda _: None, stop=threading.Event())
    return into, [], []


def _brought_over(code: Path, state: Path, work: Path) -> None:
    """Move the working directory of a run that was begun before it was in the output."""
    if code.parent == state and code.is_dir() and not work.exists():
        shutil.move(code, work)


def _copied(job: spec.Job, path: Path, into: Path, not_code: Sequence[Path], submitted: float) -> tuple[list[str], list[str]]:
    """Copy a directory of code, as pods would get it; the files that are new or different, and what to say of others."""
    from outlast.shipping import tree

    withheld: list[str] = []
    ignored: list[str] = []
    outside: list[str] = []
    but = tree.not_code(job.spec, path, not_code)
    entries = tree.listed(path, but, withheld=withheld.append, ignored=ignored.append, outside=outside.append)
    tree.check_script(job.spec, path, {entry.name for entry in entries})
    changed = code.copy(path, entries, into, submitted)
    notices = []
    if withheld:
        notices.append(f"code: {tree.without_credentials(withheld)}; pods do not get it either")
    if ignored:
        said = f"without {tree.some(ignored)}, as .gitignore or .outlastignore says ({tree.bring_back(ignored)})"
        notices.append(f"code: {said}")
    if outside:
        said = f"links that lead out of {path} ({tree.some(outside)}) work on this machine, and pods would not have them"
        notices.append(f"code: {said}; name what they lead to under data, or put copies in their place")
    return changed, notices


def _written(path: Path) -> float:
    return path.stat().st_mtime
