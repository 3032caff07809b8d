"""Which files a source has, which part each belongs to, and the units of work: pure functions of names and sizes.

A unit is what one process does at a time: some small files, or a range of a large one. Units do not depend on the number of
processes, so neither do the bytes that are made from them. Memory is bounded by the size of a unit.
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
"""Names of directories and files that say which part they are; `test` is none, nobody shall train towards it."""
UNIT = 2 << 20
"""Bytes of text in a unit. Arbitrary: small enough that the last unit keeps no core waiting."""
T = TypeVar("T")


class BadSource(OutlastError):
    """The source has something that cannot be prepared. The sentence names the file."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the source."""

    name: str
    """Relative to the source, with slashes."""
    size: int
    changed: int = 0
    """Time of the last change, in ns: tells whether a killed run may be continued."""


@dataclass(frozen=True)
class Document:
    """A file, or a range of it, that is one text: bytes `low` to `high`."""

    file: str
    size: int
    """Of the whole file."""
    low: int
    high: int
    part: str
    """TRAIN or VAL; empty if each record of the file decides."""


@dataclass(frozen=True)
class Piece:
    """What a unit has of a document: about the bytes `begin` to `end`; the reader moves both ends to where a text may be cut."""

    document: Document
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Unit:
    """What one process does at a time."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


def listed(source: Path, to: Path, patterns: Sequence[str] = ()) -> list[File]:
    """The files of a source that match one of the patterns, sorted by name; a single file is a source, too. Raises BadSource.

    Names that begin with a dot are left out, and the directory `to` that is written. A pattern matches the name or the path below
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
        ours = to.stat() if to.exists() else None
        found = sorted(_below(source, "", [source.stat()], ours), key=lambda file: file.name.encode(errors="surrogateescape"))
    except OSError as error:
        raise BadSource(f"cannot read {error.filename}: {error.strerror}; correct that, or name another source") from error
    if patterns:
        found = [file for file in found if any(_matches(file.name, pattern) for pattern in patterns)]
    if not found:
        raise BadSource(
            f"{source} has no files{f' that match {chr(44).join(patterns)}' if patterns else ''}; name another source"
        )
    return found


def unreadable(path: Path, error: OSError) -> OutlastError:
    """For bytes that cannot be had here: not damage, which --skip-damaged leaves out, since another machine may have them."""
    return OutlastError(f"cannot read {path}: {error.strerror or error}; correct that, and run the same again")


def root(source: Path) -> Path:
    """The directory that names of files are relative to."""
    return source.parent if source.is_file() else source


def _below(directory: Path, prefix: str, above: list[os.stat_result], ours: os.stat_result | None) -> Iterator[File]:
    """The files below a directory; `above` are it and those that it is in."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():  # links are followed: large datasets are often linked together
                about = entry.stat()
                if any(os.path.samestat(about, each) for each in above):
                    raise BadSource(f"{entry.path} links to a directory that it is in; remove it, or name another source")
                if ours is None or not os.path.samestat(about, ours):
                    yield from _below(Path(entry.path), f"{name}/", [*above, about], ours)
            elif entry.is_file():
                about = entry.stat()
                yield File(name, about.st_size, about.st_mtime_ns)


def _matches(name: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("**/")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)


def described(files: Sequence[File]) -> dict[str, Any]:
    """What a manifest says of its source. `listing` digests names and sizes: two sources with the same are taken for one."""
    lines = (f"{file.name}\0{file.size}\n".encode(errors="surrogateescape") for file in files)
    listing = hashlib.sha256(b"".join(lines)).hexdigest()
    return {"files": len(files), "bytes": sum(file.size for file in files), "listing": listing}


def named_part(name: str) -> str:
    """The part that the first segment of a file's name says: `val/cat/1.png`, `val.jsonl`; empty if none."""
    return PARTS.get(PurePosixPath(name).parts[0].partition(".")[0].lower(), "")


def named(files: Iterable[File]) -> bool:
    """Whether the files name both parts."""
    return {TRAIN, VAL} <= {named_part(file.name) for file in files}


def drawn(key: str | bytes) -> float:
    """A number in 0 ... 1 drawn by a name or a content: the same on every machine, whatever other files there are."""
    data = key.encode(errors="surrogateescape") if isinstance(key, str) else key
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / (1 << 64)


def parts(files: Sequence[File], share: float) -> dict[str, str]:
    """The part of each file, by its name. Files that name their part are obeyed, if there are some of both; else a file is in val
    when its name draws a number below `share`. Both parts get a file if there are two."""
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

    Small documents are together in a unit, one of more than `size` is divided into ranges of that size, empty ones are left out.
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
    """Items in groups of `limit` bytes at most, in order; an item of more than that is a group."""
    groups: list[list[T]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups
