"""Turns text into tokens: UTF-8 files, or records of .jsonl files, become nanoGPT's `train.bin`, `val.bin` and `meta.pkl`.

There are three resumable stages: `survey` (the set and number of characters, if needed), the tokenizer (trained on a sample), and
`encode` (each unit's tokens). At the end the tokens are joined in file order. A separator follows each document, which is a file
or a record.

A hash of the document's name or text decides whether it is in val, so it keeps its part when other documents are added. Only a
file that is the whole source is divided: its last characters are val, as in nanoGPT. Memory: about 20 times a unit per process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import source_files, tokenizer, work_units
from outlast.data.prepare.source_files import TRAIN, VAL, BadSource, Document, File, Piece, Unit

SAMPLE = 256 << 20
"""Maximum number of bytes of text on which a tokenizer is trained. Arbitrary: more text hardly changes the merges."""
_WINDOW = 1 << 16


@dataclass(frozen=True)
class Settings:
    """Settings for `outlast data prepare text`."""

    tokenizer: str = "bpe"
    """`char`, `bpe`, `gpt2-like`, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """Vocabulary size of a BPE trained here; by default 4096 for `bpe`, 50,257 for `gpt2-like`."""
    val: float = 0.1
    separator: str | None = None
    """Token after each document; None means the tokenizer's own separator, and an empty string means no separator."""
    patterns: tuple[str, ...] = ()
    """Patterns for the names of the files to read; empty means all files."""
    field: str = "text"
    shard_size: int | None = None
    """Size of a shard in bytes; None means one file per part."""
    skip_damaged: bool = False
    """True to skip, and count, damaged files and records."""

    @property
    def trained(self) -> int | None:
        """Vocabulary size of the BPE to train; None if no BPE is trained."""
        return {"bpe": self.vocab_size or 4096, "gpt2-like": self.vocab_size or tokenizer.GPT2_VOCABULARY}.get(self.tokenizer)


@dataclass(frozen=True)
class Reader:
    """Settings for the processes that read documents."""

    root: Path
    field: str
    val: float
    skip_damaged: bool


def prepare(request: work_units.Request, settings: Settings) -> shard_format.Manifest:
    """Make or finish the dataset, and return its manifest. Raises BadSource, and OutlastError for invalid settings, or if the
    target contains other files."""
    sources = source_files.listed(request.source, request.to, settings.patterns)
    about = described(settings)
    source = source_files.described(sources)
    if made := work_units.existing(request, "text", about, source):
        return made
    reader = Reader(source_files.root(request.source), settings.field, settings.val, settings.skip_damaged)
    with work_units.opened(work_units.fitting(request, 20 * request.unit), about, sources) as place:
        units, characters = _documents(place, reader, settings, sources)
        path = place.private / shard_format.TOKENIZER
        if not path.exists() and settings.tokenizer == "char":
            tokenizer.save(path, tokenizer.of_characters(characters or ()))
        elif not path.exists():
            sample = units[:: -(-sum(unit.bytes for unit in units) // SAMPLE) or 1]  # every n-th unit of a large source
            make_tokenizer(place, path, settings, functools.partial(_train, reader=reader, units=sample))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        loaded = tokenizer.load(path)
        size = tokenizer.vocab_size(loaded)
        separator = tokenizer.separator(loaded, settings.separator)
        end = b"" if separator is None else np.array(separator, np.dtype(shard_format.dtype(size)).newbyteorder("<")).tobytes()
        encode = functools.partial(_encode, reader=reader, path=path, digest=digest, end=end, into=place.private)
        notes = place.results("encode", encode, units)
        tokenizer.write_vocabulary(place.private / shard_format.META, loaded)
        parts = _assembled(place, settings, notes, shard_format.dtype(size))
        source["damaged"] = sum(note["damaged"] for note in notes)
        return place.finish(
            shard_format.Manifest(
                "text", parts, about, source, shard_format.dtype(size), size, shard_format.TOKENIZER, str(request.to)
            )
        )


def described(settings: Settings) -> dict[str, Any]:
    """Return the settings to record in the manifest, equal on all machines. Raises OutlastError for invalid settings."""
    if not 0 <= settings.val < 1:
        raise OutlastError(f"--val {settings.val} is no share of the text; give one from 0 to below 1, such as 0.1")
    if settings.trained is not None and settings.trained < 257:
        raise OutlastError(
            f"--vocab-size {settings.trained} is too small: 256 bytes and the separator need 257; give a larger one"
        )
    if settings.vocab_size is not None and settings.trained is None:
        raise OutlastError(
            f"--vocab-size is that of a tokenizer trained here, and --tokenizer is {settings.tokenizer}; leave it out"
        )
    about = dataclasses.asdict(settings)
    about["patterns"] = list(settings.patterns)
    about["vocab_size"] = settings.trained
    if settings.trained is None and settings.tokenizer != "char":
        path = Path(settings.tokenizer)
        tokenizer.load(path)
        about["tokenizer"] = f"{path.name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    return about


# ---- documents


def _documents(
    place: work_units.Place, reader: Reader, settings: Settings, sources: Sequence[File]
) -> tuple[list[Unit], set[str] | None]:
    """Return the units to encode, and the set of characters in all documents (None if there was no survey)."""
    plain = [file for file in sources if not file.name.endswith(source_files.RECORDS)]
    part = source_files.parts(sources if len(plain) < len(sources) and source_files.named(sources) else plain, settings.val)
    documents = [Document(file.name, file.size, 0, file.size, part.get(file.name, "")) for file in sources]
    tail = len(sources) == len(plain) == 1 and settings.val > 0
    characters = None
    if tail or settings.tokenizer == "char":
        units = source_files.units(documents, place.request.unit)
        if not units:
            raise BadSource(f"{place.request.source} has no text: its files are empty; name another source")
        notes = place.results("survey", functools.partial(_survey, reader=reader), units)
        characters = {character for note in notes for character in note["characters"]}
        if tail:
            (document,) = documents
            at = _tail(reader, units, [note["length"] for note in notes], settings.val)
            documents = [dataclasses.replace(document, high=at, part=TRAIN), dataclasses.replace(document, low=at, part=VAL)]
    return source_files.units(documents, place.request.unit), characters


def _survey(unit: Unit, *, reader: Reader) -> work_units.Note:
    seen, length = np.zeros(0x110000, bool), 0
    for _, text, _ in texts(unit, reader, []):
        points = tokenizer.code_points(text)
        seen[points] = True
        length += len(points)
    return {"characters": "".join(map(chr, np.flatnonzero(seen))), "length": length}


def _tail(reader: Reader, units: Sequence[Unit], lengths: Sequence[int], val: float) -> int:
    """Return the byte offset at which the last fraction `val` of a file's characters begins."""
    left = int(sum(lengths) * (1 - val))
    for unit, length in zip(units, lengths, strict=True):
        if left < length:
            (piece,) = unit.pieces
            with opened(reader, piece.document) as file:
                begin = _cut(file, piece.document, piece.begin)
                return begin + len(_text(_range(file, piece), piece.document, begin)[:left].encode())
        left -= length
    return units[-1].pieces[-1].end


def texts(unit: Unit, reader: Reader, damaged: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the part and the content of each text in a unit, and whether the text ends a document.

    Raises BadSource for unreadable text. With `skip_damaged`, adds a message to `damaged` instead.
    """
    for piece in unit.pieces:
        try:
            with opened(reader, piece.document) as file:
                if piece.document.file.endswith(source_files.RECORDS):
                    yield from _records(file, piece, reader, damaged)
                else:
                    begin = _cut(file, piece.document, piece.begin)
                    text = _text(_range(file, piece), piece.document, begin)
                    yield piece.document.part, text, piece.end == piece.document.high
        except BadSource as error:
            if not reader.skip_damaged:
                raise
            damaged.append(str(error))


def opened(reader: Reader, document: Document) -> BinaryIO:
    """Open a document's file. Raises OutlastError if it cannot be read, or if its size has changed."""
    path = reader.root / document.file
    try:
        file = path.open("rb")
    except OSError as error:
        raise source_files.unreadable(path, error) from error
    if os.fstat(file.fileno()).st_size != document.size:
        file.close()
        raise OutlastError(f"{path} changed while it was read; run the same command again when nobody writes to it")
    return file


def _range(file: BinaryIO, piece: Piece) -> bytes:
    begin, end = (_cut(file, piece.document, at) for at in (piece.begin, piece.end))
    file.seek(begin)
    return file.read(end - begin)


def _cut(file: BinaryIO, document: Document, near: int) -> int:
    """Return the first offset at or after `near` where the document can be cut: before a space or newline that follows a
    printable character, so as not to split a GPT-2 word, or else between any two characters."""
    if near in (document.low, document.high):
        return near
    file.seek(near - 1)
    window = file.read(min(_WINDOW, document.high - near) + 1)
    for i in range(1, len(window)):
        if window[i] in b" \n" and 0x21 <= window[i - 1] <= 0x7E:
            return near - 1 + i
    return near + next((i for i in range(min(4, len(window) - 1)) if window[1 + i] & 0xC0 != 0x80), 0)


def _text(data: bytes, document: Document, begin: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadSource(
            f"{document.file} is not UTF-8: byte {begin + error.start} is 0x{data[error.start]:02x}; name the files to "
            f"read with --glob, convert it, or leave it out with --skip-damaged"
        ) from error


def _records(file: BinaryIO, piece: Piece, reader: Reader, damaged: list[str]) -> Iterator[tuple[str, str, bool]]:
    for at, line in source_files.lines(file, piece):
        try:
            text = source_files.text_of(source_files.record(line, file, at).get(reader.field), reader.field, file, at)
        except BadSource as error:
            if not reader.skip_damaged:
                raise
            damaged.append(str(error))
            file.seek(at + len(line))
            continue
        yield piece.document.part or (VAL if source_files.hash_fraction(text) < reader.val else TRAIN), text, True


# ---- tokens


def make_tokenizer(place: work_units.Place, path: Path, settings: Settings, train: Callable[[Path, int], None]) -> None:
    """Write `tokenizer.json`: copy the given tokenizer, or call `train(path, size)` in a separate process."""
    if settings.trained is None:
        tokenizer.save(path, Path(settings.tokenizer).read_text("utf-8"))
        return
    tokenizer.library()
    place.request.progress("train the tokenizer", 0, 0)
    place.in_subprocess(train, path, settings.trained)


def _train(path: Path, size: int, *, reader: Reader, units: Sequence[Unit]) -> None:
    def sample() -> Iterator[str]:
        for unit in units:
            for part, text, _ in texts(unit, reader, []):
                if part == TRAIN:
                    yield from tokenizer.pieces(text)

    tokenizer.save(path, tokenizer.train(sample(), size))


def _encode(unit: Unit, *, reader: Reader, path: Path, digest: str, end: bytes, into: Path) -> work_units.Note:
    encoder = tokenizer.encoder(path, digest)
    tokens: dict[str, list[bytes]] = {TRAIN: [], VAL: []}
    documents = {TRAIN: 0, VAL: 0}
    damaged: list[str] = []
    for part, text, ends in texts(unit, reader, damaged):
        tokens[part] += [encoder(text), end if ends else b""]
        documents[part] += ends
    note: work_units.Note = {"damaged": len(damaged)}
    for part, encoded in tokens.items():
        name = f"encode-{unit.number:06d}.{part}"
        temporary = files.beside(into / name)
        with temporary.open("wb") as file:
            file.writelines(encoded)
            file.flush()
            os.fsync(file.fileno())
            note[part] = {"file": name, "documents": documents[part], "bytes": file.tell()}
        temporary.replace(into / name)
    return note


def _assembled(
    place: work_units.Place, settings: Settings, notes: Sequence[work_units.Note], dtype: str
) -> dict[str, shard_format.Part]:
    parts = {}
    total = sum(note[part]["bytes"] for note in notes for part in (TRAIN, VAL))
    done = 0
    for part in (TRAIN, VAL) if settings.val or any(note[VAL]["documents"] for note in notes) else (TRAIN,):
        with shard_format.Writer(place.private, part, 2 if dtype == "uint16" else 4, settings.shard_size) as writer:
            for note in notes:
                place.check()
                data = (place.private / note[part]["file"]).read_bytes()
                writer.write(data, note[part]["documents"])
                done += len(data)
                place.request.progress("put together", done, total)
            parts[part] = writer.close()
    return parts
