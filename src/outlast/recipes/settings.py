"""A recipe's settings: one frozen dataclass becomes its command line, so that the help is what the reader of the file sees.

@dataclass(frozen=True)
class Settings:
    epochs: int = flag(8, "passes over the training images", least=1)
    data: str = flag("", "where the images are; default $OUTLAST_DATA")
    evaluate: bool = flag(False, "measure instead of training")

def main(argv: Sequence[str] | None = None) -> None:
    s = settings.parse(Settings, argv, __doc__)            # --epochs 8 --data DIR --evaluate

if __name__ == "__main__":
    settings.run(main)
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from outlast import contract
from outlast.errors import OutlastError

T = typing.TypeVar("T")


def flag(default: Any, reason: str, *, least: float | None = None) -> Any:
    """A field with its default, what it is for (unit and reason), and the smallest value that makes sense."""
    return dataclasses.field(default=default, metadata={"help": reason, "least": least})


def parse(settings: type[T], argv: Sequence[str] | None, about: str | None) -> T:
    """The settings that `argv` (None: the command line) asks for.

    `--field-name VALUE` for every field, of its type; a bool is a switch. Raises OutlastError for a wrong flag.
    """
    parser = _Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]  # T is a dataclass
        name, kind, reason = "--" + field.name.replace("_", "-"), hints[field.name], field.metadata["help"].replace("%", "%%")
        if kind is bool:
            parser.add_argument(name, action="store_true", help=reason)
        else:
            if isinstance(kind, types.UnionType):  # X | None
                (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
            shown = reason if field.default in (None, "") else f"{reason} (default {field.default})"
            convert = _bounded(kind, field.metadata["least"])
            parser.add_argument(name, type=convert, default=field.default, metavar=kind.__name__.upper(), help=shown)
    return settings(**vars(parser.parse_args(argv)))


def run(main: Callable[[], None]) -> None:
    """Run a recipe. A mistake that its user can correct (no data, a wrong flag) ends it with one sentence and exit code 78.

    Under `outlast run`, `launch.rank` does that, and keeps the sentence for `outlast status`.
    """
    try:
        main()
    except OutlastError as error:
        if contract.Env.STATE in os.environ:
            raise
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        sys.exit(contract.Exit.MISCONFIGURED)


def _bounded(kind: Callable[[str], Any], least: float | None) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None
        if least is not None and not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return convert


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OutlastError(f"{message}; see --help")
