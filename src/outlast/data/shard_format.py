"""Prepared datasets: shard files and the manifest that names them, in a directory or under a prefix in a store.

`outlast data prepare` writes prepared datasets, training reads them (`read` or `parse`, then `tokens` or `columns` per shard),
and `verify` checks every byte. The manifest is written last, so a dataset without a manifest is incomplete, except for a plain
nanoGPT directory (`train.bin`, `val.bin`, optionally `meta.pkl`).

Text shards are raw little-endian token ids. All other shards are safetensors files of columns. A column of fixed shape has the
samples as its first dimension. A ragged column is flat, with its offsets in `NAME.offsets` (int64, samples + 1). Formats:
https://github.com/karpathy/nanoGPT (data/*/prepare.py), https://huggingface.co/docs/safetensors (Format).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.base.typed_json import decode
from outlast.data import dataset_directory as place
from outlast.job import contract

VERSION = 1
MANIFEST = place.MANIFEST
TOKENIZER = "tokenizer.json"
META = "meta.pkl"
KINDS = ("text", "images", "jsonl", "video")
DTYPES = ("", "uint16", "uint32")
OFFSETS = ".offsets"
UINT16 = 1 << 16
CHUNK = 8 << 20
"""Bytes per read; a multiple of every item size."""
HEADER = 100_000_000
"""Maximum header size of a safetensors file in bytes, as in the reference implementation."""


class BadDataset(OutlastError):
    """Raised if a dataset is missing, incomplete or unreadable. The exit code means that a restart cannot help."""

    exit_code = contract.Exit.MISCONFIGURED


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of samples."""

    file: Annotated[str, re.compile(r"(?!\.)[\w.-]+").fullmatch]
    samples: int
    """Number of samples; for text, the number of documents that begin in the shard."""
    bytes: int
    sha256: str
    """Hexadecimal digest; empty in a directory without a manifest."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a dataset, `train` or `val`: its shards, in order."""

    shards: tuple[Shard, ...]
    tokens: int | None = None
    """Number of tokens in a text dataset; None for other kinds."""

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    kind: Annotated[str, KINDS.__contains__]
    """One of KINDS."""
    parts: Mapping[str, Part]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Describes the source: numbers of files and bytes, classes, damaged samples and the like."""
    dtype: Annotated[str, DTYPES.__contains__] = ""
    """Token type of a text dataset, uint16 or uint32; empty for other kinds."""
    vocab_size: int | None = None
    """Number of tokens in the vocabulary; None if unknown."""
    tokenizer: str = ""
    """Name of the tokenizer's file; empty if there is none."""
    place: str = dataclasses.field(default="the dataset", compare=False)
    """Directory or URL of the dataset, for messages."""

    def part(self, name: str) -> Part:
        """Return the part with this name. Raises BadDataset if the part is missing or empty."""
        if name not in self.parts:
            raise BadDataset(
                f"{self.place} has no part {name}, it has {', '.join(sorted(self.parts)) or 'none'}; prepare it again with one"
            )
        part = self.parts[name]
        if not (part.tokens if self.kind == "text" else part.samples):
            what = "token" if self.kind == "text" else "sample"
            raise BadDataset(f"{self.place} has no {what} in {name}; prepare it again with more data or another --val")
        return part

    @property
    def text(self) -> str:
        """The manifest as JSON. Equal manifests give identical text."""
        parts = {}
        for name, part in self.parts.items():
            tokens = {} if part.tokens is None else {"tokens": part.tokens}
            parts[name] = {"samples": part.samples, **tokens, "shards": [dataclasses.asdict(shard) for shard in part.shards]}
        about: dict[str, Any] = {"version": VERSION, "kind": self.kind, "settings": self.settings, "source": self.source}
        if self.kind == "text":
            about["dtype"] = self.dtype
        if self.vocab_size is not None:
            about["vocab_size"] = self.vocab_size
        if self.tokenizer:
            about["tokenizer"] = self.tokenizer
        text = json.dumps({**about, "parts": parts}, indent=1, ensure_ascii=False) + "\n"
        return text.encode(errors="backslashreplace").decode()  # file names that are not UTF-8, escaped as in JSON


def dtype(vocab_size: int) -> str:
    """Return `uint16` if it can hold the tokens of a vocabulary of this size, otherwise `uint32`."""
    return "uint16" if vocab_size <= UINT16 else "uint32"


# ---- reading


def read(directory: Path | str) -> Manifest:
    """Return the manifest of a dataset in a directory, or derive one for a plain nanoGPT directory.

    Checks the size of every shard without reading the shards. Raises BadDataset.
    """
    directory = Path(directory)
    try:
        text = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return _plain(directory)
    except OSError as error:
        raise BadDataset(f"cannot read {directory / MANIFEST}: {error.strerror or error}") from error
    manifest = parse(text, str(directory))
    local = Local(directory)
    for part in manifest.parts.values():
        for shard in part.shards:
            if problem := _size_problem(local, shard):
                raise BadDataset(f"{directory}: {problem}; get or prepare the dataset again")
    return manifest


def parse(text: bytes | str, place: str) -> Manifest:
    """Parse `text`, the `manifest.json` of the dataset at `place`. Raises BadDataset."""
    name = f"{place}/{MANIFEST}"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BadDataset(f"{name} is not JSON ({error}); get or prepare the dataset again") from error
    version: Any = content.get("version") if isinstance(content, dict) else None
    if not isinstance(version, int) or version < 1:
        raise BadDataset(f"{name} is not the manifest of a dataset: it has no version; write to another directory")
    if version > VERSION:
        raise BadDataset(f"{name} has version {version}, and this Outlast reads up to {VERSION}; upgrade Outlast")
    try:
        manifest = dataclasses.replace(decode(Manifest, content), place=place)
        for part in manifest.parts.values() if manifest.kind == "text" else ():
            tokens = sum(token_count(shard.bytes, manifest.dtype, f"{place}/{shard.file}") for shard in part.shards)
            if tokens != part.tokens:
                raise ValueError(f"its shards have {tokens} tokens, and it says {part.tokens}")
    except (ValueError, TypeError) as wrong:  # TypeError: text without a dtype
        raise BadDataset(f"{name} is damaged: {wrong}; get or prepare the dataset again") from wrong
    check_dtype(manifest.vocab_size, manifest.dtype, place)
    return manifest


def check_dtype(vocab_size: int | None, dtype: str, place: str) -> None:
    """Raise BadDataset if `dtype` is too small for a vocabulary's tokens."""
    if vocab_size is not None and dtype == "uint16" and vocab_size > UINT16:
        raise BadDataset(
            f"{place} has a vocabulary of {vocab_size} tokens in uint16, whose largest token is {UINT16 - 1}: larger ones "
            f"would have wrapped around; prepare it again as uint32"
        )


def token_count(size: int, dtype: str, file: str) -> int:
    """Return the number of tokens in a file of `size` bytes. Raises BadDataset if it is not a whole number."""
    tokens, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise BadDataset(f"{file} has {size} bytes, which is no whole number of {dtype} tokens; it is cut off or of another type")
    return tokens


def _plain(directory: Path) -> Manifest:
    """Derive the manifest of a nanoGPT directory with uint16 tokens."""
    bins = {part: directory / f"{part}.bin" for part in ("train", "val")}
    if not bins["train"].is_file():
        unfinished = (
            f"it has neither {MANIFEST}, which is written last, nor train.bin" if directory.is_dir() else "it does not exist"
        )
        raise BadDataset(
            f"{directory} is not a prepared dataset: {unfinished}; "
            f"run: outlast data prepare text SOURCE --to {directory} (or images, jsonl, video)"
        )
    parts = {}
    for part, path in bins.items():
        if path.is_file():
            size = path.stat().st_size
            parts[part] = Part((Shard(path.name, 1, size, ""),), token_count(size, "uint16", str(path)))
    about = vocabulary(directory / META) if (directory / META).exists() else None
    vocab_size = about.vocab_size if about else None
    check_dtype(vocab_size, "uint16", str(directory))
    tokenizer = TOKENIZER if (directory / TOKENIZER).exists() else META if about and about.itos else ""
    return Manifest("text", parts, dtype="uint16", vocab_size=vocab_size, tokenizer=tokenizer, place=str(directory))


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The content of nanoGPT's `meta.pkl`."""

    vocab_size: int
    stoi: Mapping[str, int]
    """Token ids, keyed by text; may be empty."""
    itos: Mapping[int, str]
    """Texts, keyed by token id; may be empty."""


def vocabulary(path: Path) -> Vocabulary:
    """Read `meta.pkl` without running any code that it may contain. Raises BadDataset."""
    with path.open("rb") as file:
        try:
            content = _Plain(file).load()
            made = Vocabulary(content["vocab_size"], dict(content.get("stoi", ())), dict(content.get("itos", ())))
            if made.vocab_size < 1:
                raise ValueError(f"vocab_size is {made.vocab_size}")
        except Exception as error:  # the unpickler may raise anything on invalid bytes
            raise BadDataset(f"{path} is damaged or not nanoGPT's vocabulary ({error}); prepare the dataset again") from error
    return made


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would run {module}.{name} when it is opened")


def tokens(path: Path, dtype: str) -> NDArray[Any]:
    """Return a text shard's tokens, (n,), as a read-only memory map. Raises BadDataset."""
    kind = np.dtype(dtype).newbyteorder("<")
    n = token_count(_size(path), dtype, str(path))
    return np.memmap(path, kind, "r", shape=(n,)) if n else np.empty(0, kind)


def columns(path: Path) -> dict[str, NDArray[Any]]:
    """Return a safetensors shard's columns as read-only memory maps. Raises BadDataset."""
    size = _size(path)
    try:
        with path.open("rb") as file:
            header, start = _header(file, size)
    except ValueError as wrong:
        raise BadDataset(f"{path} is not a whole safetensors file: {wrong}; get or prepare the dataset again") from wrong
    whole_file = np.memmap(path, np.uint8, "r")
    return {
        name: whole_file[start + begin : start + end].view(kind).reshape(shape)
        for name, (kind, shape, begin, end) in header.items()
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise BadDataset(f"{path} does not exist; get or prepare the dataset again") from error


def samples(shard: Mapping[str, NDArray[Any]]) -> int:
    """Return the number of samples in a shard's columns."""
    return min(
        (len(column) - name.endswith(OFFSETS) for name, column in shard.items() if f"{name}{OFFSETS}" not in shard), default=0
    )


_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip

_Header = dict[str, tuple[np.dtype[Any], tuple[int, ...], int, int]]


def _header(file: BinaryIO, size: int) -> tuple[_Header, int]:
    """Return every column's type, shape, begin and end, and the offset of the first column. Raises ValueError."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(HEADER, size - 8):
        raise ValueError(f"its header would have {length} bytes of its {size}")
    header = {}
    try:
        for name, each in json.loads(file.read(length)).items():
            if name == "__metadata__":
                continue
            kind, shape, (begin, end) = np.dtype(_DTYPES[each["dtype"]]), tuple(map(int, each["shape"])), each["data_offsets"]
            if min((*shape, begin), default=0) < 0 or end - begin != kind.itemsize * int(np.prod(shape, dtype=object)):
                raise ValueError
            header[name] = (kind, shape, begin, end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("its header is damaged") from error
    if 8 + length + max((end for *_, end in header.values()), default=0) != size:
        raise ValueError(f"it has {size} bytes, and its columns need another number")
    return header, 8 + length


# ---- writing


class Writer:
    """Writes the shards of one part of a text dataset, in order. A shard gets its final name once it is complete.

    With a `limit` in bytes, the shards are named `PART-00000.bin`, `PART-00001.bin` and so on. Without one, there is a single
    shard, `PART.bin`.
    """

    def __init__(self, directory: Path, part: str, itemsize: int, limit: int | None = None) -> None:
        if limit is not None and limit < itemsize:
            raise OutlastError(f"a shard of {limit} bytes holds no token; give a larger --shard-size")
        self._directory, self._part, self._itemsize = directory, part, itemsize
        self._limit = limit and limit // itemsize * itemsize
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._written = self._samples = 0
        self._hash = hashlib.sha256()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:  # after an error; the next run rewrites the unfinished shard
            self._file.close()

    def write(self, data: bytes | memoryview[int], samples: int = 0) -> None:
        """Append tokens. `samples` is the number of documents that begin in `data`."""
        rest: memoryview[int] = memoryview(data)
        while True:
            if self._file is None:
                self._file = self._temporary.open("wb")
            room = len(rest) if self._limit is None else min(len(rest), self._limit - self._written)
            piece, rest = bytes(rest[:room]), rest[room:]
            self._file.write(piece)
            self._hash.update(piece)
            self._written, self._samples, samples = self._written + room, self._samples + samples, 0
            if not rest:
                return
            self._finish()

    def close(self) -> Part:
        """Finish the last shard and return the part."""
        if self._file or not self._shards:
            self.write(b"")
            self._finish()
        return Part(tuple(self._shards), sum(shard.bytes for shard in self._shards) // self._itemsize)

    @property
    def _name(self) -> str:
        return f"{self._part}.bin" if self._limit is None else f"{self._part}-{len(self._shards):05d}.bin"

    @property
    def _temporary(self) -> Path:
        return self._directory / f".{self._name}.partial"

    def _finish(self) -> None:
        assert self._file
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._directory / self._name)
        self._shards.append(Shard(self._name, self._samples, self._written, self._hash.hexdigest()))
        self._file, self._written, self._samples, self._hash = None, 0, 0, hashlib.sha256()


def ragged(rows: Sequence[NDArray[Any]], dtype: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Concatenate rows of any length into a flat column and its offsets (int64, rows + 1)."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.concatenate([np.empty(0, dtype), *rows]).astype(dtype), offsets


def write_columns(path: Path, table: Mapping[str, NDArray[Any]]) -> Shard:
    """Write columns as a safetensors file. Equal columns give identical files."""
    names = {np.dtype(kind): name for name, kind in _DTYPES.items()}
    ordered = sorted(table.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # keeps each column aligned
    about, end = {}, 0
    for name, column in ordered:
        begin, end = end, end + column.nbytes
        about[name] = {"dtype": names[column.dtype], "shape": list(column.shape), "data_offsets": [begin, end]}
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest, size = hashlib.sha256(), 0
    temporary = files.beside(path)
    with temporary.open("wb") as file:
        head: list[bytes | memoryview[int]] = [len(header).to_bytes(8, "little"), header]
        for piece in itertools.chain(head, (_bytes(column) for _, column in ordered)):
            size += file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return Shard(path.name, samples(table), size, digest.hexdigest())


def _bytes(column: NDArray[Any]) -> memoryview[int]:
    flat = np.ascontiguousarray(column, column.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data


def write_vocabulary(path: Path, size: int, texts: Mapping[int, str]) -> None:
    """Write nanoGPT's `meta.pkl` for a vocabulary of `size` tokens. `texts` is keyed by token id."""
    stoi = {text: token for token, text in reversed(list(texts.items()))}  # if two tokens have the same text, the first wins
    files.replace(path, pickle.dumps({"vocab_size": size, "itos": dict(texts), "stoi": stoi}, protocol=4), durable=True)


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the dataset complete. Call this last."""
    files.sync(directory)
    files.replace(directory / MANIFEST, manifest.text, durable=True)


# ---- verifying


class Files(Protocol):
    """A dataset's files, in a directory (`Local`) or a store (`cli.data.prepare`)."""

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, or None if the file is missing."""

    def chunks(self, name: str) -> Iterable[bytes]:
        """Yield a file's content in pieces of CHUNK bytes; the last piece may be shorter."""


class Local:
    """Files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def size(self, name: str) -> int | None:
        path = self._directory / name
        return path.stat().st_size if path.is_file() else None

    def chunks(self, name: str) -> Iterator[bytes]:
        with (self._directory / name).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def verify(manifest: Manifest, place: Files) -> list[str]:
    """Read every shard, and return a message for each problem: a missing or damaged file, a wrong number of samples, a token
    outside the vocabulary, or an empty part."""
    problems = []
    for name, part in manifest.parts.items():
        problems += [problem for shard in part.shards if (problem := _problem(manifest, shard, place))]
        if not (part.tokens if manifest.kind == "text" else part.samples):
            problems.append(f"{name} is empty")
    if manifest.tokenizer and place.size(manifest.tokenizer) is None:
        problems.append(f"{manifest.tokenizer} is missing")
    return problems


def _size_problem(place: Files, shard: Shard) -> str:
    size = place.size(shard.file)
    if size is None:
        return f"{shard.file} is missing"
    return f"{shard.file} has {size} bytes, not {shard.bytes}" if size != shard.bytes else ""


def _problem(manifest: Manifest, shard: Shard, place: Files) -> str:
    if problem := _size_problem(place, shard):
        return problem
    digest, at, first, unknown = hashlib.sha256(), 0, b"", ""
    text = manifest.kind == "text"
    kind = np.dtype(manifest.dtype).newbyteorder("<") if text else np.dtype(np.uint8)
    for chunk in place.chunks(shard.file):
        digest.update(chunk)
        first = first or chunk
        tokens = np.frombuffer(chunk, kind)
        if text and manifest.vocab_size and not unknown and int(tokens.max()) >= manifest.vocab_size:
            wrong = int(np.argmax(tokens >= manifest.vocab_size))
            where = f"{tokens[wrong]} at position {at + wrong}"
            unknown = f"{shard.file} has the token {where}, and the vocabulary has {manifest.vocab_size}"
        at += len(tokens)
    if shard.sha256 and digest.hexdigest() != shard.sha256:
        return f"{shard.file} is damaged: its sha256 is {digest.hexdigest()[:12]}..., not {shard.sha256[:12]}..."
    return unknown or ("" if text else _count_problem(shard, first))


def _count_problem(shard: Shard, first: bytes) -> str:
    """Return a message if the header in a file's first chunk is invalid or gives another number of samples, otherwise ""."""
    try:
        header, _ = _header(io.BytesIO(first), shard.bytes)
    except ValueError as wrong:
        return f"{shard.file} is not a safetensors file: {wrong}"
    empty = {name: np.broadcast_to(np.empty((), kind), shape) for name, (kind, shape, *_) in header.items()}
    count = samples(empty)
    return f"{shard.file} has {count} samples, not {shard.samples}" if count != shard.samples else ""
