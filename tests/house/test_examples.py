"""Every example is right, what stands beside it runs, and the commands in those for pods render what Kubernetes takes."""

from __future__ import annotations

import functools
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import worlds
from outlast.job import spec
from outlast.recipes.shared import settings
from pages import OUTLAST, ROOT
from published_schemas import validate

FILES = sorted((ROOT / "examples").glob("*.yaml"))
IN_PODS = sorted(file for file in (ROOT / "examples" / "kubernetes").glob("*.yaml") if file.stem != "etcd-server")
WORKSHOP = ROOT / "examples" / "workshop" / "cifar10.yaml"
COMMANDS = sorted(line for line in map(" ".join, OUTLAST) if re.match("(validate|render) examples/", line))
"""Those in the heads of examples and on pages that read an example and write nothing."""


@pytest.mark.parametrize("file", [*FILES, *IN_PODS, WORKSHOP], ids=lambda file: f"{file.parent.stem}/{file.stem}")
def test_an_example_is_right_and_named_like_its_file(file: Path) -> None:
    job = spec.load(file, code=True)
    assert job.metadata.name == file.stem
    assert spec.parse(spec.dump(job)) == job
    assert re.search(rf"^#   outlast \w+ {file.relative_to(ROOT)}\b", file.read_text(), flags=re.M), "its commands name it"
    assert file in FILES or job.spec.image


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_recipe_of_an_example_knows_its_arguments(file: Path) -> None:
    job = spec.load(file).spec
    if job.module:
        recipe = importlib.import_module(job.module)
        settings.parse(recipe.Settings, job.args, None, getattr(recipe, "ALIASES", {}))


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_of_an_example_runs_and_kubernetes_takes_what_it_renders(
    command: str, monkeypatch: pytest.MonkeyPatch, outlast: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(ROOT)
    verb, file, *options = shlex.split(command)
    code, out, err = outlast(verb, file, *options)
    assert code == 0, err
    for document in yaml.safe_load_all(out) if verb == "render" else ():
        assert document["metadata"]["labels"]["outlast.dev/job"] == Path(file).stem
        if "." not in document["apiVersion"] or "k8s.io" in document["apiVersion"]:
            validate(document)


def test_pods_made_by_hand_differ_in_their_names_alone() -> None:
    files = [(ROOT / "examples" / "pods" / f"{name}.yaml").read_text() for name in ("two", "third")]
    made = [document for text in files for document in yaml.safe_load_all(text)]
    assert [each["metadata"].pop("name") for each in made] == ["hand-made-1", "hand-made-2", "hand-made-3"]
    assert made[1:] == made[:1] * 2
    validate({**made[0], "metadata": {**made[0]["metadata"], "name": "x"}})


def exact(to: Path) -> None:
    """Run an example's script, whose output goes to a file."""
    sys.argv = ["exact.py", "--epochs=1"]
    with to.open("w") as sys.stdout:
        runpy.run_path(str(ROOT / "examples" / "exact.py"), run_name="__main__")


def test_the_exact_script_prints_a_checksum_of_its_weights(tmp_path: Path) -> None:
    end = worlds.ended(worlds.started(functools.partial(exact, tmp_path / "said"), tmp_path, 1), tmp_path)
    assert end.codes == [0], end.errors
    assert re.fullmatch(r"step 32, weights [0-9a-f]{16}\n", (tmp_path / "said").read_text())


def test_the_guide_shows_the_torchrun_script_as_it_is() -> None:
    code = (ROOT / "examples" / "torchrun.py").read_text().split('"""\n', 1)[1].lstrip()
    assert f"```python\n{code}```\n" in (ROOT / "docs" / "guide" / "own-script.md").read_text()
