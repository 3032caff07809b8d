"""Checkpoints and steps of plain scripts, guessed from file names and from the usual log lines.

Since they are guesses, they are only shown: they refund no restart, and nothing is removed because of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Protocol

from outlast import contract, units

_FILE = re.compile(r"(.+?)\.(?:pth\.tar|ckpt|pt|pth|pkl|npz|bin|safetensors|tar)", re.IGNORECASE)
_STEP = re.compile(r"(?<![a-z])(?:global_?)?(?:step|iter(?:ation)?)s?[-_=.]?(\d{1,15})(?![\da-z])", re.IGNORECASE)
_TRAINER = re.compile(r"checkpoint-(\d{1,15})")
"""A directory of the Hugging Face Trainer; a file of that name may have the number of its epoch."""
_WORD = re.compile(
    r"(?<![a-z])(?:checkpoint|ckpt|chkpt|snapshot|last|latest|resume|epoch|train(?:er|ing)?_state)(?![a-z])", re.IGNORECASE
)
_ELSEWHERE = (contract.CHECKPOINTS, contract.LOGS, contract.LEDGER, "previous", "__pycache__")
"""Directories in the output whose files are not the script's own."""
_MOST = 20_000
"""Limit of entries in one search."""
_DEPTH = 4


def step_of(directory: str) -> int | None:
    """The step in the name of a checkpoint's directory: 140 of `checkpoint-140`, 500 of `global_step500`."""
    found = _TRAINER.fullmatch(directory) or (None if _FILE.fullmatch(directory) else _STEP.search(directory))
    return int(found[1]) if found else None


def step_of_file(name: str) -> tuple[bool, int | None]:
    """Whether a file's name looks like that of a checkpoint, and the step in it, if any."""
    named = _FILE.fullmatch(name)
    if not named:
        return False, None
    step = _STEP.search(named[1])
    return bool(step or name.endswith(".ckpt") or _WORD.search(named[1])), int(step[1]) if step else None


class SaveLike(Protocol):
    """A `Save`, or what a status document has of one."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def time(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Save:
    """A file or directory that looks like a checkpoint."""

    name: str
    """Its path below the directory that was searched."""
    step: int | None
    time: float
    """Time of the last write, seconds since the epoch."""


def newest(directory: Path, since: float) -> Save | None:
    """The newest of the files and directories below `directory` that look like a checkpoint and were written after `since`."""
    best: Save | None = None
    seen = 0
    waiting = [(str(directory), "", 0)]
    while waiting and seen < _MOST:
        place, above, depth = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    seen += 1
                    name = entry.name
                    if name.startswith(".") or name.endswith(".tmp") or (depth == 0 and name in _ELSEWHERE):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        step = step_of(name)
                        if step is None:
                            if depth < _DEPTH and name != "__pycache__":
                                waiting.append((entry.path, f"{above}{name}/", depth + 1))
                            continue
                        written = max((one.stat().st_mtime for one in os.scandir(entry.path)), default=0.0)
                    else:
                        looks, step = step_of_file(name)
                        if not looks:
                            continue
                        written = entry.stat().st_mtime
                    if written >= since and (best is None or (written, step or 0) > (best.time, best.step or 0)):
                        best = Save(above + name, step, written)
        except OSError:  # it is being removed, or replaced
            continue
    return best


def sentence(saved: SaveLike | None, now: float) -> str:
    """A sentence on a plain script's checkpoints, of which only files are known."""
    if saved is None:
        return "no file that looks like a checkpoint is in the output; the script saves by itself"
    step = "" if saved.step is None or str(saved.step) in saved.name else f" of step {saved.step}"
    return f"newest file that looks like a checkpoint: {saved.name}{step}, {units.human_seconds(max(0.0, now - saved.time))} ago"


def begun_anew(before: SaveLike | None, step: int, steps: int | None, told: str) -> str:
    """A warning that a restarted script is at a step before that of its checkpoint. Empty if it is not, or may not be: the lines
    of a log may count the steps of an epoch, or of an evaluation."""
    if before is None or before.step is None or not 0 < step < before.step or (told == "log" and (steps or 0) < before.step):
        return ""
    remedy = "have it load its newest checkpoint when it starts (a Trainer: resume_from_checkpoint)"
    return f"after its restart the script was at step {step}, although {before.name} was there: {remedy}"


_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d{1,15})"
_NAMED = r"(?<![a-z_])(?:global[_ ]?)?(?:step|iter(?:ation)?)['\"]?"
_SAID = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_NAMED}s?\s*(?:[:=#]\s*|\s)\[?\s*{_NUMBER}\s*(?:/|of)\s*{_NUMBER}(?![\d.]*\d)",
        rf"{_NAMED}\s*(?:[:=#]\s*|\s)\[?\s*{_NUMBER}()(?![\d.]*\d|[a-z/])",
        rf"(?<!epoch)(?<!epoch[\s:])(?<!epoch:\s)\[\s*{_NUMBER}\s*/\s*{_NUMBER}\s*\]",
        rf"^(?:\[rank \d+\] )?\s*(?:(?:train|step|iter)\w*:?\s*)?\d+%\|[^|]*\|\s*{_NUMBER}/{_NUMBER}\s*\[",
    )
)
"""`Step: 120/2000`; `step 120`, `iter 120:`, `{"step": 120`; `[120/2000]`; tqdm's ` 6%|#   | 120/2000 [00:12<`."""
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LINE = 400
"""Characters of a line that are searched; steps are near its beginning."""


def step_in(line: str) -> tuple[int, int | None] | None:
    """The step in a line of a log, and the total if it is there."""
    plain = _COLOR.sub("", line[:_LINE])
    for pattern in _SAID:
        if found := pattern.search(plain):
            step, total = (int(group.replace(",", "")) if group else None for group in found.groups())
            if step is not None and (total is None or 0 < total >= step):
                return step, total
    return None


def last_step(text: str, before: tuple[int, int | None] | None) -> tuple[int, int | None] | None:
    """Step and total in the last line of a log that has a step; `before` if none has. A progress bar with a smaller total than
    before is another one, such as an evaluation's."""
    for line in reversed(re.split(r"[\r\n]+", text)):
        said = step_in(line)
        if said and not (before and before[1] and said[1] and said[1] < before[1]):
            return said[0], said[1] or (before[1] if before else None)
    return before
