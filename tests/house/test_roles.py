"""Every process of ours that another one starts is `python -m outlast ROLE`: see `outlast.__main__`."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outlast
from outlast.__main__ import ROLES
from outlast.cli import commands

SOURCE = Path(outlast.__file__).parent
NAMED = re.compile(
    r"'-m', (?:'outlast\.|__name__)|-m outlast\.(?!recipes\b)|from outlast(?:\.(?!training\b|__main__\b)| import )\w"
)
"""What names a module of ours for another process. Users run `outlast.recipes`, and their scripts import `outlast.training`."""


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_what_is_called(role: str) -> None:
    assert callable(importlib.import_module(ROLES[role]).main)


def test_a_role_is_no_command_but_for_the_agent_of_pods() -> None:
    assert not set(commands.command().commands) & ROLES.keys()


@pytest.mark.parametrize("words", [["no-such-command"], pytest.param([], marks=pytest.mark.slow)])
def test_whatever_is_no_role_is_a_command_of_the_program(words: list[str]) -> None:
    program = [str(Path(sys.executable).with_name("outlast"))]
    one, other = (
        subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        for command in (program, [sys.executable, "-m", "outlast"])
    )
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    assert one.stdout + one.stderr


def named(source: str) -> Iterator[str]:
    """The modules of ours that command lines in a source name: lists of words, and programs as text; docstrings excluded."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple) and any(isinstance(e, ast.Constant) and e.value == "-m" for e in node.elts):
            yield from NAMED.findall(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from NAMED.findall(node.value)


def test_no_command_line_names_a_module() -> None:
    assert [*named('run([python, "-m", "outlast.worker.agent.start"])'), *named('program = "from outlast.cli import main"')]
    found = {str(path.relative_to(SOURCE)): list(named(path.read_text())) for path in SOURCE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}
