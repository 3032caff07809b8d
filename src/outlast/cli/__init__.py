"""The program `outlast`: its command line, of which a pod's `outlast agent` imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from outlast.backends import Backend


def main(args: Sequence[str] | None = None, *, backend: Backend | None = None) -> NoReturn:
    """Run the command line with `args` (default: those of this process) on `backend` (default: this machine), and exit."""
    if (sys.argv[1:] if args is None else args) == ["agent"]:
        from outlast.agent import start

        start.main()
    from outlast.cli import commands

    commands.main(args, backend)
