"""The ImageNet recipe in whole runs: killed, resized, and what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

import disturbances
import textures
from outlast.recipes import imagenet, imagenet_model

STEP = ("--image-size=32", "--stored-size=0", "--min-crop=0.3", "--print-freq=1")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))


def narrow(argv: list[str]) -> None:
    """The recipe with ResNets of a quarter of the channels, in a process of its own."""
    imagenet_model.WIDTH = 16
    imagenet.main(argv)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_20_times_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The last micro-batch of each epoch is short; an epoch ends with a save, others come between."""
    data = textures.write(tmp_path / "set", {"train": 7, "val": 2}, size=36)  # 70 images: 9 steps, the last of 6
    argv = [str(data), *STEP, "-b=8", "--microbatch=4", "--epochs=5", "--ema-decay=0.9", "--lr=1"]
    disturbances.killed_20_times(narrow, argv, tmp_path, logs=("loss", "train_acc1", "acc1", "val_loss"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resized_each_image_is_seen_once_and_the_loss_is_the_same(tmp_path: Path) -> None:
    data = textures.write(tmp_path / "set", {"train": 7, "val": 3}, size=36)
    argv = [str(data), *STEP, "-b=16", "--microbatch=4", "--epochs=2", "--lr=0.1", "--dtype=float32"]
    disturbances.resized(narrow, argv, tmp_path, rel=1e-2, logs=("loss", "val_loss"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resnet18_tells_ten_textures_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / "out"))
    data = textures.write(tmp_path / "set", {"train": 64, "val": 20}, size=40)
    crops = ["--image-size=32", "--stored-size=0", "--min-crop=0.6", "--val-crop=0.9"]
    imagenet.main([str(data), *crops, "-b=16", "--microbatch=16", "--epochs=12", "--lr=0.4", "--label-smoothing=0"])
    assert disturbances.final(tmp_path / "out")["acc1"] >= 95
