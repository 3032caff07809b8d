"""One process at a time, and several that share: flock on files that stay where they are.

The kernel gives a lock back when its last holder dies, so nothing is ever left locked. A lock is that of an open file: a child
process that inherits the descriptor (`pass_fds`) holds it on when we die before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast.errors import Stopped

_LOOK_S = 0.1


@contextlib.contextmanager
def exclusive(path: Path, *, waiting: Callable[[], None], stop: threading.Event) -> Iterator[int]:
    """Hold the lock of a file, alone; the descriptor that holds it. Who comes second waits, and `waiting` is called once.

    Raises Stopped soon after `stop` is set while we wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _take(fd, fcntl.LOCK_EX):
            waiting()
            while not _take(fd, fcntl.LOCK_EX):
                if stop.wait(_LOOK_S):
                    raise Stopped(f"we were told to leave while waiting for {path}")
        yield fd
    finally:
        os.close(fd)


def shared(path: Path) -> int | None:
    """Hold the lock of a file together with others, until the descriptor is closed; None when somebody holds it alone."""
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if _take(fd, fcntl.LOCK_SH):
        return fd
    os.close(fd)
    return None


def free(path: Path) -> bool:
    """Whether nobody holds the lock of a file at this moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _take(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _take(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
