"""What users should know about a run that is resumed: where it goes on, and what has changed in its job since.

A run is over when it has succeeded, unless its job then asks for more steps or epochs (`longer`). One that failed or was
cancelled goes on from its newest checkpoint when its job is run again, like one that was interrupted.
Docs: docs/decisions/0021-a-run-goes-on.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast import checkpoints, contract, spec, units
from outlast.checkpoints import register
from outlast.errors import OutlastError
from outlast.runs import Run
from outlast.shipping import tree
from outlast.status import JobStatus, SavedStatus, State
from outlast.store import Store
from outlast.workerfiles import saves

_LEFT = {
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELLED: "was cancelled",
    State.INTERRUPTED: "was interrupted",
    State.SUSPENDED: "was suspended",
}
_HERE = ("code", "data", "env", "environment")
"""Fields that name files of a machine, or that are not kept in the output."""
_OF_A_SHELL = re.compile(
    r"(_|PWD|OLDPWD|SHLVL|SHELL|TERM|TERM_.*|COLORTERM|COLUMNS|LINES|LS_COLORS|PS\d|PROMPT.*|HIST.*|MAIL|DISPLAY|WINDOWID|STY|EDITOR"
    r"|VISUAL|PAGER|LESS.*|NO_COLOR|FORCE_COLOR|INVOCATION_ID|JOURNAL_STREAM"
    r"|(SSH|TMUX|XDG|DBUS|GPG|VSCODE|ITERM|KITTY|WT|LC_TERMINAL|GNOME|VTE|OUTLAST)_.*|TMUX)$"
)
"""Variables that differ between shells and that no training reads, and ours."""
_SECRET = re.compile(r"(-[\w-]*(?:token|key|secret|passw|credential)[\w-]*(?:=|\s))\S+", re.IGNORECASE)
"""Arguments that may be secrets, as in `manifests.labels`."""
_LENGTH = re.compile(r"(?:^|[\W_])(?:steps|iters|iterations|epochs)$", re.IGNORECASE)
"""Options that say how long to train, such as `--max_iters`."""
_LONGEST = 60
"""Characters of a value that a sentence shows."""


@dataclasses.dataclass(frozen=True)
class GoesOn:
    """A run that is resumed."""

    state: State
    """Its last state."""
    step: int
    """Step of its newest checkpoint; 0 when it has none."""
    ago_s: float | None = None
    """Seconds since it ended; None when that is unknown."""
    where: str = ""
    """The URL of its output, if it comes from a store; empty if this machine had it."""
    saved: SavedStatus | None = None
    """What a plain script has saved, judged by file names."""

    @property
    def short(self) -> str:
        """`goes on from step 10`."""
        return f"goes on from step {self.step}" if self.step else f"goes on; {self._saved}"

    @property
    def _saved(self) -> str:
        return saves.sentence(self.saved, time.time()) if self.saved else "there is no checkpoint"

    @property
    def sentence(self) -> str:
        """`goes on from step 10 of the run that failed 3m00s ago; --fresh starts anew`."""
        ago = f" {units.human_seconds(self.ago_s)} ago" if self.ago_s is not None else ""
        there = f" in {self.where}" if self.where else ""
        run = f"the run{there} that {_LEFT.get(self.state, 'was stopped')}{ago}"
        if self.step:
            return f"goes on from step {self.step} of {run}; --fresh starts anew"
        if self.saved:
            return f"goes on with {run}; {self._saved}; --fresh starts anew"
        return f"goes on with {run}; it has no checkpoint, and keeps the files that it wrote; --fresh starts anew"


def find(output: Path, run: str, place: Store | None, status: JobStatus | None, elsewhere: Run | None = None) -> GoesOn:
    """How a run ended, here (`status`) or `elsewhere`, and where it goes on: the newest checkpoint here or in the store."""
    here = checkpoints.latest(checkpoints.list_(output / contract.CHECKPOINTS), run)
    there = register.read(place, run) if place else None
    step = max(here.step if here else 0, there.step if there else 0)
    began = status or elsewhere
    saved = saves.newest(output, began.submitted) if began and not step else None
    if status is None:
        return GoesOn(State(elsewhere.state if elsewhere else State.PENDING), step, where=place.url if place else "", saved=saved)
    ago_s = max(0.0, time.time() - status.finished) if status.finished else None
    return GoesOn(status.state, step, ago_s, saved=saved)


def since(old: Path, job: spec.Job, files: Sequence[str], kept: str, output: str) -> Iterator[str]:
    """What has changed in a job since its run was last submitted with the job file `old`.

    These `files` of the code are different. The output stays in `kept`, even if the job names another `output` now; `kept` is
    empty if the run was on another machine, with other directories.
    """
    if kept and files:
        yield f"changed since: {tree.some(files)}"
    with contextlib.suppress(OSError, OutlastError):  # of another version, or it could not be kept
        yield from changes(spec.load(old), job, but=("output",) if kept else ("output", *_HERE))
    if kept and output != kept:
        yield f"output: the run stays where its checkpoints are, in {kept}; --fresh starts anew in {output}"


def changes(old: spec.Job, new: spec.Job, but: Collection[str] = ()) -> Iterator[str]:
    """A sentence for each changed field of `spec`, except fields that begin with one of `but`.

    Values of `env` are not shown, since they may be secret.
    """
    before, after = (dict(_flat(job.spec.model_dump(mode="json", by_alias=True))) for job in (old, new))
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        if was == now or path[0] in but:
            continue
        said = ".".join(path)
        if path[0] != "env":
            said += f": {_changed(was, now)}"
        yield f"changed since: {said}"


def longer(old: spec.Job, new: spec.Job, step: int) -> bool:
    """Whether a job differs from the one before in nothing but asking for more steps or epochs. `step` is that of its newest
    checkpoint: an option that is new, such as `--max-iters 5000`, asks for more if it is above that."""
    if [*changes(old, new, but=("args", "output", "environment"))]:
        return False
    was, now = (_options(job.spec.args) for job in (old, new))
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    least = {name: was.get(name, str(step) if not name.endswith("epochs") else "") for name in changed}
    pairs = [(least[name], now.get(name, "")) for name in changed if _LENGTH.search(name)]
    return 0 < len(changed) == len(pairs) and all(a.isdecimal() and b.isdecimal() and int(a) < int(b) for a, b in pairs)


def _options(args: Sequence[Any]) -> dict[str, str]:
    """Values by the names of their options; a word that has none by its place."""
    found, name = {}, ""
    for n, word in enumerate(map(str, args)):
        if word.startswith("-"):
            name, equals, found[name] = word.partition("=")
            name = "" if equals else name
        else:
            found[name or str(n)], name = word, ""
    return found


def marks(environ: Mapping[str, str], run: str) -> dict[str, str]:
    """16 bits of a hash of each variable of a shell: enough to notice another value, too few to reveal a secret."""
    names = (name for name in environ if not _OF_A_SHELL.match(name))
    return {name: hashlib.sha256(f"{run} {name}={environ[name]}".encode(errors="replace")).hexdigest()[:4] for name in names}


def shell(was: Mapping[str, str], now: Mapping[str, str], env: Collection[str]) -> Iterator[str]:
    """What the training no longer inherits from its shell, by the `marks` of both shells; `env` are the job's own variables."""
    gone = sorted(name for name in was if name not in now and name not in env)
    other = sorted(name for name in was if name in now and now[name] != was[name] and name not in env)
    said = [f"no longer has {tree.some(gone)}"] if gone else []
    said += [f"has another {tree.some(other)}"] if other else []
    if said:
        yield f"this shell {' and '.join(said)}, which the training inherits; name what it needs under env in the job file"


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, (*path, key))
    elif value is not None and value != []:
        yield path, value


def _changed(was: Any, now: Any) -> str:
    if not (isinstance(was, list) or isinstance(now, list)):
        return f"{_text(was)} → {_text(now)}"
    was, now = was or [], now or []
    parts = difflib.SequenceMatcher(None, [*map(str, was)], [*map(str, now)], autojunk=False).get_opcodes()
    return ", ".join(
        f"{_words(_named(was, a, b))} → {_words(_named(now, c, d))}" for kind, a, b, c, d in parts if kind != "equal"
    )


def _named(words: Sequence[Any], start: int, end: int) -> Sequence[Any]:
    """These words, with the option before them if the first is its value."""
    value = 0 < start < end and not str(words[start]).startswith("-") and str(words[start - 1]).startswith("-")
    return words[start - value : end]


def _words(words: Sequence[Any]) -> str:
    return _short(_SECRET.sub(r"\1…", " ".join(map(_text, words)))) if words else "nothing"


def _text(value: Any) -> str:
    return "nothing" if value is None else _short(value if isinstance(value, str) else json.dumps(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
