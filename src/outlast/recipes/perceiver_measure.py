"""Measures `outlast.recipes.perceiver` on the validation clips (losses, PSNR, accuracy), and reconstructs clips."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from outlast.base.errors import OutlastError
from outlast.recipes import perceiver_model
from outlast.recipes.perceiver_data import Clips
from outlast.recipes.perceiver_model import Config, Decoded, Perceiver, Points
from outlast.training import Shards, device

NAMES = ("clips", "image_l1", "audio_l1", "label_ce", "squares", "top1", "top5")  # names of the sums over clips, in order
_CHUNK = 8192  # points to decode at a time; arbitrary


def means(sums: Tensor, s: Any) -> dict[str, float]:
    """Return means from the sums: the loss, its parts, PSNR in dB for pixels from 0 to 1, and accuracies from 0 to 1."""
    clips = float(sums[0])
    if not clips:
        raise OutlastError("no validation clip can be read; see the sentences above")
    means = {name: each / clips for name, each in zip(NAMES[1:], sums.tolist()[1:], strict=True)}
    loss = s.image_weight * means["image_l1"] + s.audio_weight * means["audio_l1"] + s.label_weight * means["label_ce"]
    psnr = -10 * math.log10(max(means.pop("squares"), 1e-12))
    right = {name: means.pop(name) for name in ("top1", "top5")}
    return {"loss": loss, **means, "psnr": psnr, **right}


def read(dataset: Clips | Shards, begin: int, end: int, size: int, workers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield batches of `size` clips from `begin` up to `end`, each with the index of its first clip."""
    if isinstance(dataset, Clips):
        some: Any = Subset(cast(Any, dataset), range(begin, end))
        loader = DataLoader(some, size, num_workers=workers, generator=torch.Generator())
        for number, data in enumerate(loader):
            yield begin + number * size, data
    else:
        for at in range(begin, end, size):
            yield at, dataset.take(np.arange(at, min(at + size, end)))


def measured(model: Perceiver, data: Mapping[str, Any], weight: Tensor, points: Points, kind: torch.dtype) -> Tensor:
    """Return sums over the clips with weight 1, in the order of `NAMES`, on the CPU. Labels are hidden from the model."""
    where = model.latents.device
    keep = weight.bool()
    if not keep.any():
        return torch.zeros(len(NAMES), dtype=torch.float64)
    video, audio, label = (data[name][keep].to(where) for name in ("video", "audio", "label"))
    made = decoded(model, video, audio, points, kind)
    image, sound = perceiver_model.targets(video, audio, Points(*(each.to(where) for each in points)), model.config)
    ones = weight.new_ones(len(label), device=where)
    each = perceiver_model.losses(made, image, sound, label, ones)
    squares = (made.image.float().clamp(0, 1) - image).square().mean((1, 2)).sum()
    best = made.label.topk(min(5, made.label.shape[1])).indices == label[:, None]
    n = len(label)
    sums = [n, *(float(loss) * n for loss in each), float(squares), int(best[:, 0].sum()), int(best.sum())]
    return torch.tensor(sums, dtype=torch.float64)


def decoded(model: Perceiver, video: Tensor, audio: Tensor, points: Points, kind: torch.dtype) -> Decoded:
    """Reconstruct clips with hidden labels, at any number of points. The latents are computed only once."""
    where, b = video.device, len(video)
    no_label = torch.zeros(b, dtype=torch.int64, device=where)
    parts = []
    with device.of(where).autocast(kind):
        latents = model.encode(video, audio, no_label, torch.ones(b, dtype=torch.bool, device=where))
        image = points.image.split(_CHUNK)
        sound = points.audio.split(_CHUNK)
        for number in range(max(len(image), len(sound))):
            some = Points(*(each[number] if number < len(each) else each[0][:0] for each in (image, sound)))
            parts.append(model.decode(latents, Points(*(each.to(where) for each in some))))
    return Decoded(torch.cat([part.image for part in parts], 1), torch.cat([part.audio for part in parts], 1), parts[0].label)


def every(config: Config) -> Points:
    """Return all points of a clip."""
    return Points(torch.arange(config.image_points), torch.arange(config.audio_points))


UNITS = {"psnr": " dB", "label_ce": " nats"}


def beside(model: Perceiver, dataset: Clips | Shards, index: int, kind: torch.dtype) -> tuple[Any, Any]:
    """Return a clip and its reconstruction side by side, (t, h, 2 w, 3) uint8, and the reconstructed audio, (samples,) int16."""
    c, where = model.config, model.latents.device
    _, data = next(read(dataset, index, index + 1, 1, 0))
    if problem := data.get("problem", [""])[0]:
        raise OutlastError(problem)
    made = decoded(model, data["video"].to(where), data["audio"].to(where), every(c), kind)
    image = (made.image[0].float().clamp(0, 1) * 255).round().byte().view(c.frames, c.image_size, c.image_size, 3).cpu()
    sound = (made.audio[0].float().flatten().clamp(-1, 1) * 32767).short().cpu()
    return torch.cat((data["video"][0], image), 2).numpy(), sound.numpy()
