"""Who may draw from the generator that scripts seed: they, and what keeps its state for them."""

import ast
from pathlib import Path

import outlast

SOURCES = Path(outlast.__file__).parent


def test_nothing_of_ours_draws_from_the_generator_that_scripts_seed() -> None:
    drawn = set()
    for path in SOURCES.rglob("*.py"):
        if path.relative_to(SOURCES).parts[0] == "recipes":
            continue  # they are such scripts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                drawn.add((path.relative_to(SOURCES).parts[0], node.attr))
    kept = {("training", name) for name in ("seed", "getstate", "setstate")}
    kept.add(("worker", "getstate"))  # to see whether an import draws from it
    assert {(where, name) for where, name in drawn if name not in ("Random", "SystemRandom")} == kept
