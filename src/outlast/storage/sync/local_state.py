"""Keeps the local state of a sync, from which the sync resumes after an interruption.

    state           files and objects (`index.State`), replaced as a whole
    state.lock      held by the syncing process
    state.uploads/  journals of large uploads (`Store.upload`)

A transfer is recorded once it is done, so a sync never skips one that was interrupted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from outlast.base import file_locks, files
from outlast.base.errors import AlreadyRunning, OutlastError
from outlast.storage.sync.index import Object, Seen, State

_SAVE_S = 1.0
"""Minimum seconds between saves during a sync. If the process is killed, transfers since the last save are repeated."""
_SHARE = 20
"""A save may take this fraction of the time: a large state is saved less often."""


class StateFile:
    """The local state of a sync between one tree and one store. This process holds its lock."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self.uploads = path.with_name(f"{path.name}.uploads")
        self.state = State(place)
        with contextlib.suppress(FileNotFoundError, ValueError):
            state = State.decode(path.read_bytes())
            if state.place == place:
                self.state = state
        self._unsaved = False
        self._due = time.monotonic() + _SAVE_S

    def add(self, path: str, object: Object, seen: Seen) -> None:
        """Record that a file and an object have the same content."""
        self.state.objects[path], self.state.seen[path] = object, seen
        self.state.fresh.add(path)
        self._unsaved = True
        if time.monotonic() > self._due:
            self._write()

    def save(self) -> None:
        """Write the state of a sync that is complete."""
        self.state.fresh.clear()
        self._write()

    def close(self) -> None:
        if self._unsaved:
            self._write()

    def _write(self) -> None:
        begun = time.monotonic()
        files.replace(self._path, self.state.encode())
        now = time.monotonic()
        self._unsaved, self._due = False, now + max(_SAVE_S, _SHARE * (now - begun))


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
