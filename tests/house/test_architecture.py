"""The map (docs/architecture.md, where.md, words.md) is true, and the house keeps its limits."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outlast"
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("architecture", "where", "words"))

LINES, FUNCTION, WINGS, FILES = 600, 60, 12, 20
"""The longest module, the longest function; the most wings, and files in one room."""


def wings() -> set[str]:
    """Packages and modules at the top: `worker`, `checkpoints`."""
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    return packages | {path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__"}


def section(title: str) -> str:
    """The text below a heading, up to the next one of the same level."""
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def defines(file: str, name: str) -> bool:
    """Whether a module has this `f`, `C`, `C.f` or `NAME`."""
    text = (SOURCE / file).read_text()
    return all(re.search(rf"^( *(async )?def|class) {part}\b|^{part}\b.*=", text, re.MULTILINE) for part in name.split("."))


def lengths() -> Iterator[tuple[str, int]]:
    """Each function with the number of its lines; of the command line's verbs, those after the options and the help."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[:2][-1] if name.startswith("cli/") and ast.get_docstring(node) else node
                yield f"{name}:{node.name}", (node.end_lineno or 0) - first.lineno + 1


def drawn() -> list[set[str]]:
    """The lines of the picture, top first."""
    picture = section("Layers").split("```")[1]
    return [set(re.split(r"\s{2,}", line.strip())[1:]) for line in picture.strip().splitlines()]


def test_every_wing_is_on_the_map_and_the_map_names_no_other() -> None:
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", section("Layers"), re.MULTILINE)
    assert set(listed) == wings()
    assert sum((SOURCE / name).is_dir() for name in listed) <= WINGS, "a wing too many"


def test_every_room_says_what_it_is_for_and_is_no_hall() -> None:
    rooms = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
    assert [str(room) for room in rooms if not ast.get_docstring(ast.parse((room / "__init__.py").read_text()))] == []
    assert {f"{room} ({count} files)" for room in rooms if (count := len(list(room.glob("*.py")))) > FILES} == set()


def test_the_picture_shows_the_layers_that_import_linter_enforces() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (each for each in linter["contracts"] if each["type"] == "layers")
    assert drawn() == [set(layer.split(" | ")) for layer in contract["layers"]]
    assert contract["exhaustive"]


def test_every_file_that_the_map_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert [name for name in sorted(named) if not (SOURCE / name).is_file()] == []


def test_what_the_map_names_is_in_the_file_that_it_names() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`(?: \| | )`([\w.]+)`", PAGE))
    assert len(named) > 100
    assert {(file, name) for file, name in named if not defines(file, name)} == set(), "correct the page"


def test_one_module_knows_how_torch_names_devices() -> None:
    """Everything else asks `training.device`, so that it works on every accelerator."""
    torchs = re.compile(r"\btorch\.(cuda|xpu|hpu|neuron|mps|accelerator)\b|\btorch_(xla|neuronx)\b(?!\")")
    code = {path: re.sub(r'"""[\s\S]*?"""', "", path.read_text()) for path in SOURCE.rglob("*.py")}
    found = {str(path.relative_to(SOURCE)) for path, text in code.items() if torchs.search(text)}
    assert found == {"training/device.py"}


def test_nothing_of_ours_draws_from_the_generator_that_scripts_seed() -> None:
    """They draw from it, and so do recipes, which are such scripts; the others only keep its state for them."""
    drawn = {
        (path.relative_to(SOURCE).parts[0], node.attr)
        for path in SOURCE.rglob("*.py")
        if re.search(r"\brandom\.", path.read_text())
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    }
    kept = {("training", name) for name in ("seed", "getstate", "setstate")}
    kept.add(("worker", "getstate"))  # to see whether an import draws from it
    ours = {(where, name) for where, name in drawn if where != "recipes" and name not in ("Random", "SystemRandom")}
    assert ours == kept


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    over = {f"{name} ({lines} lines)" for name, lines in lengths.items() if lines > LINES}
    assert not over, f"split it: {LINES} lines at most"


def test_no_function_is_too_long() -> None:
    over = {f"{name} ({lines} lines)" for name, lines in lengths() if lines > FUNCTION}
    assert not over, f"split it: {FUNCTION} lines at most"
