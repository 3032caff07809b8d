"""Recipes: they train, resume exactly, and fail with one sentence and an exit code that can be trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import worlds
from outlast import contract
from outlast.recipes import cifar10, results, smoke

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


@pytest.mark.parametrize("name", ["gpt", "llm", "imagenet", "cifar10", "perceiver"])
def test_recipes_have_the_same_flags_for_the_same_things(name: str) -> None:
    fields = dataclasses.fields(importlib.import_module(f"outlast.recipes.{name}").Settings)
    known = {each for field in fields for each in (field.name, *field.metadata["also"])}
    where = {"data", "output", "output_dir", "out_dir", "checkpoint", "evaluate", "eval_only", "log_interval"}
    how = {"seed", "dtype", "batch_size", "lr", "learning_rate", "wd", "weight_decay"}
    assert where | how <= known


def test_an_output_that_a_job_does_not_write_to_is_said_to_be_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(contract.Env.STATE, str(tmp_path))
    monkeypatch.setenv(contract.Env.OUTPUT, str(tmp_path / "out"))
    results.into(str(tmp_path / "out"))
    assert capsys.readouterr().out == ""
    results.into("here")
    assert capsys.readouterr().out == f"--output_dir here is ignored: the job writes to {tmp_path / 'out'}\n"


def test_an_evaluation_whose_reader_has_enough_ends_in_silence() -> None:
    program = "import sys; from outlast.recipes import settings; settings.run(lambda: print('x' * (1 << 20)))"
    with subprocess.Popen([sys.executable, "-c", program, "--evaluate"], stdout=-1, stderr=-1) as evaluation:
        assert evaluation.stdout
        assert evaluation.stderr
        evaluation.stdout.read(1)
        evaluation.stdout.close()
        assert (evaluation.stderr.read(), evaluation.wait()) == (b"", -signal.SIGPIPE)


# smoke


def smoked(argv: list[str]) -> None:
    """A rank of smoke that says in a file what it says."""
    with Path(os.environ[contract.Env.STATE], "said").open("w") as file, contextlib.redirect_stdout(file):
        smoke.main(argv)


def test_smoke_passes_in_a_world_of_two(tmp_path: Path) -> None:
    out = tmp_path / "out"
    end = worlds.ended(worlds.started(functools.partial(smoked, ["--world=2"]), out, 2), out)
    assert end.codes == [0, 0], end.errors
    lines = [line for rank in (1, 0) for line in (out / "workers" / str(rank) / "said").read_text().splitlines()]
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
    end = worlds.ended(worlds.started(functools.partial(smoked, ["--lr=0", "--epochs=1"]), tmp_path, 1), tmp_path)
    assert end.codes != [0]
    assert re.search(r"the smoke test failed: the loss fell by -?0% from 1\.\d{4} to 1\.\d{4}, less than 30 %\n", end.errors[0])


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
