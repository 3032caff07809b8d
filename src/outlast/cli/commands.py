"""The command line: `outlast VERB`, one module a group of verbs.

Verbs talk to a `backend.Backend`, and import heavy modules (pydantic, yaml, rich) when they are called,
so that `outlast --help` answers at once. Exit codes are 0, 1 when the command failed, 2 when it was used wrongly,
for `outlast run` that of the job.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer
import typer.main

from outlast import __version__
from outlast.cli import (
    chaos,
    checkpoints,
    data,
    doctor,
    forget,
    install,
    jobs,
    nodewatch,
    notebook,
    operator,
    prepare_data,
    rdzv,
    render,
    results,
    run,
    script,
    submit,
    sync,
    tensorboard,
    terminal,
    top,
    validate,
    which,
    why,
)

app = typer.Typer(
    name="outlast",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _versions(wanted: bool) -> None:
    """Print the versions of Outlast, Python and PyTorch."""
    if not wanted:
        return
    import platform
    from importlib import metadata

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    print(f"outlast {__version__}, Python {platform.python_version()}, {torch}, {platform.platform()}")
    raise typer.Exit


@app.callback()
def program(
    versions: Annotated[
        bool, typer.Option("--version", callback=_versions, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Distributed PyTorch training that outlasts its machines."""


def evaluation(args: Annotated[list[str] | None, typer.Argument(metavar="ARGS")] = None) -> None:
    """Evaluate a job's model in this pod, configured by its environment."""
    from outlast.worker.agent import evaluation

    terminal.release()
    raise typer.Exit(evaluation.main(args or ()))


app.command(cls=script.Command)(run.run)
app.command(cls=script.Command)(submit.submit)
app.command(cls=script.Command)(script.init)
jobs.add_to(app)
app.command()(forget.forget)
app.command()(why.why)
app.command()(top.top)
app.command(cls=which.takes("[NAME] ACTION"))(chaos.chaos)
app.command()(results.report)
app.command()(results.fetch)
app.command()(results.evaluate)
app.command()(tensorboard.tensorboard)
app.command()(notebook.notebook)
app.add_typer(checkpoints.app, name="checkpoints")
app.command()(validate.validate)
app.command()(render.render)
data.app.add_typer(prepare_data.app, name="prepare")
data.app.command()(prepare_data.verify)
app.add_typer(data.app, name="data")
app.command()(sync.sync)
app.add_typer(rdzv.app, name="rdzv")
app.command()(install.install)
app.command()(install.uninstall)
app.command()(doctor.doctor)
app.command()(operator.operator)
app.command("node-watch")(nodewatch.node_watch)
app.command(hidden=True)(evaluation)


@functools.cache
def command() -> Any:
    """The whole command line; to build it takes longer than most commands do."""
    return typer.main.get_command(app)
