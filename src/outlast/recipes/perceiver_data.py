"""Provides `outlast.recipes.perceiver` with clips from videos, prepared shards or synthetic videos.

A directory of Kinetics contains `train/CLASS/*.mp4` and `val/CLASS/*.mp4`, or `CLASS/*.mp4`, or any videos whose labels are in a
list (`--labels`). A training clip's start is a function of (seed, epoch, index), and a validation clip is the middle of its
video. `outlast data prepare video` writes shards, which are read at the speed of the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outlast.base import file_locks
from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import source_files, video
from outlast.data.prepare.source_files import TRAIN, VAL, BadSource
from outlast.recipes.perceiver_model import Config, config_of
from outlast.recipes.shared import results
from outlast.training import Shards

MOMENTS = 10_000  # number of possible starts of a clip in a video; arbitrary
SMALL = {TRAIN: 1000, VAL: 100}  # clips of kinetics-small


@dataclasses.dataclass(frozen=True)
class Clips:
    """One part of the data as a map-style dataset, which decodes clips when they are read.

    An item has `video` uint8 (t, h, w, 3), `audio` int16 (samples,), `label`, and `problem`, a message if it cannot be read.
    """

    root: Path
    items: Sequence[tuple[str, int]]  # file and label of each clip
    settings: video.Settings
    moving: bool  # clips begin at random times in their videos

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """Return the path of a clip's file below `root`."""
        return self.items[index][0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, label = self.items[index]
        s = self.settings
        at = random.randrange(MOMENTS) if self.moving else 0
        if self.moving:
            s = dataclasses.replace(s, clips=MOMENTS)
        problem = ""
        try:
            frames, sound = video.decoded(self.root / file, video.Clip(file, at, label), s)
        except (BadSource, OSError) as error:
            problem = str(error).replace("--skip-damaged", "--skip-bad")
            frames, sound = np.zeros((s.frames, s.size, s.size, 3), np.uint8), None
        if sound is None:
            sound = np.zeros(s.frames * video.PER_FRAME, np.int16)
        return {"video": torch.from_numpy(frames), "audio": torch.from_numpy(sound), "label": label, "problem": problem}


@dataclasses.dataclass(frozen=True)
class Data:
    """The training and the validation part of a dataset."""

    place: str
    train: Clips | Shards
    val: Clips | Shards | None
    classes: Sequence[str]  # names, in the order of their labels
    digest: str  # of the files and their labels, or of the shards


def opened(place: str, config: Config, *, labels: str = "", share: float = 0.1, small: bool = False) -> Data:
    """Open a directory of videos, or a directory or URL of shards. Raises OutlastError for unusable data.

    `labels` is the path of a list of labels. `share` is the fraction of videos to hold out as val if no directory is named val.
    """
    if "://" in place or (Path(place) / shard_format.MANIFEST).exists():
        return _prepared(place, config)
    root = Path(place)
    try:
        files = source_files.listed(root)
    except BadSource as error:
        raise OutlastError(f"no data: {error}") from error
    videos = [file for file in files if file.name.lower().endswith(video.SUFFIXES)]
    if not videos:
        raise OutlastError(
            f"{place} has no videos ({', '.join(video.SUFFIXES)}) and no {shard_format.MANIFEST}; name a directory "
            "with a directory per class, or shards that `outlast data prepare video` wrote"
        )
    settings = video.Settings(config.frames, config.image_size, val=share, labels=labels)
    items, classes = video.layout(videos, video.listed(labels)[0], settings)
    trained = {clip.label for clip in items[TRAIN]}
    if strange := sorted({classes[clip.label] for clip in items[VAL] if clip.label not in trained}):
        raise OutlastError(
            f"{place}: val has class {strange[0]} ({len(strange)} in all) that train has no video of; give both parts the same "
            "classes"
        )
    if small:
        items = {part: clips[: SMALL[part]] for part, clips in items.items()}
    labelled = {part: [(clip.file, clip.label) for clip in clips] for part, clips in items.items()}
    digest = hashlib.sha256(repr((labelled, classes)).encode(errors="surrogateescape")).hexdigest()[:16]
    train = Clips(root, labelled[TRAIN], settings, moving=True)
    val = Clips(root, labelled[VAL], settings, moving=False) if labelled[VAL] else None
    return Data(place, train, val, classes, digest)


def _prepared(place: str, config: Config) -> Data:
    train = Shards(place, TRAIN)
    manifest = train.manifest
    if manifest.kind != "video":
        raise OutlastError(f"{place} holds {manifest.kind}, not videos; make it with `outlast data prepare video`")
    for name, needed in (("frames", config.frames), ("size", config.image_size)):
        if (actual := manifest.settings.get(name)) != needed:
            raise OutlastError(
                f"{place} was prepared with --{name} {actual}, and the model takes {needed}; prepare it with --{name} {needed}, "
                f"or set --{'frames' if name == 'frames' else 'image-size'} {actual}"
            )
    has_val = VAL in manifest.parts and manifest.parts[VAL].samples > 0
    classes = [str(name) for name in manifest.source.get("classes", ())]
    return Data(place, train, Shards(place, VAL) if has_val else None, classes, train.fingerprint)


# Synthetic videos

CLASSES: Mapping[str, tuple[int, int, int]] = {  # direction (x, y) in which the square moves, and pitch in hertz
    "down": (0, 1, 330),
    "left": (-1, 0, 440),
    "right": (1, 0, 660),
    "up": (0, -1, 880),
}
PER_CLASS = {TRAIN: 10, VAL: 4}


def synthetic(above: Path) -> Path:
    """Return a directory below `above` with small synthetic videos of moving squares, after making it if it is missing.

    Other processes wait meanwhile.
    """
    to = above / "synthetic"
    above.mkdir(parents=True, exist_ok=True)
    with file_locks.attempted(above / ".synthetic.lock", wait=True):
        if to.is_dir():
            return to
        partial = above / ".synthetic.making"
        shutil.rmtree(partial, ignore_errors=True)
        for part, count in PER_CLASS.items():
            for name in CLASSES:
                for number in range(count):
                    draw = np.random.default_rng([list(CLASSES).index(name), number, part == VAL])
                    write(partial / part / name / f"{number:03d}.mp4", *moving(name, draw))
        partial.replace(to)
    return to


def moving(name: str, draw: np.random.Generator, size: int = 96, frames: int = 20) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Return a synthetic clip of the class `name`, as frames (t, size, size, 3) and audio (samples,)."""
    x, y, pitch = CLASSES[name]
    side = size // 3
    start = draw.integers(0, size, 2)
    ground, square = draw.integers(0, 80, 3), draw.integers(150, 256, 3)
    video_ = np.empty((frames, size, size, 3), np.uint8)
    video_[:] = ground
    for t in range(frames):
        rows = (start[1] + y * 3 * t + np.arange(side)) % size
        columns = (start[0] + x * 3 * t + np.arange(side)) % size
        video_[t][np.ix_(rows, columns)] = square
    seconds = np.arange(frames * video.PER_FRAME) / video.RATE
    sound = np.sin(2 * np.pi * pitch * seconds + draw.uniform(0, 6)) * draw.uniform(0.3, 0.6)
    return video_, (sound * 32767).astype(np.int16)


def write(path: Path, frames: NDArray[np.uint8], sound: NDArray[np.int16]) -> None:
    """Write an mp4 file atomically. `frames` are (t, h, w, 3) at 25 per second, and `sound` is (samples,) at 48 kHz."""
    av = video.pyav()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.writing")
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=video.FRAMES_PER_SECOND)
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
            stream.codec_context.qmin = stream.codec_context.qmax = 2  # hardly any loss
            stream.thread_count = 1  # for the same bytes every time
            track = container.add_stream("aac", rate=video.RATE, layout="mono")
            for number, each in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(each), format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, video.FRAMES_PER_SECOND)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
            audio = av.AudioFrame.from_ndarray(sound[None].astype(np.float32) / 32768, format="fltp", layout="mono")
            audio.sample_rate, audio.pts, audio.time_base = video.RATE, 0, Fraction(1, video.RATE)
            container.mux(track.encode(audio))
            container.mux(track.encode())
        os.replace(partial, path)
    except av.FFmpegError as error:
        raise OutlastError(f"{path} cannot be written as a video: {error}; name a file that ends in .mp4") from error
    finally:
        partial.unlink(missing_ok=True)


# Pretrained weights


def pretrained(named: str, given: Mapping[str, Any]) -> tuple[Config, Mapping[str, Tensor]]:
    """Read sizes and weights from a directory of Hugging Face's Perceiver. Raises OutlastError if the sizes `given` differ.

    A path that does not exist is looked up below $OUTLAST_MODELS; nothing is downloaded.
    """
    path = results.place(named)
    try:
        config = config_of(json.loads((path / "config.json").read_text()), given.get("dropout"))
    except (OSError, ValueError) as error:
        raise OutlastError(
            f"init_from {named} has no config.json that can be read ({error}); give a directory with config.json and "
            "model.safetensors or pytorch_model.bin (nothing is downloaded)"
        ) from error
    for name, value in given.items():
        if value != getattr(config, name):
            raise OutlastError(
                f"--{name.replace('_', '-')} {value} is not what {named} was trained with: {getattr(config, name)}"
            )
    return config, results.read(path)
