"""The rules of `.gitignore` files (https://git-scm.com/docs/gitignore). Pure; called by `code_files`.

Later rules and deeper files take precedence, and nothing below an excluded directory can be included again. As in git, a rule is
matched against one entry at a time, never against the entries below it, so the rules `*`, `!*/` and `!*.py` together work as
people expect.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Sequence

_POSIX = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "blank": " \t",
    "cntrl": "".join(map(chr, (*range(32), 127))),
    "digit": string.digits,
    "graph": string.ascii_letters + string.digits + string.punctuation,
    "lower": string.ascii_lowercase,
    "print": string.ascii_letters + string.digits + string.punctuation + " ",
    "punct": string.punctuation,
    "space": string.whitespace,
    "upper": string.ascii_uppercase,
    "xdigit": string.hexdigits,
}
_NEVER = "(?!)"


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
    lines = text.removeprefix("\ufeff").split("\n")
    return tuple(rule for line in lines if (rule := _rule(line.removesuffix("\r"))))


def _rule(line: str) -> Rule | None:
    if not line or line.startswith("#"):
        return None
    text = _without_trailing_spaces(line)
    back = text.startswith("!")
    text = text[back:]
    directories = text.endswith("/")
    text = text[: len(text) - directories]
    path = "/" in text
    text = text.removeprefix("/")
    return Rule(re.compile(_expression(text, path=path), re.DOTALL), path, directories, back) if text else None


def _without_trailing_spaces(line: str) -> str:
    end = at = 0
    while at < len(line):
        space = line[at] == " "
        at += 2 if line[at] == "\\" else 1
        end = end if space else at
    return line[:end]


def _expression(text: str, *, path: bool) -> str:
    """Translate a git wildmatch pattern into a regular expression. As in git, an invalid pattern matches nothing."""
    regex, at = "", 0
    while at < len(text):
        letter = text[at]
        if letter == "*":
            end = at
            while text[end : end + 1] == "*":
                end += 1
            alone = path and end - at > 1 and text[at - 1 : at] in ("", "/") and text[end : end + 1] in ("", "/")
            if alone and end < len(text):
                regex, at = f"{regex}(?:.*/)?", end + 1
            else:
                regex, at = regex + (".*" if alone else "[^/]*"), end
        elif letter == "?":
            regex, at = f"{regex}[^/]", at + 1
        elif letter == "[":
            part, at = _class(text, at)
            regex += part
        elif letter == "\\":
            if at + 1 == len(text):
                return _NEVER
            regex, at = regex + re.escape(text[at + 1]), at + 2
        else:
            regex, at = regex + re.escape(letter), at + 1
    return regex


def _class(text: str, at: int) -> tuple[str, int]:
    """Translate the character class `[...]` at index `at`, and return the translation and the index after the class."""
    at += 1
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    letters, begin = "", at
    while True:
        if at >= len(text):
            return _NEVER, at
        letter = text[at]
        if letter == "]" and at > begin:
            break
        if letter == "[" and (named := re.compile(r"\[:([a-z]*):\]").match(text, at)):
            if named[1] not in _POSIX:
                return _NEVER, len(text)
            letters, at = letters + re.escape(_POSIX[named[1]]), named.end()
            continue
        first, at = _letter(text, at)
        letters += re.escape(first)
        if text[at : at + 1] == "-" and text[at + 1 : at + 2] not in ("", "]"):
            last, at = _letter(text, at + 1)
            letters += f"-{re.escape(last)}" if first <= last else ""
    if not letters:
        return ("[^/]" if negated else _NEVER), at + 1
    return f"(?!/)[{'^' if negated else ''}{letters}]", at + 1


def _letter(text: str, at: int) -> tuple[str, int]:
    """Return the character at index `at` of a class, without its backslash, and the index after the character."""
    if text[at] == "\\" and at + 1 < len(text):
        at += 1
    return text[at], at + 1
