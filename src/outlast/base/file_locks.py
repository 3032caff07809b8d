"""Takes and releases exclusive and shared file locks. No other module calls flock.

The kernel releases a lock when its last holder dies. A lock belongs to an open file: a child process that inherits the descriptor
(`pass_fds`) keeps the lock if its parent dies first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast.base.errors import Stopped

_POLL_S = 0.1


def acquire(fd: int, *, share: bool = False, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed. Returns False if the lock is taken, unless `wait` is set."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def exclusive(path: Path, *, waiting: Callable[[], None], stop: threading.Event) -> Iterator[int]:
    """Hold an exclusive lock on a file, and yield the descriptor. Calls `waiting` once if it must wait. Raises Stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not acquire(fd):
            waiting()
            while not acquire(fd):
                if stop.wait(_POLL_S):
                    raise Stopped(f"we were told to leave while waiting for {path}")
        yield fd
    finally:
        os.close(fd)


def release(fd: int) -> None:
    """Unlock and close a file, even if a fork of this process still has it open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextlib.contextmanager
def attempted(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing, or on a directory.

    Yields whether the lock was acquired. With `wait`, waits until it is.
    """
    fd = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o666)
    try:
        yield acquire(fd, wait=wait)
    finally:
        release(fd)


def shared(path: Path) -> int | None:
    """Take a shared lock on a file, and return a descriptor, which holds the lock until it is closed.

    Returns None if another process has locked the file exclusively.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if acquire(fd, share=True):
        return fd
    os.close(fd)
    return None


def free(path: Path) -> bool:
    """Return whether no process holds a lock on a file at this moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return acquire(fd)
    finally:
        release(fd)
