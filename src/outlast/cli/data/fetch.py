"""`outlast fetch`: fetching a job's output from its store."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, terminal, transfer_progress
from outlast.cli.find_job import ContextOption, NamespaceOption


def fetch(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.", autocompletion=completion.jobs)],
    patterns: Annotated[list[str] | None, typer.Argument(metavar="PATTERN", help="Only these files.")] = None,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: ./NAME.")] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Fetch the results of a job from its output in a store.

    Checkpoints are fetched only if a PATTERN names them. The target directory is ignored by git, and is not part of the code of
    later jobs.

    \b
    Examples:
      outlast fetch cifar10 -n team-a
      outlast fetch cifar10 model.pt 'logs/*' --to results
    """
    from outlast.storage.runs.output import OWN, skipped
    from outlast.storage.sync import growing_files, push_and_pull

    if (url := find_job.in_store(name)) is None:
        run = find_job.run(ctx, name, namespace, context)
        url = str(run.output)
        if "://" not in url:
            raise OutlastError(f"{run.name} has no output in a store; what it wrote is in {url}")
    stored, record = find_job.stored_run(url)
    directory = to or Path(record.job)
    left = skipped if not patterns else lambda path: not any(fnmatch.fnmatch(path, each) for each in patterns)
    (directory / OWN).mkdir(parents=True, exist_ok=True)
    (directory / ".gitignore").write_text("*\n")
    with transfer_progress.interruptible() as stop, transfer_progress.shown("received") as tell:
        how = push_and_pull.Options(skip=left, stop=stop, progress=lambda now: tell(now.bytes, now.bytes_total))
        report = push_and_pull.pull(stored, directory, directory / OWN / "pulled", how)
        for path in growing_files.files(stored):
            if not patterns or not left(path):
                growing_files.fetch(stored, path, directory / path, stop)
    if report.failed:
        raise OutlastError(f"{report.failed[0][0]} could not be fetched: {report.failed[0][1]}; the same command tries again")
    if not record.ended:
        terminal.say(
            f"no end of {record.job} is recorded: it trains, uploads results or was cancelled; this is what is there by now"
        )
    print(f"{stored.url}: {directory}")
