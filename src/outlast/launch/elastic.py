"""The worker's elastic agent: torch's own, as torchrun runs it, kept alive from one world to the next.

torchrun ends when its processes fail for good, and pays for its start again. Here the same agent class runs in a loop: each
world's end is reported (what failed, with which code, first) and the next world awaited, without importing torch anew. Forked
from `launch.warm` by the worker's agent; exits with a code of `contract.Exit` or the one that the decider names.

    elastic PROCESSES GRACE_S COMMAND [ARG ...]        COMMAND as for `launch.rank`
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outlast import accelerators, backoff, contract
from outlast.clock import Seen
from outlast.launch import rank0_files, shim
from outlast.rendezvous import transport
from outlast.rendezvous.handler import Handler, member
from outlast.status import FailureCause
from outlast.workerfiles import output, progress

MONITOR_S = 0.05
DYING_S = 5.0
"""Longest time from a process's last words to its end."""
AGAIN_S = 30.0
"""Longest pause before a script that left without being told is started again."""
EARLY_S = 30.0
"""A script that tells nothing of its steps is taken to be before its first one for so long; arbitrary."""
_SCRIPTS = (
    *("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"),
    *("TypeError", "NameError", "UnboundLocalError", "AttributeError"),
)
"""Errors that say that the script is wrong, or does not go with what is installed."""
_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Errors of torch, for any accelerator, and of Python."""
_STEPS = ("first step", "train")
"""Phases in which a hang says something of the step. Who hangs while it opens, restores or saves waits for a store or a disk.
A plain script that tells no steps stands at step 0 if it hangs before it has run for as long as it then stands still."""
_PREFIX = "[rank ${rank}] "
"""Of each line that one of several processes writes."""
_COLLECTIVE = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "CheckpointException")
_ECHO = re.compile(
    r"connection .{0,20}(closed|reset|refused)|broken pipe|by peer|pair closure|socket (closed|timeout)|timed out|gloo|"
    + "|".join(accelerators.BACKENDS.values()),
    re.IGNORECASE,
)
"""How collectives complain when somebody else has died. Such an error is an echo, not the cause."""


def main(argv: list[str]) -> None:
    """Train in world after world until there is no further one; raises SystemExit."""
    import torch.distributed.elastic.rendezvous as rendezvous

    processes, grace_s, command = int(argv[0]), argv[1], argv[2:]
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from the world alone: no round through the store
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves, in one line
    state = Path(os.environ[contract.Env.STATE])
    run_id, id = os.environ[contract.Env.RUN], int(os.environ[contract.Env.WORKER])
    client = transport.client(os.environ[contract.Env.RENDEZVOUS], transport.Member(run_id, id, state, processes))
    host = os.environ.get(contract.Env.ADDRESS, "127.0.0.1")
    log = Path(os.environ[contract.Env.OUTPUT]) / contract.LOGS / contract.worker_log(id)
    early = 0
    seen = Seen(time.monotonic)
    with member(client, run_id=run_id, state=state, host=host, processes=processes, leave_s=float(grace_s)) as handler:
        handler.joining = lambda: _forget(state, processes)
        handler.dies = lambda: any(seen.age(rank, said["time"]) < DYING_S for rank, said in _causes(state, processes).items())
        while True:
            begun, logged = time.monotonic(), output.size(log)
            try:
                failures = _train(handler, state, host, processes, float(grace_s), [str(state / "warm.sock"), grace_s, *command])
            except rendezvous.RendezvousClosedError:
                closed = handler.closed
                if closed and closed.code == contract.Exit.GIVEN_UP:
                    print(f"outlast | {closed.reason}", file=sys.stderr, flush=True)
                sys.exit(closed.code if closed else contract.Exit.INTERRUPTED)
            if not failures:
                handler.done()
            elif not any(_is_cause(failure) for failure in failures) and any(_left(failure) for failure in failures):
                if handler.leaving():
                    sys.exit(contract.Exit.INTERRUPTED)
                if not handler.called():  # nobody asked: a script that always says 75 must not spin
                    early = early + 1 if time.monotonic() - begun < AGAIN_S else 0
                    again_s = backoff.exponential(early - 1, 0.5, AGAIN_S) if early else 0.0
                    pause = time.monotonic() + again_s
                    while time.monotonic() < pause and not handler.called():
                        time.sleep(MONITOR_S)
            else:
                first = min(failures, key=lambda failure: (not _is_cause(failure), failure["time"]))
                said = f"outlast | {first['reason']}"
                print(said, file=sys.stderr, flush=True)
                prefix = _PREFIX.replace("${rank}", str(first["rank"])) if processes > 1 else ""
                if {failure["early"] for failure in failures if _is_cause(failure)} != {first["early"]}:
                    first["early"] = ""
                handler.failed({**first, "log_tail": output.tail(log, said, since=logged, prefix=prefix)})


def _train(
    handler: Handler, state: Path, host: str, processes: int, grace_s: float, shim_args: list[str]
) -> list[dict[str, Any]]:
    """Join worlds and run the training processes until they end; the failures, none if all went well."""
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    class Agent(LocalElasticAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            super()._rendezvous(worker_group)
            if (worker_group.group_world_size or 0) > 1:
                first = worker_group.group_rank == 0
                rank0_files.share(
                    worker_group.store, first=first, called=lambda: handler.num_nodes_waiting() > 0, environ=os.environ
                )

        def _exit_barrier(self) -> None:
            """Workers that are done wait at the rendezvous, where the death of another is noticed."""

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
            """Training that saves on SIGTERM has the job's grace for it, not torch's 30 s; `launch.shim` ends what has none."""
            if self._pcontext:
                self._pcontext.close(death_sig, math.ceil(grace_s) + 5)
            super()._shutdown(death_sig)

    several = processes > 1
    spec = WorkerSpec(
        role="outlast",
        local_world_size=processes,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-I", "-S", shim.__file__, *shim_args),
        max_restarts=0,
        monitor_interval=MONITOR_S,
        local_addr=host,
    )
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=state, ignore_cleanup_errors=True) as directory:
        logs = DefaultLogsSpecs(log_dir=directory, tee=Std.ALL if several else Std.NONE)
        result = Agent(spec, logs, log_line_prefix_template=_PREFIX if several else None).run()
        # Who failed first may be the last to end: then others have failed by it, and torch's agent has stopped it with them.
        ended = {process.local_rank for process in result.failures.values()}
        causes = _causes(state, processes) if ended else {}
        stopped = {
            said["rank"]: SimpleNamespace(local_rank=local_rank, exitcode=said["code"])
            for local_rank, said in causes.items()
            if local_rank not in ended
        }
        return [_failure(state, handler, rank, process) for rank, process in {**result.failures, **stopped}.items()]


def _forget(state: Path, processes: int) -> None:
    """Remove what training processes of the world before, and their agent, have said of their end."""
    for name in (contract.ERROR, contract.VERDICT):
        for local_rank in range(processes):
            (state / name.format(local_rank=local_rank)).unlink(missing_ok=True)


def _causes(state: Path, processes: int) -> dict[int, dict[str, Any]]:
    """What training processes of the current world have said of their end, by local rank, but for echoes."""
    said = {each: _read(state / contract.ERROR.format(local_rank=each)) for each in range(processes)}
    return {each: record for each, record in said.items() if "code" in record and not _is_echo(record)}


def _failure(state: Path, handler: Handler, rank: int, process: Any) -> dict[str, Any]:
    """What became of one training process, in our words."""
    record = _read(state / contract.ERROR.format(local_rank=process.local_rank))
    verdict = _read(state / contract.VERDICT.format(local_rank=process.local_rank))
    # What a process died of is known once it has said so: threads of torch may yet end it with SIGABRT on its way out.
    code = record.get("code") or contract.exit_code(process.exitcode)
    worker = os.environ[contract.Env.WORKER]
    what = verdict.get("reason") or record.get("message") or _how(process.exitcode)
    # Errors of ours are sentences that stand by themselves; what `shim.record_death` leaves has no code.
    sentence = "code" in record and not record.get("traceback") and not verdict
    reached = progress.read(state, process.local_rank)
    if reached and reached.generation != handler.generation:
        reached = None
    told = 0
    if reached and reached.phase == "started":  # a plain script, which says its steps at most
        told, reached = reached.step, None
    plain = reached is None and bool(told or verdict.get("early"))
    stopped_by_us = process.exitcode == -signal.SIGTERM and "code" not in record  # not one that was on its way out
    return {
        "rank": rank,
        "code": code,
        "reason": f"rank {rank} on worker {worker}{':' if sentence else ''} {what}",
        "cause": FailureCause.HANG if verdict else FailureCause.OUT_OF_MEMORY if record.get("type") in _MEMORY else "",
        "traceback": record.get("traceback", ""),
        "time": record.get("time", time.time()),
        "echo": not verdict and (stopped_by_us or _is_echo(record)),
        "hung": bool(verdict.get("stuck")) and (plain if reached is None else reached.phase in _STEPS),
        "early": record["type"] if _early(record, reached) else "",
        "step": reached.step if reached else told if plain else None,
        "committed": reached.committed if reached else None,
    }


def _early(record: dict[str, Any], reached: progress.Progress | None) -> bool:
    """Whether an error came before the first step, as far as we know, and is the script's and not the machine's."""
    began = record.get("age_s", math.inf) < EARLY_S if reached is None else reached.phase in ("open", "restore", "first step")
    return began and record.get("type") in _SCRIPTS


def _is_echo(record: dict[str, Any]) -> bool:
    if record.get("type") not in _COLLECTIVE:
        return False
    # A failed save says only which ranks failed; why stands in its traceback.
    said = record["traceback"] if record["type"] == "CheckpointException" else record["message"]
    return _ECHO.search(said) is not None


def _left(failure: dict[str, Any]) -> bool:
    return bool(failure["code"] == contract.Exit.INTERRUPTED)


def _is_cause(failure: dict[str, Any]) -> bool:
    return not failure["echo"] and not _left(failure)


def _how(exitcode: int) -> str:
    return f"was killed by {contract.signal_name(-exitcode)}" if exitcode < 0 else f"exited with code {exitcode}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
