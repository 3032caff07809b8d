"""Recipes: they train, resume exactly, and fail with one sentence and an exit code that can be trusted. One dataclass of settings
is the command line, the help and the configuration files.
"""

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
import types
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import disturbances
import worlds
from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.recipes import __main__ as listing
from outlast.recipes import cifar10, smoke
from outlast.recipes.shared import loop, results, settings
from outlast.recipes.shared.settings import flag
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
    worlds.ran(functools.partial(smoked, ["--world=2"]), out, 2)
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
    for kept, said in [
        ("2 min acc1", ["the job keeps the checkpoints of the worst acc1; write `mode: max` beside checkpoint.best"]),
        ("2 max acc1", []), ("2 min loss", []), ("", []),
    ]:  # fmt: skip
        monkeypatch.setenv("OUTLAST_CHECKPOINT_BEST", kept)
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


# Settings


@dataclasses.dataclass(frozen=True)
class Some:
    data: str = flag("", "a directory", first=True)
    log_every: int = flag(5, "steps", least=1)
    lr: float = flag(0.1, "a rate of 10 %", least=0)
    world: int | None = flag(None, "ranks", least=1)
    evaluate: bool = flag(False, "a switch")
    pack: bool | None = flag(None, "a switch that may be undecided")
    sizes: tuple[int, ...] = flag((1, 2), "sizes", group="optimizer")
    target_modules: tuple[str, ...] = flag((), "modules to adapt")
    dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "type of the activations", group="speed")
    compile: bool = flag(True, "compile the model")
    setting: Literal["modern", "old"] = flag("modern", "which defaults")


ALIASES = {"b": "log_every", "eval_only": "evaluate", "config_file": "config", "backend": "a run finds it", "drop_last": "never"}


def parsed(*argv: str) -> Some:
    return settings.parse(Some, argv, "about", ALIASES, {"old": {"lr": 0.5, "compile": False}})


def refusal(*argv: str) -> str:
    with pytest.raises(OutlastError) as refused:
        parsed(*argv)
    return str(refused.value)


def a_file(tmp_path: Path, text: str, name: str = "conf.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ("", {}),
        ("--log-every=2 --lr 3e-3 --data a_b", {"log_every": 2, "lr": 0.003, "data": "a_b"}),
        ("--data=--log_every --log_every=9", {"data": "--log_every", "log_every": 9}),
        ("--world=4 --world none --dtype float32", {"dtype": "float32"}),
        ("--evaluate --no-compile --no_pack", {"evaluate": True, "compile": False, "pack": False}),
        ("--compile=False --pack=true", {"compile": False, "pack": True}),
        ("--sizes 3 4 -5 --target_modules c_attn c_proj", {"sizes": (3, 4, -5), "target_modules": ("c_attn", "c_proj")}),
        ("here -b 8 --eval_only", {"data": "here", "log_every": 8, "evaluate": True}),
        ("-b8 --eval-only here", {"data": "here", "log_every": 8, "evaluate": True}),
        ("--setting old --lr 0.3", {"setting": "old", "lr": 0.3, "compile": False}),
    ],
)
def test_settings_are_a_command_line(argv: str, changes: dict[str, Any]) -> None:
    assert parsed(*argv.split()) == dataclasses.replace(Some(), **changes)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--log-every=0", "argument --log-every/-b: 0 is below 1; see --help"),
        ("--lr=nan", "argument --lr: nan is below 0; see --help"),
        ("--log-every=2.5", "argument --log-every/-b: invalid int value: '2.5'; see --help"),
        ("--evaluat", "there is no flag or setting --evaluat; did you mean --evaluate?"),
        ("--zzz=3", "there is no flag or setting --zzz=3; see --help"),
        ("--evaluate=maybe", "argument --evaluate/--no-evaluate/--eval-only/--no-eval-only: ignored explicit argument 'maybe'; "
         "see --help"),
        ("--dtype half", "argument --dtype: 'half' is not one of float32, bfloat16; see --help"),
        ("here there", "there is no flag or setting here; see --help"),
        ("here --data=there", "there is no flag or setting here; see --help"),
        ("--config /nowhere.yaml", "--config /nowhere.yaml cannot be read: [Errno 2] No such file or directory: '/nowhere.yaml'; "
         "give a YAML file"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named(argv: str, sentence: str) -> None:
    assert refusal(*argv.split()) == sentence


def test_what_is_not_needed_here_is_taken_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--config", a_file(tmp_path, "backend: nccl\neval_only: true\n"), "--drop_last") == Some(evaluate=True)
    assert capsys.readouterr().err == "backend is not needed: a run finds it\ndrop_last is not needed: never\n"


def test_a_file_means_what_the_flags_mean(tmp_path: Path) -> None:
    base = a_file(tmp_path, "lr: 6e-4\nlog-every: 6\ncompile: False\nsizes: [3, 4]\nworld: null\ndata: 2024\n")
    more = a_file(tmp_path, "lr: 1.0e-3   # later\nsizes: [7]\ntarget_modules: c_attn\ndata:\n", "more.yaml")
    first = Some("2024", 6, 6e-4, sizes=(3, 4), compile=False)
    assert parsed("--config", base) == parsed("--config_file", base) == first
    changes = {"lr": 0.5, "sizes": (7,), "target_modules": ("c_attn",), "data": "", "compile": True}
    assert parsed("--config", base, more, "--lr", "0.5", "--compile") == dataclasses.replace(first, **changes)
    assert parsed("--config", base, f"--config={more}") == parsed("--config", base, more)
    assert parsed("--config", a_file(tmp_path, "# nothing\n", "empty.yaml")) == Some()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: 1\nlog_evry: 3\n", ", line 2: there is no flag or setting --log-evry=3; did you mean --log-every?"),
        ("lr: fast\n", ", line 1: argument --lr: invalid float value: 'fast'; see --help"),
        ("lr: [1, 2]\n", ", line 1: there is no flag or setting 2; see --help"),
        ("data: {a: b}\n", ", line 1: data is a mapping, or a list of lists; give it a value, or a list of values; see --help"),
        (
            "sizes: [[1], 2]\n",
            ", line 1: sizes is a mapping, or a list of lists; give it a value, or a list of values; see --help",
        ),
        ("lr = 1\n", " is no list of settings; write `name: value`, not `name = value` as in Python"),
        ("lr: [1\n", " cannot be read: "),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert f"{tmp_path}/conf.yaml{sentence}" in refusal("--config", a_file(tmp_path, text))


@given(
    st.builds(
        Some,
        log_every=st.integers(1, 10**9), lr=st.floats(0, 1e9), world=st.none() | st.integers(1, 99), evaluate=st.booleans(),
        data=st.text("ab1 ~#:-'\"null", max_size=8), sizes=st.lists(st.integers(-5, 5)).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16"]), compile=st.booleans(),
    )
)  # fmt: skip
def test_saved_values_are_read_back(tmp_path_factory: pytest.TempPathFactory, some: Some) -> None:
    plain = {name: value for name, value in json.loads(json.dumps(dataclasses.asdict(some))).items() if value is not None}
    assert parsed("--config", a_file(tmp_path_factory.getbasetemp(), yaml.safe_dump(plain))) == some


def test_the_help_shows_reasons_groups_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    assert ended.value.code == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for part in (
        "about", "--log-every INT, -b INT steps (default 5)", "--lr FLOAT a rate of 10 % (default 0.1)",
        "--evaluate, --no-evaluate, --eval-only, --no-eval-only a switch",
        "optimizer: --sizes [INT ...]", "speed: --dtype float32|bfloat16 type of the activations (default bfloat16)",
    ):  # fmt: skip
        assert part in shown
    assert "backend" not in shown


def test_under_outlast_a_mistake_is_left_to_the_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistaken() -> None:
        raise OutlastError("no data")

    monkeypatch.delenv("OUTLAST_WORKER_STATE", raising=False)
    with pytest.raises(SystemExit) as ended:
        results.run(mistaken)
    assert (ended.value.code, capsys.readouterr().err) == (78, "outlast: no data\n")
    monkeypatch.setenv("OUTLAST_WORKER_STATE", "/somewhere")
    with pytest.raises(OutlastError):
        results.run(mistaken)


def test_the_list_of_recipes_has_all_programs_and_a_sentence_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"cifar10", "classify", "gpt", "imagenet", "llm", "llm_tiny", "perceiver", "smoke"} <= {*listing.programs()}
    listing.main()
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(rf"  {name} +\S.*\.", line) for name, line in zip(listing.programs(), lines[2:], strict=False))
