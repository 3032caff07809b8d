"""scikit-learn's handwritten digits as CIFAR-10 batch files: real images for a first run, without a download.

1,797 digits of 8×8 pixels in 16 shades (E. Alpaydin and C. Kaynak, 1998; part of scikit-learn's package) become 32×32×3 images:
1,442 to train on and 355 held out, the same images on every machine. `outlast data get digits --to DIR` calls `write`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outlast.base import files
from outlast.base.errors import OutlastError, importing
from outlast.data import cifar

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of `write`. `str` returns the sentence to print."""

    directory: Path
    train: int
    test: int
    written: bool
    """True if this call wrote the digits; False if they existed already."""

    def __str__(self) -> str:
        verb = "wrote" if self.written else "already there:"
        return f"{verb} {self.train} training and {self.test} test images of 10 digits in {self.directory}"


def write(directory: Path | str) -> Summary:
    """Write the digits to `directory`, all or nothing; do nothing if they exist.

    Raises OutlastError if the directory contains something else, if it cannot be written, or if scikit-learn is missing.
    """
    directory = Path(directory).absolute()
    try:
        return _existing(directory) or _write(directory)
    except OSError as error:
        raise OutlastError(
            f"cannot write the digits to {directory}: {error.strerror or error}; choose another directory"
        ) from error


def fill(directory: Path) -> tuple[int, int]:
    """Write the digits to an empty directory. Returns the numbers of training and test images."""
    x, y = _digits()
    held_out = _count(y) % 5 == 4  # an equal share of every class, without random numbers that a library could change
    train_x, train_y = x[~held_out], y[~held_out]
    batch = _count(train_y) % 5  # every batch has its share of every class
    for i, file in enumerate(cifar.TRAIN):
        cifar.write(directory, file, train_x[batch == i], train_y[batch == i].tolist(), f"training batch {i + 1} of 5")
    cifar.write(directory, cifar.TEST, x[held_out], y[held_out].tolist(), "testing batch 1 of 1")
    cifar.write_meta(directory, NAMES, per_batch=len(train_x) // 5)
    return len(train_x), int(held_out.sum())


def _write(directory: Path) -> Summary:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as beside:
        made = Path(beside) / "batches"
        made.mkdir()
        train, test = fill(made)
        files.sync(made)
        try:
            made.rename(directory)  # replaces an empty directory, never a full one
        except OSError:
            if existing := _existing(directory):  # another process was faster
                return existing
            raise
    files.sync(directory.parent)
    return Summary(directory, train=train, test=test, written=True)


def _existing(directory: Path) -> Summary | None:
    """Return the summary of the digits in `directory`, or None if the directory is missing or empty.

    Raises OutlastError if the directory contains something else.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    try:
        train, test = cifar.train(directory), cifar.test(directory)
    except cifar.NotCifar as error:
        raise OutlastError(f"{directory} holds other files; choose a new or an empty directory") from error
    if train.names != NAMES:
        raise OutlastError(f"{directory} holds other images ({', '.join(train.names)}); choose a new or an empty directory")
    return Summary(directory, len(train), len(test), written=False)


def _digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all digits, uint8 (1797, 3, 32, 32), and their labels, int64 (1797,)."""
    with importing("the data set of digits", "digits"):
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, import-not-found, unused-ignore]
    small, y = load_digits(return_X_y=True)  # (1797, 64) in 0 ... 16, (1797,)
    grow = _interpolation(8, 32)  # (32, 8)
    grey = grow @ small.reshape(-1, 8, 8) @ grow.T * (255 / 16)  # (1797, 32, 32)
    x = np.repeat(np.rint(grey).astype(np.uint8)[:, None], 3, axis=1)  # (1797, 3, 32, 32)
    return x, y.astype(np.int64)


def _interpolation(n: int, m: int) -> NDArray[np.float64]:
    """Return the matrix (m, n) that stretches a line of n pixels to m pixels, bilinear between the pixels' centres."""
    centres = np.clip((np.arange(m) + 0.5) * n / m - 0.5, 0, n - 1)
    weights: NDArray[np.float64] = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(n)[None, :]))
    return weights


def _count(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each label, the number of equal labels before it, (n,)."""
    count = np.zeros(len(y), dtype=np.int64)
    for label in np.unique(y):
        count[y == label] = np.arange(np.count_nonzero(y == label))
    return count
