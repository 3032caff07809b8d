"""A worker's agent: the worker's first process on this machine, or its second in a pod (`agent.pid1`).

The agent imports no torch, and outlives all processes that it starts. It carries out the decisions of `agent.lifecycle`, trains
in successive worlds (`agent.world_loop`, in a thread), and exits with a code from `contract.Exit`. Its state on disk
(`worker.json`) is replaced atomically, so the agent may be killed between any two lines.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from outlast.base import probes
from outlast.base.clock import Awake
from outlast.base.errors import OutlastError, Superseded
from outlast.job import contract, sealed_lines
from outlast.job.ledger import Ledger
from outlast.job.workerfiles import notice_file, progress_file, time_left
from outlast.job.workerfiles.log_pipe import Output
from outlast.rendezvous.transport import Mode
from outlast.rendezvous.transports import leave_orders
from outlast.worker.agent import (
    coordination,
    kubeflow_status,
    lifecycle,
    ranks,
    reporter,
    upload_supervisor,
    world_loop,
)
from outlast.worker.agent.launcher_watch import LauncherWatch
from outlast.worker.agent.lifecycle import Phase
from outlast.worker.hangs import hang_limit, stacks
from outlast.worker.launch import bytecode, package_copy, sibling, warm_supervisor

if TYPE_CHECKING:
    from outlast.job import spec
    from outlast.storage.snapshots.server import Query
    from outlast.storage.snapshots.server import Server as Snapshots
    from outlast.worker.agent import join_run

LOOK_INTERVAL_S = 0.1
LEAST_S = 1.0
"""Minimum time for leaving, in seconds, even after the deadline, since the sender's clock may be ahead."""
PREPARATION_STOP_TIMEOUT_S = 5.0


class Agent:
    """One worker's agent. `warm` is None if the warm process must wait for the job's own Python environment."""

    def __init__(
        self,
        warm: subprocess.Popen[bytes] | sibling.Forked | None,
        job: spec.Job,
        environ: dict[str, str],
        log: Output,
        clock: Awake | None = None,
    ) -> None:
        self.job, self.environ = job, environ
        self.index = int(environ[contract.Env.WORKER])
        self.state = Path(environ[contract.Env.STATE])
        self.output = Path(environ[contract.Env.OUTPUT])
        self.notice = Path(environ[contract.Env.NOTICE])
        self.processes = job.spec.processes()
        self.hang_limit_s = job.spec.hang.limit.total_seconds()
        self.worker = lifecycle.Worker(stay=environ.get(contract.Env.STAY) == "1")
        self.clock = clock or Awake()
        self.exit: lifecycle.Exit | None = None
        self.coordination = coordination.Coordination(job, environ, lost=self._superseded, broken=self._coordination_broke)
        self.reporter = reporter.Reporter(self.state, log, self.hang_limit_s, pod=contract.Env.ADDRESS in environ)
        self._status_server = kubeflow_status.StatusServer(environ, self.output)
        self._looked_at = self.clock()
        self._kill_at = float("inf")
        """Time at which training is killed if it has not left by then."""
        self._warm = warm_supervisor.WarmProcess(environ, warm)
        self._stop_preparing = threading.Event()
        from outlast.worker.prepare import phases

        self._preparation = phases.Preparation(job, environ, stop=self._stop_preparing)
        self._preparing: threading.Thread | None = None
        self._loop: world_loop.WorldLoop | None = None
        self._events: queue.SimpleQueue[lifecycle.Event] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._log = log
        self._store = environ.get(contract.Env.STORE, "")
        self._upload = upload_supervisor.UploadProcess(environ)
        self._snapshots: Snapshots | None = None
        self._launcher = LauncherWatch(environ)
        self._signalled = threading.Event()
        self._printed_end: tuple[int | None, str] = (None, "")
        """Exit code and reason in the log's last line, once printed."""
        self._ranks = ranks.Ranks(self.state, self.processes, self.clock)
        labels = {"job": job.metadata.name, "worker": str(self.index)}
        port = int(environ.get(contract.Env.PROBE_PORT, "0"))
        host = "" if contract.Env.ADDRESS in environ else "127.0.0.1"
        self._orders = leave_orders.Orders(sealed_lines.key(environ), worker=self.index, since=time.time())
        handlers = {leave_orders.PATH: self._ordered}
        metrics = functools.partial(self.reporter.exposition, labels)
        self.reporter.probes = probes.serve(lambda: self.reporter.health, metrics, host=host, port=port, orders=handlers)

    @property
    def launched_here(self) -> bool:
        """True if this machine's launcher owns the run."""
        return self.coordination.mode is Mode.LAUNCHER

    def run(self) -> lifecycle.Exit:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self.notice.unlink(missing_ok=True)
        self._ranks.forget()
        if self._warm and (warning := bytecode.warning(image=contract.Env.ADDRESS in self.environ)):
            print(f"outlast | {warning}", flush=True)
        self._happened(lifecycle.Started())
        while self.exit is None:
            self._wait()
            while not self._events.empty():
                self._happened(self._events.get())
            self._look()
        self._shut_down(self.exit)
        return self._stay(self.exit) if self.exit.stay else self.exit

    def _shut_down(self, end: lifecycle.Exit) -> None:
        self.reporter.write("done" if end.code == contract.Exit.DONE else "gone", self.worker, self._upload, code=end.code)
        self._stop_preparing.set()
        self._warm.kill()
        if end.code != contract.Exit.INTERRUPTED:
            self._status_server.end(done=end.code == contract.Exit.DONE)
        self._warm.wait()
        if self._preparing:
            self._preparing.join(PREPARATION_STOP_TIMEOUT_S)  # the thread ends its child processes
        if self._snapshots:
            self._snapshots.close()
        self.coordination.close()

    def _stay(self, end: lifecycle.Exit) -> lifecycle.Exit:
        """Answer probes until the pod is deleted."""
        print(f"outlast | worker {self.index} {contract.STAYS}", flush=True)
        answer = self.coordination.end_for_others(end.code)
        self.reporter.stays(end.reason, answer, done=end.code == contract.Exit.DONE)
        self._signalled.wait()
        return lifecycle.Exit(contract.Exit.DONE, end.reason)

    @functools.cached_property
    def ledger(self) -> Ledger:
        """This agent's ledger, opened only after its earlier lines have been fetched from the store."""
        return Ledger(self.output / contract.LEDGER, f"agent-{self.index}")

    # Effects

    def _happened(self, event: lifecycle.Event) -> None:
        if event == lifecycle.Prepared(self.worker.phase) == lifecycle.Prepared(Phase.ENVIRONMENT):
            with contextlib.suppress(OSError):  # tried again before the first world
                self._warm.start(self._preparation.python)
        self.worker, effects = lifecycle.step(self.worker, event)
        for effect in effects:
            match effect:
                case lifecycle.Prepare(phase):
                    self._preparing = threading.Thread(target=self._prepare, args=(phase,), daemon=True)
                    self._preparing.start()
                case lifecycle.Train():
                    threading.Thread(target=self._train, name="worlds", daemon=True).start()
                case lifecycle.Notify(reason, deadline):
                    self._notify(reason, deadline)
                case lifecycle.Kill():
                    why = f"the grace period is over ({self.worker.leaving})" if self.worker.leaving else self.worker.reason
                    print(f"outlast | {why}; ending the training", flush=True)
                    self._warm.kill()
                case lifecycle.Flush():
                    self._begin_flush()
                case lifecycle.Exit(code, reason):
                    self.exit = effect
                    if (code, reason) != self._printed_end:
                        print_end(self.index, code, reason)

    def _notify(self, reason: str, deadline: float) -> None:
        self._kill_at = deadline
        self.coordination.leaves()
        try:
            notice_file.write(self.notice, "leave", reason, time.time() + deadline - self.clock())
        except OSError as problem:
            print(f"outlast | training cannot be notified to leave: {problem}", flush=True)
            self._events.put(lifecycle.GraceOver())

    def _begin_flush(self) -> None:
        self._printed_end = self.worker.code, self.worker.reason
        print_end(self.index, *self._printed_end)  # first, so that the last line of the log is uploaded, too
        if not self._store or self.worker.code != contract.Exit.DONE:
            self.coordination.record_end_from_operator()
        if not self._store or contract.Env.OWNER not in self.environ:  # nothing to upload, or the run was never claimed
            self._events.put(lifecycle.Flushed())
            return
        threading.Thread(target=self._flush, args=(self._flush_timeout_s(),), daemon=True).start()

    def _flush_timeout_s(self) -> float:
        timeout_s = lifecycle.flush_timeout_s(self.worker.code, self.worker, self.clock())
        if self.worker.gone_by is not None and (why := time_left.too_late_to_upload(timeout_s, self._upload.seconds)):
            print(f"outlast | {why}", flush=True)
        return timeout_s

    def _flush(self, timeout_s: float) -> None:
        """Upload the remaining output, including the last line of this worker's log."""
        self._log.drain()
        try:
            code, problem = self._upload.flush(timeout_s, run_ended=self.coordination.run_end is not None)
        except OSError as error:  # the limit on processes
            code, problem = 1, str(error)
        if code == upload_supervisor.SUPERSEDED:
            self._superseded(problem)
            return
        if code == 0 and self.worker.code == contract.Exit.DONE and self._had_rank0():
            self.coordination.record_end_from_operator()  # only now: nobody trains a run again that has succeeded
        self.coordination.tell_account(self._upload.report)
        incomplete = (
            f"the output is not all in {self._store}: {problem}; it is kept in {self.output}, and the next start pushes it"
        )
        self._put(lifecycle.Flushed(incomplete if code else ""))

    def _had_rank0(self) -> bool:
        """Return whether this worker has the run's results."""
        first = progress_file.read(self.state, 0)
        return first is not None and first.rank == 0

    def _prepare(self, phase: Phase) -> None:
        try:
            if ended := self._do(phase):
                self._put(lifecycle.Over(ended.code, ended.reason))
                return
        except Superseded as problem:
            self._superseded(str(problem))
        except OutlastError as problem:
            self._put(lifecycle.PreparationFailed(phase, str(problem), retry=getattr(problem, "retry", False)))
        except OSError as problem:
            self._put(lifecycle.PreparationFailed(phase, f"{phase}: {problem}", retry=True))
        except Exception as problem:  # a bug must not leave the worker in this phase forever
            self._put(lifecycle.PreparationFailed(phase, f"{phase}: {problem!r}", retry=False))
            raise
        else:
            self._put(lifecycle.Prepared(phase))

    def _do(self, phase: Phase) -> join_run.Ended | None:
        """Carry out a preparation phase. Returns the run's end if the run has already ended."""
        match phase:
            case Phase.RUN:
                return self.coordination.claim(self._log)
            case Phase.CODE:
                self._preparation.code()
                if not self.launched_here:
                    from outlast.worker.prepare import workdir

                    workdir.enter(self.environ, self._preparation.say, self._stop_preparing)
            case Phase.ENVIRONMENT:
                self._preparation.environment()
            case Phase.DATA:
                self._preparation.data()
                self._preparation.compiled()
            case Phase.CHECKPOINT:
                if self._snapshots is None:  # otherwise this is another attempt
                    workers = self.job.spec.workers.max if self.launched_here else 1
                    self._snapshots = serve_snapshots(self.environ, workers, self._restore, self._newest)
                if self._snapshots is None:  # otherwise the ranks request the checkpoint, if no worker has a newer snapshot
                    self._restore()
                if self._store and not self.launched_here:  # on one machine the submission has fetched the files
                    from outlast.storage import store
                    from outlast.worker.prepare import workdir

                    workdir.fetch(self.output, store.open_(self._store), self._preparation.say, self._stop_preparing)
                self.coordination.begin()
        return None

    def _restore(self) -> None:
        """Fetch the newest checkpoint in the store, if any. A thread of `snapshots` also calls this method."""
        if self._store:
            from outlast.storage import store
            from outlast.storage.checkpoints import both_places

            place, run = store.open_(self._store), self.environ[contract.Env.RUN]
            both_places.restore(self.output, place, run, self._preparation.say)

    def _newest(self) -> tuple[int, int] | None:
        """Return the generation and step of the newest checkpoint in the store, if any. A thread of `snapshots` calls this."""
        if not self._store:
            return None
        from outlast.storage import store
        from outlast.storage.checkpoints import register

        latest = register.read(store.open_(self._store), self.environ[contract.Env.RUN])
        return (latest.places[-1].generation, latest.step) if latest and latest.places else None

    def _coordination_broke(self, reason: str) -> None:
        print(f"outlast | {reason}", flush=True)
        self._put(lifecycle.Trained(contract.exit_code(-signal.SIGKILL)))  # so that the worker is restarted
        self._warm.kill()

    def _superseded(self, reason: str) -> None:
        self.reporter.displaced = True
        self._put(lifecycle.Superseded(reason or "the run continues elsewhere"))

    def _train(self) -> None:
        code: int = contract.Exit.FAILED
        try:
            self._loop = world_loop.WorldLoop(
                self.job,
                self.environ,
                self._preparation.python,
                self._warm,
                must_leave=lambda deadline, reason: self._leave_until(deadline, f"told to leave: {reason}"),
                run_ended=self.coordination.operator_ended_run,
                record=self.ledger.write,
            )
            code = self._loop.run()
        except OutlastError as problem:
            print(f"outlast | {problem}", flush=True)
            code = contract.Exit.MISCONFIGURED
        except Exception:  # a bug, not a failure of the run
            traceback.print_exc()
        self._put(lifecycle.Trained(code))

    # Events

    def _on_signal(self, number: int, _frame: object) -> None:
        grace = self.job.spec.interruption.grace.total_seconds()
        self._signalled.set()
        # not `self.clock()`, whose lock this thread may hold when the signal arrives
        self._events.put(lifecycle.Interrupted(f"received {signal.Signals(number).name}", self._looked_at, grace))

    def _ordered(self, headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        """Answer `POST /leave`. Called by the probe server's threads."""
        answer = self._orders.judge(headers, body, time.time())
        if answer.status != HTTPStatus.ACCEPTED:
            return answer.status, answer.text
        if self.worker.phase in (Phase.FLUSHING, Phase.ENDED):
            return HTTPStatus.CONFLICT, "this worker is already ending"
        self._leave_until(answer.deadline, f"ordered to leave{f': {answer.reason}' if answer.reason else ''}")
        return answer.status, answer.text

    def _leave_until(self, deadline: float | None, reason: str) -> None:
        """Leave before `deadline` (seconds since the epoch); if it is None, within the job's grace period."""
        grace_s, now = self.job.spec.interruption.grace.total_seconds(), self._looked_at
        if deadline is None:
            self._put(lifecycle.Interrupted(reason, now, grace_s))
            return
        left_s = max(LEAST_S, deadline - time.time())
        share: time_left.Share = {"stored": bool(self._store), "upload_s": self._upload.seconds}
        print(f"outlast | {reason}; {time_left.divided(left_s, **share)}", flush=True)
        self._put(lifecycle.Interrupted(reason, now, min(grace_s, time_left.for_training(left_s, **share)), left_s))

    def _put(self, event: lifecycle.Event) -> None:
        self._events.put(event)
        os.write(self._wake_w, b"\0")

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            if selector.select(LOOK_INTERVAL_S):
                os.read(self._wake_r, 4096)

    def _look(self) -> None:
        now = self._looked_at = self.clock()
        if self.worker.leaving and now > self._kill_at:
            self._kill_at = float("inf")
            self._events.put(lifecycle.GraceOver())
        self._warm.continue_stopped()
        processes = self._ranks.look(self._log.written)
        if self.worker.phase is Phase.TRAINING:
            if victims := hang_limit.hung(processes, self.hang_limit_s):
                self._end_hang(victims, processes)
            if not self.worker.leaving:
                self._launcher.look()
            if self._store and self._upload.ensure_running(processes):
                self._superseded(self._upload.report.get("error", ""))
        if self._loop:
            self.reporter.replaced = self._loop.replaced
        self.reporter.report(self.worker, processes, self._upload)
        if processes:
            reached = self.reporter.metrics
            self._status_server.look(reached["step"], reached.get("target_step"), rank=processes[0].progress.rank)
        if not self.state.is_dir():  # the running job was removed
            self._warm.kill()
            os._exit(contract.Exit.FAILED)

    def _end_hang(self, victims: Sequence[tuple[hang_limit.Process, str]], processes: Sequence[hang_limit.Process]) -> None:
        file = self.output / contract.LOGS / f"stacks-worker-{self.index}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        stacks.dump([process.progress.pid for process in processes], file)
        for process, reason in victims:
            record = process.progress
            print(f"outlast | rank {record.rank} on worker {self.index} {reason}; stacks in {file}", flush=True)
            if self._loop:
                self._loop.condemn(process, reason)
            self.ledger.write(
                "hang", worker=self.index, rank=record.rank, pid=record.pid, silent_s=round(process.silent_s, 1),
                state="stopped" if process.stopped else "stuck", stacks=str(file), reason=reason,
            )  # fmt: skip
            self._ranks.kill(process)


def serve_snapshots(environ: Mapping[str, str], workers: int, restore: Query, newest: Query) -> Snapshots | None:
    """Serve memory for a worker's snapshots. This machine has `workers` workers. Returns None if snapshots are off or impossible.

    Even with a budget of 0 bytes, ranks can read other workers' snapshots. `restore` fetches the newest checkpoint from the store
    at a rank's request; `newest` returns its generation and step. Raises OSError if the socket cannot be opened in a running job:
    the worker must be restarted, since other workers may have newer snapshots.
    """
    Path(environ[contract.Env.STATE], contract.SNAPSHOTS).unlink(missing_ok=True)  # left by a killed agent
    setting = environ.get(contract.Env.MEMORY, "off")  # absent if an earlier version created this worker and its memory limit
    if setting == "off":
        return None
    from outlast.storage.snapshots import budget, rooms, server

    requested = budget.requested(setting)
    granted = rooms.Machine().budget(requested, workers)
    if not granted.bytes or (isinstance(requested, int) and granted.bytes < requested):
        print(f"outlast | snapshots in memory: {granted.reason}", flush=True)
    snapshots = server.Server(environ, granted.bytes, restore, newest)
    try:
        snapshots.start()
    except OSError as error:
        snapshots.close()
        if environ.get(contract.Env.GENERATION, "0") != "0":
            raise
        print(f"outlast | no snapshots in memory, their socket cannot be opened: {error}", flush=True)
        return None
    return snapshots


def print_end(worker: int | str, code: int | None, reason: str) -> None:
    print(contract.end_line(worker, reason, code), flush=True)


def main(warm: subprocess.Popen[bytes] | sibling.Forked | None, environ: dict[str, str], log: Output) -> NoReturn:
    try:
        from outlast.job import spec
        from outlast.job.spec import substitution

        job = spec.load(environ[contract.Env.JOB_FILE])
        environ |= package_copy.ahead({**environ, **substitution.values(job.spec.env, environ)})
        agent = Agent(warm, job, environ, log)
        if agent.launched_here:
            log.keep(None)
        ended = agent.run()
    except OutlastError as problem:
        if warm:
            warm.kill()
        ended = lifecycle.Exit(contract.Exit.MISCONFIGURED, str(problem))
        reporter.write_state(
            Path(environ[contract.Env.STATE]), {"pid": os.getpid(), "state": "gone", "reason": ended.reason, "code": ended.code}
        )
        print_end(environ[contract.Env.WORKER], ended.code, ended.reason)
    log.close()
    sys.exit(ended.code)
