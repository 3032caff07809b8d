"""The Perceiver recipe: its model beside Hugging Face's, real videos, its errors, and runs in small worlds."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import disturbances
from outlast.base.errors import OutlastError
from outlast.data.prepare import video, work_units
from outlast.recipes import perceiver, perceiver_data, perceiver_model
from outlast.recipes.perceiver_model import Config, Perceiver, Points
from outlast.recipes.shared import settings
from outlast.storage import checkpoints
from outlast.training import Session, Shards

SHAPE = {"frames": 2, "image_size": 8, "samples_per_patch": 64, "num_latents": 6, "d_latents": 16, "num_self_attends": 1}
WIDTH = {"num_heads": 2, "d_output": 8, "image_bands": 2, "audio_bands": 4, "label_channels": 8}
SMALL = [f"--{name}={value}" for name, value in (SHAPE | WIDTH).items()]
USUAL = (*SMALL, "--size=tiny", "--batch=3", "--image-points=20", "--audio-points=10", "--log-steps=1", "--lr=1e-3")


def a_clip(path: Path, number: int = 0, frames: int = 4) -> None:
    """A small mp4 file, the class of which is the name of its directory."""
    draw = np.random.default_rng(number)
    perceiver_data.write(path, *perceiver_data.moving(["left", "up"][number % 2], draw, size=16, frames=frames))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six videos to train on and four to measure, of two classes."""
    root = tmp_path_factory.mktemp("clips")
    for part, count in (("train", 3), ("val", 2)):
        for number in range(2 * count):
            a_clip(root / part / ["left", "up"][number % 2] / f"{number}.mp4", number)
    return root


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Train or evaluate in this process; the output."""
    for name in ("DATASET_DIR", "MAX_STEPS", "BATCH_SIZE", "NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    output = tmp_path / "out"
    monkeypatch.setenv("OUTLAST_OUTPUT", str(output))

    def run(*args: str, sizes: Sequence[str] = USUAL) -> Path:
        disturbances.alone(perceiver.main, [*sizes, *args])
        return output

    return run


def logged(output: Path, name: str) -> list[float]:
    return list(disturbances.logged(output, name).values())


def made(classes: int = 3, **sizes: int) -> tuple[Perceiver, Config]:
    torch.manual_seed(0)
    config = Config(**{**SHAPE, **WIDTH, **sizes}, audio_per_frame=128, classes=classes, dropout=0.0)
    return Perceiver(config), config


# The model


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A small Perceiver of Hugging Face with large random weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import PerceiverConfig, PerceiverForMultimodalAutoencoding

    sizes: dict[str, Any] = {"num_latents": 6, "d_latents": 16, "num_blocks": 2, "num_self_attends_per_block": 1}
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 1, "output_num_channels": 8}
    clip = {"num_frames": 2, "image_size": 8, "output_shape": [1, 2, 8, 8], "audio_samples_per_frame": 64, "num_labels": 410}
    config = PerceiverConfig(**sizes, **heads, **clip)
    config._label_trainable_num_channels = 390
    torch.manual_seed(0)
    model = PerceiverForMultimodalAutoencoding(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.jobs  # as importing transformers is
@pytest.mark.parametrize("masked", [True, False])
def test_with_the_weights_of_hugging_face_it_computes_the_same_logits_and_gradients(theirs: Any, masked: bool) -> None:
    config = perceiver_model.config_of(theirs.config.to_dict())
    ours = Perceiver(config).eval()
    ours.load_state_dict(perceiver_model.imported(theirs.state_dict(), config))
    draw = torch.Generator().manual_seed(1)
    image, audio = torch.rand(3, 2, 8, 8, 3, generator=draw), torch.rand(3, 128, generator=draw) * 2 - 1
    label = torch.tensor([0, 409, 7])
    points = Points(torch.tensor([127, 5, 64]), torch.tensor([7, 0]))
    inputs = {"image": image.permute(0, 1, 4, 2, 3), "audio": audio[..., None], "label": F.one_hot(label, 410).float()}
    theirs.perceiver.input_preprocessor.mask_probs["label"] = float(masked)
    theirs.zero_grad()
    expected = theirs(
        inputs=inputs, subsampled_output_points={"image": points.image, "audio": points.audio, "label": None}
    ).logits
    found = ours(image, audio, label, torch.full((3,), masked), points)
    torch.testing.assert_close(found.image, expected["image"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.audio.flatten(1), expected["audio"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.label, expected["label"], rtol=1e-4, atol=1e-4)
    sum(each.square().sum() for each in expected.values()).backward()
    cast(Any, sum(each.square().sum() for each in found)).backward()
    known = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    for name, gradient in perceiver_model.imported(known, config).items():
        if not name.endswith("key.bias"):  # which nothing depends on: their gradients are rounding errors
            mine = cast(torch.Tensor, ours.get_parameter(name).grad)
            assert (mine - gradient).abs().max() <= 1e-3 * gradient.abs().max() + 1e-3, name
    with torch.inference_mode():  # as it measures: with torch's own attention
        again = ours(image, audio, label, torch.full((3,), masked), points)
    torch.testing.assert_close(again.label, found.label, rtol=1e-4, atol=1e-4)


@pytest.mark.jobs  # as importing transformers is
def test_it_begins_with_the_weights_of_a_directory_of_hugging_face(
    theirs: Any, tmp_path: Path, clips: Path, alone: Callable[..., Path]
) -> None:
    sizes = theirs.config.to_dict() | {"audio_samples_per_frame": 1920}
    weights = theirs.state_dict()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(sizes))
    torch.save(weights, tmp_path / "hf" / "pytorch_model.bin")
    first = ["--batch=3", "--max-steps=1", "--lr=0", "--no-do-eval", f"--data={clips}", f"--init-from={tmp_path / 'hf'}"]
    output = alone(*first, sizes=())
    kept = torch.load(output / "model.pt", weights_only=True)
    torch.testing.assert_close(kept["latents"], weights["perceiver.embeddings.latents"])
    with pytest.raises(OutlastError, match=r"--num-latents 5 is not what .*hf was trained with: 6"):
        alone(f"--init-from={tmp_path / 'hf'}", "--num-latents=5", f"--data={clips}", sizes=())
    with pytest.raises(OutlastError, match=r"init_from nowhere has no config\.json"):
        alone("--init-from=nowhere", f"--data={clips}")


def test_several_heads_of_the_attention_to_the_inputs_are_those_of_the_plain_formula() -> None:
    model, _ = made(4, num_cross_heads=7)
    attention = model.encoder.attention
    clip = (torch.rand(2, 2, 8, 8, 3), torch.rand(2, 256), torch.tensor([0, 3]), torch.tensor([False, True]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        raw = model._inputs(*clip)
        found = attention.folded(model.latents, raw)
    x = []
    tables = model._tables_on(torch.device("cpu"))
    for name, rows in (("audio", clip[1].view(2, 4, 64)), ("image", perceiver_model.patches(clip[0], 4))):
        spread = [each.expand(2, rows.shape[1], -1) for each in (tables[name], model.padding[name])]
        x.append(torch.cat((rows, *spread), -1))
    label = torch.cat((F.one_hot(clip[2], 4).float(), model.padding["label"].expand(2, -1)), -1)
    x.append(torch.where(clip[3][:, None], model.hidden_label, label)[:, None])
    expected = attention(model.latents[None], torch.cat(x, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_attention_that_trains_drops_the_share_it_should_and_is_right_on_average() -> None:
    q, k = torch.zeros(1, 2, 40, 4, requires_grad=True), torch.rand(1, 2, 333, 4)
    torch.manual_seed(0)
    marked = torch.eye(333).expand(1, 2, -1, -1)  # what comes out are the weights
    weights = perceiver_model.attended(q, k, marked, 0.25, 1.0)
    assert float((weights == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(weights.detach().sum(-1).mean()) == pytest.approx(1, abs=0.01)
    torch.testing.assert_close(weights[weights > 0], torch.full_like(weights[weights > 0], 1 / 333 / 0.75))
    again = perceiver_model.attended(q, k, marked, 0.25, 1.0)
    assert not torch.equal(again, weights)
    torch.manual_seed(0)
    assert torch.equal(perceiver_model.attended(q, k, marked, 0.25, 1.0), weights), "what is dropped follows from the generator"


def test_targets_are_the_pixels_and_the_sound_at_the_points() -> None:
    _, config = made()
    image = torch.arange(2 * 2 * 8 * 8 * 3).view(2, 2, 8, 8, 3) % 251
    audio = torch.rand(2, 256)
    at = Points(torch.tensor([0, 64 + 8 + 3]), torch.tensor([3]))
    assert perceiver_model.pixels(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [0.0, 1.0]
    assert perceiver_model.sound(torch.tensor([-32768, 16384], dtype=torch.int16)).tolist() == [-1.0, 0.5]
    found, heard = perceiver_model.targets(image.byte(), audio, at, config)
    torch.testing.assert_close(found[1, 1], image[1, 1, 1, 3] / 255)
    torch.testing.assert_close(heard[:, 0], audio[:, 192:])


def test_the_points_of_a_step_depend_on_the_seed_and_the_step_alone() -> None:
    config = Config()
    s = types.SimpleNamespace(seed=3, image_points=512, audio_points=512)
    one, again, next_ = (perceiver.queried(config, cast(Any, s), step) for step in (7, 7, 8))
    assert torch.equal(one.image, again.image)
    assert torch.equal(one.audio, again.audio)
    assert not torch.equal(one.image, next_.image)
    assert (len(set(one.image.tolist())), int(one.image.max()) < config.image_points) == (512, True)


def test_the_hidden_labels_do_not_depend_on_who_computes_them() -> None:
    s = cast(Any, types.SimpleNamespace(seed=3, label_dropout=0.5))
    whole = perceiver.hidden(s, 4, range(200))
    assert torch.equal(torch.cat([perceiver.hidden(s, 4, part) for part in (range(70), range(70, 200))]), whole)
    assert 60 < whole.sum() < 140


# Videos


def test_the_synthetic_set_is_of_real_videos_with_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perceiver_data, "PER_CLASS", {"train": 1, "val": 1})
    place = perceiver_data.synthetic(tmp_path)
    content = {file.relative_to(place): file.read_bytes() for file in place.rglob("*.mp4")}
    assert len(content) == 2 * len(perceiver_data.CLASSES)
    with av.open(str(place / "train" / "right" / "000.mp4")) as container:
        streams = container.streams
        assert (streams.video[0].codec_context.name, streams.audio[0].codec_context.name) == ("mpeg4", "aac")
    data = perceiver_data.opened(str(place), Config(frames=16, image_size=32))
    assert (list(data.classes), len(data.train)) == (["down", "left", "right", "up"], 4)
    assert isinstance(data.train, perceiver_data.Clips)
    item = data.train[2]
    shown = item["video"].float().mean(-1) > 120  # (t, h, w): the square
    columns = shown.float().mean(1).argmax(-1)
    assert len(set(columns.tolist())) > 4, "it moves"
    spectrum = np.abs(np.fft.rfft(item["audio"].numpy()))
    assert int(spectrum.argmax()) * 48_000 / 30_720 == pytest.approx(perceiver_data.CLASSES["right"][2], abs=10)
    (tmp_path / "again").mkdir()
    other = perceiver_data.synthetic(tmp_path / "again")
    assert {file.relative_to(other): file.read_bytes() for file in other.rglob("*.mp4")} == content
    assert perceiver_data.synthetic(tmp_path) == place, "it is made once"


def test_prepared_shards_are_read_as_well(
    tmp_path: Path, clips: Path, alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    video.prepare(work_units.Request(clips, tmp_path / "shards", 1), video.Settings(frames=2, size=8))
    output = alone(f"--data={tmp_path / 'shards'}", "--max-steps=2", "--epochs=3")
    assert disturbances.final(output)["step"] == 2
    with pytest.raises(OutlastError, match="was prepared with --frames 2, and the model takes 4; prepare it with --frames 4"):
        alone(f"--data={tmp_path / 'shards'}", "--frames=4")
    with pytest.raises(OutlastError, match="has 2 classes, and the model knows 1; set --num-labels"):
        alone(f"--data={tmp_path / 'shards'}", "--num-labels=1")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    manifest["source"]["classes"][1:] = []  # so that only its clips tell the second label
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / "other"))
    with pytest.raises(OutlastError, match="has label 1, and the model knows 0 to 0; set --num-labels, or correct the data"):
        alone(f"--data={tmp_path / 'shards'}", "--num-labels=1")
    data = perceiver_data.opened(str(tmp_path / "shards"), Config(frames=2, image_size=8))
    model, config = made(1, frames=2, image_size=8)
    with pytest.raises(OutlastError, match="has label 1, and the model knows 0 to 0"):
        perceiver.summed(perceiver.Settings(), data, model, range(1), perceiver.every_point(config), torch.float32, set())


def test_a_video_is_turned_as_players_show_it_and_one_that_starts_late_is_found(tmp_path: Path) -> None:
    picture = np.zeros((16, 32, 3), np.uint8)
    picture[:8] = 255  # bright above
    made, turned = tmp_path / "made.mp4", tmp_path / "turned.mp4"
    perceiver_data.write(made, np.stack([picture] * 4), np.zeros(4 * 1920, np.int16))
    one = bytes.fromhex("00010000 00000000 00000000 00000000 00010000 00000000 00000000 00000000 40000000")
    quarter = bytes.fromhex("00000000 00010000 00000000 ffff0000 00000000 00000000 00000000 00000000 40000000")
    content = made.read_bytes()
    at = content.index(one, content.index(b"tkhd"))
    turned.write_bytes(content[:at] + quarter + content[at + len(quarter) :])  # a quarter clockwise
    s, clip = video.Settings(4, 16), video.Clip("x", 0, 0)
    (before, _), (after, _) = (video.decoded(path, clip, s) for path in (made, turned))
    assert before[0, 4, 8].min() > 200
    assert before[0, 12, 8].max() < 50
    np.testing.assert_array_equal(after, np.rot90(before, -1, axes=(1, 2)))
    with av.open(str(tmp_path / "late.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.width = stream.height = 16
        for number in range(8):  # grows brighter
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 30 * number, np.uint8), format="rgb24")
            frame.pts = 500 + number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    frames, _ = video.decoded(tmp_path / "late.mkv", clip, s)
    assert len({int(frame[8, 8, 0]) for frame in frames}) == 4


# A run


def test_a_run_trains_measures_resumes_and_writes_a_clip(
    clips: Path, alone: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured model is not saved in inference mode: the copy made there would be used again by the next save, which torch
    refuses outside of that mode."""
    modes, save = [], Session.save

    def noted(run: Session, step: int, **how: Any) -> None:
        modes.append(torch.is_inference_mode_enabled())
        save(run, step, **how)

    monkeypatch.setattr(Session, "save", noted)
    output = alone(f"--dataset_dir={clips}", "--num_epochs=2", "--metrics_debug")
    assert modes == [False, False]
    said = capsys.readouterr().out
    assert "6 to train on and 4 to measure; 2 classes; 3 clips a step" in said
    assert re.search(r"\| Training Device=cpu Epoch=2 Step=4 Learning_Rate=0.001 Loss=\d\.\d+ Throughput=\d+\.\d+ Time=\d", said)
    assert [*disturbances.logged(output)] == [1, 2, 3, 4]
    assert all(norm > 0 for name in ("grad_norm", "weight_norm") for norm in logged(output, name))
    measured = disturbances.logged(output, "val_loss")
    assert [*measured] == [2, 4]
    best = [c.metric for c in checkpoints.list_(output / "checkpoints") if c.metric]
    final = disturbances.final(output)
    assert (best[-1].value, final["val_loss"], final["bad"]) == (pytest.approx(measured[4]), pytest.approx(measured[4]), 0)
    perceiver.main([f"--data={clips}", "--evaluate", f"--reconstruct={tmp_path / 'shown.mp4'}", "--dtype=float32"])
    found = json.loads((output / "evaluation.json").read_text())
    assert (found["clips"], set(found) >= {"image_l1", "audio_l1", "psnr", "top1"}) == (4, True)
    assert f"{found['psnr']:10.5f} dB" in capsys.readouterr().out
    with av.open(str(tmp_path / "shown.mp4")) as container:
        frame = next(container.decode(video=0))
        assert (frame.width, frame.height) == (16, 8)


def test_the_step_of_a_batch_is_that_of_its_micro_batches(clips: Path, alone: Callable[..., Path]) -> None:
    losses = []
    for number, more in enumerate(([], ["--microbatch=2"])):
        os.environ["OUTLAST_OUTPUT"] = str(Path(os.environ["OUTLAST_OUTPUT"]).with_name(f"m{number}"))
        alone(f"--data={clips}", "--max-steps=3", "--dropout=0", "--label-dropout=0.5", "--no-do-eval", "--dtype=float32", *more)
        losses.append(logged(Path(os.environ["OUTLAST_OUTPUT"]), "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_clip_that_cannot_be_read_does_not_lower_the_loss_of_the_others(
    tmp_path: Path, alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of those in its micro-batch nor of those in another one."""
    losses = []
    for batch in (3, 1):  # the same clip, with two broken ones and without
        a_clip(data := tmp_path / str(batch) / "a" / "0.mp4", frames=2)
        for number in range(1, batch):
            data.with_name(f"{number}.mp4").write_bytes(b"no video at all")
        monkeypatch.setenv("OUTLAST_OUTPUT", str(output := tmp_path / f"out-{batch}"))
        args = (f"--data={data.parent.parent}", f"--batch={batch}", "--max-steps=1", "--val=0", "--no-do-eval", "--skip-bad")
        alone(*args, "--dropout=0", "--label-dropout=0", "--dtype=float32", *(["--microbatch=2"] if batch > 1 else []))
        losses.append(logged(output, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_saved_once_by_all_ranks_together_and_every_clip_is_measured_once(clips: Path, tmp_path: Path) -> None:
    shutil.copytree(clips, tmp_path / "clips")
    (tmp_path / "clips" / "train" / "left" / "broken.mp4").write_bytes(b"no video at all")
    argv = [*USUAL, f"--data={tmp_path / 'clips'}", "--skip-bad", "--max-steps=3", "--dropout=0", "--dtype=float32"]
    disturbances.resized(perceiver.main, argv, tmp_path, rel=1e-3, logs=("loss", "val_loss", "val_psnr"))
    assert checkpoints.list_(tmp_path / "resized" / "checkpoints")[-1].step == 3


# What a run expects


def test_a_run_that_is_too_slow_fails_after_it_has_written_its_results(clips: Path, alone: Callable[..., Path]) -> None:
    with pytest.raises(OutlastError, match=r"throughput [\d.]+ clips/s is below 0.95 of the expected 1e\+09; the results"):
        alone(f"--data={clips}", "--max-steps=3", "--epochs=9", "--expected_average_throughput=1e9", "--no-do-eval")
    output = Path(os.environ["OUTLAST_OUTPUT"])
    assert disturbances.final(output)["step"] == 3
    assert (output / "model.pt").exists()


def test_the_speed_is_the_mean_of_ten_lines_without_the_first() -> None:
    speed = perceiver.Speed()
    assert (speed.add(0.08), speed.mean) == (0.0, None), "it compiles"
    for line in range(2, 30):
        speed.add(8.0 if line < 20 else 4.0)
    assert speed.mean == 4.0
    assert speed.add(14.0) == 5.0


def test_the_variables_of_a_manifest_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_STEPS": "100", "BATCH_SIZE": "2", "NPROC_PER_NODE": "32"}.items():
        monkeypatch.setenv(name, value)
    parsed = functools.partial(settings.parse, perceiver.Settings, about=None, aliases=perceiver.ALIASES)
    s = perceiver.from_variables(parsed([]))
    assert (s.max_steps, s.samples) == (100, 64)
    flags = "--max_steps=5 --batch_size=4 --num_workers 2 --logdir L --expected_average_throughput 8 --drop_last --do_eval"
    s = perceiver.from_variables(parsed(flags.split()))
    assert (s.max_steps, s.samples, s.workers, s.output_dir, s.expected_throughput, s.do_eval) == (5, 4, 2, "L", 8, True)
    monkeypatch.setenv("MAX_STEPS", "many")
    with pytest.raises(OutlastError, match="the variable MAX_STEPS is 'many'"):
        perceiver.from_variables(s)


# What is wrong


def test_videos_that_cannot_be_used_as_they_are_are_named(
    tmp_path: Path, alone: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        a_clip(tmp_path / "v" / "train" / "a" / f"{number}.mp4", number)
    a_clip(tmp_path / "v" / "val" / "a" / "0.mp4")
    (tmp_path / "v" / "train" / "a" / "broken.mp4").write_bytes(b"no video at all")
    args = (f"--data={tmp_path / 'v'}", "--epochs=1", "--dropout=0")
    with pytest.raises(OutlastError, match=r"train/a/broken\.mp4 is damaged or no video .*--skip-bad"):
        alone(*args)
    output = alone(*args, "--skip-bad", "--seed=1", f"--output-dir={tmp_path / 'other'}", "--no-do-eval")
    said = capsys.readouterr()
    assert "train/a/broken.mp4 cannot be read and is left out (" in said.err
    assert "1 clips could not be read and were left out: train/a/broken.mp4" in said.out
    assert disturbances.final(output)["bad"] == 1


@pytest.mark.parametrize(
    ("files", "args", "sentence"),
    [
        ([], [], "no data: .* has no files"),
        (["train/a/1.mp4", "val/b/2.mp4"], [], "val has class b .* that train has no video of"),
        (["a/1.mp4", "b/2.mp4"], ["--val=0"], "has no validation clips; give a directory val"),
        (["a/1.mp4", "b/2.mp4"], ["--image-size=9"], r"image_size \(9\) is not divisible by patch \(4\)"),
    ],
)
def test_data_that_cannot_be_right_are_one_sentence(
    tmp_path: Path, alone: Callable[..., Path], files: list[str], args: list[str], sentence: str
) -> None:
    (tmp_path / "d").mkdir()
    for name in files:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(b"0")
    with pytest.raises(OutlastError, match=sentence):
        alone(f"--data={tmp_path / 'd'}", *args)
    assert not (tmp_path / "out" / "final.json").exists()


def test_kinetics_needs_videos_and_a_resumed_run_the_same_ones(tmp_path: Path, clips: Path, alone: Callable[..., Path]) -> None:
    with pytest.raises(OutlastError, match="--dataset kinetics needs videos: give --data DIR"):
        alone("--dataset=kinetics")
    alone(f"--data={clips}", "--max-steps=1", "--no-do-eval")
    for number in range(10):
        a_clip(tmp_path / "others" / "train" / "a" / f"{number}.mp4", number) if number < 6 else None
    a_clip(tmp_path / "others" / "val" / "a" / "0.mp4")
    with pytest.raises(OutlastError, match=r"belongs to another model \(image_size 8\) than the one here \(image_size 12\)"):
        alone(f"--data={clips}", "--max-steps=2", "--no-do-eval", "--image-size=12")  # its weights would fit
    with pytest.raises(OutlastError, match="the checkpoint belongs to other clips"):
        alone(f"--data={tmp_path / 'others'}", "--num-labels=2", "--max-steps=2", "--no-do-eval")


# In slow tests: what it promises and what it learns


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_20_times_it_ends_with_the_same_bits(tmp_path: Path, clips: Path) -> None:
    argv = [*USUAL, f"--data={clips}", "--epochs=30", "--label-dropout=0.5", "--eval-every=20"]
    disturbances.killed_20_times(
        perceiver.main, argv, tmp_path, logs=("loss", "val_loss"), clocked=("throughput",), preload=("av",)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reconstruction_loss_on_the_synthetic_set_falls_by_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_here = perceiver_data.synthetic(tmp_path)
    video.prepare(work_units.Request(made_here, tmp_path / "shards", 1), video.Settings(frames=2, size=16))
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / "out"))
    sizes = ("--size=tiny", "--frames=2", "--image-size=16", "--num-latents=16", "--dropout=0", "--dtype=float32")
    learning = ("--lr=5e-3", "--warmup-steps=30", "--lr-schedule=cosine", "--image-weight=0.3", "--epochs=140")
    perceiver.main([f"--data={tmp_path / 'shards'}", *sizes, *learning, "--no-do-eval", "--log-steps=1"])
    part = Shards(tmp_path / "shards", "train").take(np.arange(40))
    image, audio = perceiver_model.pixels(part["video"]), perceiver_model.sound(part["audio"])
    constant = {"audio_loss": float(audio.abs().mean()), "image_loss": float((image - image.median()).abs().mean())}
    last = {name: float(np.mean(logged(tmp_path / "out", name)[-20:])) for name in ("loss", *constant)}
    assert last["loss"] < 0.5 * (0.3 * constant["image_loss"] + constant["audio_loss"])
    assert last["audio_loss"] < 0.5 * constant["audio_loss"]
    assert last["image_loss"] < 0.75 * constant["image_loss"]
