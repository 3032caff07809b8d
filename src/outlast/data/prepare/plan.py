"""The files of a source, the part that each belongs to, and the units of work: pure functions of names and sizes.

A process does one unit at a time: several small files, or a range of a large file. Neither the units nor the bytes that are made
from them depend on the number of processes. Memory is bounded by the size of a unit.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from outlast.base.errors import OutlastError
from outlast.data import place

TRAIN, VAL = "train", "val"
PARTS = {"train": TRAIN, "training": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "eval": VAL, "dev": VAL}
"""Names of directories and files that stand for a part. `test` is not among them, since nobody should optimize for the test
set."""
UNIT = 2 << 20
"""Size in bytes of the text in a unit. Arbitrary: small enough that no core waits long for the last unit."""
T = TypeVar("T")


class BadSource(OutlastError):
    """The source contains something that cannot be prepared. The message names the file."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the source."""

    name: str
    """Relative to the source, with slashes."""
    size: int
    changed: int = 0
    """Time of the last change, in ns: a killed run is continued only if the files are unchanged."""


@dataclass(frozen=True)
class Document:
    """A text: a file, or the bytes `low` to `high` of a file."""

    file: str
    size: int
    """Size of the whole file in bytes."""
    low: int
    high: int
    part: str
    """TRAIN or VAL; empty if each record of the file decides."""


@dataclass(frozen=True)
class Piece:
    """A part of a document, roughly the bytes `begin` to `end`: the reader moves both ends to places where a text may be cut."""

    document: Document
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Unit:
    """The pieces that one process handles at a time."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


def listed(source: Path, to: Path, patterns: Sequence[str] = ()) -> list[File]:
    """The files of a source that match any of the patterns, sorted by name. A source may be a single file. Raises BadSource.

    Hidden files and the target directory `to` are left out. A pattern matches the name or the path below
    the source: `*.py`, `src/*.md`.
    """
    if source.is_file():
        about = source.stat()
        return [File(source.name, about.st_size, about.st_mtime_ns)]
    if not source.is_dir():
        raise BadSource(f"{source} does not exist; name a file or a directory")
    if (source / place.COMING).exists() and not (source / place.MARKER).exists():
        raise BadSource(f"{source} is not complete: `outlast data get` has not finished there; run it again")
    try:
        target = to.stat() if to.exists() else None
        matches = sorted(_below(source, "", [source.stat()], target), key=lambda file: file.name.encode(errors="surrogateescape"))
    except OSError as error:
        raise BadSource(f"cannot read {error.filename}: {error.strerror}; correct that, or name another source") from error
    if patterns:
        matches = [file for file in matches if any(_matches(file.name, pattern) for pattern in patterns)]
    if not matches:
        raise BadSource(
            f"{source} has no files{f' that match {chr(44).join(patterns)}' if patterns else ''}; name another source"
        )
    return matches


def unreadable(path: Path, error: OSError) -> OutlastError:
    """The error for an I/O failure. This does not count as damage, which --skip-damaged would leave out: another machine may be
    able to read the file."""
    return OutlastError(f"cannot read {path}: {error.strerror or error}; correct that, and run the same again")


def root(source: Path) -> Path:
    """The directory that file names are relative to."""
    return source.parent if source.is_file() else source


def _below(directory: Path, prefix: str, above: list[os.stat_result], target: os.stat_result | None) -> Iterator[File]:
    """The files below a directory. `above`: that directory and its parents."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():  # links are followed: large datasets are often linked together
                about = entry.stat()
                if any(os.path.samestat(about, each) for each in above):
                    raise BadSource(f"{entry.path} links to a directory that it is in; remove it, or name another source")
                if target is None or not os.path.samestat(about, target):
                    yield from _below(Path(entry.path), f"{name}/", [*above, about], target)
            elif entry.is_file():
                about = entry.stat()
                yield File(name, about.st_size, about.st_mtime_ns)


def _matches(name: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("**/")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)


def described(files: Sequence[File]) -> dict[str, Any]:
    """Description of a source for the manifest. Sources with the same `listing`, a digest of names and sizes, count as equal."""
    lines = (f"{file.name}\0{file.size}\n".encode(errors="surrogateescape") for file in files)
    listing = hashlib.sha256(b"".join(lines)).hexdigest()
    return {"files": len(files), "bytes": sum(file.size for file in files), "listing": listing}


def named_part(name: str) -> str:
    """The part named by the first segment of a path: `val/cat/1.png`, `val.jsonl`; empty if the segment names none."""
    return PARTS.get(PurePosixPath(name).parts[0].partition(".")[0].lower(), "")


def named(files: Iterable[File]) -> bool:
    """Whether some file names stand for train, and others for val."""
    return {TRAIN, VAL} <= {named_part(file.name) for file in files}


def drawn(key: str | bytes) -> float:
    """A number from 0 to 1, hashed from a name or a content: the same on every machine, whatever other files there are."""
    data = key.encode(errors="surrogateescape") if isinstance(key, str) else key
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / (1 << 64)


def parts(files: Sequence[File], share: float) -> dict[str, str]:
    """The part of each file, by its name.

    If some file names stand for train and others for val, the names decide; otherwise a file is in val if `drawn` of its name is
    below `share`. Both parts get a file if there are at least two.
    """
    if named(files):
        return {file.name: named_part(file.name) or TRAIN for file in files}
    lots = {file.name: drawn(file.name) for file in files}
    limit = share
    if share > 0 and len(lots) > 1:
        ordered = sorted(lots.values())
        limit = min(max(share, ordered[0] + (ordered[1] - ordered[0]) / 2), ordered[-1])
    return {name: VAL if lot < limit else TRAIN for name, lot in lots.items()}


def units(documents: Sequence[Document], size: int = UNIT) -> list[Unit]:
    """Units of about `size` bytes, in the order of the documents.

    Small documents share a unit, a document larger than `size` is divided into ranges of that size, and empty documents are left
    out.
    """
    made: list[tuple[Piece, ...]] = []
    small: list[Piece] = []
    room = size
    for each in documents:
        pieces = [Piece(each, begin, min(begin + size, each.high)) for begin in range(each.low, each.high, size)]
        if small and (len(pieces) > 1 or each.high - each.low > room):
            made.append(tuple(small))
            small, room = [], size
        if len(pieces) == 1:
            small += pieces
            room -= pieces[0].bytes
        else:
            made += [(piece,) for piece in pieces]
    if small:
        made.append(tuple(small))
    return [Unit(number, pieces) for number, pieces in enumerate(made)]


def grouped(items: Sequence[T], sizes: Sequence[int], limit: int) -> list[list[T]]:
    """Items in groups of at most `limit` bytes, in order; an item that is larger forms a group of its own."""
    groups: list[list[T]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups
