"""Reports progress to Kubeflow Trainer's status server, which a TrainJob's pods find through environment variables.

Rank 0's agent sends at most one report every five seconds, in a thread. Server failures are ignored, since every report is
complete. https://github.com/kubeflow/trainer/tree/v2.3.0/docs/proposals/2779-trainjob-progress
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outlast.job import contract
from outlast.worker.tracking import missing_points

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Environment variables for the URL, the server's certificate authority (a file), and our token (a file that is renewed)."""
INTERVAL_S = 5.0
TIMEOUT_S = 3.0
_MOST, _LONGEST = 200, 64
"""Maximum number of metrics per report, and of characters in a metric's name or value."""
_TAIL = 1 << 16


class StatusServer:
    """The status server that `environ` names, if any. `output` is the job's output directory."""

    def __init__(self, environ: Mapping[str, str], output: Path) -> None:
        self._environ, self._metrics = environ, output / contract.METRICS
        self._sender: threading.Thread | None = None
        self._sent = float("-inf")
        self._first = (0, 0.0)
        """First reported step and its time, from which the remaining time is estimated."""
        self._last: tuple[int, int | None] | None = None
        """Newest step, and the total number of steps if known; None while rank 0 is on another worker."""

    def look(self, step: float, steps: float | None, *, rank: int) -> None:
        """Report the first process's progress if that process is rank 0 and a report is due."""
        self._last, now = (int(step), int(steps) if steps else None) if rank == 0 else None, time.monotonic()
        if URL in self._environ and now - self._sent >= INTERVAL_S and not (self._sender and self._sender.is_alive()):
            self._report(now)

    def end(self, *, done: bool) -> None:
        """Report the run's end, if this worker has reported progress. Takes at most twice `TIMEOUT_S`."""
        if self._sender:
            self._sender.join(TIMEOUT_S)
            self._report(time.monotonic(), done=done)
            self._sender.join(TIMEOUT_S)

    def _report(self, now: float, *, done: bool | None = None) -> None:
        if self._last is None:
            return
        step, steps = self._last
        if self._sender is None or step < self._first[0]:
            self._first = step, now
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat()}
        if done:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif steps:
            status["progressPercentage"] = min(99, 100 * step // steps)
            if done is None and step > self._first[0]:
                pace_s = (now - self._first[1]) / (step - self._first[0])
                status["estimatedRemainingSeconds"] = max(0, round(pace_s * (steps - step)))
        metrics = {"current_step": step, **({"total_steps": steps} if steps else {}), **self._logged()}
        status["metrics"] = [{"name": name, "value": str(value)[:_LONGEST]} for name, value in metrics.items()]
        body = json.dumps({"trainerStatus": status}).encode()
        self._sent, self._sender = now, threading.Thread(target=self._post, args=(body,), daemon=True)
        self._sender.start()

    def _logged(self) -> dict[str, float]:
        try:
            with self._metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL))
                new = missing_points.points(file.read(), {})
        except OSError:  # nothing is logged
            return {}
        return {point.name: point.value for point in new[-_MOST:] if len(point.name) <= _LONGEST}

    def _post(self, body: bytes) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # training does not depend on it
            headers = {"Content-Type": "application/json"}
            if file := self._environ.get(TOKEN):
                headers["Authorization"] = f"Bearer {Path(file).read_text().strip()}"
            request = urllib.request.Request(self._environ[URL], body, headers, method="POST")
            context = ssl.create_default_context(cafile=self._environ.get(CA_CERT))
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context):
                pass
