"""Classifies your own images (PNG, JPEG and others, or folders of them) with a network trained by `outlast.recipes.cifar10`.

    python -m outlast.recipes.classify out cat.png holiday/           # a run's output: model.pt, or else its newest checkpoint
    python -m outlast.recipes.classify cifar10.pth cat.png            # a file of weights
    python -m outlast.recipes.classify out holiday/ -o json | jq -r 'select(.classes[0].name == "dog") | .image'

Prints a line for each image with its most probable classes. Images are cropped to a central square and resized to 32 x 32 pixels.
The class names are those of the run's training data if these are known, and otherwise CIFAR-10's. If an image cannot be read, a
message is printed to stderr, and the exit code is 1.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.data.prepare import images
from outlast.job import contract
from outlast.recipes import cifar10
from outlast.recipes.shared import results
from outlast.training import device

CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
"""CIFAR-10's class names, in the order of the labels."""
BATCH = 100
"""Number of images per forward pass; arbitrary."""


def listed(names: Sequence[str]) -> Iterator[Path]:
    """Yield the given files, and all images below the given directories. Raises OutlastError for a path without images."""
    for path in map(Path, names):
        if path.is_dir():
            below = sorted(each for each in path.rglob("*") if each.name.lower().endswith(images.SUFFIXES) and each.is_file())
            if not below:
                raise OutlastError(f"{path} has no images ({', '.join(images.SUFFIXES)}); name another folder, or images")
            yield from below
        elif path.exists():
            yield path
        else:
            raise OutlastError(f"{path} does not exist; name images, or folders of images")


def read(paths: Sequence[Path], problems: list[str]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the path and the bytes (3, 32, 32) of each readable image. Appends a message to `problems` for any other."""
    square = images.Settings(size=32)
    for path in paths:
        try:
            pixels, _ = images.pixels(Path(), str(path), square)  # (32, 32, 3)
        except OutlastError as error:
            problems.append(str(error).partition("; ")[0])
        else:
            yield path, torch.tensor(pixels).permute(2, 0, 1)


def classes(weights: Path, given: Sequence[str] | None) -> list[str]:
    """Return the class names: `given`, else the names that the run has recorded, else CIFAR-10's. Raises OutlastError."""
    if given:
        if len(given) != len(CLASSES):
            raise OutlastError(
                f"--classes has {len(given)} names, and the network tells {len(CLASSES)} classes apart; give as many"
            )
        return list(given)
    output = weights if weights.is_dir() else weights.parent
    named = files.mapping(output / contract.PARAMETERS).get("classes")
    return [str(name) for name in named] if isinstance(named, list) and len(named) == len(CLASSES) else CLASSES


@torch.inference_mode()
def probable(model: nn.Module, x: torch.Tensor, names: Sequence[str], top: int) -> list[list[tuple[str, float]]]:
    """Return the `top` most probable classes of each image, with their probabilities. `x` is bytes, (b, 3, 32, 32)."""
    values, labels = model(cifar10.shown(x.to(device.computing()))).float().softmax(1).topk(top)  # (b, top) each
    return [
        [(names[label], value) for value, label in zip(*pair, strict=True)]
        for pair in zip(values.tolist(), labels.tolist(), strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", metavar="WEIGHTS", type=Path, help="output directory of a run, or a file of weights")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image, or folder of images")
    parser.add_argument("--checkpoint", default="", metavar="NAME", help="of an output directory: best, or a step")
    parser.add_argument(
        "--top", type=int, default=3, choices=range(1, len(CLASSES) + 1), metavar="N", help="classes an image (3)"
    )
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="their names, in the order of labels")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    where: Path = options.weights
    if options.checkpoint and where.is_file():
        raise OutlastError(
            f"--checkpoint {options.checkpoint} names one of an output directory, and {where} is a file; leave one of them out"
        )
    names = classes(where, options.classes)
    paths = list(listed(options.images))
    alone = "" if where.is_dir() else str(where)
    model, _ = cifar10.trained(where, alone, options.checkpoint)
    model.to(device.computing()).eval()

    problems: list[str] = []
    width = max(len(str(path)) for path in paths)
    some = read(paths, problems)
    while batch := [pair for _, pair in zip(range(BATCH), some, strict=False)]:
        answers = probable(model, torch.stack([x for _, x in batch]), names, options.top)
        for (path, _), likely in zip(batch, answers, strict=True):
            if options.output == "json":
                line = [{"name": name, "probability": round(value, 4)} for name, value in likely]
                print(json.dumps({"image": str(path), "classes": line}), flush=True)
            else:
                print(f"{path!s:<{width}}  " + "  ".join(f"{name} {100 * value:.1f} %" for name, value in likely), flush=True)
    for problem in problems:
        print(f"outlast: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    results.run(main)
