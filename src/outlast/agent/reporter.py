"""What an agent says of its worker: `worker.json` for those that watch agents, and the answers of its probes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outlast import contract, files, probes
from outlast.agent.lifecycle import Phase, Worker
from outlast.agent.upload_handle import UploadProcess
from outlast.hangs import rule
from outlast.workerfiles import saves
from outlast.workerfiles.log_pipe import Output
from outlast.workerfiles.progress import Progress

HEARTBEAT_INTERVAL_S = 1.0
"""Interval of touching an unchanged `worker.json`: the heartbeat of the agent."""
STANDSTILL_S = 30.0
"""Time without progress after which the place where processes wait is shown; shorter than the hang limit."""


class Reporter:
    """Reports on one worker. `state` is its directory, `limit_s` the job's hang limit."""

    def __init__(self, state: Path, log: Output, limit_s: float) -> None:
        self.health = probes.Health()
        self.probes = ""
        """Address of the probes."""
        self.displaced = False
        """Whether another machine has taken the run."""
        self._state, self._log, self._limit_s = state, log, limit_s
        self._logged = LoggedStep()
        self._written: dict[str, Any] = {}
        self._touched = 0.0

    def report(self, worker: Worker, found: Sequence[rule.Process], upload: UploadProcess) -> None:
        """Report the current state; `found` are the training processes."""
        training = worker.phase is Phase.TRAINING
        in_world = training and any(process.progress.phase != "done" for process in found)
        state = str(worker.phase)
        if training:
            state = "leaving" if worker.leaving else "training" if in_world else "waiting"
        self._logged.look(found, self._log)
        still = next((p.where for p in found if p.silent_s > STANDSTILL_S and p.where), "") if in_world else ""
        ranks = [{"rank": p.progress.rank, "local_rank": p.local_rank, "pid": p.progress.pid} for p in found]
        self.write(state, worker, upload, ranks=ranks, still=still)
        metrics = {"leaving": float(bool(worker.leaving)), **upload.metrics()}
        healthy, reason = True, state
        if found:
            silent_s = min(process.silent_s for process in found)
            metrics |= self._progress(found[0].progress) | {"progress_age_seconds": silent_s}
            if rule.unhealthy(found[0], silent_s, self._limit_s):
                healthy, reason = False, f"no progress for {silent_s:.0f} s"
        self.health = probes.Health(healthy, in_world, reason, metrics)

    def _progress(self, first: Progress) -> dict[str, float]:
        metrics: dict[str, float] = {"step": first.step, "committed_step": first.committed, "generation": first.generation}
        if first.snapshot:
            metrics |= {"snapshot_step": first.snapshot, "snapshot_every": first.every}
        if first.steps is not None:
            metrics["target_step"] = first.steps
        if first.rank == 0 and not first.step and self._logged.found:
            step, steps = self._logged.found
            metrics |= {"step": step, "step_logged": 1.0, **({"target_step": steps} if steps else {})}
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
            "logged": self._logged.record(),
            "probes": self.probes,
            "pushed": upload.report,
            "displaced": self.displaced,
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


class LoggedStep:
    """The step that a plain script prints to its log, if rank 0 runs here and reports none itself."""

    def __init__(self) -> None:
        self.found: tuple[int, int | None] | None = None
        """The step, and the total if it is printed."""
        self._of: tuple[int, int] | None = None
        self._written = 0

    def look(self, found: Sequence[rule.Process], log: Output) -> None:
        """Read the end of what was written since the last look."""
        first = next((p.progress for p in found if p.progress.rank == 0), None)
        if first is None:
            return
        if self._of != (first.generation, first.pid):  # the log so far is another process's
            self.found, self._of, self._written, log.recent = None, (first.generation, first.pid), log.written, b""
        elif first.phase == "started" and not first.step and log.written != self._written:
            self._written = log.written
            self.found = saves.last_step(log.recent.decode(errors="replace"), self.found)

    def record(self) -> tuple[int, int | None, int] | None:
        """The step, the total, and the generation whose process has printed them."""
        return (*self.found, self._of[0]) if self.found and self._of else None


def write_state(directory: Path, record: dict[str, Any]) -> None:
    """Replace `worker.json` (see `contract.WORKER`). On a full disk it stays as it was: training matters more."""
    with contextlib.suppress(OSError):
        files.replace(directory / contract.WORKER, json.dumps(record))
