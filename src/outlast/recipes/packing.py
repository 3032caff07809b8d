"""Images decoded once per machine: what `outlast data prepare images` does, for the first start of a training that needs it.

`pack` is called by every rank; `outlast.recipes.pixels` offers it, and reads what it has made.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from outlast import file_locks, files
from outlast.data import shards
from outlast.data.place import unwritable
from outlast.data.prepare import images, plan, work
from outlast.errors import OutlastError
from outlast.workerfiles import wants

_FEW = 32 << 20
"""Bytes of files that one process decodes sooner than several have started; measured: 2 s for those to start."""
_SAID_S = 5.0
"""Interval of the lines about packing; arbitrary."""


def pack(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    val: float = 0.1,
    skip_bad: bool = False,
    processes: int | None = None,
) -> str:
    """Decode a directory of images once, and return the place to give to `packed`; a place that is prepared is returned as it is.

    What `outlast data prepare images SOURCE --to TO --size SIZE --stretch` does, for the layouts of `folder`. `to` is a directory
    that may be shared by machines; by default one in this machine's cache ($OUTLAST_CACHE). Call it on every rank: one process
    does the work and writes lines about it, others wait. Killed at any moment, the next call goes on where it was. When the
    images are there, returns at once. `processes` decode, by default one per core that has
    memory. Takes minutes: call it in `with run.alive():`.

    Raises OutlastError for what `folder` does, and for an image that cannot be decoded; with `skip_bad` such images are left out,
    counted, and the first few named.
    """
    if "://" in os.fspath(source) or (Path(source) / shards.MANIFEST).exists():
        return os.fspath(source)
    root = images.inside(Path(source).absolute())
    settings = images.Settings(size, val=val, skip_damaged=skip_bad, stretch=size is not None)
    place = Path(to).absolute() if to is not None else _cached(root, settings)
    said = _Said(root)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise unwritable(problem, place, "the packed images") from problem
    with file_locks.exclusive(place.with_name(f".{place.name}.lock"), waiting=said.waiting, stop=threading.Event()):
        record = place.with_name(f".{place.name}.packed.json")
        if packed_before := _unchanged(record, root, settings):
            return packed_before
        found = plan.listed(root, root / work.PRIVATE)
        changed = _changed(root, found)  # before the files are listed for good: what comes later is seen the next time
        if not images.cifar_batches(root):
            _laid_out(root, found, val)
        if to is None:
            place = place.with_name(f"{place.name}-{plan.described(found)['listing'][:8]}")
        few = sum(file.size for file in found) < _FEW
        request = work.Request(root, place, processes or (1 if few else 0), said.progress)
        try:
            said.done(images.prepare(request, settings), place)
        except plan.BadSource as error:
            raise mistake(error) from error
        about = {"source": str(root), "settings": settings.about(), "place": str(place), "changed": changed}
        files.replace(record, json.dumps(about), durable=True)
        return str(place)


def mistake(error: plan.BadSource) -> OutlastError:
    """What is wrong with a source, with a recipe's flags instead of those of `outlast data prepare`."""
    text = str(error).replace("--skip-damaged", "--skip-bad")
    return OutlastError(text.replace("with --size, or use --encoded", "with --stored-size, pixels a side"))


def _cached(root: Path, settings: images.Settings) -> Path:
    """A name in this machine's cache for what is made of a directory."""
    key = hashlib.sha256(f"{root} {sorted(settings.about().items())}".encode(errors="surrogateescape")).hexdigest()[:16]
    return wants.cache(os.environ).absolute() / "packed" / f"{root.name}-{key}"


def _changed(root: Path, found: Sequence[plan.File]) -> dict[str, int]:
    """When files were last added to, or removed from, each directory of a source, in ns."""
    return {str(each): (root / each).stat().st_mtime_ns for each in sorted(_above(file.name for file in found))}


def _unchanged(record: Path, root: Path, settings: images.Settings) -> str | None:
    """The place of what was packed before, if nothing has changed since. Lists no files, of which there may be millions."""
    try:
        about = json.loads(record.read_bytes())
        same = (about["source"], about["settings"]) == (str(root), settings.about())
        if same and all((root / name).stat().st_mtime_ns == ns for name, ns in about["changed"].items()):
            shards.read(about["place"])
            return str(about["place"])
    except (OSError, ValueError, KeyError, shards.BadDataset):
        pass  # none, of another version, or damaged: it is packed again, or found to be the same
    return None


class _Said:
    """Lines about packing, on the screen of the process that packs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._began = self._last = time.monotonic()
        self._first: int | None = None

    def waiting(self) -> None:
        """Another process packs."""
        self._say(f"another process packs {self._root}; waiting for it")

    def progress(self, stage: str, done: int, total: int) -> None:
        """Bytes of files that are done."""
        now = time.monotonic()
        if self._first is None:
            self._first = done
            share = f", {done / total:.0%} of it is done" if done else ""
            self._say(f"packing {self._root}{share}")
        elif now - self._last >= _SAID_S or done == total:
            self._last = now
            rate = (done - self._first) / max(now - self._began, 1e-9) / 1e6
            self._say(f"packing: {done / max(total, 1):.0%} of {total / 1e6:,.0f} MB of files, {rate:.1f} MB/s")

    def done(self, made: shards.Manifest, place: Path) -> None:
        """It is packed."""
        if self._first is None:
            return
        count = sum(part.samples for part in made.parts.values())
        self._say(f"packed {count:,} images to {place} in {time.monotonic() - self._began:.1f} s")
        if damaged := int(made.source.get("damaged", 0)):
            self._say(f"left out {damaged} images that cannot be decoded: {', '.join(made.source.get('damaged_files', ()))}")

    def _say(self, line: str) -> None:
        print(f"outlast: {line}", file=sys.stderr, flush=True)


# ---- what can be trained on


def listed(root: Path, val: float) -> tuple[Path, dict[str, list[images.Item]], list[str]]:
    """The directory, the images of each part and the classes. Raises OutlastError for what cannot be trained on."""
    inner = images.inside(root)
    found = plan.listed(inner, inner / work.PRIVATE)
    return inner, *_laid_out(inner, found, val)


def _laid_out(root: Path, found: Sequence[plan.File], val: float) -> tuple[dict[str, list[images.Item]], list[str]]:
    items, names, _ = images.layout(root, found, val)
    _check(root, items, names)
    return items, names


def _check(root: Path, items: dict[str, list[images.Item]], names: Sequence[str]) -> None:
    """Raise OutlastError for classes that are empty, or in one part only, and for an empty val."""
    directories = {part: path for path in _directories(root) if (part := plan.named_part(path.name))}
    if plan.TRAIN not in directories:
        directories = {"": root}
    filled = {root / each for each in _above(item.file for some in items.values() for item in some)}
    if plan.VAL in directories and directories[plan.VAL] not in filled:
        raise OutlastError(f"{directories[plan.VAL]} has no images; put some there, or remove it: then a tenth of train is val")
    for path in (each for directory in directories.values() for each in _directories(directory)):
        if path not in filled:
            raise OutlastError(f"class {path.name} has no images: {path} holds none; remove that directory, or fill it")
    if plan.VAL not in directories:
        return
    has = {part: {item.label for item in some} for part, some in items.items()}
    for one, other in ((plan.VAL, plan.TRAIN), (plan.TRAIN, plan.VAL)):
        if only := sorted(has[one] - has[other]):
            first = ", ".join(names[label] for label in only[:3]) + (", ..." if len(only) > 3 else "")
            raise OutlastError(
                f"{len(only)} of {len(names)} classes are in {one} and not in {other} ({first}); both parts need the same: "
                f"add images of them to {other}, or remove them from {one}"
            )


def _above(names: Iterable[str]) -> set[PurePosixPath]:
    """The directories that files are in, and those above them. Quick for millions of names in thousands of directories."""
    closest = {name.rpartition("/")[0] for name in names}
    return {parent for each in closest for parent in (PurePosixPath(each), *PurePosixPath(each).parents)}


def _directories(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
