"""Supervises the upload process (`agent.upload`) for the agent: starts it, reads its reports, and makes the last upload."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.base.clock import Seen
from outlast.job import contract
from outlast.worker.hangs.hang_limit import Process
from outlast.worker.launch import relocatable, script_files

RESTART_DELAY_S = 5.0
AHEAD_S = 2.0
"""Minimum age in seconds of a training process before the first upload process starts and imports its modules."""
WAIT_S = 30.0
"""Delay in seconds before the first upload process if there is no training process, so that logs are uploaded."""
NICENESS = 10
BEFORE_STEPS = ("started", "open", "restore", "first step")
STOP_TIMEOUT_S = 10.0
SUPERSEDED = 3
"""The upload process's exit code if the store has a newer generation."""
_TIMES = ("pushed", "since")


class UploadProcess:
    """One worker's upload process, a child of this process. `environ` is the worker's environment, read at each start."""

    def __init__(self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._environ = environ
        self._child: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread()
        self._start_at: float | None = None
        """When the next process may start; None before the first upload is due."""
        self._waits = Seen(clock)
        self.report: dict[str, Any] = {}
        """The last report (`upload.Report`); empty while another worker on this machine uploads."""
        self._seen = Seen(time.monotonic)

    def ensure_running(self, processes: Sequence[Process] = ()) -> bool:
        """Start the upload process unless it is running. The first start waits until the training `processes` could have written
        output. Returns True if the last upload process found that this worker had been superseded."""
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return False
            self._child = None
            self._start_at = time.monotonic() + RESTART_DELAY_S
            if code == SUPERSEDED:
                self._reader.join(STOP_TIMEOUT_S)
                return True
            self.report = {}
            print(f"outlast | the upload process ended with exit code {code}; starting it again", flush=True)
        if self._start_at is None and self._needed(processes):
            self._start_at = 0.0
        if self._start_at is not None and time.monotonic() >= self._start_at:
            try:
                self._child = self._start()
            except (OSError, RuntimeError) as problem:  # the limit on processes or threads
                print(f"outlast | the upload process cannot be started: {problem}; it is tried again", flush=True)
                self._start_at = time.monotonic() + RESTART_DELAY_S
                return False
            os.setpriority(os.PRIO_PROCESS, self._child.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
        return False

    def _needed(self, processes: Sequence[Process]) -> bool:
        return (
            any(process.progress.phase not in BEFORE_STEPS or process.age_s >= AHEAD_S for process in processes)
            or self._waits.age("training", "") >= WAIT_S
            or bool(script_files.requested(Path(self._environ[contract.Env.OUTPUT])))
        )

    def stop(self) -> None:
        """Stop the upload process if it is running. The next process resumes unfinished uploads."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        _ended(self._child, STOP_TIMEOUT_S)
        self._child = None

    def flush(self, timeout_s: float, *, run_ended: bool = False) -> tuple[int, str]:
        """Upload all remaining output, retrying until the timeout. Returns the exit code, and the reason if it is not 0."""
        self.stop()
        child = self._start("--rest", str(timeout_s), *(["--ended"] if run_ended else []))
        code = _ended(child, timeout_s + STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        return code, "" if code == 0 else self.report.get("error") or f"the upload process ended with exit code {code}"

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        command = [*relocatable.python(), "-m", "outlast", "upload", *args]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(self._environ))
        self._reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        self._reader.start()
        return child

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            try:
                self.received(dict(json.loads(line)))
            except ValueError:
                os.write(2, line)

    def received(self, report: dict[str, Any]) -> None:
        """Store a report from the upload process, and the time at which it arrived."""
        for key in _TIMES:
            self._seen.age(key, report.get(key))
        self.report = report

    @property
    def seconds(self) -> float | None:
        """Duration of the last checkpoint upload in seconds; None before the first."""
        seconds = self.report.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    def metrics(self) -> dict[str, float]:
        """Return the last report as metrics. Ages count from the report's arrival, since the wall clock may have been changed."""
        if not (report := self.report):
            return {}
        uploaded_s, failing_s = (self._seen.age(key, report[key]) for key in _TIMES)
        return {
            "sync_failing_seconds": failing_s if report["since"] else 0.0,
            "sync_backlog_bytes": float(report["backlog"]),
            "sync_step": float(report["step"]),
            **({"sync_age_seconds": uploaded_s} if report["pushed"] else {}),
        }


def _ended(child: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Wait for a child, and kill it at the timeout. Returns its exit code."""
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
