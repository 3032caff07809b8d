"""Replaces files atomically, and reads files that may be missing.

Even after a crash, a reader sees either the whole old content or the whole new content.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from outlast.base.errors import OutlastError


def beside(path: Path) -> Path:
    """Return a unique temporary name beside `path`, for a file that is renamed to `path` once it is complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")


def replace(path: Path, text: str | bytes, *, durable: bool = False) -> None:
    """Write a file beside `path` and rename it to `path`. With `durable`, the file survives a power loss. Raises OSError."""
    partial = beside(path)
    try:
        with open(partial, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # leave nothing on a full disk
    if durable:
        sync(path.parent)


def target(path: Path) -> Path:
    """Return the file to `replace` for a user who named `path`: symlinks are followed. Raises OutlastError if a directory or a
    device is there."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OutlastError(f"{path} is no regular file; name a file to write or to replace")
    return Path(os.path.realpath(path))


def text(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def sync(directory: Path) -> None:
    """Flush a directory's entries to disk, so that new names survive a power loss."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def flush(directory: Path) -> None:
    """Flush a directory's whole file system to disk, which is cheaper than flushing many files."""
    if sys.platform != "linux":
        os.sync()
        return
    import ctypes

    fd = os.open(directory, os.O_RDONLY)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(fd)
    finally:
        os.close(fd)
