"""Parsing documents of an API server within bounds, since users choose the shape of their JSON.

A job may be nested 10,000 levels deep, or be as long as the API server allows. What is nested too deep is cut off before it is
parsed, what is too long is left out after it, and the document says so under `UNREADABLE`. Its name, uid and version are always
kept. `kube` calls it for everything that it receives. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from outlast.kube import dropins
from outlast.kube.kinds import ELASTIC_JOB, LEASE, POD, Kind

Document = dict[str, Any]

UNREADABLE = "unreadable"
"""Top-level key of a document with something left out: a sentence. The API server prunes unknown keys: no user can write it."""
DEEPEST = 100
"""Deepest nesting that is read. A PodSpec has 12 levels."""
LARGEST = 128 * 1024
"""Largest spec of a job that is read, in bytes of JSON."""
FREE = (ELASTIC_JOB, *dropins.KINDS)
"""Kinds with fields of any shape, which may be nested deeply. Typed kinds are as deep as their type."""
_BOUNDED: dict[Kind, int] = {**dict.fromkeys((*FREE, LEASE), LARGEST), POD: 4 * LARGEST}
"""Largest part of a document that is read, of the kinds that users create and the operator caches. A pod has its job's file."""
_KEPT = ("apiVersion", "kind", "metadata", "status")
"""Keys that only the API server and controllers write, or that the API server bounds: they are read whatever their length."""
_SHORT = 256
"""Longest scalar that is kept of an object that is left out, such as `managedBy`."""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_CUT = rb'"\u0000"'
"""What stands for a value that is nested too deep, as JSON: the API server accepts no such character."""


def document(text: bytes, kind: Kind | None = None) -> Document:
    """The document in an answer. Raises ValueError for anything but a JSON object."""
    found, text = _loaded(text, kind)
    return _bounded(found, text, kind)


def event(text: bytes, kind: Kind) -> tuple[str, Document]:
    """Type and object of a line of a watch. Raises ValueError."""
    found, text = _loaded(text, kind)
    if not isinstance(found.get("type"), str):
        raise ValueError(f"no event of a watch: {text[:80]!r}")
    return found["type"], _bounded(found.get("object"), text, kind)


def page(text: bytes, kind: Kind) -> tuple[Document, list[Document]]:
    """The metadata of a list, and its documents. Raises ValueError."""
    found, text = _loaded(text, kind)
    return found.get("metadata") or {}, [_bounded(each, text, kind) for each in found.get("items") or ()]


def _loaded(text: bytes, kind: Kind | None) -> tuple[Document, bytes]:
    """The object that a text is, and the text without what is nested too deep."""
    text = _shallow(text) if kind in FREE else text
    try:
        found = json.loads(text)
    except RecursionError:
        text = _shallow(text)
        found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"no document: {text[:40]!r}")
    return found, text


def _shallow(text: bytes) -> bytes:
    """The text with `_CUT` in place of what is nested too deep. It loops, since a parser recurses."""
    kept: list[bytes] = []
    depth = at = 0
    for token in _TOKEN.finditer(text):
        if token[0] in (b"{", b"["):
            depth += 1
            if depth == DEEPEST + 1:
                kept.append(text[at : token.start()])
        elif token[0] in (b"}", b"]"):
            if depth == DEEPEST + 1:
                kept.append(_CUT)
                at = token.end()
            depth -= 1
    return b"".join((*kept, text[at:])) if kept else text


def _bounded(found: Any, text: bytes, kind: Kind | None) -> Document:
    """As much of a document, which is this text or a part of it, as may be read."""
    if not isinstance(found, dict):
        raise ValueError(f"no document: {str(found)[:80]!r}")
    largest = _BOUNDED.get(kind, len(text)) if kind is not None else len(text)
    if len(text) <= largest and _CUT not in text:
        return found
    problems = []
    if isinstance(found.get("metadata"), dict):
        found["metadata"].pop("managedFields", None)  # they are as deep and as long as what they are about
    for key, value in found.items():
        part = json.dumps(value).encode()
        if _CUT in part:
            problems.append(f"its {key} is nested more than {DEEPEST} levels deep; make it flatter")
        elif len(part) > largest and key not in _KEPT:
            problems.append(f"its {key} takes {len(part) >> 10} KiB; at most {largest >> 10} KiB are read: make it smaller")
        else:
            continue
        short = (str, int, float, bool)
        inside = value.items() if isinstance(value, dict) else ()
        found[key] = {
            name: each for name, each in inside if isinstance(each, short) and len(str(each)) <= _SHORT and each != "\0"
        }
    return {**found, UNREADABLE: "; ".join(problems)} if problems else found
