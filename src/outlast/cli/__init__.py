"""The command line of the program `outlast`. A pod's `outlast agent` imports nothing from this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn


def kubectl_plugin() -> NoReturn:
    """Run as `kubectl outlast`: jobs are those of the cluster. kubectl finds the program `kubectl-outlast` on the PATH."""
    main(name="kubectl outlast")


def main(args: Sequence[str] | None = None, *, backend: Any = None, name: str = "outlast") -> NoReturn:
    """Run the command line with `args` (default: the arguments of this process) on a `Backend` (default: this machine), and
    exit. `name` is the name of the program."""
    if (sys.argv[1:] if args is None else args) == ["agent"]:
        from outlast import __main__ as roles

        roles.main(["agent"])
    from outlast.base.errors import InvalidJob, OutlastError
    from outlast.cli import commands, gone, terminal

    terminal.guard()
    if instead := gone.sentence(sys.argv[1:] if args is None else args):
        print(f"Error: {instead}", file=sys.stderr)
        sys.exit(2)
    try:
        commands.command()(args=args, obj=backend, prog_name=name)
    except OutlastError as error:
        print(error if isinstance(error, InvalidJob) else f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        sys.excepthook = terminal.bug
        raise
    sys.exit(0)
