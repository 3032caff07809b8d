"""An agent's reports on its worker: `worker.json` for the launcher, and responses to probes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.base import files, probes
from outlast.job import contract, prometheus_metrics
from outlast.job.prometheus_metrics import Sample
from outlast.job.workerfiles import guessed_progress
from outlast.job.workerfiles.log_pipe import Output
from outlast.job.workerfiles.progress_file import Progress
from outlast.worker.agent.lifecycle import Phase, Worker
from outlast.worker.agent.nvml import Gpus
from outlast.worker.agent.upload_supervisor import UploadProcess
from outlast.worker.hangs import hang_limit

HEARTBEAT_INTERVAL_S = 1.0
"""Interval in seconds for touching an unchanged `worker.json`, as the agent's heartbeat."""
ALONE_LOOKS = 30
"""Observations (ten a second) before the agent warns of a missing process group, which a script may create late. Arbitrary."""
STANDSTILL_S = 30.0
"""Seconds without progress after which the status shows where the processes wait."""


class Reporter:
    """Reports on one worker. `state` is the worker's directory, and `limit_s` the job's hang limit."""

    def __init__(self, state: Path, log: Output, limit_s: float, *, pod: bool = False) -> None:
        self.health = probes.Health()
        self.metrics: Mapping[str, float] = {}
        self.probes = ""
        self.displaced = False
        self.replaced = 0
        """Number of times that new processes had to start, although the old ones could have stayed."""
        self._state, self._log, self._limit_s = state, log, limit_s
        self._logged = LoggedStep(pod=pod)
        self._written: dict[str, Any] = {}
        self._touched = 0.0
        self._gpus = Gpus()
        self._samples: list[Sample] = []
        """Summaries, and metrics with additional labels."""

    def report(self, worker: Worker, processes: Sequence[hang_limit.Process], upload: UploadProcess) -> None:
        training = worker.phase is Phase.TRAINING
        in_world = training and any(process.progress.phase not in ("done", "waiting") for process in processes)
        state = str(worker.phase)
        if training:
            state = "leaving" if worker.leaving else "training" if in_world else "waiting"
        self._logged.look(processes, self._log)
        still = next((p.where for p in processes if p.silent_s > STANDSTILL_S and p.where), "") if in_world else ""
        ranks = [{"rank": p.progress.rank, "local_rank": p.local_rank, "pid": p.progress.pid} for p in processes]
        self.write(state, worker, upload, ranks=ranks, still=still)
        metrics = {"leaving": float(bool(worker.leaving)), "processes_replaced_total": float(self.replaced), **upload.metrics()}
        healthy, reason = True, state
        if processes:
            silent_s = min(process.silent_s for process in processes)
            metrics |= self._progress(processes[0].progress) | {"worker_progress_age_seconds": silent_s}
            if hang_limit.unhealthy(processes[0], silent_s, self._limit_s):
                healthy, reason = False, f"no progress for {silent_s:.0f} s"
        self.health, self.metrics = probes.Health(healthy, in_world, reason), metrics
        samples = [sample for process in processes for sample in _of_rank(process.progress)]
        if uploads := upload.report.get("uploads"):
            samples.append(("checkpoint_upload_seconds", {}, (upload.report["uploads_s"], uploads)))
        self._samples = samples  # at once, since another thread reads it

    def stays(self, reason: str, end: str, *, done: bool) -> None:
        """From now on, report how this worker's training has ended. `end` answers other workers' queries."""
        self.health, self._samples = probes.Health(True, False, reason, end), []
        self.metrics = {"done": float(done), "failed": float(not done)}

    def exposition(self, labels: Mapping[str, str]) -> str:
        """Return all metrics in Prometheus' text format, with the worker's `labels`. The probe server's threads call this."""
        samples: list[Sample] = [(name, {}, value) for name, value in self.metrics.items()]
        return prometheus_metrics.exposition([*samples, *self._samples, *self._gpus.samples()], labels)

    def _progress(self, first: Progress) -> dict[str, float]:
        metrics: dict[str, float] = {"step": first.step, "committed_step": first.committed, "generation": first.generation}
        if first.snapshot:
            age = max(0, first.step - first.snapshot)
            metrics |= {"snapshot_step": first.snapshot, "snapshot_every": first.every, "snapshot_age_steps": age}
        if first.steps is not None:
            metrics["target_step"] = first.steps
        if first.rank == 0 and not first.step and self._logged.last:
            step, steps, epoch = self._logged.last
            metrics |= {"step": step, "step_logged": 1.0, **({"target_step": steps} if steps and epoch is None else {})}
        return metrics

    def write(
        self,
        state: str,
        worker: Worker,
        upload: UploadProcess,
        *,
        code: int | None = None,
        ranks: Sequence[dict[str, Any]] = (),
        still: str = "",
    ) -> None:
        """Write `worker.json`, or touch it if nothing has changed."""
        now = time.monotonic()
        record = {
            "pid": os.getpid(),
            "state": state,
            "reason": worker.reason or worker.leaving,
            "code": code,
            "ranks": list(ranks),
            **self._logged.record(),
            "warning": self._logged.warning,
            "probes": self.probes,
            "pushed": upload.report,
            "displaced": self.displaced,
            "replaced": self.replaced,
            "still": still,
        }
        if record == self._written or not self._state.is_dir():
            if now - self._touched > HEARTBEAT_INTERVAL_S:
                self._touched = now
                with contextlib.suppress(OSError):
                    os.utime(self._state / contract.WORKER)
            return
        self._written = record
        write_state(self._state, record)


def _of_rank(progress: Progress) -> Iterator[Sample]:
    rank = {"rank": progress.rank}
    if progress.stepped:
        yield "step_seconds", rank, (progress.stepped_s, progress.stepped)
    if progress.own_s:
        yield "own_step_seconds", rank, progress.own_s
    if progress.slow:
        yield "slow_ratio", rank, progress.slow
    if progress.differs:
        yield "differing_step", rank, progress.differs
    if progress.phase != "started":  # a plain script reports steps alone
        yield "data_stall_seconds_total", rank, progress.waited_s
        yield "checkpoint_stall_seconds", rank, (progress.stalled_s, progress.stalls)
        if progress.rank == 0:
            yield "checkpoint_save_seconds", rank, (progress.saved_s, progress.saves)


class LoggedStep:
    """The step that a plain script prints to its log, if rank 0 runs here without a session. In a pod, this class also warns if
    the script restarts from the beginning; on one machine, the launcher gives this warning."""

    def __init__(self, *, pod: bool = False) -> None:
        self._pod = pod
        self._first_of_run: guessed_progress.Logged | None = None
        self._previous: guessed_progress.Logged | None = None
        self._process: tuple[int, int] | None = None
        self._first: guessed_progress.Logged | None = None
        self.last: guessed_progress.Logged | None = None
        self.warning = ""
        self._alone = 0
        self._written = 0

    def look(self, processes: Sequence[hang_limit.Process], log: Output) -> None:
        process = next((p for p in processes if p.progress.rank == 0), None)
        if process is None:
            return
        first = process.progress
        if self._process != (first.generation, first.pid):  # an earlier process wrote the log so far
            self._previous = self.last or self._previous
            self._process, self._written, log.recent = (first.generation, first.pid), log.written, b""
            self.last, self._first, self._alone = None, None, 0
        elif first.phase == "started" and not first.step and log.written != self._written:
            self._written, text = log.written, log.recent.decode(errors="replace")
            self.last, self._first = guessed_progress.last_step(text, self.last), self._first or guessed_progress.first_step(text)
            if (first.generation, first.attempt) == (1, 0):
                self._first_of_run = self._first
            elif self._pod and self._first and self._previous:
                if warning := guessed_progress.begun_anew(None, self._previous, self._first, self._first_of_run):
                    print(f"outlast | {warning}", flush=True)
                self._previous = None
        step = first.step or (self.last.step if self.last else 0)
        self._alone = self._alone + 1 if process.alone > 1 and step and first.phase == "started" else 0
        self.warning = guessed_progress.alone(process.alone) if self._alone >= ALONE_LOOKS else ""
        if self._alone == ALONE_LOOKS:
            print(f"outlast | {self.warning}", flush=True)

    def record(self) -> dict[str, Any]:
        """Return the fields of `worker.json` about the last logged step, and about the process that logged it."""
        if not self.last or not self._process:
            return {"logged": None}
        (generation, pid), (step, steps, epoch) = self._process, self.last
        more = {"pid": pid, "first": self._first, **({} if epoch is None else {"epoch": epoch})}
        return {"logged": (step, steps, generation), "logged_more": more}


def write_state(directory: Path, record: dict[str, Any]) -> None:
    """Replace `worker.json` (`contract.WORKER`). On a full disk the old file remains, and training continues."""
    with contextlib.suppress(OSError):
        files.replace(directory / contract.WORKER, json.dumps(record))
