"""The cache for compiled code: one directory for all jobs with the same `output`, shared between machines through the store.

    cache = Cache.of(environ)           # <output>/.compiled; with a store, also a directory in this machine's cache
    cache.fetch(stop)                   # before training
    environ |= cache.variables(environ)
    cache.push(stop, before=...)        # during training, by the upload process

Compilers name an entry after all its dependencies, so equal names mean equal contents, and any number of jobs may use the cache.
The compiler writes an entry's marker last, so each directory's newest file is sent and fetched after all others. Recently changed
files, and incomplete libraries left by a killed linker, are not sent. See decision 0031.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import posixpath
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base import file_locks, units
from outlast.base.errors import OutlastError, Stopped, StoreError
from outlast.job.contract import Env
from outlast.job.spec import substitution
from outlast.worker.prepare import data_cache
from outlast.worker.prepare.installers import Shell

if TYPE_CHECKING:
    from outlast.storage.store import Store
    from outlast.worker.prepare.fetch_from_store import Say

NAME = ".compiled"
"""Name of the cache's directory. It is beside the jobs' directories in `output`."""
VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # torch.compile
    "TRITON_CACHE_DIR": "triton",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "neff",  # TorchNeuron
    "NEURON_COMPILE_CACHE_URL": "neuron",  # neuronx-cc, on XLA
}
SETTLED_S = 30.0
"""Seconds after which an unchanged file counts as complete. Arbitrary."""
KILLED_S = 2.0
"""Like SETTLED_S, but after training or the warm-up, when only compilers that were just killed leave newer files. Arbitrary."""
_SHARE = 0.5
"""Share of the free disk space that a fetch may fill. The rest is for data and checkpoints. Arbitrary."""
_PASSED = (Env.DATA, Env.MODELS, Env.CACHE)
"""Outlast's variables that are passed on to the warm-up."""


@dataclass(frozen=True)
class Cache:
    """The directory for compiled code, and the directory's place in the store if the output is in a store."""

    directory: Path
    place: Store | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Cache:
        """Return the cache of the job whose agent has this environment. Raises OutlastError if the cache is not writable."""
        if not environ.get(Env.STORE):
            return cls(Path(environ[Env.OUTPUT]).absolute().parent / NAME)
        from outlast.storage import store

        url = f"{environ[Env.STORE].rstrip('/').rpartition('/')[0]}/{NAME}"
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        return cls(data_cache.writable(environ) / "compiled" / digest, store.open_(url))

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that point compilers to the cache, except those that are already set."""
        return {name: str(self.directory / below) for name, below in VARIABLES.items() if name not in environ}

    def fetch(self, stop: threading.Event) -> int:
        """Fetch missing files, and return their number. Raises StoreError, Stopped and OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.place is None:
            return 0
        from outlast.storage.sync import index, transfer

        entries = {entry.key: entry for entry in self.place.entries() if not index.unsafe(entry.key)}
        missing = {key: entry for key, entry in entries.items() if not (self.directory / key).exists()}
        size, free = sum(entry.size for entry in missing.values()), shutil.disk_usage(self.directory).free
        if size > free * _SHARE:
            room = f"of {units.human_bytes(free)} that are free in {self.directory}"
            raise StoreError(
                f"{self.place.url} has {units.human_bytes(size)} to fetch, more than half {room}; remove files there"
            )
        for wave in waves({key: entry.modified for key, entry in missing.items()}):
            downloads = [(key, missing[key].size, self.directory / key) for key in wave]
            for _, _, path in downloads:
                path.parent.mkdir(parents=True, exist_ok=True)
            transfer.receive(self.place, downloads, stop=stop)
        return len(missing)

    def push(self, stop: threading.Event, *, before: float = math.inf) -> int:
        """Upload the files that the store lacks, if unchanged since `before`, and return their number. Raises as `fetch` does."""
        if self.place is None or not self.directory.is_dir():
            return 0
        from outlast.storage.sync import transfer

        with file_locks.exclusive(self.directory / ".push.lock", waiting=lambda: None, stop=stop):
            files = {key: at for key, at in self._files() if at <= before}
            stored = {entry.key for entry in self.place.entries()} if files else set()
            missing = {key: at for key, at in files.items() if key not in stored}
            for wave in waves(missing):
                journals = self.directory / ".journals"
                transfer.send(self.place, [(self.directory / key, key) for key in wave], journals=journals, stop=stop)
        return len(missing)

    def mend(self) -> None:
        """Remove incomplete libraries that killed linkers have left behind, since torch would load them."""
        for path in self.directory.rglob("*.so"):
            with contextlib.suppress(FileNotFoundError):
                if not _linked(path) and path.stat().st_mtime <= time.time() - KILLED_S:
                    path.unlink()

    def _files(self) -> Iterator[tuple[str, float]]:
        """Yield the keys and mtimes of complete files, except the compilers' locks and temporary files."""
        for above, directories, names in os.walk(self.directory):
            directories[:] = [name for name in directories if not name.startswith((".", "tmp.")) and name != "locks"]
            for name in names:
                path = Path(above, name)
                if not (name.startswith(".") or name.endswith((".lock", ".tmp")) or path.is_symlink()):
                    with contextlib.suppress(FileNotFoundError):  # a compiler has renamed or removed it
                        if _linked(path):
                            yield path.relative_to(self.directory).as_posix(), path.stat().st_mtime


def _linked(path: Path) -> bool:
    """Return False for an incomplete library: GNU's linker, which inductor uses, writes the first bytes last."""
    if path.suffix != ".so":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def waves(times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Split keys into two waves: the second contains each directory's newest file, and the first all others."""
    newest = {posixpath.dirname(key): key for key in sorted(times, key=lambda key: (times[key], key))}
    last = set(newest.values())
    return [key for key in times if key not in last], sorted(last)


def prepare(cache: Cache, warm_up: Sequence[str], environ: dict[str, str], python: str, say: Say, stop: threading.Event) -> None:
    """Fetch the cache, add its variables to `environ`, and run the `warm_up` command once per run. If the store fails, training
    starts without the cache. Raises Stopped, and OutlastError if the command fails or the directory is not writable."""
    try:
        cache.directory.mkdir(parents=True, exist_ok=True)
        cache.mend()
        if not os.access(cache.directory, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as problem:  # compilers would fail there
        raise OutlastError(
            f"compile.cache: {cache.directory} cannot be written to: {problem.strerror}; name another output, or leave it out"
        ) from problem
    try:
        count = cache.fetch(stop)
    except Stopped:
        raise
    except (StoreError, OSError) as problem:
        say(f"compiled code could not be fetched, and may be compiled again: {problem}")
    else:
        if count:
            say(f"fetched {count} compiled files")
    environ.update(cache.variables(environ))
    if warm_up:
        _run_once(cache, warm_up, environ, python, say, stop)


def _run_once(
    cache: Cache, command: Sequence[str], environ: dict[str, str], python: str, say: Say, stop: threading.Event
) -> None:
    """Run the warm-up unless its marker exists. The first worker on a machine runs it while the others wait."""
    digest = hashlib.sha256(json.dumps([environ[Env.RUN], *command]).encode()).hexdigest()[:16]
    marker = cache.directory / "warm-up" / digest
    waiting = partial(say, "waiting for another worker on this machine, which runs compile.warmUp")
    with file_locks.exclusive(cache.directory / ".warm-up.lock", waiting=waiting, stop=stop) as lock:
        if marker.exists():
            return
        _run(command, environ, python, lock, say, stop)
        ended = time.time()
        if cache.place and stop.wait(KILLED_S):  # other jobs may be compiling to the same directory
            raise Stopped("this worker was told to leave after compile.warmUp")
        try:
            cache.push(stop, before=ended)
            marker.parent.mkdir(exist_ok=True)
            marker.touch()
            if cache.place:
                cache.place.put(marker.relative_to(cache.directory).as_posix(), b"")
        except Stopped:
            raise
        except (StoreError, OSError) as problem:
            say(f"the code compiled by compile.warmUp is not in the store yet: {problem}")


def _run(command: Sequence[str], environ: Mapping[str, str], python: str, lock: int, say: Say, stop: threading.Event) -> None:
    state = Path(environ[Env.STATE])
    output = state / "warm-up"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    own = {name: value for name, value in environ.items() if not name.startswith("OUTLAST_") or name in _PASSED}
    path = f"{Path(python).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    argv = [substitution.replaced(arg, {**environ, Env.OUTPUT: str(output)}) for arg in command]
    shell = Shell(
        {**own, Env.OUTPUT: str(output), "PATH": path}, lock, say, stop, state / "warm-up.log", Path(environ[Env.CODE]),
        "correct compile.warmUp, or leave it out: then training compiles",
    )  # fmt: skip
    program = shutil.which(argv[0], path=path)
    if program is None:
        raise OutlastError(
            f"compile.warmUp: there is no {command[0]} on PATH; install it, or leave it out: then training compiles"
        )
    began = time.monotonic()
    say(f"compile.warmUp: {' '.join(command)}")  # without replacements, since values may be secrets
    try:
        shell.run([program, *argv[1:]], "compile.warmUp")
    finally:
        shutil.rmtree(output, ignore_errors=True)
    say(f"compile.warmUp took {time.monotonic() - began:.0f} s")
