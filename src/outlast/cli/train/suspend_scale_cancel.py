"""`outlast suspend | resume | scale | cancel | forget`: steering jobs, and removing ended jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base import units
from outlast.base.errors import NotFound, OutlastError
from outlast.cli import completion, find_job, terminal
from outlast.cli.find_job import ContextOption, NameArgument, NamespaceOption, YesOption
from outlast.job.backend import not_ended

if TYPE_CHECKING:
    from outlast.job.status import JobStatus
    from outlast.local.backend import LocalBackend


def scale(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="N", hidden=True, autocompletion=completion.jobs)],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Change the number of workers of a job.

    The number must be between workers.min and workers.max of the job file. Training with a session saves first and loses no step;
    a plain script gets SIGTERM, and has interruption.grace to save.

    \b
    Examples:
      outlast scale 3
      outlast scale cifar10 1
    """
    run, number = find_job.run_and_last(ctx, words, "N", namespace, context)
    if not number.isdecimal():
        raise typer.BadParameter(f"{number!r} is not a number of workers")
    run.scale(int(number))
    print(f"{run.name} is scaled to {units.count(int(number), 'worker')}")


def suspend(
    ctx: typer.Context, name: NameArgument = None, namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Save a job and release its workers until `outlast resume`.

    Training with a session saves first; a plain script gets SIGTERM, and has interruption.grace to save.

    \b
    Examples:
      outlast suspend cifar10
    """
    run = find_job.run(ctx, name, namespace, context)
    run.suspend()
    more = f"outlast resume {run.name}{find_job.suffix(namespace, context)}"
    print(f"{run.name} is being suspended: its workers save and exit; continue with: {more}")


def resume(
    ctx: typer.Context, name: NameArgument = None, namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Continue a job that was stopped or has failed.

    A job that was suspended, interrupted or cancelled, or that failed, continues with the code and the job file it was submitted
    with; `outlast run FILE` uses the current code and job file. The job runs in the background.

    \b
    Examples:
      outlast resume cifar10
    """
    run = find_job.run(ctx, name, namespace, context)
    run.resume(say=terminal.say)
    print(f"{run.name} goes on; look at it with: outlast status {run.name}{find_job.suffix(namespace, context)}")


def cancel(
    ctx: typer.Context, name: NameArgument = None, namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """End a job. Saved state stays; `outlast run FILE`, or `outlast submit FILE` in a cluster, continues from it.

    \b
    Examples:
      outlast cancel cifar10
    """
    run = find_job.run(ctx, name, namespace, context)
    name = run.name
    try:
        output = run.output
    except NotFound:  # the job's other objects may still exist
        run.cancel()
        print(f"{name} was gone already; its remaining objects are deleted")
        return
    done = find_job.in_cluster(run.place) and run.status.state == "Succeeded"
    run.cancel()
    where = f"; its output {'stays in' if _stays(output) else 'was'} {output}" if output else ""
    if isinstance(output, Path):
        more = f"; {run.status.again} goes on from what is saved"
    else:
        more = "; outlast submit FILE goes on from what is saved" if _stays(output) else ""
    print(f"{name}, which had succeeded, is removed{where}" if done else f"{name} is cancelled{where}{more}")


def _stays(output: Path | str) -> bool:
    return isinstance(output, Path) or "://" in output


def forget(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Jobs, or URLs of outputs.", autocompletion=completion.jobs)
    ] = None,
    all_finished: Annotated[bool, typer.Option("--all-finished", help="All jobs that have ended.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="All jobs that ended longer ago than this, such as 7d.")
    ] = None,
    output: Annotated[
        bool, typer.Option("--output", help="Also remove their output on this machine, with what earlier runs left in previous/.")
    ] = False,
    yes: YesOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Remove jobs that have ended.

    This removes their state, so they cannot continue, and outlast run starts them from the beginning. --output also removes their
    checkpoints, logs, results and code on this machine, and those of earlier runs in previous/. Output in a store stays, unless
    its URL is given instead of a name: then the whole output at that URL is removed, and nothing else. In a cluster, the job and
    the objects created for it are removed; claims and output stay. A job that has not ended cannot be removed; end it with
    outlast cancel first.

    \b
    Examples:
      outlast forget cifar10
      outlast forget cifar10 --output
      outlast forget --all-finished
      outlast forget --older-than 7d --yes
      outlast forget cifar10 -n team-a
      outlast forget s3://bucket/runs/cifar10
    """
    from outlast.local import backend

    age = None if older_than is None else find_job.duration("--older-than", older_than)
    if bool(names) == (all_finished or age is not None):
        raise typer.BadParameter("give the names of jobs, or --all-finished, or --older-than TIME")
    if names and all("://" in name for name in names):
        return _remove(names, yes=yes)
    place = find_job.place(ctx, names[0] if names else None, namespace, context)
    here = place if isinstance(place, backend.LocalBackend) else None
    if names:
        chosen = [find_job.job(place, name) for name in dict.fromkeys(names)]
        for name in chosen:
            if not (here.is_over(name) if here else place.status(name).state.final):
                raise not_ended(place.status(name), find_job.suffix(namespace, context))
    else:
        chosen = ended(place.list(), time.time(), age or timedelta())
    if not chosen:
        print("no job has ended" if age is None else f"no job has ended longer than {older_than} ago")
        return
    if here is None and output:
        raise OutlastError("--output is for jobs of this machine; outlast forget URL removes one in a store")
    lines = {name: _removal(here, name, output) if here else f"{name}, and the objects created for it" for name in chosen}
    if not yes:
        print("\n".join(lines.values()))
        cluster = find_job.in_cluster(place)
        where = f" in namespace {cluster.cluster.namespace} of {cluster.cluster.context}" if cluster else ""
        terminal.confirm(f"this removes {units.count(len(chosen), 'job')}{where}")
    for name, line in lines.items():
        place.forget(name, output=output)
        print(f"removed {line}")


def _remove(urls: Sequence[str], *, yes: bool) -> None:
    from outlast.storage import runs

    for there, record in map(find_job.stored_run, urls):
        if not record.ended:
            raise OutlastError(
                f"run {record.run} of job {record.job} in {there.url} has not ended ({record.state}); cancel it first"
            )
        if not yes:
            terminal.confirm(f"this removes all of {there.url}: job {record.job}, {record.state}, its checkpoints, and previous/")
        there.delete(entry.key for entry in there.entries() if entry.key != runs.RUN)
        there.delete([runs.RUN])  # last, since this record shows who owns all other objects
        print(f"removed {there.url}")


def ended(statuses: Sequence[JobStatus], now: float, age: timedelta) -> list[str]:
    """Return the names of jobs that ended at least `age` ago."""
    return [s.name for s in statuses if s.state.final and now - (s.finished or s.submitted) >= age.total_seconds()]


def _removal(here: LocalBackend, name: str, output: bool) -> str:
    """Describe in one line which of a job's paths on this machine will be removed, and which will stay."""
    state, there, url = here.places(name)
    parts = [f"{name}: {state}"]
    if there.exists():
        parts.append(str(there) if output else f"its output stays in {there} (--output removes it, too)")
    if url:
        parts.append(f"what is in {url} stays (outlast forget {url} removes it)")
    return "; ".join(parts)
