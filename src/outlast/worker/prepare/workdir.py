"""The training processes' working directory, `work/` in the job's output. It contains a copy of the code, so that scripts find
files beside themselves, and files written to relative paths are part of the output.

    work/.outlast-files         size and mtime of each code file that was copied; all other files are the job's
    work/.outlast-generation    the last generation whose rank 0 worked here
    work/.outlast-run           in pods, the run that owns these files

On one machine, all workers share the directory. In pods, each worker has its own, unless the output is a shared volume. Only rank
0's results count: an uploader pushes a directory only while rank 0 works there. See docs/decisions/0023-the-working-directory.md.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from outlast.base import file_locks, files, units
from outlast.base.errors import Missing, OutlastError, StoreError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.shipping import code_files
from outlast.job.workerfiles import guessed_progress, progress_file
from outlast.storage import runs, store
from outlast.storage.runs.output import OWN, skipped
from outlast.storage.store import Store
from outlast.storage.sync import push_and_pull
from outlast.worker.launch import os_calls

_FILES = ".outlast-files"
_RUN = ".outlast-run"
_IN_STORE = ".outlast-work"
"""Key of the object that holds the generation of the files in the store."""
_LOCK, _INDEX = f"{OWN}/working", f"{OWN}/fetched"
"""Paths in the output for a lock, and for the indices of fetches."""
_MOST = (64 << 20, 10_000)
"""Maximum size in bytes and number of files of code to copy. Larger code runs in place."""
_QUIET_S = 2.0
"""Seconds for which a file written in place must be unchanged, since it may be incomplete."""
_SMALL = 1 << 20
"""Size in bytes up to which a write takes only milliseconds."""

Listed = Mapping[str, tuple[int, int] | None]
"""Sizes and mtimes (ns) of code files, keyed by path; None for a link."""


def note_code(directory: Path, code: Listed) -> None:
    """Record that these files are code, before they are copied to `directory`. Earlier records remain."""
    files.replace(directory / _FILES, json.dumps({**listed(directory), **code}))


def forget_code(directory: Path) -> None:
    """Remove the code files, and no other files, from `directory`."""
    for name in listed(directory):
        (directory / name).unlink(missing_ok=True)
    (directory / _FILES).unlink(missing_ok=True)


def listed(directory: Path) -> dict[str, tuple[int, int] | None]:
    """Read what `note_code` has recorded. Returns an empty record if the file cannot be read."""
    return {name: tuple(stat) if stat else None for name, stat in files.mapping(directory / _FILES).items()}


def fingerprint(path: Path) -> tuple[int, int] | None:
    """Return a code file's size and mtime (ns), for `note_code`; None for a link."""
    stat = path.lstat()
    return None if path.is_symlink() else (stat.st_size, stat.st_mtime_ns)


# Results


class Results:
    """The results in a working directory, complete or not. `output` is the job's output."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._read_at = 0
        self._listed: Listed = {}
        self._sizes: dict[str, int] = {}
        self._waiting: set[str] = set()
        """Paths that this pass delays, with their directories."""

    def skipped(self, path: str) -> bool:
        """Return whether a path is in the working directory but not a result, since it is code, hidden or compiled."""
        first, _, inside = path.partition("/")
        if first != contract.WORK:
            return False
        parts = inside.split("/")
        if "__pycache__" in parts or any(part.startswith(".") for part in parts):
            return True
        self._read()
        above = ("/".join(parts[:end]) for end in range(1, len(parts)))
        if any(place in self._listed and self._listed[place] is None for place in above):
            return True  # behind a link in the code
        if inside not in self._listed:
            return False
        try:
            return fingerprint(self._output / path) == self._listed[inside]
        except OSError:
            return False

    def _read(self) -> None:
        try:
            mtime_ns = (self._output / contract.WORK / _FILES).stat().st_mtime_ns
        except OSError:
            mtime_ns = 0
        if mtime_ns != self._read_at:
            self._read_at, self._listed = mtime_ns, listed(self._output / contract.WORK)

    def expired(self, path: str) -> bool:
        """Return whether a missing result belongs to a checkpoint that the script has deleted, and a later checkpoint is in the
        store. A checkpoint that this pass delays is not in the store."""
        *above, name = path.split("/")
        numbered = [(place, step) for place, part in enumerate(above) if (step := guessed_progress.step_of(part)) is not None]
        of_file = guessed_progress.step_of_file(name)[1]
        numbered += [(len(above), of_file)] if of_file is not None else []
        if not numbered:
            return False
        place, step = numbered[0]
        parts = [*above, name]
        try:
            names = os.listdir(self._output.joinpath(*parts[:place]))
        except OSError:
            return False
        if parts[place] in names:
            return False
        whole = [name for name in names if not name.endswith(".tmp") and "/".join([*parts[:place], name]) not in self._waiting]
        steps = (
            guessed_progress.step_of_file(other)[1] if place == len(above) else guessed_progress.step_of(other) for other in whole
        )
        return any(other is not None and other > step for other in steps)

    def unfinished(self, *, last: bool = False) -> Callable[[str], bool]:
        """Begin a pass, and return a predicate for incomplete results, which must wait. If `last` is set, no result must wait.

        A file that was renamed after its last byte was written (ctime after mtime) is complete. A file written in place must be
        unchanged for a while, but a small file waits for only one pass. A checkpoint directory waits until none of its files
        changes.
        """
        last_sizes, self._sizes, self._waiting = self._sizes, {}, set()
        now = time.time()
        directories: dict[Path, bool] = {}

        def busy(path: Path) -> bool:
            if path not in directories:
                times = [entry.stat().st_mtime for entry in os.scandir(path)]
                directories[path] = bool(times) and 0 <= now - max(times) < _QUIET_S
            return directories[path]

        def changing(path: str) -> bool:
            try:
                place = self._output / path
                stat = place.stat()
                if guessed_progress.step_of(place.parent.name) is not None:
                    return busy(place.parent)
            except OSError:
                return True
            if path.partition("/")[0] != contract.WORK:
                return False
            if stat.st_ctime_ns > stat.st_mtime_ns or not 0 <= now - stat.st_mtime < _QUIET_S:
                return False
            self._sizes[path] = stat.st_size
            return path not in last_sizes or (stat.st_size > _SMALL and stat.st_size != last_sizes[path])

        def waits(path: str) -> bool:
            if waiting := not last and changing(path):
                parts = path.split("/")
                self._waiting.update("/".join(parts[:end]) for end in range(1, len(parts) + 1))
            return waiting

        return waits


# Rank 0's files


def generation(output: Path) -> int:
    """Return the last generation whose rank 0 ran in this output directory or whose files were fetched into it, or 0."""
    try:
        return int((output / contract.WORK / contract.WORKED).read_text())
    except (OSError, ValueError):
        return 0


def _in_store(place: Store) -> int:
    try:
        return int(place.get(_IN_STORE))
    except (Missing, ValueError):
        return 0


def is_rank0(output: Path, place: Store, environ: Mapping[str, str]) -> bool:
    """Return whether to upload the files here: rank 0 of this pod's generation works here, and no later generation has uploaded
    files. On one machine, all workers share the directory. Raises StoreError."""
    here = generation(output)
    if not here:
        return False
    stored = _in_store(place)
    if not environ.get(Env.RENDEZVOUS, "unix://").startswith("unix://"):  # a pod, whose directory may not be shared
        record = progress_file.read(Path(environ[Env.STATE]), 0)
        if record is None or record.generation != here or stored > here:
            return False
    if stored != here:
        place.put(_IN_STORE, str(here).encode())
    return True


# In pods


def enter(environ: dict[str, str], say: Callable[[str], None], stop: threading.Event) -> None:
    """Copy the code to `work/` in this pod's output, and set `environ` so that the script runs there. Code that is too large runs
    in place. Raises OSError and Stopped."""
    code, directory = Path(environ[Env.CODE]), Path(environ[Env.OUTPUT]) / contract.WORK
    sources = _sources(code)
    if sources is None:
        say(
            f"{code} is larger than {units.human_bytes(_MOST[0])} or {_MOST[1]:,} files, so the script runs there: files that "
            "it writes relative to the working directory are lost with this pod; write to $OUTLAST_OUTPUT"
        )
        return
    with file_locks.exclusive(directory.parent / _LOCK, waiting=lambda: None, stop=stop):
        _set_aside(directory, environ[Env.RUN])
        directory.mkdir(parents=True, exist_ok=True)
        files.replace(directory / _RUN, environ[Env.RUN])
        old = listed(directory)
        new = {name: fingerprint(path) for name, path in sources.items()}
        note_code(directory, {**new, **old})  # after a kill, copied files still count as old
        for name, path in sources.items():
            into = directory / name
            if os.path.lexists(into) and (name not in old or fingerprint(into) != old[name] or old[name] == new[name]):
                continue  # the job's own file, or already copied
            into.parent.mkdir(parents=True, exist_ok=True)
            partial = into.with_name(f".{into.name}.coming")
            shutil.copy2(path, partial, follow_symlinks=False)
            partial.replace(into)
        note_code(directory, new)
    environ[Env.CODE] = str(directory)


def _set_aside(directory: Path, run: str) -> None:
    """Move another run's files, left on a volume that outlives pods, to `previous/` in the output."""
    try:
        other = (directory / _RUN).read_text()
    except FileNotFoundError:
        return
    if other != run:
        above = directory.parent / runs.PREVIOUS / other
        above.mkdir(parents=True, exist_ok=True)
        directory.rename(next(to for n in range(1 << 30) if not (to := above / f"{contract.WORK}{'+' * n}").exists()))


def _sources(code: Path) -> dict[str, Path] | None:
    """Return the files and links in `code`, except `code_files.NEVER`, keyed by path; None if there is too much to copy."""
    sources: dict[str, Path] = {}
    size = 0
    for above, names, inside in os.walk(code):
        linked = [name for name in names if os.path.islink(os.path.join(above, name))]
        names[:] = [name for name in names if name not in code_files.NEVER and name not in linked]
        for name in [*inside, *linked]:
            path = Path(above, name)
            if path.is_symlink() or path.is_file():
                sources[str(path.relative_to(code))] = path
                size += path.lstat().st_size
        if size > _MOST[0] or len(sources) > _MOST[1]:
            return None
    return sources


def _inside(path: str) -> bool:
    return path.startswith(f"{contract.WORK}/")


def saves_itself(output: Path, place: Store) -> bool:
    """Return whether this pod's script saves by itself: it has saved since the files in the store were written, or the store has
    none. Raises StoreError."""
    try:
        return guessed_progress.newest(output / contract.WORK, place.head(_IN_STORE).modified) is not None
    except Missing:
        return True


def fetch(output: Path, place: Store, say: Callable[[str], None], stop: threading.Event, *, newer: bool = False) -> None:
    """Fetch the job's files if the store has a later generation or `newer` is set. Files outside the working directory are
    fetched only if missing. Raises StoreError and OutlastError."""
    here = generation(output)
    try:
        stored = _in_store(place)
        if stored <= here and not newer:
            return
        with file_locks.exclusive(output / _LOCK, waiting=lambda: None, stop=stop):
            count = 0
            work = push_and_pull.Options(skip=lambda path: not _inside(path), stop=stop)
            others = push_and_pull.Options(skip=lambda path: _inside(path) or skipped(path), stop=stop)
            for name, options in (("work", work), ("output", others)):
                index = output / _INDEX / name
                report = push_and_pull.pull(place, output, index, options, only_missing=options is others)
                for path, reason in report.failed:
                    raise OutlastError(f"{place.url}/{path} could not be fetched: {reason}")
                count += report.transferred
            (output / contract.WORK).mkdir(exist_ok=True)
            files.replace(output / contract.WORK / contract.WORKED, str(stored))
        if count:
            say(f"fetched {units.count(count, 'file')} that the script has written")
    except StoreError as problem:
        if not here or not problem.retry:
            raise
        say(f"continuing with the files of this machine: {problem}")


def main(argv: list[str]) -> int:
    """Fetch the job's files if the store has newer ones, or with `--newer`. A training process (`launch.script_files`) runs this
    in a child process, which dies with it. The first argument is the training process's pid."""
    os_calls.die_with(int(argv.pop(0)))
    output = Path(os.environ[Env.OUTPUT])

    def say(text: str) -> None:
        print(f"outlast | {text}", flush=True)

    try:
        place = store.open_(os.environ[Env.STORE])
        if argv == ["--newer"] or not saves_itself(output, place):
            fetch(output, place, say, threading.Event(), newer=bool(argv))
    except (OutlastError, OSError) as problem:
        say(f"continuing with the files of this pod: {problem}")
        return contract.Exit.FAILED
    return 0
