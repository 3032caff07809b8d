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

from outlast.errors import OutlastError
from outlast.recipes import __main__ as listing
from outlast.recipes import settings
from outlast.recipes.settings import flag


@dataclasses.dataclass(frozen=True)
class Some:
    log_every: int = flag(5, "steps", least=1)
    lr: float = flag(0.1, "a rate of 10 %", least=0)
    data: str = flag("", "a directory")
    world: int | None = flag(None, "ranks", least=1)
    evaluate: bool = flag(False, "a switch")
    output_dir: str = flag("out", "where to write", group="files")
    betas: tuple[float, float] = flag((0.9, 0.95), "decay rates", least=0, most=1, group="optimizer")
    target_modules: tuple[str, ...] = flag((), "modules to adapt")
    sizes: tuple[int, ...] = flag((1, 2), "sizes")
    dtype: Literal["float32", "bfloat16", "float16"] = flag("bfloat16", "type of the activations", group="speed")
    compile: bool = flag(True, "compile the model")


@dataclasses.dataclass(frozen=True)
class Needy:
    steps: int = flag(3, "steps")
    data_dir: str = flag(..., "where the data are")


def parsed(*argv: str) -> Some:
    return settings.parse(Some, argv, "about")


def refusal(argv: list[str], of: type = Some) -> str:
    with pytest.raises(OutlastError) as refused:
        settings.parse(of, argv, "about")
    return str(refused.value)


def a_file(tmp_path: Path, text: str, name: str = "conf.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ("", {}),
        ("--log-every=2 --lr 3e-3 --data here", {"log_every": 2, "lr": 0.003, "data": "here"}),
        ("--output_dir a_b --log_every=6e5", {"output_dir": "a_b", "log_every": 600_000}),
        ("--data=--output_dir", {"data": "--output_dir"}),
        ("--world=4", {"world": 4}),
        ("--world=4 --world none", {"world": None}),
        ("--evaluate --no-compile", {"evaluate": True, "compile": False}),
        ("--compile=False --no-evaluate", {"compile": False}),
        ("--no_compile --compile true", {}),
        ("--betas 0.9 1e-3 --sizes 3 4 5 --target_modules c_attn c_proj",
         {"betas": (0.9, 0.001), "sizes": (3, 4, 5), "target_modules": ("c_attn", "c_proj")}),
        ("--betas=0.8,0.9 --sizes=3 --target-modules", {"betas": (0.8, 0.9), "sizes": (3,)}),
        ("--dtype float32", {"dtype": "float32"}),
    ],
)  # fmt: skip
def test_settings_are_a_command_line(argv: str, changes: dict[str, Any]) -> None:
    assert parsed(*argv.split()) == dataclasses.replace(Some(), **changes)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--log-every=0", "argument --log-every: 0 is below 1; see --help"),
        ("--betas 0.9 1.5", "argument --betas: 1.5 is above 1; see --help"),
        ("--world=two", "argument --world: 'two' is not a whole number; see --help"),
        ("--log-every=2.5", "argument --log-every: '2.5' is not a whole number; see --help"),
        ("--log-every=inf", "argument --log-every: 'inf' is not a whole number; see --help"),
        ("--lr=nan", "argument --lr: nan is below 0; see --help"),
        ("--lr=fast", "argument --lr: 'fast' is not a number; see --help"),
        ("--eval", "there is no flag --eval; did you mean --evaluate? see --help"),
        ("--zzz=3", "there is no flag --zzz; see --help"),
        ("here", "'here' belongs to no flag; see --help"),
        ("--evaluate maybe", "argument --evaluate: 'maybe' is not true or false; see --help"),
        ("--dtype half", "argument --dtype: 'half' is not one of float32, bfloat16, float16; see --help"),
        (
            "--dtype=bfloat",
            "argument --dtype: 'bfloat' is not one of float32, bfloat16, float16; did you mean bfloat16? see --help",
        ),
        ("--betas 0.9", "argument --betas: it wants 2 values, not 1; see --help"),
        ("--betas 0.9 -1", "argument --betas: -1 is below 0; see --help"),
        ("--sizes 1 b", "argument --sizes: 'b' is not a whole number; see --help"),
        ("--config /nowhere.yaml", "--config /nowhere.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_named(argv: str, sentence: str) -> None:
    assert refusal(argv.split()) == sentence


def test_a_file_means_what_the_flags_mean(tmp_path: Path) -> None:
    base = a_file(
        tmp_path, "dtype: float16\nlr: 6e-4\nlog-every: 6e5\ncompile: False\nbetas: [0.9, 0.99]\nworld: null\ndata: 2024\n"
    )
    more = a_file(tmp_path, "lr: 1.0e-3   # later\nsizes: [7]\ntarget_modules: c_attn\ndata:\n", "more.yaml")
    assert parsed("--config", base) == Some(600_000, 6e-4, "2024", compile=False, dtype="float16", betas=(0.9, 0.99))
    changes = {"lr": 0.5, "sizes": (7,), "target_modules": ("c_attn",)}
    found = parsed("--config", base, more, "--lr", "0.5", "--dtype=bfloat16", "--compile")
    assert found == dataclasses.replace(Some(600_000, betas=(0.9, 0.99)), **changes)
    assert parsed("--config", base, f"--config={more}") == parsed("--config", base, more)
    assert parsed("--config", a_file(tmp_path, "# nothing\n", "empty.yaml")) == Some()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: 1\nlog_evry: 3\n", "conf.yaml, line 2: there is no setting 'log_evry'; did you mean log_every?"),
        ("zzz: 3\n", "conf.yaml, line 1: there is no setting 'zzz'; see --help for those there are"),
        ("lr: 1\nlr: 2\n", "conf.yaml, line 2: lr is there already; leave one of the two out"),
        ("lr: fast\n", "conf.yaml, line 1: lr: 'fast' is not a number"),
        ("lr: [1, 2]\n", "conf.yaml, line 1: lr: a list is not a number"),
        ("lr:\n", "conf.yaml, line 1: lr: it has no value"),
        ("lr: -1\n", "conf.yaml, line 1: lr: -1 is below 0"),
        ("data: {a: b}\n", "conf.yaml, line 1: data: a mapping is not a text"),
        ("compile: 3\n", "conf.yaml, line 1: compile: '3' is not true or false"),
        ("betas: 0.9\n", "conf.yaml, line 1: betas: it wants 2 values, not 1"),
        ("betas: [[1], 2]\n", "conf.yaml, line 1: betas: a list holds single values here, no lists or mappings"),
        ("dtype: bfloat\n",
         "conf.yaml, line 1: dtype: 'bfloat' is not one of float32, bfloat16, float16; did you mean bfloat16?"),
        ("- lr\n", "conf.yaml is not a mapping of settings to values, such as `log_every: ...`"),
        ("lr: [1\n", "conf.yaml is not YAML: line 2: expected ',' or ']', but got '<stream end>'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert refusal(["--config", a_file(tmp_path, text)]) == f"{tmp_path}/{sentence}"


def test_a_config_file_of_nanogpt_is_python() -> None:
    assert refusal(["--config=train.py"]) == (
        "--config train.py is Python; write its settings in a YAML file, `name: value` instead of `name = value`"
    )


def test_what_is_required_may_come_from_either(tmp_path: Path) -> None:
    assert refusal([], Needy) == "--data-dir is required; give it, or data_dir in a file named by --config; see --help"
    assert settings.parse(Needy, ["--data_dir=here"], None) == Needy(data_dir="here")
    assert settings.parse(Needy, ["--config", a_file(tmp_path, "data_dir: there")], None) == Needy(data_dir="there")


@given(
    st.builds(
        Some,
        log_every=st.integers(1, 10**9), lr=st.floats(0, 1e9), world=st.none() | st.integers(1, 99), evaluate=st.booleans(),
        data=st.text("ab1 ~#:-'\"null", max_size=8), betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        sizes=st.lists(st.integers(-5, 5)).map(tuple), dtype=st.sampled_from(["float32", "float16"]), compile=st.booleans(),
    )
)  # fmt: skip
def test_saved_values_are_read_back(tmp_path_factory: pytest.TempPathFactory, some: Some) -> None:
    plain = settings.values(some)
    assert json.loads(json.dumps(plain)) == plain
    file = a_file(tmp_path_factory.getbasetemp(), yaml.safe_dump(plain))
    assert parsed("--config", file) == some


def test_the_help_shows_reasons_groups_choices_and_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        settings.parse(Some, ["--help"], "What it is for.")
    assert ended.value.code == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "What it is for." in shown
    for line in (
        " --log-every INT steps (default 5)\n",
        " --lr FLOAT a rate of 10 % (default 0.1)\n",
        " --evaluate a switch\n",
        "\nfiles:\n --output-dir STR where to write (default out)\n",
        "\noptimizer:\n --betas FLOAT FLOAT decay rates (default 0.9 0.95)\n --target-modules [STR ...] modules to adapt\n",
        " --dtype {float32,bfloat16,float16}",
        " --compile compile the model (default on; --no-compile turns it off)\n",
    ):
        assert line in shown
    with pytest.raises(SystemExit):
        settings.parse(Needy, ["--help"], None)
    assert "where the data are (required)" in capsys.readouterr().out


def test_under_outlast_a_mistake_is_left_to_the_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistaken() -> None:
        raise OutlastError("no data")

    monkeypatch.delenv("OUTLAST_WORKER_STATE", raising=False)
    with pytest.raises(SystemExit) as ended:
        settings.run(mistaken)
    assert (ended.value.code, capsys.readouterr().err) == (78, "outlast: no data\n")
    monkeypatch.setenv("OUTLAST_WORKER_STATE", "/somewhere")
    with pytest.raises(OutlastError):
        settings.run(mistaken)


@dataclasses.dataclass(frozen=True)
class Short:
    data: str = flag("", "a directory", first=True)
    batch_size: int = flag(32, "images", also=("b",))
    evaluate: bool = flag(False, "a switch", also=("e",))


@pytest.mark.parametrize(
    "argv", ["here -b 8 -e", "-b8 here --evaluate", "-e -b 8 --data here", "--evaluate here -b=8", "-b 8 -e here"]
)
def test_flags_may_have_one_letter_and_one_argument_may_have_no_flag(argv: str) -> None:
    assert settings.parse(Short, argv.split(), None) == Short("here", 8, True)


def test_of_two_arguments_without_flags_the_mistake_is_said() -> None:
    assert refusal(["here", "there"], Short) == "'here' belongs to no flag; see --help"
    assert refusal(["here", "--data=there"], Short) == "data is there twice, as 'there' and as 'here'; leave one out; see --help"
    assert refusal(["here"]) == "'here' belongs to no flag; see --help"
    assert refusal(["-x"], Short) == "'-x' belongs to no flag; see --help"


def test_the_list_of_recipes_has_all_programs_and_a_sentence_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    programs = {file.stem for file in Path(listing.__file__).parent.glob("[!_]*.py") if "\nif __name__ ==" in file.read_text()}
    assert set(listing.NAMES) == programs
    listing.main()
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(rf"  {name} +\S.*\.", line) for name, line in zip(listing.NAMES, lines[2:], strict=False))


def test_several_names_of_a_flag_show_its_value_once(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclasses.dataclass(frozen=True)
    class Named:
        arch: Literal["a18", "a50"] = flag("a18", "the model", also=("model_arch", "a"))
        evaluate: bool = flag(False, "a switch", also=("eval_only",))

    with pytest.raises(SystemExit):
        settings.parse(Named, ["--help"], None)
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert " --arch, --model-arch, -a {a18,a50} the model" in shown
    assert " --evaluate, --eval-only a switch" in shown
