"""Commands and job files in the README and the guides are right: every verb and option exists, every document is valid."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from outlast import contract, spec

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "guide" / "getting-started.md",
    ROOT / "docs" / "guide" / "kubernetes.md",
    ROOT / "docs" / "guide" / "hugging-face.md",
]
GROUPS = ("checkpoints", "data", "image", "rdzv")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


def commands(*pages: Path) -> list[list[str]]:
    """Every command line in a block of shell, as words."""
    lines = [line for page in pages or PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    words = [shlex.split(command) for line in lines for command in re.split(r"[;|]", line.split("#")[0])]
    return [each for each in words if each]


OUTLAST = [words[1:] for words in commands() if Path(words[0]).name == "outlast"]
MAKE = sorted({words[1] for words in commands() if words[0] == "make"})


def test_only_known_programs_are_shown() -> None:
    assert {Path(words[0]).name for words in commands()} == {"outlast", "make", "pip", "kubectl"}


@pytest.mark.parametrize("words", OUTLAST, ids=" ".join)
def test_a_command_exists_with_its_options(words: list[str]) -> None:
    if words[0].startswith("-"):
        assert f"  {words[0]} " in runpy.run_path(str(ROOT / "docs" / "guide" / "commands.py"))["help_of"]("")
        return
    command = words[: 2 if words[0] in GROUPS else 1]
    help_of = runpy.run_path(str(ROOT / "docs" / "guide" / "commands.py"))["help_of"](" ".join(command))
    assert help_of.startswith(f"Usage: outlast {' '.join(command)} ")
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    for option in (word.split("=")[0] for word in words[:script] if word.startswith("-")):
        assert re.search(rf"^  (-\w, )?{option}\b|^  {option}, ", help_of, flags=re.M), f"{option} in {words}"


@pytest.mark.parametrize("file", sorted({word for words in OUTLAST for word in words if word.startswith("examples/")}))
def test_a_file_that_is_named_exists(file: str) -> None:
    assert (ROOT / file).exists()


@pytest.mark.parametrize("target", MAKE)
def test_make_knows_the_target(target: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    subprocess.run(["make", "--dry-run", "--old-file=.venv/.ready", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("text", [block for page in PAGES for block in blocks(page, "yaml")])
def test_a_job_file_is_valid(text: str) -> None:
    assert spec.parse(text).kind == contract.KIND


@pytest.mark.parametrize("text", [block for page in PAGES for block in blocks(page, "python")])
def test_python_compiles(text: str) -> None:
    compile(text, "README.md", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_headings(page: Path) -> None:
    found = re.findall(r"\]\(([^):]+\.md)?#([^)]+)\)", page.read_text())
    assert [(file, to) for file, to in found if to not in anchors(page.parent / file if file else page)] == []


@pytest.mark.parametrize("page", [PAGES[0], PAGES[2]], ids=lambda page: page.stem)
def test_the_number_of_workers_that_a_page_scales_to_is_allowed_by_its_job_file(page: Path) -> None:
    wanted = [int(words[-1]) for words in commands(page) if words[1:2] == ["scale"]]
    allowed = {size for text in blocks(page, "yaml") for size in spec.parse(text).spec.workers.allowed()}
    assert wanted
    assert set(wanted) <= allowed
