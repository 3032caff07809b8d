"""Recipes: they train, resume exactly, and fail with one sentence and an exit code that can be trusted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast import checkpoints
from outlast.data import cifar
from outlast.errors import OutlastError
from outlast.recipes import cifar10, results, smoke
from outlast.training import weights

SMOKE_LINE = re.compile(r"\[(DDP|TRAIN|EPOCH|DONE)\] ")


def started(tmp_path: Path, recipe: str, *args: str, ranks: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """A recipe that has run to its end: in a plain process, or with `ranks` under torchrun."""
    runner = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    command = [sys.executable, "-m", *runner, f"outlast.recipes.{recipe}", *args]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "OUTLAST_OUTPUT": str(tmp_path / "out"), **env}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


def said(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / "out" / name).read_text())


def a_refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a process that ended with 78."""
    assert done.returncode == 78, done.stderr
    (sentence,) = done.stderr.splitlines()
    return sentence.removeprefix("outlast: ")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve training images a file and four test images; the class is the brightness."""
    directory = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for file, n in [*((file, 12) for file in cifar.TRAIN), (cifar.TEST, 4)]:
        y = noise.integers(0, 10, n)
        x = y[:, None, None, None] * 25 + noise.integers(0, 20, (n, 3, 32, 32))
        cifar.write(directory, file, x.astype(np.uint8), y.tolist(), file)
    cifar.write_meta(directory, [f"shade {i}" for i in range(10)], per_batch=12)
    return directory


# smoke


def test_smoke_passes_in_a_world_of_two(tmp_path: Path) -> None:
    done = started(tmp_path, "smoke", "--world", "2", ranks=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(SMOKE_LINE.match(line) for line in lines)
    kinds = [line.split("]")[0] + "]" for line in lines]
    assert {kind: kinds.count(kind) for kind in kinds} == {"[DDP]": 2, "[TRAIN]": 4, "[EPOCH]": 2, "[DONE]": 1}
    final = said(tmp_path, "final.json")
    assert final["step"] == 32
    assert lines[-1].endswith(f"2 ranks agree on weights {final['weights_sha256'][:12]}")
    saved = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert sum(tensor.numel() for tensor in saved.values()) == 34_052


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_smoke_passes_on_the_gpus_of_this_machine(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    done = started(tmp_path, "smoke", f"--world={ranks}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert f"[DDP] rank 0 of {ranks} on cuda:0 of " in done.stdout


def test_smoke_fails_when_nothing_is_learned(tmp_path: Path) -> None:
    sentence = a_refusal(started(tmp_path, "smoke", "--lr=0", "--epochs=1"))
    assert re.fullmatch(r"the smoke test failed: the loss fell by -?0% from 1\.\d{4} to 1\.\d{4}, less than 30 %", sentence)


def test_smoke_fails_when_the_world_is_not_what_was_asked(tmp_path: Path) -> None:
    sentence = a_refusal(started(tmp_path, "smoke", "--world=3"))
    assert sentence == "the world has 1 ranks and --world asks for 3; start 3 or drop --world"


def test_smoke_finds_ranks_that_disagree_and_losses_that_do_not_fall() -> None:
    assert smoke.problems(1.4, 0.2, ["a", "a", "a"]) == []
    assert smoke.problems(1.4, 0.2, ["a", "b", "a", "c"]) == ["rank 1, 3 ended with other weights than rank 0"]
    assert smoke.problems(1.0, 0.71, ["a"]) == ["the loss fell by 29% from 1.0000 to 0.7100, less than 30 %"]
    assert smoke.problems(1.0, float("nan"), ["a"]) == ["the loss fell by nan% from 1.0000 to nan, less than 30 %"]
    assert smoke.problems(1.0, 0.7, ["a"]) == []


# cifar10


def test_the_network_has_six_convolutions_and_3_229_770_parameters() -> None:
    model = cifar10.network()
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_229_770
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [32, 64, 128, 128, 256, 256]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_pixels_are_bytes_until_the_network_sees_them() -> None:
    x = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    shown = cifar10.pixels(x)
    assert (shown.dtype, shown.shape, shown.max().item(), x.max().item()) == (torch.float32, (2, 3, 32, 32), 1.0, 255)


def test_cifar10_trains_in_a_world_of_two_and_is_measured(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [f"--data={images}", "--epochs=2", "--batch=24", "--microbatch=4", "--log-every=2"]
    best = {"OUTLAST_CHECKPOINT_BEST": "1 min loss", "OUTLAST_CHECKPOINT_EVERY": "1 steps"}
    done = started(tmp_path, "cifar10", *args, ranks=2, **best)
    assert done.returncode == 0, done.stderr
    *log, last = done.stdout.splitlines()
    assert [re.sub(r"\d+\.\d{3}$", "x", line) for line in log] == [
        "[1,     2] loss: x",
        "[2,     2] loss: x",
        "[2,     3] loss: x",
    ]
    assert re.fullmatch(r"Finished Training: 6 steps in \d+\.\d s, world of 2", last)
    final = said(tmp_path, "final.json")
    assert final["step"] == 6
    assert final["loss"] == pytest.approx(float(log[-1].split()[-1]), abs=5e-4)

    done = started(tmp_path, "cifar10", "--evaluate", OUTLAST_DATA=str(images))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = said(tmp_path, "evaluation.json")
    assert (found["weights"], found["weights_sha256"], found["images"]) == ("model.pt", final["weights_sha256"], 4)
    assert lines[0] == f"Accuracy of the network on the 4 test images: {found['accuracy']} %"
    assert len(found["classes"]) == 10
    assert sum(each["images"] for each in found["classes"].values()) == 4
    assert [line.split("class: ")[1] for line in lines[1:-1]] == [
        f"{name:<10s} is " + (f"{each['accuracy']} %" if each["images"] else "unknown") for name, each in found["classes"].items()
    ]

    [kept] = checkpoints.ranked(checkpoints.list_(tmp_path / "out" / "checkpoints"))[:1]
    logged = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert kept.metric
    assert (kept.metric.value in logged, kept.metric.by, kept.metric.mode) == (True, "loss", "min")
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path / "out"))
    cifar10.main([f"--data={images}", "--evaluate", "--checkpoint=best"])
    assert said(tmp_path, "evaluation.json")["weights"] == kept.path.name
    assert capsys.readouterr().out.endswith("Finished Testing\n")


@pytest.mark.slow
def test_cifar10_interrupted_and_started_again_ends_with_the_weights_of_the_undisturbed_run(tmp_path: Path, images: Path) -> None:
    args = [f"--data={images}", "--epochs=1", "--batch=24", "--microbatch=8"]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    assert started(undisturbed, "cifar10", *args).returncode == 0

    (disturbed / "notice").write_text("{}")
    done = started(disturbed, "cifar10", *args, OUTLAST_NOTICE=str(disturbed / "notice"))
    assert done.returncode == 75, done.stderr
    done = started(disturbed, "cifar10", "--evaluate", args[0])
    assert done.returncode == 0, done.stderr
    assert said(disturbed, "evaluation.json")["weights"] == "step-00000001"

    assert started(disturbed, "cifar10", *args).returncode == 0
    assert said(disturbed, "final.json") == said(undisturbed, "final.json")


def test_evaluation_uses_the_running_statistics_of_batchnorm(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = cifar10.network()
    weights.write(tmp_path / "model.pt", weights.whole(model))
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path))
    cifar10.main([f"--data={images}", "--evaluate"])
    test = cifar.test(images)
    one_by_one = [model.eval()(cifar10.pixels(torch.from_numpy(x[None]))).argmax().item() for x in test.x]
    assert json.loads((tmp_path / "evaluation.json").read_text())["accuracy"] == 100 * np.mean(one_by_one == test.y)
    assert capsys.readouterr().out.endswith("Finished Testing\n")


def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTLAST_DATA", raising=False)
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path))
    with pytest.raises(
        OutlastError, match=r"^no data: give --data DIR or set OUTLAST_DATA; outlast data get digits --to DIR makes some$"
    ):
        cifar10.main(["--evaluate"])
    with pytest.raises(OutlastError, match=r"has no valid checkpoint; train first, or set OUTLAST_OUTPUT$"):
        cifar10.main(["--evaluate", f"--data={images}"])


def test_a_directory_that_is_not_cifar_ends_training_with_78_and_no_traceback(tmp_path: Path) -> None:
    sentence = a_refusal(started(tmp_path, "cifar10", OUTLAST_DATA=str(tmp_path)))
    assert sentence.startswith(f"{tmp_path} is not CIFAR-10: it has no batches.meta")


# results


def test_the_fingerprint_sees_one_bit_and_ignores_memory_layout() -> None:
    torch.manual_seed(0)
    one, other = cifar10.network(), cifar10.network()
    assert results.sha256(one) != results.sha256(other)
    other.load_state_dict(one.state_dict())
    assert results.sha256(one) == results.sha256(other)
    assert results.sha256(one) == results.sha256(other.to(memory_format=torch.channels_last))
    with torch.no_grad():
        other[0].bias[3] = torch.nextafter(other[0].bias[3], torch.tensor(9.0))
    assert results.sha256(one) != results.sha256(other)


def test_results_replace_each_other_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        results.write_json(tmp_path / "deep" / "final.json", {"step": step})
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["final.json"]
    assert json.loads((tmp_path / "deep" / "final.json").read_text()) == {"step": 2}
