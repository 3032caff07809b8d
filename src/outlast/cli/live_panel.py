"""The live view in a terminal: workers' lines scroll above a panel with the job's state. Imported only for terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from outlast.base import backoff, units
from outlast.cli import run_view, status_page, terminal
from outlast.job.status import JobStatus, State

if TYPE_CHECKING:
    from outlast.job.logs import LogLine

_STATES = {
    State.RUNNING: "green",
    State.RESTARTING: "yellow",
    State.INTERRUPTED: "yellow",
    State.SUCCEEDED: "green",
    State.FAILED: "red",
    State.CANCELLED: "red",
}
"""Colours of states; the other ones are cyan."""


class Terminal(run_view.Screen):
    """A screen with a panel at the bottom."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or terminal.console()
        self._live = Live(console=self._console, refresh_per_second=8, auto_refresh=False)

    def __enter__(self) -> Terminal:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Print the lines above the panel, with worker names in colour."""
        if lines:
            self._console.print(Text("\n").join(map(_line, lines)), soft_wrap=True)

    def say(self, sentence: str) -> None:
        self._console.print(Text.assemble(("outlast | ", "bold"), (sentence, "bold")), soft_wrap=True)

    def update(self, status: JobStatus) -> None:
        self._live.update(panel(status, time.time()), refresh=True)


def _line(line: LogLine) -> Text:
    (last,) = terminal.drawn(line.text, terminal=True)
    return Text.from_ansi(terminal.prefix(line.worker, colour=True) + terminal.logged(last))


def panel(status: JobStatus, now: float) -> Panel:
    """Render a job's state in a few lines."""
    colour = _STATES.get(status.state, "cyan")
    share = f" ({min(1.0, status.step / status.steps):.0%})" if status.steps else ""
    world = f"world {status_page.world(status)}", f"generation {status.generation}"
    ended = units.count(status.restarts, "restart"), units.count(status.interruptions, "interruption")
    saved = status_page.newest_checkpoint(status, now)
    facts = [
        f"checkpoint {saved}" if status.checkpoint else saved or f"no checkpoint {status_page.no_checkpoint(status)}",
        f"{units.human_seconds(status_page.lasted(status, now))} since the start",
        *([f"goodput {status_page.goodput(status)}"] if status.goodput is not None else []),
    ]
    rows = [
        (status.reason or "…", "dim"),
        (f"step {status_page.progress(status)}{share}", "bold"),
        (" · ".join((*world, *ended)), ""),
        (status_page.metrics(status) or "", ""),
        (" · ".join(facts), ""),
        (f"last failure: {status.failure.reason}" if status.failure else "", "red"),
        *((f"warning: {warning}", "yellow") for warning in status.warnings[-2:]),
    ]
    lines = [Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in rows if text]
    title = Text.assemble((status.name, "bold"), " · ", (str(status.state), f"bold {colour}"))
    return Panel(Group(*lines), title=title, title_align="left", border_style=colour, padding=(0, 1))


def page(look: Callable[[], JobStatus], *, every_s: float) -> None:
    """Show the `outlast status` page, and refresh it until the job has ended."""
    status = look()
    with Live(auto_refresh=False, console=terminal.console()) as live:

        def say(sentence: str) -> None:
            live.console.print(f"outlast | {sentence}", markup=False, soft_wrap=True)

        while True:
            live.update(Text(status_page.page(status, time.time())), refresh=True)
            if not status.state.active:
                return
            time.sleep(every_s)
            status = backoff.until_answered(look, say, every_s=every_s)
