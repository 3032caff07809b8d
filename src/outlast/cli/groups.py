"""Formats the help for a command with subcommands: in groups, and without truncated lines. First sentences are shown in full, so
they have to be short: `tests/cli/test_cli.py` enforces 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperGroup

_LONG = 1000
"""Number of characters that no first sentence exceeds, so that nothing is truncated."""


class Commands(TyperGroup):
    """A command with subcommands, shown in the order and under the headings of `groups`."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Names of commands, keyed by heading. If it is empty, all commands are under `Commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the groups, then the hidden commands."""
        ordered = [name for names in self.groups.values() for name in names]
        return [*ordered, *(name for name in self.commands if name not in ordered)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group as a section, with a name column of the same width in all sections."""
        groups = self.groups or {"Commands": self.list_commands(ctx)}
        width = max(len(name) for names in groups.values() for name in names)
        for heading, names in groups.items():
            visible = [(name, self.commands[name]) for name in names if not self.commands[name].hidden]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), command.get_short_help_str(_LONG)) for name, command in visible])
