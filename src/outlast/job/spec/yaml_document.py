"""A YAML document as plain data, with the line of each value, so that mistakes can be reported with their lines.

The reader is stricter than `yaml.safe_load` where that function hides a mistake (two equal keys, two documents in a file). It is
more lenient where YAML is a trap: keys are always text, and scalars in `verbatim` places are kept as written (`3e-3`, not
`0.003`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from outlast.base.errors import InvalidJob

_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_JOB = "a job file starts with `apiVersion: outlast.dev/v1alpha1`"
_REPEATS = 10_000
"""Maximum number of values that a document's aliases may repeat. Aliases of aliases multiply: nine lines can expand to 10^9
values."""

Place = tuple[str | int, ...]
"""A value's path: keys and list indices from the top, such as `("spec", "args", 0)`."""


@dataclass(frozen=True)
class Document:
    """One YAML document."""

    data: Any
    lines: dict[Place, int]
    """The line of each value (or, in a mapping, of its key), counting from 1."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    """The line and description of each mistake, such as a repeated key, that leaves the document readable."""

    def line(self, place: Place) -> int | None:
        """Return a value's line or, if the value is not in the document, the line of the nearest enclosing value."""
        for end in range(len(place), -1, -1):
            if place[:end] in self.lines:
                return self.lines[place[:end]]
        return None


def read(text: str, *, source: str, verbatim: Callable[[Place], bool] = lambda _: False, start: str = _JOB) -> Document:
    """Parse the only document in `text`. Raises InvalidJob if the text has no document or several, or is not YAML. `start` says
    how such a file begins."""

    def wrong(line: int | None, sentence: str) -> InvalidJob:
        return InvalidJob([(line, sentence)], source=source)

    try:
        nodes = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node.tag != _NULL]
        if len(nodes) > 1:
            raise wrong(nodes[1].start_mark.line + 1, "a second document starts here; write one per file")
        if not nodes:
            raise wrong(None, f"the file is empty; {start}")
        document = Document(data=None, lines={})
        data = _Walk(yaml.SafeLoader(""), document, verbatim, source).value(nodes[0], ())
        return Document(data, document.lines, document.problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.problem, error.context)))
        if "'\\t'" in what:
            what = "a tab cannot indent; use spaces"
        place = f" (column {mark.column + 1})" if mark else ""
        raise wrong(mark.line + 1 if mark else None, f"this is not YAML: {what}{place}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise wrong(None, f"this is not YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise wrong(None, "the document is nested too deeply, or an alias in it refers to itself") from error


@dataclass
class _Walk:
    loader: yaml.SafeLoader
    document: Document
    verbatim: Callable[[Place], bool]
    source: str
    seen: set[int] = field(default_factory=set)
    """Ids of visited nodes. A node that is visited again is an alias, or below an alias."""
    repeats: int = 0

    def value(self, node: yaml.Node, place: Place) -> Any:
        if id(node) in self.seen:
            self.repeats += 1
            if self.repeats > _REPEATS:
                sentence = f"aliases repeat more than {_REPEATS:,} values; write fewer, or what they stand for"
                raise InvalidJob([(node.start_mark.line + 1, sentence)], source=self.source)
        self.seen.add(id(node))
        self.document.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
        if self.verbatim(place):
            return "" if node.tag == _NULL else node.value
        try:
            return self.loader.construct_object(node, deep=True)
        except ValueError:  # `2024-13-45` looks like a date but is not one
            return node.value

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in sorted(node.value, key=lambda item: item[0].tag != _MERGE):
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.document.problems.append((line, "a key must be text, not a list or a mapping"))
            elif key.tag == _MERGE:
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    found = self.value(part, place)
                    merged = {**(found if isinstance(found, dict) else {}), **merged}
            elif key.value in own:
                first = self.document.lines[(*place, key.value)]
                self.document.problems.append((line, f"{key.value} is given twice, first on line {first}; keep one"))
            else:
                self.document.lines[(*place, key.value)] = line
                own[key.value] = self.value(value, (*place, key.value))
        return {**merged, **own}
