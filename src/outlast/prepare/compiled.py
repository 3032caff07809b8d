"""What compilers have made: one directory for those of a job, which jobs of one output share through its store.

    cache = Cache.of(environ)           # <output>/.compiled; with a store, a directory of this machine's cache and that place
    cache.fetch(stop)                   # before training
    environ |= cache.variables(environ)
    cache.push(stop, before=...)        # beside training, by the upload process

Compilers name an entry after everything that it depends on, so the same name means the same content. That makes this simple: what
is there is never overwritten or deleted, on either side, so any number of jobs may use it and a kill costs at most a repetition.
An entry may have several files, of which the compiler writes a marker last: of each directory the newest file is sent, and
fetched, after all others. Only files that have not changed for a while are sent. Decision 0031.
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
from pathlib import Path
from typing import TYPE_CHECKING

from outlast import file_locks
from outlast.contract import Env
from outlast.errors import OutlastError, Stopped, StoreError
from outlast.prepare import cache as machine
from outlast.prepare.installers import Shell

if TYPE_CHECKING:
    from outlast.prepare.fetch import Say
    from outlast.store import Store

NAME = ".compiled"
"""Directory below an output, beside its jobs."""
VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # torch.compile
    "TRITON_CACHE_DIR": "triton",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "neff",  # TorchNeuron
    "NEURON_COMPILE_CACHE_URL": "neuron",  # neuronx-cc, on XLA
}
"""Directories of compilers, by the variable that names them."""
SETTLED_S = 30.0
"""A file that has not changed for so long is taken for complete. Arbitrary."""
KILLED_S = 2.0
"""The same when training has ended: what a compiler was writing as it was killed is younger. Arbitrary."""
_KEPT = (Env.DATA, Env.MODELS, Env.CACHE)
"""Our variables that the warm-up gets."""


@dataclass(frozen=True)
class Cache:
    """The directory, and its place in a store if the output is in one."""

    directory: Path
    place: Store | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Cache:
        """The cache of the job whose agent has this environment. Raises OutlastError when there is no room for it to be."""
        if not environ.get(Env.STORE):
            return cls(Path(environ[Env.OUTPUT]).absolute().parent / NAME)
        from outlast import store

        url = f"{environ[Env.STORE].rstrip('/').rpartition('/')[0]}/{NAME}"
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        return cls(machine.writable(environ) / "compiled" / digest, store.open_(url))

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables that make compilers use it; those that are set already stay as they are."""
        return {name: str(self.directory / below) for name, below in VARIABLES.items() if name not in environ}

    def fetch(self, stop: threading.Event) -> int:
        """Fetch the files that are missing here; returns how many. Raises StoreError, Stopped, OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.place is None:
            return 0
        from outlast.sync import index, transfer

        entries = {entry.key: entry for entry in self.place.entries() if not index.unsafe(entry.key)}
        missing = {key: entry for key, entry in entries.items() if not (self.directory / key).exists()}
        for wave in waves({key: entry.modified for key, entry in missing.items()}):
            wanted = [(key, missing[key].size, self.directory / key) for key in wave]
            for _, _, path in wanted:
                path.parent.mkdir(parents=True, exist_ok=True)
            transfer.receive(self.place, wanted, stop=stop)
        return len(missing)

    def push(self, stop: threading.Event, *, before: float = math.inf) -> int:
        """Send the files that the store lacks and that last changed before a time (seconds since the epoch); returns how many.

        Raises StoreError, Stopped, OSError.
        """
        if self.place is None or not self.directory.is_dir():
            return 0
        from outlast.sync import transfer

        with self.locked(".push.lock", stop):
            files = {key: at for key, at in self._files() if at <= before}
            there = {entry.key for entry in self.place.entries()} if files else set()
            missing = {key: at for key, at in files.items() if key not in there}
            for wave in waves(missing):
                journals = self.directory / ".journals"
                transfer.send(self.place, [(self.directory / key, key) for key in wave], journals=journals, stop=stop)
        return len(missing)

    @contextlib.contextmanager
    def locked(self, name: str, stop: threading.Event) -> Iterator[int]:
        """Hold a lock among the workers of this machine; its descriptor. Raises Stopped."""
        with open(self.directory / name, "a") as lock:
            while not file_locks.acquire(lock.fileno()):
                if stop.wait(0.1):
                    raise Stopped(f"we were told to leave while another worker holds {lock.name}")
            yield lock.fileno()

    def _files(self) -> Iterator[tuple[str, float]]:
        """Keys of the files that are no compiler's own business (locks, unfinished files), and when they last changed."""
        for above, directories, names in os.walk(self.directory):
            directories[:] = [name for name in directories if not name.startswith(".") and name != "locks"]
            for name in names:
                path = Path(above, name)
                if not (name.startswith(".") or name.endswith((".lock", ".tmp")) or path.is_symlink()):
                    try:
                        yield path.relative_to(self.directory).as_posix(), path.stat().st_mtime
                    except FileNotFoundError:  # a compiler renamed or removed it
                        continue


def waves(times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Keys by when they may be written: first all but the newest of each directory, then those."""
    newest = {posixpath.dirname(key): key for key in sorted(times, key=lambda key: (times[key], key))}
    last = set(newest.values())
    return [key for key in times if key not in last], sorted(last)


def prepare(cache: Cache, warm_up: Sequence[str], environ: dict[str, str], python: str, say: Say, stop: threading.Event) -> None:
    """Fetch the cache, add its variables to `environ`, and run the command `warm_up` if it has not run in this run.

    A store that fails is no reason not to train. Raises OutlastError when the command fails, Stopped soon after `stop` is set.
    """
    try:
        count = cache.fetch(stop)
    except Stopped:
        raise
    except (StoreError, OSError) as problem:
        say(f"what was compiled before is not fetched, and may be compiled again: {problem}")
    else:
        if count:
            say(f"fetched {count} files that were compiled before")
    environ.update(cache.variables(environ))
    if warm_up:
        _once(cache, warm_up, environ, python, say, stop)


def _once(cache: Cache, command: Sequence[str], environ: dict[str, str], python: str, say: Say, stop: threading.Event) -> None:
    """Run the warm-up, unless its marker is there. Workers of one machine wait for the first."""
    digest = hashlib.sha256(json.dumps([environ[Env.RUN], *command]).encode()).hexdigest()[:16]
    marker = cache.directory / "warm-up" / digest
    with cache.locked(".warm-up.lock", stop) as lock:
        if marker.exists():
            return
        _run(command, environ, python, lock, say, stop)
        try:
            cache.push(stop)
            marker.parent.mkdir(exist_ok=True)
            marker.touch()
            cache.push(stop)
        except Stopped:
            raise
        except (StoreError, OSError) as problem:
            say(f"what compile.warmUp compiled is not in the store yet: {problem}")


def _run(command: Sequence[str], environ: Mapping[str, str], python: str, lock: int, say: Say, stop: threading.Event) -> None:
    """Run the command in the directory of the code, with an output of its own that is thrown away."""
    state = Path(environ[Env.STATE])
    output = state / "warm-up"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    own = {name: value for name, value in environ.items() if not name.startswith("OUTLAST_") or name in _KEPT}
    path = f"{Path(python).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    shell = Shell(
        {**own, Env.OUTPUT: str(output), "PATH": path}, lock, say, stop, state / "warm-up.log", Path(environ[Env.CODE]),
        "correct compile.warmUp, or leave it out: then training compiles",
    )  # fmt: skip
    program = shutil.which(command[0], path=path)
    if program is None:
        raise OutlastError(
            f"compile.warmUp: there is no {command[0]} on PATH; install it, or leave it out: then training compiles"
        )
    began = time.monotonic()
    say(f"compile.warmUp: {' '.join(command)}")
    try:
        shell.run([program, *command[1:]], "compile.warmUp")
    finally:
        shutil.rmtree(output, ignore_errors=True)
    say(f"compile.warmUp took {time.monotonic() - began:.0f} s")
