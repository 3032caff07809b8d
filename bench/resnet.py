"""Speed of `outlast.recipes.imagenet` on synthetic images, beside a plain loop with transformers' ResNet of the same shape.

    pip install transformers
    python bench/resnet.py [--quick]       # on the CPU
    python bench/resnet.py --gpu           # on one GPU

The plain loop is that of the library's documentation: the model computes its loss, float32, SGD with momentum, images in memory.
Its tuned row has what a user can add by hand: bfloat16 where the machine is faster so, channels last. Ours is the recipe with
--synthetic, as it is by default, and once with the plain loop's type and memory format. All have the same batch, are processes of
their own, in turn, with as many threads, and read the loss of every step. A step is the time between two lines as they arrive
here, so nobody's own clock counts; the first fifth of a run does not count. Prints medians and ratios, and appends them to
results/<date>-resnet.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt import machine

HERE = Path(__file__).parent
ITERATION = re.compile(r"epoch: \d+, iteration: (\d+),")
SETTLED = 0.2
"""Fraction of a run that does not count, because kernels are chosen and memory is allocated."""
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of the training."""

    arch: str = "resnet50"
    size: int = 224
    batch: int = 32
    steps: int = 15
    repeats: int = 3


QUICK, GPU = Plan(size=64, batch=16, steps=10, repeats=1), Plan(batch=128, steps=100)


def plain(plan: Plan, *, tuned: bool) -> None:
    """Run the plain loop. Called in a separate process."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    from outlast.training import device

    where = device.computing()
    basic = plan.arch in ("resnet18", "resnet34")
    config = ResNetConfig(
        depths=list(DEPTHS[plan.arch]), hidden_sizes=[(64 if basic else 256) * 2**stage for stage in range(4)],
        layer_type="basic" if basic else "bottleneck", num_labels=1000,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ResNetForImageClassification(config).to(where).train()
    x, y = torch.randn(plan.batch, 3, plan.size, plan.size, device=where), torch.arange(plan.batch, device=where)
    lower = tuned and device.of(where).bfloat16()
    if tuned:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for step in range(plan.steps):
        with torch.autocast(where.type, torch.bfloat16, enabled=lower):
            loss = model(pixel_values=x, labels=y).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"epoch: 0, iteration: {step}, loss: {loss.item():.4f}", flush=True)


def shown(command: Sequence[object], env: Mapping[str, str], cwd: Path) -> list[float]:
    """Run a training to its end, and return the seconds of the steps that count."""
    times, said = [], []
    with subprocess.Popen(
        list(map(str, command)), cwd=cwd, env={**os.environ, "PYTHONUNBUFFERED": "1", **env}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            said.append(line)
            if ITERATION.match(line):
                times.append(time.perf_counter())
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{''.join(said[-20:])}")
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return seconds[int(len(seconds) * SETTLED) :]


def commands(plan: Plan, gpu: bool) -> dict[str, list[object]]:
    """Return the command of each system."""
    again: list[object] = [sys.executable, "-W", "ignore", __file__, *(["--gpu"] if gpu else [])]
    again += [f"--{name}={value}" for name, value in dataclasses.asdict(plan).items()]
    flags = [
        "--synthetic", f"--arch={plan.arch}", f"--image-size={plan.size}", f"-b{plan.batch}", f"--microbatch={plan.batch}", "-p1",
        f"--synthetic-images={plan.batch * plan.steps}", "--epochs=1", "--output_dir=out",
    ]  # fmt: skip
    ours: list[object] = [sys.executable, "-m", "outlast.recipes.imagenet", *flags]
    return {
        "plain": [*again, "--plain=plain"],
        "plain, tuned": [*again, "--plain=tuned"],
        "outlast, float32 as plain": [*ours, "--dtype=float32", "--no-channels-last"],
        "outlast": ours,
    }


def table(plan: Plan, runs: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Return a table with the medians over the runs of each system, and the ratio to the plain loop."""
    each = {name: [statistics.median(run) for run in several] for name, several in runs.items()}
    base = statistics.median(each["plain"])
    lines = ["| system | images/s: median (range) | a step | / plain |", "|---|---|---|---|"]
    for name, seconds in each.items():
        middle = statistics.median(seconds)
        speed = f"{plan.batch / middle:,.1f} ({plan.batch / max(seconds):,.1f} – {plan.batch / min(seconds):,.1f})"
        lines.append(f"| {name} | {speed} | {middle * 1e3:.0f} ms | {base / middle:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of each, small")
    parser.add_argument("--gpu", action="store_true", help="larger batches, on a GPU")
    parser.add_argument("--threads", default=str(os.cpu_count()), help="OMP_NUM_THREADS of every process")
    parser.add_argument("--arch", choices=sorted(DEPTHS))
    for name in ("size", "batch", "steps", "repeats"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--plain", choices=("plain", "tuned"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Plan)}
    chosen = GPU if options.gpu else QUICK if options.quick else Plan()
    plan = dataclasses.replace(chosen, **{name: value for name, value in given.items() if value is not None})
    if options.plain:
        plain(plan, tuned=options.plain == "tuned")
        return
    text = f"\n## {time.strftime('%H:%M')}: {plan.arch}, {plan.batch} images of {plan.size} x {plan.size} a step\n\n"
    text += machine(options.threads) + f" {plan.repeats} runs of {plan.steps} steps each, in turn.\n\n"
    env = {"OMP_NUM_THREADS": options.threads, "HF_HUB_OFFLINE": "1"}
    systems = commands(plan, options.gpu)
    runs: dict[str, list[list[float]]] = {name: [] for name in systems}
    for number in range(plan.repeats):
        for name in systems if number % 2 == 0 else reversed(systems):
            with tempfile.TemporaryDirectory() as directory:
                runs[name].append(shown(systems[name], env, Path(directory)))
    text += "\n".join(table(plan, runs)) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-resnet.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
