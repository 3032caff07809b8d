"""Lists the recipes, for `python -m outlast.recipes`."""

from __future__ import annotations

import ast
from pathlib import Path


def programs() -> list[str]:
    """Return the names of this package's modules that run as scripts."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    return [file.stem for file in files if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")]


def summary(name: str) -> str:
    """Return the first line of a recipe's docstring. The recipe is not imported, because importing torch takes seconds."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].removesuffix(" Copy it and change it.")


def main() -> None:
    """Print the list of recipes, whatever the arguments."""
    print("Whole training programs, one readable file each:\n")
    for name in programs():
        print(f"  {name:10}  {summary(name)}")
    print("\npython -m outlast.recipes.NAME --help shows commands to begin with, and all flags. To change one, copy its file:")
    print(Path(__file__).parent)


if __name__ == "__main__":
    main()
