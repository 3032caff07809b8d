"""`outlast run`: starting or continuing a job, and showing it until it ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import client
from outlast.cli import find_job, terminal
from outlast.cli.find_job import FileOrScript, SetOption, TitleOption
from outlast.cli.train import overrides, script
from outlast.cli.train.script import ModuleOption, WorkersOption

if TYPE_CHECKING:
    from outlast.job.spec import Job

_NOTICE_DELAY_S = 3.0


def run(
    ctx: typer.Context,
    file: FileOrScript,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return at once; the job runs in the background.")] = False,
    module: ModuleOption = False,
    workers: WorkersOption = None,
    name: TitleOption = None,
    set_: SetOption = None,
    chaos: Annotated[Path | None, typer.Option(metavar="FILE", help="Inject the faults of this schedule during the run.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="End the present run of this job, and start from the beginning.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run of this name in the store from another machine that trains it.")
    ] = False,
) -> None:
    """Start or continue training, with a script or a job file.

    Options for outlast come before a script, and arguments of the script after it, as with python. A script runs as one worker
    with one process per GPU, and the job is named after it.

    A run that was interrupted, failed or was cancelled continues from its newest checkpoint, with the current code and job
    file; changes since then are listed. A run that has succeeded is resumed if only its steps or epochs have been raised.
    Otherwise, and with --fresh, the next run starts from the beginning.

    The command shows the run until it ends. Ctrl-C saves and stops (exit code 75), and the same command continues from there; a
    second Ctrl-C kills the job. Closing the terminal leaves the job running. The exit code is 0 if the job succeeded, otherwise
    the exit code of its failure.

    \b
    Examples:
      outlast run train.py --steps 100
      outlast run --workers 2 -m package.train
      outlast run job.yaml --detach
      outlast run job.yaml --workers 4 --set checkpoint.every=1m --set 'args=[--epochs=2]'
      outlast run job.yaml --fresh --chaos chaos.yaml
    """
    gpus = script.gpus() if script.is_script(file, module=module) else 0
    job = overrides.load(file, ctx.args, module=module, workers=workers, name=name, set_=set_ or (), gpus=gpus)
    command = script.command(file, ctx.args, module=module, workers=workers, name=name, set_=set_ or ())
    if chaos is not None:
        from outlast.job import faults

        faults.load(chaos)
    place = find_job.backend(ctx)
    name = job.metadata.name
    if fresh:
        client.end(place, name, terminal.say)
    from outlast.job.spec import unused_fields

    misplaced = list(script.misplaced(ctx, file))
    for sentence in (*misplaced, *unused_fields.anywhere(job), *unused_fields.here(job)):
        terminal.say(f"{name}: {sentence}")

    began = time.time()
    with _explained(job):
        place.submit(job, source=Path(file), chaos=chaos, fresh=fresh, take_over=take_over, command=command, say=terminal.say)
    going_on = place.status(name).submitted < began  # here or elsewhere: the output has old lines
    for notice in place.notices:
        terminal.say(notice)
    if detach:
        print(f"{name} {'goes on' if going_on else 'runs'} in the background; look at it with: outlast logs -f {name}")
        return
    from outlast.cli import run_view

    if terminal.interactive(sys.stdout):
        from outlast.cli import live_panel

        screen: run_view.Screen = live_panel.Terminal()
    else:
        screen = run_view.Screen()
    with run_view.signals() as signals, screen:
        status, code = run_view.follow(place, name, screen, signals, tail=0 if going_on else None)
    refused = status.failure is not None and status.failure.code == 2
    for sentence in (*run_view.summary(status, time.time()), *(misplaced if refused else ())):
        terminal.say(sentence)
    raise typer.Exit(code)


@contextlib.contextmanager
def _explained(job: Job) -> Iterator[None]:
    """Explain a slow start, which is nearly always a wait for the store."""
    from outlast.job import spec

    output = job.spec.output
    waits = f"waiting for {output}: it does not answer, or the output of an earlier run is being archived; Ctrl-C stops"
    timer = threading.Timer(_NOTICE_DELAY_S, terminal.say, (waits,))
    timer.daemon = True
    if output and spec.local(output) is None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
