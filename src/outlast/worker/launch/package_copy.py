"""The copy of Outlast from which a job on this machine runs, so that an upgrade in place does not affect running processes.

    <cache>/packages/<digest>/outlast/        a copy of the package with its bytecode, shared by all jobs with this version
    <cache>/packages/<digest>/outlast.lock    a shared lock, held by each launcher and agent that runs from this copy

The command line makes the copy, and starts the launcher with the copy at the front of PYTHONPATH, which all processes of the job
inherit. A new copy replaces those that no process uses. See docs/decisions/0061-upgrades-in-place.md.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import outlast
from outlast.base import file_locks, files

LOCK = "outlast.lock"
UNUSED_S = 3600.0
"""Seconds for which an unused copy is kept. Arbitrary, but longer than a launcher takes to start and lock its copy."""
_VARIABLE = "PYTHONPATH"


def current() -> Path | None:
    """Return the directory of the copy from which this process runs; None if it uses the installed package."""
    directory = Path(outlast.__file__).parents[1]
    return directory if (directory / LOCK).is_file() else None


def make(cache: Path) -> Path:
    """Return a directory with a copy of our package, making it if it does not exist. Raises OSError."""
    if copy := current():  # one job's script starts another job
        return copy
    source, packages = Path(outlast.__file__).parent, cache / "packages"
    listing = _listing(source)
    copy = packages / hashlib.sha256(repr(listing).encode()).hexdigest()[:16]
    packages.mkdir(parents=True, exist_ok=True)
    with file_locks.attempted(packages / ".lock", wait=True):
        # A power loss may have truncated files. Not all file systems keep nanoseconds.
        if [row[:2] for row in _listing(copy / "outlast")] != [row[:2] for row in listing]:
            _remove_unused(packages)
            _copy(source, copy)
        os.utime(copy / LOCK)
    return copy


def hold() -> None:
    """Protect this process's copy of Outlast, if any, from removal until the process ends."""
    if copy := current():
        file_locks.shared(copy / LOCK)


def ahead(environ: Mapping[str, str], copy: Path | None = None) -> dict[str, str]:
    """Return an environment whose processes import Outlast from `copy`, or by default from the copy that this process uses."""
    if not (copy := copy or current()):
        return dict(environ)
    others = environ[_VARIABLE].split(os.pathsep) if environ.get(_VARIABLE) else []
    return {**environ, _VARIABLE: os.pathsep.join([str(copy), *(path for path in others if path != str(copy))])}


def _listing(package: Path) -> list[tuple[str, int, int]]:
    """Return the path, size and modification time of each file except bytecode; empty if there is no package."""
    listing = []
    for directory, below, names in os.walk(package):
        below[:] = [name for name in below if name != "__pycache__"]
        for path in (os.path.join(directory, name) for name in names):
            status = os.stat(path)
            listing.append((path.removeprefix(str(package)), status.st_size, status.st_mtime_ns))
    return sorted(listing)


def _copy(source: Path, copy: Path) -> None:
    partial = files.beside(copy)
    partial.mkdir()
    try:
        (partial / LOCK).touch()
        shutil.copytree(source, partial / "outlast")  # no hard links: an editor may write into the files of a checkout
        shutil.rmtree(copy, ignore_errors=True)
        partial.rename(copy)
    except shutil.Error as errors:  # has one error per file
        raise OSError(errors.args[0][0][2]) from errors
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_unused(packages: Path) -> None:
    for lock in packages.glob(f"*/{LOCK}"):
        if time.time() - lock.stat().st_mtime > UNUSED_S:
            with file_locks.attempted(lock) as unused:
                if unused:
                    shutil.rmtree(lock.parent, ignore_errors=True)
