"""Bookkeeping for a session's saves: which steps are done, saved and committed, and when the next save is due.

At the end of the stream or of the session, the last step is saved unless the script has saved it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast.base.errors import OutlastError, Superseded
from outlast.base.units import Every
from outlast.job import contract
from outlast.job.ledger import Ledger
from outlast.job.workerfiles import notice_file, time_left
from outlast.storage import checkpoints
from outlast.training import metrics, mistakes
from outlast.training.samples import stream as streams
from outlast.training.state import checkpoint
from outlast.training.state.background_save import Outcome, Saver
from outlast.training.state.shared_disks import Disks
from outlast.worker.launch import preloaded_imports

log = logging.getLogger("outlast")

Meet = Callable[..., list[float]]


class Saves:
    """One session's saves. `report(**changes)` rewrites the progress record."""

    def __init__(
        self, saver: Saver, disks: Disks, ledger: Ledger, screen: metrics.Screen, meet: Meet, report: Callable[..., None]
    ) -> None:
        self.state: Mapping[str, Any] = {}
        self.committed = self.last_step = self.resumed_step = 0
        """The newest committed step, the last step whose save has begun, and the step that `resume` returned."""
        self._saver, self._disks, self._ledger = saver, disks, ledger
        self._screen, self._meet, self._report = screen, meet, report
        self._moved: tuple[int, int] | None = None
        """The last step passed to a collective call, and the streams' position at that time."""
        self._measured: tuple[int, float] | None = None
        """The last step logged with a value for `checkpoint.by`, and the value."""
        self._pending = False
        """True from the start of a save until the ranks have agreed on its outcome."""
        self._problem = ""
        self._ranked = False
        self._logged = 0, 0
        """The last step passed to `log`, which some ranks may not call, and the streams' position at that time."""
        self._saved_position = self._begun = self._last = self._loops = 0
        self._thread = threading.get_ident()
        self._last_save = time.monotonic()
        self._stalls = self._committed_saves = 0
        self._stalled_s = self._saved_s = 0.0
        """Total seconds for which saves have stopped training, and total seconds that committed saves took."""

    def begin(self, state: Mapping[str, Any]) -> None:
        """Set the state that later saves write."""
        self.state, self._loops = state, streams.loops()

    def close(self) -> None:
        self.state = {}

    def resumed(self, step: int, saved: int, age_s: float = 0.0) -> None:
        """Continue counting from `step`. `saved` is the newest committed step, which was saved `age_s` seconds ago."""
        self.resumed_step, self.committed, self.last_step = step, saved, saved
        self._moved, self._measured = None, None
        self._begun = self.position()
        self._saved_position = self._begun if saved == step else -1
        self._last_save = time.monotonic() - age_s
        for stream in mistakes.streams_of(self.state):
            stream.ended = self._ended

    @property
    def unsaved_s(self) -> float:
        return time.monotonic() - self._last_save

    def late(self, every: Every) -> bool:
        """Return whether a save is due because enough time has passed."""
        return every.duration is not None and self.unsaved_s >= every.duration.total_seconds()

    def due(self, step: int, every: Every) -> bool:
        """Return whether a save is due because enough steps have passed."""
        return every.steps is not None and step // every.steps > self.last_step // every.steps

    def position(self) -> int:
        return sum(stream.step for stream in mistakes.streams_of(self.state))

    def stepped(self) -> bool:
        """Return whether a step has ended in this session; always True without a stream."""
        return self.position() > self._begun or not mistakes.streams_of(self.state)

    def advanced(self, call: str, step: int) -> None:
        """Record the script's `step`. Raises OutlastError if it does not advance with the streams."""
        if step < self.resumed_step:
            raise OutlastError(
                f"{call}: resume() returned step {self.resumed_step}, and this is step {step}; "
                "go on from there: step = run.resume(...), and step += 1 in the loop"
            )
        position = self.position()
        if self._moved is not None and self._moved[0] == step and self._moved[1] != position:
            raise OutlastError(
                f"{call}: step is still {step} although the stream has gone on from batch {self._moved[1]} to {position}, "
                "so this would not be saved; write step += 1 after optimizer.step()"
            )
        self._moved = step, position
        preloaded_imports.stepped.set()

    def logged(self, step: int, values: Mapping[str, float] | None = None) -> None:
        self._logged = step, self.position()
        if values and self._saver.retention.by in values:
            self._measured = step, values[self._saver.retention.by]

    def store(self, step: int, value: float | None = None, *, wait: bool = False) -> None:
        """Start saving `step` unless it is committed. With `wait`, return once the save has succeeded or failed."""
        begun, first = time.monotonic(), self._disks.rank == 0
        if first:
            self._ledger.write("saving", step=step)
        self.finish(f"the save of step {step}")
        self._disks.ascertain(self._saver.directory)
        if self.committed != step:
            before = mistakes.saves()
            captured = checkpoint.capture(self.state, self._disks.rank, len(self._disks.by_rank))
            if step != self._last:  # after the last step, no restart repeats the samples of a stream that is still being read
                mistakes.check_read(self.state, before)
            self._pending = True
            self._saver.begin(step, captured, self._metric(step, value) if first else None)
        self._last_save, self.last_step, self._saved_position = time.monotonic(), step, self.position()
        if wait:
            self._report(phase="save")
            self.finish(f"the save of step {step}")
        stall_s = round(time.monotonic() - begun, 6)
        self._stalls, self._stalled_s = self._stalls + 1, round(self._stalled_s + stall_s, 6)
        self._report(stalls=self._stalls, stalled_s=self._stalled_s)
        if first:
            self._ledger.write("staged", step=step, stall_s=stall_s)

    def _metric(self, step: int, value: float | None) -> checkpoints.Metric | None:
        """Return the checkpoint's metric on rank 0: the script's `value`, or else the last value logged up to `step`."""
        by = self._saver.retention.by
        if value is None and by:
            logged = self._measured
            # Another generation may have logged the value, and a script may save a step after it has logged a later one.
            with contextlib.suppress(OSError):  # the disk may be unreadable
                value = logged[1] if logged and logged[0] <= step else metrics.last(self._saver.copy.path, by, step)
        self._ranked = self._ranked or value is not None
        return self._saver.retention.metric(value)

    def _ended(self) -> None:
        if threading.get_ident() == self._thread:  # the end of a stream that another thread reads is not the end of training
            self._screen.flush()
            self.store_last("the end of the stream")

    def store_last(self, where: str) -> None:
        """Save the last step unless it is saved already; if it is not, all ranks must call this. The last step is the one that
        the script has passed to `due` or `save` after the last batch, or else to `log`, which some ranks may not call."""
        if not self.state:
            return
        position = self.position()
        step, at = self._moved or (self.resumed_step, self._begun)
        if at == position and step <= self.last_step:
            return
        [wrong] = self._meet(where, bool(self._not_given()))
        if wrong:
            return
        if at != position:
            logged, at = self._logged
            step = max(self._disks.gather(logged if at == position else 0))
        if step > self.last_step:
            self._last, self._moved = step, (step, position)
            self.store(step)

    def _not_given(self) -> str:
        """Return the remedy if the script has read a stream that is not in the state, or an empty string."""
        if mistakes.streams_of(self.state) or streams.loops() == self._loops:
            return ""
        return 'add the Stream to what resume() is given: run.resume({..., "stream": stream})'

    def say_end(self) -> None:
        """Print on rank 0 that the last step was saved, or warn that it was not."""
        self._screen.flush()
        if self._disks.rank > 0 or not self.state:
            return
        retention = self._saver.retention
        if self._last and self._last == self.committed:
            path = self._saver.directory / contract.checkpoint_name(self._last)
            self._screen.say(f"the last step, {self._last}, is saved in {path}")
        if self.position() != self._saved_position or self._logged[0] > self.last_step:
            remedy = self._not_given() or "call run.due(step) after each step, or run.save(step)"
            log.warning("outlast: what was trained after step %d is not saved; %s", self.last_step, remedy)
        if retention.best and self.last_step > self.resumed_step and not self._ranked:
            named = f"log {retention.by} with run.log()" if retention.by else "set checkpoint.by in the job file"
            log.warning("outlast: no checkpoint is kept as one of the best: %s, or call run.save(step, metric=...)", named)

    def finish(self, call: str) -> None:
        """Wait for the save in progress, and agree on its outcome if a rank has lost its connections. All ranks must call
        this."""
        self.settle(self._saver.wait())
        if self._pending:
            self._pending = False
            if any(self._meet(call, self._saver.broken)):
                self.committed = max(self._disks.gather(self.committed))
                self._saver.connect_again()

    def too_late(self, step: int, notice: Path | None) -> tuple[float, str]:
        """Return the shortest time left on any worker in seconds, and why it is too short to save the last step (an empty string
        if it is not). All ranks must call this."""
        own = notice_file.left_s(notice), self._saver.least_s, self._saver.rest_s, self.committed != step
        each = self._disks.gather(own)
        seconds_left = min(left_s for left_s, *_ in each)
        least = [least_s for _, least_s, *_ in each if least_s is not None]
        if not any(unsaved for *_, unsaved in each):
            return seconds_left, ""
        rest_s = max(rest_s for _, _, rest_s, _ in each)
        return seconds_left, time_left.too_late_to_save(seconds_left, max(least, default=None), rest_s)

    def left(self, step: int, late: str, generation: int) -> None:
        """Record that the ranks leave their world after `step`. `late` is the reason why there was too little time to save it,
        empty if there was enough."""
        reason = f"saved step {step}"
        if (saved := self.committed) != step:
            why = f"is not saved: {late}" if late else "could not be saved"
            reason = f"step {step} {why}; the run goes on from step {saved}, {step - saved} steps are lost"
            if self._disks.rank == 0:
                log.error("outlast: leaving: %s", reason)
        if self._disks.rank == 0:
            self._ledger.write("interrupted", generation=generation, step=step, reason=reason)

    def lost(self) -> str:
        """Return why the last save failed, or an empty string. After `finish`, ranks can differ only in the wording."""
        return self._problem if self.committed < self.last_step else ""

    def settle(self, outcome: Outcome | None) -> None:
        """Record a save's outcome. The training thread of every rank calls this."""
        if outcome is None:
            return
        if outcome.superseded:
            raise Superseded(outcome.reason)
        if outcome.committed:
            self.committed = max(self.committed, outcome.step)
            warning = f"step {outcome.step} is not on every disk: {outcome.elsewhere}" if outcome.elsewhere else ""
            self._report(committed=self.committed, warning=warning)
        else:
            self._problem = f"step {outcome.step} could not be saved: {outcome.reason}"
            self._report(warning=self._problem)

    def saved(self, kind: str, **fields: Any) -> None:
        """Record a save's outcome. The saving thread calls this."""
        if self._disks.rank == 0:
            self._ledger.write(kind, **fields)
        if kind == "committed":
            self._committed_saves, self._saved_s = self._committed_saves + 1, round(self._saved_s + fields["seconds"], 6)
            saves = {"saves": self._committed_saves, "saved_s": self._saved_s}
            self._report(committed=fields["step"], bytes=fields["bytes"], **saves)
        elif kind == "not_copied":
            log.warning("outlast: step %d is saved, but not on every disk: %s", fields["step"], fields["reason"])
        elif self._disks.rank == 0:
            last = f"that of step {self.committed}" if self.committed else "none"
            log.warning(
                "outlast: step %d could not be saved: %s; the newest checkpoint is %s", fields["step"], fields["reason"], last
            )
