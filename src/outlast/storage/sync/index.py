"""Compares files with the objects in the manifest, for `push_and_pull`. Pure.

Times are in nanoseconds since the epoch; a crc32 of -1 means unknown.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VERSION = 1
CHECK_EVERY_S = 86_400.0
"""The store is listed again after this many seconds, because other programs may write to it without updating the manifest."""
GRANULARITY_NS = 2_000_000_000
"""Granularity of mtimes, in nanoseconds: two seconds on FAT. A file that was written less than this before it was read may be
written again with the same mtime, so it is read once more. Git calls such files racy."""


class Stat(NamedTuple):
    """A file's size and times."""

    size: int
    mtime: int
    ctime: int


class Seen(NamedTuple):
    """A file's state when its content was last read or written. A ctime of 0 makes a sync read the file again."""

    size: int
    mtime: int
    ctime: int
    crc32: int


class Object(NamedTuple):
    """An object's state when it was last written or listed."""

    size: int
    mtime: int
    """The original file's mtime or, if unknown, the object's."""
    crc32: int
    mark: int
    """The crc32 of the object's etag."""


class Verdict(enum.Enum):
    """The result of comparing a file with an object."""

    SAME = enum.auto()
    DIFFERENT = enum.auto()
    UNKNOWN = enum.auto()
    """The file must be read to find out."""


def compare(file: Stat, seen: Seen | None, object: Object, clean_before: int) -> Verdict:
    """Compare a file with an object, given the file's state when it was last `seen`.

    If `seen` is None, a file with the object's size and mtime is the original if it was modified before `clean_before`, because
    any change after it was sent would have changed its mtime.
    """
    if file.size != object.size:
        return Verdict.DIFFERENT
    if object.crc32 < 0:  # a download would have set the object's mtime, and a recorded file would have a checksum
        return Verdict.SAME if seen is None and file.mtime == object.mtime else Verdict.DIFFERENT
    if seen is None:
        return Verdict.SAME if file.mtime == object.mtime and file.mtime < clean_before else Verdict.UNKNOWN
    if seen.size != file.size or seen.mtime != file.mtime:
        return Verdict.DIFFERENT
    if seen.ctime != file.ctime:
        return Verdict.UNKNOWN
    return Verdict.SAME if seen.crc32 == object.crc32 else Verdict.DIFFERENT


def seen(stat: Stat, crc32: int, read: int) -> Seen:
    """Return the record of a file with this stat and checksum. `read` is the time when the read began."""
    return Seen(stat.size, stat.mtime, stat.ctime if stat.mtime < read - GRANULARITY_NS else 0, crc32)


def etag_hash(etag: str) -> int:
    return zlib.crc32(etag.strip('"').encode())


def as_left(recorded: Object, size: int, etag: str) -> bool:
    """Return whether an object is still as recorded."""
    return recorded.size == size and recorded.mark == etag_hash(etag)


def listed(entries: Iterable[tuple[str, int, str, float]], recorded: Mapping[str, Object], own: str) -> dict[str, Object]:
    """Return the objects in a listing (key, size, etag, modified), without the manifest `own` and directory markers."""
    objects = {}
    for key, size, etag, modified in entries:
        if key == own or not key or key.endswith("/"):
            continue
        old = recorded.get(key)
        if old is not None and as_left(old, size, etag):
            objects[key] = old
        else:
            objects[key] = unknown(size, etag, modified)
    return objects


def unknown(size: int, etag: str, modified: float) -> Object:
    """Return the record of an object whose original file is unknown."""
    return Object(size, round(modified * 1000) * 1_000_000, -1, etag_hash(etag))


def unsafe(key: str) -> str:
    """Return why a key cannot be a path inside a directory, or an empty string."""
    if key.startswith("/"):
        return "it begins with a slash"
    if "\0" in key:
        return "it has a NUL in it"
    segments = key.split("/")
    if ".." in segments or "." in segments:
        return "it has a segment `.` or `..`"
    return "it has an empty segment" if "" in segments else ""


def directories(paths: Iterable[str]) -> set[str]:
    """Return all directories above these paths."""
    directories: set[str] = set()
    for path in paths:
        above = path.rpartition("/")[0]
        while above and above not in directories:
            directories.add(above)
            above = above.rpartition("/")[0]
    return directories


# Documents are JSON in columns, sorted by path, and compressed in a store: 100,000 files take 3 MB and 0.1 s.

_UNKNOWN = Object(-1, 0, -1, 0)
_UNSEEN = Seen(-1, 0, 0, -1)


def encode(objects: Mapping[str, Object], clean_before: int) -> bytes:
    """Encode a manifest."""
    paths = sorted(objects)
    text = _text({"settled": clean_before, "path": paths, **_columns(Object, [objects[path] for path in paths])})
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)  # 31 is gzip; level 1 is six times as fast as 6, and 9 % larger
    return packer.compress(text) + packer.flush()


def decode(data: bytes) -> tuple[dict[str, Object], int]:
    """Decode a manifest's objects and `clean_before`. Raises ValueError."""
    try:
        document = _document(zlib.decompress(data, 31))
        return dict(zip(document["path"], _rows(Object, document), strict=True)), int(document["settled"])
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"it is not a manifest: {error!r}") from error


@dataclass
class State:
    """A local record of a tree and its store."""

    place: str = ""
    etag: str = ""
    clean_before: int = 0
    checked: float = 0.0
    objects: dict[str, Object] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """Paths transferred by a sync that is not complete, and therefore not yet in the store's manifest."""

    def stale(self, now: float) -> bool:
        """Return whether the store must be listed again, because the last listing is old or the clock was set back."""
        return not 0 <= now - self.checked < CHECK_EVERY_S

    def encode(self) -> bytes:
        paths = sorted(self.objects.keys() | self.seen.keys())
        # Versions without `fresh` read the manifest again if there is no etag, and find out what it lacks.
        head = {"place": self.place, "etag": "" if self.fresh else self.etag, "read": self.etag}
        times = {"settled": self.clean_before, "checked": self.checked}
        objects = _columns(Object, [self.objects.get(path, _UNKNOWN) for path in paths])
        files = _columns(Seen, [self.seen.get(path, _UNSEEN) for path in paths], "seen_")
        return _text({**head, **times, "fresh": sorted(self.fresh), "path": paths, **objects, **files})

    @classmethod
    def decode(cls, data: bytes) -> State:
        """Decode what `encode` returned. Raises ValueError."""
        try:
            document = _document(data)
            etag = str(document.get("read", document["etag"]))
            head = (str(document["place"]), etag, int(document["settled"]), float(document["checked"]))
            fresh = set(document.get("fresh", ()))
            objects = dict(zip(document["path"], _rows(Object, document), strict=True))
            seen = dict(zip(document["path"], _rows(Seen, document, "seen_"), strict=True))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is not a state: {error!r}") from error
        for rows, sizes in ((objects, document["size"]), (seen, document["seen_size"])):
            for path in [path for path, size in zip(document["path"], sizes, strict=True) if size < 0]:
                del rows[path]
        return cls(*head, objects, seen, fresh)


def _columns(kind: Any, rows: list[Any], prefix: str = "") -> dict[str, list[int]]:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(kind._fields)
    return {prefix + name: list(column) for name, column in zip(kind._fields, columns, strict=True)}


def _rows(kind: Any, document: dict[str, Any], prefix: str = "") -> Iterable[Any]:
    return map(kind._make, zip(*(document[prefix + name] for name in kind._fields), strict=True))


def _text(document: dict[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **document}, separators=(",", ":")).encode()


def _document(data: bytes) -> dict[str, Any]:
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ValueError("it is of another version of Outlast")
    return document
