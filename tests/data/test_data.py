"""Datasets: what is read is checked, what is written is whole, and a pickle cannot run code."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast.base.errors import OutlastError
from outlast.data import cifar, digits

NAMES = [f"class {i}" for i in range(10)]
PIXELS = "data in data_batch_3 is not an array of uint8 of shape (n, 3072)"
LABELS = "labels in data_batch_3 is not a list with a label for each of 1 images"


def some_images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def a_dataset(directory: Path, per_file: int = 4) -> Path:
    directory.mkdir(parents=True)
    for i, file in enumerate((*cifar.TRAIN, cifar.TEST)):
        cifar.write(directory, file, some_images(per_file, seed=i), [(i + j) % 10 for j in range(per_file)], file)
    cifar.write_meta(directory, NAMES, per_batch=per_file)
    return directory


def replace(directory: Path, file: str, content: Any, protocol: int = 4) -> None:
    (directory / file).write_bytes(pickle.dumps(content, protocol=protocol))


def refusal(directory: Path) -> str:
    with pytest.raises(cifar.NotCifar) as refused:
        cifar.train(directory)
    assert refused.value.exit_code == 78
    message = str(refused.value)
    assert message.startswith(f"{directory} is not CIFAR-10: ")
    assert "\n" not in message
    return message.removeprefix(f"{directory} is not CIFAR-10: ").split("; unpack")[0]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    root = a_dataset(tmp_path / "data", per_file=4)
    train, test = cifar.train(root), cifar.test(root)
    assert train.x.dtype == np.uint8
    np.testing.assert_array_equal(train.x, np.concatenate([some_images(4, seed=i) for i in range(5)]))
    assert train.y.tolist() == [(i + j) % 10 for i in range(5) for j in range(4)]
    assert (len(train), len(test), train.names) == (20, 4, tuple(NAMES))


def test_the_directory_that_the_archive_unpacks_to_is_found(tmp_path: Path) -> None:
    a_dataset(tmp_path / "cifar-10-batches-py")
    assert len(cifar.train(tmp_path)) == 20


@pytest.mark.parametrize("protocol", range(6))
def test_a_batch_in_any_pickle_protocol_of_python_3_is_read(tmp_path: Path, protocol: int) -> None:
    root = a_dataset(tmp_path / "data")
    x = some_images(3, seed=9).reshape(3, -1)
    replace(root, "data_batch_1", {b"labels": [1, 2, 3], b"data": x}, protocol)
    np.testing.assert_array_equal(cifar.train(root).x[:3].reshape(3, -1), x)


def test_a_batch_pickled_by_python_2_is_read(tmp_path: Path) -> None:
    root = a_dataset(tmp_path / "data")
    pixels = bytes(range(256)) * 12
    # the opcodes of the original archive: text keys as Python 2 str, the array through numpy.core.multiarray._reconstruct
    original = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T\x00\x0c\x00\x00" + pixels + b"tbU\x06labelsq\x09]q\x0aK\x06au."
    )
    (root / "data_batch_1").write_bytes(original)
    train = cifar.train(root)
    assert train.x[0].tobytes() == pixels
    assert train.y[0] == 6


class Calls:
    """Pickles as a call of `function(*args)`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    root = a_dataset(tmp_path / "data")
    witness = tmp_path / "ran"
    replace(root, "data_batch_2", {b"data": Calls(Path.touch, witness)}, protocol)
    assert "when it is opened; only numpy arrays are allowed" in refusal(root)
    replace(root, "data_batch_2", {b"data": Calls(eval, f"open({str(witness)!r}, 'w')")}, protocol)
    assert "data_batch_2 would run" in refusal(root)
    assert not witness.exists()


def test_an_array_that_claims_more_memory_than_it_brings_is_refused(tmp_path: Path) -> None:
    root = a_dataset(tmp_path / "data")
    replace(root, "data_batch_1", {b"data": Calls(np.ndarray, (1 << 40, 3072))})
    assert refusal(root).startswith("data_batch_1 is damaged or not a pickle")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({b"labels": [1]}, PIXELS),
        ({b"labels": [1], b"data": np.zeros((1, 3072))}, PIXELS),
        ({b"labels": [1], b"data": np.zeros((1, 784), np.uint8)}, PIXELS),
        ({b"fine_labels": [1], b"data": np.zeros((1, 3072), np.uint8)}, LABELS),
        ({b"labels": [1, 2], b"data": np.zeros((1, 3072), np.uint8)}, LABELS),
        ({b"labels": [10], b"data": np.zeros((1, 3072), np.uint8)}, "data_batch_3 has a label 10, and labels are 0 to 9"),
        ([1, 2], "data_batch_3 holds a list, not a dict"),
    ],
)
def test_a_batch_of_the_wrong_form_is_refused_in_one_sentence(tmp_path: Path, content: Any, reason: str) -> None:
    root = a_dataset(tmp_path / "data")
    replace(root, "data_batch_3", content)
    assert refusal(root) == reason


def test_a_directory_that_is_not_cifar_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == "there is no such directory"
    assert refusal(tmp_path) == f"it has no batches.meta and no {' and no '.join(cifar.TRAIN)}"
    (tmp_path / ".outlast-get").mkdir()
    assert refusal(tmp_path) == "its download was interrupted"
    root = a_dataset(tmp_path / "data")
    replace(root, "batches.meta", {b"label_names": [b"cat"]})
    assert refusal(root) == "label_names in batches.meta is not a list of 10 names"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_torn_batch_is_refused(tmp_path: Path, share: float) -> None:
    root = a_dataset(tmp_path / "data")
    whole = (root / "data_batch_5").read_bytes()
    (root / "data_batch_5").write_bytes(whole[: int(len(whole) * share)])
    assert refusal(root).startswith("data_batch_5 is damaged or not a pickle")


def test_the_digits_are_1442_training_and_355_test_images_with_every_class_in_every_file(
    tmp_path: Path, outlast: Callable[..., tuple[int, str, str]]
) -> None:
    directory = tmp_path / "digits"
    for verb in ("got", "already there:"):
        assert outlast("data", "get", "digits", "--to", directory)[1].startswith(f"{verb} digits: 7 files, ")
    assert outlast("data", "get", "digit")[2].startswith("Error: no dataset digit; did you mean digits? there are ")
    train, test = cifar.train(directory), cifar.test(directory)
    assert (train.x.shape, test.x.shape) == ((1442, 3, 32, 32), (355, 3, 32, 32))
    assert train.names == digits.NAMES
    assert np.bincount(test.y).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    first = cifar.read(directory, ["data_batch_1"])
    assert np.bincount(first.y).min() >= 28
    assert {image.tobytes() for image in train.x}.isdisjoint(image.tobytes() for image in test.x)
    assert 0 == train.x.min() < train.x.max() == 255


def test_without_scikit_learn_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OutlastError, match=r"needs the library sklearn; run: pip install 'outlast\[digits\]'"):
        digits.write(tmp_path)
