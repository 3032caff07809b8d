"""Keeps the local state of a sync, from which the sync resumes after an interruption.

    state           files and objects (`index.State`), replaced as a whole
    state.done      log of the transfers since `state` was written, one line per file
    state.lock      held by the syncing process
    state.uploads/  journals of large uploads (`Store.upload`)

A transfer is logged once it is done, so a sync never skips one that was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from outlast.base import file_locks, files
from outlast.base.errors import AlreadyRunning, OutlastError
from outlast.storage.sync.index import Object, Seen, State

_FLUSH_S = 1.0
"""Interval between flushes of the log, in seconds. If the process is killed, the log since the last flush is lost."""


class StateFile:
    """The local state of a sync between one tree and one store. This process holds its lock."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self._done = path.with_name(f"{path.name}.done")
        self.uploads = path.with_name(f"{path.name}.uploads")
        self._file: IO[str] | None = None
        self._flushed = 0.0
        self._id = ""
        self.fresh: set[str] = set()
        """Paths transferred since the last `save`, and therefore not yet in the store's manifest."""
        self.state = State(place)
        with contextlib.suppress(FileNotFoundError, ValueError):
            state, self._id = State.decode(path.read_bytes()), _id(path)
            if state.place == place:
                self.state = state
        self._replay()
        self._replayed = bool(self.fresh)

    def _replay(self) -> None:
        """Apply the log to the state. The last line of the log may be incomplete."""
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError), self._done.open() as lines:
            if json.loads(next(lines, "null")) != {"place": self.state.place, "after": self._id}:
                return
            for line in lines:
                path, object, seen = json.loads(line)
                self.state.objects[path], self.state.seen[path] = Object(*object), Seen(*seen)
                self.fresh.add(path)

    def add(self, path: str, object: Object, seen: Seen) -> None:
        """Record that a file and an object have the same content."""
        self.state.objects[path], self.state.seen[path] = object, seen
        self.fresh.add(path)
        if self._file is None:
            self._file = self._opened()
        self._file.write(json.dumps([path, object, seen]) + "\n")
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()

    def _opened(self) -> IO[str]:
        if self._replayed:  # drop an incomplete line left by a kill
            whole = self._done.read_bytes()
            os.truncate(self._done, whole.rfind(b"\n") + 1)
            return self._done.open("a")
        file = self._done.open("w")
        file.write(json.dumps({"place": self.state.place, "after": self._id}) + "\n")
        return file

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def save(self) -> None:
        """Write the state and start a new log."""
        files.replace(self._path, self.state.encode())
        self._id = _id(self._path)
        self.close()
        self._done.unlink(missing_ok=True)
        self.fresh.clear()
        self._replayed = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _id(path: Path) -> str:
    """Return an id of the version of the state that a log continues."""
    stat = path.stat()
    return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"


@contextlib.contextmanager
def opened(path: Path, place: str) -> Iterator[StateFile]:
    """Open and lock the state at `path`. Raises AlreadyRunning if another process holds the lock."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise OutlastError(f"the notes of a sync cannot be kept in {path.parent}: {error.strerror}") from error
    with file_locks.attempted(lock) as locked:
        if not locked:
            raise AlreadyRunning(f"another process syncs this with {place.rpartition('/')[0]} now ({lock}); wait for it")
        with contextlib.closing(StateFile(path, place)) as file:
            yield file
