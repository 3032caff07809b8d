"""Runs a function call as a job: `encoded` runs in the process that submits the job, and `main` runs in every rank.

A function that workers can import is sent by name. Any other function, e.g. from a notebook, is sent by value, which needs
cloudpickle.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outlast.base import units
from outlast.base.errors import OutlastError, importing

MOST_BYTES = 100_000
"""Maximum length of an encoded call, since Linux limits a program's argument to 128 KiB."""


def encoded(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return a call as text for `main`. Raises OutlastError if the arguments do not fit or the call cannot be sent."""
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise OutlastError(f"Job: {name}: {error}; other keywords are fields of the job file") from error
    dumps = pickle.dumps
    if not _importable(function):
        with importing(f"a function that no module has, such as {name},", "notebook"):
            import cloudpickle
        dumps = cloudpickle.dumps
    try:
        data = dumps((function, tuple(args), dict(kwargs)))
        pickle.loads(data)
    except Exception as error:  # an object's __reduce__ may raise anything
        raise OutlastError(
            f"Job: {_culprit(dumps, function, args, kwargs) or name} cannot be sent to workers: {error}"
        ) from error
    text = base64.b64encode(zlib.compress(data)).decode()
    if len(text) > MOST_BYTES:
        size = units.human_bytes(len(data))
        raise OutlastError(
            f"Job: {name} and its arguments are {size}; pass the path of large data, which `data` brings to workers"
        )
    return text


def _importable(function: Callable[..., object]) -> bool:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "<" in name:
        return False
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _culprit(
    dumps: Callable[[object], bytes], function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    """Return a description of the first argument, or else the first variable used by the function, that cannot be sent."""
    name = getattr(function, "__name__", "the function")

    def candidates() -> Iterator[tuple[str, object]]:
        yield from ((f"argument {n} of {name}", value) for n, value in enumerate(args, 1))
        yield from ((f"argument {key} of {name}", value) for key, value in kwargs.items())
        if inspect.isfunction(function):
            used = inspect.getclosurevars(function)
            for key, value in (*used.nonlocals.items(), *used.globals.items()):
                yield f"{key}, which {name} uses,", value

    for title, value in candidates():
        try:
            pickle.loads(dumps(value))
        except Exception:  # as in `encoded`
            return title
    return ""


def main(argv: Sequence[str]) -> None:
    """Decode a call and execute it."""
    try:
        function, args, kwargs = pickle.loads(zlib.decompress(base64.b64decode(argv[0])))
    except ModuleNotFoundError as error:
        remedy = "install it there, or let the job's `code` contain it"
        raise OutlastError(
            f"workers do not have the module {error.name}, which the function of this job needs; {remedy}"
        ) from error
    function(*args, **kwargs)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OutlastError as problem:
        sys.exit(f"outlast | {problem}")
