"""The working directory of training processes: `work/` in the job's output. The job's code is copied there, so a script finds
what lies beside it, and what it writes relative to it is in the output, without a second copy.

    work/.outlast-files         size and time of each file of code as it was brought there; everything else is the job's
    work/.outlast-generation    the generation whose rank 0 worked here last
    work/.outlast-run           in pods: the run whose files these are

On one machine all workers share the directory. In pods each worker has its own, unless the output is a shared volume. Results
belong to rank 0, so a pusher sends the files of a directory only while rank 0 works there. Called by `code`, `push`, the agent.
Docs: docs/decisions/0023-the-working-directory.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from outlast import contract, files, locks, runs, store, units
from outlast.contract import Env
from outlast.errors import Missing, OutlastError, StoreError
from outlast.runs.layout import OWN, skipped
from outlast.shipping import tree
from outlast.store import Store
from outlast.sync import sync
from outlast.workerfiles import progress, saves

_FILES = ".outlast-files"
_RUN = ".outlast-run"
_IN_STORE = ".outlast-work"
"""Key of the object that says which generation's files are in the store."""
_LOCK, _KNOWN = f"{OWN}/working", f"{OWN}/fetched"
"""In the output: a lock, and a directory of what fetches have found out."""
_MOST = (64 << 20, 10_000)
"""Bytes and files of code in an image that are copied; larger code runs where it lies."""
_QUIET_S = 2.0
"""A file that was written in place more recently may be unfinished."""
_SMALL = 1 << 20
"""Bytes that are written within milliseconds."""

Listed = Mapping[str, tuple[int, int] | None]
"""Size and mtime (ns) of files of code, by their path in the directory; None for a link."""


def note_code(directory: Path, brought: Listed) -> None:
    """Note which files in `directory` are code, before they are brought there. Earlier ones stay code."""
    files.replace(directory / _FILES, json.dumps({**listed(directory), **brought}))


def forget_code(directory: Path) -> None:
    """Remove the code that was brought to `directory`; what else is there stays."""
    for name in listed(directory):
        (directory / name).unlink(missing_ok=True)
    (directory / _FILES).unlink(missing_ok=True)


def listed(directory: Path) -> dict[str, tuple[int, int] | None]:
    """What `note_code` has noted, as it was brought there; empty when that cannot be read."""
    try:
        said = json.loads((directory / _FILES).read_text())
        return {name: tuple(known) if known else None for name, known in said.items()}
    except (OSError, ValueError):
        return {}


def looks(path: Path) -> tuple[int, int] | None:
    """What `note_code` is to say of a file or link of code."""
    stat = path.lstat()
    return None if path.is_symlink() else (stat.st_size, stat.st_mtime_ns)


# Results


class Results:
    """Which files of a working directory are results, and which of them are finished. `output` is the job's."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._noted = 0
        self._listed: Listed = {}
        self._sizes: dict[str, int] = {}
        """Of the files that `unfinished` held back the last time."""
        self._waiting: set[str] = set()
        """Paths that this pass holds back, and the directories they are in."""

    def skipped(self, path: str) -> bool:
        """Whether a path in the output is in the working directory and no result: code, and what is hidden or compiled."""
        first, _, inside = path.partition("/")
        if first != contract.WORK:
            return False
        parts = inside.split("/")
        if "__pycache__" in parts or any(part.startswith(".") for part in parts):
            return True
        self._read()
        above = ("/".join(parts[:end]) for end in range(1, len(parts)))
        if any(place in self._listed and self._listed[place] is None for place in above):
            return True  # behind a link of the code
        if inside not in self._listed:
            return False
        try:
            return looks(self._output / path) == self._listed[inside]
        except OSError:
            return False

    def _read(self) -> None:
        try:
            noted = (self._output / contract.WORK / _FILES).stat().st_mtime_ns
        except OSError:
            noted = 0
        if noted != self._noted:
            self._noted, self._listed = noted, listed(self._output / contract.WORK)

    def expired(self, path: str) -> bool:
        """Whether a result that is no longer here is (of) a checkpoint that the script has deleted after a later one, which is
        in the store: what this pass holds back is not."""
        *above, name = path.split("/")
        numbered = [(place, step) for place, part in enumerate(above) if (step := saves.step_of(part)) is not None]
        of_file = saves.step_of_file(name)[1]
        numbered += [(len(above), of_file)] if of_file is not None else []
        if not numbered:
            return False
        place, step = numbered[0]
        parts = [*above, name]
        try:
            there = os.listdir(self._output.joinpath(*parts[:place]))
        except OSError:
            return False
        if parts[place] in there:
            return False
        whole = [name for name in there if not name.endswith(".tmp") and "/".join([*parts[:place], name]) not in self._waiting]
        found = (saves.step_of_file(other)[1] if place == len(above) else saves.step_of(other) for other in whole)
        return any(other is not None and other > step for other in found)

    def unfinished(self, *, last: bool = False) -> Callable[[str], bool]:
        """For one pass: whether a result may be unfinished, so that it must not replace a whole one in the store. Nothing is
        in the `last` pass.

        A file that was renamed after its last byte (ctime after mtime) is whole. One that was written in place has to be quiet
        for a while; if it is small and was held back in the last pass, it goes as it is. A checkpoint's directory goes when all
        that is in it is quiet, in the rest of the output as well.
        """
        before, self._sizes, self._waiting = self._sizes, {}, set()
        now = time.time()
        directories: dict[Path, bool] = {}

        def busy(path: Path) -> bool:
            if path not in directories:
                times = [entry.stat().st_mtime for entry in os.scandir(path)]
                directories[path] = bool(times) and 0 <= now - max(times) < _QUIET_S
            return directories[path]

        def held(path: str) -> bool:
            try:
                place = self._output / path
                stat = place.stat()
                if saves.step_of(place.parent.name) is not None:
                    return busy(place.parent)
            except OSError:
                return True
            if path.partition("/")[0] != contract.WORK:
                return False
            if stat.st_ctime_ns > stat.st_mtime_ns or not 0 <= now - stat.st_mtime < _QUIET_S:
                return False
            self._sizes[path] = stat.st_size
            return path not in before or (stat.st_size > _SMALL and stat.st_size != before[path])

        def waits(path: str) -> bool:
            if waiting := not last and held(path):
                parts = path.split("/")
                self._waiting.update("/".join(parts[:end]) for end in range(1, len(parts) + 1))
            return waiting

        return waits


# Whose files count


def generation(output: Path) -> int:
    """The generation whose rank 0 worked in this output last, or whose files were fetched; 0 for none."""
    return _number(output / contract.WORK / contract.WORKED)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _in_store(place: Store) -> int:
    try:
        return int(place.get(_IN_STORE))
    except (Missing, ValueError):
        return 0


def ours(output: Path, place: Store, environ: Mapping[str, str]) -> bool:
    """Whether the files here are to be pushed: rank 0 of this pod's generation works here, and no later one has pushed. On one
    machine all workers share the directory. Raises StoreError."""
    here = generation(output)
    if not here:
        return False
    there, pod = _in_store(place), alone(environ)
    if pod:
        record = progress.read(Path(environ[Env.STATE]), 0)
        if record is None or record.generation != here or there > here:
            return False
    if there != here:
        place.put(_IN_STORE, str(here).encode())
    return True


def alone(environ: Mapping[str, str]) -> bool:
    """Whether this worker is a pod: it shares no directory with others, as far as it knows."""
    return not environ.get(Env.RENDEZVOUS, "unix://").startswith("unix://")


# In pods


def enter(environ: dict[str, str], say: Callable[[str], None], stop: threading.Event) -> None:
    """Make `work/` in the output of this pod with a copy of the code, and let the script run there. Raises OSError, Stopped."""
    code, directory = Path(environ[Env.CODE]), Path(environ[Env.OUTPUT]) / contract.WORK
    found = _found(code)
    if found is None:
        say(
            f"{code} is larger than {units.human_bytes(_MOST[0])} or {_MOST[1]:,} files, so the script runs there: what it "
            "writes relative to the working directory goes with this pod; write to $OUTLAST_OUTPUT"
        )
        return
    with locks.exclusive(directory.parent / _LOCK, waiting=lambda: None, stop=stop):
        _set_aside(directory, environ[Env.RUN])
        directory.mkdir(parents=True, exist_ok=True)
        files.replace(directory / _RUN, environ[Env.RUN])
        known = listed(directory)
        code_now = {name: looks(path) for name, path in found.items()}
        note_code(directory, {**code_now, **known})  # who is killed half-way knows old files as old ones
        for name, path in found.items():
            into = directory / name
            if os.path.lexists(into) and (name not in known or looks(into) != known[name] or known[name] == code_now[name]):
                continue  # the job's own, or there already
            into.parent.mkdir(parents=True, exist_ok=True)
            partial = into.with_name(f".{into.name}.coming")
            shutil.copy2(path, partial, follow_symlinks=False)
            partial.replace(into)
        note_code(directory, code_now)
    environ[Env.CODE] = str(directory)


def _set_aside(directory: Path, run: str) -> None:
    """Move the files of another run, on a volume that outlives pods, to `previous/` in the output."""
    try:
        other = (directory / _RUN).read_text()
    except FileNotFoundError:
        return
    if other != run:
        above = directory.parent / runs.PREVIOUS / other
        above.mkdir(parents=True, exist_ok=True)
        directory.rename(next(to for n in range(1 << 30) if not (to := above / f"{contract.WORK}{'+' * n}").exists()))


def _found(code: Path) -> dict[str, Path] | None:
    """The files and links of code by name, without what no script needs; None when that is too much to copy."""
    found: dict[str, Path] = {}
    size = 0
    for above, names, inside in os.walk(code):
        linked = [name for name in names if os.path.islink(os.path.join(above, name))]
        names[:] = [name for name in names if name not in tree.NEVER and name not in linked]
        for name in [*inside, *linked]:
            path = Path(above, name)
            if path.is_symlink() or path.is_file():
                found[str(path.relative_to(code))] = path
                size += path.lstat().st_size
        if size > _MOST[0] or len(found) > _MOST[1]:
            return None
    return found


def _inside(path: str) -> bool:
    return path.startswith(f"{contract.WORK}/")


def saves_itself(output: Path, place: Store) -> bool:
    """Whether the script has saved here, on a rank other than 0, since the files in the store were begun. Raises StoreError."""
    try:
        return saves.newest(output / contract.WORK, place.head(_IN_STORE).modified) is not None
    except Missing:
        return True


def fetch(output: Path, place: Store, say: Callable[[str], None], stop: threading.Event, *, newer: bool = False) -> None:
    """Bring the job's files to this pod when those in the store are of a later generation, or are known to be `newer`; of what
    lies in the output beside the working directory, those that are missing here. Raises StoreError, OutlastError."""
    here = generation(output)
    try:
        there = _in_store(place)
        if there <= here and not newer:
            return
        with locks.exclusive(output / _LOCK, waiting=lambda: None, stop=stop):
            known = output / _KNOWN
            reports = [
                sync.pull(place, output, known / "work", sync.Options(skip=lambda path: not _inside(path), stop=stop)),
                sync.pull(
                    place,
                    output,
                    known / "output",
                    sync.Options(skip=lambda path: _inside(path) or skipped(path), stop=stop),
                    only_missing=True,
                ),
            ]
            for path, reason in (failed for report in reports for failed in report.failed):
                raise OutlastError(f"{place.url}/{path} could not be fetched: {reason}")
            (output / contract.WORK).mkdir(exist_ok=True)
            files.replace(output / contract.WORK / contract.WORKED, str(there))
        if count := sum(report.transferred for report in reports):
            say(f"fetched {count} {'file' if count == 1 else 'files'} that the script wrote before")
    except StoreError as problem:
        if not here or not problem.retry:
            raise
        say(f"goes on with the files of this machine: {problem}")


def main(argv: list[str]) -> int:
    """Fetch for `alike`, if the files in the store are known to be newer (`--newer`) or look so; the exit code."""
    output = Path(os.environ[Env.OUTPUT])

    def say(text: str) -> None:
        print(f"outlast | {text}", flush=True)

    try:
        place = store.open_(os.environ[Env.STORE])
        if argv == ["--newer"] or not saves_itself(output, place):
            fetch(output, place, say, threading.Event(), newer=bool(argv))
    except (OutlastError, OSError) as problem:
        say(f"goes on with the files of this pod: {problem}")
        return contract.Exit.FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
