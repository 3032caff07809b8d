"""Images, records and videos to columns: the source's samples; what is damaged is named; no kill changes a byte."""

from __future__ import annotations

import json
import os
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from outlast.base.errors import OutlastError
from outlast.data import cifar, shard_format
from outlast.data.prepare import images, jsonl, tokenizer, video, work_units
from sparks import CASES
from texts import digests


def request(tmp_path: Path, to: str = "out", **more: Any) -> work_units.Request:
    return work_units.Request(tmp_path / "source", tmp_path / to, **more)


def rows(directory: Path, part: str) -> list[dict[str, np.ndarray]]:
    found = []
    for shard in shard_format.read(directory).part(part).shards:
        table = shard_format.columns(directory / shard.file)
        found += [sample(table, i) for i in range(shard.samples)]
    return found


def sample(table: dict[str, np.ndarray], i: int) -> dict[str, np.ndarray]:
    one = {}
    for name, column in table.items():
        if (offsets := table.get(f"{name}{shard_format.OFFSETS}")) is not None:
            one[name] = column[offsets[i] : offsets[i + 1]]
        elif not name.endswith(shard_format.OFFSETS):
            one[name] = column[i]
    return one


def bad(call: Callable[[], Any], tmp_path: Path) -> str:
    with pytest.raises(OutlastError) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    return str(refused.value).replace(str(tmp_path), "TMP")


# ---- every kind


class Killed(Exception):
    """Stands for SIGKILL."""


@pytest.mark.parametrize(
    "share", [0.4, *(pytest.param(n / 10, marks=pytest.mark.slow) for n in (0, 1, 2, 3, 5, 6, 7, 8, 9, 9.9))]
)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_ends_anywhere_is_continued_by_several_processes_and_the_bytes_are_the_same(
    tmp_path: Path, case: str, share: float
) -> None:
    (tmp_path / "source").mkdir()
    CASES[case].write(tmp_path / "source")
    stages: list[str] = []
    CASES[case].prepare(request(tmp_path, "whole", unit=600, progress=lambda stage, done, total: stages.append(stage)))
    last, calls = int(len(stages) * share), list[tuple[str, int]]()

    def progress(stage: str, done: int, total: int) -> None:
        calls.append((stage, done))
        if len(calls) == last + 1:
            raise Killed

    with pytest.raises(Killed):
        CASES[case].prepare(request(tmp_path, "cut", unit=600, progress=progress))
    assert not (tmp_path / "cut" / "manifest.json").exists()
    CASES[case].prepare(request(tmp_path, "cut", unit=600, processes=2, progress=progress))
    assert digests(tmp_path / "whole") == digests(tmp_path / "cut")
    assert len(digests(tmp_path / "whole")) > 3
    stage, done = calls[last]
    first = next(each for name, each in calls[last + 1 :] if name == stage)
    assert first >= done or stage == "put together", "units that were done are not done again"


# ---- images


def an_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def some_images(source: Path) -> None:
    for i in range(12):
        an_image(source / "catdog"[i % 2 * 3 : i % 2 * 3 + 3] / f"{i}.png", (i, 0, 255 - i))
    (source / "README").write_text("no image")


def test_a_directory_per_class_becomes_pixels_and_labels(tmp_path: Path) -> None:
    some_images(tmp_path / "source")
    os.rename(tmp_path / "source" / "dog", os.fsencode(tmp_path / "source") + b"/dog\xff")  # no UTF-8
    made = images.prepare(request(tmp_path), images.Settings(shard_size=600))
    assert made.source["classes"] == ["cat", "dog\udcff"]
    found = rows(tmp_path / "out", "train") + rows(tmp_path / "out", "val")
    assert {tuple(row["image"].shape) for row in found} == {(6, 8, 3)}
    assert sorted((int(row["image"][0, 0, 0]), int(row["label"])) for row in found) == [(i, i % 2) for i in range(12)]
    assert max(shard.samples for shard in made.parts["train"].shards) == 600 // (6 * 8 * 3)
    assert [int(row["label"]) for row in found] != sorted(int(row["label"]) for row in found), "classes are mixed"
    assert shard_format.verify(made, shard_format.Local(tmp_path / "out")) == []


def test_images_are_resized_by_the_shorter_side_and_cut_in_the_centre(tmp_path: Path) -> None:
    wide = Image.new("RGB", (40, 20), (255, 0, 0))
    wide.paste((0, 255, 0), (10, 0, 30, 20))
    (tmp_path / "source" / "a").mkdir(parents=True)
    wide.save(tmp_path / "source" / "a" / "wide.png")
    images.prepare(request(tmp_path), images.Settings(size=10, val=0))
    (row,) = rows(tmp_path / "out", "train")
    assert row["image"].shape == (10, 10, 3)
    assert (row["image"][:, 2:-2] == (0, 255, 0)).all()


def test_encoded_images_keep_their_bytes(tmp_path: Path) -> None:
    some_images(tmp_path / "source")
    an_image(tmp_path / "source" / "dog" / "large.png", (99, 0, 0), (50, 50))
    images.prepare(request(tmp_path), images.Settings(encoded=True))
    found = {row["image"].tobytes() for part in ("train", "val") for row in rows(tmp_path / "out", part)}
    assert found == {path.read_bytes() for path in (tmp_path / "source").glob("*/*.png")}


def test_tiny_imagenet_takes_its_val_labels_from_the_list(tmp_path: Path) -> None:
    source = tmp_path / "source" / "tiny-imagenet-200"
    for i, name in enumerate(("n01", "n02")):
        an_image(source / "train" / name / "images" / f"{name}_0.JPEG", (i, i, i))
        an_image(source / "val" / "images" / f"val_{i}.JPEG", (i, i, i))
    an_image(source / "test" / "images" / "test_0.JPEG", (9, 9, 9))
    (source / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n")
    made = images.prepare(request(tmp_path), images.Settings())
    assert made.source["classes"] == ["n01", "n02"]
    for part, pairs in (("train", [(0, 0), (1, 1)]), ("val", [(0, 1), (1, 0)])):
        assert sorted((int(row["image"].max()), int(row["label"])) for row in rows(tmp_path / "out", part)) == pairs


def test_cifar_batches_become_shards(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    x = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    for file in (*cifar.TRAIN, cifar.TEST):
        cifar.write(source, file, x, [0, 1, 2, 3], file)
    cifar.write_meta(source, [f"class {i}" for i in range(10)], 4)
    made = images.prepare(request(tmp_path), images.Settings())
    assert {part: made.parts[part].samples for part in made.parts} == {"train": 20, "val": 4}
    found = rows(tmp_path / "out", "val")
    np.testing.assert_array_equal(np.stack([row["image"] for row in found]), x.transpose(0, 2, 3, 1))
    assert [int(row["label"]) for row in found] == [0, 1, 2, 3]
    assert made.source["classes"][9] == "class 9"


def test_a_damaged_image_is_named_or_counted(tmp_path: Path) -> None:
    some_images(tmp_path / "source")
    path = tmp_path / "source" / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:40])
    settings = images.Settings(shard_size=300)
    reason = bad(lambda: images.prepare(request(tmp_path), settings), tmp_path)
    assert reason.startswith("cat/0.png is damaged or no image (")
    assert reason.endswith("); replace it, or leave it out with --skip-damaged")
    made = images.prepare(request(tmp_path), images.Settings(shard_size=300, skip_damaged=True))
    assert (made.source["damaged"], sum(part.samples for part in made.parts.values())) == (1, 11)


def test_bad_images_are_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "notes.txt").write_text("no image")

    def refusal(**settings: Any) -> str:
        return bad(lambda: images.prepare(request(tmp_path), images.Settings(**settings)), tmp_path)

    assert refusal().startswith("TMP/source has no images (.jpg, ")
    assert refusal(size=4, encoded=True).startswith("--size 4 cannot be met")
    an_image(source / "1.png", (0, 0, 0))
    assert refusal().startswith(
        "1.png lies in no directory of a class; sort the images into SOURCE/CLASS/ or SOURCE/train/CLASS/"
    )
    (source / "1.png").unlink()
    some_images(source)
    an_image(source / "cat" / "tall.png", (0, 0, 0), (8, 60))
    reasons = ("cat/tall.png has 8x60 pixels and others 8x6; make them equal with --size", "has 8x6 pixels and others 8x60;")
    assert any(reason in refusal() for reason in reasons)


# ---- records


RECORDS: list[dict[str, Any]] = [
    {"prompt": "2 + 2 = ", "completion": "4"},
    {"text": "just text"},
    {"messages": [{"role": "user", "content": "say <|assistant|> hi"}, {"role": "assistant", "content": "hi"}]},
]


def some_records(source: Path, n: int = 30) -> None:
    source.mkdir(exist_ok=True)
    (source / "a.jsonl").write_text("".join(json.dumps({**RECORDS[i % 3], "id": i}) + "\n" for i in range(n)))


def test_records_become_tokens_and_what_is_not_learned_is_masked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for part in ("train", "val"):
        (source / f"{part}.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    made = jsonl.prepare(request(tmp_path), jsonl.Settings(vocab_size=300))
    known = tokenizer.load(tmp_path / "out" / "tokenizer.json")
    end, user, assistant = (known.token_to_id(name) for name in ("<|endoftext|>", "<|user|>", "<|assistant|>"))
    found = rows(tmp_path / "out", "train")
    assert (len(found), made.tokenizer, made.vocab_size) == (3, "tokenizer.json", known.get_vocab_size())

    def decoded(ids: np.ndarray) -> str:
        return str(known.decode(ids.tolist(), skip_special_tokens=False))

    assert [decoded(row["input_ids"]) for row in found] == [
        "2 + 2 = 4<|endoftext|>",
        "just text<|endoftext|>",
        "<|user|>\nsay <|assistant|> hi\n<|assistant|>\nhi<|endoftext|>",
    ]
    learned = [row["labels"][row["labels"] != -100] for row in found]
    assert list(map(decoded, learned)) == ["4<|endoftext|>", "just text<|endoftext|>", "hi<|endoftext|>"]
    assert all(row["input_ids"][-1] == end for row in found)
    special = [token for token in found[2]["input_ids"].tolist() if token in (user, assistant)]
    assert special == [user, assistant], "the role in the text of the user stays text"


def test_long_samples_are_cut_and_counted(tmp_path: Path) -> None:
    some_records(tmp_path / "source")
    made = jsonl.prepare(request(tmp_path), jsonl.Settings(vocab_size=300, val=0, max_length=8))
    assert max(len(row["input_ids"]) for row in rows(tmp_path / "out", "train")) == 8
    assert made.source["cut"] > 0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"a": 1}', "a.jsonl, line 31 has none of prompt and completion, messages, text; it has a"),
        ('{"prompt": "a"}', "a.jsonl, line 31 has no completion; each record needs a text there"),
        ('{"messages": []}', "a.jsonl, line 31 has messages that are no list of objects with role and content"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl, line 31 has no content in a message; each record needs a text there"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, record: str, reason: str) -> None:
    some_records(tmp_path / "source")
    with (tmp_path / "source" / "a.jsonl").open("a") as file:
        file.write(f"{record}\n")
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.of_characters(map(chr, range(10, 127))))
    assert bad(lambda: jsonl.prepare(request(tmp_path), jsonl.Settings(str(path))), tmp_path).startswith(reason)
    made = jsonl.prepare(request(tmp_path), jsonl.Settings(str(path), skip_damaged=True))
    assert (made.source["damaged"], sum(part.samples for part in made.parts.values())) == (1, 30)


# ---- videos


def a_video(path: Path, seconds: float = 1.0, *, fps: int = 25, sound: bool = True, size: tuple[int, int] = (64, 48)) -> None:
    """Frame i is grey i * 5; the sound is the number of its millisecond, times 10."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv444p"
        track = container.add_stream("pcm_s16le", rate=48_000, layout="mono") if sound else None
        for i in range(round(seconds * fps)):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), i * 5, np.uint8), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if track:
            tones = (np.arange(round(seconds * 48_000)) // 48 * 10).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(tones[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 48_000, 0, Fraction(1, 48_000)
            container.mux(track.encode(frame))
            container.mux(track.encode())


SMALL = {"size": 16, "val": 0.0}


@pytest.mark.parametrize(("fps", "step"), [(25, 5.0), (50, 10.0), (10, 2.0)])
def test_a_clip_is_16_frames_and_their_sound(tmp_path: Path, fps: int, step: float) -> None:
    a_video(tmp_path / "source" / "wave" / "a.mkv", fps=fps)
    made = video.prepare(request(tmp_path), video.Settings(**SMALL))
    (row,) = rows(tmp_path / "out", "train")
    assert (row["video"].shape, row["audio"].shape, int(row["label"])) == ((16, 16, 16, 3), (30_720,), 0)
    assert made.source["classes"] == ["wave"]
    begin = (1.0 - 0.64) / 2
    shown = np.floor(np.round((begin + np.arange(16) / 25) * fps, 6)) * 5
    np.testing.assert_allclose(row["video"].mean(axis=(1, 2, 3)), shown, atol=2)
    moments = np.floor(begin * 1000 + np.arange(30_720) / 48) * 10
    np.testing.assert_allclose(row["audio"], moments, atol=25)


def test_a_silent_and_a_short_video_are_filled(tmp_path: Path) -> None:
    a_video(tmp_path / "source" / "wave" / "short.mkv", 0.2, sound=False)
    made = video.prepare(request(tmp_path), video.Settings(**SMALL))
    (row,) = rows(tmp_path / "out", "train")
    np.testing.assert_allclose(row["video"].mean(axis=(1, 2, 3)), [0, 5, 10, 15] + [20] * 12, atol=2)
    assert not row["audio"].any()
    assert made.source["silent"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "label,youtube_id,time_start,time_end,split\nwaving,abcdefghijk,3,13,train\nrunning,lmnopqrstuv,0,10,train\n",
        "abcdefghijk_000003_000013.mkv,waving\nlmnopqrstuv_000000_000010.mkv,running\n",
    ],
)
def test_labels_come_from_a_list(tmp_path: Path, text: str) -> None:
    a_video(tmp_path / "source" / "abcdefghijk_000003_000013.mkv", 0.2)
    a_video(tmp_path / "source" / "lmnopqrstuv_000000_000010.mkv", 0.4)
    (tmp_path / "labels.csv").write_text(text)
    settings = video.Settings(**SMALL, labels=str(tmp_path / "labels.csv"))
    assert video.prepare(request(tmp_path), settings).source["classes"] == ["running", "waving"]
    found = {int(row["label"]): row["video"].max() for row in rows(tmp_path / "out", "train")}
    assert found[0] > found[1]


def test_bad_videos_are_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "notes.txt").write_text("no video")

    def refusal(**settings: Any) -> str:
        return bad(lambda: video.prepare(request(tmp_path), video.Settings(**{**SMALL, **settings})), tmp_path)

    assert refusal().startswith("TMP/source has no videos (.mp4, ")
    a_video(source / "a.mkv", 0.1)
    assert refusal().startswith("a.mkv lies in no directory of a class; sort the videos into SOURCE/CLASS/, or name a list")
    (tmp_path / "labels.csv").write_text("b.mkv,x\n")
    assert refusal(labels=str(tmp_path / "labels.csv")) == "a.mkv is not in the list of labels; add it, or remove the file"
    (tmp_path / "labels.csv").write_text("a.mkv\n")
    assert refusal(labels=str(tmp_path / "labels.csv")) == "TMP/labels.csv, line 1 has no label; write file,label"
    assert refusal(labels="nowhere.csv").startswith("there is no list of labels nowhere.csv, or it is empty")
    (source / "a.mkv").unlink()
    (source / "x").mkdir()
    (source / "x" / "damaged.mp4").write_bytes(b"no video at all" * 100)
    assert refusal().startswith("x/damaged.mp4 is damaged or no video (")
    with wave.open(str(source / "x" / "damaged.mp4"), "wb") as file:
        file.setparams((1, 2, 48_000, 0, "NONE", ""))
        file.writeframes(bytes(9600))
    assert refusal().startswith("x/damaged.mp4 has no video stream; remove it")
    a_video(source / "x" / "good.mkv", 0.1)
    made = video.prepare(request(tmp_path), video.Settings(**SMALL, skip_damaged=True))
    assert (made.source["damaged"], made.parts["train"].samples) == (1, 1)
