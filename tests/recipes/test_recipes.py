"""Recipes: they train, resume exactly, and fail with one sentence and an exit code that can be trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import cast

import pytest
import torch

import disturbances
import worlds
from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.recipes import cifar10, smoke
from outlast.recipes.shared import loop, results
from outlast.training import Session

SMOKE_LINE = re.compile(r"\[(DDP|TRAIN|EPOCH|DONE)\] ")


@pytest.mark.parametrize("name", ["gpt", "llm", "imagenet", "cifar10", "perceiver"])
def test_recipes_have_the_same_flags_for_the_same_things(name: str) -> None:
    recipe = importlib.import_module(f"outlast.recipes.{name}")
    known = {field.name for field in dataclasses.fields(recipe.Settings)}
    assert {"data", "output_dir", "checkpoint", "evaluate", "seed", "dtype"} <= known
    assert not known & recipe.ALIASES.keys(), "what is theirs has no other meaning here"
    assert all(ours in known or ours == "config" or " " in ours for ours in recipe.ALIASES.values())


def evaluating(pipe: Path) -> None:
    """An evaluation that prints more than a pipe holds."""
    sys.argv, sys.stdout = ["evaluation", contract.EVALUATE], pipe.open("w")
    results.run(lambda: print("x" * (1 << 20)))


def test_an_evaluation_whose_reader_has_enough_ends_in_silence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    processes = worlds.started(functools.partial(evaluating, tmp_path / "pipe"), tmp_path, 1)
    with (tmp_path / "pipe").open("rb", buffering=0) as reader:
        assert reader.read(1) == b"x"
    end = worlds.ended(processes, tmp_path)
    assert (end.codes, end.errors) == ([-signal.SIGPIPE], [""])


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
    final = disturbances.final(out)
    assert final["step"] == 32
    assert lines[-1].endswith(f"2 ranks agree on weights {final['weights_sha256'][:12]}")
    saved = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert sum(tensor.numel() for tensor in saved.values()) == 34_052


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_smoke_passes_on_the_gpus_of_this_machine(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    command = [*runner, "-m", "outlast.recipes.smoke", f"--world={ranks}"]
    environment = {**kept, "OUTLAST_OUTPUT": str(tmp_path / "out")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"[DDP] rank 0 of {ranks} on cuda:0 of " in done.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lr=0", "--epochs=1"], r"^the smoke test failed: the loss fell by -?0% from 1\.\d{4} to 1\.\d{4}, less than 30 %$"),
        (["--world=3"], r"^the world has 1 ranks and --world asks for 3; start 3 or drop --world$"),
    ],
)
def test_smoke_fails_when_nothing_is_learned_or_the_world_is_not_what_was_asked(
    flags: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.Env.OUTPUT, str(tmp_path))
    with pytest.raises(OutlastError, match=sentence):
        disturbances.alone(smoke.main, flags)


def test_smoke_finds_ranks_that_disagree_and_losses_that_do_not_fall() -> None:
    assert smoke.problems(1.4, 0.2, ["a", "a", "a"]) == []
    assert smoke.problems(1.4, 0.2, ["a", "b", "a", "c"]) == ["rank 1, 3 ended with other weights than rank 0"]
    assert smoke.problems(1.0, 0.71, ["a"]) == ["the loss fell by 29% from 1.0000 to 0.7100, less than 30 %"]
    assert smoke.problems(1.0, float("nan"), ["a"]) == ["the loss fell by nan% from 1.0000 to nan, less than 30 %"]
    assert smoke.problems(1.0, 0.7, ["a"]) == []


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


def test_a_job_that_writes_elsewhere_or_keeps_the_worst_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST_OUTPUT", "/out")
    monkeypatch.setenv("OUTLAST_WORKER_STATE", "/state")
    for given, said in [
        ("2 min acc1", ["the job keeps the checkpoints of the worst acc1; write `mode: max` beside checkpoint.best"]),
        ("2 max acc1", []), ("2 min loss", []), ("", []),
    ]:  # fmt: skip
        monkeypatch.setenv("OUTLAST_CHECKPOINT_BEST", given)
        results.into("/out", "1 max acc1")
        assert capsys.readouterr().out.splitlines() == said
    results.into("here")
    assert capsys.readouterr().out == "--output_dir here is ignored: the job writes to /out\n"


# the loop


def test_a_run_goes_on_only_with_what_it_began_with() -> None:
    fixed = {"data": "other data", "shape": "another model", "names": "other classes", "ema": "a run of another --ema-decay"}
    began = loop.Record(fixed, data="a1", shape={"width": 8, "heads": 2}, names=["cat", "dog"], ema=True, best=3.0)
    state = began.state_dict()
    for changes, sentence in [
        ({"data": "b2"}, "other data (data a1) than the one here (data b2)"),
        ({"shape": {"width": 9, "heads": 2}}, "another model (width 8) than the one here (width 9)"),
        ({"names": ["cat", "cow"]}, "other classes (names dog) than the one here (names cow)"),
        ({"ema": False}, "a run of another --ema-decay (ema True) than the one here (ema False)"),
        ({"data": ""}, ""),
        ({"shape": {"width": 8}, "names": []}, ""),
    ]:
        now = loop.Record(fixed, **(state | {"best": 0.0} | changes))
        if not sentence:
            now.load_state_dict(state)
            assert (now.best, now.data) == (3.0, "a1"), "what is not known is taken over"
            continue
        with pytest.raises(OutlastError) as refused:
            now.load_state_dict(state)
        assert str(refused.value).startswith(f"the checkpoint belongs to {sentence}; resume with what the run began with")
    loop.Record().load_state_dict(state)


def test_the_learning_rate_rises_then_falls_by_a_cosine_or_stays() -> None:
    rates = [loop.rate(1.0, step, 14, 4, lowest=0.1) for step in (0, 3, 4, 9, 14, 19)]
    assert rates == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1, 0.1])
    assert [loop.rate(1.0, step, 10, 4, falls=False) for step in (0, 3, 4, 9)] == [0.2, 0.8, 1.0, 1.0]


def test_a_log_leaves_out_what_is_no_training_and_goes_on_when_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    (tmp_path / "log.txt").mkdir()
    log = loop.Log(cast(Session, types.SimpleNamespace(rank=0, output=tmp_path)), "log.txt")
    for text in ("one", "two"):
        log.line(text)
    assert capsys.readouterr().out == "one\nlog.txt cannot be written: Is a directory; training goes on\ntwo\n"
    for wait, done, measured in ((1.0, 8, False), (50.0, 9, True), (2.0, 8, False)):
        now[0] += wait
        log.done += done
        if measured:
            log.clock()
        else:
            assert log.speed() == 8 / wait
    assert log.elapsed_s == 3.0
