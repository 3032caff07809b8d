"""Long transfers on the command line: a bar, or a line now and then; and Ctrl-C, after which the same command goes on."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import typer

from outlast import units
from outlast.errors import Stopped

_TELL_S = 5.0
"""How often there is a line where there is no terminal."""


@contextlib.contextmanager
def transfer(verb: str, size: int, *, quiet: bool = False) -> Iterator[tuple[Callable[[int], None], threading.Event]]:
    """Show a transfer of `size` bytes, such as `received`.

    Gives what to call with the bytes moved since the last call, from any thread, and an event that Ctrl-C sets. `Stopped` ends
    the command.
    """
    stop, lock = threading.Event(), threading.Lock()
    done = 0
    with _interruptible(stop) as caught, _shown(verb, size, quiet=quiet or not size) as show:

        def progress(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                show(min(done, size))

        try:
            yield progress, stop
        except Stopped:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise typer.Exit(128 + caught[0]) from None


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
def _shown(verb: str, size: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Something to be told how many bytes have been moved."""
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        began = told = time.monotonic()

        def tell(done: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= _TELL_S:
                told = now
                print(line(done, size, verb, now - began), file=sys.stderr, flush=True)

        yield tell
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=size)
        yield lambda done: bar.update(task, completed=done)


def line(done: int, size: int, verb: str, seconds: float) -> str:
    """`412 MiB of 1.0 GiB sent, 103 MiB/s, 6.0s left`."""
    rate = done / seconds if seconds else 0.0
    left = f", {units.human_seconds((size - done) / rate)} left" if rate else ""
    return f"{units.human_bytes(done)} of {units.human_bytes(size)} {verb}, {units.human_bytes(rate)}/s{left}"
