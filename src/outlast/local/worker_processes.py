"""Starts, adopts, stops and kills one job's worker processes on this machine, and detects when they have ended. A worker has the
same environment as in a pod, sees only its own GPUs, and outlives the launcher, which decides how many workers run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.base.clock import Seen
from outlast.base.errors import OutlastError
from outlast.job import accelerators, contract, spec
from outlast.job.spec import substitution
from outlast.local.state_dir import Run, StateDir
from outlast.rendezvous.transports import sockets
from outlast.worker.launch import package_copy, sibling, warm_request

AGENT_SILENCE_S = 20.0
"""Timeout for a silent agent, in seconds. Agents touch `worker.json` every second, but not while they dump stacks."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Backoff in seconds before restarting a worker that has not joined a world since its last start."""
FIRST_S = 10.0
"""Maximum number of seconds to hold back the other workers until the first one can fork them. Arbitrary."""


@dataclasses.dataclass
class Worker:
    index: int
    pid: int
    attempt: int
    child: subprocess.Popen[bytes] | None = None
    """None if the worker was started by an earlier launcher or forked by another worker."""
    leaving: bool = False


@dataclasses.dataclass(frozen=True)
class Ended:
    worker: Worker
    code: int
    message: str
    displaced: bool = False
    """True if the run continues on another machine."""

    @property
    def interrupted(self) -> bool:
        return self.code == contract.Exit.INTERRUPTED or self.worker.leaving

    @property
    def reason(self) -> str:
        if contract.killed(self.code):
            return f"worker {self.worker.index} was killed by {signal.Signals(self.code - 128).name}"
        return f"worker {self.worker.index} exited with code {self.code}" + (f": {self.message}" if self.message else "")


class WorkerPool:
    def __init__(self, state_dir: StateDir, job: spec.Job, run: Run, clock: Callable[[], float]) -> None:
        """`clock` measures silence and backoff; see `clock.Awake`."""
        self._state_dir, self._job = state_dir, job
        self._run, self._output, self._code = run.run, Path(run.output), Path(run.code)
        self._store, self._owner = run.store, run.owner
        self.gpus = gpus()
        self.processes = job.spec.processes()
        self.present: dict[int, Worker] = {}
        self._attempts: collections.Counter[int] = collections.Counter()
        self._failed_starts: collections.Counter[int] = collections.Counter()
        """Number of starts of each worker since it was last in a world."""
        self._not_before: dict[int, float] = {}
        self._first_by = 0.0
        self._clock = clock
        self._seen = Seen(clock)

    def staying(self) -> list[Worker]:
        return [worker for worker in self.present.values() if not worker.leaving]

    def adopt(self, records: list[dict[str, int]]) -> None:
        """Adopt an earlier launcher's workers. `ended` detects those that have died since."""
        for record in records:
            worker = Worker(record["index"], record["pid"], record["attempt"])
            self._attempts[worker.index] = worker.attempt
            self.present[worker.index] = worker

    def records(self) -> list[dict[str, int]]:
        return [{"index": w.index, "pid": w.pid, "attempt": w.attempt} for w in self.present.values()]

    def missing(self, desired: int, reported: Container[int]) -> list[int]:
        """Return the indices of the workers to start now, for a total of `desired`: the lowest free ones whose backoff is over.
        If there are fewer cores than workers, the first worker starts alone. Once it has `reported` to the launcher, it forks the
        others, which then need not import torch."""
        count = desired - len(self.staying())
        free = (index for index in range(desired + len(self.present)) if index not in self.present)
        now = self._clock()
        indices = [index for _, index in zip(range(count), free, strict=False) if now >= self._not_before.get(index, 0.0)]
        if len(os.sched_getaffinity(0)) >= desired or not self._may_fork():
            return indices
        if not self.present:
            self._first_by = now + FIRST_S
            return indices[:1]
        return indices if now > self._first_by or any(index in reported for index in self.present) else []

    def start(self, index: int, reported: Container[int]) -> Worker:
        """Start a worker, if possible by forking one that has `reported`. Raises OutlastError and OSError."""
        state, failed_starts = self._state_dir.worker(index), self._failed_starts[index]
        self._failed_starts[index] += 1
        if not self._code.is_dir():
            raise OutlastError(f"the job's code in {self._code} is gone; submit the job again")
        environ = self._environ(index)
        state.mkdir(parents=True, exist_ok=True)
        for name in [contract.WORKER, *(contract.PROGRESS.format(local_rank=rank) for rank in range(self.processes))]:
            (state / name).unlink(missing_ok=True)
        logs = self._output / contract.LOGS
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
        place = logs if os.access(logs, os.W_OK) else state  # if the disk is read-only, only the log is lost
        with open(place / contract.worker_log(index), "ab") as log:
            pid, child = None if failed_starts else self._fork(environ, log.fileno(), reported), None
            if pid is None:
                child = subprocess.Popen(
                    [sys.executable, "-m", "outlast", "agent"],
                    env=environ,
                    cwd=self._code,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                pid = child.pid
        self._attempts[index] += 1
        self.present[index] = Worker(index, pid, self._attempts[index], child)
        return self.present[index]

    def _may_fork(self) -> bool:
        return not self._job.spec.environment.requirements and not self._job.spec.environment.conda  # agents do not run there

    def _fork(self, environ: Mapping[str, str], log: int, reported: Container[int]) -> int | None:
        """Have another worker fork a new one. Returns the new worker's pid, or None if no worker can fork."""
        if not self._may_fork():
            return None
        parents = [each.index for each in self.staying() if self.trained(each.index) or each.index in reported]
        pids = (
            sibling.ask(str(self._state_dir.worker(index) / warm_request.SOCKET), environ, str(self._code), log)
            for index in parents[:2]
        )
        return next((pid for pid in pids if pid is not None), None)

    def joined(self, index: int) -> None:
        """Record that this worker is in a world, so that it is restarted at once if it dies."""
        self._failed_starts[index] = 0

    def trained(self, index: int) -> bool:
        """Return whether this worker has been in a world since its last start."""
        return not self._failed_starts[index]

    def pause(self, index: int) -> None:
        """Delay this worker's restart. The delay grows with each failed start."""
        self._not_before[index] = self._clock() + BACKOFF_S[min(self._failed_starts[index], len(BACKOFF_S) - 1)]

    def ended(self) -> Iterator[Ended]:
        """Remove and yield the workers that have ended since the last call."""
        for index, worker in list(self.present.items()):
            status = worker.child.poll() if worker.child else None if self._state_dir.owns(index, worker.pid) else -signal.SIGKILL
            if status is None:
                continue
            del self.present[index]
            self._seen.forget(index)
            report = self.report(worker)
            if worker.child is None and report.get("code") is not None:
                status = int(report["code"])
            yield Ended(worker, contract.exit_code(status), report.get("reason") or "", bool(report.get("displaced")))

    def report(self, worker: Worker) -> dict[str, Any]:
        """Return the report from a worker's agent (`contract.WORKER`); empty before the first one."""
        report = files.mapping(self._state_dir.worker(worker.index) / contract.WORKER)
        return report if report.get("pid") == worker.pid else {}

    def silent(self) -> list[Worker]:
        """Return the workers whose agents have sent no heartbeat for `AGENT_SILENCE_S`."""
        silent = []
        for worker in self.present.values():
            with contextlib.suppress(OSError):
                touched = (self._state_dir.worker(worker.index) / contract.WORKER).stat().st_mtime_ns
                if self._seen.age(worker.index, touched) > AGENT_SILENCE_S:
                    silent.append(worker)
        return silent

    def ask_to_leave(self, worker: Worker) -> None:
        worker.leaving = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)

    def kill(self, index: int, why: str) -> None:
        if worker := self.present.get(index):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)  # the agent leads its process group; its forks die with it
            with contextlib.suppress(OSError):
                print(f"worker {index} {why}; killed it", flush=True)

    def uploader_environ(self) -> dict[str, str]:
        """Return the environment for an uploader that belongs to no worker."""
        environ = {
            **os.environ,
            contract.Env.RUN: self._run,
            contract.Env.OUTPUT: str(self._output),
            contract.Env.JOB_FILE: str(self._state_dir.job),
            contract.Env.STORE: self._store,
            contract.Env.OWNER: self._owner,
        }
        return self._with_env(environ)

    def tracker_environ(self) -> dict[str, str]:
        """Return the environment for a process that forwards metrics but belongs to no worker."""
        return {**self.uploader_environ(), contract.Env.JOB: self._job.metadata.name, **self._job.spec.tracking.variables()}

    def _environ(self, index: int) -> dict[str, str]:
        state = self._state_dir.worker(index)
        fields = self._job.spec
        cpus = fields.resources.cpu or len(os.sched_getaffinity(0)) / max(1, fields.workers.replicas)
        base = int(os.environ.get(contract.Env.PROBE_PORT) or 0)
        environ = {
            **{name: value for name, value in os.environ.items() if name != contract.Env.CHECKPOINT_BEST},  # of an enclosing job
            # Results depend on the number of threads and on the order of sets, so both must be equal after every restart.
            "OMP_NUM_THREADS": str(max(1, int(cpus / self.processes))),
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            **{name: ",".join(devices(shown, fields.resources.gpu, index)) for name, shown in self.gpus.items()},
            contract.Env.JOB: self._job.metadata.name,
            contract.Env.RUN: self._run,
            contract.Env.WORKER: str(index),
            contract.Env.STATE: str(state),
            contract.Env.OUTPUT: str(self._output),
            contract.Env.LEDGER: str(self._output / contract.LEDGER),
            contract.Env.NOTICE: str(state / contract.NOTICE),
            contract.Env.RENDEZVOUS: f"{sockets.SCHEME}{self._state_dir.socket}",
            contract.Env.RENDEZVOUS_KEY: self._state_dir.secret(),
            **fields.checkpoint.variables(),
            **fields.tracking.variables(),
            contract.Env.JOB_FILE: str(self._state_dir.job),
            contract.Env.CODE: str(self._code),
            contract.Env.SHARED: str(self._state_dir.path),
            **({contract.Env.STORE: self._store, contract.Env.OWNER: self._owner} if self._store else {}),
            contract.Env.PROBE_PORT: str(base + index if base else 0),
            contract.Env.REVIVE: json.dumps([sys.executable, "-m", "outlast", "launcher", str(self._state_dir.path)]),
        }
        return self._with_env(environ)

    def _with_env(self, environ: dict[str, str]) -> dict[str, str]:
        """Return an environment with the job's `env` added. The job's PYTHONPATH comes after our copy of Outlast."""
        return package_copy.ahead({**environ, **substitution.values(self._job.spec.env, environ)})


def gpus() -> dict[str, list[str]]:
    """Return the accelerators visible to this process, keyed by the variable that selects them (e.g. `CUDA_VISIBLE_DEVICES`)."""
    return {row.visible: _shown(row) for row in accelerators.TABLE if row.visible}


def gpu_count() -> int:
    return max(map(len, gpus().values()))


def _shown(row: accelerators.Accelerator) -> list[str]:
    visible = os.environ.get(row.visible)
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return sorted(path.name.removeprefix(Path(row.files).name.partition("[")[0]) for path in Path("/dev").glob(row.files))


def devices(shown: list[str], count: int, index: int) -> list[str]:
    """Return the `count` GPUs for worker `index`, out of those `shown` to this process; empty if none are shown or requested. As
    in a pod, a worker sees only its own GPUs. Raises OutlastError if there are too few."""
    if not shown or not count:
        return []
    own = shown[count * index : count * (index + 1)]
    if len(own) < count:
        workers = "1 worker needs" if index == 0 else f"{index + 1} workers need"
        remedy = "lower workers.replicas or resources.gpu"
        raise OutlastError(f"this machine shows {len(shown)} GPUs, {workers} {count * (index + 1)}; {remedy}")
    return own
