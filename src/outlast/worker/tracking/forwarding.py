"""Feeds one tracker from a run's output, in a thread that sends new values at regular intervals, and retries until they arrive.
An unreachable tracker is logged once, and again when it recovers. No values are lost, since the metrics file is the buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.job import contract, url_logins
from outlast.worker.tracking import missing_points
from outlast.worker.tracking.tracker_interface import Run, Sink, Status

LAST_RETRY_S = 0.5
"""Seconds between retries once the run has ended, while its session waits."""


class Forwarder(threading.Thread):
    """Feeds one sink until `finish`. `say` prints a sentence."""

    def __init__(self, sink: Sink, run: Run, say: Callable[[str], None]) -> None:
        super().__init__(name=f"outlast-{sink.title}", daemon=True)
        self._sink, self._run, self._say = sink, run, say
        self._reader = missing_points.Reader(run.output / contract.METRICS)
        self._position: missing_points.Position | None = None
        """The sink's position; None until the sink is open."""
        self._reached: missing_points.Position = {}
        self._parameters: dict[str, Any] = {}
        self._ending = threading.Event()
        self._status: Status | None = None
        self._problem = ""
        self._complete = False
        """True once all values and the run's end have arrived in the tracker."""

    def forward(self) -> None:
        """Send all new values. Raises the sink's exceptions, after which the next call opens the sink again."""
        if self._position is None:
            self._reader.offset, self._parameters = 0, {}
            self._position = self._reached = self._sink.open()
        position, self._position = self._position, None
        if (parameters := files.mapping(self._run.output / contract.PARAMETERS)) != self._parameters:
            self._sink.parameters(parameters)
            self._parameters = parameters
        while lines := self._reader.read():
            if new := missing_points.points(lines, position, self._sink.rename):
                self._sink.send(new)
                position = self._reached = missing_points.advanced(position, new)
            self._reader.offset += len(lines)
        self._position = position

    def finish(self, status: Status | None) -> None:
        """Send the remaining values at once, with `status` as the run's end. The thread ends once everything has arrived."""
        self._status = status
        self._ending.set()

    def run(self) -> None:
        while not self._complete:
            ending = self._ending.is_set()
            try:
                self.forward()
                if ending:
                    self._sink.end(self._status)
            except Exception as error:  # third-party libraries raise various errors
                self._failed(error)
                if isinstance(error, OutlastError):
                    return
                if ending:
                    time.sleep(LAST_RETRY_S)
            else:
                if self._problem:
                    self._problem = ""
                    self._say(f"{self._sink.title}: works again; everything up to step {self._step()} is there")
                self._complete = ending
            self._ending.wait(self._sink.pause_s)

    def _failed(self, error: Exception) -> None:
        last, self._problem = self._problem, sentence(error)
        if not last:
            waits = "nothing goes there" if isinstance(error, OutlastError) else "what is logged waits in metrics.jsonl"
            self._say(f"{self._sink.title}: {self._problem}; training goes on, {waits}")

    def _step(self) -> int:
        return max(self._reached.values(), default=0)

    def missing(self) -> str:
        """Return a sentence if the tracker lacks metrics or the run's end; otherwise an empty string."""
        if self._complete:
            return ""
        has = f"has the metrics up to step {self._step()} only ({self._problem or 'there was no time'})"
        return f"{self._sink.title}: {has}; metrics.jsonl has all, and the next start sends it"


def sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without HTTP libraries' outer errors, and without passwords."""
    text = str(error).strip().partition("\n")[0] or repr(error)
    return url_logins.hidden(text.rpartition("Caused by ")[2])[:300]
