"""`outlast checkpoints list | show | verify`: what a job has saved."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import contract, units
from outlast.cli import show, which
from outlast.cli.show import Output, OutputOption
from outlast.cli.which import NameArgument
from outlast.errors import NotFound

if TYPE_CHECKING:
    from outlast.checkpoints import Checkpoint

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at what a job has saved.")

StepOption = Annotated[int | None, typer.Option(metavar="N", min=0, help="The checkpoint of this step.", show_default=False)]


def _found(ctx: typer.Context, name: str | None, step: int | None = None) -> list[Checkpoint]:
    """The job's checkpoints, lowest step first, or the one of `step`; raises NotFound."""
    from outlast import checkpoints

    place = which.backend(ctx)
    name = which.job(place, name)
    directory = place.output(name) / contract.CHECKPOINTS
    found = checkpoints.list_(directory)
    if step is None:
        return found
    if chosen := [checkpoint for checkpoint in found if checkpoint.step == step]:
        return chosen
    there = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
    raise NotFound(f"no checkpoint of step {step} in {directory}; there are: {there}")


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**dataclasses.asdict(checkpoint), "path": str(checkpoint.path)}


@app.command("list")
def list_(ctx: typer.Context, name: NameArgument = None, output: OutputOption = Output.TABLE) -> None:
    """List the committed checkpoints of a job, the newest last.

    \b
    Examples:
      outlast checkpoints list
      outlast checkpoints list cifar10 -o json
    """
    found = _found(ctx, name)
    if output is not Output.TABLE:
        show.data([_plain(checkpoint) for checkpoint in found], output)
        return
    now = time.time()
    rows = [
        (c.step, None, None, None, None, None, f"{c.path.name}: {c.problem}")
        if c.problem
        else (
            c.step,
            units.human_seconds(now - c.time),
            units.human_bytes(c.bytes),
            c.generation,
            c.world_size,
            c.run,
            c.path.name,
        )
        for c in found
    ]
    print(show.table(("STEP", "AGE", "SIZE", "GENERATION", "RANKS", "RUN", "DIRECTORY"), rows))


@app.command("show")
def show_(ctx: typer.Context, name: NameArgument = None, step: StepOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show one checkpoint and its files.

    It is the newest, unless --step says otherwise.

    \b
    Examples:
      outlast checkpoints show
      outlast checkpoints show cifar10 --step 1200
    """
    found = _found(ctx, name, step)
    if not found:
        raise NotFound("nothing has been saved yet")
    newest = found[-1]
    files = {path.name: path.stat().st_size for path in sorted(newest.path.iterdir())}
    if output is not Output.TABLE:
        show.data({**_plain(newest), "files": files}, output)
        return
    print(
        show.fields(
            {
                "step": newest.step,
                "directory": newest.path,
                "saved": show.moment(newest.time) if newest.time else None,
                "size": units.human_bytes(newest.bytes),
                "run": newest.run,
                "world": f"{newest.world_size} ranks, generation {newest.generation}",
                "problem": newest.problem,
            }
        )
    )
    print()
    print(show.table(("FILE", "SIZE"), ((file, units.human_bytes(size)) for file, size in files.items())))


@app.command()
def verify(ctx: typer.Context, name: NameArgument = None, step: StepOption = None) -> None:
    """Check that checkpoints are whole.

    Reads all of them, or the one of --step, and compares every file with its checksum. The exit code is 1 when one is damaged.

    \b
    Examples:
      outlast checkpoints verify
      outlast checkpoints verify cifar10 --step 1200
    """
    from outlast import checkpoints

    damaged = False
    for checkpoint in _found(ctx, name, step):
        problem = checkpoints.verify(checkpoint.path)
        damaged = damaged or problem is not None
        print(f"{checkpoint.path.name}: {problem or f'whole, {units.human_bytes(checkpoint.bytes)}'}", flush=True)
    if damaged:
        raise typer.Exit(1)
