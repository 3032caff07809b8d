"""Checks local code archives, and unpacks archives where the code runs, with limits on size and number of files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outlast.base import unpack
from outlast.base.errors import OutlastError
from outlast.base.unpack import checksum

__all__ = ["MAX_BYTES", "MAX_ENTRIES", "check", "check_checksum", "checksum", "extract", "root"]

MAX_BYTES = 4 << 30
"""Maximum size of unpacked code, in bytes. A larger archive is a mistake, or a bomb."""
MAX_ENTRIES = 100_000


def extract(archive: Path, into: Path, *, name: str) -> None:
    """Unpack a code archive into an empty directory (see `unpack.extract`)."""
    unpack.extract(archive, into, unpack.Budget(name, size=MAX_BYTES, entries=MAX_ENTRIES))


def check(archive: Path, name: str, sha256: str, runs: str) -> None:
    """Raise OutlastError if a local archive has a different checksum from `sha256` (unless that is empty), cannot be unpacked, or
    lacks the script `runs`. If `runs` is a module, it is not checked."""
    if sha256:
        check_checksum(archive, name, sha256)
    with tempfile.TemporaryDirectory() as directory:
        extract(archive, Path(directory), name=name)
        if runs.endswith(".py") and not (root(Path(directory), runs) / runs).is_file():
            raise OutlastError(f"script ({runs}) is not in {name}; correct it, or the archive")


def check_checksum(archive: Path, name: str, sha256: str) -> None:
    """Raise OutlastError unless an archive matches the checksum in the job file."""
    if (found := checksum(archive)) != sha256:
        raise OutlastError(f"{name} has the checksum {found}, the job file says {sha256}; correct #sha256= there, or the archive")


def root(tree: Path, runs: str) -> Path:
    """Return the code's root in an unpacked archive: the tree's only directory if only that contains the script or module `runs`,
    otherwise the tree itself."""
    entries = [entry for entry in tree.iterdir() if entry.name not in ("__MACOSX", ".DS_Store")]
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        (only,) = entries
        if not _holds(tree, runs) and _holds(only, runs):
            return only
    return tree


def _holds(directory: Path, runs: str) -> bool:
    return (directory / runs).exists() or (directory / f"{runs}.py").exists()
