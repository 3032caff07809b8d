"""Records to tokens for fine-tuning: `input_ids` and `labels`, both int32 and ragged; a label of -100 takes no part in the loss.

A line of a .jsonl file is a record: `{"prompt": ..., "completion": ...}`, `{"text": ...}` or `{"messages": [{"role": ...,
"content": ...}, ...]}`. Learned are completions, texts, and what the assistant says, each with the separator after it. In
messages a role is a token, `<|assistant|>`, if the tokenizer has it (one trained here does), else that text; a newline follows.
What looks like such a role in the text of a record stays text. Memory: a shard per process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outlast.data import shards
from outlast.data.prepare import plan, records, tables, text, tokenizer, work
from outlast.data.prepare.plan import TRAIN, VAL, BadSource, Document, Unit
from outlast.errors import OutlastError

SHARD = 8 << 20
"""Bytes of records that make a shard. Arbitrary, as `tables.SHARD`; tokens and labels have twice as many."""
ROLES = ("system", "user", "assistant")
NOT_LEARNED = -100
"""What torch's cross entropy ignores by default."""


@dataclass(frozen=True)
class Settings:
    """What to make of records."""

    tokenizer: str = "bpe"
    """`bpe`, `gpt2-like`, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    val: float = 0.1
    separator: str | None = None
    max_length: int | None = None
    """Longer samples lose their end; None keeps all."""
    patterns: tuple[str, ...] = ("*.jsonl",)
    shard_size: int = SHARD
    skip_damaged: bool = False

    @property
    def of_text(self) -> text.Settings:
        """The settings of a text with that tokenizer."""
        return text.Settings(self.tokenizer, self.vocab_size, self.val, self.separator)


@dataclass(frozen=True)
class Coder:
    """How processes make samples."""

    path: Path
    digest: str
    separator: int | None
    max_length: int | None


def prepare(request: work.Request, settings: Settings) -> shards.Manifest:
    """Make the dataset, or finish it; the manifest. Raises BadSource, and OutlastError for settings that cannot be met."""
    if settings.tokenizer == "char" or (settings.max_length is not None and settings.max_length < 1):
        raise OutlastError(
            "records need --tokenizer bpe, gpt2-like or a tokenizer.json, and --max-length 1 or more; correct them"
        )
    found = plan.listed(request.source, request.to, settings.patterns)
    about = dataclasses.asdict(settings) | {"patterns": list(settings.patterns)}
    about |= {key: text.described(settings.of_text)[key] for key in ("tokenizer", "vocab_size")}
    source = plan.described(found)
    if there := work.before(request, "jsonl", about, source):
        return there
    named = plan.named(found)
    part = plan.parts(found, 0) if named else {}
    documents = [Document(file.name, file.size, 0, file.size, part.get(file.name, "")) for file in found]
    reader = text.Reader(plan.root(request.source), "", settings.val, settings.skip_damaged)
    with work.opened(request, about, found) as place:
        units = plan.units(documents, settings.shard_size)
        path = request.to / shards.TOKENIZER
        if not path.exists():
            sample = units[:: -(-sum(unit.bytes for unit in units) // text.SAMPLE) or 1]
            text.make_tokenizer(place, path, settings.of_text, functools.partial(_train, reader=reader, units=sample))
        known = tokenizer.load(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        coder = Coder(path, digest, tokenizer.separator(known, settings.separator), settings.max_length)
        notes = place.results("shard", functools.partial(_write, reader=reader, coder=coder, to=request.to), units)
        source |= {key: sum(note[key] for note in notes) for key in ("damaged", "cut")}
        parts = tables.parts(notes, (TRAIN, VAL) if named or settings.val else (TRAIN,))
        size = tokenizer.vocab_size(known)
        return place.finish(
            shards.Manifest("jsonl", parts, about, source, vocab_size=size, tokenizer=shards.TOKENIZER, place=str(request.to))
        )


def segments(record: dict[str, Any], file: BinaryIO, at: int) -> list[tuple[str, str, bool]]:
    """Role (empty if none), text and whether it is learned, for each part of a record. Raises BadSource for other forms."""
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise BadSource(f"{records.where(file, at)} has messages that are no list of objects with role and content")
        made = []
        for each in messages:
            role, content = (records.text(each.get(name), f"{name} in a message", file, at) for name in ("role", "content"))
            made.append((role, content, role == "assistant"))
        return made
    if "prompt" in record or "completion" in record:
        prompt, completion = (records.text(record.get(name), name, file, at) for name in ("prompt", "completion"))
        return [("", prompt, False), ("", completion, True)]
    if "text" in record:
        return [("", records.text(record["text"], "text", file, at), True)]
    raise BadSource(f"{records.where(file, at)} has none of prompt and completion, messages, text; it has {_keys(record)}")


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(list(record)[:5]) or "nothing"


def _found(unit: Unit, reader: text.Reader, damaged: list[str]) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """Part and segments of each record of a unit."""
    for piece in unit.pieces:
        with text.opened(reader, piece.document) as file:
            for at, line in records.lines(file, piece):
                try:
                    found = segments(records.parsed(line, file, at), file, at)
                except BadSource as error:
                    if not reader.skip_damaged:
                        raise
                    damaged.append(str(error))
                    file.seek(at + len(line))
                    continue
                yield piece.document.part or (VAL if plan.drawn(line.strip()) < reader.val else TRAIN), found


def _train(path: Path, size: int, *, reader: text.Reader, units: Sequence[Unit]) -> None:
    texts = (each for unit in units for part, found in _found(unit, reader, []) if part == TRAIN for _, each, _ in found)
    roles = [f"<|{role}|>" for role in ROLES]
    tokenizer.save(path, tokenizer.train((piece for each in texts for piece in tokenizer.pieces(each)), size, roles))


def _write(unit: Unit, *, reader: text.Reader, coder: Coder, to: Path) -> work.Note:
    """Write the shards of a unit, one per part that it has samples of."""
    known = tokenizer.load(coder.path)
    rows: dict[str, list[tuple[NDArray[np.int32], NDArray[np.int32]]]] = {TRAIN: [], VAL: []}
    damaged: list[str] = []
    cut = 0
    for part, found in _found(unit, reader, damaged):
        ids, labels = sample(found, coder, known)
        cut += coder.max_length is not None and len(ids) > coder.max_length
        rows[part].append((ids[: coder.max_length], labels[: coder.max_length]))
    note: work.Note = {"damaged": len(damaged), "cut": cut}
    for part, some in rows.items():
        columns = {}
        for at, name in enumerate(("input_ids", "labels")):
            columns[name], columns[f"{name}{shards.OFFSETS}"] = shards.ragged([row[at] for row in some], "int32")
        note[part] = tables.write(to, part, unit.number, columns)
    return note


def sample(found: Sequence[tuple[str, str, bool]], coder: Coder, known: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens and labels of a record."""
    encoder = tokenizer.encoder(coder.path, coder.digest)
    dtype = shards.dtype(tokenizer.vocab_size(known))
    ids: list[NDArray[np.int32]] = []
    learned: list[NDArray[np.bool_]] = []

    def add(tokens: Sequence[int] | NDArray[Any], learn: bool) -> None:
        ids.append(np.asarray(tokens, np.int32))
        learned.append(np.full(len(tokens), learn))

    def encoded(some: str) -> NDArray[Any]:
        return np.frombuffer(encoder(some), np.dtype(dtype).newbyteorder("<"))

    for role, some, learn in found:
        if role:
            token = known.token_to_id(f"<|{role}|>")
            add([token] if token is not None else encoded(f"<|{role}|>"), False)
            add(encoded("\n"), False)
        add(encoded(some), learn)
        if coder.separator is not None and learn:
            add([coder.separator], True)
        elif role:
            add(encoded("\n"), False)
    tokens, mask = np.concatenate(ids), np.concatenate(learned)
    return tokens, np.where(mask, tokens, NOT_LEARNED).astype(np.int32)
