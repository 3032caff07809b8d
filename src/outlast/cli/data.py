"""`outlast data`: get datasets, and list those that have a name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import units
from outlast.cli import show, transfers
from outlast.cli.show import Output, OutputOption

if TYPE_CHECKING:
    from outlast.data.place import Marker

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Get datasets.")


@app.callback()
def group() -> None:
    """Get datasets."""


def _names() -> list[str]:
    from outlast.data import registry

    return list(registry.NAMES)


@app.command()
def get(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A dataset of `outlast data list`: digits.", show_default=False, autocompletion=_names
        ),
    ],
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory to write to. Default: data/NAME.", show_default=False)
    ] = None,
) -> None:
    """Bring a dataset to a directory. A dataset that is complete there stays as it is.

    \b
    Examples:
      outlast data get digits
      outlast data get python-stdlib --to /data/python
    """
    from outlast.data import get as getting
    from outlast.data import registry

    show.one_of("dataset", name, registry.NAMES, none="")
    directory = to or Path("data") / name
    if name == "digits":
        from outlast.data import digits

        print(digits.write(directory))
        return
    with transfers.interruptible() as stop:
        found, written = getting.get(registry.named(name), directory, say=_say, stop=stop)
    print(_sentence(found, directory, written=written))


@app.command("list")
def list_(output: OutputOption = Output.TABLE) -> None:
    """List the datasets that have a name.

    \b
    Examples:
      outlast data list
      outlast data list -o json
    """
    from outlast.data import registry

    known = [registry.named(name) for name in registry.NAMES]
    if output is Output.TABLE:
        print(show.table(("NAME", "WHAT"), [(each.name, each.about) for each in known]))
    else:
        show.data([{"name": each.name, "about": each.about} for each in known], output)


def _say(sentence: str) -> None:
    print(f"outlast | {sentence}", file=sys.stderr, flush=True)


def _sentence(found: Marker, directory: Path, *, written: bool) -> str:
    verb = "got" if written else "already there:"
    size = f"{show.count(found.files, 'file')}, {units.human_bytes(found.size)}"
    return f"{verb} {found.name} ({found.source}): {size} in {directory}"
