"""Walks directory trees, reads files consistently, and writes them atomically.

A link to a file counts as a file. A link to a directory is followed if its target is inside the tree and does not contain the
link, because a script may resume through a link such as `latest`. Names are UTF-8. Empty directories are ignored, because stores
have no directories.
"""

from __future__ import annotations

import contextlib
import os
import stat as kinds
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from outlast.base import crc32
from outlast.base.errors import NotFound, OutlastError
from outlast.storage.sync.index import Seen, Stat, seen

PARTIAL = ".outlast-"
"""Prefix of the names of partial files, which end in `.part`."""
_PIECE = 64 << 10
"""Number of bytes written at a time. Larger writes use larger page cache blocks, which are slow to allocate in a virtual machine
that reports free pages to its host."""
ATTEMPTS = 3


@dataclass
class Scan:
    """The result of a walk. Paths are relative to the root, and separated by slashes."""

    files: dict[str, Stat] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Unreadable paths, with reasons."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Paths that are not files, with reasons."""
    partials: list[str] = field(default_factory=list)


def scan(root: str, *, skip: Callable[[str], bool] | None = None, own: str = "") -> Scan:
    """Walk a tree, but omit the manifest `own` and paths for which `skip` returns True.

    Raises NotFound if `root` is not a directory.
    """
    if not os.path.isdir(root):
        if os.path.lexists(root):
            raise NotFound(f"{root} is not a directory; give a directory")
        raise NotFound(f"{root} is not there; give a directory that is")
    scan = Scan()
    files, real = scan.files, os.path.realpath(root)
    # (prefix for the directory's files, its path, real paths of the directories above it that were entered through a link)
    waiting: list[tuple[str, str, tuple[str, ...]]] = [("", root, (real,))]
    while waiting:
        prefix, place, way = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    name = entry.name
                    path = prefix + name
                    if not name.isascii() and (wrong := _not_utf8(name)):
                        scan.failed[wrong] = "its name is not UTF-8; rename it"
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append((path + "/", entry.path, (*way[:-1], f"{way[-1]}/{name}")))
                    elif name.startswith(PARTIAL) and name.endswith(".part"):
                        scan.partials.append(path)
                    elif path == own or (skip is not None and skip(path)):
                        pass
                    elif entry.is_file(follow_symlinks=False):
                        try:
                            stat = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        files[path] = _stat(stat)
                    elif entry.is_symlink():
                        if inside := _link(scan, path, entry.path, real, way):
                            waiting.append((path + "/", entry.path, (*way, inside)))
                    else:
                        scan.ignored[path] = "it is neither a file nor a directory"
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            scan.failed[prefix or "."] = f"it cannot be listed: {error.strerror}"
    return scan


def _link(scan: Scan, path: str, place: str, real: str, way: tuple[str, ...]) -> str:
    """Add the target of a link to the scan if it is a file, and return it if it is a directory to walk."""
    try:
        stat = os.stat(place)
        target = os.path.realpath(place)
    except OSError as error:
        scan.ignored[path] = f"it is a link to nothing ({error.strerror})"
        return ""
    if kinds.S_ISREG(stat.st_mode):
        scan.files[path] = _stat(stat)
    elif not kinds.S_ISDIR(stat.st_mode):
        scan.ignored[path] = "it is a link to neither a file nor a directory"
    elif not f"{target}/".startswith(f"{real}/"):
        scan.ignored[path] = f"it is a link to a directory outside ({target})"
    elif any(f"{step}/".startswith(f"{target}/") for step in way):
        scan.ignored[path] = f"it is a link to a directory that it is in ({target})"
    else:
        return target
    return ""


def _not_utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        return repr(os.fsencode(name))[2:-1]
    return ""


def gone(path: str | Path) -> bool:
    """Return whether a path does not exist; False if it is inaccessible."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def stat_of(path: str | Path) -> Stat:
    """Return a file's size and times. Raises OSError."""
    return _stat(os.stat(path))


def _stat(result: os.stat_result) -> Stat:
    return Stat(result.st_size, result.st_mtime_ns, result.st_ctime_ns)


def version(stat: Stat) -> tuple[int, int]:
    """Return a value that changes when the file's content does."""
    return stat.size, stat.mtime


def read(path: str | Path, limit: int) -> tuple[bytes, Stat, bool] | None:
    """Return a file's content, its stat, and whether the file stayed unchanged during the read. Raises OSError.

    Returns None if the file has more than `limit` bytes.
    """
    with open(path, "rb", buffering=0) as file:
        for _ in range(ATTEMPTS):
            stat = _stat(os.fstat(file.fileno()))
            if stat.size > limit:
                return None
            data = os.pread(file.fileno(), stat.size, 0)
            steady = len(data) == stat.size and version(_stat(os.fstat(file.fileno()))) == version(stat)
            if steady:
                break
    return data, stat._replace(size=len(data)), steady


def write(file: int, data: bytes | memoryview, start: int) -> None:
    """Write all of `data` to an open file, at offset `start`. Raises OSError."""
    view = memoryview(data)
    written = 0
    while written < len(view):
        written += os.pwrite(file, view[written : written + _PIECE], start + written)


def checksum(path: str) -> Seen:
    """Return a file's checksum and stat. The checksum is -1 if the file changes during the read. Raises OSError."""
    began = time.time_ns()
    with open(path, "rb", buffering=0) as file:
        stat = _stat(os.fstat(file.fileno()))
        crc = crc32.of(file.fileno(), stat.size)
        steady = version(_stat(os.fstat(file.fileno()))) == version(stat)
    return seen(stat, crc if steady else -1, began)


def copy(path: Path, to: Path, length: int) -> tuple[int, int]:
    """Copy up to `length` bytes of a file. Returns the number of bytes copied, and their crc32. Raises OSError."""
    with path.open("rb", buffering=0) as source, to.open("wb", buffering=0) as target:
        size, crc = 0, 0
        while size < length and (data := source.read(min(1 << 20, length - size))):
            write(target.fileno(), data, size)
            size, crc = size + len(data), crc32.update(data, crc)
    return size, crc


class AtomicFile:
    """A file that is written next to `path` and renamed to it once complete.

        with AtomicFile(path) as file:
            os.pwrite(file.fd, ...)
            stat = file.finish(mtime)

    If `finish` is not called, the file is removed. Raises OSError, and OutlastError if `path` is a directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        directory = os.path.dirname(path)
        self._partial = os.path.join(directory, f"{PARTIAL}{uuid.uuid4().hex}.part")
        try:
            self.fd = self._open()
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            self.fd = self._open()
        self._finished = False

    def _open(self) -> int:
        return os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> AtomicFile:
        return self

    def finish(self, mtime: int | None = None, *, durable: bool = False) -> Stat:
        """Set the mtime in nanoseconds, if given, and rename the file to `path`."""
        if mtime is not None:
            os.utime(self.fd, ns=(mtime, mtime))
        if durable:
            os.fsync(self.fd)
        try:
            os.rename(self._partial, self.path)
        except IsADirectoryError as error:
            raise OutlastError(f"there is a directory of this name at {self.path}; move it away") from error
        self._finished = True
        return _stat(os.fstat(self.fd))

    def finish_unless_there(self) -> None:
        """Rename the file to `path` unless `path` exists."""
        try:
            os.link(self._partial, self.path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not os.path.lexists(self.path):
                self.finish()

    def close(self) -> None:
        """Remove the file unless it is finished."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if not self._finished:
                with contextlib.suppress(OSError):
                    os.unlink(self._partial)

    def __exit__(self, *_: object) -> None:
        self.close()


class Inside:
    """Tells at which paths files may be written: a file's directory must be inside the tree, once all links are resolved."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._real = os.path.realpath(root)
        self._reasons: dict[str, str] = {}

    def obstacle(self, path: str) -> str:
        """Return why no file can be written at a relative path, or an empty string."""
        directory = path.rpartition("/")[0]
        if directory not in self._reasons:
            self._reasons[directory] = self._reason(directory)
        return self._reasons[directory]

    def _reason(self, directory: str) -> str:
        if directory and (above := self.obstacle(directory)):
            return above
        place = os.path.join(self._root, directory)
        real = os.path.realpath(place)
        if not f"{real}/".startswith(f"{self._real}/"):
            return f"{directory} is a link that leads outside ({real})"
        if os.path.lexists(place) and not os.path.isdir(place):
            return f"{directory} is not a directory here; move it away"
        return ""

    def through_link(self, path: str) -> bool:
        """Return whether a path's directory is reached through a link."""
        directory = path.rpartition("/")[0]
        return os.path.realpath(os.path.join(self._root, directory)) != os.path.normpath(os.path.join(self._real, directory))


def sweep(root: str, partials: list[str], before: float) -> None:
    """Remove partial files that have not changed since `before`."""
    for path in partials:
        with contextlib.suppress(OSError):
            if os.stat(os.path.join(root, path)).st_mtime < before:
                os.unlink(os.path.join(root, path))


def remove(root: str, paths: list[str]) -> Iterator[tuple[str, str]]:
    """Delete files, and directories that become empty. Yields each path, and why it cannot be deleted, or ""."""
    emptied: set[str] = set()
    for path in paths:
        try:
            os.unlink(os.path.join(root, path))
        except FileNotFoundError:
            pass
        except OSError as error:
            yield path, f"it cannot be deleted: {error.strerror}"
            continue
        emptied.add(path.rpartition("/")[0])
        yield path, ""
    while emptied:
        above = set()
        for directory in emptied - {""}:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(root, directory))
                above.add(directory.rpartition("/")[0])
        emptied = above
