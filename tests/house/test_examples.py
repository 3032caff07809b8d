"""Every example is right, and what stands beside it runs."""

from __future__ import annotations

import functools
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import worlds
from outlast.job import spec
from outlast.recipes.shared import settings

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_right_and_named_like_its_file(file: Path) -> None:
    job = spec.load(file, code=True)
    assert job.metadata.name == file.stem
    assert spec.parse(spec.dump(job)) == job


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_in_an_example_name_the_example(file: Path) -> None:
    runs = re.findall(r"^#   outlast run (\S+)", file.read_text(), flags=re.M)
    assert runs == [f"examples/{file.name}"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_recipe_of_an_example_knows_its_arguments(file: Path) -> None:
    job = spec.load(file).spec
    if job.module:
        recipe = importlib.import_module(job.module)
        settings.parse(recipe.Settings, job.args, None, getattr(recipe, "ALIASES", {}))


def python(script: str, *args: str, cwd: Path) -> str:
    """Run an example's script as the only process of a world; its output."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, str(ROOT / "examples" / script), *args]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **world}, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_own_script_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = python("train.py", "--steps=20", "--save-every=10", "--out=kept", cwd=tmp_path)
    assert [line.split(" loss ")[0] for line in first.splitlines()] == ["step 10", "step 20"]
    second = python("train.py", "--steps=25", "--save-every=10", "--out=kept", cwd=tmp_path)
    assert [line.split(" loss ")[0] for line in second.splitlines()] == ["rank 0 of 1 goes on from step 20", "step 25"]


def exact(to: Path) -> None:
    """Run an example's script, whose output goes to a file."""
    sys.argv = ["exact.py", "--epochs=1"]
    with to.open("w") as sys.stdout:
        runpy.run_path(str(ROOT / "examples" / "exact.py"), run_name="__main__")


def test_the_exact_script_prints_a_checksum_of_its_weights(tmp_path: Path) -> None:
    end = worlds.ended(worlds.started(functools.partial(exact, tmp_path / "said"), tmp_path, 1), tmp_path)
    assert end.codes == [0], end.errors
    assert re.fullmatch(r"step 32, weights [0-9a-f]{16}\n", (tmp_path / "said").read_text())


def test_everything_in_the_reference_of_training_is_described() -> None:
    page = (ROOT / "docs" / "reference" / "training.md").read_text()
    assert not re.findall(r"^\|.*\| *\|$(?<!\| type \| \|)", page, flags=re.M), "an attribute without a docstring"
    assert not re.findall(r"```\n\n*#", page), "a call without a docstring"
    calls = (
        "session.open",
        "run.resume",
        "run.export",
        "run.alive",
        "stream.batches",
        "batch.split",
        "checkpoint.restore",
        "progress",
    )
    assert all(f"# {call}\n" in page for call in calls)


def test_the_guide_shows_the_torchrun_script_as_it_is() -> None:
    code = (ROOT / "examples" / "torchrun.py").read_text().split('"""\n', 1)[1].lstrip()
    assert f"```python\n{code}```\n" in (ROOT / "docs" / "guide" / "own-script.md").read_text()
