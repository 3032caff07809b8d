"""Feeds one tracker from a run's output, in a thread that sends new values at regular intervals, and retries until they arrive.
An unreachable tracker is logged once, and again when it recovers. No values are lost, since the metrics file is the buffer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from outlast.base import backoff, files
from outlast.base.errors import OutlastError
from outlast.job import contract, url_logins
from outlast.worker.tracking import missing_points
from outlast.worker.tracking.tracker_interface import Run, Sink, Status

RETRY_S = (1.0, 60.0)
LAST_RETRY_S = 0.5
"""Longest backoff in seconds once the run has ended, while its session waits."""


class Forwarder(threading.Thread):
    """Feeds one sink until `finish`. `say` prints a sentence; `changed` is called when `problem` has changed."""

    def __init__(self, sink: Sink, run: Run, say: Callable[[str], None], changed: Callable[[], None] = lambda: None) -> None:
        super().__init__(name=f"outlast-{sink.title}", daemon=True)
        self.sink, self.problem = sink, ""
        self._run, self._say, self._changed = run, say, changed
        self._reader = missing_points.Reader(run.output / contract.METRICS)
        self._position: missing_points.Position | None = None
        """The sink's position; None until the sink is open."""
        self._reached: missing_points.Position = {}
        self._parameters: dict[str, Any] = {}
        self._places: dict[str, str] | None = None
        self._hopeless = False
        self._ending = threading.Event()
        self._status: Status | None = None
        self.complete = False
        """True once all values and the run's end have arrived in the tracker."""

    def forward(self) -> None:
        """Send all new values. Raises the sink's exceptions, after which the next call opens the sink again."""
        if self._position is None:
            self._reader.rewind()
            self._parameters, self._places = {}, None
            self._position = self._reached = self.sink.open()
        position, self._position = self._position, None
        if (parameters := files.mapping(self._run.output / contract.PARAMETERS)) != self._parameters:
            self.sink.parameters(parameters)
            self._parameters = parameters
        while text := self._reader.read():
            if new := missing_points.points(text, position, self.sink.rename):
                self.sink.send(new)
                position = self._reached = missing_points.advanced(position, new)
            self._reader.commit()
        if (places := self._run.checkpoints()) != self._places:
            self.sink.checkpoints(places)
            self._places = places
        self._position = position

    def finish(self, status: Status | None) -> None:
        """Send the remaining values at once, with `status` as the run's end. The thread ends once everything has arrived."""
        self._status = status
        self._ending.set()

    def run(self) -> None:
        failures = 0
        while not self._hopeless:
            ending = self._ending.is_set()
            try:
                self.forward()
                if ending:
                    self.sink.end(self._status)
            except Exception as error:  # third-party libraries raise various errors
                self._hopeless = isinstance(error, OutlastError)
                self._failed(error)
                pause = backoff.jittered(backoff.exponential(failures, *RETRY_S))
                failures += 1
                if self._ending.is_set():
                    time.sleep(min(pause, LAST_RETRY_S))
                else:
                    self._ending.wait(pause)
                continue
            self._works()
            failures = 0
            if ending:
                self.complete = True
                return
            self._ending.wait(self.sink.pause_s)

    def _failed(self, error: Exception) -> None:
        last, self.problem = self.problem, f"{self.sink.title}: {sentence(error)}"
        if not last:
            waits = "nothing goes there" if self._hopeless else "what is logged waits in metrics.jsonl"
            self._say(f"{self.problem}; training goes on, {waits}")
        if last != self.problem:
            self._changed()

    def _works(self) -> None:
        if self.problem:
            self.problem = ""
            self._say(f"{self.sink.title}: works again; everything up to step {max(self._reached.values(), default=0)} is there")
            self._changed()

    def missing(self) -> str:
        """Return the missing steps as text, such as `steps 3 to 9`; empty if none are known to be missing."""
        reader = missing_points.Reader(self._reader.path)
        lost: set[int] = set()
        with contextlib.suppress(OSError):
            while text := reader.read():
                lost.update(point.step for point in missing_points.points(text, self._reached, self.sink.rename))
                reader.commit()
        if not lost:
            return ""
        return f"steps {min(lost)} to {max(lost)}" if len(lost) > 1 else f"step {min(lost)}"


def sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without HTTP libraries' inner errors, and without passwords."""
    text = url_logins.hidden(str(error).strip().partition("\n")[0] or repr(error))
    if "Connection refused" in text or "NewConnectionError" in text:
        return "connection refused"
    if "timed out" in text:
        return "no answer in time"
    if "Max retries exceeded" in text:
        return f"cannot be reached ({text.rpartition('Caused by ')[2][:200].rstrip(')')})"
    return text[:300]
