"""Prices of machines, from a file that you keep up to date: nothing is asked of AWS.

    p3.2xlarge: {on-demand: 3.06, spot: 0.92}

in US dollars an hour. `eks-cluster` is the price of EKS itself. Pure, but for `load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from outlast.errors import OutlastError
from outlast.fleet.model import Capacity
from outlast.spec import document, validation
from outlast.spec.validation import Checked

CONTROL_PLANE = "eks-cluster"
"""The name of EKS's own price."""
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(Checked):
    """Dollars an hour of one machine."""

    on_demand: Dollars | None = Field(None, alias="on-demand")
    """On-demand."""
    spot: Dollars | None = None
    """Spot; it changes, so this is what you reckon with."""


class Prices(Checked):
    """A file of prices."""

    prices: dict[str, Price]
    """By instance type."""

    def of(self, instance_type: str, capacity: Capacity) -> float | None:
        """Dollars an hour of a machine; None if the file does not say."""
        found = self.prices.get(instance_type)
        return None if found is None else found.spot if capacity == "spot" else found.on_demand


def parse(text: str, *, source: str = "prices.yaml") -> Prices:
    """The prices in a text; raises InvalidJob with every mistake and its line."""
    read = document.read(text, source=source, kind="list of prices", start="p3.2xlarge: {on-demand: 3.06, spot: 0.92}")
    below = document.Document(
        {"prices": read.data}, {("prices", *place): line for place, line in read.lines.items()}, read.problems
    )
    return validation.validated(Prices, below, source=source)


def load(path: Path) -> Prices:
    """The prices in a file; raises InvalidJob with every mistake, or OutlastError if it cannot be read."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OutlastError(f"{path} cannot be read: {why}; give a file of prices, e.g. examples/prices/us-west-2.yaml") from error
