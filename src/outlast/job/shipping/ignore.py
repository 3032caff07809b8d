"""The rules of `.gitignore` files (https://git-scm.com/docs/gitignore). Pure; called by `code_files`.

Later rules and deeper files take precedence, and nothing below an excluded directory can be included again. As in git, a rule is
matched against one entry at a time, never against the entries below it, so the rules `*`, `!*/` and `!*.py` together work as
people expect. Character classes may hold characters and ranges, not POSIX names such as `[[:alpha:]]`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_TOKEN = re.compile(r"\*+|\?|\[([!^]?)(\]?[^\]]*)\]|\\?(.)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule in an ignore file."""

    pattern: re.Pattern[str]
    path: bool
    """True if the rule is matched against the path below the ignore file's directory instead of the name alone."""
    directories: bool
    """True if the rule applies to directories only."""
    back: bool
    """True if the rule includes matching entries again (`!`)."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The rules from one directory's ignore files."""

    directory: str
    """Path of the directory, without a trailing slash."""
    rules: tuple[Rule, ...]


def left_out(path: str, directory: bool, layers: Sequence[Layer]) -> bool:
    """Return whether an entry is ignored. `layers` are the rules from its parent directories, outermost first."""
    name = path.rpartition("/")[2]
    for layer in reversed(layers):
        below = path[len(layer.directory) + 1 :]
        for rule in reversed(layer.rules):
            if (directory or not rule.directories) and rule.pattern.fullmatch(below if rule.path else name):
                return not rule.back
    return False


def rules(text: str) -> tuple[Rule, ...]:
    """Parse the text of an ignore file."""
    return tuple(rule for line in text.removeprefix("\ufeff").splitlines() if (rule := _rule(line)))


def _rule(line: str) -> Rule | None:
    text = re.sub(r"(?<!\\) +$", "", line)
    back = text.startswith("!")
    text = text[back:]
    directories = text.endswith("/")
    text = text.removesuffix("/")
    path = "/" in text
    parts = text.removeprefix("/").split("/")
    if line.startswith("#") or parts == [""]:
        return None
    regex = "".join(_expression(part, last=index == len(parts)) for index, part in enumerate(parts, 1))
    try:
        return Rule(re.compile(regex, re.DOTALL), path, directories, back)
    except re.error:  # as in git, an invalid pattern matches nothing
        return None


def _expression(part: str, *, last: bool) -> str:
    """Translate the part of a pattern between two slashes into a regular expression."""
    if part == "**":
        return ".*" if last else "(?:.*/)?"
    return _TOKEN.sub(_token, part) + ("" if last else "/")


def _token(match: re.Match[str]) -> str:
    negated, letters, letter = match.groups()
    if letter:
        return re.escape(letter)
    if letters:
        escaped = re.sub(r"([\[\]\\&~|^])", r"\\\1", letters)
        return f"(?!/)[{'^' if negated else ''}{escaped}]"
    return "[^/]" if match[0] == "?" else "[^/]*"
