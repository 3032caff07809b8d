"""Puts a job's code into its run directory, from a directory, an archive or a store.

    copy(directory, entries, into, ...)              at submission, for code on this machine
    place("s3://bucket/code.tar.gz", into, ...)      by the first worker on a machine, for all of its workers

The job may write to the run's directory. Newer code does not replace files that the job has written or changed there.
"""

from __future__ import annotations

import filecmp
import functools
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base import file_locks, files, units
from outlast.base.errors import OutlastError, StoreError
from outlast.job import spec
from outlast.job.shipping import archives
from outlast.storage import store
from outlast.storage.sync import push_and_pull
from outlast.worker.prepare import fetch_from_store, workdir
from outlast.worker.prepare.fetch_from_store import Say

if TYPE_CHECKING:
    from outlast.job.shipping import code_files

_INCOMING = ".outlast-code"
_NOTE = "code.json"
"""A file with the `code` in the run's directory, its `version` (empty during the first fetch), the `time` of the fetch, and
whether it is `current`: fetched for the newest submission. Otherwise its source is checked for changes."""


# From a directory


def copy(code: Path, entries: Sequence[code_files.Entry], into: Path, submitted: float) -> list[str]:
    """Copy the code in a directory (`shipping.code_files`) to the run's directory, and return the files that were missing or
    different. Files that the job has written since `submitted` remain: they differ from their recorded copies, and are newer."""
    replaced = []
    try:
        into.mkdir(exist_ok=True)
        copied = workdir.listed(into)
        workdir.note_code(into, {entry.name: workdir.fingerprint(code / entry.name) for entry in entries})
        for directory in sorted({parent for entry in entries for parent in Path(entry.name).parents} - {Path()}):
            _replace(code / directory, into / directory, submitted, _copy)
        for entry in entries:
            new, old = code / entry.name, into / entry.name
            differs = not _same(new, old)
            untouched = old.is_file() and copied.get(entry.name) == workdir.fingerprint(old)
            put = functools.partial(_copy, target=entry.target)
            if _replace(new, old, float("inf") if untouched else submitted, put) and differs:
                replaced.append(entry.name)
    except OSError as problem:
        raise OutlastError(f"code: cannot copy {code} to {into}: {problem}; correct that, or use --fresh") from problem
    return replaced


def _same(new: Path, old: Path) -> bool:
    if new.is_symlink() or old.is_symlink():
        return new.is_symlink() and old.is_symlink() and new.readlink() == old.readlink()
    return old.is_file() and filecmp.cmp(new, old, shallow=False)


def _copy(new: Path, old: Path, target: str = "") -> None:
    """Replace `old` with a copy of `new`, or with a link to `target`."""
    partial = old.with_name(f".{old.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    if target:
        partial.symlink_to(target)
    else:
        shutil.copy2(new, partial, follow_symlinks=False)
    partial.replace(old)


def _replace(new: Path, old: Path, submitted: float, put: Callable[[Path, Path], object]) -> bool:
    """Replace the run's file `old` with `new` from the code, but never write through a link. Returns whether it was replaced."""
    mode = new.lstat().st_mode
    if old.is_dir() and not old.is_symlink() and not stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{old} is a directory, {new} is not")
    if stat.S_ISDIR(mode):
        if old.is_symlink() or old.is_file():
            old.unlink()
        old.mkdir(stat.S_IMODE(mode) | stat.S_IRWXU, exist_ok=True)
    elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # sockets and pipes are not code
        both_files = stat.S_ISREG(mode) and old.is_file() and not old.is_symlink()
        if both_files and old.stat().st_mtime >= max(submitted, new.stat().st_mtime):
            return False  # written by the job, since a copy has its original's mtime, from before the run
        put(new, old)
        return True
    return False


# From an archive or a store


def submitted_again(shared: Path) -> None:
    """Make the next worker check whether the code has changed. Otherwise a run keeps its first code."""
    if note := files.mapping(shared / _NOTE):
        files.replace(shared / _NOTE, json.dumps({**note, "current": False}), durable=True)


def place(code: str, into: Path, shared: Path, *, runs: str, say: Say, stop: threading.Event) -> None:
    """Fetch code from an archive or a store into the job's run directory, unless the code there is current.

    `shared` is the run's directory for records. `runs` is a script's path or a module's top-level package: if an archive's single
    directory contains it, that directory is the code. Raises OutlastError and OSError.
    """
    incoming = into / _INCOMING

    def write_note(version: str) -> None:
        note = {"code": code, "version": version, "time": time.time(), "current": bool(version)}
        files.replace(shared / _NOTE, json.dumps(note), durable=True)

    with file_locks.exclusive(
        shared / "code.lock", waiting=lambda: say("waiting for another worker that fetches code"), stop=stop
    ):
        note = files.mapping(shared / _NOTE)
        complete, same = bool(note.get("version")), note.get("code") == code
        if complete and same and note.get("current"):
            return
        try:
            version, fetch_code = _look(code)
        except StoreError as problem:
            if complete and same and problem.retry:
                say(f"code ({code}) cannot be checked for changes: {problem}; continuing with the code that is here")
                return
            raise
        if not (same and note.get("version") == version):
            into.mkdir(parents=True, exist_ok=True)
            if not note:
                write_note("")
            elif not complete:  # the first fetch did not finish, so no code has run here yet
                workdir.forget_code(into)
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.mkdir()
            tree, version = fetch_code(incoming, runs, say, stop)
            _merge(tree, into, note["time"] if complete else float("inf"))
            shutil.rmtree(incoming)
        write_note(version)


_Fetch = Callable[[Path, str, Say, threading.Event], tuple[Path, str]]
"""Fetches code into an empty directory, given `runs`, `say` and `stop`. Returns the path and the version of the code."""


def _look(code: str) -> tuple[str, _Fetch]:
    """Return the current version of code in an archive or a store, and a function that fetches it."""
    where, checksum = spec.pinned(code)
    if path := spec.local(where):
        here, version = path, archives.checksum(path)
        return version, lambda directory, runs, say, stop: (_unpack(here, f"code ({here})", checksum, directory, runs), version)
    if not spec.archive(where):
        listing = fetch_from_store.look(where, "code")
        return listing.version, lambda directory, runs, say, stop: _fetch(listing, directory, say, stop)
    above, _, key = store.normalised(where).rpartition("/")
    place = store.open_(above)
    try:
        entry = place.head(key)
    except store.Missing as error:
        raise OutlastError(f"code ({where}) does not exist; correct the URL") from error

    def fetch_archive(directory: Path, runs: str, say: Say, stop: threading.Event) -> tuple[Path, str]:
        archive = directory / key.rpartition("/")[2]
        push_and_pull.receive(place, [(key, entry.size, archive)], stop=stop)
        return _unpack(archive, f"code ({where})", checksum, directory, runs), f"{entry.size} {entry.etag}"

    return f"{entry.size} {entry.etag}", fetch_archive


def _fetch(listing: fetch_from_store.Listing, directory: Path, say: Say, stop: threading.Event) -> tuple[Path, str]:

    def into(listing: fetch_from_store.Listing) -> Path:
        if listing.size > archives.MAX_BYTES or len(listing.entries) > archives.MAX_ENTRIES:
            size = f"{len(listing.entries):,} files, {units.human_bytes(listing.size)}"
            raise OutlastError(f"{listing.name} has {size}, which is too much for code; keep data elsewhere")
        return directory / listing.version

    listing = fetch_from_store.consistent(listing, into, say=say, stop=stop)
    tree = into(listing)
    for entry in listing.entries:  # a newer mtime distinguishes the job's own files
        os.utime(tree / entry.key, (entry.modified, min(entry.modified, time.time())))
    return tree, listing.version


def _unpack(archive: Path, name: str, checksum: str, directory: Path, runs: str) -> Path:
    if checksum:
        archives.check_checksum(archive, name, checksum)
    tree = directory / "tree"
    tree.mkdir()
    archives.extract(archive, tree, name=name)
    return archives.root(tree, runs)


def _merge(tree: Path, into: Path, since: float) -> None:
    paths = [Path(directory, name) for directory, names, others in os.walk(tree) for name in (*names, *others)]
    listed = {str(path.relative_to(tree)): workdir.fingerprint(path) for path in paths if path.is_symlink() or path.is_file()}
    workdir.note_code(into, listed)
    for new in paths:
        _replace(new, into / new.relative_to(tree), since, os.replace)
