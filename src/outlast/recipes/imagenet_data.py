"""Provides `outlast.recipes.imagenet` with images from files or packed shards, or with synthetic images."""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import images
from outlast.job import contract
from outlast.recipes import pixels
from outlast.training import Session

if TYPE_CHECKING:
    from outlast.recipes.imagenet import Settings

PACKED_AT_ONCE = 16 * 2**30  # maximum bytes of decoded images to pack by default: 13 times tiny-imagenet, some minutes of work


def opened(s: Settings, run: Session | None = None) -> Pictures | Synthetic:
    """Open the data that the settings name. All ranks must call this if `run` is given. Raises OutlastError for unusable data."""
    if s.synthetic:
        return Synthetic(s)
    place = directory(s)
    if run is None:
        return Pictures(s, place)
    with run.alive():  # packing takes minutes
        pictures = Pictures(s, place)
    if pictures.packed:
        pixels.agreed(run, pictures.train, pictures.val)
    return pictures


def directory(s: Settings) -> str:
    """Return the path or URL of the images. A directory `train` beside `val` stands for its parent. Raises OutlastError."""
    named = s.data or os.environ.get(contract.Env.DATA, "")
    if not named:
        raise OutlastError(
            f"no data: give a directory (--data DIR), set {contract.Env.DATA}, or train on made ones with --synthetic; "
            "outlast data get tiny-imagenet-200 downloads some"
        )
    path = Path(named)
    if path.name == "train" and (path.parent / "val").is_dir():
        return str(path.parent)
    if "://" not in named and not path.is_dir():
        raise OutlastError(f"data {named}: there is no such directory; give one with train/CLASS/ and val/CLASS/")
    return named


class Pictures:
    """Images in files or packed shards. Provides datasets of them for a `Stream`, and augments micro-batches."""

    def __init__(self, s: Settings, place: str) -> None:
        self._s, self.place = s, place
        self.train: Any
        self.val: Any
        self.classes: list[str]  # names, by label
        if "://" in place or (Path(place) / shard_format.MANIFEST).exists():
            self.train, self.val = (pixels.packed(place, part) for part in ("train", "val"))
        else:
            size = stored(s, Path(place))
            self.train, self.val = (pixels.folder(place, part, size=size, skip_bad=s.skip_bad) for part in ("train", "val"))
            if s.pack or (s.pack is None and self._bytes(size) <= PACKED_AT_ONCE):
                packed = pixels.pack(place, size=size, skip_bad=s.skip_bad)
                self.train, self.val = (pixels.packed(packed, part) for part in ("train", "val"))
        self.packed = isinstance(self.train, pixels.Packed)
        self.bad = int(self.train.bad) if self.packed else 0  # undecodable images that packing has left out
        self.classes = list(self.train.classes) or [str(label) for label in range(s.num_classes or 0)]
        if not self.classes:
            raise OutlastError(f"{place} does not say which classes there are; give their number with --num-classes")
        self.train.classes = self.val.classes = self.classes  # packed images compare their labels with these

    def _bytes(self, size: int | None) -> int:
        side = size or int(self.train[0].x.shape[0])
        return (len(self.train) + len(self.val)) * 3 * side * side

    def bad_names(self) -> list[str]:
        """Return the names of the images that this rank could not decode, or an empty list if images are packed."""
        return [] if self.packed else [*self.train.bad, *self.val.bad]

    def batch(self, piece: Any, epoch: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's images (b, 3, s, s) and labels (b,), on its device.

        The images are augmented if `epoch` is given. Validation passes None.
        """
        s = self._s
        x, y, index, aspect = piece  # (b, h, w, 3) bytes, (b,), (b,), (b,)
        if epoch is None:
            x = pixels.crop_resize(x, pixels.centre(aspect, s.val_crop), s.image_size)
        else:
            u = pixels.draws(s.seed, epoch, index, pixels.CROP + 1)
            boxes = pixels.boxes(u[:, : pixels.CROP], aspect, (s.min_crop, 1.0))
            x = pixels.crop_resize(x, boxes, s.image_size, mirrored=u[:, -1] < 0.5 if s.flip else None)
        return pixels.normalised(x, dtype=dtype, memory_format=s.memory_format), y


def stored(s: Settings, root: Path) -> int | None:
    """Return the side in pixels to which images are resized before cropping; None keeps their original size."""
    if s.stored_size is not None:
        return s.stored_size or None
    if (images.inside(root) / "val" / "val_annotations.txt").exists():  # tiny-imagenet: all are 64 x 64
        return None
    return s.image_size * 8 // 7  # 256 for 224, as is common


class Synthetic:
    """Synthetic images, generated once on the device, so that a measurement covers only the step."""

    place = "synthetic"
    bad = 0

    def __init__(self, s: Settings) -> None:
        self._s, self._pool = s, torch.empty(0)
        self.train = np.arange(s.synthetic_images)
        self.val = np.arange(max(1, s.synthetic_images // 20))
        self.classes = [str(label) for label in range(s.num_classes or 1000)]

    def bad_names(self) -> list[str]:
        """Return an empty list, because no image is decoded."""
        return []

    def batch(self, piece: Any, epoch: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return noise (b, 3, s, s), the same in every micro-batch, and labels (b,) that the model can memorize."""
        if not len(self._pool):
            draw = torch.Generator().manual_seed(self._s.seed)
            pool = torch.randn(self._s.piece, 3, self._s.image_size, self._s.image_size, generator=draw)
            self._pool = pool.to(piece.device, dtype, memory_format=self._s.memory_format)
        labels = torch.arange(len(piece), device=piece.device) % len(self.classes)
        return self._pool[: len(piece)], labels


Images = Pictures | Synthetic
