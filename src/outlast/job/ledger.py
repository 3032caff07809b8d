"""The ledger: timestamped events, appended by every process and read by `report.goodput`.

One JSON object per line, one file per source, one `write` per line (so only the last line of a killed process may be torn).
Every event has `t` (seconds since the epoch), `kind` and `source`. The kinds and their fields:

    submitted    run, job, replicas, min, max, code_digest?    command line, operator
    asked                                                operator: pods were created
    launcher     pid, adopted                            launcher: started, or restarted over live workers
    worker       worker, pid, attempt                    launcher: a worker was started; operator: the first one runs
    exited       worker, code, reason, interrupted       launcher: a worker ended
    called       generation, reason, planned, suspends?  launcher: workers are to form this generation; suspends: Suspended |
                                                         Queued, the state that follows instead of a new world
    world        generation, workers | size, reason      launcher: this generation's world, in rank order
    failure      generation, worker, rank, code, reason, cause, step, counted, repaired?, traceback?, log_tail?    launcher;
                                                         repaired: the failed attempt, if the members repaired the world before
                                                         this was counted
    attempt      generation, attempt, worker, rank, code, cause, reason    agent: the members restart the processes of this
                                                         world
    unheard      generation, workers, by, reason         agent: peers that are silent or refuse connections
    scaled       replicas                                launcher, on the user's request
    resumed      code_digest?                            command line: an unfinished run continues
    finished     state, reason, step, code               launcher
    session      generation, rank, world_size, versions?    training: process group is up; versions: of libraries, rank 0
    restoring    generation                              training, rank 0
    restored     generation, step, path, source?, bytes?, seconds?, warning?    training, rank 0 (step 0, path null: from the
                                                         beginning); source: memory | peer | disk | store; warning: the
                                                         run had already reached a later step, which is lost
    step         generation, step, steps?, waited_s?, copied_s?    training, rank 0: this step has ended, or it is the last of
                                                         `steps` steps that have; waited_s, copied_s: seconds spent waiting
                                                         for data, and copying the state into memory, in these steps
    slow         generation, step, rank, worker, node, own_s, reason    training, rank 0: a rank is slow, or no longer is
    differs      generation, step, rank | ranks, worker?, node?, tensors, copies, agreed, reason    training, rank 0: copies of
                                                         the common state differ between ranks in a snapshot; agreed: the
                                                         step of the last one in which all were equal, or 0 if unknown
    snapshots    generation, every, step, copied_s, bytes, replicas, reason    training, rank 0: from now on, a snapshot is made
                                                         every `every` steps
    saving       step                                    training, rank 0: a save begins, training stalls
    staged       step, stall_s                           training, rank 0: training continues
    committed    step, path, bytes, seconds              training, rank 0: the checkpoint exists
    save_failed  step, reason                            training, rank 0
    not_copied   step, reason                            training, rank 0: committed, but not on the disks of all workers
    damaged      path, reason                            training, rank 0: skipped on restore
    copied       step, holder, ranks, bytes, seconds     training, rank 0: brought to the disks of these ranks on restore
    interrupted  generation, step, reason                training, rank 0: saved, leaving
    hang         worker, rank, pid, state, silent_s, stacks, reason    agent
    chaos        action, worker, pid                     command line or test: an injected fault
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

TOGETHER_S = 1.0
"""Seconds within which completed steps share one event. If each step had its own event, steps of 100 ms would write 1 kB per
second, for months."""
_PIECE = 64 << 10
_UNSORTED = 1024
"""Maximum number of positions by which an event may be out of chronological order in its file. The value is arbitrary."""


class Ledger:
    """Appends one source's events to `<directory>/<source>.jsonl`. Threads may share it."""

    def __init__(self, directory: Path, source: str) -> None:
        self._path, self._source = directory / f"{source}.jsonl", source
        self._lock = threading.Lock()
        self._steps: Event = {}
        self._step_written = float("-inf")
        """Monotonic time of the last write of a step."""
        self._fd: int | None = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event immediately. If the disk is full, the event is dropped: a full disk must not end a training run."""
        with self._lock:
            self._flush()
            self._step_written = float("-inf")  # the next step, e.g. after a save or a restore, is written at once
            self._append(self._event(kind, fields))

    def step(self, generation: int, step: int, waited_s: float = 0.0, copied_s: float = 0.0) -> None:
        """Record the end of a step, either immediately or together with other steps within TOGETHER_S, but always before any
        other event. The step spent `waited_s` seconds waiting for data and `copied_s` seconds copying the state into memory."""
        with self._lock:
            last = self._steps
            if last and (last["generation"], last["step"]) != (generation, step - 1):
                self._flush()
            together = self._steps.get("steps", 0) + 1
            stalls = {"waited_s": waited_s, "copied_s": copied_s}
            stalls = {name: seconds + self._steps.get(name, 0.0) for name, seconds in stalls.items()}
            fields = {"generation": generation, "step": step, "steps": together, **stalls}
            self._steps = self._event("step", fields)
            if time.monotonic() - self._step_written >= TOGETHER_S:
                self._flush()
                self._step_written = time.monotonic()

    def copy(self, events: Iterable[Event]) -> None:
        """Append events from another source unchanged."""
        with self._lock:
            for event in events:
                self._append(event)

    def close(self) -> None:
        """Write the pending event, and close the file."""
        with self._lock:
            self._flush()
            if self._fd is not None:
                os.close(self._fd)

    def _event(self, kind: str, fields: Event) -> Event:
        return {"t": round(time.time(), 6), "kind": kind, "source": self._source, **fields}

    def _flush(self) -> None:
        if self._steps:
            event, self._steps = self._steps, {}
            if event["steps"] == 1:
                del event["steps"]
            for stall in ("waited_s", "copied_s"):
                if seconds := round(event.pop(stall), 6):
                    event[stall] = seconds
            self._append(event)

    def _append(self, event: Event) -> None:
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size, line = os.fstat(self._fd).st_size, json.dumps(event).encode() + b"\n"
            torn = size and os.pread(self._fd, 1, size - 1) != b"\n"  # by a kill or a full disk
            os.write(self._fd, b"\n" + line if torn else line)


Source = Callable[[], Iterable[bytes]]
"""Function that reads one process's events from the beginning, piece by piece."""


class Events:
    """A ledger's events in chronological order. Each iteration reads the files again, in bounded memory."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = tuple(sources)
        self.broken = 0
        """Number of lines that the latest iteration has skipped so far because they were torn, damaged, or not events."""

    def merged(self, entries: Iterable[Event]) -> Events:
        """Return these events merged with `entries`."""
        text = [json.dumps(entry).encode() + b"\n" for entry in entries]
        return Events((*self._sources, lambda: text))

    def __iter__(self) -> Iterator[Event]:
        self.broken = 0
        streams = (_sorted(self._events(source), number) for number, source in enumerate(self._sources))
        return (event for *_, event in heapq.merge(*streams))

    def _events(self, source: Source) -> Iterator[Event]:
        loads: Callable[[bytes], Any] = json.loads
        with contextlib.suppress(ImportError):  # training processes may lack it; it is three times as fast
            from pydantic_core import from_json as loads
        for line in lines(source()):
            try:
                event = loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict) and isinstance(t := event.get("t"), (int, float)) and t == t and "kind" in event:
                yield event
            else:
                self.broken += 1


def read(*directories: Path) -> Events:
    """Return all events written so far in the ledgers of these directories."""

    def source(path: Path, size: int) -> Source:
        def pieces() -> Iterator[bytes]:
            at = 0
            while at < size:  # opened each time: there may be more files than a process may have open
                with path.open("rb", buffering=0) as file:
                    data = os.pread(file.fileno(), min(_PIECE, size - at), at)
                if not data:
                    return
                at += len(data)
                yield data

        return pieces

    paths = (path for directory in directories for path in sorted(directory.glob("*.jsonl")) if path.is_file())
    return Events(source(path, path.stat().st_size) for path in paths)


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines, without newlines, from text that arrives in pieces."""
    begun: list[bytes] = []
    for piece in pieces:
        first, *others = piece.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun = others[-1:]
    if rest := b"".join(begun):
        yield rest


def _sorted(events: Iterable[Event], number: int) -> Iterator[tuple[float, int, int, Event]]:
    """Yield the events from source `number` in order, each with its sort key. If the clock was set back, an event may be out of
    order by more than `_UNSORTED` events; it then gets the time of the event before it."""
    waiting = deque[tuple[float, int, int, Event]]()
    last = float("-inf")

    def out(entry: tuple[float, int, int, Event]) -> tuple[float, int, int, Event]:
        nonlocal last
        if entry[0] < last:
            entry = (last, *entry[1:3], {**entry[3], "t": last})
        last = entry[0]
        return entry

    for place, event in enumerate(events):
        entry = (event["t"], number, place, event)
        if not waiting or waiting[-1] < entry:
            waiting.append(entry)
        else:
            bisect.insort(waiting, entry)
        if len(waiting) > _UNSORTED:
            yield out(waiting.popleft())
    yield from map(out, waiting)
