"""CIFAR-10's Python batches: `data_batch_1` ... `data_batch_5`, `test_batch` and `batches.meta`, all pickled dicts.

Recipes read them with `train` and `test`; `data.digits` writes other images in the same format. Loading a pickle can run any
code, so the unpickler here accepts only numpy arrays and plain values.

Format: https://www.cs.toronto.edu/~kriz/cifar.html, archive `cifar-10-python.tar.gz`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outlast.base.errors import OutlastError
from outlast.data import dataset_directory
from outlast.job import contract

TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
META = "batches.meta"
CLASSES = 10
SHAPE = (3, 32, 32)
"""Shape of an image: channels, rows, columns. A row of `data` is an image in this order."""


class NotCifar(OutlastError):
    """Raised if the directory does not contain CIFAR-10. The exit code means that a restart cannot help."""

    exit_code = contract.Exit.MISCONFIGURED

    def __init__(self, directory: Path | str, reason: str) -> None:
        remedy = "unpack cifar-10-python.tar.gz there, or run: outlast data get cifar10 --to DIR (or digits)"
        super().__init__(f"{directory} is not CIFAR-10: {reason}; {remedy}")


@dataclasses.dataclass(frozen=True)
class Images:
    """One part of the dataset, in the order of its files."""

    x: NDArray[np.uint8]
    """Pixels, (n, 3, 32, 32)."""
    y: NDArray[np.int64]
    """Labels, (n,), from 0 to 9."""
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.y)


def train(directory: Path) -> Images:
    """Return the training images in `directory` or its `cifar-10-batches-py`. Raises NotCifar."""
    return read(directory, TRAIN)


def test(directory: Path) -> Images:
    """Return the test images in `directory` or its `cifar-10-batches-py`. Raises NotCifar."""
    return read(directory, (TEST,))


def write(directory: Path, file: str, x: NDArray[np.uint8], y: Sequence[int], title: str) -> None:
    """Write a batch file of images `x`, (n, 3, 32, 32), with labels `y`."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    _dump(directory / file, {b"batch_label": title.encode(), b"labels": [int(i) for i in y], b"data": rows})


def write_meta(directory: Path, names: Sequence[str], per_batch: int) -> None:
    """Write `batches.meta`, which lists the names of the ten classes."""
    label_names = [name.encode() for name in names]
    _dump(directory / META, {b"num_cases_per_batch": per_batch, b"label_names": label_names, b"num_vis": 3072})


def _dump(path: Path, content: Mapping[bytes, Any]) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=4)  # bytes need protocol 3; many readers predate numpy's format for 5
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path, files: Sequence[str]) -> Images:
    """Return the images of the given batch files, in order. Raises NotCifar."""
    below = directory / "cifar-10-batches-py"  # the directory in the archive
    root = below if below.is_dir() and not (directory / META).exists() else directory
    if not root.is_dir():
        raise NotCifar(root, "there is no such directory")
    if dataset_directory.incomplete(directory):
        raise NotCifar(directory, "its download was interrupted")
    missing = [file for file in (META, *files) if not (root / file).is_file()]
    if missing:
        raise NotCifar(root, f"it has no {' and no '.join(missing)}")

    names = _load(root, META).get(b"label_names")
    if not isinstance(names, list) or len(names) != CLASSES:
        raise NotCifar(root, f"label_names in {META} is not a list of {CLASSES} names")
    parts = [_batch(root, file) for file in files]
    return Images(
        x=np.concatenate([x for x, _ in parts]),  # (n, 3, 32, 32)
        y=np.concatenate([y for _, y in parts]),  # (n,)
        names=tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names),
    )


def _batch(root: Path, file: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _load(root, file)
    data, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != np.prod(SHAPE):
        raise NotCifar(root, f"data in {file} is not an array of uint8 of shape (n, 3072)")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise NotCifar(root, f"labels in {file} is not a list with a label for each of {len(data)} images")
    if wrong := [label for label in labels if type(label) is not int or not 0 <= label < CLASSES]:
        raise NotCifar(root, f"{file} has a label {wrong[0]!r}, and labels are 0 to {CLASSES - 1}")
    return data.reshape(-1, *SHAPE), np.array(labels, dtype=np.int64)


def _load(root: Path, file: str) -> dict[bytes, Any]:
    with (root / file).open("rb") as opened:
        try:
            content = _Unpickler(opened).load()
        except OSError:
            raise  # an I/O error, not a damaged file
        except _Disallowed as error:
            raise NotCifar(root, f"{file} {error}") from error
        except Exception as error:  # the unpickler may raise anything on invalid bytes
            raise NotCifar(root, f"{file} is damaged or not a pickle ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise NotCifar(root, f"{file} holds a {type(content).__name__}, not a dict")
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}


class _Disallowed(Exception):
    """Raised if the pickle refers to a name outside the allow-list."""


class _Unpickler(pickle.Unpickler):
    """Loads only numpy arrays, bytes, text, numbers, lists and dicts."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")  # the original files come from Python 2, whose str is bytes

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module.replace("numpy.core.", "numpy._core."), name))  # numpy 1's name and numpy 2's
        if allowed is None:
            raise _Disallowed(f"would run {module}.{name} when it is opened; only numpy arrays are allowed")
        return allowed


def _empty_array(*_: object) -> NDArray[np.uint8]:
    """Stand in for numpy's `_reconstruct`. The array's shape, type and bytes follow in the pickle."""
    return np.empty(0, np.uint8)


def _array_of_buffer(buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> NDArray[Any]:
    if order not in ("C", "F"):
        raise _Disallowed(f"has an array of order {order!r}")
    return np.frombuffer(buffer, dtype).reshape(shape, order="F" if order == "F" else "C")


class _Name:
    """Placeholder for a class that a pickle may name but not call."""


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | _Name] = {
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): _Name(),  # the first argument of _reconstruct
    ("numpy", "dtype"): np.dtype,
    ("numpy._core.numeric", "_frombuffer"): _array_of_buffer,  # protocol 5
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes in protocols 0 to 2, written by Python 3
}
