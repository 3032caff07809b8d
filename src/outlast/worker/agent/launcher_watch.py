"""Restarts this machine's launcher if it is unreachable, so that a job survives the loss of its launcher."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from outlast.base import unix_sockets
from outlast.job.contract import Env
from outlast.worker.launch import os_calls

CHECK_INTERVAL_S = 1.0
UNREACHABLE_S = 1.5
"""Seconds after which an unreachable launcher is restarted. Each restart doubles this time, since imports may be slow."""
LONGEST_S = 60.0
STAGGER_S = 0.2
"""Additional delay in seconds per worker index, since one new launcher is enough."""


class LauncherWatch:
    """Watches this machine's launcher, if there is one. `environ` is the worker's environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._command = environ.get(Env.REVIVE, "")
        self._socket = environ[Env.RENDEZVOUS].removeprefix("unix://")
        self._index = int(environ[Env.WORKER])
        self._probe_port = max(0, int(environ.get(Env.PROBE_PORT, "0")) - self._index)
        self._check_at = 0.0
        self._unreachable_since: float | None = None
        self._patience_s = UNREACHABLE_S

    def look(self) -> None:
        now = time.monotonic()
        if not self._command or now < self._check_at:
            return
        self._check_at = now + CHECK_INTERVAL_S
        try:
            unix_sockets.connect(self._socket).close()
            self._unreachable_since, self._patience_s = None, UNREACHABLE_S
        except TimeoutError:  # alive, but busy or stopped: a running world does not need it
            self._unreachable_since = None
        except OSError:
            if self._unreachable_since is None:
                self._unreachable_since = now + STAGGER_S * self._index
            elif now - self._unreachable_since > self._patience_s:
                self._unreachable_since, self._patience_s = now, min(2 * self._patience_s, LONGEST_S)
                environ = {**os.environ, Env.PROBE_PORT: str(self._probe_port)}
                with contextlib.suppress(OSError, subprocess.SubprocessError):  # the process limit: tried again later
                    os_calls.daemon(json.loads(self._command), Path(os.devnull), env=environ)
