"""The agent's hand on its pusher (`agent.upload`): starts it beside the training, hears what it says, has the rest pushed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from outlast.clock import Seen

AGAIN_S = 5.0
"""How long to wait before a pusher that died is started again."""
_TIMES = ("pushed", "since")
"""What it says when, by its wall clock."""
STOP_S = 10.0
"""How long a pusher may take to stop before it is killed."""
SUPERSEDED = 3
"""Exit code of a pusher that found a newer generation in the store."""


class Pusher:
    """One worker's pusher, a child process. `environ` is the worker's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._hearing = threading.Thread()
        self._start_at = 0.0
        self.said: dict[str, Any] = {}
        """What it said last (`push.Said`); empty while another worker of this machine pushes."""
        self._seen = Seen(time.monotonic)

    def look(self) -> bool:
        """Start it if it does not run; whether it has found that we are superseded."""
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return False
            self._child = None
            self._start_at = time.monotonic() + AGAIN_S
            if code == SUPERSEDED:
                self._hearing.join(STOP_S)
                return True
            self.said = {}
            print(f"outlast | the pusher ended with exit code {code}; starting it again", flush=True)
        if time.monotonic() >= self._start_at:
            self._child = self._start()
        return False

    def stop(self) -> None:
        """End it, if it runs; uploads on their way can be gone on with."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None

    def rest(self, seconds: float) -> tuple[int, str]:
        """Push what is left, trying for so long; exit code and, unless that is 0, the reason. Blocks."""
        self.stop()
        child = self._start("--rest", str(seconds))
        try:
            code = child.wait(seconds + STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        self._hearing.join(STOP_S)
        return code, "" if code == 0 else self.said.get("error") or f"the pusher ended with exit code {code}"

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", "outlast.agent.upload", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
        )
        self._hearing = threading.Thread(target=self._hear, args=(child,), daemon=True)
        self._hearing.start()
        return child

    def _hear(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            try:
                self.heard(dict(json.loads(line)))
            except ValueError:
                os.write(2, line)

    def heard(self, said: dict[str, Any]) -> None:
        """Take in what it says. Its times are as old as this moment: see `metrics`."""
        for key in _TIMES:
            self._seen.age(key, said.get(key))
        self.said = said

    def metrics(self) -> dict[str, float]:
        """What it said, for `/metrics`. Ages count from when we heard of it: its wall clock may have been set meanwhile."""
        if not (said := self.said):
            return {}
        pushed_s, failing_s = (self._seen.age(key, said[key]) for key in _TIMES)
        found = {
            "sync_failing_seconds": failing_s if said["since"] else 0.0,
            "sync_backlog_bytes": float(said["backlog"]),
            "sync_step": float(said["step"]),
        }
        return found | ({"sync_age_seconds": pushed_s} if said["pushed"] else {})
