"""Writes the reference page of the command line from its `--help`:

python docs/guide/commands.py > docs/guide/commands.md
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from typer.main import get_command

from outlast import cli
from outlast.cli.commands import GROUPS, app

HEAD = """\
# Commands

<!-- Written by `python docs/guide/commands.py > docs/guide/commands.md` from each command's --help. -->

A command finds jobs of the working directory, whose state is in `.outlast/` (or in `OUTLAST_STATE_DIR`), or
[of a cluster](kubernetes.md#commands). Without a name it takes the only unfinished job, or, when all have finished, the newest,
and says which. In a cluster, which others use, too, it takes a job without a name only if there is no other.

| exit code | meaning |
|---|---|
| 0 | success; for `outlast run`, success of the job |
| 1 | failure, or a cluster's refusal; for `outlast run`, failure of the job, if it has no exit code of its own |
| 2 | a mistake in the job file, an option or a name |
| 3, 4, 143 | for `outlast submit --wait`: the job failed, was cancelled, or the step got SIGTERM ([pipelines](pipelines.md)) |
| 75 | for `outlast run`: interrupted or suspended, and saved; the same command goes on |
| 130 | killed by Ctrl-C |
"""


def page() -> str:
    """The page, in Markdown: the groups of `outlast --help`, in its order."""
    named = commands()
    parts = [HEAD, "\n```\n", help_of(""), "```\n"]
    for heading, verbs in GROUPS.items():
        parts.append(f"\n## {heading}\n")
        for name in [name for name in named if name.split()[0] in verbs]:
            parts.append(f"\n### outlast {name}\n\n```\n{help_of(name)}```\n")
    return "".join(parts)


def commands() -> list[str]:
    """All commands in the order of the help, those of a group with the group's name before them."""
    return list(_below(get_command(app)))


def _below(group: Any) -> Iterator[str]:
    for name in group.list_commands(None):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from (f"{name} {each}" for each in _below(command))
        elif not command.hidden:
            yield name


def help_of(command: str) -> str:
    """What `outlast COMMAND --help` prints on a terminal of 80 columns."""
    wide = mock.patch.dict(os.environ, COLUMNS="80")
    with wide, contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    return printed.getvalue()


if __name__ == "__main__":
    print(page(), end="")
