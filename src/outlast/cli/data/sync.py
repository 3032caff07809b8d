"""`outlast sync`: copying changes between a directory and a store."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base import units
from outlast.base.errors import NotFound, OutlastError
from outlast.cli import tables, transfer_progress
from outlast.cli.tables import Output, OutputOption

if TYPE_CHECKING:
    from outlast.storage.sync.push_and_pull import Report

_LISTED = 20


def sync(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A directory, or the URL of a place in a store.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A directory, or the URL of a place in a store.")],
    delete: Annotated[bool, typer.Option("--delete", help="Delete from DST what SRC does not have.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be done.")] = False,
    check: Annotated[bool, typer.Option("--check", help="List the store, in case other programs have written there.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Copy changes between a directory and a store.

    Makes DST equal to SRC; one is a directory, the other a place in a store. Only changes are transferred; an unchanged tree
    costs one request. Ctrl-C stops, and the same command continues from there. Changes that other programs make in the store
    are noticed once a day, or with --check. The exit code is 1 if some files could not be transferred; they are listed. A place
    with files that no sync has copied there is left unchanged unless --check is given.

    \b
    Examples:
      outlast sync data s3://bucket/data
      outlast sync s3://bucket/runs/digits/logs logs
      outlast sync results gs://bucket/results --delete --dry-run
      outlast sync data s3://bucket/data -o json
    """
    from outlast.job import ownership
    from outlast.storage import store
    from outlast.storage.sync import push_and_pull

    pushing, directory, url = sides(source, target)
    place, state = store.open_(url), _state(pushing, directory, url)
    verb, began = "sent" if pushing else "received", time.monotonic()
    with (
        transfer_progress.interruptible() as stop,
        transfer_progress.shown(verb, quiet=dry_run or output is not Output.TABLE) as tell,
    ):

        def progress(now: push_and_pull.Progress) -> None:
            tell(now.bytes, now.bytes_total, f"{now.files:,}/{now.files_total:,} files")

        begun = any(state.parent.glob(f"{state.name}.*"))  # even if an earlier sync was killed before it wrote a manifest
        if pushing and not check and not begun:
            names = place.names()
            own = "" if push_and_pull.MANIFEST in names else None
            ownership.check_place(place.url, names, own, instead="choose a new or empty place, or --check, which replaces them")
        how = push_and_pull.Options(delete=delete, check=check, dry_run=dry_run, progress=progress, stop=stop)
        report = push_and_pull.push(directory, place, state, how) if pushing else push_and_pull.pull(place, directory, state, how)
        if not pushing and report == push_and_pull.Report():
            raise NotFound(f"there is nothing in {place.url}; correct the URL")
    if output is Output.TABLE:
        for what, path in report.planned:
            print(f"{what}  {shown(path)}")
        print(summary(report, verb, time.monotonic() - began, dry_run=dry_run))
        _complain(report)
    else:
        tables.data({**dataclasses.asdict(report), "seconds": round(time.monotonic() - began, 3)}, output)
    if report.failed:
        raise typer.Exit(1)


def sides(source: str, target: str) -> tuple[bool, Path, str]:
    """Return whether the source is a directory, the directory's path, and the URL of the other side. If both sides are
    directories, the source counts as the directory, and the target's URL begins with `file://`."""
    here = [None if "://" in side and not side.startswith("file://") else _local(side) for side in (source, target)]
    if here[0] is None and here[1] is None:
        raise OutlastError(f"{source} and {target} are both in a store; sync the one to a directory, and that to the other")
    if here[0] is None or here[1] is None:
        return (True, here[0], target) if here[0] else (False, here[1] or Path(), source)
    inner, outer = os.path.realpath(here[0]), os.path.realpath(here[1])
    if f"{inner}/".startswith(f"{outer}/") or f"{outer}/".startswith(f"{inner}/"):
        raise OutlastError(f"one of {source} and {target} lies inside the other; give two directories apart")
    return True, here[0], f"file://{os.path.abspath(here[1])}"


def _local(side: str) -> Path:
    """Return the directory given as one side. Raises StoreError for a URL that lacks a slash."""
    from outlast.storage.store import urls

    if re.match(rf"({'|'.join(urls.PLACES)}):", side) and not side.startswith("file://") and not os.path.exists(side):
        urls.normalised(side)
    return Path(side.removeprefix("file://"))


def _state(pushing: bool, directory: Path, url: str) -> Path:
    """Return the path of the state file for syncs between this directory and this URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{'push' if pushing else 'pull'} {os.path.realpath(directory)} {url.rstrip('/')}"
    return cache / "outlast" / "sync" / hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


def summary(report: Report, verb: str, seconds: float, *, dry_run: bool) -> str:
    """Return a summary such as `1,000 files, 1.0 GiB sent in 4.2s (250 MiB/s), 3 unchanged, 0 deleted`."""
    files, size = units.count(report.transferred, "file"), units.human_bytes(report.bytes)
    rest = f"{report.unchanged:,} unchanged, {report.deleted:,} {'would be ' if dry_run and report.deleted else ''}deleted"
    failed = f", {len(report.failed):,} failed" if report.failed else ""
    if dry_run:
        return f"{files}, {size} would be {verb}, {rest}{failed}"
    rate = f" ({units.human_bytes(report.bytes / seconds)}/s)" if report.bytes and seconds else ""
    return f"{files}, {size} {verb} in {units.human_seconds(seconds)}{rate}, {rest}{failed}"


def shown(path: str) -> str:
    """Format a path on one line, even if it contains control characters."""
    return path if path.isprintable() else repr(path)


def _complain(report: Report) -> None:
    changing = [(path, "it changed all the time; the next sync sends it again") for path in report.changing]
    for word, found in (("ignored", report.ignored), ("warning", changing), ("failed", report.failed)):
        for path, reason in found[:_LISTED]:
            print(f"{word}: {shown(path)}: {reason}", file=sys.stderr)
        if len(found) > _LISTED:
            print(f"{word}: and {len(found) - _LISTED:,} more (all of them with -o json)", file=sys.stderr)
