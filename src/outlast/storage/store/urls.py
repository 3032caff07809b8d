"""Normalises store URLs, and checks the names of objects. Pure; called by `store.client`.

URLs are literal: there is no percent-encoding, and `#` and `?` are ordinary characters.
"""

from __future__ import annotations

import os
import re

from outlast.base.errors import StoreError

PLACES = {"s3": "bucket", "gs": "bucket", "az": "container", "file": "directory", "memory": "name"}
"""Nouns for the first segment of a URL in messages, keyed by scheme."""
_BUCKET = {
    "s3": (re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,253}[a-zA-Z0-9]"), "3 to 63 of a-z, 0-9, `-` and `.`"),
    "gs": (re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"), "3 to 63 of a-z, 0-9, `-`, `_` and `.`"),
    "az": (re.compile(r"\$?[a-z0-9](-?[a-z0-9])*"), "3 to 63 of a-z, 0-9 and single `-`"),
}


def normalised(url: str) -> str:
    """Return the URL without superfluous slashes and `.` segments. Raises StoreError if it is invalid."""
    scheme, separator, rest = url.partition("://")
    schemes = ", ".join(f"{scheme}://" for scheme in PLACES)
    if not separator:
        if match := re.fullmatch(rf"({'|'.join(PLACES)}):/?([^/].*)", url):
            raise StoreError(f"{url} is no URL of a store; write {match[1]}://{match[2]}")
        raise StoreError(f"{url!r} is no URL of a store; those begin with {schemes}")
    if scheme not in PLACES:
        raise StoreError(f"{url}: there is no store {scheme}:// here; use one of {schemes}")
    segments = [segment for segment in rest.split("/") if segment not in ("", ".")]
    if wrong := segments and impossible("/".join(segments), "") if scheme != "file" else "\0" in rest and "it has a zero byte":
        raise StoreError(f"{url!r} cannot be a place in a store: {wrong}")
    if scheme == "file":
        # RFC 8089 allows only absolute paths; here file://./x and file://x are relative to the current directory.
        path = os.path.normpath(os.path.join("/" if rest.startswith("/") else os.getcwd(), *segments))
        return f"file://{path}"
    what = PLACES[scheme]
    if rest.startswith("/") or not segments:
        raise StoreError(f"{url} names no {what}; write {scheme}://{what}/prefix")
    pattern, allowed = _BUCKET.get(scheme, (re.compile(".+"), ""))
    if not pattern.fullmatch(segments[0]):
        raise StoreError(f"{url}: {segments[0]!r} cannot be the name of a {what}; that is {allowed}")
    return f"{scheme}://{'/'.join(segments)}"


def impossible(key: str, scheme: str) -> str:
    """Return why `key` cannot be an object's name in a store of this scheme, or an empty string."""
    if not key:
        return "it is empty"
    segments = key.split("/")
    if "" in segments:
        return "a segment is empty (a slash at its begin or end, or two in a row)"
    if "." in segments or ".." in segments:
        return "a segment is `.` or `..`"
    if odd := next((letter for letter in key if ord(letter) < 32 or ord(letter) == 127), ""):
        return f"it has the control character {odd!r}"
    try:
        length = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if scheme == "az" and "\\" in key:
        return "Azure takes a backslash for a slash"
    if scheme == "file" and re.search(r"#\d+$", key):
        return "file:// keeps names that end in # and digits for files that are being written"
    if scheme == "file" and any(len(segment.encode()) > 255 for segment in segments):
        return "a segment is longer than 255 bytes"
    return f"it has {length:,} bytes, and 1,024 are allowed" if length > 1024 and scheme in ("s3", "gs", "az") else ""
