"""Settings of recipes: one dataclass is the command line, the help and the configuration files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from outlast.base.errors import OutlastError
from outlast.recipes import __main__ as listing
from outlast.recipes.shared import results, settings
from outlast.recipes.shared.settings import flag


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
