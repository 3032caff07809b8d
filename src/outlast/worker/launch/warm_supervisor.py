"""Starts, continues, restarts and kills an agent's warm process, and waits until it can fork."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from outlast.base import backoff, unix_sockets
from outlast.job import contract
from outlast.job.workerfiles import progress_file
from outlast.worker.launch import sibling, warm_request

RESTARTS, PAUSE_S, LONGEST_PAUSE_S = 10, 1.0, 30.0
"""Maximum number of consecutive restarts of a warm process that cannot fork, and the first and longest backoff in seconds.
Arbitrary: the restarts take three minutes, in which a machine at its process limit may recover."""
_POLL_INTERVAL_S = 0.02


class WarmEnded(Exception):
    """Raised if the warm process has ended, and the worker with it. `code` is the worker's exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class WarmProcess:
    """A worker's warm process, a child of its agent. The agent's threads share this object."""

    def __init__(self, environ: dict[str, str], process: subprocess.Popen[bytes] | sibling.Forked | None = None) -> None:
        """`environ` is the worker's environment, read at each start."""
        self._environ, self._process = environ, process
        self._path = Path(environ[contract.Env.STATE]) / warm_request.SOCKET
        self._lock, self._killed = threading.Lock(), threading.Event()
        self._forked = False
        """True once this worker has had a warm process that could fork."""

    @property
    def killed(self) -> bool:
        return self._killed.is_set()

    def __bool__(self) -> bool:
        return self._process is not None

    def start(self, python: str) -> None:
        """Start the process with this Python, unless it is running. The process dies with the calling thread. Raises OSError."""
        with self._lock:
            if self._process is None and not self._killed.is_set():
                self._process = sibling.start_warm(python, self._environ)

    def wait_until_ready(self, python: str, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the process can fork, and restart it if it has ended. Returns False if `stop` or `kill` came first. Raises
        WarmEnded if no process can be started, or if this worker's first process has ended: that worker has nothing to lose."""
        failures = 0
        while not self._killed.is_set() and not stop():
            try:
                self.start(python)
                unix_sockets.connect(self._path).close()
                self._forked = True
                return True
            except OSError as problem:
                status = self._process.poll() if self._process else None
                if self._process and status is None:
                    self._killed.wait(_POLL_INTERVAL_S)  # it is importing torch
                    continue
                why = contract.how_ended(status) if status is not None else f"could not be started: {problem.strerror}"
            self._process = None
            if self._killed.is_set():
                break
            failures += 1
            reason = f"the warm process {why}"
            print(f"outlast | {reason}", flush=True)
            if not self._forked or failures > RESTARTS:
                killed = status is None or status < 0
                raise WarmEnded(contract.exit_code(status or -9) if killed else contract.Exit.FAILED, reason)
            if failures > 1:
                self._killed.wait(backoff.exponential(failures - 2, PAUSE_S, LONGEST_PAUSE_S))
        return False

    def continue_stopped(self) -> None:
        """Continue the process if it was stopped (SIGSTOP), since it cannot fork until then, and nobody else notices."""
        if (process := self._process) and process.poll() is None and progress_file.kernel(process.pid)[0] == "T":
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process for good. Its forks, the training processes, die with it."""
        with self._lock:
            self._killed.set()
            if self._process:
                self._process.kill()

    def wait(self) -> None:
        if process := self._process:
            process.wait()
