"""A copy of a file that grows elsewhere, in a store or a pod: only what is new is read, unless it has become another file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outlast.base import files


def refresh(copy: Path, read: Callable[[int], bytes]) -> None:
    """Make `copy` equal to the whole lines of the file whose bytes from an offset on `read` returns (none beyond its end).

    The last line is read again to see that it is the same file: lines have the time in them. Raises what `read` raises.
    """
    known = copy.read_bytes() if copy.exists() else b""
    mark = known[known.rfind(b"\n", 0, len(known) - 1) + 1 :] if known else b""
    found = read(len(known) - len(mark))
    if found.startswith(mark) and known:
        with copy.open("ab") as file:
            file.write(found[len(mark) : found.rfind(b"\n") + 1])
    else:
        found = read(0) if known else found
        files.replace(copy, found[: found.rfind(b"\n") + 1])
