"""Commands and job files in the README and the guides are right: every verb and option exists, every document is valid."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from outlast.job import contract, spec
from outlast.recipes.shared import settings
from pages import GUIDE, OUTLAST, PAGES, ROOT, blocks, commands, mistake, shell, spans

PAGES.remove(GUIDE / "commands.md")  # printed by the command line itself
COMING_FROM = sorted({*GUIDE.glob("coming-from*.md")} - {GUIDE / "coming-from-elasticjob.md"})
"""Pages of set-ups that Outlast's own job file replaces."""
NAMES = [
    "getting-started", "first-cluster-job", "kubernetes", "hugging-face", "tracking", "notebooks", "gpt", "llm", "cifar10",
    "perceiver",
]  # fmt: skip
WHOLE = [ROOT / "README.md", *(GUIDE / f"{name}.md" for name in NAMES), *COMING_FROM]
"""Pages that show whole job files and scripts; others show parts of them."""


MAKE = sorted({words[1] for words in commands() if words[0] == "make"})


def test_every_command_exists_and_takes_its_options_and_arguments() -> None:
    assert len(OUTLAST) > 300
    assert {" ".join(words): said for words in OUTLAST if (said := mistake(words))} == {}
    assert mistake(["run", "--wokers", "2"])
    assert mistake(["runn"]) == "there is no command runn"


def rendered() -> list[tuple[str, list[str]]]:
    """Job file and command of all that a page does with its job file; `submit` as what it applies."""
    found = []
    for page in COMING_FROM:
        job = "".join(blocks(page, "yaml"))
        for words in (shell(span) for span in re.findall(r"`outlast ((?:render|submit|validate) [^`\\]*)", page.read_text())):
            found.append((job, ["render" if words[0] == "submit" else words[0], *words[1:]]))
    return found


@pytest.mark.parametrize(("job", "words"), rendered(), ids=[" ".join(words) for _, words in rendered()])
def test_what_a_section_submits_renders(job: str, words: list[str], tmp_path: Path, monkeypatch, outlast) -> None:
    (tmp_path / "job.yaml").write_text(job)
    monkeypatch.chdir(ROOT if words[1].startswith("examples/") else tmp_path)
    code, _, err = outlast(*words)
    assert code == 0, err


GIVEN = re.compile(r"-m (outlast\.recipes\.\w+) (--(?!help)[^`\n]*)")


@pytest.mark.parametrize(("module", "flags"), sorted({each for page in PAGES for each in GIVEN.findall(page.read_text())}))
def test_a_recipe_takes_the_flags_that_a_page_gives_it(module: str, flags: str, tmp_path: Path) -> None:
    config = tmp_path / "conf.yaml"
    config.write_text("{}")
    words = [str(config) if word == "conf.yaml" else word for word in shlex.split(flags, comments=True)]
    recipe = importlib.import_module(module)
    assert settings.parse(recipe.Settings, words, "", getattr(recipe, "ALIASES", {}))


RECIPES = [
    found
    for page in COMING_FROM
    for found in re.findall(r"^## .*`outlast\.recipes\.(\w+)`\n(.*?)(?=^##|\Z)", page.read_text(), flags=re.M | re.S)
]


@pytest.mark.parametrize(("recipe", "table"), RECIPES, ids=[recipe for recipe, _ in RECIPES])
def test_a_recipe_has_the_flags_that_replace_those_of_a_script(recipe: str, table: str) -> None:
    module = importlib.import_module(f"outlast.recipes.{recipe}")
    fields = [field.name for field in dataclasses.fields(module.Settings)]
    known = {"config", *fields, *(f"no_{name}" for name in fields), *module.ALIASES}
    ours = [re.split(r"(?<!\\)\|", row)[2] for row in table.splitlines() if row.startswith("| ")]
    spans = [span for cell in ours for span in re.findall(r"`([^`]*)`", cell) if not span.startswith(("outlast ", "compile:"))]
    named = {flag.replace("-", "_") for span in spans for flag in re.findall(r"(?<![\w-])--([a-z][\w-]+)", span)}
    assert len(named) > 5
    assert named - known == set()


FIELDS = [field.alias or name for name, field in spec.Spec.model_fields.items()]


def test_the_fields_of_the_job_file_are_valid() -> None:
    texts = [span for page in COMING_FROM for name in FIELDS for span in spans(page, f"{name}: ")]
    assert len(texts) > 40
    for text in texts:
        given = yaml.safe_load(text)
        fields = {"image": "train:1", **({} if "module" in given else {"script": "train.py"}), **given}
        job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "train"}, "spec": fields}
        assert spec.parse(yaml.safe_dump(job)), text


def test_the_files_that_are_named_exist() -> None:
    named = {word for words in OUTLAST for word in words if word.startswith("examples/")}
    assert len(named) > 20
    assert {file for file in named if not (ROOT / file).exists()} == set()


def test_make_knows_the_targets() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    subprocess.run(["make", "--dry-run", "--old-file=.venv/.ready", *MAKE], cwd=ROOT, check=True, capture_output=True)


def test_the_blocks_of_pages_are_job_files_and_python() -> None:
    jobs = [block for page in WHOLE for block in blocks(page, "yaml")]
    programs = [block for page in WHOLE for block in blocks(page, "python")]
    assert jobs
    assert programs
    for text in jobs:
        assert spec.parse(text).kind == contract.KIND
    for text in programs:
        compile(text, "README.md", "exec")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []
    found = re.findall(r"\]\(([^):]+\.md)?#([^)]+)\)", page.read_text())
    assert [(file, to) for file, to in found if to not in anchors(page.parent / file if file else page)] == []
