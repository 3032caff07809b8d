"""Unpacks archives safely, even hostile or damaged ones.

    budget = Budget("code (s3://bucket/code.tar.gz)", size=4 << 30, entries=100_000)
    extract(path, directory, budget)      tar and zip, compressed or not
    decompress(path, file, budget)        one compressed file

An archive may contain files, directories and links that stay inside it; otherwise it is rejected as a whole. Links are created
last, so that nothing is written through a link. Times and the executable bit are kept. Compression is recognised by a file's
first bytes, not by its name. The caller passes a new directory, and removes it if unpacking fails.

Python 3.11 before 3.11.4 has no `tarfile.data_filter`, and zipfile has nothing like it.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
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
from typing import IO, NoReturn, Self, cast

from outlast.base import units
from outlast.base.errors import OutlastError, Stopped, importing

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_CHUNK = 1 << 20
_LINK_BYTES = 4096
_HEADER_BYTES = 1 << 20
"""Maximum length in bytes of a header's text, such as a long name. Without a limit, tarfile would read any length into memory."""
_TEXTS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)
_DAMAGED_HEADERS = (ValueError, LookupError, ArithmeticError, RuntimeError)  # tarfile and zipfile trust them
_UNFIT = (None, errno.EINVAL, errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EILSEQ)
"""Error numbers that the content causes, not the disk: invalid names, and data that gzip and bz2 reject (None)."""


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


class Budget:
    """Counts unpacked bytes and entries. Raises OutlastError beyond the limits, and Stopped soon after `stop` is set."""

    def __init__(self, name: str, *, size: int, entries: int = 1, stop: threading.Event | None = None) -> None:
        self.name = name
        self._limits = size, entries
        self._size = self._entries = 0
        self._stop = stop or threading.Event()

    def fresh(self) -> Budget:
        """Return a budget with the same limits, of which nothing is spent."""
        return Budget(self.name, size=self._limits[0], entries=self._limits[1], stop=self._stop)

    def spend(self, *, size: int = 0, entries: int = 0) -> None:
        """Count bytes or entries before they are written."""
        self._size += size
        self._entries += entries
        if self._stop.is_set():
            raise Stopped(f"unpacking {self.name} was stopped")
        if self._size > self._limits[0] or self._entries > self._limits[1]:
            limits = f"{units.human_bytes(self._limits[0])} or {self._limits[1]:,} entries"
            raise OutlastError(f"{self.name} holds more than {limits}, the limit here; unpack it yourself and use the directory")


def extract(archive: Path, into: Path, budget: Budget, *, kind: str = "") -> None:
    """Unpack an archive into an empty directory. `kind` is `zip` or `tar`; if empty, the file's name decides.

    Raises OSError, Stopped, and OutlastError if the archive is damaged, too large, or has forbidden entries.
    """
    kind = kind or ("zip" if archive.name.lower().endswith(".zip") else "tar")
    links: dict[Path, str] = {}
    with _reported(f"{budget.name} is no {kind} archive, or is damaged"), open(archive, "rb") as file:
        for member, content in _zip(file) if kind == "zip" else _tar(file, budget):
            budget.spend(entries=1)
            path = _inside(into, member.name, budget.name)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.islnk() and _inside(into, member.linkname, budget.name) == path:
                continue  # GNU tar stores a file given twice as a link to itself
            links.pop(path, None)
            path.unlink(missing_ok=True)
            if content:
                _write(content, path, budget)
                path.chmod(0o755 if member.mode & stat.S_IXUSR else 0o644)
                mtime = min(float(member.mtime), time.time())  # so that files that the job writes are newer
                os.utime(path, (mtime, mtime))
            elif member.islnk():
                source = _inside(into, member.linkname, budget.name)
                if not source.is_file():
                    _refuse(budget.name, member.name, f"a link to {member.linkname}, which is no file of it")
                os.link(source, path)
            elif member.issym():
                links[path] = member.linkname
            else:
                _refuse(budget.name, member.name, "a device or pipe")
        for path, target in links.items():
            path.symlink_to(target)
        for path, target in links.items():
            if _leads_out(into, path, target):
                _refuse(budget.name, str(path.relative_to(into)), f"a link to {target}, outside of it")


def decompress(packed: Path, into: Path, budget: Budget) -> None:
    """Decompress a file to a new file. Raises the same errors as `extract`."""
    with _reported(f"{budget.name} is not compressed as its name says, or is damaged"), open(packed, "rb") as file:
        stream = _decompressed(file)
        if stream is file:
            raise ValueError("its first bytes are of no compression that we know")
        with stream:
            _write(stream, into, budget)


@contextlib.contextmanager
def _reported(sentence: str) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGED, *_DAMAGED_HEADERS, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno not in _UNFIT:
            raise
        raise OutlastError(f"{sentence}: {problem}; make or download it again") from problem


def _write(content: IO[bytes], path: Path, budget: Budget) -> None:
    with open(path, "xb") as file:
        while data := content.read(_CHUNK):
            budget.spend(size=len(data))
            file.write(data)


def _inside(root: Path, member: str, archive: str) -> Path:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts:
        _refuse(archive, member, "a path outside of it")
    return root / path


def _leads_out(root: Path, link: Path, target: str) -> bool:
    """Return whether a link leads out of `root`, by its text or through other links."""
    by_text = os.path.normpath(os.path.join(link.parent.relative_to(root), target))
    real_root = os.path.realpath(root)
    return (
        os.path.isabs(target)
        or by_text.split("/")[0] == ".."
        or os.path.commonpath((real_root, os.path.realpath(link))) != real_root
    )


def _refuse(archive: str, member: str, what: str) -> NoReturn:
    raise OutlastError(
        f"{archive} holds {member[:100]!r}, {what}; an archive may hold only files, directories and links inside it"
    )


def _zip(file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    with zipfile.ZipFile(file) as archive:
        for each in archive.infolist():
            member = tarfile.TarInfo(each.filename)
            member.mode = each.external_attr >> 16
            member.mtime = int(time.mktime((*each.date_time, 0, 0, -1)))
            with archive.open(each) as content:  # reading to the end checks the CRC
                if each.is_dir():
                    member.type = tarfile.DIRTYPE
                elif stat.S_ISLNK(member.mode):
                    member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(content.read(_LINK_BYTES))
                elif stat.S_IFMT(member.mode) not in (0, stat.S_IFREG):
                    member.type = tarfile.CHRTYPE
                yield member, content if member.isfile() else None


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header. Raises ReadError if it announces too long a text, or is damaged or cut short, which tarfile would take
        for the end."""
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as problem:
            if buf == bytes(tarfile.BLOCKSIZE):  # a real end
                raise
            raise tarfile.ReadError(str(problem)) from problem
        if member.type in _TEXTS and member.size > _HEADER_BYTES:
            raise tarfile.ReadError(f"it has a header of {member.size} bytes")
        return member


def _tar(file: IO[bytes], budget: Budget) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    with _decompressed(file) as stream:
        with tarfile.TarFile(fileobj=stream, tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined] # otherwise it would keep all members in memory
                yield member, archive.extractfile(member) if member.isfile() else None
        rest = budget.fresh()  # it is not written, only read to the checksum at the end of a compressed file
        while data := stream.read(_CHUNK):
            rest.spend(size=len(data))


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
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            with importing("Zstandard (.zst)", "data"):
                from backports import zstd
        return cast("IO[bytes]", zstd.ZstdFile(file))
    return file
