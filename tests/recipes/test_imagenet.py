"""The ImageNet recipe: its models, its schedules, its lines and refusals, and what made older scripts go wrong."""

from __future__ import annotations

import json
import re
import shutil
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import disturbances
import textures
from outlast.base.errors import OutlastError
from outlast.data.prepare import images as prepare
from outlast.data.prepare import work_units
from outlast.recipes import imagenet, imagenet_model
from outlast.recipes.imagenet import Settings
from outlast.recipes.imagenet_model import BasicBlock, Bottleneck, ResNet, Statistics
from outlast.recipes.shared import loop, results, settings
from outlast.storage import checkpoints
from outlast.training.state import checkpoint

SMALL = ("--image-size=32", "--stored-size=0", "--workers=0", "--microbatch=4", "-b=8", "--print-freq=1", "--dtype=float32")
ITERATION = re.compile(r"epoch: (\d+), iteration: (\d+), data_idx: (\d+), loss: [\d.]+, Acc@1: [\d.]+, lr: \S+, [\d.]+ images/s")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes, 30 images to train on and 12 to measure."""
    return textures.write(tmp_path_factory.mktemp("images") / "set", {"train": 5, "val": 2}, kinds=6, size=36)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of this run alone, with models of an eighth of the channels."""
    monkeypatch.setattr(imagenet_model, "WIDTH", 8)
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / "out"))
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTLAST_CHECKPOINT_BEST", "1 max acc1")


def refusal(*argv: object) -> str:
    with pytest.raises(OutlastError) as refused:
        disturbances.alone(imagenet.main, argv)
    return str(refused.value)


# Models


@pytest.mark.parametrize(
    ("arch", "count"),
    [("resnet18", 11689512), ("resnet34", 21797672), ("resnet50", 25557032), ("resnet101", 44549160), ("resnet152", 60192808)],
)
def test_the_models_have_as_many_parameters_as_everybodys(monkeypatch: pytest.MonkeyPatch, arch: str, count: int) -> None:
    monkeypatch.setattr(imagenet_model, "WIDTH", 64)
    for name in ("kaiming_normal_", "kaiming_uniform_", "normal_"):  # slow without numbers, too
        monkeypatch.setattr(nn.init, name, lambda tensor, **_: tensor)
    with torch.device("meta"):
        model = ResNet(arch, 1000)
        few = ResNet(arch, 200)
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(p.numel() for p in few.fc.parameters()) == 200 * (model.fc.in_features + 1)


@pytest.mark.slow  # as importing transformers is
@pytest.mark.parametrize("arch", imagenet_model.LAYERS)
def test_a_model_is_transformers_with_the_same_weights(arch: str) -> None:
    transformers = pytest.importorskip("transformers")
    ours = ResNet(arch, 7).eval()
    basic = arch in ("resnet18", "resnet34")
    theirs = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[(8 if basic else 32) * 2**stage for stage in range(4)], num_labels=7,
            depths=list(imagenet_model.LAYERS[arch]), layer_type="basic" if basic else "bottleneck",
        )
    ).eval()  # fmt: skip
    with torch.no_grad():  # so that every norm does something
        for name, tensor in ours.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1 if "var" in name else torch.randn_like(tensor) / 5)
    # the same tensors, in the same order but for shortcuts, which theirs have before a block's layers
    named = {name: each for name, each in ours.state_dict().items() if "downsample" not in name}
    shortcuts = {name: each for name, each in ours.state_dict().items() if "downsample" in name}
    state = theirs.state_dict()
    for want, have in ((shortcuts, "shortcut"), (named, "")):
        names = [name for name in state if ("shortcut" in name) == bool(have)]
        assert len(names) == len(want)
        state |= dict(zip(names, want.values(), strict=True))
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", imagenet_model.LAYERS)
def test_zero_gamma_is_that_of_the_last_norm_of_every_block_of_every_model(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(imagenet_model, "WIDTH", 1)
    model = ResNet(arch, 10, zero_gamma=True)
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    assert len(blocks) == sum(imagenet_model.LAYERS[arch])
    zero = {id(block.bn2 if isinstance(block, BasicBlock) else block.bn3) for block in blocks}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 0).all()) == (id(module) in zero)
    assert not any((m.weight == 0).any() for m in ResNet(arch, 10).modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_running_statistics_are_those_of_the_global_batch_in_any_world(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    draw = torch.Generator().manual_seed(0)
    pieces = [torch.randn(n, 3, 4, 4, generator=draw) for n in (4, 4, 4, 4, 2)]
    total = sum(map(len, pieces))
    expected = sum((len(x) / total) * x.mean((0, 2, 3)) for x in pieces) * 0.1
    reduced: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        norm = nn.BatchNorm2d(3)
        statistics = Statistics(norm)
        statistics.begin()
        for x in pieces[rank::ranks]:
            norm(x)
            statistics.add(len(x) * ranks / total)
        reduced.append(statistics._mean)
    flat = sum(torch.cat(each) for each in reduced)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.copy_(flat))
    statistics.end(ranks)
    torch.testing.assert_close(norm.running_mean, expected)
    assert norm.num_batches_tracked == 1


def test_published_weights_load_and_of_another_number_of_classes_all_but_the_last_layer(tmp_path: Path) -> None:
    model, other = ResNet("resnet18", 10), ResNet("resnet18", 10)
    file = tmp_path / "resnet18.pth"
    torch.save({"state_dict": {f"module.{name}": each for name, each in model.state_dict().items()}}, file)
    assert imagenet_model.load(other, file) == ""
    assert results.sha256(other) == results.sha256(model)
    few = ResNet("resnet18", 3)
    assert imagenet_model.load(few, file) == "fc, as it is for 10 classes and the data have 3"
    assert torch.equal(few.conv1.weight, model.conv1.weight)
    with pytest.raises(OutlastError, match=r"are not of this model: layer1\.2\.conv1\.weight is missing"):
        imagenet_model.load(ResNet("resnet34", 10), file)


# Schedules


def test_the_learning_rate_is_in_proportion_to_the_batch_and_falls_as_it_should() -> None:
    s = Settings(batch_size=512, epochs=90, schedule="step")
    assert [imagenet.rate(s, epoch * 10, 10) for epoch in (5, 29.9, 30, 60, 80, 89)] == pytest.approx(
        [0.2, 0.2, 0.02, 0.002, 0.0002, 0.0002]
    )
    assert [imagenet.rate(s, step, 10) for step in (0, 49)] == pytest.approx([0.2 / 51, 0.2 * 50 / 51])
    s = Settings(batch_size=64, epochs=10, warmup_epochs=0)
    assert [imagenet.rate(s, step, 10) for step in (0, 50, 100)] == pytest.approx([0.025, 0.0125, 0])
    rising = [imagenet.rate(Settings(epochs=epochs), step, 10) for epochs, step in ((10, 19), (10, 20), (90, 49), (90, 50))]
    assert rising == pytest.approx([0.1 * 20 / 21, 0.1, 0.1 * 50 / 51, 0.1])


def test_norms_and_biases_are_not_pulled_towards_0_unless_asked() -> None:
    model = ResNet("resnet50", 10)
    pulled, not_pulled = loop.groups(model, 0.1)
    assert (pulled["weight_decay"], not_pulled["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in pulled["params"]} == {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert len(pulled["params"]) + len(not_pulled["params"]) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in loop.groups(model, 0.1, 0.1)] == [0.1, 0.1]


def test_the_mean_of_weights_moves_by_its_decay() -> None:
    mean, model = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    nn.init.constant_(model.weight, 3.0)
    model.num_batches_tracked.fill_(7)
    imagenet.average(mean, model, 0.75)
    assert mean.weight.tolist() == [1.5, 1.5]
    assert mean.num_batches_tracked == 7


# Flags


def test_the_flags_of_older_scripts_are_understood() -> None:
    argv = "--input_path /data/tiny/train --epochs 10 --num_data_workers 2 --model_arch resnet101 --c10d_backend gloo"
    s = settings.parse(Settings, argv.split(), None, imagenet.ALIASES)
    assert (s.data, s.epochs, s.workers, s.arch) == ("/data/tiny/train", 10, 2, "resnet101")
    argv = "-a resnet50 -j 3 --epochs 9 -b 64 --lr 0.2 --momentum 0.8 --wd 1e-3 -p 5 --dist-backend nccl --checkpoint-file c DIR"
    s = settings.parse(Settings, argv.split(), None, imagenet.ALIASES)
    assert (s.arch, s.workers, s.epochs, s.batch_size, s.lr, s.momentum) == ("resnet50", 3, 9, 64, 0.2, 0.8)
    assert (s.weight_decay, s.print_freq, s.data) == (1e-3, 5, "DIR")


# Runs


def test_a_run_says_where_it_is_saves_what_is_due_and_is_measured(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, capture = list[int](), checkpoint.capture
    monkeypatch.setattr(checkpoint, "capture", lambda *args: captures.append(1) or capture(*args))
    argv = [str(images), *SMALL, "--epochs=2", "--lr=0.5", "--ema-decay=0.5"]
    imagenet.main(argv)
    said = capsys.readouterr().out
    assert [tuple(map(int, found)) for found in ITERATION.findall(said)] == [(e, i, 8 * i) for e in (0, 1) for i in range(4)]
    assert len(re.findall(r"^ \* Acc@1 \d+\.\d{3} Acc@5 \d+\.\d{3}$", said, re.MULTILINE)) == 2
    for line in ("creating model: resnet18", "no checkpoint yet, starting from epoch 0", "best model found at epoch 0"):
        assert f"=> {line}\n" in said
    assert len(captures) == 2, "the state is copied when a save is due: at the end of each of two epochs, not in 8 steps"

    output = tmp_path / "out"
    final = disturbances.final(output)
    assert (final["step"], final["epochs"]) == (8, 2)
    assert len(disturbances.logged(output)) == 8
    assert checkpoints.list_(output / "checkpoints")[-1].step == 8
    saved = torch.load(output / "model.pt", weights_only=True)
    assert len(saved["fc.weight"]) == 6
    assert results.sha256(saved) == final["weights_sha256"]
    imagenet.main([*argv, "--evaluate", "--checkpoint=8"])
    said = capsys.readouterr().out
    found = json.loads((output / "evaluation.json").read_text())
    assert (found["acc1"], found["acc5"], found["images"]) == (final["acc1"], final["acc5"], 12)
    assert found["weights_sha256"] == final["weights_sha256"]
    assert sum(each["right"] for each in found["classes"].values()) * 100 / 12 == pytest.approx(found["acc1"])
    assert "step-00000008: Acc@1" in said
    assert "by class:" in said

    assert "lacks ema/layer1.2.bn1.bias" in refusal(*argv, "--arch=resnet34")
    assert "a run of another --ema-decay (ema True) than the one here" in refusal(*argv, "--ema-decay=0")
    renamed = shutil.copytree(images, tmp_path / "renamed")
    for part in ("train", "val"):
        (renamed / part / "across-04").rename(renamed / part / "stones")
    assert "other classes (classes across-04) than the one here (classes stones)" in refusal(renamed, *argv[1:], "--no-pack")


def test_packed_images_and_files_make_the_same_run(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, more in (("packed", ()), ("files, read by a process", ("--no-pack", "--workers=1"))):
        monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / name))
        imagenet.main([str(images), *SMALL, "--epochs=1", *more])
        found.append(disturbances.final(tmp_path / name))
    assert found[0] == found[1]


def test_fewer_than_five_classes_have_no_acc5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imagenet.main(["--synthetic", "--num-classes=3", "--synthetic-images=16", *SMALL, "--epochs=1"])
    said = capsys.readouterr().out
    assert "Acc@5 is not measured: of 3 classes, the first five are all of them" in said
    assert re.search(r"^ \* Acc@1 [\d.]+$", said, re.MULTILINE)
    assert "acc5" not in disturbances.final(tmp_path / "out")


# tiny-imagenet


def test_a_flat_val_with_a_list_of_labels_has_all_its_classes(tmp_path: Path, images: Path) -> None:
    root = tmp_path / "tiny"
    shutil.copytree(images / "train", root / "train")
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for number, file in enumerate(sorted((images / "val").glob("*/*"))):
        shutil.copy(file, root / "val" / "images" / f"val_{number}{file.suffix}")
        lines.append(f"val_{number}{file.suffix}\t{file.parent.name}\t0\t0\t36\t36\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    data = imagenet.opened(Settings(data=str(root / "train")))  # as scripts were given it
    assert data.classes == sorted(textures.TEXTURES)[:6]
    labels = [int(data.val[i].y) for i in range(len(data.val))]
    assert sorted(labels) == sorted([*range(6)] * 2)
    silent = cast(Any, types.SimpleNamespace(rank=1, world_size=1))
    model, record = imagenet.first(Settings(), data, imagenet.Log(silent))
    assert model.fc.out_features == record.outputs == 6


# Mistakes


def test_mistakes_are_one_sentence(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTLAST_DATA", raising=False)
    assert refusal(*SMALL).startswith("no data: give a directory (--data DIR), set OUTLAST_DATA, or train on made ones")
    assert "none: there is no such directory; give one with train/CLASS/" in refusal(tmp_path / "none", *SMALL)
    assert "num_classes (5) is below the 6 classes of" in refusal(images, *SMALL, "--num-classes=5")
    broken = shutil.copytree(images, tmp_path / "broken")
    (broken / "train" / "across-04" / "0.jpg").write_bytes(b"\xff\xd8 no image")
    assert "train/across-04/0.jpg is damaged or no image" in refusal(broken, *SMALL)
    shutil.rmtree(broken / "val" / "across-04")
    assert "1 of 6 classes are in train and not in val (across-04)" in refusal(broken, *SMALL)
    shutil.rmtree(broken / "val")
    (broken / "val").mkdir()
    assert "has no images" in refusal(broken, *SMALL)
    (tmp_path / "empty").mkdir()
    assert "empty has no files" in refusal(tmp_path / "empty", *SMALL)


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "packed"
    source = textures.write(tmp_path / "set", {"train": 3, "val": 1}, kinds=3, size=16)
    prepare.prepare(work_units.Request(source, place, 1), prepare.Settings())
    manifest = json.loads((place / "manifest.json").read_text())
    del manifest["source"]["classes"]
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert "does not say which classes there are; give their number with --num-classes" in refusal(place, *SMALL)
    assert "has label 2 in train, and labels are 0 to 1; prepare the data" in refusal(place, *SMALL, "--num-classes=2")


def test_an_image_that_cannot_be_decoded_is_left_out_if_asked(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(images, tmp_path / "broken")
    (broken / "train" / "across-04" / "0.jpg").write_bytes(b"\xff\xd8 no image")
    for name, more in (("packed", ()), ("files", ("--no-pack",))):
        monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / name))
        imagenet.main([str(broken), *SMALL, "--epochs=1", "--skip-bad", *more])
        assert "train/across-04/0.jpg" in capsys.readouterr().err
        final = disturbances.final(tmp_path / name)
        assert (final["step"], final["left_out"]) == (4, 1)


def test_a_loss_that_is_no_number_ends_the_run(images: Path) -> None:
    sentence = refusal(images, *SMALL, "--epochs=1", "--lr=1e30", "--warmup-epochs=0")
    assert re.fullmatch(r"the loss of step \d is nan; lower --lr \(1e\+30 per 256 images\) or raise --warmup-epochs", sentence)


# Killed, resized, and what it learns

STEP = ("--image-size=32", "--stored-size=0", "--min-crop=0.3", "--print-freq=1")


def quarter(argv: list[str]) -> None:
    """The recipe with ResNets of a quarter of the channels, in a process of its own."""
    imagenet_model.WIDTH = 16
    imagenet.main(argv)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_20_times_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The last micro-batch of each epoch is short; an epoch ends with a save, others come between."""
    data = textures.write(tmp_path / "set", {"train": 7, "val": 2}, size=36)  # 70 images: 9 steps, the last of 6
    argv = [str(data), *STEP, "-b=8", "--microbatch=4", "--epochs=5", "--ema-decay=0.9", "--lr=1"]
    disturbances.killed_20_times(quarter, argv, tmp_path, logs=("loss", "train_acc1", "acc1", "val_loss"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resized_each_image_is_seen_once_and_the_loss_is_the_same(tmp_path: Path) -> None:
    data = textures.write(tmp_path / "set", {"train": 7, "val": 3}, size=36)
    argv = [str(data), *STEP, "-b=16", "--microbatch=4", "--epochs=2", "--lr=0.1", "--dtype=float32"]
    disturbances.resized(quarter, argv, tmp_path, rel=1e-2, logs=("loss", "val_loss"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resnet18_tells_ten_textures_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_model, "WIDTH", 64)
    data = textures.write(tmp_path / "set", {"train": 64, "val": 20}, size=40)
    crops = ["--image-size=32", "--stored-size=0", "--min-crop=0.6", "--val-crop=0.9"]
    imagenet.main([str(data), *crops, "-b=16", "--microbatch=16", "--epochs=12", "--lr=0.4", "--label-smoothing=0"])
    assert disturbances.final(tmp_path / "out")["acc1"] >= 95
