"""The map (docs/architecture.md, where.md, words.md) is true, and the house keeps its limits."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from outlast.cli.commands import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outlast"
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("architecture", "where", "words"))

LINES, FUNCTION, PARAMETERS, WINGS, FILES = 600, 60, 7, 12, 20
"""The longest module, the longest function, the most parameters (`self` excluded); the most wings, and files in one room."""

PUBLIC = {"training/samples/stream.py:__init__", "order.py:__init__"}
"""Scripts construct a `Stream` and a `BatchSampler` with keywords, as they do torch's DataLoader."""


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def blocks(node: ast.AST) -> Iterator[ast.AST]:
    """The statements, handlers and cases directly below a node; expressions hold no import or function."""
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case))


def wings() -> set[str]:
    """Packages and modules at the top: `worker`, `checkpoints`."""
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    return packages | {path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__"}


def section(title: str) -> str:
    """The text below a heading, up to the next one of the same level."""
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def names(module: ast.Module) -> set[str]:
    """`f`, `C`, `C.f` and module-level `NAME`s that a module defines."""
    found = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in methods}
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                found.add(target.id)
    return found


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(SOURCE.rglob("*.py")):
        left = [*blocks(tree(path))]
        while left:
            node = left.pop()
            left += blocks(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(SOURCE)}:{node.name}", node


@functools.cache
def verbs() -> set[str]:
    """The functions that typer makes commands of. Their parameters are the options, and their docstrings the help."""

    def callbacks(group: typer.Typer) -> Iterator[Any]:
        yield from (command.callback for command in group.registered_commands)
        for each in group.registered_groups:
            yield from callbacks(each.typer_instance)

    modules = ((inspect.getsourcefile(callback), callback.__name__) for callback in callbacks(app))
    return {f"{Path(path).relative_to(SOURCE)}:{name}" for path, name in modules}


def length(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has; of a verb, after its help."""
    first = node.body[1].lineno if name in verbs() and ast.get_docstring(node) else node.lineno
    return (node.end_lineno or 0) - first + 1


def width(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has, but for `self` and the options of a verb."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return 0 if name in verbs() else sum(each.arg not in ("self", "cls") for each in named)


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
    assert [str(room) for room in rooms if not ast.get_docstring(tree(room / "__init__.py"))] == []
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
    assert {(file, name) for file, name in named if name not in names(tree(SOURCE / file))} == set(), "correct the page"


def imported(node: ast.AST) -> Iterator[Path]:
    """The modules of ours that are imported below a node, when it runs: at the top of a module or in a function."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "outlast":
        package = SOURCE.joinpath(*node.module.split(".")[1:])
        for module in (package / each.name for each in node.names):
            files = (module.with_suffix(".py"), module / "__init__.py", package.with_suffix(".py"), package / "__init__.py")
            yield next(file for file in files if file.is_file())
    for child in blocks(node):
        yield from imported(child)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {path: set(imported(tree(path))) - {path} for path in SOURCE.rglob("*.py")}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        names = " -> ".join(str(path.relative_to(SOURCE)) for path in error.args[1])
        pytest.fail(f"{names}: put what both need into a module of its own")


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
        for node in ast.walk(tree(path))
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


def test_no_function_is_too_long_or_has_too_many_parameters() -> None:
    long, wide = set(), set()
    for name, node in functions():
        long |= {f"{name} ({lines} lines)" for lines in [length(name, node)] if lines > FUNCTION}
        wide |= {f"{name} ({many} parameters)" for many in [width(name, node)] if many > PARAMETERS and name not in PUBLIC}
    assert not long, f"split it: {FUNCTION} lines at most"
    assert not wide, f"group them in a frozen dataclass: {PARAMETERS} parameters at most"
