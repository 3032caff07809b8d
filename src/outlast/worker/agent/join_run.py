"""Decides which run a worker's pod belongs to, and records that run in `run.json` in the job's output.

All pods of a job share a name: the digest of their job file, or the name of a submission. This name is recorded as the run's
owner, and becomes the id of a new run. Each pod decides on its own, and all make the same decision:

    no record, or another owner's run that has succeeded         begin a run
    a run that has not succeeded                                 continue it: a changed file is still the same training
    such a run, while another namespace or cluster trains it     end with an error
    such a run of another owner, after a submission with --fresh begin a run; files of the old run move to `previous/`
    an unfinished run that a later job file has taken over       end as superseded
    this owner's run, which has ended                            end in the same way

If the output is lost with a pod, so is the record. A new worker then asks the workers that stay up after the end (`query_end`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outlast.base import file_locks
from outlast.base.errors import Superseded
from outlast.job import contract
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store, register
from outlast.storage.runs import heartbeat
from outlast.storage.runs.output import OWN
from outlast.storage.sync import growing_files

_ADVICE = (
    "end it there, or give this job another name or output. "
    "To take the run from it, delete this job and submit it with --take-over; --fresh begins another run"
)
_AUTHORITIES = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
_ANSWER_S = 3.0
_MOST_QUERIED = 8
_CODES = {"Succeeded": contract.Exit.DONE, "Failed": contract.Exit.GIVEN_UP, "Cancelled": contract.Exit.GIVEN_UP}


@dataclass(frozen=True)
class Ended:
    """A run's end. A worker that starts later ends in the same way."""

    run: str
    reason: str
    code: int

    def dumps(self) -> str:
        """Return the response to `query_end`."""
        return json.dumps(dataclasses.asdict(self))


def query_end(others: Sequence[str], run: str) -> Ended | None:
    """Ask other workers, which stay up after the end, how the run ended. `others` are their addresses. Returns None if none
    answers."""

    def query(address: str) -> Ended | None:
        try:
            with urllib.request.urlopen(f"http://{address}/end", timeout=_ANSWER_S) as answer:
                end = Ended(**json.load(answer))
        except (OSError, ValueError, TypeError):  # the worker has ended, still trains, or runs another version
            return None
        return end if end.run == run else None

    with ThreadPoolExecutor(_MOST_QUERIED) as pool:
        return next(filter(None, pool.map(query, others[:_MOST_QUERIED])), None)


def others(endpoint: str, me: str, index: int, workers: int) -> list[str]:
    """Return the `host:port` of the other workers' probes, derived from worker 0's host (`endpoint`) or our own (`me`)."""
    at_0 = endpoint.startswith("c10d://")
    host = (urllib.parse.urlsplit(endpoint).hostname or "") if at_0 else me
    name, _, domain = host.partition(".")
    stem, _, number = name.rpartition("-")
    if number != str(0 if at_0 else index) or not domain:
        return []
    return [f"{stem}-{n}.{domain}:{contract.Pod.PROBE_PORT}" for n in range(workers) if n != index]


def home(environ: Mapping[str, str], authorities: Path = _AUTHORITIES) -> str:
    """Return the identity of the place that trains this pod's job (`runs.heartbeat`), the same in all pods of the job. It
    contains the run's id if an operator runs the job, and otherwise a digest of the cluster's certificate authorities. If these
    authorities change, new pods count as another owner."""
    name = f"{environ.get(contract.Env.NAMESPACE) or 'default'}/{environ[contract.Env.JOB]}"
    if contract.Env.MEMBER in environ:
        return f"{name} ({environ[contract.Env.RUN]})"
    with contextlib.suppress(OSError):
        return f"{name} of cluster {hashlib.sha256(authorities.read_bytes()).hexdigest()[:8]}"
    return name


def take(
    where: store.Store, new: runs.Run, *, home: str = "", fresh: bool = False, say: Callable[[str], None] = lambda _: None
) -> str | Ended:
    """Continue the run in `where`, or begin the run `new`, and return the run's id. Waits while another `home` may be training
    it. Raises AlreadyRunning if another `home` trains it, Superseded if a later owner has taken it from us, and StoreError."""
    current = runs.read(where)
    if current and current.ended and current.owner == new.owner:
        reason = f"run {current.run} has ended before ({current.state}: {current.reason}); nothing is left to do"
        return Ended(current.run, reason, _CODES[current.state])
    if current and not current.ended and new.owner in current.before:
        raise Superseded(
            f"run {current.run} in {where.url} belongs to a later version of this job; delete this version, or the later one, "
            "and submit this version again"
        )
    if current and not current.ended and not fresh and home:
        heartbeat.wait(where, current.run, home, advice=_ADVICE, say=say)
    if current is None or current.succeeded or (fresh and current.owner != new.owner):
        current = runs.claim(where, new, replace=fresh)
    if current.aside:
        runs.archive(where, current.run)
    if current.ended or current.owner != new.owner:
        runs.acquire(where, current.run, new.owner)
    return current.run


def set_aside(output: Path, run: str, say: Callable[[str], None] = lambda _: None) -> None:
    """Move another run's files, left on a volume that outlives pods, to `previous/`. Several workers may share the volume."""
    directory = output / contract.CHECKPOINTS
    if checkpoints.owner(directory) in ("", run):
        return
    with file_locks.exclusive(output / OWN / "room", waiting=lambda: None, stop=threading.Event()):
        if (other := checkpoints.owner(directory)) in ("", run):
            return
        aside = output / runs.PREVIOUS / other
        aside.mkdir(parents=True, exist_ok=True)
        entries = [entry for entry in output.iterdir() if entry.name not in (OWN, runs.PREVIOUS, contract.CHECKPOINTS)]
        for entry in [*entries, directory]:  # checkpoints last, since they record the owner
            try:
                entry.rename(next(to for n in range(1 << 30) if not (to := aside / f"{entry.name}{'+' * n}").exists()))
            except OSError as problem:
                say(f"{entry} of run {other} cannot be moved to {aside}: {problem.strerror}")


def generation(where: store.Store, output: Path, run: str, *, stored: bool) -> int:
    """Acquire a new generation of the run, after which earlier generations may no longer commit."""
    new = newest_generation(where, output, run, stored=stored) + 1
    if stored:
        in_store.Checkpoints(where, run).acquire(new)
    return checkpoints.acquire(output / contract.CHECKPOINTS, run, new)


def newest_generation(where: store.Store, output: Path, run: str, *, stored: bool) -> int:
    """Return the newest generation in the output; 0 if there is none. That generation may still commit."""
    here = checkpoints.generation(output / contract.CHECKPOINTS, run)
    latest = register.read(where, run) if stored else None
    return max(here, latest.generation if latest else 0)


def record(job: str, owner: str) -> runs.Run:
    """Create the record of a run that starts now. The run's id is the owner's name."""
    return runs.Run(owner, job, time.time(), state="Running", owner=owner)


def fetch_own(where: store.Store, output: Path, worker: int) -> None:
    """Fetch this worker's earlier log and ledgers, and the metrics of all workers, unless they are on its disk already."""
    ledgers = [f"{contract.LEDGER}/{name}-{worker}.jsonl" for name in ("agent", "decider")]
    names = [f"{contract.LOGS}/{contract.worker_log(worker)}", *ledgers]
    if worker == 0:
        names.append(f"{contract.LEDGER}/decider.jsonl")
    for name in [*names, contract.METRICS]:
        if not (output / name).exists():
            growing_files.fetch(where, name, output / name)
