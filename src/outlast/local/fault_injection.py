"""Injects faults on this machine, by sending signals to a worker's agent or to one of its training processes.

python -m outlast faults STATE NAME SCHEDULE         carries out a run's fault schedule, and outlives the command line
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from outlast.base.errors import NotFound, OutlastError
from outlast.job import contract, faults, ledger
from outlast.job.status import JobStatus, WorkerStatus
from outlast.local.state_dir import StateDir

_SIGNALS = {
    "kill-process": signal.SIGKILL,
    "kill-worker": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "evict": signal.SIGTERM,
}
_ON_WORKER = ("kill-worker", "term", "evict")
_DONE = {"term": "terminated", "evict": "terminated", "stop": "stopped", "slow": "slowed down"}


def inject(state_dir: StateDir, status: JobStatus, action: str, index: int | None, rng: random.Random) -> str:
    """Inject a fault now into a worker, a random one if `index` is None, record it in the ledger, and return a sentence about it.
    Raises OutlastError."""
    worker = _target(status, index, rng, needs_process=action not in _ON_WORKER)
    if action in _ON_WORKER:
        pid, target = worker.pid, f"worker {worker.index}"
    else:
        rank = rng.choice(worker.ranks)
        pid, target = rank.pid, f"rank {rank.rank} on worker {worker.index}"
    assert pid is not None
    gone = OutlastError(f"{target} (pid {pid}) is gone already")
    if not state_dir.owns(worker.index, pid):
        raise gone
    book = ledger.Ledger(Path(status.output) / contract.LEDGER, "chaos")
    book.write("chaos", action=action, worker=worker.index, pid=pid)
    book.close()
    try:
        if action == "slow":
            _slow(pid)
        else:
            os.kill(pid, _SIGNALS[action])
    except ProcessLookupError:
        raise gone from None
    return f"{_DONE.get(action, 'killed')} {target} (pid {pid}) at step {status.step}"


def _target(status: JobStatus, worker: int | None, rng: random.Random, *, needs_process: bool) -> WorkerStatus:
    candidates = [w for w in status.workers if worker in (None, w.index)]
    if worker is not None and not candidates:
        present = ", ".join(str(w.index) for w in status.workers)
        raise NotFound(f"{status.name} has no worker {worker}; {f'there are {present}' if present else 'no worker runs now'}")
    alive = [w for w in candidates if w.pid and (w.ranks or not needs_process)]
    if not alive:
        if worker is None:
            lack = f"no worker {'has a training process' if needs_process else 'runs'}"
        else:
            lack = f"worker {worker} {'has no training process' if needs_process else 'does not run'}"
        remedy = f"it has ended; start it with: {status.again}" if status.state.final else "wait until it trains"
        raise OutlastError(f"{lack} now ({status.name} is {status.state}); {remedy}")
    return rng.choice(alive)


def _slow(pid: int) -> None:
    turns, stopped_s, running_s = faults.SLOW
    try:
        for _ in range(turns):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
