"""Archives of code, unpacked so that a hostile or damaged one does no harm.

    extract(path, directory, name="code (s3://bucket/code.tar.gz)")

An archive may hold files, directories and links that stay inside it; one that holds anything else is refused as a whole. Nothing
is written through a link: links are made last, when everything else is in place. Owners and special bits are dropped, times and
the right to execute are kept. The caller gives a new directory and removes it when this raises.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn, cast

from outlast import units
from outlast.errors import OutlastError

MAX_BYTES = 4 << 30
"""Code is never that large: what unpacks to more is a mistake, or a bomb."""
MAX_ENTRIES = 100_000
_HEADER_BYTES = 1 << 20
"""No header of a tar archive is longer. tarfile reads one into memory as a whole, however long it says it is."""
_CHUNK = 1 << 20
_LINK_BYTES = 4096
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that zipfile does not know
    ValueError,  # and the next two: tarfile and zipfile believe what damaged headers say
    KeyError,
    OverflowError,
)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, as sha256sum prints it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract(archive: Path, into: Path, *, name: str) -> None:
    """Unpack an archive into an empty directory. `name` is what it is called in sentences.

    Raises OutlastError for one that is damaged, too large, or holds what may not be unpacked; OSError when the disk is at fault.
    """
    tree = _Tree(into, name)
    try:
        with open(archive, "rb") as file:
            if archive.name.lower().endswith(".zip"):
                _unzip(file, tree)
            else:
                _untar(file, tree)
        tree.finish()
    except OutlastError:
        raise
    except _DAMAGED as problem:
        kind = "zip" if archive.name.lower().endswith(".zip") else "tar"
        raise OutlastError(f"{name} is no {kind} archive, or is damaged: {problem}; make it again") from problem
    except OSError as problem:
        if problem.errno == errno.EINVAL:  # a seek to where a damaged header says
            raise OutlastError(f"{name} is damaged; make it again") from problem
        if problem.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
            raise OutlastError(
                f"{name} holds a name that cannot be unpacked here: {problem}; make it again without it"
            ) from problem
        raise


def check(archive: Path, name: str, sha256: str, runs: str) -> None:
    """Raise OutlastError when an archive of this machine cannot be unpacked, or what is to be run is not in it."""
    if sha256:
        check_checksum(archive, name, sha256)
    with tempfile.TemporaryDirectory() as directory:
        extract(archive, Path(directory), name=name)
        if runs.endswith(".py") and not (root(Path(directory), runs) / runs).is_file():
            raise OutlastError(f"script ({runs}) is not in {name}; correct it, or the archive")


def check_checksum(archive: Path, name: str, sha256: str) -> None:
    """Raise OutlastError unless an archive has the checksum of the job file."""
    if (found := checksum(archive)) != sha256:
        raise OutlastError(f"{name} has the checksum {found}, the job file says {sha256}; correct #sha256= there, or the archive")


def root(tree: Path, runs: str) -> Path:
    """Where in an unpacked archive the code begins: in its only directory if `runs`, a script or module, is in there."""
    entries = [entry for entry in tree.iterdir() if entry.name not in ("__MACOSX", ".DS_Store")]
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        (only,) = entries
        if not _holds(tree, runs) and _holds(only, runs):
            return only
    return tree


def _holds(directory: Path, runs: str) -> bool:
    return (directory / runs).exists() or (directory / f"{runs}.py").exists()


class _Tree:
    """The directory that an archive is unpacked into."""

    def __init__(self, root: Path, name: str) -> None:
        self._root, self._name = root, name
        self._bytes = self._entries = 0
        self._directories = {root}
        self._links: dict[Path, str] = {}
        self._now = time.time()

    def directory(self, member: str) -> None:
        """Make a directory, and those above it."""
        self._make(self._place(member))

    def file(self, member: str, content: IO[bytes], *, mode: int, modified: float) -> None:
        """Write a file; of several with one name the last counts."""
        path = self._new(member)
        with open(path, "xb") as file:
            while data := content.read(_CHUNK):
                self._bytes += len(data)
                if self._bytes > MAX_BYTES:
                    limit = units.human_bytes(MAX_BYTES)
                    raise OutlastError(f"{self._name} unpacks to more than {limit}, the limit for code; keep data elsewhere")
                file.write(data)
        path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)
        modified = min(max(modified, 0.0), self._now)  # the job's own files are known by being newer
        os.utime(path, (modified, modified))

    def hard_link(self, member: str, target: str) -> None:
        """Link to a file that came before."""
        source = self._place(target)
        if source.is_symlink() or not source.is_file():
            self.refuse(member, f"a link to {target}, which is no file of it")
        path = self._new(member)
        os.link(source, path)

    def link(self, member: str, target: str) -> None:
        """Take note of a symbolic link."""
        path = self._new(member)
        lexical = os.path.normpath(os.path.join(path.parent.relative_to(self._root), target))
        if os.path.isabs(target) or lexical.split("/")[0] == "..":
            self.refuse(member, f"a link to {target}, outside of it")
        self._links[path] = target

    def finish(self) -> None:
        """Make the links; one that leads outside by way of another is found now."""
        for path, target in self._links.items():
            path.symlink_to(target)
        root = os.path.realpath(self._root)
        for path, target in self._links.items():
            real = os.path.realpath(path)
            if real != root and not real.startswith(root + os.sep):
                self.refuse(str(path.relative_to(self._root)), f"a link to {target}, which leads outside of it")

    def refuse(self, member: str, what: str) -> NoReturn:
        """Say that a member may not be unpacked."""
        shown = member if len(member) <= 100 else member[:97] + "..."
        remedy = "an archive of code may hold only files, directories and links inside it"
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
        """The place of a new file or link, with nothing there."""
        path = self._place(member)
        if path == self._root:
            self.refuse(member, "a file without a name")
        self._make(path.parent)
        self._count()
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
            self._count()
            each.mkdir()
            self._directories.add(each)

    def _count(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise OutlastError(f"{self._name} holds more than {MAX_ENTRIES:,} entries, the limit for code; keep data elsewhere")


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
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with contextlib.closing(_Bounded(gzip.GzipFile(fileobj=file) if zipped else file, 2 * MAX_BYTES)) as stream:
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
            if stream.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged header for the end; the true end is zeros
                raise tarfile.ReadError("it ends early, or in nonsense")
        while stream.read(_CHUNK):  # to the checksum at the end of gzip
            pass


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined] # it would keep them all
        yield member


class _Bounded(io.RawIOBase):
    """What tarfile reads from: no long headers, no endless streams."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self.last = b""
        """What was read last."""

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
