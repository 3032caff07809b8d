"""Divides a source's files into parts and units of work, based only on their names and sizes.

A process runs one unit at a time: several small files, or a range of a large file. The output does not depend on the number of
processes. A unit's size limits the memory that a process needs.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from outlast.base.errors import OutlastError
from outlast.data import dataset_directory

TRAIN, VAL = "train", "val"
PARTS = {"train": TRAIN, "training": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "eval": VAL, "dev": VAL}
"""Parts, keyed by the name of a directory or file. `test` is excluded because nobody should train or tune on it."""
UNIT = 2 << 20
"""Size of a unit's text in bytes. Arbitrary: small enough that no core idles long at the end."""
RECORDS = ".jsonl"
"""Suffix of the files whose lines are records."""
T = TypeVar("T")


class BadSource(OutlastError):
    """Raised if the source cannot be prepared. The message names the file."""


@dataclass(frozen=True, slots=True)
class File:
    """A file in the source."""

    name: str
    """Path relative to the source, with slashes."""
    size: int
    changed: int = 0
    """Time of the last change, in ns. A killed run is continued only if the files are unchanged."""


@dataclass(frozen=True)
class Document:
    """The text in a file, or in the bytes `low` to `high` of a file."""

    file: str
    size: int
    low: int
    high: int
    part: str
    """TRAIN or VAL; empty if the part is decided per record."""


@dataclass(frozen=True)
class Piece:
    """A range of a document, from about byte `begin` to about byte `end`. The reader moves both to places where it may cut."""

    document: Document
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Unit:
    """Pieces that one process handles as one unit of work."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


def listed(source: Path, to: Path | None = None, patterns: Sequence[str] = ()) -> list[File]:
    """Return a source's files that match any of the patterns, sorted by name, or the source itself if it is a file.

    Without patterns, all files match. Omits hidden files and the target directory `to`. A pattern matches a file's name or its
    path below the source. Raises BadSource.
    """
    if source.is_file():
        about = source.stat()
        return [File(source.name, about.st_size, about.st_mtime_ns)]
    if not source.is_dir():
        raise BadSource(f"{source} does not exist; name a file or a directory")
    if (source / dataset_directory.COMING).exists() and not (source / dataset_directory.MARKER).exists():
        raise BadSource(f"{source} is not complete: `outlast data get` has not finished there; run it again")
    try:
        target = to.stat() if to and to.exists() else None
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
    """Return the error for an I/O failure. It is no BadSource, because another machine may be able to read the file."""
    return OutlastError(f"cannot read {path}: {error.strerror or error}; correct that, and run the same again")


def root(source: Path) -> Path:
    """Return the directory that file names are relative to."""
    return source.parent if source.is_file() else source


def _below(directory: Path, prefix: str, above: list[os.stat_result], target: os.stat_result | None) -> Iterator[File]:
    with os.scandir(directory) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():  # follows links: large datasets are often assembled from links
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
    """Describe a source for the manifest. Sources with the same `listing` count as equal."""
    lines = (f"{file.name}\0{file.size}\n".encode(errors="surrogateescape") for file in files)
    listing = hashlib.sha256(b"".join(lines)).hexdigest()
    return {"files": len(files), "bytes": sum(file.size for file in files), "listing": listing}


def named_part(name: str) -> str:
    """Return the part that the first segment of a path names, as in `val/cat/1.png` or `val.jsonl`; otherwise ""."""
    return PARTS.get(PurePosixPath(name).parts[0].partition(".")[0].lower(), "")


def named(files: Iterable[File]) -> bool:
    """Return whether the file names divide the files into train and val."""
    return {TRAIN, VAL} <= {named_part(file.name) for file in files}


def hash_fraction(key: str | bytes) -> float:
    """Hash a name or content to a number from 0 to 1, which is the same on every machine and does not depend on other files."""
    data = key.encode(errors="surrogateescape") if isinstance(key, str) else key
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / (1 << 64)


def parts(files: Sequence[File], share: float) -> dict[str, str]:
    """Return the part of each file, keyed by the file's name.

    If the names do not divide the files (`named`), a file is in val if its `hash_fraction` is below `share`. With two or more
    files and a positive `share`, each part gets at least one file.
    """
    if named(files):
        return {file.name: named_part(file.name) or TRAIN for file in files}
    lots = {file.name: hash_fraction(file.name) for file in files}
    limit = share
    if share > 0 and len(lots) > 1:
        ordered = sorted(lots.values())
        limit = min(max(share, ordered[0] + (ordered[1] - ordered[0]) / 2), ordered[-1])
    return {name: VAL if lot < limit else TRAIN for name, lot in lots.items()}


def units(documents: Sequence[Document], size: int = UNIT) -> list[Unit]:
    """Divide documents into units of about `size` bytes, in order. Small documents share a unit, and empty documents are
    omitted."""
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
    """Group items in order, with at most `limit` bytes per group; a larger item forms its own group."""
    groups: list[list[T]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups


# ---- records, the lines of .jsonl files


def lines(file: BinaryIO, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a range of a file, except blank lines, each with its offset in bytes."""
    at = piece.begin
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1
    else:
        file.seek(0)
    while at < piece.end and (line := file.readline()):
        if line.strip():
            yield at, line
        at += len(line)


def record(line: bytes, file: BinaryIO, at: int) -> dict[str, Any]:
    """Parse the JSON object in a line. Raises BadSource with file and line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadSource(f"{where(file, at)} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadSource(f"{where(file, at)} is not a JSON object")
    return content


def where(file: BinaryIO, at: int) -> str:
    """Return `train.jsonl, line 7` for the line at byte `at`. Reads the file up to that line."""
    file.seek(0)
    number = 1
    while at > 0 and (some := file.read(min(at, 1 << 20))):
        number += some.count(b"\n")
        at -= len(some)
    return f"{Path(file.name).name}, line {number}"


def text_of(value: Any, name: str, file: BinaryIO, at: int) -> str:
    """Return a text field's value. Raises BadSource if the value is not text, or contains half a surrogate pair."""
    if not isinstance(value, str):
        instead = "no" if value is None else f"{type(value).__name__} as"
        raise BadSource(f"{where(file, at)} has {instead} {name}; each record needs a text there")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadSource(f"{where(file, at)} has half a surrogate pair in {name}; correct it, or use --skip-damaged") from error
    return value
