"""Throughput of `outlast.recipes.cifar10` in images per second, beside a plain loop with the EKS workshop's data handling.

    python bench/cifar10.py            # 3 runs of each, some minutes
    python bench/cifar10.py --quick    # one run of each, fewer images, a minute or two

The plain loop is what the workshop's script does in one process: images as a list of arrays, made one float64 array, then a
float32 tensor; a TensorDataset and a DataLoader with its default of 32 processes, with one per core, and with none; the same
network layer by layer (ReLU before the pool), the same batch, SGD, float32, no DDP. Ours is the recipe as it is, augmentation,
checkpoints and metrics included: with its defaults (bfloat16 where that is fast), in float32, and with the workshop's setting.

All have as many threads, work on the same images in the same batches, and take turns. A speed is that of whole epochs but the
first, the start of loader processes included: the time from the last line of the log of one epoch to that of the next, as they
arrive here. Images are random, in CIFAR-10's files. Prints medians and ratios, and appends them to results/<date>-cifar10.md.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gpt import HERE, machine

BATCH, EVERY = 128, 5
LINE = re.compile(r"\[(\d+), +(\d+)\] loss")


def plain(directory: Path, epochs: int, workers: int) -> None:
    """Train with the plain loop."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from outlast.data import cifar

    def block(i: int, m: int, o: int) -> list[nn.Module]:
        first, second = nn.Conv2d(i, m, 3, padding=1), nn.Conv2d(m, o, 3, padding=1)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(o)]

    found = cifar.train(directory)
    images = list(found.x)
    x = torch.tensor(np.array(images, dtype=np.float64) / 255, dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, torch.tensor(found.y)), batch_size=BATCH, shuffle=True, num_workers=workers)
    body = [*block(3, 32, 64), *block(64, 128, 128), *block(128, 256, 256)]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    for epoch in range(epochs):
        running = 0.0
        for i, (x_, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x_), y)
            loss.backward()
            optimizer.step()
            running += loss.item()
            if i % EVERY == 0:
                print(f"[{epoch + 1}, {i:5d}] loss: {running / EVERY:.3f}", flush=True)
                running = 0.0


def speed(command: list[str], threads: str, images: int) -> float:
    """Return images per second over all epochs of a run but the first. `images`: per epoch, a multiple of EVERY steps."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OUTLAST_OUTPUT": directory}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout
            said = []
            for line in process.stdout:
                said.append(line)
                if (match := LINE.match(line)) and int(match[2]) == images // BATCH:
                    ends.append(time.perf_counter())
    if process.returncode or len(ends) < 2:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(said)[-3000:]}")
    return images * (len(ends) - 1) / (ends[-1] - ends[0])


def write(directory: Path, images: int) -> None:
    """Write random images in CIFAR-10's files."""
    from outlast.data import cifar

    draw = np.random.default_rng(0)
    for file in (*cifar.TRAIN, cifar.TEST):
        x = draw.integers(0, 256, (images // 5, 3, 32, 32), dtype=np.uint8)
        cifar.write(directory, file, x, draw.integers(0, 10, len(x)).tolist(), file)
    cifar.write_meta(directory, [f"class {i}" for i in range(10)], images // 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of each, fewer images")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--threads", default=str(os.cpu_count()), help="OMP_NUM_THREADS of every process")
    parser.add_argument("--plain", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        directory, epochs, workers = options.plain
        plain(Path(directory), int(epochs), int(workers))
        return
    images, epochs, repeats = (1280, 2, 1) if options.quick else (6400, 2, options.repeats)
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), images)

        def loop(workers: int) -> list[str]:
            return [sys.executable, "-W", "ignore", __file__, "--plain", directory, str(epochs), str(workers)]

        def ours(*flags: str) -> list[str]:
            flags = (f"--epochs={epochs}", f"--batch={BATCH}", f"--log-every={EVERY}", *flags)
            return [sys.executable, "-m", "outlast.recipes.cifar10", f"--data={directory}", *flags]

        turns = {
            "plain loop, 32 loader processes (its default)": loop(32),
            f"plain loop, {cores} loader processes": loop(cores),
            "plain loop, no loader process": loop(0),
            "outlast, its default": ours(),
            "outlast, float32": ours("--dtype=float32"),
            "outlast, the workshop's setting (float32)": ours("--setting=workshop"),
        }
        found: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(repeats):
            for name, command in list(turns.items())[:: 1 if number % 2 == 0 else -1]:
                found[name].append(speed(command, options.threads, images))
    middle = {name: statistics.median(each) for name, each in found.items()}
    default, sane = (middle[name] for name in list(turns)[:2])
    lines = [f"{images:,} images, batch {BATCH}, {epochs} epochs, {repeats} runs of each.", ""]
    lines += ["| system | images/s: median (range) | / 32 loader processes | / one a core |", "|---|---|---|---|"]
    for name, each in found.items():
        cell = f"{middle[name]:,.0f} ({min(each):,.0f} – {max(each):,.0f})"
        lines.append(f"| {name} | {cell} | {middle[name] / default:.2f} | {middle[name] / sane:.2f} |")
    text = f"\n## {time.strftime('%H:%M')}\n\n{machine(options.threads)}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if not options.quick:
        with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-cifar10.md").open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
