"""Turns images into columns: `image` uint8 (n, H, W, 3) and `label` int64 (n,); with `encoded`, `image` holds the files' bytes.

Stretched images also have `aspect` float32 (n,): the original width / height, for crops (`outlast.recipes.pixels.boxes`).

Layouts: `CLASS/...`, `train/CLASS/...` with `val/CLASS/...` (ImageNet), tiny-imagenet-200 (whose val has a list of labels), and
CIFAR-10's batches. Classes are numbered in the order of their names. Samples are sorted by a hash of their names, so that every
shard mixes classes. Memory: one shard per process, plus about 600 bytes per image.

https://www.image-net.org, http://cs231n.stanford.edu/tiny-imagenet-200.zip.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.base.errors import OutlastError, importing
from outlast.data import cifar, shard_format
from outlast.data.prepare import column_shards, source_files, work_units
from outlast.data.prepare.source_files import TRAIN, VAL, BadSource, File

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")
LARGEST = 256 << 20
"""Maximum size of an image file in bytes. Arbitrary: ten times the largest camera JPEGs."""
NAMED = 5
"""Maximum number of damaged images that the manifest lists."""
_TINY = "val/val_annotations.txt"


@dataclass(frozen=True)
class Settings:
    """Settings for `outlast data prepare images`."""

    size: int | None = None
    """Length of the shorter side in pixels after resizing, before the centre is cropped; None keeps the original shape."""
    encoded: bool = False
    """True to keep the files' bytes; every image is still decoded once to find damaged images."""
    val: float = 0.1
    """Fraction of the images in val if the source has no val directory."""
    shard_size: int = column_shards.SHARD
    skip_damaged: bool = False
    stretch: bool = False
    """True to resize the whole image to `size` x `size` without cropping, and to record its aspect ratio."""

    def about(self) -> dict[str, Any]:
        """Return the settings to record in the manifest, without `stretch` if it is false, so that older manifests still compare
        equal."""
        fields = dataclasses.asdict(self)
        return fields if self.stretch else {name: value for name, value in fields.items() if name != "stretch"}


@dataclass(frozen=True, slots=True)
class Item:
    """An image in the dataset."""

    file: str
    label: int
    size: int


def prepare(request: work_units.Request, settings: Settings) -> shard_format.Manifest:
    """Make or finish the dataset, and return its manifest. Raises BadSource, and OutlastError for invalid settings."""
    if settings.size is not None and (settings.size < 1 or settings.encoded):
        raise OutlastError(f"--size {settings.size} cannot be met: it is 1 or more pixels, and not for --encoded; leave it out")
    if settings.stretch and settings.size is None:
        raise OutlastError("--stretch needs --size: how many pixels both sides shall have; add it, or leave --stretch out")
    pillow()
    request = dataclasses.replace(request, source=inside(request.source))
    batch_files = cifar_batches(request.source)
    sources = source_files.listed(batch_files or request.source, request.to)
    about = settings.about()
    source = source_files.described(sources)
    if made := work_units.existing(request, "images", about, source):
        return made
    with work_units.opened(work_units.fitting(request, settings.shard_size), about, sources) as place:
        if batch_files:
            names, notes = _write_cifar(place, batch_files, settings)
            used = {TRAIN, VAL}
        else:
            items, names = layout(source_files.root(request.source), sources, settings.val)
            used = {part for part in items if items[part]}
            root = source_files.root(request.source)
            shape = shape_of(root, items, settings)
            cost = math.prod(shape) if shape else 0
            sizes = {part: [(cost or item.size, item.size) for item in some] for part, some in items.items()}
            do = functools.partial(_write, root=root, to=place.private, settings=settings, shape=shape)
            notes = place.results("shard", do, column_shards.batches(items, sizes, settings.shard_size))
        source |= {"classes": list(names), "damaged": sum(note["damaged"] for note in notes)}
        if names_of_damaged := [name for note in notes for name in note.get("names", ())]:
            source |= {"damaged_files": sorted(names_of_damaged)[:NAMED]}
        parts = column_shards.parts(notes, [part for part in (TRAIN, VAL) if part in used or (part == VAL and settings.val)])
        return place.finish(shard_format.Manifest("images", parts, about, source, place=str(request.to)))


def pillow() -> Any:
    """Import and return Pillow's Image module. Raises OutlastError if Pillow is not installed."""
    with importing("decoding images", "data"):
        from PIL import Image
    return Image


def inside(source: Path) -> Path:
    """Return the source, or its only directory if that contains `train`, as in `tiny-imagenet-200/train/...`."""
    inner = [path for path in source.iterdir() if not path.name.startswith(".")] if source.is_dir() else []
    return inner[0] if len(inner) == 1 and (inner[0] / "train").is_dir() else source


# ---- layouts


def layout(root: Path, sources: Sequence[File], val: float) -> tuple[dict[str, list[Item]], list[str]]:
    """Return each part's images, and the class names. Raises BadSource."""
    images = [file for file in sources if file.name.lower().endswith(SUFFIXES)]
    if not images:
        raise BadSource(f"{root} has no images ({', '.join(SUFFIXES)}); name a directory with a directory per class")
    divided = TRAIN in {source_files.named_part(file.name) for file in images if file.name.count("/") > 1}
    if divided:  # omit other directories, such as test/: they have no labels, or must not be trained on
        images = [file for file in images if source_files.named_part(file.name)]
    annotated = _annotations(root, sources)
    classes = {file.name: _class(file.name, annotated, divided=divided) for file in images}
    names = sorted(set(classes.values()))
    number = {each: i for i, each in enumerate(names)}
    part = source_files.parts(images, val)
    items: dict[str, list[Item]] = {TRAIN: [], VAL: []}
    for file in sorted(images, key=lambda file: (source_files.hash_fraction(file.name), file.name)):
        items[part[file.name]].append(Item(file.name, number[classes[file.name]], file.size))
    return items, names


def _class(name: str, annotated: Mapping[str, str], *, divided: bool) -> str:
    segments = name.split("/")[divided:]
    if name in annotated:
        return annotated[name]
    if len(segments) < 2 or (annotated and name.startswith("val/images/")):
        raise BadSource(f"{name} lies in no directory of a class; sort the images into SOURCE/CLASS/ or SOURCE/train/CLASS/")
    return segments[0]


def _annotations(root: Path, sources: Sequence[File]) -> dict[str, str]:
    if all(file.name != _TINY for file in sources):
        return {}
    lines = [line.split("\t") for line in (root / _TINY).read_text("utf-8").splitlines()]
    return {f"val/images/{line[0]}": line[1] for line in lines if len(line) > 1}


# ---- pixels


def shape_of(root: Path, items: Mapping[str, Sequence[Item]], settings: Settings) -> tuple[int, ...] | None:
    """Return the shape that all images must have: `size`, or the first image's shape; None if shapes may differ."""
    if settings.encoded:
        return None
    if settings.size:
        return (settings.size, settings.size, 3)
    for item in (*items[TRAIN], *items[VAL]):
        try:
            return pixels(root, item.file, settings)[0].shape
        except BadSource:
            if not settings.skip_damaged:
                raise
    return (0, 0, 3)


def unequal(file: str, shape: tuple[int, ...], others: tuple[int, ...]) -> BadSource:
    """Return the error for an image whose shape differs from the first image's."""
    (h, w, _), (h0, w0, _) = shape, others
    return BadSource(f"{file} has {w}x{h} pixels and others {w0}x{h0}; make them equal with --size, or use --encoded")


def pixels(root: Path, file: str, settings: Settings) -> tuple[NDArray[np.uint8], float]:
    """Decode an image. Returns the pixels, (H, W, 3), and the original aspect ratio, width / height.

    Raises BadSource for a damaged image, and OutlastError for an I/O failure on this machine.
    """
    image_library = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about palettes, and about sizes below the limit
            if (size := (root / file).stat().st_size) > LARGEST:
                raise ValueError(f"{size:,} bytes are more than {LARGEST:,}")
            with image_library.open(root / file) as image:
                aspect = image.width / image.height
                if settings.size:
                    image.draft("RGB", (settings.size, settings.size))  # JPEG decodes at a smaller scale, 2 to 8 times as fast
                return np.asarray(resized(_rgb(image), settings.size, stretch=settings.stretch)), aspect
    except Exception as error:  # decoders may raise anything on damaged bytes
        if isinstance(error, OSError) and error.errno:
            raise source_files.unreadable(root / file, error) from error
        raise BadSource(f"{file} is damaged or no image ({error}); replace it, or leave it out with --skip-damaged") from error


def _rgb(image: Any) -> Any:
    """Convert to 8 bits per channel. 16-bit grey keeps its upper 8 bits; Pillow would clip nearly all of it to white."""
    if image.mode.startswith("I;16"):
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def resized(image: Any, size: int | None, *, stretch: bool = False) -> Any:
    """Resize the shorter side to `size` pixels and crop the centre; with `stretch`, resize the whole image to size x size."""
    if size is None or image.size == (size, size):
        return image
    if stretch:
        return image.resize((size, size), pillow().Resampling.BICUBIC)
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) // 2, (height - shorter) // 2
    return image.resize((size, size), pillow().Resampling.BICUBIC, (left, top, left + shorter, top + shorter))


def _write(
    batch: column_shards.Batch[Item], *, root: Path, to: Path, settings: Settings, shape: tuple[int, ...] | None
) -> work_units.Note:
    rows = np.empty((len(batch.items), *shape), np.uint8) if shape else None
    encoded, offsets = bytearray(), [0]
    labels: list[int] = []
    aspects: list[float] = []
    damaged: list[str] = []
    for item in batch.items:
        try:
            decoded, aspect = pixels(root, item.file, settings)
        except BadSource:
            if not settings.skip_damaged:
                raise
            damaged.append(item.file)
            continue
        if shape and decoded.shape != shape:
            raise unequal(item.file, decoded.shape, shape)
        if rows is None:
            encoded += (root / item.file).read_bytes()
            offsets.append(len(encoded))
        else:
            rows[len(labels)] = decoded
        labels.append(item.label)
        aspects.append(aspect)
    columns: dict[str, NDArray[Any]] = {"label": np.array(labels, np.int64)}
    if settings.stretch:
        columns["aspect"] = np.array(aspects, np.float32)
    if rows is None:
        columns |= {"image": np.frombuffer(encoded, np.uint8), f"image{shard_format.OFFSETS}": np.array(offsets, np.int64)}
    elif labels:
        columns["image"] = rows[: len(labels)]  # (n, H, W, 3)
    return {
        batch.part: column_shards.write(to, batch.part, batch.shard, columns),
        "damaged": len(damaged),
        "names": damaged[:NAMED],
    }


# ---- CIFAR-10


def cifar_batches(source: Path) -> Path | None:
    """Return the directory of CIFAR-10's batches, or None if the source has no batches."""
    return next((path for path in (source, source / "cifar-10-batches-py") if (path / cifar.META).is_file()), None)


def _write_cifar(place: work_units.Place, directory: Path, settings: Settings) -> tuple[Sequence[str], list[work_units.Note]]:
    if settings.encoded:
        raise OutlastError("CIFAR-10's batches have no encoded images; leave out --encoded")
    made = [*((TRAIN, shard, file) for shard, file in enumerate(cifar.TRAIN)), (VAL, 0, cifar.TEST)]
    batches = [
        column_shards.Batch(number, part, shard, (file,), (directory / file).stat().st_size)
        for number, (part, shard, file) in enumerate(made)
    ]
    do = functools.partial(_write_batch, directory=directory, to=place.private, settings=settings)
    return cifar.test(directory).names, place.results("shard", do, batches)


def _write_batch(batch: column_shards.Batch[str], *, directory: Path, to: Path, settings: Settings) -> work_units.Note:
    images = cifar.read(directory, batch.items)
    pictures = images.x.transpose(0, 2, 3, 1)  # (n, 32, 32, 3)
    columns: dict[str, NDArray[Any]] = {"label": images.y}
    if settings.size:
        image_library = pillow()
        pictures = np.stack([np.asarray(resized(image_library.fromarray(each), settings.size)) for each in pictures])
    if settings.stretch:
        columns["aspect"] = np.ones(len(pictures), np.float32)
    columns["image"] = np.ascontiguousarray(pictures)
    return {batch.part: column_shards.write(to, batch.part, batch.shard, columns), "damaged": 0}
