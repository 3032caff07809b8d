"""Makes output safe: text from other sources cannot control the terminal.

A control sequence in a reason, name or log line could retitle or clear the terminal, hide lines or imitate other lines. Therefore
`cli.main` calls `guard`, after which `sys.stdout` and `sys.stderr` show every control character as text, ESC as `^[` like kubectl
(CVE-2021-25743). Individual commands need no checks. Only this module writes control sequences: `log` for workers' lines, which
keep only their colours (SGR), and `console` for rich. `colours` obeys NO_COLOR and FORCE_COLOR.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from outlast.base.errors import OutlastError
from outlast.job import contract

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from outlast.job.logs import LogLine

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0 except tab and newline, DEL, C1, Unicode's line separators, and characters that change the direction of text."""
_SGR = re.compile("(\x1b\\[[0-9;:]*m)")
"""The sequences "select graphic rendition", which set colours and bold text.
https://ecma-international.org/publications-and-standards/standards/ecma-48/"""
_BACK = re.compile("\x1b\\[A|\n(?=\x1b\\[A)")
"""The cursor-up sequence, with which tqdm returns from a second bar to the first, or the newline before that sequence."""
_BAR = re.compile(r"[^|%]*\d{1,3}%\|[^|]*\|[^\]]*\]")
"""A progress bar as tqdm draws it, `Map:   6%|#   | 120/2000 [00:12<03:00, 9.9it/s]`."""
_RESET = "\x1b[0m"
_PREFIXES = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def safe(text: str) -> str:
    """Make control characters in text visible: `^[` for ESC, `\\x9b`, `\\u202e`. Tabs and newlines stay."""
    return _UNSAFE.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return f"^{chr(code + 0x40)}"
    return "^?" if code == 0x7F else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: str) -> str:
    """Make text safe for a single line or cell (see `safe`)."""
    return safe(text).replace("\n", "\\n").replace("\t", " ")


class _Guarded:
    """A stream that writes safe text. `buffer` is missing because it would bypass the check."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(safe(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError("standard output and error take text; a command's bytes go to the descriptor itself")
        return getattr(self.raw, name)


def guard() -> None:
    """Make all output of this process safe from now on. A closed one (`>&-`) swallows it."""
    release()
    for name in ("stdout", "stderr"):
        raw = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115 it stays open
        if isinstance(raw, io.TextIOWrapper):
            raw.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Guarded(raw))


def release() -> None:
    """Undo `guard`. In a pod, standard output is the worker's log, which must contain the script's output unchanged."""
    sys.stdout, sys.stderr = _raw(sys.stdout), _raw(sys.stderr)


def say(sentence: str) -> None:
    """Print a sentence from Outlast on standard error."""
    print(f"outlast | {sentence}", file=sys.stderr, flush=True)


def colours(stream: TextIO | None) -> bool:
    """Return whether to write colours to this stream: never with NO_COLOR, always with FORCE_COLOR, otherwise on a terminal that
    supports them. A variable counts if its value is not empty: https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR") or stream is None:
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (os.environ.get("TERM") != "dumb" and stream.isatty())


def interactive(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal that can redraw lines and accepts input. A command in a notebook's cell has a
    pseudo-terminal, but the notebook shows all lines and accepts no input."""
    return stream is not None and stream.isatty() and "JPY_PARENT_PID" not in os.environ


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on standard output or standard error. Rich reads NO_COLOR and FORCE_COLOR itself."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Safe(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=safe(segment.text))

    return Safe(file=_raw(sys.stderr if stderr else sys.stdout), highlight=False)


def log(lines: Iterable[LogLine], *, prefixed: bool = True) -> None:
    """Print workers' lines, each with its worker's name as a prefix."""
    out, coloured = sys.stdout, colours(sys.stdout)
    kept = not os.environ.get("NO_COLOR")
    text = "".join(
        f"{prefix(line.worker, colour=coloured) if prefixed else ''}{logged(part, colour=kept)}\n"
        for line in lines
        for part in drawn(line.text, terminal=interactive(out))
    )
    _raw(out).write(text)
    out.flush()


class Folded:
    """Filters echoes: lines that survivors of a failure print only because another rank has ended. Keeps one echo per worker,
    after the line that names the cause. A line that all workers print at a restart is shown only once."""

    def __init__(self) -> None:
        self._below: dict[int, LogLine] = {}
        self._start: str | None = None

    def take(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the lines without echoes. The first echo of each worker follows the next line from Outlast."""
        for line in lines:
            if contract.ECHO in line.text:
                self._below.setdefault(line.worker, line)
            elif line.text != self._start:
                self._start = line.text if contract.is_start_line(line.text) else self._start
                yield line
                yield from self.rest() if "outlast | " in line.text else ()

    def rest(self) -> list[LogLine]:
        """Return the echoes that have not been yielded yet."""
        below, self._below = [*self._below.values()], {}
        return below


def drawn(text: str, *, terminal: bool) -> list[str]:
    """Return the visible parts of a line that overwrites itself with carriage returns, as progress bars do. A terminal shows only
    the last drawing. Elsewhere each part is a line, except bars that are drawn over."""
    parts = [part for part in _BACK.sub("", text).split("\r") if part.strip()] or [""]
    over = [] if terminal else [part for part in parts[:-1] if not _BAR.fullmatch(part.rstrip())]
    return [*over, parts[-1]]


def logged(text: str, *, colour: bool = True) -> str:
    """Return a worker's line with its colours, which are reset at the end. Other control characters are made visible."""
    if "\x1b" not in text:
        return safe(text)
    pieces = _SGR.split(text)  # text, sequence, text, ...
    shown = "".join(safe(piece) if at % 2 == 0 else piece if colour else "" for at, piece in enumerate(pieces))
    return shown + _RESET if colour and len(pieces) > 1 and not shown.endswith(_RESET) else shown


def prefix(worker: int, *, colour: bool) -> str:
    """Return the prefix of a worker's lines, such as `worker-0 | `."""
    text = f"worker-{worker} | "
    return f"\033[{_PREFIXES[worker % len(_PREFIXES)]}m{text}{_RESET}" if colour else text


@contextlib.contextmanager
def handled(by: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Within the block, handle these signals with the function `by`."""
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def confirm(what: str) -> None:
    """Ask the user to confirm. Raises OutlastError if there is no terminal, or for any answer but yes."""
    if not interactive(sys.stdin):
        raise OutlastError(f"{what}; add --yes to confirm")
    if input(f"{safe(what)}. Type yes to go on: ").strip() != "yes":
        raise OutlastError("nothing was changed")


def _raw(stream: TextIO) -> TextIO:
    return stream.raw if isinstance(stream, _Guarded) else stream
