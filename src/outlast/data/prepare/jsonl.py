"""Turns records into tokens for fine-tuning: `input_ids` and `labels`, both int32 and ragged. The loss ignores labels of -100.

A record is a line of a .jsonl file: `{"prompt": ..., "completion": ...}`, `{"text": ...}` or `{"messages": [{"role": ...,
"content": ...}, ...]}`. The loss covers completions, texts and the assistant's messages, each with the separator after it. A role
is encoded as a special token such as `<|assistant|>` if the tokenizer has it, and otherwise as text. Special tokens in a record's
text are encoded as text. For Hugging Face tokenizers see `chat`. Memory: about four shards per process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import chat, column_shards, source_files, text, tokenizer, work_units
from outlast.data.prepare.source_files import TRAIN, VAL, BadSource, Document, Unit

SHARD = 8 << 20
"""Size in bytes of the records in a shard. Arbitrary; tokens and labels take twice as many bytes."""
ROLES = ("system", "user", "assistant")
Segments = list[tuple[str, str, bool]]
"""Role (empty in records without roles), text, and whether the loss covers the text."""
_Record = tuple[dict[str, Any], Segments]
T = TypeVar("T")
NAMED = 3
"""Maximum number of damaged records that the manifest lists."""


@dataclass(frozen=True)
class Settings:
    """Settings for `outlast data prepare jsonl`."""

    tokenizer: str = "bpe"
    """`bpe`, `gpt2-like`, or the path of a tokenizer.json or of a directory with a Hugging Face tokenizer."""
    vocab_size: int | None = None
    val: float = 0.1
    separator: str | None = None
    max_length: int | None = None
    """Maximum number of tokens in a sample; longer samples are truncated. None means no limit."""
    patterns: tuple[str, ...] = ("*.jsonl",)
    shard_size: int = SHARD
    skip_damaged: bool = False

    @property
    def of_text(self) -> text.Settings:
        """The settings that concern the tokenizer, in the form that `text` expects."""
        return text.Settings(self.tokenizer, self.vocab_size, self.val, self.separator)

    @property
    def described(self) -> dict[str, Any]:
        """The settings to record in the manifest, equal on all machines. Raises OutlastError for invalid settings."""
        about = dataclasses.asdict(self) | {"patterns": list(self.patterns)}
        if not Path(self.tokenizer).is_dir():
            return about | {key: text.described(self.of_text)[key] for key in ("tokenizer", "vocab_size")}
        if self.separator is not None or self.vocab_size is not None:
            raise OutlastError(f"--separator and --vocab-size are not for {self.tokenizer}, which has its own; leave them out")
        return about | {"tokenizer": f"{Path(self.tokenizer).resolve().name} sha256 {chat.digest(Path(self.tokenizer))}"}


@dataclass(frozen=True)
class Coder:
    """Settings for the processes that make samples."""

    path: Path
    digest: str
    separator: int | None
    max_length: int | None


def prepare(request: work_units.Request, settings: Settings) -> shard_format.Manifest:
    """Make or finish the dataset, and return its manifest. Raises BadSource, and OutlastError for invalid settings."""
    if settings.tokenizer == "char" or (settings.max_length is not None and settings.max_length < 1):
        raise OutlastError(
            "records need --tokenizer bpe, gpt2-like or a tokenizer.json, and --max-length 1 or more; correct them"
        )
    sources = source_files.listed(request.source, request.to, settings.patterns)
    about = settings.described
    source = source_files.described(sources)
    if made := work_units.existing(request, "jsonl", about, source):
        return made
    named = source_files.named(sources)
    part = source_files.parts(sources, 0) if named else {}
    documents = [Document(file.name, file.size, 0, file.size, part.get(file.name, "")) for file in sources]
    reader = text.Reader(source_files.root(request.source), "", settings.val, settings.skip_damaged)
    with work_units.opened(work_units.fitting(request, 4 * settings.shard_size), about, sources) as place:
        units = source_files.units(documents, settings.shard_size)
        coder, size = _coder(place, settings, reader, units)
        notes = place.results("shard", functools.partial(_write, reader=reader, coder=coder, to=place.private), units)
        source |= {key: sum(note[key] for note in notes) for key in ("damaged", "cut")}
        if source["damaged"]:
            source["left_out"] = [each for note in notes for each in note["left_out"]][:NAMED]
        parts = column_shards.parts(notes, (TRAIN, VAL) if named or settings.val else (TRAIN,))
        file = "" if coder.path.is_dir() else shard_format.TOKENIZER
        return place.finish(shard_format.Manifest("jsonl", parts, about, source, "", size, file, str(request.to)))


def _coder(place: work_units.Place, settings: Settings, reader: text.Reader, units: Sequence[Unit]) -> tuple[Coder, int]:
    if (given := Path(settings.tokenizer)).is_dir():
        digest = chat.digest(given)
        return Coder(given.resolve(), digest, None, settings.max_length), len(chat.load(given.resolve(), digest))
    path = place.private / shard_format.TOKENIZER
    if not path.exists():
        sample = units[:: -(-sum(unit.bytes for unit in units) // text.SAMPLE) or 1]
        text.make_tokenizer(place, path, settings.of_text, functools.partial(_train, reader=reader, units=sample))
    loaded = tokenizer.load(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    coder = Coder(path, digest, tokenizer.separator(loaded, settings.separator), settings.max_length)
    return coder, tokenizer.vocab_size(loaded)


def segments(record: dict[str, Any], file: BinaryIO, at: int) -> Segments:
    """Return a record's segments. Raises BadSource if the record has none of the supported forms."""
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise BadSource(f"{source_files.where(file, at)} has messages that are no list of objects with role and content")
        made = []
        for each in messages:
            role, content = (
                source_files.text_of(each.get(name), f"{name} in a message", file, at) for name in ("role", "content")
            )
            made.append((role, content, role == "assistant"))
        return made
    if "prompt" in record or "completion" in record:
        prompt, completion = (source_files.text_of(record.get(name), name, file, at) for name in ("prompt", "completion"))
        return [("", prompt, False), ("", completion, True)]
    if "text" in record:
        return [("", source_files.text_of(record["text"], "text", file, at), True)]
    fields = ", ".join(list(record)[:5]) or "nothing"
    raise BadSource(f"{source_files.where(file, at)} has none of prompt and completion, messages, text; it has {fields}")


def _encoded(unit: Unit, reader: text.Reader, damaged: list[str], encode: Callable[[_Record], T]) -> Iterator[tuple[str, T]]:
    """Yield the part and the result of `encode` for each record in a unit.

    Raises BadSource for a bad record. With `skip_damaged`, adds a message to `damaged` instead.
    """
    for piece in unit.pieces:
        with text.opened(reader, piece.document) as file:
            for at, line in source_files.lines(file, piece):
                try:
                    record = source_files.record(line, file, at)
                    try:
                        made = encode((record, segments(record, file, at)))
                    except chat.Refused as refusal:
                        raise BadSource(f"{source_files.where(file, at)} {refusal}") from refusal
                except BadSource as error:
                    if not reader.skip_damaged:
                        raise
                    damaged.append(str(error))
                    file.seek(at + len(line))
                    continue
                yield piece.document.part or (VAL if source_files.hash_fraction(line.strip()) < reader.val else TRAIN), made


def _train(path: Path, size: int, *, reader: text.Reader, units: Sequence[Unit]) -> None:
    all_segments = (
        some for unit in units for part, some in _encoded(unit, reader, [], lambda record: record[1]) if part == TRAIN
    )
    texts = (each for some in all_segments for _, each, _ in some)
    roles = [f"<|{role}|>" for role in ROLES]
    tokenizer.save(path, tokenizer.train((piece for each in texts for piece in tokenizer.pieces(each)), size, roles))


def _write(unit: Unit, *, reader: text.Reader, coder: Coder, to: Path) -> work_units.Note:
    rows: dict[str, list[chat.Sample]] = {TRAIN: [], VAL: []}
    damaged: list[str] = []
    cut = 0
    for part, (ids, labels) in _encoded(unit, reader, damaged, _encoder(coder)):
        cut += coder.max_length is not None and len(ids) > coder.max_length
        rows[part].append((ids[: coder.max_length], labels[: coder.max_length]))
    note: work_units.Note = {"damaged": len(damaged), "left_out": damaged[:NAMED], "cut": cut}
    for part, some in rows.items():
        columns = {}
        for at, name in enumerate(("input_ids", "labels")):
            columns[name], columns[f"{name}{shard_format.OFFSETS}"] = shard_format.ragged([row[at] for row in some], "int32")
        note[part] = column_shards.write(to, part, unit.number, columns)
    return note


def _encoder(coder: Coder) -> Callable[[_Record], chat.Sample]:
    if coder.path.is_dir():
        from_hub = chat.load(coder.path, coder.digest)
        return lambda record: chat.sample(*record, from_hub)
    loaded = tokenizer.load(coder.path)
    return lambda record: sample(record[1], coder, loaded)


def sample(segments: Segments, coder: Coder, loaded: Any) -> chat.Sample:
    """Return the tokens and labels (int32) for a record's segments. `loaded` is the library's tokenizer."""
    encoder = tokenizer.encoder(coder.path, coder.digest)
    dtype = shard_format.dtype(tokenizer.vocab_size(loaded))
    ids: list[NDArray[np.int32]] = []
    learned: list[NDArray[np.bool_]] = []

    def add(tokens: Sequence[int] | NDArray[Any], learn: bool) -> None:
        ids.append(np.asarray(tokens, np.int32))
        learned.append(np.full(len(tokens), learn))

    def encoded(some: str) -> NDArray[Any]:
        return np.frombuffer(encoder(some), np.dtype(dtype).newbyteorder("<"))

    for role, some, learn in segments:
        if role:
            token = loaded.token_to_id(f"<|{role}|>")
            add([token] if token is not None else encoded(f"<|{role}|>"), False)
            add(encoded("\n"), False)
        add(encoded(some), learn)
        if coder.separator is not None and learn:
            add([coder.separator], True)
        elif role:
            add(encoded("\n"), False)
    tokens, mask = np.concatenate(ids), np.concatenate(learned)
    return tokens, np.where(mask, tokens, chat.NOT_LEARNED).astype(np.int32)
