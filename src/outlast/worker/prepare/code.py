"""A job's code, brought to the directory that it runs in: copied from a directory, unpacked from an archive, or from a store.

    copy(directory, entries, into, ...)              at submission, for code that lies on this machine
    place("s3://bucket/code.tar.gz", into, ...)      by the first worker of a machine, for the others as well

The directory is the run's own: the job may write there. When newer code comes to it, a file of the code replaces that of the run
unless the job has written to it since, and files that only the run has stay.
"""

from __future__ import annotations

import dataclasses
import filecmp
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
from outlast.storage.sync import sync
from outlast.worker.prepare import fetch, workdir
from outlast.worker.prepare.fetch import Say

if TYPE_CHECKING:
    from outlast.job.shipping import tree

_COMING = ".outlast-code"
"""Below the directory that code is brought to: what has not arrived yet."""


# From a directory


def copy(code: Path, entries: Sequence[tree.Entry], into: Path, submitted: float) -> list[str]:
    """Copy the code in a directory (`shipping.tree.listed`) to the run's; returns the files that were missing or different.

    `submitted` is when the run began. Files that the job has written since are kept: they differ from what was brought there or,
    if that is unknown, are newer.
    """
    renewed = []
    try:
        into.mkdir(exist_ok=True)
        brought = workdir.listed(into)
        workdir.note_code(into, {entry.name: workdir.looks(code / entry.name) for entry in entries})
        for directory in sorted({parent for entry in entries for parent in Path(entry.name).parents} - {Path()}):
            _renew(code / directory, into / directory, submitted, _copied)
        for entry in entries:
            new, old = code / entry.name, into / entry.name
            differs = not _same(new, old)
            untouched = old.is_file() and brought.get(entry.name) == workdir.looks(old)
            take = _linked(entry.target) if entry.kind == "link" else _copied
            if _renew(new, old, float("inf") if untouched else submitted, take) and differs:
                renewed.append(entry.name)
    except OSError as problem:
        raise OutlastError(f"code: cannot copy {code} to {into}: {problem}; correct that, or use --fresh") from problem
    return renewed


def _same(new: Path, old: Path) -> bool:
    if new.is_symlink() or old.is_symlink():
        return new.is_symlink() and old.is_symlink() and new.readlink() == old.readlink()
    return old.is_file() and filecmp.cmp(new, old, shallow=False)


def _linked(target: str) -> Callable[[Path, Path], None]:
    def link(_: Path, old: Path) -> None:
        partial = _partial(old)
        partial.symlink_to(target)
        partial.replace(old)

    return link


def _partial(old: Path) -> Path:
    partial = old.with_name(f".{old.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    return partial


def _renew(new: Path, old: Path, submitted: float, take: Callable[[Path, Path], object]) -> bool:
    """Replace `old`, in the run's directory, by `new` of the code; returns whether it did. Writes through no link."""
    mode = new.lstat().st_mode
    if old.is_dir() and not old.is_symlink() and not stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{old} is a directory, {new} is not")
    if stat.S_ISDIR(mode):
        if old.is_symlink() or old.is_file():
            old.unlink()
        old.mkdir(stat.S_IMODE(mode) | stat.S_IRWXU, exist_ok=True)
    elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # a socket or a pipe is no code
        both_files = stat.S_ISREG(mode) and old.is_file() and not old.is_symlink()
        if both_files and old.stat().st_mtime >= max(submitted, new.stat().st_mtime):
            return False  # the job's: code has the time of its original, which is older than the run
        take(new, old)
        return True
    return False


def _copied(new: Path, old: Path) -> None:
    partial = _partial(old)
    shutil.copy2(new, partial, follow_symlinks=False)
    partial.replace(old)


# From an archive or a store


@dataclasses.dataclass(frozen=True)
class _Note:
    """The version of the code in the run's directory."""

    code: str
    """As in the job file."""
    version: str
    """Changes with the code; empty while the first version arrives."""
    time: float
    """When it arrived."""
    current: bool
    """Whether it was fetched for the newest submission; if not, the source is checked for changes."""

    @classmethod
    def read(cls, path: Path) -> _Note | None:
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        files.replace(path, json.dumps(dataclasses.asdict(self)), durable=True)


def submitted_again(shared: Path) -> None:
    """Have the next worker check whether the code has changed. Until then, a run keeps the code that it began with."""
    path = shared / "code.json"
    if note := _Note.read(path):
        dataclasses.replace(note, current=False).write(path)


def place(code: str, into: Path, shared: Path, *, runs: str, say: Say, stop: threading.Event) -> None:
    """Bring code from an archive or a store to the directory that the job runs in, unless it is there.

    `shared` is the run's directory for notes. `runs`, a script's path or a module's top-level package, locates the code in an
    archive: if an archive holds a single directory with that in it, the directory is the code. Raises OutlastError, OSError.
    """
    path, coming = shared / "code.json", into / _COMING
    with file_locks.exclusive(
        shared / "code.lock", waiting=lambda: say("waiting for another worker that fetches code"), stop=stop
    ):
        note = _Note.read(path)
        if note and note.version and (note.code, note.current) == (code, True):
            return
        try:
            version, bring = _look(code)
        except StoreError as problem:
            if note and note.version and note.code == code and problem.retry:
                say(f"cannot see whether code ({code}) has changed: {problem}; going on with what is here")
                return
            raise
        if not (note and (note.code, note.version) == (code, version)):
            into.mkdir(parents=True, exist_ok=True)
            if note is None:
                _Note(code, "", time.time(), current=False).write(path)
            elif not note.version:  # a first version that did not arrive: nothing has run here yet
                workdir.forget_code(into)
            shutil.rmtree(coming, ignore_errors=True)
            coming.mkdir()
            tree, version = bring(coming, runs, say, stop)
            _merge(tree, into, note.time if note and note.version else float("inf"))
            shutil.rmtree(coming)
        _Note(code, version, time.time(), current=True).write(path)


_Bring = Callable[[Path, str, Say, threading.Event], tuple[Path, str]]
"""Gets an empty directory, what is run, `say` and `stop`; returns where below the directory the code is, and its version."""


def _look(code: str) -> tuple[str, _Bring]:
    """The current version of code in an archive or a store, and the function that fetches it."""
    where, checksum = spec.pinned(code)
    if path := spec.local(where):
        here, version = path, archives.checksum(path)
        return version, lambda directory, runs, say, stop: (_unpacked(here, f"code ({here})", checksum, directory, runs), version)
    if not spec.archive(where):
        listing = fetch.look(where, "code")
        return listing.version, lambda directory, runs, say, stop: _fetched(listing, directory, say, stop)
    above, _, key = store.normalised(where).rpartition("/")
    place = store.open_(above)
    try:
        entry = place.head(key)
    except store.Missing as error:
        raise OutlastError(f"code ({where}) does not exist; correct the URL") from error

    def bring(directory: Path, runs: str, say: Say, stop: threading.Event) -> tuple[Path, str]:
        archive = directory / key.rpartition("/")[2]
        sync.receive(place, [(key, entry.size, archive)], stop=stop)
        return _unpacked(archive, f"code ({where})", checksum, directory, runs), f"{entry.size} {entry.etag}"

    return f"{entry.size} {entry.etag}", bring


def _fetched(listing: fetch.Listing, directory: Path, say: Say, stop: threading.Event) -> tuple[Path, str]:
    """Fetch everything below a prefix of a store."""

    def into(listing: fetch.Listing) -> Path:
        if listing.size > archives.MAX_BYTES or len(listing.entries) > archives.MAX_ENTRIES:
            held = f"{len(listing.entries):,} files, {units.human_bytes(listing.size)}"
            raise OutlastError(f"{listing.name} holds {held}, which is too much for code; keep data elsewhere")
        return directory / listing.version

    listing = fetch.bring_whole(listing, into, say=say, stop=stop)
    tree = into(listing)
    for entry in listing.entries:  # the job's own files are known by being newer
        os.utime(tree / entry.key, (entry.modified, min(entry.modified, time.time())))
    return tree, listing.version


def _unpacked(archive: Path, name: str, checksum: str, directory: Path, runs: str) -> Path:
    """Verify and unpack an archive; returns where in it the code begins."""
    if checksum:
        archives.check_checksum(archive, name, checksum)
    tree = directory / "tree"
    tree.mkdir()
    archives.extract(archive, tree, name=name)
    return archives.root(tree, runs)


def _merge(tree: Path, into: Path, since: float) -> None:
    brought = [Path(directory, name) for directory, names, found in os.walk(tree) for name in (*names, *found)]
    listed = {str(path.relative_to(tree)): workdir.looks(path) for path in brought if path.is_symlink() or path.is_file()}
    workdir.note_code(into, listed)
    for new in brought:
        _renew(new, into / new.relative_to(tree), since, os.replace)
