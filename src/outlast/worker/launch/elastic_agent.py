"""The worker's elastic agent: it joins worlds, and runs the training processes of each.

It does what torchrun's agent does, in a loop that a failure does not end: it reports the end of each world (the first failed
process and its error), and waits for the next world. `launch.warm_process` forks it at the request of the worker's agent, and
forks the training processes at its own request (`rank_processes`). It exits with a code of `contract.Exit`, or with the code
that the coordinator has published.

    elastic PROCESSES GRACE_S RESTARTS COMMAND [ARG ...]        COMMAND as for `launch.training_process`
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from outlast.base import backoff, files, machine_memory
from outlast.base.clock import Seen
from outlast.base.errors import WrongBits
from outlast.job import contract, sealed_lines
from outlast.job.contract import FailureCause
from outlast.job.ledger import Ledger
from outlast.job.workerfiles import log_pipe, progress_file
from outlast.rendezvous import restart_budget, transport, world_store
from outlast.rendezvous.attempts import Past
from outlast.rendezvous.member_client import Client
from outlast.rendezvous.membership import Membership, RunClosed
from outlast.rendezvous.repairs import Repairs
from outlast.rendezvous.root_cause import left_early
from outlast.rendezvous.world import World
from outlast.worker.launch import rank0_files, rank_processes, warm_request
from outlast.worker.launch.training_process import is_secondary

MONITOR_INTERVAL_S = 0.02
EXIT_TIMEOUT_S = 5.0
"""Longest time in seconds from the error record of a process to its end."""
MAX_BACKOFF_S = 30.0
"""Longest delay in seconds before the restart of a script that exits as if interrupted, but was not."""
EARLY_S = 30.0
"""Time in seconds for which a script without reported steps counts as before its first step; arbitrary."""
_SCRIPT_ERRORS = (
    *("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"),
    *("TypeError", "NameError", "UnboundLocalError", "AttributeError", "SystemExit"),
)
"""Errors of a script that has a mistake, does not match the installed packages, or rejects its arguments."""
_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Out-of-memory errors of torch, for any accelerator, and of Python."""
_LOADER = "killed by signal: Killed"
"""torch's message after the kernel has killed a data loader process."""
_STEPS = ("first step", "train")
"""Phases in which a hang is attributed to the step. In other phases (opening, restoring, saving) a process waits for a store or a
disk. A plain script without reported steps counts as at step 0 if it was silent longer than it was active."""


def main(argv: list[str], *, ready_fd: int | None = None) -> None:
    """Train in successive worlds until the run has ended. `ready_fd` is a pipe that is closed once ranks can be forked. Raises
    SystemExit."""
    processes, grace_s, limit, command = int(argv[0]), argv[1], int(argv[2]), argv[3:]
    os.environ[contract.Env.PARENT] = str(os.getpid())
    state = Path(os.environ[contract.Env.STATE])
    lost = json.loads(os.environ.pop(contract.Env.LOST, "{}"))
    run_id, id = os.environ[contract.Env.RUN], int(os.environ[contract.Env.WORKER])
    client = transport.client(os.environ[contract.Env.RENDEZVOUS], transport.Member(run_id, id, state, processes))
    host = os.environ.get(contract.Env.ADDRESS, "127.0.0.1")
    log = Path(os.environ[contract.Env.OUTPUT]) / contract.LOGS / contract.worker_log(id)
    if ready_fd is not None and transport.others_may_wait(os.environ):
        os.read(ready_fd, 1)
    early, kills, seen = 0, restart_budget.Kills(), Seen(time.monotonic)
    member = Membership(client, run_id=run_id, state=state, host=host, processes=processes, leave_s=float(grace_s))
    with contextlib.closing(member):
        member.key = sealed_lines.key(os.environ)
        member.repaired = lambda past: _repaired(past, first=member.rank == 0)

        def joining() -> None:
            _forget(state, processes)
            member.repairs = member.repairs or Repairs(id, limit)

        member.joining = joining
        member.dies = lambda: any(
            seen.age(rank, record["time"]) < EXIT_TIMEOUT_S for rank, record in _causes(state, processes).items()
        )
        if lost:
            _replace(member, client, **lost)
        while True:
            begun, logged = time.monotonic(), log_pipe.size(log)
            try:
                failures, left = _train(member, state, processes, float(grace_s), command)
            except RunClosed:
                closed = member.closed
                if closed and closed.code in (contract.Exit.GIVEN_UP, contract.Exit.INTERRUPTED):
                    print(f"outlast | {closed.reason}", file=sys.stderr, flush=True)
                code = closed.code if closed else _left(member)
                sys.exit(contract.Exit.FAILED if code == os.EX_SOFTWARE else code)  # EX_SOFTWARE is for our own bugs
            if not failures:
                member.done()
            elif not any(_is_cause(failure) for failure in failures) and any(_was_interrupted(failure) for failure in failures):
                if member.leaving():
                    sys.exit(_left(member))
                if not member.called():  # backoff for a script that always exits with 75
                    early = early + 1 if time.monotonic() - begun < MAX_BACKOFF_S else 0
                    member.pause_s = backoff.exponential(early - 1, 0.5, MAX_BACKOFF_S) if early else 0.0
            else:
                first = _first(failures, left)
                line = f"{contract.ECHO if first['echo'] else 'outlast | '}{first['reason']}"
                print(line, file=sys.stderr, flush=True)
                prefix = rank_processes.PREFIX.format(first["rank"]) if processes > 1 else ""
                if {failure["early"] for failure in failures if _is_cause(failure)} != {first["early"]}:
                    first["early"] = ""
                outside = contract.killed(first["code"]) or first["cause"] is FailureCause.DISK_FULL
                kills = kills.after(outside, first["step"], time.monotonic() - begun)
                member.pause_s = kills.pause_s  # before the next start; this failure is reported at once
                _report(member, {**first, "log_tail": log_pipe.tail(log, line, since=logged, prefix=prefix)})


def _report(member: Membership, failure: dict[str, Any]) -> None:
    """Report a failure of the training processes. A worker with wrong bits ends, so that another one takes its place."""
    if failure["cause"] is not FailureCause.BITS:
        return member.failed(failure)
    member.replaced(failure)
    sys.exit(contract.Exit.FAILED)


def _left(member: Membership) -> int:
    """Leave once the other workers can load the state that was saved here. Returns the exit code. The agent kills this process if
    that takes too long."""
    member.left(reached=False)
    if member.rank == 0:
        rank0_files.leave(os.environ, member.generation, over=lambda: member.closed is not None)
    member.left(reached=True)
    return contract.Exit.INTERRUPTED


def _replace(member: Membership, client: Client, generation: int, attempt: int, failure: dict[str, Any]) -> None:
    """Replace a killed elastic agent, and report that its training processes have ended with it."""
    member.world, member.attempt = World(generation, (client.id,), "", ""), attempt
    client.amend(generation=generation, attempt=attempt, again=True)
    member.failed(failure)


def _train(
    member: Membership, state: Path, processes: int, grace_s: float, command: list[str]
) -> tuple[list[dict[str, Any]], int | None]:
    """Join worlds and run the training processes until they end by themselves. Returns their failures, none on success, and the
    rank of a process that exited with 0 although others failed."""
    kills = machine_memory.Machine().oom_kills()
    while True:
        tcp_store = member.next_world(world_store.connect)
        assert member.world is not None
        _log_start(member)
        if len(member.world.members) > 1:
            rank0_files.share(tcp_store, first=member.rank == 0, called=member.must_stop, environ=os.environ)
        environs = rank_processes.environs(member.world, member.run_id, processes, member.rank)
        environs = [{**os.environ, **environ} for environ in environs]
        ranks = rank_processes.RankProcesses(str(state / warm_request.SOCKET), command, environs)
        try:
            while not ranks.over() and not member.must_stop():
                ranks.wait(MONITOR_INTERVAL_S)
            if (over := ranks.over()) and not any(_is_cause(_failure(state, member, end)) for end in ranks.failures()):
                ranks.wait(rank_processes.CAUSE_S, all_=True)
        finally:
            promised = os.path.exists(os.environ.get(contract.Env.NOTICE, ""))
            ranks.stop(grace_s if promised else rank_processes.KILL_DELAY_S)
        if over:
            break
    oom = machine_memory.Machine().oom_kills() > kills
    failures = {failure.local_rank: failure for failure in ranks.failures()}
    # The first failed process may end last: it made others fail, and then all of them were stopped.
    for local_rank, record in _causes(state, processes).items() if failures else ():
        end = rank_processes.Ended(record["rank"], local_rank, record["code"], record["time"])
        failures.setdefault(local_rank, end)
    left = ranks.left()
    return [_failure(state, member, end, oom=oom) for end in failures.values()], left.rank if left else None


def _log_start(member: Membership) -> None:
    """Log that the training processes start again in a new world. `_repaired` logs further attempts of a world."""
    if member.world and member.generation > 1 and not member.attempt:
        print(contract.start_line(member.generation, 0, member.world.reason), file=sys.stderr, flush=True)


def _forget(state: Path, processes: int) -> None:
    """Remove the error records and verdicts of the previous world."""
    for name in (contract.ERROR, contract.VERDICT):
        for local_rank in range(processes):
            (state / name.format(local_rank=local_rank)).unlink(missing_ok=True)


def _repaired(past: Past, *, first: bool) -> None:
    """Log that the members restart the processes of this world; the worker of rank 0 also records the restart in the ledger."""
    reason = str(past.failure.get("reason", ""))
    print(contract.start_line(past.generation, past.attempt, reason), file=sys.stderr, flush=True)
    if first:
        ledger = Ledger(Path(os.environ[contract.Env.OUTPUT]) / contract.LEDGER, f"elastic-{os.environ[contract.Env.WORKER]}")
        event = {"generation": past.generation, "attempt": past.attempt, "worker": past.worker, "reason": reason}
        ledger.write("attempt", **event, **{name: past.failure.get(name) for name in ("rank", "code", "cause")})
        ledger.close()


def _causes(state: Path, processes: int) -> dict[int, dict[str, Any]]:
    """Return the error records of the current world's training processes by local rank, without secondary failures."""
    records = {each: files.mapping(state / contract.ERROR.format(local_rank=each)) for each in range(processes)}
    return {each: record for each, record in records.items() if "code" in record and not is_secondary(record)}


def _first(failures: list[dict[str, Any]], rank: int | None) -> dict[str, Any]:
    """Return the root failure. If all failures are secondary, a `rank` of this worker that exited with code 0 is the cause."""
    first = min(failures, key=lambda failure: (not _is_cause(failure), failure["time"]))
    if rank is None or not first["echo"]:
        return first
    reason = left_early(f"rank {rank} on worker {os.environ[contract.Env.WORKER]}", first["rank"], first["step"])
    return {**first, "rank": rank, "reason": reason, "echo": False, "left": True, "traceback": ""}


def _failure(state: Path, member: Membership, ended: rank_processes.Ended, *, oom: bool = False) -> dict[str, Any]:
    """Return the failure of one training process for the rendezvous. `oom`: the kernel's OOM killer has killed a process of this
    worker meanwhile."""
    rank, local_rank = ended.rank, ended.local_rank
    record = files.mapping(state / contract.ERROR.format(local_rank=local_rank))
    verdict = files.mapping(state / contract.VERDICT.format(local_rank=local_rank))
    # The error record wins: threads of torch may end the process with SIGABRT while it exits.
    code = record.get("code") or contract.exit_code(ended.code)
    worker = os.environ[contract.Env.WORKER]
    what = verdict.get("reason") or record.get("message") or ended.why or _how(ended.code)
    if oom := oom and (what == _how(-signal.SIGKILL) or _LOADER in what):
        what = "was killed: out of memory; raise resources.memory, or lower the batch"
    # Messages of OutlastError are whole sentences.
    sentence = bool(record) and not record.get("traceback") and not verdict and record["type"] != "SystemExit"
    reached = progress_file.read(state, local_rank)
    if reached and (reached.generation, reached.attempt) != (member.generation, member.attempt):
        reached = None
    reported = 0
    if reached and reached.phase == "started":  # a plain script, which reports steps at most
        reported, reached = reached.step, None
    echo = is_secondary(record)
    young = verdict.get("early") or (echo and record.get("age_s", math.inf) < EARLY_S)
    plain = reached is None and bool(reported or young)
    # A record means that it was exiting already.
    stopped_by_us = ended.asked and ended.code in (-signal.SIGTERM, -signal.SIGKILL) and not record
    return {
        "rank": rank,
        "code": code,
        "reason": f"rank {rank} on worker {worker}{':' if sentence else ''} {what}",
        "cause": FailureCause.HANG if verdict else FailureCause.OUT_OF_MEMORY if oom else _cause(record),
        "traceback": record.get("traceback", ""),
        "time": record.get("time", ended.time),
        "echo": not verdict and (stopped_by_us or echo),
        "hung": bool(verdict.get("stuck")) and (plain if reached is None else reached.phase in _STEPS),
        "early": record["type"] if _early(record, reached) else "",
        "step": reached.step if reached else reported if plain else None,
        "committed": reached.committed if reached else None,
    }


def _cause(record: dict[str, Any]) -> FailureCause:
    """Return the cause of a failure, if the rank had wrong bits or the script ran out of memory or disk space. A driver's
    out-of-memory error is a RuntimeError with CUDA's text."""
    kind, message = record.get("type"), record.get("message", "")
    if kind == WrongBits.__name__:
        return FailureCause.BITS
    if kind == "OSError" and any(f"[Errno {number}]" in message for number in (errno.ENOSPC, errno.EDQUOT)):
        return FailureCause.DISK_FULL
    starved = kind in _MEMORY or (kind == "RuntimeError" and "error: out of memory" in message)
    return FailureCause.OUT_OF_MEMORY if starved else FailureCause.UNKNOWN


def _early(record: dict[str, Any], reached: progress_file.Progress | None) -> bool:
    """Return whether the script, not the machine, probably caused a failure before its first step."""
    began = record.get("age_s", math.inf) < EARLY_S if reached is None else reached.phase in ("open", "restore", "first step")
    return began and record.get("type") in _SCRIPT_ERRORS


def _was_interrupted(failure: dict[str, Any]) -> bool:
    return bool(failure["code"] == contract.Exit.INTERRUPTED)


def _is_cause(failure: dict[str, Any]) -> bool:
    return not failure["echo"] and not _was_interrupted(failure)


def _how(exitcode: int) -> str:
    return f"was killed by {contract.signal_name(-exitcode)}" if exitcode < 0 else f"exited with code {exitcode}"
