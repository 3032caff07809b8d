"""The command line, `outlast VERB`. The subpackages are the groups in the help: `train`, `look`, `data` and `cluster`.

Verbs import heavy modules (pydantic, yaml, rich) only when they run, so that `outlast --help` is instant. The exit code is 0 on
success, 1 if the command failed, 2 if it was used wrongly; `outlast run` returns the job's exit code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand

from outlast import __version__
from outlast.cli import find_job, terminal
from outlast.cli.cluster import doctor, install, processes, rdzv, render
from outlast.cli.data import checkpoints, datasets, fetch, sync
from outlast.cli.groups import Commands
from outlast.cli.look import report, status_logs_list, tensorboard, top, ui, wait_why
from outlast.cli.train import chaos, evaluate, notebook, run, script, submit, suspend_scale_cancel, validate

GROUPS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Train": {
        "run": run.run,
        "submit": submit.submit,
        "init": script.init,
        "suspend": suspend_scale_cancel.suspend,
        "resume": suspend_scale_cancel.resume,
        "scale": suspend_scale_cancel.scale,
        "cancel": suspend_scale_cancel.cancel,
        "evaluate": evaluate.evaluate,
        "validate": validate.validate,
        "convert": validate.convert,
        "chaos": chaos.chaos,
        "notebook": notebook.notebook,
        "forget": suspend_scale_cancel.forget,
    },
    "Look": {
        "status": status_logs_list.status,
        "logs": status_logs_list.logs,
        "list": status_logs_list.list_,
        "wait": wait_why.wait,
        "why": wait_why.why,
        "report": report.report,
        "ui": ui.ui,
        "top": top.top,
        "tensorboard": tensorboard.tensorboard,
    },
    "Data and checkpoints": {"checkpoints": checkpoints.app, "fetch": fetch.fetch, "data": datasets.app, "sync": sync.sync},
    "Cluster": {
        "doctor": doctor.doctor,
        "install": install.install,
        "uninstall": install.uninstall,
        "render": render.render,
        "rdzv": rdzv.app,
        "operator": processes.operator,
        "node-watch": processes.node_watch,
    },
}
"""Commands, keyed by their heading in the help, everyday commands first. The guide lists commands in the same order."""
_CLASSES: dict[str, type[TyperCommand]] = {
    "run": script.Command,
    "submit": script.Command,
    "init": script.Command,
    "scale": find_job.takes("[NAME] N"),
    "chaos": find_job.takes("[NAME] ACTION"),
}


class _Grouped(Commands):
    groups: ClassVar = {heading: list(verbs) for heading, verbs in GROUPS.items()}


app = typer.Typer(
    name="outlast",
    cls=_Grouped,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _versions(requested: bool) -> None:
    if not requested:
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
    from outlast.worker.agent import evaluation_in_pod

    terminal.release()
    raise typer.Exit(evaluation_in_pod.main(args or ()))


for verbs in GROUPS.values():
    for name, verb in verbs.items():
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command(name, cls=_CLASSES.get(name))(verb)
app.command(hidden=True)(evaluation)


@functools.cache
def command() -> Any:
    """Build the whole command line. The result is cached, because building it takes longer than most commands run."""
    return typer.main.get_command(app)
