"""Parses objects from an API server within limits, because users may write JSON of any shape. Pure.

A job may be nested 10,000 levels deep, which Python's parser cannot read, or contain a million empty objects, which take 25 times
as much memory once parsed. So the text is measured first, without recursion. Values that are too deep or too long are omitted and
reported under `UNREADABLE`; an object's name, uid and version are always preserved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from outlast.kubernetes.api import dropins
from outlast.kubernetes.api.kinds import LEASE, POD, Kind

Document = dict[str, Any]

UNREADABLE = "unreadable"
"""Top-level key for a message about omitted values. No user can write it, as the API server prunes unknown keys."""
MAX_DEPTH = 100
"""Maximum nesting depth; a PodSpec has 12 levels."""
MAX_BYTES = 128 * 1024
"""Maximum size of a job's spec as JSON."""
_METADATA_FACTOR = 3
"""Factor by which the size limit is larger for metadata: Kubernetes accepts 256 KiB of annotations."""
_MAX_BYTES: dict[Kind, int] = {**dict.fromkeys((*dropins.ELASTIC_JOBS, LEASE), MAX_BYTES), POD: 4 * MAX_BYTES}
"""Size limits for kinds that users create and the operator caches. The limit for pods is larger, as a pod contains its job's
file."""
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
"""Metadata fields that the API server writes or limits in size."""
_SERVER_KEYS = ("apiVersion", "kind", "metadata", "status")
"""Keys whose values only the API server and controllers write, so the length of these values is not limited."""
_MAX_SCALAR = 256
_MAX_SCALARS = 32

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PLAIN = rb"[^\"{}\[\]]*+(?:" + _STRING + rb"[^\"{}\[\]]*+)*+"


def _flat(inside: bytes) -> bytes:
    """Return a pattern for text with up to 1,000 objects and lists whose content matches `inside`.

    The group is atomic because possessive quantifiers over alternatives are broken before Python 3.11.5 (cpython#106052). The
    number of repetitions is limited because each takes memory.
    """
    return _PLAIN + rb"(?>(?:(?:\{" + inside + rb"\}|\[" + inside + rb"\])" + _PLAIN + rb"){0,1000})"


# One match skips three levels: a Python step for each of a million empty objects in a list would take seconds.
_STEP = re.compile(_flat(_flat(_flat(_PLAIN))) + rb"(?:(?P<open>[{\[]++)|(?P<close>[}\]]++))?", re.DOTALL)
_SCALAR = re.compile(_STRING + rb"|[^\s,\]}\"{\[]++", re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")


class _Span(NamedTuple):
    begin: int
    end: int
    depth: int
    """The nesting depth, which may be up to three too low; 0 for a scalar."""


def document(text: bytes, kind: Kind | None = None) -> Document:
    """Parse the text of a response. Raises ValueError if it is not a JSON object."""
    if _is_small(len(text), kind):
        try:
            parsed = json.loads(text)
        except RecursionError:
            pass
        else:
            if not isinstance(parsed, dict):
                raise ValueError(f"no document: {text[:40]!r}")
            return parsed
    span = _value(text, _skip_space(text, 0))
    if text[span.end :].strip():
        raise ValueError(f"there is more after the document: {text[span.end : span.end + 40]!r}")
    return _document(text, span, kind)


def event(text: bytes, kind: Kind) -> tuple[str, Document]:
    """Return the type and object of the event in a line from a watch. Raises ValueError."""
    parts: dict[str, Any] = {}
    if _is_small(len(text), kind):
        parts = document(text)
    else:
        for key, span in _members(text, _skip_space(text, 0)):
            parts[key] = _document(text, span, kind) if key == "object" else _parse(text, span)
    if not isinstance(parts.get("type"), str) or not isinstance(parts.get("object"), dict):
        raise ValueError(f"no event of a watch: {text[:80]!r}")
    return parts["type"], parts["object"]


def page(text: bytes, kind: Kind) -> tuple[Document, Iterator[Document]]:
    """Return a list's metadata and an iterator that parses the list's objects one by one. Raises ValueError, also during
    iteration."""
    meta: Document = {}
    items: _Span | None = None
    for key, span in _members(text, _skip_space(text, 0)):
        if key == "metadata":
            meta = _parse(text, span)
        elif key == "items" and text[span.begin] == ord("["):
            items = span
    return meta, (_document(text, span, kind) for span in (_elements(text, items.begin) if items else ()))


def _is_small(size: int, kind: Kind | None) -> bool:
    return kind not in dropins.ELASTIC_JOBS and (kind is None or size <= _MAX_BYTES.get(kind, size))


def _document(text: bytes, span: _Span, kind: Kind | None) -> Document:
    if text[span.begin] != ord("{"):
        raise ValueError(f"no document: {text[span.begin : span.begin + 80]!r}")
    max_bytes = _MAX_BYTES.get(kind) if kind is not None else None
    if span.depth <= MAX_DEPTH and (max_bytes is None or span.end - span.begin <= max_bytes):
        parsed: Document = _parse(text, span)
        return parsed
    return _outline(text, span, max_bytes)


def _outline(text: bytes, outer: _Span, max_bytes: int | None) -> Document:
    outline: Document = {}
    problems: list[str] = []
    for key, span in _members(text, outer.begin):
        if key == "metadata":
            outline[key] = _metadata(text, span, max_bytes, problems)
        elif problem := _problem(key, span, None if key in _SERVER_KEYS else max_bytes):
            problems.append(problem)
            outline[key] = _scalars(text, span)
        else:
            outline[key] = _parse(text, span)
    if problems:
        outline[UNREADABLE] = "; ".join(problems)
    return outline


def _metadata(text: bytes, outer: _Span, max_bytes: int | None, problems: list[str]) -> Document:
    """Return metadata without `managedFields`, which are as deep and long as the fields that they describe."""
    spans = {key: span for key, span in _members(text, outer.begin) if key != "managedFields"}
    size = sum(span.end - span.begin for span in spans.values())
    depth = 1 + max((span.depth for span in spans.values()), default=0)
    if problem := _problem("metadata", _Span(0, size, depth), max_bytes and _METADATA_FACTOR * max_bytes):
        problems.append(problem)
        spans = {key: span for key, span in spans.items() if key in _IDENTITY}
    return {key: _parse(text, span) for key, span in spans.items()}


def _problem(name: str, span: _Span, max_bytes: int | None) -> str:
    if span.depth > MAX_DEPTH:
        return f"its {name} is nested more than {MAX_DEPTH} levels deep; make it flatter"
    if max_bytes is not None and span.end - span.begin > max_bytes:
        return f"its {name} takes {(span.end - span.begin) >> 10} KiB; at most {max_bytes >> 10} KiB are read: make it smaller"
    return ""


def _scalars(text: bytes, outer: _Span) -> Document:
    """Return the short scalars of an object that is otherwise omitted, such as `managedBy`."""
    scalars: Document = {}
    if text[outer.begin] != ord("{"):
        return scalars
    for key, span in _members(text, outer.begin):
        if span.depth == 0 and span.end - span.begin <= _MAX_SCALAR and len(key) <= _MAX_SCALAR and len(scalars) < _MAX_SCALARS:
            scalars[key] = _parse(text, span)
    return scalars


# ---------------------------------------------------------------------------------------------------------------- the text


def _members(text: bytes, at: int) -> Iterator[tuple[str, _Span]]:
    at = _skip_mark(text, at, b"{")
    if text[at : at + 1] == b"}":
        return
    while True:
        key = _value(text, at)
        span = _value(text, _skip_mark(text, key.end, b":"))
        yield str(_parse(text, key)), span
        at = _skip_space(text, span.end)
        if text[at : at + 1] == b"}":
            return
        at = _skip_mark(text, at, b",")


def _elements(text: bytes, at: int) -> Iterator[_Span]:
    at = _skip_mark(text, at, b"[")
    if text[at : at + 1] == b"]":
        return
    while True:
        span = _value(text, at)
        yield span
        at = _skip_space(text, span.end)
        if text[at : at + 1] == b"]":
            return
        at = _skip_mark(text, at, b",")


def _value(text: bytes, begin: int) -> _Span:
    if text[begin : begin + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(text, begin)
        if scalar is None:
            raise _syntax_error(text, begin)
        return _Span(begin, scalar.end(), 0)
    at, depth, max_depth = begin + 1, 1, 1
    while depth > 0:
        step = _STEP.match(text, at)
        if step is None or step.end() == at:
            raise _syntax_error(text, at)
        at = step.end()
        if step.lastgroup == "open":
            depth += at - step.start("open")
            max_depth = max(max_depth, depth)
        elif step.lastgroup == "close":
            depth -= at - step.start("close")
    return _Span(begin, at + depth, max_depth)  # surplus closing brackets belong to an outer value


def _parse(text: bytes, span: _Span) -> Any:
    return json.loads(text[span.begin : span.end])


def _skip_space(text: bytes, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None, "the pattern also matches an empty text"
    return space.end()


def _skip_mark(text: bytes, at: int, mark: bytes) -> int:
    at = _skip_space(text, at)
    if text[at : at + 1] != mark:
        raise _syntax_error(text, at)
    return _skip_space(text, at + 1)


def _syntax_error(text: bytes, at: int) -> ValueError:
    return ValueError(f"no JSON at byte {at}: {text[at : at + 40]!r}")
