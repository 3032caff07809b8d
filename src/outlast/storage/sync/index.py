"""Objects as the manifest lists them, files as we last saw them, and whether the two agree.

The rules of `sync`, as plain functions of plain values; nothing here looks at a disk, a clock or a store. A file is known by its
size, its two times (of the content and of the inode) and the crc32 of what was read; an object by its size, its crc32, and a hash
of its etag. Times are nanoseconds since the epoch, crc32 is -1 where it is unknown.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VERSION = 1
GRANULARITY_NS = 2_000_000_000
"""A file written so shortly before it was read may be written again without getting another time (two seconds on FAT, ticks of
the clock elsewhere); git calls it racy. It is read once more instead of being believed."""


class Stat(NamedTuple):
    """Size and times of a file."""

    size: int
    mtime: int
    ctime: int


class Seen(NamedTuple):
    """A file as it was when we read or wrote its content. A ctime of 0 fits no file: only the content can tell."""

    size: int
    mtime: int
    ctime: int
    crc32: int


class Object(NamedTuple):
    """An object as we left it in the store, or found it there."""

    size: int
    mtime: int
    """Of the file that it was made of; where that is unknown, when the object was written."""
    crc32: int
    mark: int
    """The crc32 of its etag: tells that it was replaced."""


class Verdict(enum.Enum):
    """Whether a file has the content of an object."""

    SAME = enum.auto()
    DIFFERENT = enum.auto()
    LOOK = enum.auto()
    """The file must be read to know."""


def compare(here: Stat, seen: Seen | None, there: Object, clean_before: int) -> Verdict:
    """Whether the file `here`, last `seen` as that, has the content of the object `there`.

    Without `seen`, a file of the object's size and mtime is believed to be the one it was made of, if that mtime is before
    `clean_before`: the object's maker then read it when it could no longer change unnoticed.
    """
    if here.size != there.size:
        return Verdict.DIFFERENT
    if there.crc32 < 0:  # a file that was made of it has its time; but if we had seen it, we would know more
        return Verdict.SAME if seen is None and here.mtime == there.mtime else Verdict.DIFFERENT
    if seen is None:
        return Verdict.SAME if here.mtime == there.mtime and here.mtime < clean_before else Verdict.LOOK
    if seen.size != here.size or seen.mtime != here.mtime:
        return Verdict.DIFFERENT
    if seen.ctime != here.ctime:
        return Verdict.LOOK
    return Verdict.SAME if seen.crc32 == there.crc32 else Verdict.DIFFERENT


def seen(stat: Stat, crc32: int, read: int) -> Seen:
    """What to remember of a file with that content, which we began to read at `read`."""
    return Seen(stat.size, stat.mtime, stat.ctime if stat.mtime < read - GRANULARITY_NS else 0, crc32)


def etag_hash(etag: str) -> int:
    """What we keep of an etag."""
    return zlib.crc32(etag.strip('"').encode())


def as_left(known: Object, size: int, etag: str) -> bool:
    """Whether an object is still the one we know."""
    return known.size == size and known.mark == etag_hash(etag)


def found(entries: Iterable[tuple[str, int, str, float]], known: Mapping[str, Object], own: str) -> dict[str, Object]:
    """The objects of a listing (key, size, etag, modified), with what we know of those that were not replaced. `own` is the
    manifest's key. Keys that end in a slash stand for directories, and are left out."""
    objects = {}
    for key, size, etag, modified in entries:
        if key == own or not key or key.endswith("/"):
            continue
        old = known.get(key)
        if old is not None and as_left(old, size, etag):
            objects[key] = old
        else:
            objects[key] = unknown(size, etag, modified)
    return objects


def unknown(size: int, etag: str, modified: float) -> Object:
    """An object whose file is unknown."""
    return Object(size, round(modified * 1000) * 1_000_000, -1, etag_hash(etag))


def unsafe(key: str) -> str:
    """Why a key cannot be a path inside a directory; empty when it can."""
    if key.startswith("/"):
        return "it begins with a slash"
    if "\0" in key:
        return "it has a NUL in it"
    segments = key.split("/")
    if ".." in segments or "." in segments:
        return "it has a segment `.` or `..`"
    return "it has an empty segment" if "" in segments else ""


def directories(paths: Iterable[str]) -> set[str]:
    """All directories that these files are in."""
    known: set[str] = set()
    for path in paths:
        above = path.rpartition("/")[0]
        while above and above not in known:
            known.add(above)
            above = above.rpartition("/")[0]
    return known


# Documents: JSON over columns, sorted by path; that of a store is compressed. 100,000 files are 3 MB there, and 0.1 s.

_UNKNOWN = Object(-1, 0, -1, 0)
_UNSEEN = Seen(-1, 0, 0, -1)


def encode(objects: Mapping[str, Object], clean_before: int) -> bytes:
    """A manifest, for the store."""
    paths = sorted(objects)
    text = _text({"settled": clean_before, "path": paths, **_columns(Object, [objects[path] for path in paths])})
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)  # 31: gzip; level 1: six times as fast as 6, and 9 % larger
    return packer.compress(text) + packer.flush()


def decode(data: bytes) -> tuple[dict[str, Object], int]:
    """The objects and `clean_before` of a manifest. Raises ValueError."""
    try:
        said = _document(zlib.decompress(data, 31))
        with _uncollected():
            return dict(zip(said["path"], _rows(Object, said), strict=True)), int(said["settled"])
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"it is not a manifest: {error!r}") from error


@dataclass
class State:
    """Our knowledge of a tree and its place in a store, kept locally to save requests."""

    place: str = ""
    """The manifest's URL."""
    etag: str = ""
    """Of the manifest whose content `objects` is; empty when there is none."""
    clean_before: int = 0
    """As in the manifest."""
    checked: float = 0.0
    """When the store was last listed, by our clock."""
    objects: dict[str, Object] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As a document."""
        paths = sorted(self.objects.keys() | self.seen.keys())
        head = {"place": self.place, "etag": self.etag, "settled": self.clean_before, "checked": self.checked}
        there = _columns(Object, [self.objects.get(path, _UNKNOWN) for path in paths])
        here = _columns(Seen, [self.seen.get(path, _UNSEEN) for path in paths], "seen_")
        return _text({**head, "path": paths, **there, **here})

    @classmethod
    def decode(cls, data: bytes) -> State:
        """From a document; raises ValueError."""
        try:
            said = _document(data)
            head = (str(said["place"]), str(said["etag"]), int(said["settled"]), float(said["checked"]))
            with _uncollected():
                objects = dict(zip(said["path"], _rows(Object, said), strict=True))
                seen = dict(zip(said["path"], _rows(Seen, said, "seen_"), strict=True))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is not a state: {error!r}") from error
        for rows, sizes in ((objects, said["size"]), (seen, said["seen_size"])):
            for path in [path for path, size in zip(said["path"], sizes, strict=True) if size < 0]:
                del rows[path]
        return cls(*head, objects, seen)


def _columns(kind: Any, rows: list[Any], prefix: str = "") -> dict[str, list[int]]:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(kind._fields)
    return {prefix + name: list(column) for name, column in zip(kind._fields, columns, strict=True)}


def _rows(kind: Any, said: dict[str, Any], prefix: str = "") -> Iterable[Any]:
    return map(kind._make, zip(*(said[prefix + name] for name in kind._fields), strict=True))


def _text(document: dict[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **document}, separators=(",", ":")).encode()


def _document(data: bytes) -> dict[str, Any]:
    said = json.loads(data)
    if not isinstance(said, dict) or said.get("version") != VERSION:
        raise ValueError("it is of another version of Outlast")
    return said


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Make many values that stay: the garbage collector would look through them again and again, for half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
