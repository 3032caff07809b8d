"""Turns videos into columns: `video` uint8 (n, 16, 224, 224, 3), `audio` int16 (n, 30720) and `label` int64 (n,).

A clip has 16 frames at 25 per second, and 0.64 s of mono audio at 48 kHz (1,920 samples per frame), as Perceiver IO expects. The
shorter side is resized to `size` pixels, and the centre is cropped. Silence replaces missing audio, and the last frame replaces
missing frames. Memory: one shard per process.

Clips: https://arxiv.org/abs/2107.14795, section 4.3. Lists: https://github.com/cvdfoundation/kinetics-dataset.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.base.errors import OutlastError, importing
from outlast.data import shard_format
from outlast.data.prepare import column_shards, source_files, work_units
from outlast.data.prepare.source_files import TRAIN, VAL, BadSource, File

SUFFIXES = (".mp4", ".mkv", ".avi", ".mov", ".webm", ".mpg", ".mpeg", ".m4v")
FRAMES_PER_SECOND = 25
RATE = 48_000
"""Audio samples per second."""
PER_FRAME = RATE // FRAMES_PER_SECOND
SHARD = 256 << 20


@dataclass(frozen=True)
class Settings:
    """Settings for `outlast data prepare video`."""

    frames: int = 16
    size: int = 224
    """Width and height of a frame in pixels."""
    clips: int = 1
    """Number of clips per video, evenly spaced; a single clip is taken from the middle."""
    labels: str = ""
    """Path of a CSV with labels; if empty, each video is labelled with the name of its directory."""
    val: float = 0.1
    shard_size: int = SHARD
    skip_damaged: bool = False

    @property
    def bytes(self) -> int:
        """Size of a sample in bytes."""
        return self.frames * (self.size**2 * 3 + PER_FRAME * 2)


@dataclass(frozen=True)
class Clip:
    """A clip of a video, before decoding."""

    file: str
    at: int
    label: int


def prepare(request: work_units.Request, settings: Settings) -> shard_format.Manifest:
    """Make or finish the dataset, and return its manifest. Raises BadSource, and OutlastError for invalid settings."""
    if min(settings.frames, settings.size, settings.clips) < 1:
        raise OutlastError("--frames, --size and --clips are 1 or more; correct them")
    pyav()
    sources = source_files.listed(request.source, request.to)
    labels, digest = listed(settings.labels)
    about = dataclasses.asdict(settings) | {"labels": digest}
    source = source_files.described(sources)
    if made := work_units.existing(request, "video", about, source):
        return made
    with work_units.opened(work_units.fitting(request, settings.shard_size), about, sources) as place:
        root = source_files.root(request.source)
        videos = [file for file in sources if file.name.lower().endswith(SUFFIXES)]
        if not videos:
            raise BadSource(
                f"{request.source} has no videos ({', '.join(SUFFIXES)}); name a directory with a directory per class"
            )
        items, names = layout(videos, labels, settings)
        read = {file.name: file.size // settings.clips for file in videos}
        sizes = {part: [(settings.bytes, read[clip.file]) for clip in some] for part, some in items.items()}
        do = functools.partial(_write, root=root, to=place.private, settings=settings)
        notes = place.results("shard", do, column_shards.batches(items, sizes, settings.shard_size))
        source |= {"classes": names} | {key: sum(note[key] for note in notes) for key in ("damaged", "silent")}
        parts = column_shards.parts(notes, [part for part in (TRAIN, VAL) if items[part] or (part == VAL and settings.val)])
        return place.finish(shard_format.Manifest("video", parts, about, source, place=str(request.to)))


def pyav() -> Any:
    """Import and return PyAV. Raises OutlastError if it is not installed."""
    with importing("decoding videos", "data"):
        import av
    return av


# ---- layouts


def layout(videos: Sequence[File], listed: Mapping[str, str], settings: Settings) -> tuple[dict[str, list[Clip]], list[str]]:
    """Return each part's clips, sorted by a hash of the video's name, and the class names. Raises BadSource."""
    divided = source_files.named(videos)
    classes = {file.name: _label(file.name, listed, divided=divided) for file in videos}
    names = sorted(set(classes.values()))
    number = {each: i for i, each in enumerate(names)}
    part = source_files.parts(videos, settings.val)
    ordered = sorted(videos, key=lambda file: (source_files.hash_fraction(file.name), file.name))
    items: dict[str, list[Clip]] = {TRAIN: [], VAL: []}
    for at in range(settings.clips):
        for file in ordered:
            items[part[file.name]].append(Clip(file.name, at, number[classes[file.name]]))
    return items, names


def _label(name: str, listed: Mapping[str, str], *, divided: bool) -> str:
    if listed:
        stem = name.rpartition("/")[2].rpartition(".")[0]
        for key in (name, name.rpartition("/")[2], stem, stem[:11]):  # Kinetics' files begin with an id of 11 characters
            if key in listed:
                return listed[key]
        raise BadSource(f"{name} is not in the list of labels; add it, or remove the file")
    segments = name.split("/")[divided:]
    if len(segments) < 2:
        raise BadSource(
            f"{name} lies in no directory of a class; sort the videos into SOURCE/CLASS/, or name a list with --labels"
        )
    return segments[0]


def listed(path: str) -> tuple[dict[str, str], str]:
    """Read a CSV of labels. Returns the labels, keyed by file name or video id, and the CSV's digest; both are empty if `path` is
    empty. Raises BadSource."""
    if not path:
        return {}, ""
    content = Path(path).read_bytes() if Path(path).is_file() else b""
    if not content:
        raise BadSource(f"there is no list of labels {path}, or it is empty; name a CSV with file,label")
    try:
        rows = list(csv.reader(io.StringIO(content.decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadSource(f"{path} is no CSV in UTF-8 ({error}); correct it") from error
    head = [cell.strip().lower() for cell in rows[0]] if rows else []
    key = next((head.index(each) for each in ("file", "path", "filename", "youtube_id") if each in head), 0)
    label = head.index("label") if "label" in head else 1
    table = {}
    for number, row in enumerate(rows[1:] if "label" in head else rows, 2 if "label" in head else 1):
        if not row:
            continue
        if len(row) <= max(key, label) or not row[label]:
            raise BadSource(f"{path}, line {number} has no label; write file,label")
        table[row[key]] = row[label]
    return table, hashlib.sha256(content).hexdigest()


# ---- frames and audio


def _write(batch: column_shards.Batch[Clip], *, root: Path, to: Path, settings: Settings) -> work_units.Note:
    count = len(batch.items)
    videos = np.empty((count, settings.frames, settings.size, settings.size, 3), np.uint8)
    sounds = np.zeros((count, settings.frames * PER_FRAME), np.int16)  # silence for videos without audio
    labels: list[int] = []
    damaged = silent = 0
    for clip in batch.items:
        try:
            video, sound = decoded(root / clip.file, clip, settings)
        except BadSource:
            if not settings.skip_damaged:
                raise
            damaged += 1
            continue
        silent += sound is None
        videos[len(labels)] = video
        if sound is not None:
            sounds[len(labels)] = sound
        labels.append(clip.label)
    columns: dict[str, NDArray[Any]] = {"label": np.array(labels, np.int64)}
    if labels:
        columns |= {"video": videos[: len(labels)], "audio": sounds[: len(labels)]}
    return {batch.part: column_shards.write(to, batch.part, batch.shard, columns), "damaged": damaged, "silent": silent}


def decoded(path: Path, clip: Clip, settings: Settings) -> tuple[NDArray[np.uint8], NDArray[np.int16] | None]:
    """Return a clip's frames, (16, 224, 224, 3), and its audio, (30720,), or None in place of the audio if the video has none.
    The last frame replaces missing ones. Raises BadSource for a damaged video."""
    av = pyav()
    try:
        path.open("rb").close()
    except OSError as error:
        raise source_files.unreadable(path, error) from error
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BadSource(f"{clip.file} has no video stream; remove it, or leave it out with --skip-damaged")
            begin = _begin(container, clip.at, settings)
            frames = _frames(container, begin, settings)
        with av.open(str(path)) as container:
            sound = _sound(container, begin, settings) if container.streams.audio else None
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise BadSource(
            f"{clip.file} is damaged or no video ({error}); replace it, or leave it out with --skip-damaged"
        ) from error
    if not frames:
        raise BadSource(f"{clip.file} is damaged: it has no frame at {float(begin):.2f} s; replace it, or use --skip-damaged")
    return np.stack(frames + frames[-1:] * (settings.frames - len(frames))), sound


def _begin(container: Any, at: int, settings: Settings) -> Fraction:
    stream = container.streams.video[0]
    timed = stream.duration is not None
    late = max(Fraction(0), (stream.start_time or 0) * stream.time_base)  # the file's duration includes the start time
    duration: Fraction = stream.duration * stream.time_base if timed else Fraction(container.duration or 0, 1_000_000) - late
    room = duration - Fraction(settings.frames, FRAMES_PER_SECOND)
    return max(Fraction(0), room * (2 * at + 1) / (2 * settings.clips))


def _frames(container: Any, begin: Fraction, settings: Settings) -> list[NDArray[np.uint8]]:
    stream = container.streams.video[0]
    stream.thread_type = "NONE"  # there is already a process per core
    start = (stream.start_time or 0) * stream.time_base
    container.seek(int((start + begin) / stream.time_base), stream=stream)
    moments = [begin + Fraction(i, FRAMES_PER_SECOND) for i in range(settings.frames)]
    frames: list[NDArray[np.uint8]] = []
    shown = None
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        time = frame.pts * stream.time_base - start
        while len(frames) < len(moments) and time > moments[len(frames)]:
            frames.append(_cut(shown or frame, settings.size))
        if len(frames) == len(moments):
            return frames
        shown = frame
    if shown:
        frames.append(_cut(shown, settings.size))
    return frames


def _cut(frame: Any, size: int) -> NDArray[np.uint8]:
    """Return the centre of a frame, (size, size, 3), rotated as players show it."""
    scale = Fraction(size, min(frame.width, frame.height))
    width, height = (max(size, round(side * scale)) for side in (frame.width, frame.height))
    pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
    left, top = (width - size) // 2, (height - size) // 2
    return np.ascontiguousarray(np.rot90(pixels[top : top + size, left : left + size], round(frame.rotation / 90)))


def _sound(container: Any, begin: Fraction, settings: Settings) -> NDArray[np.int16]:
    """Return a clip's audio samples, (30720,), with zeros where the video has no audio."""
    av = pyav()
    stream = container.streams.audio[0]
    video = container.streams.video[0]
    start = (video.start_time or 0) * video.time_base + begin
    container.seek(int(start / stream.time_base), stream=stream)
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    sound = np.zeros(settings.frames * PER_FRAME, np.int16)
    at: int | None = None
    for frame in itertools.chain(container.decode(stream), [None]):  # None flushes the resampler
        if at is None:
            if frame is None or frame.pts is None:
                continue
            at = round((frame.pts * stream.time_base - start) * RATE)
        for piece in resampler.resample(frame):
            samples = piece.to_ndarray().reshape(-1)
            low, high = max(at, 0), min(at + len(samples), len(sound))
            if low < high:
                sound[low:high] = samples[low - at : high - at]
            at += len(samples)
        if at >= len(sound):
            break
    return sound
