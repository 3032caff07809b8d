"""Every process of ours that another one starts is `python -m outlast ROLE`: see `outlast.__main__`."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outlast
from outlast.__main__ import ROLES
from outlast.cli import commands

SOURCE = Path(outlast.__file__).parent


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


def test_no_command_line_names_a_module() -> None:
    """Users run `outlast.recipes`, Spark's images `outlast.spark_entrypoint`; their scripts import `outlast.training`."""
    named = re.compile(
        r'"-m", "?(outlast\.|__name__)|-m outlast\.(?!recipes|spark_entrypoint)|["\n]from outlast\.(?!training)\w+ import .*"'
    )
    assert [path for path in SOURCE.rglob("*.py") if named.search(path.read_text())] == []
