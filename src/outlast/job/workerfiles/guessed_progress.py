"""Guesses a plain script's checkpoints and steps from file names and common log lines. Guesses are only shown: they refund no
restarts, and no file is removed because of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outlast.base import units
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.job.status import SavedStatus

_FILE = re.compile(r"(.+?)\.(?:pth\.tar|ckpt|pt|pth|pkl|npz|bin|safetensors|tar)", re.IGNORECASE)
_STEP = re.compile(r"(?<![a-z])(?:global_?)?(?:step|iter(?:ation)?)s?[-_=.]?(\d{1,15})(?![\da-z])", re.IGNORECASE)
_TRAINER = re.compile(r"checkpoint-(\d{1,15})")
"""Name of a checkpoint directory of the Hugging Face Trainer. It is not used for files, where the number may be an epoch."""
_WORD = re.compile(
    r"(?<![a-z])(?:checkpoint|ckpt|chkpt|snapshot|last|latest|resume|epoch|train(?:er|ing)?_state)(?![a-z])", re.IGNORECASE
)
_ELSEWHERE = (contract.CHECKPOINTS, contract.LOGS, contract.LEDGER, "previous", "__pycache__")
_MOST = 20_000
_DEPTH = 4


def step_of(directory: str) -> int | None:
    """Return the step in the name of a checkpoint directory: 140 for `checkpoint-140`, 500 for `global_step500`."""
    match = _TRAINER.fullmatch(directory) or (None if _FILE.fullmatch(directory) else _STEP.search(directory))
    return int(match[1]) if match else None


def step_of_file(name: str) -> tuple[bool, int | None]:
    """Return whether a file's name looks like a checkpoint, and the step in the name, if any."""
    named = _FILE.fullmatch(name)
    if not named:
        return False, None
    step = _STEP.search(named[1])
    return bool(step or name.endswith(".ckpt") or _WORD.search(named[1])), int(step[1]) if step else None


def newest(directory: Path, since: float) -> SavedStatus | None:
    """Return the newest file or directory below `directory` that looks like a checkpoint and was not written before `since`."""
    from outlast.job.status import SavedStatus

    best: SavedStatus | None = None
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
                        best = SavedStatus(name=above + name, step=step, time=written)
        except OSError:  # the entry is being removed or replaced
            continue
    return best


def sentence(saved: SavedStatus | None, now: float) -> str:
    """Describe a plain script's newest checkpoint, as guessed from its files."""
    if saved is None:
        return "no file that looks like a checkpoint is in the output; the script saves by itself"
    step = "" if saved.step is None or str(saved.step) in saved.name else f" of step {saved.step}"
    return f"newest file that looks like a checkpoint: {saved.name}{step}, {units.human_seconds(max(0.0, now - saved.time))} ago"


class Logged(NamedTuple):
    """A step in a log line."""

    step: int
    steps: int | None = None
    epoch: int | None = None
    """The epoch within which the line counts steps, or UNNAMED if the line does not name it. None if steps count over the whole
    run."""


UNNAMED = -1


def begun_anew(before: SavedStatus | None, reached: Logged, now: Logged, first: Logged | None) -> str:
    """Return a warning if a restarted script seems to train from the beginning; empty if it continues, or if this is uncertain.

    A script that starts over is at step `now` after the restart, near the run's first step, `first`, although the run had reached
    the step `reached`. `before` is the checkpoint that the script had saved.
    """
    begin = first or Logged(0, None, None if now.epoch is None else 0)
    epochs = [each.epoch for each in (begin, now, reached)]
    if UNNAMED in epochs or len({epoch is None for epoch in epochs}) > 1:
        return ""
    (beginning, at, was), fell = (epoch or 0 for epoch in epochs), now.step < reached.step
    near = fell and now.step - begin.step <= (reached.step - begin.step) / 4
    if not (at <= beginning and (at < was or (near and (now.epoch is None or first)))):
        return ""
    there = f", although {before.name} was there" if before else ""
    remedy = (
        f"have it {'' if before else 'save checkpoints and '}load the newest when it starts (a Trainer: resume_from_checkpoint)"
    )
    return f"after its restart the script began again at {_place(now)}, before it was at {_place(reached)}{there}: {remedy}"


def _place(logged: Logged) -> str:
    return f"step {logged.step}" if logged.epoch is None else f"epoch {logged.epoch}, step {logged.step}"


def alone(processes: int) -> str:
    """Return the warning that the processes train without a process group."""
    remedy = "call torch.distributed.init_process_group (Hugging Face on CPUs: use_cpu=True, Accelerate: cpu=True)"
    return f"{processes} processes train without a process group, so each trains a model of its own: {remedy}"


_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d{1,15})"
_NAMED = r"(?<![a-z_])(?:global[_ ]?)?(?:step|iter(?:ation)?)['\"]?"
_RANK = r"(?:\[rank \d+\] )?\s*"
_EPOCH = r"(?<![a-z_])epoch['\"]?\s*[:=#]?\s*\[?\s*\d{1,6}(?![\d.]*\d)"
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_NAMED}s?\s*(?:[:=#]\s*|\s)\[?\s*{_NUMBER}\s*(?:/|of)\s*{_NUMBER}(?![\d.]*\d)",
        rf"{_NAMED}\s*(?:[:=#]\s*|\s)\[?\s*{_NUMBER}()(?![\d.]*\d|[a-z/])",
        rf"(?<!epoch)(?<!epoch[\s:])(?<!epoch:\s)\[\s*{_NUMBER}\s*/\s*{_NUMBER}\s*\]",
        rf"^{_RANK}(?:(?:(?:train|step|iter)\w*|{_EPOCH}(?:/\d+)?\]?):?\s*)?\d+%\|[^|]*\|\s*{_NUMBER}/{_NUMBER}\s*\[",
        rf"^{_RANK}{_EPOCH}(?:/\d+)?\s*[━╸╺]+\s*{_NUMBER}/{_NUMBER}\s",
    )
)
"""Patterns for `Step: 120/2000`; `step 120`, `iter 120:` and `{"step": 120`; `[120/2000]`; tqdm's ` 6%|#   | 120/2000 [00:12<`;
and rich's `Epoch 2/9 ━━━━ 120/2000 0:00:12`, as Lightning draws it."""
_EMPTY = re.compile(r"\b0%\||[━╸╺]\s*0/")
_LINES = re.compile(r"[\r\n]+")
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LINE = 400
"""Maximum number of characters searched per line. Steps are near the beginning of a line."""


def step_in(line: str) -> Logged | None:
    """Parse the step in a log line, with the total and the preceding epoch if the line contains them."""
    plain = _COLOR.sub("", line[:_LINE])
    for pattern in _PATTERNS:
        if match := pattern.search(plain):
            step, total = (int(group.replace(",", "")) if group else None for group in match.groups())
            if step is not None and (total is None or 0 < total >= step):
                epoch = re.search(_EPOCH, plain[: match.start(1)], re.IGNORECASE)
                return Logged(step, total, int(re.sub(r"\D", "", epoch[0])) if epoch else None)
    return None


def last_step(text: str, before: Logged | None) -> Logged | None:
    """Return the step in the last log line that has one, or `before` if none does. A progress bar with a smaller total than
    before is skipped, because it is a different bar, such as that of an evaluation. A counter that decreases is taken to restart
    with each epoch."""
    for line in reversed(_LINES.split(text)):
        logged = step_in(line)
        if logged is None or (before and before.steps and logged.steps and logged.steps < before.steps):
            continue
        if before and logged.epoch is None:
            falls = logged.steps == before.steps and (logged.step < before.step or before.epoch == UNNAMED)
            return Logged(logged.step, logged.steps or before.steps, UNNAMED if falls else None)
        return logged
    return before


def first_step(text: str) -> Logged | None:
    """Return the step in the first log line that has one. Empty progress bars are skipped, because a resumed run also starts with
    them."""
    return next((logged for line in _LINES.split(text) if not _EMPTY.search(line) and (logged := step_in(line))), None)
