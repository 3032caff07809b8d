"""Parses durations, quantities and intervals from a job file, and formats them for parsers or for people.

    "1h30m", 90, "0.5s"  <->  timedelta          duration, duration_text
    "16Gi", "2G", 1024   <->  bytes (int)        memory, memory_text
    "500m", "2", 0.5     <->  cores (float)      cores, cores_text
    "5m", "200 steps"    <->  Every              Every.parse, str()

A parser `x` turns what `x_text` returns back into the same value. Quantities are as in Kubernetes
(https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/). Parsers raise ValueError with the rest of a
sentence that begins with the value: `5 min` *is not a duration; write 90s, 5m, 1h30m or 2d*.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
DURATION_PATTERN = rf"^(?:{_NUMBER}[dhms])+$|^{_NUMBER}$"
"""This pattern and the next two are for schemas. They are also valid RE2, which Kubernetes' API server uses."""
QUANTITY_PATTERN = rf"^{_NUMBER}(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]{{1,2}})?$"
EVERY_PATTERN = rf"{DURATION_PATTERN}|^[0-9]+ ?steps?$"

_MICROSECONDS = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}


def duration(value: str | int | float | timedelta) -> timedelta:
    """Parse `90s`, `5m`, `1h30m`, `2d`, or a number of seconds, to the nearest microsecond."""
    if isinstance(value, timedelta):
        return value
    text = _plain(value).replace(" ", "")
    if not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError("is not a duration; write 90s, 5m, 1h30m or 2d")
    parts = re.findall(rf"({_NUMBER})([dhms]?)", text)
    try:
        exact = sum((Decimal(number) * _MICROSECONDS[unit or "s"] for number, unit in parts), Decimal())
        return timedelta(microseconds=int(exact.to_integral_value()))
    except (OverflowError, ArithmeticError):
        raise ValueError("is too long a duration; the longest is 999999999d") from None


def duration_text(value: timedelta) -> str:
    """Return the shortest text for a duration: `1h30m`, `2d`, `0.5s`, `0s`."""
    left = value // timedelta(microseconds=1)
    text = ""
    for unit in "dhm":
        count, left = divmod(left, _MICROSECONDS[unit])
        text += f"{count}{unit}" if count else ""
    return text + f"{_seconds(left)}s" if left or not text else text


def quantity(value: str | int | float) -> float:
    """Parse a quantity from the API server, which may also be negative or have a small unit, such as `12345678n`."""
    text = str(value).strip()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
    small = {"n": Decimal("1e-9"), "u": Decimal("1e-6")}.get(text[-1:])
    return sign * float(_quantity(text, "16Gi") if small is None else _quantity(text[:-1], "16Gi") * small)


def memory(value: str | int | float) -> int:
    """Parse `16Gi`, `2G` or a bare number to bytes, rounded up as in Kubernetes."""
    return math.ceil(_quantity(value, "16Gi"))


def memory_text(value: int) -> str:
    """Return the shortest exact text, such as `16Gi`, or a bare number."""
    for suffix, size in reversed(_BINARY.items()):
        if value and value % size == 0:
            return f"{value // size}{suffix}"
    return str(value)


def cores(value: str | int | float) -> float:
    """Parse `2`, `0.5` or `500m` to cores, rounded up to a thousandth as in Kubernetes."""
    return math.ceil(_quantity(value, "500m or 2") * 1000) / 1000


def cores_text(value: float) -> str:
    """Format cores: a whole number as `2`, and any other number in thousandths, as `500m`."""
    thousandths = round(value * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


@dataclass(frozen=True)
class Every:
    """An interval in time or in steps; exactly one of the fields is set."""

    duration: timedelta | None = None
    steps: int | None = None

    @classmethod
    def parse(cls, value: str | int | float | Every) -> Every:
        """Parse `5m`, `200 steps`, or a number of seconds. Raises ValueError unless the interval is positive."""
        if isinstance(value, Every):
            return value
        if match := re.fullmatch(r"([0-9]{1,18}) ?steps?", _plain(value)):
            every = cls(steps=int(match[1]))
        else:
            try:
                every = cls(duration=duration(value))
            except ValueError:
                raise ValueError('is neither a duration nor a number of steps; write 5m or "200 steps"') from None
        if not (every.duration or every.steps):
            raise ValueError('must be more than 0; write 5m or "200 steps"')
        return every

    def __str__(self) -> str:
        """Return text such as `300s` or `200 steps`, which `parse` accepts."""
        if self.duration is not None:
            return f"{_seconds(self.duration // timedelta(microseconds=1))}s"
        return f"{self.steps} step" if self.steps == 1 else f"{self.steps} steps"


def human_bytes(value: float) -> str:
    """Format a size for people: `512 B`, `1.5 KiB`, `139 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def count(number: int, noun: str) -> str:
    """Format a number with a noun: `1 restart`, `2,000 restarts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Format a share with one decimal: `94.1 %`. A share below 1 never becomes 100.0 %."""
    return f"{100 * share if share >= 1 else min(99.9, 100 * share):.1f} %"


def human_seconds(value: float) -> str:
    """Format seconds for people: `7ms`, `3.2s`, `42s`, `1m05s`, `2h03m`, `4d01h`."""
    if value < 0.9995:
        return f"{max(value, 0) * 1000:.0f}ms"
    if value < 9.95:
        return f"{value:.1f}s"
    seconds = round(value)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // smaller:02d}{name}"
    return f"{seconds}s"


def _quantity(value: str | int | float, example: str) -> Decimal:
    text = _plain(value)
    match = re.fullmatch(rf"({_NUMBER})([A-Za-z]{{0,2}}|[eE][+-]?[0-9]{{1,2}})", text)
    if match:
        number, suffix = Decimal(match[1]), match[2]
        if suffix == "m":
            return number / 1000
        if size := {"": 1, **_DECIMAL, **_BINARY}.get(suffix):
            return number * size
        if suffix[1:].lstrip("+-").isdecimal():
            return number.scaleb(int(suffix[1:]))
    raise ValueError(f"is not a quantity; write {example}")


def _plain(value: object) -> str:
    """Return a text as it is, a number as text without an exponent, and anything else as `?`, which no parser accepts."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return f"{Decimal(str(value)):f}"
    return "?"


def _seconds(microseconds: int) -> str:
    whole, part = divmod(microseconds, 1_000_000)
    return f"{whole}.{part:06d}".rstrip("0") if part else str(whole)
