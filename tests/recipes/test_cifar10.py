"""outlast.recipes.cifar10 in one process and in worlds, with the workshop's settings and the modern ones; and new images."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import disturbances
from outlast.base.errors import OutlastError
from outlast.data import cifar, digits
from outlast.recipes import cifar10, classify
from outlast.recipes.cifar10 import Settings
from outlast.recipes.shared import results, settings
from outlast.storage import checkpoints
from outlast.training.state import weights

SMALL = ("--batch=8", "--microbatch=2", "--log-every=1", "--dtype=float32")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def made(directory: Path, each: int, test: int, names: tuple[str, ...] = CIFAR) -> Path:
    """Images whose class is their brightness, `each` in a file of the five."""
    noise = np.random.default_rng(0)
    for file, n in [*((file, each) for file in cifar.TRAIN), (cifar.TEST, test)]:
        y = noise.integers(0, 10, n)
        x = y[:, None, None, None] * 25 + noise.integers(0, 20, (n, 3, 32, 32))
        cifar.write(directory, file, x.astype(np.uint8), y.tolist(), file)
    cifar.write_meta(directory, names, per_batch=each)
    return directory


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("images"), each=4, test=20)  # 20 images: 3 steps an epoch, the last one short


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs the recipe in this process, as a world of one that writes to tmp_path/out; returns the lines that it prints."""
    for name in [name for name in os.environ if name.startswith("OUTLAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / "out"))

    def run(*argv: object) -> list[str]:
        capsys.readouterr()
        disturbances.alone(cifar10.main, argv)
        return capsys.readouterr().out.splitlines()

    return run


def said(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / "out" / name).read_text())


# The network


def the_workshop_s() -> nn.Sequential:
    """Layer by layer as its page has it, with ReLU before the pool."""

    def block(i: int, m: int, o: int) -> list[nn.Module]:
        first, second = nn.Conv2d(i, m, 3, padding=1), nn.Conv2d(m, o, 3, padding=1)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(o)]

    body = [*block(3, 32, 64), *block(64, 128, 128), *block(128, 256, 256)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))


def test_the_network_computes_what_the_workshop_s_does() -> None:
    torch.manual_seed(0)
    theirs, ours = the_workshop_s().double(), cifar10.network(group=8).double()
    assert sum(parameter.numel() for parameter in ours.parameters()) == 3_229_770
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.rand(4, 3, 32, 32, dtype=torch.float64), torch.arange(4)
    for net in (theirs, ours):
        F.cross_entropy(net(x), y).backward()
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    ours.load_state_dict(theirs.state_dict())
    assert torch.allclose(theirs.eval()(x), ours.eval()(x), atol=1e-12)


def test_batchnorm_sees_groups_and_its_running_statistics_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    norm, x = cifar10.BatchNorm(5, group=4), torch.randn(10, 5, 3, 3)
    parts = x.split(4)  # 4, 4, 2
    torch.testing.assert_close(norm(x), torch.cat([nn.BatchNorm2d(5)(part) for part in parts]))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert not norm.running_mean.any(), "only `statistics` moves them"
    cifar10.statistics(norm, 1.0)
    variance = sum(part.transpose(0, 1).reshape(5, -1).var(1) * len(part) / 10 for part in parts)
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variance)


def test_first_filters_decorrelate_pixels() -> None:
    x = torch.randint(0, 40, (64, 3, 32, 32)) + 5 * torch.arange(32)  # neighbours are alike
    first = nn.Conv2d(3, 32, 3, padding=1)
    cifar10.whiten(first, x.to(torch.uint8))
    seen = first(x / 255)[:, :16, 1:-1, 1:-1].transpose(0, 1).reshape(16, -1)
    torch.testing.assert_close(torch.cov(seen), torch.eye(16), atol=0.02, rtol=0)
    assert seen.mean(1).abs().max() < 1e-3
    torch.testing.assert_close(first.weight[16:], -first.weight[:16])
    grey = torch.randint(0, 255, (8, 1, 32, 32), dtype=torch.uint8).expand(-1, 3, -1, -1)
    cifar10.whiten(first, grey)
    assert first.weight.isfinite().all()


# Settings


def parsed(flags: str) -> Settings:
    return settings.parse(Settings, flags.split(), "", cifar10.ALIASES, {"workshop": cifar10.WORKSHOP})


ARRAYS = np.zeros((100, 3, 32, 32), np.uint8), np.zeros(100, np.int64)


def test_the_workshop_s_setting_fills_in_what_is_not_given() -> None:
    modern, workshop = parsed(""), parsed("--setting workshop --lr=0.1 --batch=64")
    assert (modern.lr, modern.schedule, modern.nesterov) == (0.05, "triangle", True)
    given = (workshop.lr, workshop.momentum, workshop.weight_decay, workshop.schedule, workshop.dtype)
    assert given == (0.1, 0.9, 1e-4, "constant", "float32")
    assert (workshop.ema, workshop.whiten, workshop.shift) == (0.0, False, 0)
    others = parsed("--setting=workshop"), parsed("--batch-size=9")
    assert [cifar10.Images(ARRAYS, s, 2).batch for s in (modern, workshop, *others)] == [128, 64, 256, 18]
    with pytest.raises(OutlastError, match=r"^--batch 64 and --batch-size 32 are two sizes of a step; leave one of them out$"):
        cifar10.Images(ARRAYS, Settings(batch=64, batch_size=32), 2)


def test_rates_rise_and_fall_or_stay() -> None:
    s = Settings(lr=1.0, schedule="triangle")
    assert [round(cifar10.rate(s, step, 10), 3) for step in range(10)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert cifar10.rate(Settings(lr=1.0, schedule="constant"), 9, 10) == 1.0


def test_augmentation_is_a_function_of_seed_epoch_and_index() -> None:
    s = Settings()
    x = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)

    def seen(epoch: int, *indices: int) -> torch.Tensor:
        batch: Any = type("Batch", (), {"epoch": epoch, "indices": np.array(indices, dtype=np.int64)})
        return cifar10.augmented(s, x[list(indices)], batch)

    together = seen(3, 0, 1, 2, 3, 4, 5)
    assert torch.equal(together[[4, 1]], seen(3, 4, 1)), "whoever computes it, and with which others"
    assert not torch.equal(together, seen(4, 0, 1, 2, 3, 4, 5))
    s = parsed("--setting=workshop")
    assert torch.equal(seen(3, 0, 1, 2, 3, 4, 5), x)


# Training as the workshop's page has it


def test_the_workshop_s_command_prints_what_its_page_shows(alone: Callable[..., list[str]], images: Path, tmp_path: Path) -> None:
    file = tmp_path / "shared" / "cifar10-model.pth"
    flags = "--setting=workshop --epochs=2 --batch-size=12 --learning-rate=0.002 --print-freq=1"
    log = alone(*flags.split(), f"--model-file={file}", f"{images}/")
    assert [re.sub(r"\d+\.\d+", "x", line) for line in log] == [
        f"reading {images}",
        *(f"[{epoch},     {step}] loss: x" for epoch in (1, 2) for step in (1, 2)),
        f"saving model: {tmp_path}/out/model.pt",
        f"saving model: {file}",
        "Finished Training: 4 steps in x s, world of 1",
    ]
    used = said(tmp_path, "parameters.json")
    assert (used["batch"], used["lr"], used["momentum"], used["dtype"]) == (12, 0.002, 0.9, "float32")
    assert used["classes"][:2] == ["plane", "car"]
    assert [path.name for path in file.parent.iterdir()] == [file.name], "nothing half-written is left"
    shutil.rmtree(tmp_path / "out")
    log = alone("--evaluate", f"--model-file={file}", images)
    found = said(tmp_path, "evaluation.json")
    assert (found["weights"], found["images"], list(found["classes"])) == (file.name, 20, classify.CLASSES)
    assert log[0] == f"reading {images}"
    assert log[1] == f"Accuracy of the network on the 20 test images: {found['accuracy']} %"
    assert log[2].startswith("Accuracy for class: plane is ")
    assert log[3].startswith("Accuracy for class: car   is ")
    assert log[-1] == "Finished Testing"


def test_a_worker_s_batch_is_that_of_the_beginning_for_the_whole_run() -> None:
    s = parsed("--setting=workshop --batch-size=10")
    two, four = cifar10.Images(ARRAYS, s, 2), cifar10.Images(ARRAYS, s, 4)
    assert (two.batch, two.total_steps, four.batch, four.total_steps) == (20, 50, 40, 30)
    four.load_state_dict(two.state_dict())
    assert (four.batch, four.total_steps) == (20, 50)
    other = cifar10.Images(ARRAYS, Settings(batch=50), 4)
    other.load_state_dict(two.state_dict())
    assert other.batch == 50, "who says it for all ranks together may change it"


# Worlds


def doubled(patch: pytest.MonkeyPatch) -> None:
    """Everything is computed in float64, so that what rounding does to 32 bits in BatchNorm hides no mistake."""
    network = cifar10.network
    patch.setattr(cifar10, "network", lambda *group: network(*group).double())
    patch.setattr(cifar10, "shown", lambda x: x.double() / 255)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


def in_double(argv: list[str]) -> None:
    doubled(pytest.MonkeyPatch())  # the process ends with it
    cifar10.main(argv)


def printing(to: Path, argv: list[str]) -> None:
    """A rank whose lines are kept, in a job that keeps its best checkpoint."""
    os.environ |= {"OUTLAST_CHECKPOINT_BEST": "1 min loss", "OUTLAST_CHECKPOINT_EVERY": "2 steps"}
    sys.stdout = (to / f"stdout-{os.environ['RANK']}").open("w", buffering=1)
    in_double(argv)


@pytest.fixture(scope="module")
def two(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the output of a world of two, and what its ranks have printed."""
    directory = tmp_path_factory.mktemp("two")
    argv = [f"--data={images}", "--epochs=1", *SMALL]
    disturbances.trained(functools.partial(printing, directory), argv, directory / "out", 2)
    return directory


def test_a_world_of_two_computes_what_a_world_of_one_does(
    alone: Callable[..., list[str]], images: Path, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(monkeypatch)
    alone(f"--data={images}", "--epochs=1", *SMALL)
    here = tmp_path / "out"
    assert disturbances.logged(two / "out") == pytest.approx(disturbances.logged(here), rel=1e-6), "the loss is that of all ranks"
    ours, theirs = (torch.load(output / "model.pt", weights_only=True) for output in (two / "out", here))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)  # BatchNorm's statistics, too
    assert ours["5.num_batches_tracked"] == 3


def test_a_world_of_two_logs_each_step_once_and_one_rank_writes_the_model(two: Path) -> None:
    lines = [json.loads(line) for line in (two / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["images_per_s"] > 0 for line in lines)
    printed = [(two / f"stdout-{rank}").read_text() for rank in range(2)]
    assert (printed[0].count("saving model: "), printed[1]) == (1, "")
    final = json.loads((two / "out" / "final.json").read_text())
    assert (final["step"], final["loss"]) == (3, lines[-1]["loss"])
    assert not [path.name for path in (two / "out").iterdir() if "writing" in path.name]


def test_the_best_checkpoint_is_measured_with_its_averages(
    two: Path, images: Path, tmp_path: Path, alone: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(monkeypatch)
    shutil.copytree(two / "out", tmp_path / "out")
    [kept] = checkpoints.ranked(checkpoints.list_(tmp_path / "out" / "checkpoints"))[:1]
    alone(f"--data={images}", "--evaluate", "--checkpoint=best")
    assert said(tmp_path, "evaluation.json")["weights"] == kept.path.name
    [last] = [each for each in checkpoints.list_(tmp_path / "out" / "checkpoints") if each.step == 3]
    model, name = cifar10.trained(tmp_path / "out", name="3")
    assert (name, results.sha256(model)) == (last.path.name, said(tmp_path, "final.json")["weights_sha256"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("setting", "memory"), [("modern", False), ("workshop", False), ("workshop", True)])
def test_killed_20_times_it_ends_with_the_same_bits(setting: str, memory: bool, tmp_path: Path) -> None:
    data = made(tmp_path, each=48, test=4)
    argv = f"--data={data} --setting={setting} --epochs={12 if memory else 6} --batch=24 --microbatch=4 --log-every=1".split()
    disturbances.killed_20_times(cifar10.main, argv, tmp_path, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["modern", "workshop"])
def test_resized_1_to_3_to_2_each_sample_is_seen_once_and_the_loss_is_the_same(
    setting: str, images: Path, tmp_path: Path
) -> None:
    argv = [f"--data={images}", f"--setting={setting}", "--epochs=3", *SMALL]
    disturbances.resized(in_double, argv, tmp_path, rel=1e-6)


# Evaluation


def test_evaluation_uses_the_running_statistics_and_prints_an_accuracy_that_is_rounded_and_not_cut_off(
    alone: Callable[..., list[str]], images: Path, tmp_path: Path
) -> None:
    model = cifar10.network()
    weights.write(tmp_path / "out" / "model.pt", weights.whole(model))
    shutil.copytree(images, tmp_path / "data")
    x = np.random.default_rng(1).integers(0, 256, (16, 3, 32, 32), np.uint8)
    model.eval()
    y = [int(model(cifar10.shown(torch.from_numpy(each[None]))).argmax()) for each in x]
    y[:3] = [(label + 1) % 10 for label in y[:3]]
    cifar.write(tmp_path / "data", cifar.TEST, x, y, "")
    log = alone(f"--data={tmp_path / 'data'}", "--evaluate")
    assert log[1] == "Accuracy of the network on the 16 test images: 81.2 %"  # of 81.25
    assert said(tmp_path, "evaluation.json")["accuracy"] == 81.2
    right = np.arange(10000) < 7499
    assert (cifar10.percent(right), cifar10.percent(right[:0])) == (75.0, None)


def test_weights_of_the_workshop_s_script_are_read_without_running_code_and_without_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = the_workshop_s()
    named = {f"module.network.{name}": value for name, value in theirs.state_dict().items()}
    torch.serialization.register_package(-1, lambda _: "cuda:0", lambda _, __: None)  # storages are marked as those of a GPU
    try:
        torch.save({"epoch": 9, "state_dict": named}, tmp_path / "checkpoint.pth.tar")
    finally:
        torch.serialization._package_registry.pop(0)
    model = cifar10.network()
    cifar10.load(model, tmp_path / "checkpoint.pth.tar")
    assert results.sha256(model) == results.sha256(theirs)

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    for file, sentence in [
        ("evil.pth", r"evil\.pth cannot be read as weights: .*; give a file that torch\.save has written$"),
        ("none.pth", r"none\.pth does not exist; give a file or a directory of weights"),
    ]:
        with pytest.raises(OutlastError, match=sentence):
            cifar10.load(model, tmp_path / file)
    assert not (tmp_path / "ran").exists()


# Mistakes


def test_what_is_missing_is_said_in_one_sentence(alone: Callable[..., list[str]], images: Path, tmp_path: Path) -> None:
    for argv, sentence in [
        (["--evaluate"], r"^no data: give --data DIR or set OUTLAST_DATA; outlast data get digits --to DIR makes some$"),
        (["--evaluate", images], r"has no valid checkpoint; train first, or name the output directory of a run that has one$"),
        (["--evaluate", "--model-file=a", "--checkpoint=3", images], r"^--model-file a and --checkpoint 3 are two models; leave"),
        ([tmp_path / "none"], r"none is not CIFAR-10: there is no such directory; unpack cifar-10-python\.tar\.gz there"),
        ([f"--model-file={tmp_path}", images], r"^--model-file \S+ is a directory; name a file elsewhere$"),
        (["--shift=32", images], r"--shift: 32 is above 31"),
    ]:
        with pytest.raises(OutlastError, match=sentence):
            alone(*argv)
    assert not list(tmp_path.glob("out/*.pt"))


# New images


def test_new_images_are_classified_and_those_that_cannot_be_read_are_named(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    for name, size in (("small.png", (8, 8)), ("large.JPEG", (90, 60))):
        Image.new("RGB", size, (200, 10, 10)).save(folder / name)
    Image.new("LA", (40, 40), 128).save(tmp_path / "grey.png")
    for name in ("bad.png", "text.txt"):  # the latter is not looked at
        (folder / name).write_bytes(b"no image")
    with pytest.raises(SystemExit, match="1"):
        classify.main([str(two / "out"), str(tmp_path / "grey.png"), str(tmp_path / "folder"), "-o", "json"])
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [Path(line["image"]).name for line in lines] == ["grey.png", "large.JPEG", "small.png"]
    for line in lines:
        likely = [each["probability"] for each in line["classes"]]
        assert (len(likely), likely) == (3, sorted(likely, reverse=True))
        assert {each["name"] for each in line["classes"]} <= set(classify.CLASSES)
    assert err.startswith(f"outlast: {folder}/bad.png is damaged or no image (")

    classify.main([str(two / "out" / "model.pt"), str(tmp_path / "grey.png"), "--top=1", "--classes", *"abcdefghij"])
    assert re.fullmatch(rf"{tmp_path}/grey\.png  [a-j] \d+\.\d %\n", capsys.readouterr().out)
    (tmp_path / "empty").mkdir()
    for argv, sentence in [
        (["none.png"], r"^none\.png does not exist; name images, or folders of images$"),
        ([str(tmp_path / "empty")], r"empty has no images \(\.jpg, "),
        ([str(tmp_path / "grey.png"), "--classes", "a"], r"^--classes has 1 names, and the network tells 10 classes apart"),
    ]:
        with pytest.raises(OutlastError, match=sentence):
            classify.main([str(two / "out"), *argv])


# What it learns


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modern_learns_the_digits(alone: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    digits.write(tmp_path / "digits")
    alone(tmp_path / "digits", "--batch=128", "--epochs=6", "--no-flip")
    alone(tmp_path / "digits", "--evaluate")
    assert said(tmp_path, "evaluation.json")["accuracy"] >= 98
