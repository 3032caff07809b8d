"""Parses records, the lines of .jsonl files. Errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from outlast.data.prepare.source_files import BadSource, Piece

SUFFIX = ".jsonl"


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


def parsed(line: bytes, file: BinaryIO, at: int) -> dict[str, Any]:
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


def text(value: Any, name: str, file: BinaryIO, at: int) -> str:
    """Return a text field's value. Raises BadSource if the value is not text, or contains half a surrogate pair."""
    if not isinstance(value, str):
        instead = "no" if value is None else f"{type(value).__name__} as"
        raise BadSource(f"{where(file, at)} has {instead} {name}; each record needs a text there")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadSource(f"{where(file, at)} has half a surrogate pair in {name}; correct it, or use --skip-damaged") from error
    return value
