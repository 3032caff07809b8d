"""Images per second that a network receives from packed shards, beside the usual loop over a directory of JPEGs.

    python bench/decoding.py                # 5 repeats, some minutes
    python bench/decoding.py --quick        # 2 repeats of fewer images

Both give batches of float32 (b, 3, S, S): cut out at random (8 to 100 % of the area), resized to S x S, mirrored at random,
normalised. `folder` is the usual way, torchvision's transforms written out with Pillow: a `DataLoader` with a worker per core,
whose dataset opens a JPEG, converts it to RGB, cuts, resizes, mirrors, makes a tensor of it and normalises it. `packed` is
`outlast.recipes.pixels`: shards of bytes, made once by `pack`, in a `Stream`, augmented as batches. Scenarios: `photos`, JPEGs
of 500 x 375 as in ImageNet, packed at 256 x 256 and cut to 224 x 224; `tiny`, 64 x 64 as in tiny-imagenet.

Each trial is a process of its own; sides take turns (AB BA), each with all cores. Counted is the second epoch as a whole, with
workers that run already and files in memory; CPU time is that of the process and its workers. `pack` is timed too, from its call
to its end: it decodes every file once, with a process per core. Prints medians and ratios, and appends them to
results/<date>-decoding.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import recovery

SCENARIOS = {"photos": (500, 375, 256, 224, 600), "tiny": (64, 64, 64, 64, 6000)}
"""Width and height of the files, side of a packed image, side of the network's input, and number of images."""
BATCH = 64
FALL = 0.85
"""Amplitude ratio of each next finer noise, which gives JPEGs of about 100 kB, the mean of ImageNet's."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(draw: np.random.Generator, width: int, height: int) -> Any:
    """Return noise of many sizes, stronger when coarser, which compresses to about as many bytes as a photograph."""
    from PIL import Image

    total = np.zeros((height, width, 3), np.float32)
    cells, strength = 2, 90.0
    while cells < max(width, height):
        small = draw.normal(0, strength, (max(1, cells * height // width), cells, 3)).astype(np.float32)
        channels = [Image.fromarray(small[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
        total += np.stack([np.asarray(channel) for channel in channels], -1)
        cells, strength = cells * 2, strength * FALL
    return Image.fromarray(np.clip(total + 128, 0, 255).astype(np.uint8))


def write(root: Path, scenario: str, count: int) -> int:
    """Write the JPEGs of ten classes, and return their total size in bytes."""
    width, height = SCENARIOS[scenario][:2]
    draw, size = np.random.default_rng(0), 0
    for i in range(count + 20):
        part = "train" if i < count else "val"
        path = root / part / f"class-{i % 10}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(draw, width, height).save(path, quality=90)
        size += path.stat().st_size if part == "train" else 0
    return size


class Folder:
    """Dataset like torchvision's ImageFolder with the usual transforms, written with Pillow."""

    def __init__(self, root: Path, size: int) -> None:
        self.files = [(path, label) for label, each in enumerate(sorted(root.iterdir())) for path in sorted(each.iterdir())]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch
        from PIL import Image

        path, label = self.files[index]
        with path.open("rb") as file:
            image = Image.open(file).convert("RGB")
        width, height = image.size
        left, top, w, h = 0, 0, width, height
        for _ in range(10):
            area = width * height * float(torch.empty(1).uniform_(0.08, 1.0))
            ratio = float(torch.exp(torch.empty(1).uniform_(float(np.log(3 / 4)), float(np.log(4 / 3)))))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                top, left = int(torch.randint(0, height - h + 1, (1,))), int(torch.randint(0, width - w + 1, (1,)))
                break
        else:
            left, top, w, h = 0, 0, width, height
        image = image.crop((left, top, left + w, top + h)).resize((self.size, self.size), Image.Resampling.BILINEAR)
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return x.sub_(torch.tensor(MEAN)[:, None, None]).div_(torch.tensor(STD)[:, None, None]), label


def folder(root: Path, scenario: str) -> Iterator[tuple[Any, bool]]:
    """Yield the batches of the usual loop, and whether an epoch ends with each."""
    from torch.utils.data import DataLoader

    cores = len(os.sched_getaffinity(0))
    dataset: Any = Folder(root / "train", SCENARIOS[scenario][3])
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=cores, persistent_workers=True)
    for _ in range(2):
        for number, (x, _) in enumerate(loader, start=1):
            yield x, number == len(loader)


def packed(place: Path, scenario: str) -> Iterator[tuple[Any, bool]]:
    """Yield our batches, and whether an epoch ends with each."""
    from outlast.recipes import pixels
    from outlast.training import Stream

    stream = Stream(pixels.packed(place), BATCH, seed=0, epochs=2)
    for batch in stream:
        for (x, _, index, aspect), _ in batch.split():
            u = pixels.draws(0, batch.epoch, index, pixels.CROP + 1)
            boxes = pixels.boxes(u[:, : pixels.CROP], aspect)
            x = pixels.crop_resize(x, boxes, SCENARIOS[scenario][3], mirrored=u[:, -1] < 0.5)
            yield pixels.normalised(x, MEAN, STD), batch.ends_epoch


def trial(side: str, source: Path, place: Path, scenario: str) -> dict[str, float]:
    """Return the images per second of a side, measured in this process."""
    import torch

    if side == "pack":
        from outlast.recipes import pixels

        shutil.rmtree(place, ignore_errors=True)
        for record in place.parent.glob(f".{place.name}.*"):
            record.unlink()
        began = time.perf_counter()
        cores = len(os.sched_getaffinity(0))
        made = pixels.packed(pixels.pack(source, place, size=SCENARIOS[scenario][2], processes=cores))
        count = sum(part.samples for part in made.manifest.parts.values())
        return {"rate": count / (time.perf_counter() - began), "cpu_ms": 0.0}
    began, used, count, epochs, size = 0.0, 0.0, 0, 0, SCENARIOS[scenario][3]
    for x, ends in (folder if side == "folder" else packed)(source if side == "folder" else place, scenario):
        assert (x.dtype, tuple(x.shape[1:])) == (torch.float32, (3, size, size))
        count += len(x)
        if ends and not epochs:
            began, used, count, epochs = time.perf_counter(), cpu_s(), 0, 1
        last = time.perf_counter(), cpu_s()  # workers end after the last batch
    return {"rate": count / (last[0] - began), "cpu_ms": 1e3 * (last[1] - used) / count}


def cpu_s() -> float:
    """Return the CPU seconds of this process and its workers so far."""
    import psutil

    us = psutil.Process()
    return sum(times.user + times.system for times in (each.cpu_times() for each in (us, *us.children(recursive=True))))


def apart(side: str, source: Path, place: Path, scenario: str) -> tuple[float, float]:
    """Return images per second and CPU milliseconds per image, from `trial` in a separate process."""
    command = [sys.executable, __file__, "--trial", json.dumps([side, str(source), str(place), scenario])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} ended with {done.returncode}:\n{done.stderr}")
    result = json.loads(done.stdout)
    return float(result["rate"]), float(result["cpu_ms"])


def about() -> str:
    """Return the machine and versions, in a line."""
    from importlib.metadata import version

    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = ", ".join(f"{name} {version(name)}" for name in ("outlast", "torch", "pillow"))
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model[1] if model else 'CPU'}; Python {platform.python_version()}, {versions}"
    )


def row(scenario: str, trials: dict[str, list[tuple[float, float]]], size: float) -> str:
    """Return a row of the table."""
    ratios = sorted(ours / theirs for (ours, _), (theirs, _) in zip(trials["packed"], trials["folder"], strict=True))
    of, to, pack = (statistics.median(rate for rate, _ in trials[side]) for side in ("folder", "packed", "pack"))
    of_ms, to_ms = (statistics.median(ms for _, ms in trials[side]) for side in ("folder", "packed"))
    spread = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} – {ratios[-1]:.1f})"
    cpu = f"{of_ms:.2f} | {to_ms:.2f} | {of_ms / to_ms:.1f}"
    return f"| {scenario} | {size / 1e3:.1f} | {of:,.0f} | {to:,.0f} | {spread} | {cpu} | {pack:,.0f} |"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 repeats of a third of the images")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only these (may be repeated)")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trial:
        side, source, place, scenario = json.loads(args.trial)
        print(json.dumps(trial(side, Path(source), Path(place), scenario)))
        return
    repeats, load = 2 if args.quick else args.repeats, os.getloadavg()[0]
    directory = Path(tempfile.mkdtemp(prefix="outlast-bench-decoding-"))
    rows = []
    try:
        for scenario in args.scenario or SCENARIOS:
            count = SCENARIOS[scenario][4] // (3 if args.quick else 1)
            source, place = directory / scenario, directory / f"{scenario}-packed"
            size = write(source, scenario, count)
            sides = ["folder", "packed", "pack"]
            apart("pack", source, place, scenario)
            trials: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for repeat in range(repeats):
                for side in sides if repeat % 2 == 0 else reversed(sides):
                    trials[side].append(apart(side, source, place, scenario))
                    print(f"{repeat + 1}/{repeats} {scenario} {side}: {trials[side][-1][0]:,.0f} images/s", flush=True)
            rows.append(row(scenario, trials, size / count))
    finally:
        shutil.rmtree(directory, ignore_errors=True)

    columns = [
        "scenario",
        "kB a file",
        "folder: images/s",
        "packed",
        "packed / folder",
        "folder: CPU ms an image",
        "packed",
        "ratio",
    ]
    head = f"| {' | '.join([*columns, 'pack: images/s'])} |"
    report = [f"## {time.strftime('%Y-%m-%d %H:%M')}", "", f"{about()}. Load before: {load:.2f}."]
    report += [
        f"Batches of {BATCH}; medians of {repeats} repeats (range of the ratios).",
        "",
        head,
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    recovery.publish("decoding", "Decoding", report)


if __name__ == "__main__":
    main()
