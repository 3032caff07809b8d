"""`outlast data get`: write a dataset that needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli import show

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Get datasets.")


@app.callback()
def group() -> None:
    """Get datasets."""


@app.command()
def get(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The dataset: digits.", show_default=False, autocompletion=lambda: ["digits"])
    ],
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory to write to. Default: data/NAME.", show_default=False)
    ] = None,
) -> None:
    """Write a dataset as files that the recipes read. Existing files stay.

    digits: the 1,797 handwritten digits that come with scikit-learn, as CIFAR-10 batch files (32×32×3), split into training and
    test.

    \b
    Examples:
      outlast data get digits
      outlast data get digits --to /data/digits
    """
    show.one_of("dataset", name, ("digits",), none="")
    from outlast.data import digits

    print(digits.write(to or Path("data") / name))
