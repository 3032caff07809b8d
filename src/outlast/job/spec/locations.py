"""Locations in a job file: a path on this machine or a store's URL, with an optional checksum for archives. Pure."""

from __future__ import annotations

from pathlib import Path

STORES = ("s3", "gs", "az", "file", "memory")
"""URL schemes for data, code and outputs, besides plain paths."""
WEB = ("http", "https")
"""URL schemes for single files, which can also serve as data and models if they have a checksum."""
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
OTHER_ARCHIVES = (".tbz", ".tbz2", ".txz", ".bz2", ".xz", ".zst", ".gz", ".rar", ".7z")


def pinned(code: str) -> tuple[str, str]:
    """Split a place into the place itself and its checksum, which is empty if there is none."""
    place, _, checksum = code.partition("#sha256=")
    return place, checksum.lower()


def archive(place: str) -> bool:
    """Return whether a place has an archive's name."""
    return place.lower().endswith(ARCHIVES)


def web(place: str) -> bool:
    """Return whether a place is a file on a web server."""
    return place.partition("://")[0] in WEB and "://" in place


def local(place: str) -> Path | None:
    """Return the path of a place on this machine (`data/`, `~/data`, `file:///data`); None if it is in a store."""
    path = place.removeprefix("file://")
    return None if "://" in path else Path(path).expanduser()
