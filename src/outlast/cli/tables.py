"""The command line's output: tables, JSON and YAML. Text is aligned without a library, so that `outlast list` is instant."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from outlast.base.errors import NotFound
from outlast.cli import terminal


class Output(enum.StrEnum):
    """Formats for `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class ListOutput(enum.StrEnum):
    """Formats for `-o` when jobs are listed."""

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Output format.")]


ListOutputOption = Annotated[
    ListOutput, typer.Option("-o", "--output", help="Output format; wide: more columns, name: only the names.")
]


def data(value: Any, output: Output | ListOutput, *, changed: bool = False) -> None:
    """Print plain data as JSON or YAML. With `changed`, it is one of many documents: a line of JSON, or YAML after `---`."""
    if output == "json":
        print(json.dumps(value, indent=None if changed else 2), flush=changed)
    else:
        import yaml

        text = yaml.safe_dump(value, sort_keys=False, explicit_start=changed)  # other characters than ASCII as `\u202E`
        print(text, end="", flush=changed)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table with columns as wide as needed, and `-` for None."""
    lines = [list(headings), *(["-" if cell is None else terminal.one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def fields(pairs: Mapping[str, object]) -> str:
    """Format names and values, one pair per line, without values that are None or empty."""
    width = max(map(len, pairs), default=0)
    given = ((name, value) for name, value in pairs.items() if value not in (None, ""))
    return "\n".join(f"{name.ljust(width)}  {terminal.one_line(str(value))}" for name, value in given)


def moment(when: float) -> str:
    """Format a time as a local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def one_of(what: str, given: str | None, choices: Sequence[str], *, none: str) -> str:
    """Return `given` if it is in `choices`, or the only choice if `given` is None. Raises NotFound with the closest match."""
    if given is not None and given in choices:
        return given
    if not choices:
        raise NotFound(none)
    names = ", ".join(choices)
    if given is None:
        if len(choices) == 1:
            return choices[0]
        raise NotFound(f"which {what}? there are {names}")
    import difflib

    near = difflib.get_close_matches(given, choices, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise NotFound(f"no {what} {given}; {hint}there {'is' if len(choices) == 1 else 'are'} {names}")
