"""Speed of `outlast.recipes.perceiver` beside the Perceiver of transformers, step for step.

    python bench/perceiver.py               # the paper's sizes on the CPU: clips of 16 frames of 224 x 224
    python bench/perceiver.py --quick       # of 112 x 112 with the same latents, and fewer steps
    python bench/perceiver.py --gpu         # the paper's sizes on one GPU

Both train in one process, in turn, with the same sizes, weights, clips, query points and AdamW: bytes in, a step of the optimizer
out. transformers' model is used as its documentation does (`subsampled_output_points`), with the losses around it that we have.
transformers computes in float32 unless told otherwise, and the recipe in bfloat16 where that is fast: both are shown in both.
Prints medians and ratios, and appends them to results/<date>-perceiver.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from outlast.recipes import perceiver_model
from outlast.recipes.perceiver_model import Config, Decoded, Perceiver, Points
from outlast.training import device

HERE = Path(__file__).parent
QUICK = Config(image_size=112)
"""Config with a quarter of the pixels, so that latents, which both compute alike, take a larger part of the time."""


def theirs(c: Config) -> Any:
    """Return transformers' model of these sizes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import PerceiverConfig, PerceiverForMultimodalAutoencoding

    config = PerceiverConfig(
        num_latents=c.num_latents,
        d_latents=c.d_latents,
        d_model=c.d_model,
        num_blocks=c.num_blocks,
        num_self_attends_per_block=c.num_self_attends,
        num_self_attention_heads=c.num_heads,
        num_cross_attention_heads=c.num_cross_heads,
        attention_probs_dropout_prob=c.dropout,
        num_frames=c.frames,
        image_size=c.image_size,
        output_shape=[1, c.frames, c.image_size, c.image_size],
        audio_samples_per_frame=c.audio_per_frame,
        samples_per_patch=c.samples_per_patch,
        output_num_channels=c.d_output,
        num_labels=c.classes,
    )
    return PerceiverForMultimodalAutoencoding(config)


@dataclasses.dataclass
class Clips:
    """Batch before preprocessing, and the points of a step."""

    video: torch.Tensor
    audio: torch.Tensor
    label: torch.Tensor
    points: Points


def clips(c: Config, batch: int, where: torch.device) -> Clips:
    """Return a batch of noise."""
    draw = torch.Generator().manual_seed(0)
    video = torch.randint(0, 256, (batch, c.frames, c.image_size, c.image_size, 3), generator=draw, dtype=torch.uint8)
    audio = torch.randint(-20000, 20000, (batch, c.samples), generator=draw, dtype=torch.int16)
    label = torch.randint(0, c.classes, (batch,), generator=draw)
    image = torch.randperm(c.image_points, generator=draw)[:512]
    points = Points(image.to(where), torch.randperm(c.audio_points, generator=draw)[:512].to(where))
    return Clips(video.to(where), audio.to(where), label.to(where), points)


def of_ours(model: Perceiver, batch: Clips) -> Decoded:
    hidden = torch.ones(len(batch.label), dtype=torch.bool, device=batch.label.device)
    made: Decoded = model(batch.video, batch.audio, batch.label, hidden, batch.points)
    return made


def of_theirs(model: Any, batch: Clips, c: Config) -> Decoded:
    inputs = {
        "image": perceiver_model.pixels(batch.video).permute(0, 1, 4, 2, 3),
        "audio": perceiver_model.sound(batch.audio)[..., None],
        "label": F.one_hot(batch.label, c.classes).float(),
    }
    points = {"image": batch.points.image, "audio": batch.points.audio, "label": None}
    made = model(inputs=inputs, subsampled_output_points=points).logits
    return Decoded(made["image"], made["audio"].unflatten(1, (-1, c.samples_per_patch)), made["label"])


def stepper(
    model: Any, decode: Callable[[], Decoded], c: Config, batch: Clips, kind: torch.dtype
) -> Callable[[], tuple[float, float]]:
    """Return a function that does a step, and returns its seconds and its CPU seconds on all cores."""
    where = batch.video.device
    accelerator = device.of(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
    weight = torch.ones(len(batch.label), device=where)

    def step() -> tuple[float, float]:
        accelerator.synchronize()
        begin, busy = time.perf_counter(), time.process_time()
        with accelerator.autocast(kind):
            made = decode()
        image, audio = perceiver_model.targets(batch.video, batch.audio, batch.points, c)
        each = perceiver_model.losses(made, image, audio, batch.label, weight)
        (0.03 * each.image + each.audio + 1e-4 * each.label).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.synchronize()
        return time.perf_counter() - begin, time.process_time() - busy

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the pixels, few steps")
    parser.add_argument("--gpu", action="store_true", help="the paper's sizes on a GPU")
    parser.add_argument("--batch", type=int, default=0, help="clips of a step; default 1 on the CPU, 8 on a GPU")
    parser.add_argument("--repeats", type=int, default=0, help="measured steps of each; default 5, 3 when quick, 20 on a GPU")
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    size = QUICK if options.quick else Config()
    c = dataclasses.replace(size, dropout=options.dropout)
    where = torch.device(device.find().type if options.gpu else "cpu")
    count = options.batch or (8 if options.gpu else 1)
    repeats = options.repeats or (20 if options.gpu else 3 if options.quick else 5)
    torch.manual_seed(0)
    batch = clips(c, count, where)
    other = theirs(c).to(where).train()
    ours = Perceiver(c).to(where).train()
    ours.load_state_dict(perceiver_model.imported(other.state_dict(), c))
    exact, lower = torch.float32, torch.bfloat16
    steps = {
        "transformers, float32": stepper(other, lambda: of_theirs(other, batch, c), c, batch, exact),
        "outlast, float32": stepper(ours, lambda: of_ours(ours, batch), c, batch, exact),
        "transformers, bfloat16": stepper(other, lambda: of_theirs(other, batch, c), c, batch, lower),
        "outlast, bfloat16": stepper(ours, lambda: of_ours(ours, batch), c, batch, lower),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(repeats):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(steps[name]())
    lines = [
        "| system | clips/s: median (range) | a step | CPU seconds | / same type | / float32 | CPU seconds: / same type |",
        "|---|---|---|---|---|---|---|",
    ]
    medians = {name: [statistics.median(each) for each in zip(*both, strict=True)] for name, both in seconds.items()}
    first = medians["transformers, float32"][0]
    for name, (middle, busy) in medians.items():
        base, base_busy = medians[name.replace("outlast", "transformers")]
        walls = [wall for wall, _ in seconds[name]]
        speed = f"{count / middle:.3f} ({count / max(walls):.3f} - {count / min(walls):.3f})"
        ratios = f"{base / middle:.2f} | {first / middle:.2f} | {base_busy / busy:.2f}"
        lines.append(f"| {name} | {speed} | {middle * 1e3:,.0f} ms | {busy:.2f} | {ratios} |")
    told = device.of(where).name() + f", {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    sizes = (
        f"{c.frames} frames of {c.image_size} x {c.image_size}, {c.num_latents} latents of {c.d_latents}, dropout {c.dropout:g}"
    )
    text = f"\n## {time.strftime('%H:%M')}: beside transformers\n\n{told}; Python {platform.python_version()}, torch "
    text += f"{torch.__version__}. Load before: {os.getloadavg()[0]:.2f}.\n\n"
    text += f"{sizes}, {count} clips a step, {repeats} steps of each.\n\n"
    text += "\n".join(lines) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-perceiver.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
