"""Differences between two versions of a job, and whether the newer version only extends the training. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from outlast.job.spec.model import Job

_SECRET = re.compile(r"(-[\w-]*(?:token|key|secret|passw|credential)[\w-]*(?:=|\s))\S+", re.IGNORECASE)
"""Arguments that may be secrets, as in `manifests.labels`."""
_LENGTH = re.compile(r"-*(?:.*\.)?(?:(?:max|n|num|total|train|training)[-_])*(?:steps|iters|iterations|epochs)", re.IGNORECASE)
"""Options that set how long to train, such as `--max_iters`, but not `--warmup-steps`."""
_ELSEWHERE = ("args", "code", "environment", "output", "suspend", "workers")
"""Fields that may change in a version that only extends the training. `args` are compared separately."""
_LONGEST = 60


def between(old: Job, new: Job, but: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for each changed field in `spec`, except fields whose names begin with an entry in `but`. Values in `env`
    are not shown, because they may be secret."""
    before, after = (dict(_flat(job.spec.model_dump(mode="json", by_alias=True))) for job in (old, new))
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        if was == now or path[0] in but:
            continue
        text = ".".join(path)
        if path[0] != "env":
            text += f": {_changed(was, now)}"
        yield f"changed since: {text}"


def longer(old: Job, new: Job, step: int) -> bool:
    """Return whether a job differs from its previous version only in more steps or epochs. `step` is the step of its newest
    checkpoint: a new option, such as `--max-iters 5000`, extends the training if its value is above that step."""
    if [*between(old, new, but=_ELSEWHERE)]:
        return False
    was, now = (_options(job.spec.args) for job in (old, new))
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    least = {name: was.get(name, str(step) if not name.endswith("epochs") else "") for name in changed}
    pairs = [(least[name], now.get(name, "")) for name in changed if _LENGTH.fullmatch(name)]
    return 0 < len(changed) == len(pairs) and all(a.isdecimal() and b.isdecimal() and int(a) < int(b) for a, b in pairs)


def _options(args: Sequence[Any]) -> dict[str, str]:
    """Return the arguments' values, keyed by the name of the option or, for positional arguments, by position."""
    found, name = {}, ""
    for n, word in enumerate(map(str, args)):
        if word.startswith("-"):
            name, equals, found[name] = word.partition("=")
            name = "" if equals else name
        else:
            found[name or str(n)], name = word, ""
    return found


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, (*path, key))
    elif value is not None and value != []:
        yield path, value


def _changed(was: Any, now: Any) -> str:
    if not (isinstance(was, list) or isinstance(now, list)):
        return f"{_text(was)} → {_text(now)}"
    was, now = was or [], now or []
    parts = difflib.SequenceMatcher(None, [*map(str, was)], [*map(str, now)], autojunk=False).get_opcodes()
    return ", ".join(
        f"{_words(_named(was, a, b))} → {_words(_named(now, c, d))}" for kind, a, b, c, d in parts if kind != "equal"
    )


def _named(words: Sequence[Any], start: int, end: int) -> Sequence[Any]:
    """Return the words from `start` to `end`, and the option before them if the first word is its value."""
    value = 0 < start < end and not str(words[start]).startswith("-") and str(words[start - 1]).startswith("-")
    return words[start - value : end]


def _words(words: Sequence[Any]) -> str:
    return _short(_SECRET.sub(r"\1…", " ".join(map(_text, words)))) if words else "nothing"


def _text(value: Any) -> str:
    return "nothing" if value is None else _short(value if isinstance(value, str) else json.dumps(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
