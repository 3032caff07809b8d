"""Reads images from files, packs them once, and augments batches of bytes for a network.

    place = pixels.pack(data, size=256)                      # decoded once per machine; a prepared place is returned as it is
    train = pixels.packed(place)
    stream = Stream(train, batch=256, microbatch=64, seed=s.seed, epochs=90)
    for batch in stream:
        for (x, y, index, aspect), share in batch.split(net):  # (b, 256, 256, 3) bytes, (b,), (b,), (b,)
            u = pixels.draws(s.seed, batch.epoch, index, pixels.CROP + 1)
            x = pixels.crop_resize(x, pixels.boxes(u[:, : pixels.CROP], aspect), 224, mirrored=u[:, -1] < 0.5)
            x = pixels.normalised(x)  # (b, 3, 224, 224)

Random numbers are a function of (seed, epoch, index), so an image has the same augmentation in any world, on any worker and after
any restart. Images are bytes until `normalised` converts them, so they cause a quarter of the memory traffic of float32. Every
augmentation takes a batch as (b, H, W, 3) or (b, 3, H, W), leaves it unchanged, and returns a new batch of the same layout.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from outlast.base import file_locks
from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.dataset_directory import unwritable
from outlast.data.prepare import images, source_files, work_units
from outlast.training import Shards
from outlast.training.session import Session
from outlast.worker.prepare import data_cache_eviction

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue, for pixels from 0 to 1
_TRIES = 10  # random boxes drawn per image; the first that fits is used, as in torchvision's RandomResizedCrop
CROP = 2 * _TRIES + 2  # random numbers that `boxes` needs per image
_CHUNK = 1 << 18  # values that `normalised` computes at a time on a CPU, few enough to fit in the cache
_SMALL = 1 << 16  # fewer values per image are computed in a single thread; arbitrary, between 64 x 64 and 224 x 224 images
_MUCH = 1 << 22  # fewer values per batch, too, because starting threads takes about 0.1 ms; arbitrary
_FEW = 32 << 20  # up to this total size of files in bytes, one process decodes: starting several takes 2 s (measured)
_REPORT_S = 5.0  # interval between log lines; arbitrary


class Samples(NamedTuple):
    """A batch of images, or a single image without the batch dimension."""

    x: Any  # pixels, uint8 (b, H, W, 3)
    y: Any  # labels, int64 (b,)
    index: Any  # indices in the dataset, int64 (b,), for `draws`
    aspect: Any  # width / height of each image's file, float32 (b,), for `boxes` and `centre`


# ---- packing: decodes images once per machine, with the code of `outlast data prepare images`


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
        _laid_out(root, files, val)
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
            raise _mistake(error) from error
    if reported[0]:
        count = sum(part.samples for part in made.parts.values())
        _say(f"packed {count:,} images to {place} in {time.monotonic() - began:.1f} s")
        if damaged := int(made.source.get("damaged", 0)):
            _say(f"left out {damaged} images that cannot be decoded: {', '.join(made.source.get('damaged_files', ()))}")
    return str(place)


def _say(line: str) -> None:
    print(f"outlast: {line}", file=sys.stderr, flush=True)


def _mistake(error: source_files.BadSource) -> OutlastError:
    """Convert an error of `outlast data prepare` into one that names the recipe's flags."""
    text = str(error).replace("--skip-damaged", "--skip-bad")
    return OutlastError(text.replace("with --size, or use --encoded", "with --stored-size, pixels a side"))


def _laid_out(root: Path, files: Sequence[source_files.File], val: float) -> tuple[dict[str, list[images.Item]], list[str]]:
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


# ---- reading


class Packed(Shards):
    """A dataset of packed images, for a `Stream` of `Samples`. Open it with `packed`."""

    def __init__(self, place: str | os.PathLike[str], part: str = "train") -> None:
        super().__init__(place, part)
        self.classes: list[str] = list(self.manifest.source.get("classes", ()))
        """Class names, in the order of their labels; empty if the manifest has none."""
        self.bad: int = int(self.manifest.source.get("damaged", 0))
        """Number of damaged images that were left out, in both parts together."""
        if not self.remote:
            for shard in range(len(self._shards)):
                self._labels(self._open(shard)["label"])

    def _samples(self, shard: Any) -> int:
        if self.manifest.kind != "images" or self.manifest.settings.get("encoded"):
            what = "encoded images" if self.manifest.kind == "images" else self.manifest.kind
            raise OutlastError(
                f"{self._place.name} holds {what}, and decoded images are needed; make them: "
                "outlast data prepare images SOURCE --to PLACE"
            )
        return super()._samples(shard)

    def _labels(self, y: NDArray[np.int64]) -> None:
        """Raise OutlastError for a label out of range."""
        if not len(y):
            return
        lowest, highest, most = int(y.min()), int(y.max()), len(self.classes) - 1
        if lowest < 0 or highest > most >= 0:
            wrong, known = lowest if lowest < 0 else highest, f"0 to {most}" if self.classes else "0 or more"
            raise OutlastError(
                f"{self._place.name} has label {wrong} in {self.part}, and labels are {known}; prepare the data again, or give "
                "the right number of classes"
            )

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`."""
        columns = super().take(indices)
        x, y = columns["image"], columns["label"]
        self._labels(y.numpy())
        aspect = columns.get("aspect")
        if aspect is None:  # not stretched: the pixels have the aspect ratio of the file, or of its centre
            aspect = torch.full((len(y),), x.shape[2] / x.shape[1])
        return Samples(x, y, torch.from_numpy(indices.astype(np.int64)), aspect)

    def __getitem__(self, index: int) -> Samples:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return Samples(*(column[0] for column in self.take(np.array([index % len(self)]))))


def packed(place: str | os.PathLike[str], part: str = "train") -> Packed:
    """Open packed images in a directory, or below a URL in a store such as `s3://bucket/tiny`.

    `Stream(pixels.packed(place), batch=256)` gives `Samples` in `batch.split(net)`. Raises OutlastError for unusable data.
    """
    return Packed(place, part)


def agreed(run: Session, *datasets: Packed) -> None:
    """Raise OutlastError on all ranks if machines have packed different images. All ranks must call this, before `run.resume`."""
    prints = run.gather([dataset.fingerprint for dataset in datasets])
    if others := [rank for rank, each in enumerate(prints) if each != prints[0]]:
        raise OutlastError(
            f"rank {others[0]} has packed other images than rank 0: their sources, or versions of Pillow, differ; "
            "pack once to a place that all machines share, and name that place"
        )


class Folder(Dataset[Samples]):
    """A dataset of images that are decoded at every read. Open it with `folder`."""

    def __init__(self, root: str | os.PathLike[str], part: str, size: int | None, val: float, skip_bad: bool) -> None:
        images.pillow()
        self.root = images.inside(Path(root))
        items, self.classes = _laid_out(self.root, source_files.listed(self.root), val)
        self.items = items[part]
        if not self.items:
            raise OutlastError(f"{root} has no images in {part}; give more, or a larger share of val")
        self._settings = images.Settings(size, skip_damaged=skip_bad, stretch=size is not None)
        self._damaged = torch.zeros(len(self.items), dtype=torch.bool).share_memory_()  # shared with the Stream's workers
        try:
            self._shape = images.shape_of(self.root, items, self._settings)
        except source_files.BadSource as error:
            raise _mistake(error) from error

    @property
    def bad(self) -> list[str]:
        """Names of the damaged images that this process and the `workers` of its Streams have skipped."""
        return [self.items[i].file for i in self._damaged.nonzero()[:, 0].tolist()]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Samples:
        """Return one image, uint8 (H, W, 3). Raises OutlastError if it cannot be decoded and `skip_bad` is not set."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        for place in ((index + further) % len(self) for further in range(len(self))):
            item = self.items[place]
            try:
                x, aspect = images.pixels(self.root, item.file, self._settings)
            except source_files.BadSource as error:
                if not self._settings.skip_damaged:
                    raise _mistake(error) from error
                if not self._damaged[place]:
                    self._damaged[place] = True
                    print(f"outlast: {item.file} cannot be decoded; the next image stands in for it", file=sys.stderr, flush=True)
                continue
            if self._shape is not None and x.shape != self._shape:
                raise _mistake(images.unequal(item.file, x.shape, self._shape))
            return Samples(np.array(x), item.label, index, np.float32(aspect))
        raise OutlastError(f"none of the {len(self)} images in {self.root} can be decoded; get the data again")


def folder(
    root: str | os.PathLike[str], part: str = "train", *, size: int | None = None, val: float = 0.1, skip_bad: bool = False
) -> Folder:
    """Open a directory of images to decode at every read: `Stream(pixels.folder(root, size=256), batch=256, workers=8)`.

    The directory, or a single directory inside it, has `train/CLASS/...` and `val/CLASS/...` (as ImageNet has), the layout of
    tiny-imagenet-200, or `CLASS/...`, where a hash of the names assigns the fraction `val` to val. `size` stretches images to
    size x size, and `Samples.aspect` records their original proportions; without `size`, all images must have the same shape.
    `pack` gives the same images in the same order, so a run may switch to it. With `skip_bad`, an image that cannot be decoded is
    replaced by the next one, which is the same on all ranks and in all epochs. Raises OutlastError if there are no images, or if
    train and val differ in classes.
    """
    return Folder(root, part, size, val, skip_bad)


# ---- random numbers


_GAMMA = -0x61C8864680B583EB  # splitmix64's increment, 0x9E3779B97F4A7C15, as a signed number


def draws(seed: int, epoch: int, indices: Tensor, count: int, purpose: str = "") -> Tensor:
    """Return `count` random numbers in [0, 1) per sample: float32 (b, count), on the device of `indices`, int64 (b,).

    They depend only on (seed, epoch, index, purpose) and are equal on every device. The generator is splitmix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014), with the sample's index as its counter.
    """
    digest = hashlib.shake_256(f"outlast pixels 1 {seed} {epoch} {purpose}".encode()).digest(8)
    key = int.from_bytes(digest, "little", signed=True)
    state = _mixed(indices.to(torch.int64) * _GAMMA + key)  # (b,)
    columns = torch.arange(1, count + 1, device=indices.device, dtype=torch.int64) * _GAMMA
    bits = _mixed(state[:, None] + columns)  # (b, count)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    """Apply splitmix64's finalizer to int64. Products wrap around; torch's >> keeps the sign, so the upper bits are masked."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


# ---- augmentation


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()  # MKL would divide a few thousand numbers among all of its threads
def boxes(
    u: Tensor,
    aspect: Tensor,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Return random boxes for `crop_resize`: float64 (b, 4) with left, top, width and height as fractions of the image.

    `u` is a result of `draws`, (b, CROP), and `aspect` is each image's width / height, (b,). A box covers a fraction of the
    image's area in the range `scale`, and its width / height in the file's pixels is in the range `ratio`. The distribution is
    that of torchvision's RandomResizedCrop ("Going deeper with convolutions", Szegedy et al., 2014).
    """
    u, aspect = u.double(), aspect.double()
    area = scale[0] + (scale[1] - scale[0]) * u[:, 0 : 2 * _TRIES : 2]  # (b, tries)
    low, high = np.log(ratio[0]), np.log(ratio[1])
    shape = torch.exp(low + (high - low) * u[:, 1 : 2 * _TRIES : 2]) / aspect[:, None]  # width / height in fractions of the image
    width, height = (area * shape).sqrt(), (area / shape).sqrt()
    fits = (width <= 1) & (height <= 1)
    # Otherwise, as in torchvision, use as much of the centre as `ratio` allows.
    fallback_width = (ratio[1] / aspect).clamp(max=1)
    fallback_height = (aspect / ratio[0]).clamp(max=1)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    any_fits = fits.any(1)
    width = torch.where(any_fits, width.gather(1, first)[:, 0], fallback_width)
    height = torch.where(any_fits, height.gather(1, first)[:, 0], fallback_height)
    left = torch.where(any_fits, u[:, -2], 0.5) * (1 - width)
    top = torch.where(any_fits, u[:, -1], 0.5) * (1 - height)
    return torch.stack((left, top, width, height), 1)


def centre(aspect: Tensor, share: float = 224 / 256) -> Tensor:  # as with Resize(256) and CenterCrop(224)
    """Return central squares of images for `crop_resize`: float64 (b, 4). Their side is `share` of the images' shorter side."""
    aspect = aspect.double()
    shorter = aspect.clamp(max=1)  # in heights of the image
    width, height = share * shorter / aspect, share * shorter
    return torch.stack(((1 - width) / 2, (1 - height) / 2, width, height), 1)


@torch.no_grad()
def crop_resize(x: Tensor, boxes: Tensor, size: int, mirrored: Tensor | None = None) -> Tensor:
    """Crop a box from each image and resize it to size x size, bilinear with antialiasing: uint8 (b, H, W, 3) -> (b, s, s, 3).

    `boxes` is a result of `boxes` or `centre`; edges are rounded to whole pixels. The images selected by `mirrored`, bool (b,),
    are also flipped left to right. A CPU runs torch's kernel for bytes on each image, while other devices compute two matrix
    products for all images at once. The results differ by at most 1 of 255.
    """
    rows, columns = _plane(x)
    n = torch.tensor([x.shape[columns], x.shape[rows]] * 2, device=boxes.device, dtype=torch.float64)
    ends = ((boxes[:, :2] + boxes[:, 2:]) * n[:2]).round()
    start = torch.minimum((boxes[:, :2] * n[:2]).round(), n[:2] - 1).clamp(min=0)
    extent = torch.minimum(torch.maximum(ends, start + 1), n[:2]) - start
    pixel = x.permute(0, 3, 1, 2) if rows == 1 else x  # (b, 3, H, W)
    if x.device.type == "cpu":
        out = torch.empty((len(x), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        mirror = [False] * len(x) if mirrored is None else mirrored.tolist()
        edges = torch.cat((start, extent), 1).long().tolist()

        def one(i: int) -> None:
            left, top, w, h = edges[i]
            part = pixel[i : i + 1, :, top : top + h, left : left + w]
            made = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
            out[i : i + 1] = made.flip(3) if mirror[i] else made

        _each(one, len(x), size**2 * 3)
    else:
        out = _products(pixel, start.to(x.device), extent.to(x.device), size, mirrored)
    return out.permute(0, 2, 3, 1) if rows == 1 else out.contiguous()


def _each(do: Callable[[int], None], count: int, size: int) -> None:
    """Call `do(0)` to `do(count - 1)`, each of which computes `size` numbers, in as many threads as torch uses.

    Torch itself would divide each image among its threads and wait for the slowest, thousands of times a second; on a shared
    machine, each wait lasts until that thread gets a core. Small images are computed in this thread, because Python takes most
    of their time.
    """
    threads = torch.get_num_threads()
    with _one_thread():
        if threads == 1 or size < _SMALL or count * size < _MUCH:
            for i in range(count):
                do(i)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for _ in pool.map(do, range(count)):
                    pass


def _products(x: Tensor, start: Tensor, extent: Tensor, size: int, mirrored: Tensor | None = None) -> Tensor:
    """Compute `crop_resize` as matrix products, for any device: (b, 3, H, W) -> (b, 3, s, s)."""
    down = _weights(start[:, 1], extent[:, 1], size, x.shape[2])  # (b, s, H)
    across = _weights(start[:, 0], extent[:, 0], size, x.shape[3])  # (b, s, W)
    if mirrored is not None:
        across = torch.where(mirrored[:, None, None], across.flip(1), across)
    b, _, height, width = x.shape
    lines = torch.bmm(down, x.permute(0, 2, 1, 3).reshape(b, height, 3 * width).float())  # (b, s, 3 W)
    lines = lines.view(b, size, 3, width).permute(0, 2, 1, 3).reshape(b, 3 * size, width)
    out = torch.bmm(lines, across.transpose(1, 2)).view(b, 3, size, size)
    return out.round_().clamp_(0, 255).to(torch.uint8, memory_format=torch.channels_last)


def _weights(start: Tensor, extent: Tensor, size: int, count: int) -> Tensor:
    """Return the weights of Pillow's bilinear filter, from `count` input pixels to `size` output pixels: (b, size, count)."""
    scale = extent / size  # (b,)
    middle = start[:, None] + (torch.arange(size, device=start.device) + 0.5) * scale[:, None]  # (b, size)
    pixel = torch.arange(count, device=start.device) + 0.5
    far = (pixel - middle[:, :, None]).abs() / scale.clamp(min=1)[:, None, None]
    inside = (pixel > start[:, None]) & (pixel < (start + extent)[:, None])  # (b, count)
    weights = (1 - far).clamp(min=0) * inside[:, None]
    return (weights / weights.sum(2, keepdim=True)).float()


@torch.no_grad()
def flip(x: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the images selected by `chosen`, bool (b,), left to right."""
    columns = _plane(x)[1]
    out = x.clone()
    out[chosen] = x[chosen].flip(columns)
    return out


@torch.no_grad()
def shift(x: Tensor, u: Tensor, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels in both directions, and fill the gap with black. `u` is from `draws`, (b, 2)."""
    rows, columns = _plane(x)
    b, height, width = len(x), x.shape[rows], x.shape[columns]
    by = (u * (2 * pad + 1)).long().clamp(max=2 * pad) - pad  # (b, 2), from -pad to pad
    down = torch.arange(height, device=x.device) + by[:, :1]  # (b, H)
    across = torch.arange(width, device=x.device) + by[:, 1:]  # (b, W)
    inside = ((down >= 0) & (down < height))[:, :, None] & ((across >= 0) & (across < width))[:, None]  # (b, H, W)
    down, across = down.clamp(0, height - 1), across.clamp(0, width - 1)
    which = torch.arange(b, device=x.device)[:, None, None]
    if rows == 1:
        return x[which, down[:, :, None], across[:, None]].mul_(inside[..., None])  # (b, H, W, 3)
    channel = torch.arange(3, device=x.device)[None, :, None, None]
    return x[which[..., None], channel, down[:, None, :, None], across[:, None, None]].mul_(inside[:, None])  # (b, 3, H, W)


@torch.no_grad()
def cutout(x: Tensor, u: Tensor, size: int, fill: Sequence[int] = (0, 0, 0)) -> Tensor:
    """Paint a size x size square at a random centre over each image (DeVries and Taylor, 2017). `u` is from `draws`, (b, 2)."""
    rows, columns = _plane(x)

    def inside(dimension: int, u: Tensor) -> Tensor:  # (b, n)
        count = x.shape[dimension]
        first = (u * count).floor() - size // 2
        places = torch.arange(count, device=x.device)
        return (places >= first[:, None]) & (places < first[:, None] + size)

    painted = inside(rows, u[:, 0])[:, :, None] & inside(columns, u[:, 1])[:, None]  # (b, H, W)
    colour = torch.tensor(fill, dtype=x.dtype, device=x.device)
    if rows == 1:
        return torch.where(painted[..., None], colour, x)
    return torch.where(painted[:, None], colour[:, None, None], x)


@torch.no_grad()
def normalised(
    x: Tensor,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.channels_last,
) -> Tensor:
    """Convert bytes to network inputs, (x / 255 - mean) / std: computed in float32, returned as `dtype` of shape (b, 3, H, W)."""
    rows, _ = _plane(x)
    x = (x if rows == 1 else x.permute(0, 2, 3, 1)).contiguous()  # (b, H, W, 3)
    b, height, width, _ = x.shape
    lines = x.view(b, height, 3 * width)  # three numbers at a time would be slow
    scale = torch.tensor([1 / (255 * s) for s in std], device=x.device).repeat(width)  # (3 W,)
    offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=x.device).repeat(width)
    out = torch.empty(lines.shape, dtype=dtype, device=x.device)
    some = b if x.device.type != "cpu" else max(1, _CHUNK // (height * 3 * width))

    def chunk(i: int) -> None:
        these = slice(i * some, (i + 1) * some)
        out[these] = torch.addcmul(offset, lines[these].to(torch.float32), scale)

    _each(chunk, -(-b // some), some * height * 3 * width)
    return out.view(b, height, width, 3).permute(0, 3, 1, 2).contiguous(memory_format=memory_format)


def _plane(x: Tensor) -> tuple[int, int]:
    """Return which dimensions of a batch are rows and columns. Raises OutlastError if `x` is not a batch of colour images."""
    if x.dim() == 4 and x.dtype == torch.uint8 and 3 in (x.shape[1], x.shape[3]):
        return (1, 2) if x.shape[3] == 3 else (2, 3)
    raise OutlastError(
        f"a batch of images is uint8 of shape (b, H, W, 3) or (b, 3, H, W), and this one is {x.dtype} of shape {tuple(x.shape)}"
    )
