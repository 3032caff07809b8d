"""The `outlast` command line. A pod's `outlast agent` imports nothing from this package."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn


def kubectl_plugin() -> NoReturn:
    """Run as `kubectl outlast`, which knows only jobs in the cluster. kubectl finds the program `kubectl-outlast` on the PATH."""
    from outlast.cli.completion import PLUGIN

    main(name=PLUGIN)


def kubectl_completion() -> None:
    """Complete the last word of `kubectl outlast ...` for kubectl, which runs `kubectl_complete-outlast WORDS`.

    kubectl reads a name, a tab and a description per line, as fish does, and then a directive:
    https://github.com/kubernetes/sample-cli-plugin#shell-completion
    """
    from outlast.cli.completion import PLUGIN

    os.environ |= {
        f"_{PLUGIN}_COMPLETE".upper(): "complete_fish",
        "_TYPER_COMPLETE_ARGS": shlex.join(["outlast", *(sys.argv[1:] or [""])]),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    with contextlib.redirect_stdout(io.StringIO()) as offered, contextlib.suppress(SystemExit):
        main([], name=PLUGIN)
    print(*filter(None, offered.getvalue().splitlines()), ":0", sep="\n")  # if there are no names, the shell offers files


def main(args: Sequence[str] | None = None, *, backend: Any = None, name: str = "outlast") -> NoReturn:
    """Run the command line `name` with `args` (default: sys.argv) on a `Backend` (default: this machine), and exit."""
    if (sys.argv[1:] if args is None else args) == ["agent"]:
        from outlast import __main__ as roles

        roles.main(["agent"])
    from outlast.base.errors import InvalidJob, OutlastError
    from outlast.cli import commands, terminal

    terminal.guard()
    try:
        try:
            commands.command()(args=args, obj=backend, prog_name=name)
        finally:
            sys.stdout.flush()
    except OutlastError as error:
        print(error if isinstance(error, InvalidJob) else f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
            if error.errno != errno.EPIPE:  # whoever closes a pipe has read enough
                print(
                    f"Error: cannot write {error.filename or 'a file or the output'}: {error.strerror}; make room there",
                    file=sys.stderr,
                )
        else:  # a bug
            traceback.print_exc()  # without Python's colours, which the guard would show as text
        sys.exit(1)
    sys.exit(0)
