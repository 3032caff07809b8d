"""Parsing of documents from an API server within limits, since users choose the shape of their JSON.

A job may be nested 10,000 levels deep, which Python's parser cannot read, or hold a million empty objects, which take 25 times
the memory of their text once they are parsed. The text is therefore measured first, without recursion: a value that is nested too
deep or is too long is left out, and the document has a message about that under `UNREADABLE`. The document's name, uid and
version are always kept. `kube` calls this module for everything that it receives. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from outlast.kubernetes.api import dropins
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEASE, POD, Kind

Document = dict[str, Any]

UNREADABLE = "unreadable"
"""Top-level key for a message in a document from which a value was left out. The API server prunes unknown keys, so no user can
write it."""
DEEPEST = 100
"""Maximum nesting depth that is read. A PodSpec has 12 levels."""
LARGEST = 128 * 1024
"""Maximum size in bytes of JSON of a job's spec that is read."""
_ANNOTATED = 3
"""Maximum size of metadata, as a multiple of the maximum size of the document: Kubernetes accepts 256 KiB of annotations."""
FREE = (ELASTIC_JOB, *dropins.KINDS)
"""Kinds with fields of any shape, which may be nested deeply. The nesting of other kinds is bounded by their type."""
_BOUNDED: dict[Kind, int] = {**dict.fromkeys((*FREE, LEASE), LARGEST), POD: 4 * LARGEST}
"""Maximum size in bytes of a document that is read, for kinds that users create and the operator caches. A pod contains its job's
file."""
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
"""Metadata that the API server writes or whose size it limits."""
_ALWAYS = ("apiVersion", "kind", "metadata", "status")
"""Keys that only the API server and controllers write; they are read whatever their length."""
_SHORT = 256
"""Maximum length of a scalar that is retained from an object that is left out."""
_SCALARS = 32

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PLAIN = rb"[^\"{}\[\]]*+(?:" + _STRING + rb"[^\"{}\[\]]*+)*+"


def _flat(inside: bytes) -> bytes:
    """The expression for text that matches `inside`, and for up to 1,000 objects and lists of such text.

    The group is atomic because possessive quantifiers over alternatives are broken before Python 3.11.5 (cpython#106052). The
    number of repetitions is limited because each takes memory.
    """
    return _PLAIN + rb"(?>(?:(?:\{" + inside + rb"\}|\[" + inside + rb"\])" + _PLAIN + rb"){0,1000})"


# One match skips three levels: a Python step for each of a million empty objects in a list would take seconds.
_STEP = re.compile(_flat(_flat(_flat(_PLAIN))) + rb"(?:(?P<open>[{\[]++)|(?P<close>[}\]]++))?", re.DOTALL)
_SCALAR = re.compile(_STRING + rb"|[^\s,\]}\"{\[]++", re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")


class _Span(NamedTuple):
    """The position of a value in the text."""

    begin: int
    end: int
    depth: int
    """Nesting depth, or up to three less than that; 0 for a scalar."""


def document(text: bytes, kind: Kind | None = None) -> Document:
    """The document in an answer. Raises ValueError unless the text is a JSON object."""
    if _quick(len(text), kind):
        try:
            found = json.loads(text)
        except RecursionError:
            pass
        else:
            if not isinstance(found, dict):
                raise ValueError(f"no document: {text[:40]!r}")
            return found
    span = _value(text, _skipped(text, 0))
    if text[span.end :].strip():
        raise ValueError(f"there is more after the document: {text[span.end : span.end + 40]!r}")
    return _document(text, span, kind)


def event(text: bytes, kind: Kind) -> tuple[str, Document]:
    """Type and object in a line of a watch. Raises ValueError."""
    found: dict[str, Any] = {}
    if _quick(len(text), kind):
        found = document(text)
    else:
        for key, span in _members(text, _skipped(text, 0)):
            found[key] = _document(text, span, kind) if key == "object" else _loaded(text, span)
    if not isinstance(found.get("type"), str) or not isinstance(found.get("object"), dict):
        raise ValueError(f"no event of a watch: {text[:80]!r}")
    return found["type"], found["object"]


def page(text: bytes, kind: Kind) -> tuple[Document, Iterator[Document]]:
    """The metadata of a list, and its documents, each parsed when the iterator reaches it. Raises ValueError, also during the
    iteration."""
    meta: Document = {}
    items: _Span | None = None
    for key, span in _members(text, _skipped(text, 0)):
        if key == "metadata":
            meta = _loaded(text, span)
        elif key == "items" and text[span.begin] == ord("["):
            items = span
    return meta, (_document(text, span, kind) for span in (_elements(text, items.begin) if items else ()))


def _quick(size: int, kind: Kind | None) -> bool:
    """Whether a text of this size can be parsed without measuring it."""
    return kind not in FREE and (kind is None or size <= _BOUNDED.get(kind, size))


def _document(text: bytes, span: _Span, kind: Kind | None) -> Document:
    if text[span.begin] != ord("{"):
        raise ValueError(f"no document: {text[span.begin : span.begin + 80]!r}")
    largest = _BOUNDED.get(kind) if kind is not None else None
    if span.depth <= DEEPEST and (largest is None or span.end - span.begin <= largest):
        found: Document = _loaded(text, span)
        return found
    return _outline(text, span, largest)


def _outline(text: bytes, whole: _Span, largest: int | None) -> Document:
    """The readable part of a document."""
    found: Document = {}
    problems: list[str] = []
    for key, span in _members(text, whole.begin):
        if key == "metadata":
            found[key] = _metadata(text, span, largest, problems)
        elif problem := _problem(key, span, None if key in _ALWAYS else largest):
            problems.append(problem)
            found[key] = _scalars(text, span)
        else:
            found[key] = _loaded(text, span)
    if problems:
        found[UNREADABLE] = "; ".join(problems)
    return found


def _metadata(text: bytes, whole: _Span, largest: int | None, problems: list[str]) -> Document:
    """Metadata without `managedFields`, which are as deep and long as the fields that they describe."""
    spans = {key: span for key, span in _members(text, whole.begin) if key != "managedFields"}
    size = sum(span.end - span.begin for span in spans.values())
    depth = 1 + max((span.depth for span in spans.values()), default=0)
    if problem := _problem("metadata", _Span(0, size, depth), largest and _ANNOTATED * largest):
        problems.append(problem)
        spans = {key: span for key, span in spans.items() if key in _IDENTITY}
    return {key: _loaded(text, span) for key, span in spans.items()}


def _problem(name: str, span: _Span, largest: int | None) -> str:
    """A sentence that says why a value is not read; empty if it is read."""
    if span.depth > DEEPEST:
        return f"its {name} is nested more than {DEEPEST} levels deep; make it flatter"
    if largest is not None and span.end - span.begin > largest:
        return f"its {name} takes {(span.end - span.begin) >> 10} KiB; at most {largest >> 10} KiB are read: make it smaller"
    return ""


def _scalars(text: bytes, whole: _Span) -> Document:
    """The short scalars of an object that is left out, such as `managedBy`."""
    found: Document = {}
    if text[whole.begin] != ord("{"):
        return found
    for key, span in _members(text, whole.begin):
        if span.depth == 0 and span.end - span.begin <= _SHORT and len(key) <= _SHORT and len(found) < _SCALARS:
            found[key] = _loaded(text, span)
    return found


# ---------------------------------------------------------------------------------------------------------------- the text


def _members(text: bytes, at: int) -> Iterator[tuple[str, _Span]]:
    """Keys and values of the object that begins at `at`."""
    at = _passed(text, at, b"{")
    if text[at : at + 1] == b"}":
        return
    while True:
        key = _value(text, at)
        span = _value(text, _passed(text, key.end, b":"))
        yield str(_loaded(text, key)), span
        at = _skipped(text, span.end)
        if text[at : at + 1] == b"}":
            return
        at = _passed(text, at, b",")


def _elements(text: bytes, at: int) -> Iterator[_Span]:
    """The values of the list that begins at `at`."""
    at = _passed(text, at, b"[")
    if text[at : at + 1] == b"]":
        return
    while True:
        span = _value(text, at)
        yield span
        at = _skipped(text, span.end)
        if text[at : at + 1] == b"]":
            return
        at = _passed(text, at, b",")


def _value(text: bytes, begin: int) -> _Span:
    """The value that begins at `begin`."""
    if text[begin : begin + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(text, begin)
        if scalar is None:
            raise _broken(text, begin)
        return _Span(begin, scalar.end(), 0)
    at, depth, deepest = begin + 1, 1, 1
    while depth > 0:
        step = _STEP.match(text, at)
        if step is None or step.end() == at:
            raise _broken(text, at)
        at = step.end()
        if step.lastgroup == "open":
            depth += at - step.start("open")
            deepest = max(deepest, depth)
        elif step.lastgroup == "close":
            depth -= at - step.start("close")
    return _Span(begin, at + depth, deepest)  # a further closing mark belongs to an outer value


def _loaded(text: bytes, span: _Span) -> Any:
    return json.loads(text[span.begin : span.end])


def _skipped(text: bytes, at: int) -> int:
    """Position of the next character that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None, "it matches nothing as well"
    return found.end()


def _passed(text: bytes, at: int, mark: bytes) -> int:
    """Position after an expected mark and the white space that follows it."""
    at = _skipped(text, at)
    if text[at : at + 1] != mark:
        raise _broken(text, at)
    return _skipped(text, at + 1)


def _broken(text: bytes, at: int) -> ValueError:
    return ValueError(f"no JSON at byte {at}: {text[at : at + 40]!r}")
