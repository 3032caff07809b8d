"""The datasets that `outlast data get` knows by name, and those that are named by a URL.

Sizes and checksums are those that the dataset's authors publish. Where they publish none, there is none here: such a download is
checked for its length and, being an archive, for damage, and its own SHA-256 is noted in the marker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Made:
    """A dataset that needs no download."""

    write: Callable[[Path], object]
    """Writes its files to an empty directory."""
    source: Callable[[], str]
    """What it is made from, for the marker."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset that can be got."""

    name: str
    """In the registry, or the URL without its checksum."""
    about: str = ""
    """One line for `outlast data list`."""
    made: Made | None = None


def _stdlib() -> Made:
    from outlast.data import stdlib

    return Made(stdlib.write, stdlib.source)


def _digits() -> Made:
    from outlast.data import digits

    return Made(digits.fill, lambda: "scikit-learn")


_ABOUT = {
    "digits": "1,797 handwritten digits of scikit-learn, in CIFAR-10's format",
    "python-stdlib": "the sources of Python's standard library: text for a first language model",
}
_MADE: dict[str, Callable[[], Made]] = {"digits": _digits, "python-stdlib": _stdlib}

NAMES = tuple(sorted(_ABOUT))
"""All names."""


def named(name: str) -> Dataset:
    """The dataset of this name, one of `NAMES`."""
    return Dataset(name, _ABOUT[name], made=_MADE[name]() if name in _MADE else None)
