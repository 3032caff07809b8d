"""Trains in successive worlds, in a thread of the worker's agent, and represents the worker in the rendezvous. Unlike in
torchrun's agent, a failure does not end this loop: the loop reports how the training processes ended, and waits for the next
world."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base import backoff, machine_memory, tcp
from outlast.base.clock import Seen
from outlast.job import contract, sealed_lines
from outlast.job.contract import Env, FailureCause
from outlast.job.workerfiles import log_pipe
from outlast.rendezvous import restart_budget, transport
from outlast.rendezvous.attempts import Past
from outlast.rendezvous.membership import Membership, RunClosed
from outlast.rendezvous.messages import Closed
from outlast.rendezvous.repairs import Repairs
from outlast.rendezvous.who_trains import World
from outlast.worker.hangs.hang_limit import Process
from outlast.worker.launch import rank_failures, rank_processes, script_files, warm_request
from outlast.worker.launch.warm_supervisor import WarmEnded, WarmProcess

if TYPE_CHECKING:
    from outlast.job import spec

MONITOR_INTERVAL_S = 0.02
LOOK_S = 0.5
"""Interval in seconds between checks for processes that wait for a world that this worker does not know yet. Arbitrary."""
EXIT_TIMEOUT_S = 5.0
"""Maximum seconds that a process takes to end after it has recorded its error."""
STAY_S = 1.0
"""Seconds that processes have, once another is lost, until they wait for the next world. Arbitrary."""
MAX_BACKOFF_S = 30.0
"""Longest backoff in seconds for a script that exits as if interrupted, but was not."""


class WorldLoop:
    """A worker's training. The thread of `run` ends once the agent has killed the warm process."""

    def __init__(
        self,
        job: spec.Job,
        environ: Mapping[str, str],
        python: str,
        warm: WarmProcess,
        *,
        must_leave: Callable[[float | None, str], None],
        run_ended: Callable[[Closed], None],
        record: Callable[..., None],
    ) -> None:
        """`environ` is the worker's environment. Raises OutlastError if the rendezvous endpoint is unusable."""
        from outlast.worker.prepare import phases

        self._spec, self._environ, self._python, self._warm, self._record = job.spec, environ, python, warm, record
        self._command, self._processes = phases.command(job, environ), job.spec.processes()
        self._grace_s = job.spec.interruption.grace.total_seconds()
        self._worker, self._state = int(environ[Env.WORKER]), Path(environ[Env.STATE])
        run = environ[Env.RUN]
        client = transport.client(
            environ[Env.RENDEZVOUS],
            transport.Member(run, self._worker, self._state, self._processes, environ, must_leave, run_ended),
        )
        self._member = Membership(
            client,
            run_id=run,
            state=self._state,
            host=environ.get(Env.ADDRESS, "127.0.0.1"),
            processes=self._processes,
            leave_s=self._grace_s,
        )
        self._member.notice = Path(environ[Env.NOTICE])
        self._member.key = sealed_lines.key(environ)
        self._member.joining = self._joining
        self._member.repaired = self._repaired
        self._member.dies = self._dies
        self._member.abandoned = lambda: warm.killed
        self._seen = Seen(time.monotonic)
        self._looked = 0.0
        self._waiting: rank_processes.RankProcesses | None = None
        """The processes that wait for the next world."""
        self._verdicts: dict[int, rank_failures.Verdict] = {}
        self.replaced = 0
        """Number of times that new processes had to start, although the old ones could have stayed."""

    def condemn(self, process: Process, reason: str) -> None:
        """Record why a process is about to be killed. Called by the agent's main thread."""
        start = process.progress.generation, process.progress.attempt
        if start == (self._member.generation, self._member.attempt):
            verdict = rank_failures.Verdict(reason, stuck=not process.stopped, early=process.early)
            self._verdicts[process.local_rank] = verdict

    def run(self) -> int:
        """Train in successive worlds until the run has ended for this worker. Returns the worker's exit code."""
        member, workers = self._member, self._spec.workers
        log = Path(self._environ[Env.OUTPUT]) / contract.LOGS / contract.worker_log(self._worker)
        early, kills = 0, restart_budget.Kills()
        with contextlib.closing(member):
            try:
                if transport.reports_when_ready(self._environ, needed=workers.replicas <= workers.min):
                    self._warm.wait_until_ready(self._python)
                while not self._warm.killed:
                    begun, logged = time.monotonic(), log_pipe.size(log)
                    failures, left = self._train()
                    if not failures:
                        member.done()
                    elif self._warm.killed:
                        break
                    elif not any(map(rank_failures.is_cause, failures)) and any(map(rank_failures.was_interrupted, failures)):
                        if member.leaving():
                            return self._leave()
                        if not member.called():  # backoff for a script that always exits with 75
                            early = early + 1 if time.monotonic() - begun < MAX_BACKOFF_S else 0
                            member.pause_s = backoff.exponential(early - 1, 0.5, MAX_BACKOFF_S) if early else 0.0
                    else:
                        first = self._start.first(failures, left)
                        line = f"{contract.ECHO if first['echo'] else 'outlast | '}{first['reason']}"
                        print(line, file=sys.stderr, flush=True)
                        outside = contract.killed(first["code"]) or first["cause"] is FailureCause.DISK_FULL
                        kills = kills.after(outside, first["step"], time.monotonic() - begun)
                        member.pause_s = kills.pause_s  # before the next start; this failure is reported at once
                        several = self._processes > 1 and first["rank"] is not None
                        prefix = rank_processes.PREFIX.format(first["rank"]) if several else ""
                        failure = {**first, "log_tail": log_pipe.tail(log, line, since=logged, prefix=prefix)}
                        if failure["cause"] is FailureCause.BITS:  # another worker takes the place of this one
                            member.replaced(failure)
                            return contract.Exit.FAILED
                        member.failed(failure)
            except WarmEnded as ended:
                return ended.code
            except RunClosed:
                if (closed := member.closed) is None and not self._warm.killed:
                    return self._leave()
                if closed:
                    if closed.code in (contract.Exit.GIVEN_UP, contract.Exit.INTERRUPTED):
                        print(f"outlast | {closed.reason}", file=sys.stderr, flush=True)
                    return closed.code
        return contract.exit_code(-signal.SIGKILL)

    def _train(self) -> tuple[list[dict[str, Any]], int | None]:
        """Join worlds and run the training processes until they end by themselves. Returns their failures (none on success), and
        the rank of a process that exited with 0 although others failed."""
        member, environ = self._member, self._environ
        oom_kills = machine_memory.Machine().oom_kills()
        over = False
        while not over:
            waiting, self._waiting = self._waiting, None
            ranks = waiting or rank_processes.RankProcesses(str(self._state / warm_request.SOCKET), environ[Env.CODE])
            try:
                if not member.next_world(functools.partial(self._connect, ranks)):
                    continue
                world = member.world
                assert world is not None
                if member.generation > 1 and not member.attempt:  # `_repaired` logs further attempts of a world
                    print(contract.start_line(member.generation, 0, world.reason), file=sys.stderr, flush=True)
                own = {**environ, **member.numbers}
                waiting = None
                ranks.start(self._command, rank_processes.environs(world, member.run_id, self._processes, member.rank, own))
                while not (over := ranks.over()) and not member.must_stop() and not self._all_wait():
                    ranks.wait(MONITOR_INTERVAL_S)
                if not over and self._stay(ranks):
                    self._waiting = ranks
                elif (over := ranks.over()) and not any(rank_failures.is_cause(self._failure(end)) for end in ranks.failures()):
                    ranks.wait(rank_processes.CAUSE_S, all_=True)
            finally:
                if self._waiting:
                    ranks.keep()
                else:
                    promised = os.path.exists(environ[Env.NOTICE])
                    ranks.stop(0.0 if waiting else self._grace_s if promised else rank_processes.KILL_DELAY_S)
            over = over or (self._waiting is not None and bool(self._start.errors()))
        oom = machine_memory.Machine().oom_kills() > oom_kills
        failures = {failure.local_rank: failure for failure in ranks.failures()}
        # The first process to fail may end last: it made others fail, and then all of them were stopped.
        records = self._start.errors() if self._waiting else self._start.causes() if failures else {}
        for local_rank, record in records.items():
            end = rank_failures.Ended(record["rank"], local_rank, record["code"], record["time"])
            failures.setdefault(local_rank, end)
        if member.repairs and any(end.why == rank_processes.LOST for end in failures.values()):
            member.repairs.refuse("its processes were lost with their warm process")
        left = ranks.left()
        return [self._failure(end, oom=oom) for end in failures.values()], left.rank if left else None

    def _connect(self, ranks: rank_processes.RankProcesses, world: World, rank: int, listener: socket.socket) -> bool:
        """Host the world's store if we have rank 0; otherwise check that its host can be reached. Returns False if this worker
        must stop before ranks can be forked. Raises OSError and WarmEnded."""
        if rank != 0:
            tcp.reach(world.address)
        elif tcp.host_port(world.address)[1] != listener.getsockname()[1]:
            raise ConnectionError("an earlier process of this worker was to host it")
        ready = self._warm.wait_until_ready(self._python, self._member.must_stop)
        if ready and rank == 0:
            ranks.host(world.address, listener, self._environ)
        return ready

    @property
    def _start(self) -> rank_failures.Start:
        member = self._member
        return rank_failures.Start(self._worker, self._state, self._processes, member.generation, member.attempt)

    def _all_wait(self) -> bool:
        """Return whether all processes wait for the next world. Checks rarely without a sign of its end."""
        errors = (self._state / contract.ERROR.format(local_rank=each) for each in range(self._processes))
        ends = self._member.called() or os.path.exists(self._environ[Env.NOTICE]) or any(map(os.path.exists, errors))
        if not ends and time.monotonic() - self._looked < LOOK_S:
            return False
        self._looked = time.monotonic()
        return self._start.all_of(rank_failures.waits)

    def _stay(self, ranks: rank_processes.RankProcesses) -> bool:
        """Return whether all processes wait for the next world, at the latest after STAY_S. Nothing breaks a collective with a
        silent worker."""
        member, mesh = self._member, self._member.mesh
        silent = mesh is not None and not {*mesh.unheard} <= {*mesh.refused}
        able = member.closed is None and not member.leaving() and self._start.all_of(rank_failures.stays)
        until = time.monotonic() + STAY_S if able and not silent else 0.0
        while not (wait := self._start.all_of(rank_failures.waits)) and not ranks.over() and time.monotonic() < until:
            ranks.wait(MONITOR_INTERVAL_S)
        if able and not wait and not ranks.over():
            self.replaced += 1
            why = "another worker is silent" if silent else f"the old ones have not left their world within {STAY_S:g} s"
            print(f"outlast | new processes start: {why}", flush=True)
        return wait

    def _failure(self, ended: rank_failures.Ended, *, oom: bool = False) -> dict[str, Any]:
        return self._start.failure(ended, self._verdicts.get(ended.local_rank), oom=oom)

    def _leave(self) -> int:
        """Leave once the other workers can load the state saved here, and return the exit code. The agent limits the time."""
        member = self._member
        member.left(reached=False)
        if member.rank == 0:
            over = lambda: self._warm.killed or member.closed is not None  # noqa: E731
            script_files.leave(self._environ, member.generation, over)
        if self._warm.killed:  # the others wait for the state until this worker's connection or Lease has ended
            return contract.exit_code(-signal.SIGKILL)
        member.left(reached=True)
        return contract.Exit.INTERRUPTED

    # Called by the membership

    def _joining(self) -> None:
        for local_rank in range(self._processes):
            (self._state / contract.ERROR.format(local_rank=local_rank)).unlink(missing_ok=True)
        self._verdicts.clear()
        self._member.repairs = self._member.repairs or Repairs(self._worker, self._spec.restarts.limit)

    def _dies(self) -> bool:
        causes = self._start.causes().items()
        return any(self._seen.age(rank, record["time"]) < EXIT_TIMEOUT_S for rank, record in causes)

    def _repaired(self, past: Past) -> None:
        """Log that the members are restarting this world's processes. Rank 0's worker also records this in the ledger."""
        reason = str(past.failure.get("reason", ""))
        print(contract.start_line(past.generation, past.attempt, reason), file=sys.stderr, flush=True)
        if self._member.rank == 0:
            event = {"generation": past.generation, "attempt": past.attempt, "worker": past.worker, "reason": reason}
            self._record("attempt", **event, **{name: past.failure.get(name) for name in ("rank", "code", "cause")})
