"""Unpacks archives safely, even hostile or damaged ones.

    extract(path, directory, name="code (s3://bucket/code.tar.gz)", limits=...)      tar and zip, compressed or not
    decompress(path, file, ...)                                                      one compressed file

An archive may contain files, directories and links that stay inside it; otherwise it is rejected as a whole. Links are created
last, so that nothing is written through a link. Times and the executable bit are kept. Compression is recognised by a file's
first bytes, not by its name. The caller passes a new directory, and removes it if unpacking fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import hashlib
import io
import lzma
import os
import stat
import sys
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn, cast

from outlast.base import units
from outlast.base.errors import OutlastError, Stopped, importing

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_HEADER_BYTES = 1 << 20
"""Maximum length of a tar header in bytes. Without a limit, tarfile would read a header of any length into memory."""
_CHUNK = 1 << 20
_LINK_BYTES = 4096
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,  # a compression that zipfile does not support
    ValueError,  # this and the next two: tarfile and zipfile trust damaged headers
    KeyError,
    OverflowError,
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for unpacking an archive, and wording for error messages."""

    what: str
    """Noun for the content of the archive in error messages: `code` or `data`."""
    entries: int
    size: int
    """Unpacked bytes allowed for any archive."""
    ratio: int = 0
    """Unpacked bytes allowed per byte of the archive, where this allows more than `size`."""
    instead: str = "keep data elsewhere"
    """Remedy for an archive that is too large."""
    again: str = "make it again"
    """Remedy for a damaged archive."""

    def bytes(self, packed: int) -> int:
        """Return how many bytes an archive of `packed` bytes may unpack to."""
        return max(self.size, self.ratio * packed)


def kind(name: str) -> str:
    """Return the kind of a file, judged by its name: `zip`, `tar`, `compressed`, or an empty string."""
    lower = name.lower()
    if lower.endswith(".zip"):
        return "zip"
    return "tar" if lower.endswith(TARS) else "compressed" if lower.endswith(COMPRESSED) else ""


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """Return a file's SHA-256 or MD5 as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def extract(archive: Path, into: Path, *, name: str, limits: Limits, kind: str = "", stop: threading.Event | None = None) -> None:
    """Unpack an archive into an empty directory. `name` is the archive's name in error messages.

    `kind` is `zip` or `tar`; if empty, the file's name decides. Raises OSError, OutlastError if the archive is damaged, too
    large, or has forbidden entries, and Stopped soon after `stop` is set.
    """
    kind = kind or ("zip" if archive.name.lower().endswith(".zip") else "tar")
    with _sentences(name, f"is no {kind} archive, or is damaged", limits), open(archive, "rb") as file:
        tree = _Tree(into, name, _Budget(name, limits, limits.bytes(os.fstat(file.fileno()).st_size), stop))
        if kind == "zip":
            _unzip(file, tree)
        else:
            _untar(file, tree)
        tree.finish()


def decompress(packed: Path, into: Path, *, name: str, limits: Limits, stop: threading.Event | None = None) -> None:
    """Decompress a file to a new file. Raises the same errors as `extract`."""
    with _sentences(name, "is not compressed as its name says, or is damaged", limits), open(packed, "rb") as file:
        stream = _decompressed(file)
        if stream is file:
            raise ValueError("its first bytes are of no compression that we know")
        budget = _Budget(name, limits, limits.bytes(os.fstat(file.fileno()).st_size), stop)
        with contextlib.closing(stream), open(into, "xb") as out:
            while data := stream.read(_CHUNK):
                budget.bytes(len(data))
                out.write(data)


@contextlib.contextmanager
def _sentences(name: str, damaged: str, limits: Limits) -> Iterator[None]:
    try:
        yield
    except OutlastError:
        raise
    except _DAMAGED as problem:
        raise OutlastError(f"{name} {damaged}: {problem}; {limits.again}") from problem
    except OSError as problem:
        if problem.errno is None:  # bz2 raises this for data that is not bzip2
            raise OutlastError(f"{name} {damaged}: {problem}; {limits.again}") from problem
        if problem.errno == errno.EINVAL:  # a seek to a position in a damaged header
            raise OutlastError(f"{name} is damaged; {limits.again}") from problem
        if problem.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
            raise OutlastError(
                f"{name} holds a name that cannot be unpacked here: {problem}; make it again without it"
            ) from problem
        raise


class _Budget:
    """Counts unpacked bytes and entries. Raises OutlastError beyond the limits, and Stopped soon after `stop` is set."""

    def __init__(self, name: str, limits: Limits, most: int, stop: threading.Event | None) -> None:
        self.name, self.limits, self.most = name, limits, most
        self._stop = stop or threading.Event()
        self._bytes = self._entries = 0

    def bytes(self, count: int) -> None:
        self._bytes += count
        if self._stop.is_set():
            raise Stopped(f"unpacking {self.name} was stopped")
        if self._bytes > self.most:
            limit = units.human_bytes(self.most)
            raise OutlastError(
                f"{self.name} unpacks to more than {limit}, the limit for {self.limits.what}; {self.limits.instead}"
            )

    def entry(self) -> None:
        self._entries += 1
        if self._entries > self.limits.entries:
            raise OutlastError(
                f"{self.name} holds more than {self.limits.entries:,} entries, the limit for {self.limits.what}; "
                f"{self.limits.instead}"
            )


class _Tree:
    def __init__(self, root: Path, name: str, budget: _Budget) -> None:
        self._root, self._name = root, name
        self.budget = budget
        self._directories = {root}
        self._links: dict[Path, str] = {}
        self._now = time.time()

    def directory(self, member: str) -> None:
        self._make(self._place(member))

    def file(self, member: str, content: IO[bytes], *, mode: int, modified: float) -> None:
        """Write a file, replacing an earlier file or link of the same name."""
        path = self._new(member)
        with open(path, "xb") as file:
            while data := content.read(_CHUNK):
                self.budget.bytes(len(data))
                file.write(data)
        path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)
        modified = min(max(modified, 0.0), self._now)  # so that files that the job writes are newer
        os.utime(path, (modified, modified))

    def hard_link(self, member: str, target: str) -> None:
        source = self._place(target)
        if source.is_symlink() or not source.is_file():
            self.refuse(member, f"a link to {target}, which is no file of it")
        if self._place(member) != source:  # GNU tar stores a file given twice as a link to itself
            os.link(source, self._new(member))

    def link(self, member: str, target: str) -> None:
        """Record a symbolic link, which `finish` creates."""
        path = self._new(member)
        lexical = os.path.normpath(os.path.join(path.parent.relative_to(self._root), target))
        if os.path.isabs(target) or lexical.split("/")[0] == "..":
            self.refuse(member, f"a link to {target}, outside of it")
        self._links[path] = target

    def finish(self) -> None:
        """Create the symbolic links. Raises OutlastError for links that lead outside through other links."""
        for path, target in self._links.items():
            path.symlink_to(target)
        root = os.path.realpath(self._root)
        for path, target in self._links.items():
            real = os.path.realpath(path)
            if real != root and not real.startswith(root + os.sep):
                self.refuse(str(path.relative_to(self._root)), f"a link to {target}, which leads outside of it")

    def refuse(self, member: str, what: str) -> NoReturn:
        shown = member if len(member) <= 100 else member[:97] + "..."
        remedy = f"an archive of {self.budget.limits.what} may hold only files, directories and links inside it"
        raise OutlastError(f"{self._name} holds {shown!r}, {what}; {remedy}")

    def _place(self, member: str) -> Path:
        path = PurePosixPath(member)
        if path.is_absolute():
            self.refuse(member, "an absolute path")
        if ".." in path.parts:
            self.refuse(member, "a path that leads outside of it")
        if "\0" in member:
            self.refuse(member, "a name with a zero in it")
        return self._root / path

    def _new(self, member: str) -> Path:
        """Return the path for a new file or link, after removing an earlier entry at this path."""
        path = self._place(member)
        if path == self._root:
            self.refuse(member, "a file without a name")
        self._make(path.parent)
        self.budget.entry()
        self._links.pop(path, None)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return path

    def _make(self, directory: Path) -> None:
        missing = []
        while directory not in self._directories:
            missing.append(directory)
            directory = directory.parent
        for each in reversed(missing):
            self.budget.entry()
            each.mkdir()
            self._directories.add(each)


def _unzip(file: IO[bytes], tree: _Tree) -> None:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            mode = member.external_attr >> 16
            kind = stat.S_IFMT(mode)
            if not member.filename:
                raise zipfile.BadZipFile("it has an entry without a name")
            if member.flag_bits & 1:
                tree.refuse(member.filename, "which is encrypted")
            if member.is_dir():
                tree.directory(member.filename)
            elif kind == stat.S_IFLNK:
                with archive.open(member) as content:
                    tree.link(member.filename, os.fsdecode(content.read(_LINK_BYTES)))
            elif kind in (0, stat.S_IFREG):
                with archive.open(member) as content:  # reading to the end checks the CRC
                    tree.file(member.filename, content, mode=mode, modified=_zip_time(member))
            else:
                tree.refuse(member.filename, "a device or pipe")


def _zip_time(member: zipfile.ZipInfo) -> float:
    try:
        return time.mktime((*member.date_time, 0, 0, -1))
    except (ValueError, OverflowError):
        return 0.0


def _untar(file: IO[bytes], tree: _Tree) -> None:
    budget = tree.budget
    longest = 2 * budget.most + 2048 * budget.limits.entries  # a header and padding for each
    with contextlib.closing(_Bounded(_decompressed(file), longest)) as stream:
        with tarfile.TarFile(fileobj=cast("IO[bytes]", stream)) as archive:
            for member in _members(archive):
                if member.isdir():
                    tree.directory(member.name)
                elif member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    tree.file(member.name, content, mode=member.mode, modified=float(member.mtime))
                elif member.islnk():
                    tree.hard_link(member.name, member.linkname)
                elif member.issym():
                    tree.link(member.name, member.linkname)
                else:
                    tree.refuse(member.name, "a device or pipe")
            if stream.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged header for the end; a real end is zeros
                raise tarfile.ReadError("it ends early, or in nonsense")
        while stream.read(_CHUNK):  # read to the checksum at the end of a compressed file
            pass


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return a stream that decompresses a file, or the file itself if it is not compressed."""
    first = file.read(6)
    file.seek(0)
    if first.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    if first.startswith(b"BZh"):
        import bz2

        return bz2.BZ2File(file)
    if first == b"\xfd7zXZ\0":
        return lzma.LZMAFile(file)
    if first.startswith(b"\x28\xb5\x2f\xfd"):
        return _zstd(file)
    return file


def _zstd(file: IO[bytes]) -> IO[bytes]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        with importing("Zstandard (.zst)", "data"):
            from backports import zstd
    return cast("IO[bytes]", zstd.ZstdFile(file))


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined] # otherwise it would keep all members in memory
        yield member


class _Bounded(io.RawIOBase):
    """An input for tarfile that rejects long headers and endless streams."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream, self._limit = stream, limit
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _HEADER_BYTES:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        self.last = self._stream.read(size)
        self._check(self._stream.tell())
        return self.last

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check(offset)
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise tarfile.ReadError(f"it is longer than {units.human_bytes(self._limit)}")
