"""`outlast sync`: a directory and a place in a store, made alike."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import units
from outlast.cli import show
from outlast.cli.show import Output, OutputOption
from outlast.errors import NotFound, OutlastError, Stopped

if TYPE_CHECKING:
    from outlast.runtime.sync import Progress, Report

_LISTED = 20
"""How many paths of a kind are named at the end."""
_TELL_S = 5.0
"""How often there is a line where there is no terminal."""


def sync(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A directory, or the URL of a place in a store.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Likewise.")],
    delete: Annotated[bool, typer.Option("--delete", help="Delete what DST has and SRC has not.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be done.")] = False,
    check: Annotated[bool, typer.Option("--check", help="List the store, in case others wrote there.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make DST like SRC: a place in a store like a directory, or vice versa.

    Only what has changed is transferred; an unchanged tree costs one request.
    Ctrl-C stops, and the same command goes on from there. What others write in
    the store is noticed once a day, or with --check. The exit code is 1 when some
    files could not be transferred; they are named.

    \b
    Examples:
      outlast sync data s3://bucket/data
      outlast sync s3://bucket/runs/digits/logs logs
      outlast sync results gs://bucket/results --delete --dry-run
      outlast sync data s3://bucket/data -o json
    """
    from outlast import store
    from outlast.runtime import sync as engine

    pushing, directory, url = sides(source, target)
    place, state = store.open_(url), _state(pushing, directory, url)
    verb, began, stop = "sent" if pushing else "received", time.monotonic(), threading.Event()
    with _interruptible(stop) as caught, _shown(verb, quiet=dry_run or output is not Output.TABLE) as progress:
        try:
            if pushing:
                report = engine.push(
                    directory, place, state, delete=delete, check=check, dry_run=dry_run, progress=progress, stop=stop
                )
            else:
                report = engine.pull(
                    place, directory, state, delete=delete, check=check, dry_run=dry_run, progress=progress, stop=stop
                )
        except Stopped:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise typer.Exit(128 + caught[0]) from None
    if not pushing and report == engine.Report():
        raise NotFound(f"there is nothing in {place.url}; correct the URL")
    if output is Output.TABLE:
        for what, path in report.planned:
            print(f"{what}  {shown(path)}")
        print(summary(report, verb, time.monotonic() - began, dry_run=dry_run))
        _complain(report)
    else:
        show.data({**dataclasses.asdict(report), "seconds": round(time.monotonic() - began, 3)}, output)
    if report.failed:
        raise typer.Exit(1)


def sides(source: str, target: str) -> tuple[bool, Path, str]:
    """Whether the directory is the source; the directory; the URL of the other side, which may be a directory, too."""
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
    return Path(side.removeprefix("file://"))


def _state(pushing: bool, directory: Path, url: str) -> Path:
    """Where we remember what we did with these two."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{'push' if pushing else 'pull'} {os.path.realpath(directory)} {url.rstrip('/')}"
    return cache / "outlast" / "sync" / hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


def summary(report: Report, verb: str, seconds: float, *, dry_run: bool) -> str:
    """`1,000 files, 1.0 GiB sent in 4.2s (250 MiB/s), 3 unchanged, 0 deleted`."""
    files, size = f"{report.sent:,} file{'' if report.sent == 1 else 's'}", units.human_bytes(report.bytes)
    rest = f"{report.unchanged:,} unchanged, {report.deleted:,} deleted"
    failed = f", {len(report.failed):,} failed" if report.failed else ""
    if dry_run:
        return f"{files}, {size} would be {verb}, {rest}{failed}"
    rate = f" ({units.human_bytes(report.bytes / seconds)}/s)" if report.bytes and seconds else ""
    return f"{files}, {size} {verb} in {units.human_seconds(seconds)}{rate}, {rest}{failed}"


def shown(path: str) -> str:
    """A path on one line, whatever is in it."""
    return path if path.isprintable() else repr(path)


def _complain(report: Report) -> None:
    """Name what is not as it should be, on standard error."""
    _list("ignored", (f"{shown(path)}: {reason}" for path, reason in report.ignored), len(report.ignored))
    changing = "it changed all the time; the next sync sends it again"
    _list("warning", (f"{shown(path)}: {changing}" for path in report.changing), len(report.changing))
    _list("failed", (f"{shown(path)}: {reason}" for path, reason in report.failed), len(report.failed))


def _list(word: str, lines: Iterable[str], count: int) -> None:
    for _, line in zip(range(_LISTED), lines, strict=False):
        print(f"{word}: {line}", file=sys.stderr)
    if count > _LISTED:
        print(f"{word}: and {count - _LISTED:,} more (all of them with -o json)", file=sys.stderr)


@contextlib.contextmanager
def _interruptible(stop: threading.Event) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM asks to stop, the second kills; the list has the number of the first."""
    caught: list[int] = []

    def ask(number: int, _: object) -> None:
        caught.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shown(verb: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Something to be told of progress: a bar on a terminal, else a line now and then."""
    if quiet:
        yield lambda _: None
    elif not sys.stderr.isatty():
        yield _Lines(verb).tell
    else:
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.fields[files]}"),
            rich.BarColumn(),
            rich.DownloadColumn(binary_units=True),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(),
        )
        with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(verb, visible=False, files="")

            def tell(now: Progress) -> None:
                files = f"{now.files:,}/{now.files_total:,} files"
                bar.update(task, total=now.bytes_total, completed=now.bytes, files=files, visible=now.files_total > 0)

            yield tell


class _Lines:
    """Says every few seconds how far it is."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._began = self._told = time.monotonic()

    def tell(self, now: Progress) -> None:
        """Say it, if that is due."""
        moment = time.monotonic()
        if moment - self._told >= _TELL_S:
            self._told = moment
            print(line(now, self._verb, moment - self._began), file=sys.stderr, flush=True)


def line(now: Progress, verb: str, seconds: float) -> str:
    """`412 of 1,000 files, 412 MiB of 1.0 GiB sent, 103 MiB/s, 6.0s left`."""
    done, total = units.human_bytes(now.bytes), units.human_bytes(now.bytes_total)
    rate = now.bytes / seconds
    left = f", {units.human_seconds((now.bytes_total - now.bytes) / rate)} left" if rate else ""
    return f"{now.files:,} of {now.files_total:,} files, {done} of {total} {verb}, {units.human_bytes(rate)}/s{left}"
