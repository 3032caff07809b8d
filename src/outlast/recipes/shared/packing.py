"""Decodes images once per machine, with the code of `outlast data prepare images`, from within a training run.

Every rank calls `pack`; `outlast.recipes.pixels` re-exports it and reads its results.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from outlast.base import file_locks
from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.dataset_directory import unwritable
from outlast.data.prepare import images, source_files, work_units
from outlast.worker.prepare import data_cache_eviction

_FEW = 32 << 20  # up to this total size of files in bytes, one process decodes: starting several takes 2 s (measured)
_REPORT_S = 5.0  # interval between log lines; arbitrary


def pack(
    source: str | os.PathLike[str], to: str | os.PathLike[str] | None = None, *, size: int | None = None, val: float = 0.1,
    skip_bad: bool = False, processes: int | None = None,
) -> str:  # fmt: skip
    """Decode a directory of images once, and return the place to pass to `packed`. A prepared place is returned unchanged.

    The result equals that of `outlast data prepare images SOURCE --to TO --size SIZE --stretch`, for the layouts of `folder`.
    `to` is a directory that machines may share. By default, it is in this machine's cache ($OUTLAST_CACHE), under a name that
    changes with the files. Packing takes minutes, so call this on every rank within `with run.alive():`. One process does the
    work while the others wait; if it is killed, the next call resumes its work. By default, `processes` is one per core if memory
    allows. Raises OutlastError as `folder` does, and for an image that cannot be decoded; `skip_bad` leaves out such images and
    names the first few.
    """
    if "://" in os.fspath(source) or (Path(source) / shard_format.MANIFEST).exists():
        return os.fspath(source)
    root = images.inside(Path(source).absolute())
    settings = images.Settings(size, val=val, skip_damaged=skip_bad, stretch=size is not None)
    files = source_files.listed(root)
    if not images.cifar_batches(root):
        laid_out(root, files, val)
    about = f"{root} {sorted(settings.about().items())} {source_files.described(files)['listing']}"
    key = hashlib.sha256(about.encode(errors="surrogateescape")).hexdigest()[:16]
    place = (
        Path(to).absolute()
        if to is not None
        else data_cache_eviction.cache(os.environ).absolute() / "packed" / f"{root.name}-{key}"
    )
    began, reported = time.monotonic(), [0.0]

    def progress(stage: str, done: int, total: int) -> None:
        if time.monotonic() - reported[0] >= _REPORT_S:
            reported[0] = time.monotonic()
            _say(f"packing {root}: {done / max(total, 1):.0%} of {total / 1e6:,.0f} MB of files")

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise unwritable(problem, place, "the packed images") from problem
    waiting = lambda: _say(f"another process packs {root}; waiting for it")  # noqa: E731
    with file_locks.exclusive(place.with_name(f".{place.name}.lock"), waiting=waiting, stop=threading.Event()):
        few = sum(file.size for file in files) < _FEW
        try:
            made = images.prepare(work_units.Request(root, place, processes or (1 if few else 0), progress), settings)
        except source_files.BadSource as error:
            raise mistake(error) from error
    if reported[0]:
        count = sum(part.samples for part in made.parts.values())
        _say(f"packed {count:,} images to {place} in {time.monotonic() - began:.1f} s")
        if damaged := int(made.source.get("damaged", 0)):
            _say(f"left out {damaged} images that cannot be decoded: {', '.join(made.source.get('damaged_files', ()))}")
    return str(place)


def _say(line: str) -> None:
    print(f"outlast: {line}", file=sys.stderr, flush=True)


def mistake(error: source_files.BadSource) -> OutlastError:
    """Convert an error of `outlast data prepare` into one that names the recipe's flags."""
    text = str(error).replace("--skip-damaged", "--skip-bad")
    return OutlastError(text.replace("with --size, or use --encoded", "with --stored-size, pixels a side"))


def laid_out(root: Path, files: Sequence[source_files.File], val: float) -> tuple[dict[str, list[images.Item]], list[str]]:
    """Return each part's images, and the class names. Raises OutlastError if the directories of the parts do not match.

    They match if val has images, and both have images of the same classes. Without two such directories, nothing is checked.
    """
    items, names = images.layout(root, files, val)
    divided = {part: path for path in root.iterdir() if path.is_dir() and (part := source_files.named_part(path.name))}
    if not {source_files.TRAIN, source_files.VAL} <= divided.keys():
        return items, names
    if not any(source_files.named_part(item.file) == source_files.VAL for item in items[source_files.VAL]):
        raise OutlastError(
            f"{divided[source_files.VAL]} has no images; put some there, or remove it: then a tenth of train is val"
        )
    has = {part: {item.label for item in some} for part, some in items.items()}
    for one, other in ((source_files.VAL, source_files.TRAIN), (source_files.TRAIN, source_files.VAL)):
        if only := sorted(has[one] - has[other]):
            first = ", ".join(names[label] for label in only[:3]) + (", ..." if len(only) > 3 else "")
            raise OutlastError(
                f"{len(only)} of {len(names)} classes are in {one} and not in {other} ({first}); both parts need the same: "
                f"add images of them to {other}, or remove them from {one}"
            )
    return items, names
