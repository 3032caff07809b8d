"""`$(NAME)` references to environment variables in a job's `args` and `env`, as in a pod's containers. Pure.

A variable in `env` may refer to any other variable in `env`, before or after it, because API servers do not preserve the order.
`$$(NAME)` stands for `$(NAME)` itself, and a reference to an undefined variable is left unchanged.
https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_REFERENCE = re.compile(r"\$?\$\((\w+)\)")


def replaced(text: str, values: Mapping[str, str]) -> str:
    """Replace references to variables in `text` with their `values`."""

    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match[0].startswith("$$") else values.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def values(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `env`, with the references in their values replaced by variables from `env` and `environ`."""
    circle = circular(env)
    values = {name: value for name, value in environ.items() if name not in env}

    def value(name: str) -> str:
        if name not in values:
            for other in _named(env[name]):
                if other in env and other not in circle:
                    value(other)
            values[name] = replaced(env[name], values)
        return values[name]

    return {name: env[name] if name in circle else value(name) for name in env}


def circular(env: Mapping[str, str]) -> set[str]:
    """Return the variables that refer to themselves, directly or through other variables, and therefore stay unchanged."""

    def reached(name: str, seen: set[str]) -> set[str]:
        for other in _named(env[name]):
            if other in env and other not in seen:
                seen.add(other)
                reached(other, seen)
        return seen

    return {name for name in env if name in reached(name, set())}


def _named(text: str) -> Iterator[str]:
    return (match[1] for match in _REFERENCE.finditer(text) if not match[0].startswith("$$"))
