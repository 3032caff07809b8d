"""The ledger: what happened when, appended by every process, read by `report.goodput`.

One JSON object a line, one file a source, one `write` a line (so lines of a killed process are whole, but for perhaps the last).
Every event has `t` (seconds since the epoch), `kind` and `source`. The kinds and their fields:

    submitted    run, job, replicas, min, max            command line
    launcher     pid, adopted                            launcher: started, or restarted over live workers
    worker       worker, pid, attempt                    launcher: a worker was started
    exited       worker, code, reason, interrupted       launcher: a worker ended
    called       generation, reason, planned             launcher: form up for this generation
    world        generation, workers, reason             launcher: this generation's world, in rank order
    failure      generation, worker, rank, code, reason, step, counted    launcher
    scaled       replicas                                launcher, at the user's word
    resumed                                              command line: an unfinished run goes on
    finished     state, reason, step, code               launcher
    session      generation, rank, world_size            training: process group is up
    restoring    generation                              training, rank 0
    restored     generation, step, path                  training, rank 0 (step 0, path null: from the beginning)
    step         generation, step                        training, rank 0: this step has ended
    saving       step                                    training, rank 0: a save begins, training stalls
    staged       step, stall_s                           training, rank 0: training goes on
    committed    step, path, bytes, seconds              training, rank 0: the checkpoint exists
    save_failed  step, reason                            training, rank 0
    not_copied   step, reason                            training, rank 0: committed, but not on the disks of all workers
    damaged      path, reason                            training, rank 0: skipped on restore
    copied       step, holder, ranks, bytes, seconds     training, rank 0: brought to the disks of these ranks on restore
    interrupted  step, reason                            training, rank 0: saved, leaving
    hang         worker, rank, pid, state, silent_s, stacks, reason    agent
    chaos        action, worker, pid                     whoever did it
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Ledger:
    """Appends events of one source to `<directory>/<source>.jsonl`."""

    def __init__(self, directory: Path, source: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._fd = os.open(directory / f"{source}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":  # the last writer was killed in its last line
            with contextlib.suppress(OSError):
                os.write(self._fd, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event, now. A full disk must not end a training run: the event is dropped then."""
        event = {"t": round(time.time(), 6), "kind": kind, "source": self._source, **fields}
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read(directory: Path) -> list[Event]:
    """All events of a ledger directory in the order of time; a torn last line (its writer was killed) is left out."""

    def events() -> Iterator[Event]:
        for path in sorted(directory.glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and isinstance(event.get("t"), int | float) and "kind" in event:
                    yield event

    return sorted(events(), key=lambda event: event["t"])
