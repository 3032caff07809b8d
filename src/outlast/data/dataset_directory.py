"""A dataset's directory: files appear once they are complete, and the marker is written last.

    DIR/.outlast-get/          staging: the lock, downloads, unpacked files
    DIR/...                    the dataset, moved out of the staging directory
    DIR/.outlast-data.json     the marker: name, source, checksum

A directory with `.outlast-get` but no marker is incomplete, and so is a place in a store with an object `.outlast-get`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast.base import file_locks, files
from outlast.base.errors import OutlastError
from outlast.job import ownership, url_logins

MARKER = ".outlast-data.json"
COMING = ".outlast-get"
"""Name of the staging directory; in a store, name of the object that marks a dataset as incomplete."""
MANIFEST = "manifest.json"
"""Name of the shard manifest, which is written last."""
EMPTY = frozenset({"lost+found"})
"""Names that a new, empty volume may contain."""
_ATTEMPTS = 100
"""Maximum number of attempts to lock a directory that other processes keep removing."""
_LISTED = 1000

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Marker:
    """Description of a complete dataset in a directory or in a store."""

    name: str
    """The dataset's name, or its URL."""
    source: str
    """A URL, or a version such as `Python 3.12.4`."""
    sha256: str = ""
    """Digest of the download; empty for a generated dataset, or for several downloads."""
    checked: bool = False
    """True if the download was compared with a published checksum."""
    files: int = 0
    size: int = 0
    """Total size of all files in bytes, unpacked."""
    entries: tuple[str, ...] = ()
    """Names in the directory that belong to the dataset, sorted; at most the first `_LISTED`."""

    @classmethod
    def parse(cls, text: str | bytes) -> Marker | None:
        """Parse a marker from any version of Outlast. Returns None if `text` is not a marker."""
        try:
            fields = json.loads(text)
            values = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
            return cls(**{**values, "name": url_logins.hidden(fields["name"]), "entries": tuple(fields["entries"])})
        except (ValueError, KeyError, TypeError):
            return None

    def text(self) -> str:
        """Return the marker file's content."""
        return json.dumps({"version": 1, **dataclasses.asdict(self)}, indent=2) + "\n"


def marker(directory: Path) -> Marker | None:
    """Return the marker of a complete dataset; None if the marker or one of its entries is missing. Raises OutlastError if the
    marker cannot be read."""
    try:
        parsed = Marker.parse((directory / MARKER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise OutlastError(
            f"cannot read {directory / MARKER}: {problem.strerror}; correct that, or choose another directory"
        ) from problem
    return parsed if parsed and all(os.path.lexists(directory / name) for name in parsed.entries) else None


def incomplete(directory: Path) -> bool:
    """Return whether an unfinished download left files in a directory."""
    return (directory / COMING).is_dir() and not (directory / MARKER).exists()


class Place:
    """A locked directory that receives a dataset, as yielded by `opened`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.staging = directory / COMING
        self._new = not directory.exists()
        self._finished = False

    def tree(self) -> Path:
        """Create and return an empty directory for the dataset's files."""
        self.discard_tree()
        tree = self.staging / "tree"
        tree.mkdir()
        return tree

    def discard_tree(self) -> None:
        """Remove the unpacked files."""
        _removed(self.staging / "tree")

    def leave(self) -> None:
        """Remove the staging directory if nothing has been downloaded, and then the directory if it is new."""
        if self._finished or not self.staging.is_dir():  # files here belong to another process
            return
        if {path.name for path in self.staging.rglob("*") if not path.is_dir()} <= {"lock", "name"}:
            shutil.rmtree(self.staging, ignore_errors=True)
            if self._new:  # only an empty directory is removed
                with contextlib.suppress(OSError):
                    self.directory.rmdir()

    def finish(self, marker: Marker) -> Marker:
        """Move the tree's content to the directory and write the marker. Returns the marker with the numbers of files and
        bytes."""
        tree = self.staging / "tree"
        for name in (MARKER, COMING):  # an archive of a dataset's directory contains these names, which would count as our own
            _removed(tree / name)
        count = size = 0
        for parent, _, names in os.walk(tree):
            count += len(names)
            size += sum(os.lstat(os.path.join(parent, name)).st_size for name in names)
        entries = tuple(sorted(entry.name for entry in tree.iterdir()))
        marker = dataclasses.replace(marker, files=count, size=size, entries=entries[:_LISTED])
        files.flush(tree)
        (self.directory / MARKER).unlink(missing_ok=True)  # the marker of an earlier attempt, part of which is now deleted
        files.sync(self.directory)
        for name in entries:
            _removed(self.directory / name)
            os.rename(tree / name, self.directory / name)
        files.replace(self.staging / MARKER, marker.text(), durable=True)
        os.rename(self.staging / MARKER, self.directory / MARKER)
        files.sync(self.directory)
        self._finished = True
        for entry in self.staging.iterdir():
            if entry.name != "lock":  # removed last: its next holder must not see files that we are about to remove
                with contextlib.suppress(OSError):
                    _removed(entry)
        shutil.rmtree(self.staging, ignore_errors=True)
        return marker


@contextlib.contextmanager
def opened(directory: Path, what: str, *, say: Say, stop: threading.Event) -> Iterator[Place]:
    """Lock a dataset's directory and yield its `Place`. `what` is the dataset's name. Raises OutlastError if the directory
    contains other files or cannot be written."""
    place = Place(directory)
    try:
        _check_empty_or_own(directory)
        with _locked(place, lambda: say(f"waiting for another process that gets {what}"), stop):
            _note_name(place, what)
            try:
                yield place
            finally:
                place.leave()
    except OSError as problem:
        raise unwritable(problem, directory, what) from problem


@contextlib.contextmanager
def _locked(place: Place, waiting: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    lock = place.staging / "lock"
    attempts = 0
    while True:
        with contextlib.ExitStack() as held:
            try:
                fd = held.enter_context(file_locks.exclusive(lock, waiting=waiting, stop=stop))
                current = os.path.samestat(os.fstat(fd), os.stat(lock))
            except (FileNotFoundError, FileExistsError):  # another process has removed the directory
                attempts += 1
                if attempts > _ATTEMPTS:
                    raise
                continue
            if current:  # otherwise the previous holder has removed the file that we locked
                yield
                return


def unwritable(problem: OSError, directory: Path, what: str) -> OutlastError:
    """Return the error for a full disk or a directory that cannot be written."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutlastError(
            f"the disk of {directory} is full; make room there and run the same command again, which goes on, or choose another"
        )
    reason = problem.strerror or problem
    return OutlastError(f"cannot write {what} to {directory}: {reason}; correct that, or choose another directory")


def _check_empty_or_own(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise OutlastError(f"{directory} is a file; choose a directory")
    if not directory.is_dir() or (directory / COMING).is_dir() or (directory / MARKER).is_file():
        return
    names = {entry.name for entry in directory.iterdir()}
    mark = "" if names & {COMING, MARKER} else None  # another process has just begun or finished
    ownership.check_place(str(directory), names - EMPTY, mark, instead="choose a new or an empty directory")


def _note_name(place: Place, what: str) -> None:
    """Record the dataset's name. Raises OutlastError if the directory holds a part of another dataset."""
    note = place.staging / "name"
    begun = url_logins.hidden(note.read_text()) if note.exists() else ""
    if begun not in ("", what):
        raise OutlastError(
            f"{place.directory} holds a part of {begun}; complete that with the same command as before, "
            f"or remove it (rm -r {place.directory}), or choose another directory"
        )
    files.replace(note, what)


def _removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
