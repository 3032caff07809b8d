"""Shows long transfers on the command line, as a bar or as lines, and handles Ctrl-C so that the same command can continue
later."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import typer

from outlast.base import backoff, units
from outlast.base.errors import Stopped
from outlast.cli import terminal

_LINE_INTERVAL_S = 5.0


Tell = Callable[..., None]
"""A callback `(done, total, files="")` for a transfer's progress in bytes. `files` describes the number of files, if known."""


@contextlib.contextmanager
def transfer(verb: str, size: int, *, quiet: bool = False) -> Iterator[tuple[Callable[[int], None], threading.Event]]:
    """Show a transfer of `size` bytes, which Ctrl-C may stop. `verb` is a word such as `received`. Yields a function that any
    thread may call with the number of bytes transferred since its last call, and the event of `interruptible`."""
    lock = threading.Lock()
    done = 0
    with interruptible() as stop, shown(verb, quiet=quiet or not size) as tell:

        def progress(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                tell(min(done, size), size)

        yield progress, stop


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets. The signal also ends a wait for a store; a second signal kills the
    process. If the block raises `Stopped`, the command prints how to continue, and exits."""
    stop = threading.Event()
    caught: list[int] = []

    def ask(number: int, _: object) -> None:
        caught.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)
        backoff.interrupt("stopped; the same command goes on from here")

    with terminal.handled(ask, signal.SIGINT, signal.SIGTERM):
        try:
            yield stop
        except Stopped:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise typer.Exit(128 + caught[0] if caught else 1) from None


@contextlib.contextmanager
def shown(verb: str, *, quiet: bool = False) -> Iterator[Tell]:
    """Yield a callback that shows progress: a bar on a terminal, otherwise a line every few seconds."""
    began = told = time.monotonic()
    first = last = -1

    def begins(done: int) -> bool:
        """Return whether another file or stage begins. The bytes that are there by then do not count for the rate."""
        nonlocal began, first, last
        another, last = last < 0 or done < last, done
        if another:
            began, first = time.monotonic(), done
        return another

    def say(done: int, total: int, files: str = "") -> None:
        nonlocal told
        begins(done)
        now = time.monotonic()
        if now - told >= _LINE_INTERVAL_S:
            told = now
            print(line(done, total, verb, now - began, files, first), file=sys.stderr, flush=True)

    if quiet:
        yield lambda *_: None
        return
    if not terminal.interactive(sys.stderr):
        yield say
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.fields[files]}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TextColumn("{task.fields[rate]}", style="progress.data.speed"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=terminal.console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, visible=False, files="", rate="")

        def draw(done: int, total: int, files: str = "") -> None:
            if begins(done):
                bar.reset(task, completed=done)
            rate = f"{units.human_bytes(bar.tasks[0].speed or 0)}/s"
            bar.update(task, total=total or None, completed=done, files=files, rate=rate, visible=True)

        yield draw


def line(done: int, total: int, verb: str, seconds: float, files: str = "", first: int = 0) -> str:
    """Format a progress line: `412/1,000 files, 412 MiB of 1.0 GiB sent, 103 MiB/s, 6.0s left`. `first` of the bytes were there
    before these seconds. A `total` of 0 is unknown."""
    rate = (done - first) / seconds if seconds else 0.0
    left = f", {units.human_seconds((total - done) / rate)} left" if rate and total else ""
    counted, of = f"{files}, " if files else "", f" of {units.human_bytes(total)}" if total else ""
    return f"{counted}{units.human_bytes(done)}{of} {verb}, {units.human_bytes(rate)}/s{left}"
