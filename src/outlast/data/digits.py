"""scikit-learn's handwritten digits as CIFAR-10 batch files: real images for a first run, without a download.

1,797 digits of 8×8 pixels in 17 shades (E. Alpaydin and C. Kaynak, 1998; part of scikit-learn's package) become 32×32×3 images:
1,442 for training and 355 held out, the same images on every machine. `outlast data get digits --to DIR` calls `write`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outlast.base.errors import importing
from outlast.data import cifar

SOURCE = "scikit-learn"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write(directory: Path) -> None:
    """Write the digits to an empty directory. Raises OutlastError if scikit-learn is missing, and OSError."""
    x, y = _digits()
    held_out = _count(y) % 5 == 4  # an equal share of every class; random numbers could differ between library versions
    train_x, train_y = x[~held_out], y[~held_out]
    batch = _count(train_y) % 5  # every batch has its share of every class
    for i, file in enumerate(cifar.TRAIN):
        cifar.write(directory, file, train_x[batch == i], train_y[batch == i].tolist(), f"training batch {i + 1} of 5")
    cifar.write(directory, cifar.TEST, x[held_out], y[held_out].tolist(), "testing batch 1 of 1")
    cifar.write_meta(directory, NAMES, per_batch=len(train_x) // 5)


def _digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all digits, uint8 (1797, 3, 32, 32), and their labels, int64 (1797,)."""
    with importing("the data set of digits", "digits"):
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, import-not-found, unused-ignore]
    small, y = load_digits(return_X_y=True)  # (1797, 64) from 0 to 16, (1797,)
    grow = _interpolation(8, 32)  # (32, 8)
    grey = grow @ small.reshape(-1, 8, 8) @ grow.T * (255 / 16)  # (1797, 32, 32)
    x = np.repeat(np.rint(grey).astype(np.uint8)[:, None], 3, axis=1)  # (1797, 3, 32, 32)
    return x, y.astype(np.int64)


def _interpolation(n: int, m: int) -> NDArray[np.float64]:
    """Return the matrix (m, n) that stretches a line of n pixels to m by linear interpolation."""
    centres = np.clip((np.arange(m) + 0.5) * n / m - 0.5, 0, n - 1)
    weights: NDArray[np.float64] = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(n)[None, :]))
    return weights


def _count(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each label, the number of equal labels before it, (n,)."""
    count = np.zeros(len(y), dtype=np.int64)
    for label in np.unique(y):
        count[y == label] = np.arange(np.count_nonzero(y == label))
    return count
