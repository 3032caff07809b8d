"""Preloads a script's imports in the warm process, so that a restart need not repeat them: `import transformers` takes seconds.

Once it trains, a rank reports its modules to the warm process. A fork of that process tries to import those of installed
packages, once for all workers on a machine. A package is left to the script if it starts threads or processes, opens devices or
connections, writes files, draws random numbers, crashes, or reads environment variables that are not the same in the rank. The
warm process imports all other packages while it is idle. See docs/decisions/0042-starting.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import resource
import selectors
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.base import file_locks, files
from outlast.job import accelerators, contract

SETTLED_S = 5.0
"""A rank that has imported nothing for this many seconds counts as training. Arbitrary."""
stepped = threading.Event()
"""Set once this process has completed a training step, if it is a rank with a session."""
LEAST = 20
TRIALS = 5
"""Maximum number of trials, each without the package that failed in the previous trial."""
TRIAL_S = 120
_NEVER = {
    *("mpi4py", "horovod", "deepspeed", "jax", "jaxlib", "tensorflow", "cupy"),
    *(accelerator.package.partition(".")[0] for accelerator in accelerators.TABLE if accelerator.package),
}
"""Packages whose import acquires a device or starts other processes."""
_SIDE_EFFECTS = {
    *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "os.putenv", "os.unsetenv", "os.chdir", "tempfile.mkdtemp", "tempfile.mkstemp"),
}
"""Audit events that count as side effects. https://docs.python.org/3/library/audit_events.html"""
_PER_RANK = re.compile(r"(LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|OUTLAST_)\w*|RANK|WORLD_SIZE")
"""Environment variables that differ between ranks or worlds."""
_SEARCHES = {"fsspec.config"}
"""Modules that copy the whole environment, but use only their own variables. transformers imports fsspec."""
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""Variable that torch itself sets on first use, always to the same value."""
_SAFE_THREAD = "jemalloc_bg_thd"
"""Name of a thread that pyarrow (for datasets) starts when imported. jemalloc stops it around a fork."""
_SINGLE_THREAD = ("OPENBLAS_NUM_THREADS", "1")
"""Variable that keeps scipy's OpenBLAS from starting threads in trials."""


@dataclass(frozen=True)
class Imported:
    """A rank's report: its environment, and the files of the modules that it imported itself, in order."""

    modules: Mapping[str, str]
    environ: Mapping[str, str]


def dumps(preloaded: Collection[str]) -> bytes:
    """Return this process's `Imported` as JSON, without the `preloaded` modules."""
    modules = {}
    for name, module in list(sys.modules.items()):
        if name not in preloaded:
            spec = getattr(module, "__dict__", {}).get("__spec__")  # attribute access on a lazy module triggers imports
            origin = getattr(spec, "origin", None)
            if isinstance(origin, str):
                modules[name] = origin
    return json.dumps({"modules": modules, "environ": dict(os.environ)}).encode()


def loads(data: bytes) -> Imported | None:
    """Parse the output of `dumps`. Returns None if the rank ended before it had written everything."""
    try:
        fields = json.loads(data)
    except ValueError:
        return None
    return Imported(fields["modules"], fields["environ"])


def report(pipe: int, preloaded: Collection[str], settled_s: float = SETTLED_S) -> None:
    """Write this process's imports to `pipe` after its first step, or once it has imported nothing for `settled_s`."""

    def write() -> None:
        count = -1
        while count != (count := len(sys.modules)) and not stepped.wait(settled_s):
            pass
        with contextlib.suppress(OSError), open(pipe, "wb") as file:  # the warm process may have ended
            file.write(dumps(preloaded) + b"\n")

    threading.Thread(target=write, name="outlast-imports", daemon=True).start()


def places() -> list[str]:
    """Return the directories of the standard library and of installed packages."""
    installed = [path for path in sys.path if os.path.basename(path.rstrip(os.sep)) in ("site-packages", "dist-packages")]
    return [os.path.realpath(path) + os.sep for path in (*installed, sysconfig.get_path("stdlib"))]


def chosen(imported: Imported, *, loaded: Collection[str], tried: Collection[str], where: Sequence[str]) -> list[str]:
    """Return the modules that a trial should import. The script's own code is not among them, since it may change before the next
    restart."""
    names = [
        name
        for name, origin in imported.modules.items()
        if name not in loaded
        and name.partition(".")[0] not in {*_NEVER, "__main__", "__mp_main__"}
        and name.partition(".")[0] not in tried
        and os.path.realpath(origin).startswith(tuple(where))
    ]
    return names if len(names) >= LEAST else []


def trial(names: Sequence[str], imported: Imported) -> Iterator[str]:
    """Import modules in a disposable process. Yields packages that may be preloaded, up to the first one that may not."""
    sys.dont_write_bytecode = True
    tempfile.gettempdir()  # writes a file the first time
    watch = _Watch(imported.environ)
    packages: dict[str, list[str]] = {}
    for name in names:
        packages.setdefault(name.partition(".")[0], []).append(name)
    initial = _state()
    for package, modules in packages.items():
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError:
                return
            if getattr(vars(sys.modules[name]).get("__spec__"), "origin", None) != imported.modules[name]:
                return
        if watch.side_effect or _state() != initial:
            return
        yield package


class _Watch:
    """Watches a trial through audit hooks, which cannot be removed, but end with the process."""

    def __init__(self, rank_environ: Mapping[str, str]) -> None:
        self.side_effect = ""
        own = dict(os.environ)
        os.environ[_SINGLE_THREAD[0]] = _SINGLE_THREAD[1]
        read, all_ = os._Environ.__getitem__, os._Environ.__iter__

        def item(environ: Any, name: str) -> str:
            if name != _SET_BY_TORCH and own.get(name) != rank_environ.get(name) and not _searches():
                self.side_effect = self.side_effect or f"reads {name}"
            return str(read(environ, name))

        def each(environ: Any) -> Iterator[str]:
            if own != rank_environ and not _searches():
                self.side_effect = self.side_effect or "reads the environment"
            return all_(environ)

        os._Environ.__getitem__ = item  # type: ignore[method-assign,assignment]
        os._Environ.__iter__ = each  # type: ignore[method-assign,assignment]
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.putenv" and os.fsdecode(args[0]) == _SET_BY_TORCH:
            return
        if event in _SIDE_EFFECTS or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            self.side_effect = self.side_effect or event


def _searches() -> bool:
    """Return whether a module in `_SEARCHES` is reading the environment."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _SEARCHES


def _state() -> tuple[object, ...]:
    """Return the parts of the process's state that an import must not change."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    handlers = tuple(signal.getsignal(number) for number in sorted(signal.valid_signals()))
    threads = [Path("/proc/self/task", number, "comm").read_text().strip() for number in os.listdir("/proc/self/task")]
    counted = sum(name != _SAFE_THREAD for name in threads)
    state: list[object] = [counted, sorted(os.listdir("/proc/self/fd")), handlers, random.getstate()]
    state.append((os.getcwd(), list(sys.path)))
    if numpy:
        state.append(numpy.random.get_state(legacy=False)["state"]["key"].tobytes())
    if torch:
        state.append((torch.get_rng_state().numpy().tobytes(), torch.get_default_dtype(), torch.get_num_threads()))
        state.append(torch.are_deterministic_algorithms_enabled())
    return tuple(state)


def shared_trial(names: Sequence[str], imported: Imported, directory: Path) -> Iterator[str]:
    """Yield what `trial` yields, but run the trial only once for all workers, which share the results in `directory`."""
    environ = {name: value for name, value in imported.environ.items() if not _PER_RANK.fullmatch(name)}
    tried = json.dumps([[(name, imported.modules[name]) for name in names], environ], sort_keys=True)
    result = directory / f"imports-{hashlib.sha256(tried.encode()).hexdigest()[:16]}.json"
    with file_locks.attempted(directory / "imports.lock", wait=True):
        if result.exists():
            yield from json.loads(result.read_text())
            return
        good = []
        for package in trial(names, imported):
            good.append(package)
            yield package
        files.replace(result, json.dumps(good))


def attempt(names: Sequence[str], imported: Imported, pipe: int) -> None:
    """Run a trial in this fork, write a line to `pipe` for each package that may be preloaded, and end the process."""
    shared = os.environ.get(contract.Env.SHARED)
    with contextlib.suppress(OSError):
        os.nice(19)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(TRIAL_S)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        for package in shared_trial(names, imported, Path(shared)) if shared else trial(names, imported):
            os.write(pipe, f"{package}\n".encode())
    finally:
        os._exit(0)


class Preloader:
    """Reads ranks' reports for the warm process, starts trials, and imports modules. `detach` is called in each fork."""

    def __init__(self, selector: selectors.BaseSelector, detach: Callable[[int], None]) -> None:
        self._selector, self._detach = selector, detach
        self._reading: dict[int, bytearray] = {}
        self._trial: tuple[int, list[str], Imported] | None = None
        self._trials_left = 0
        self._tried: set[str] = set()
        self._environ: dict[str, str] = {}
        self.modules: list[str] = []

    def pipe(self, environ: Mapping[str, str]) -> int:
        """Open a pipe for the `report` from a rank that starts with this environment. Returns the descriptor for that rank."""
        read, write = os.pipe()
        self._reading[read] = bytearray()
        self._environ = {name: value for name, value in environ.items() if not _PER_RANK.fullmatch(name)}
        self._selector.register(read, selectors.EVENT_READ)
        return write

    def close(self) -> None:
        """Close all descriptors. Called in a fork."""
        for fd in self._reading:
            os.close(fd)

    def read(self, fd: int) -> None:
        """Read from a descriptor if it belongs to this object. Does not return in a fork."""
        if fd not in self._reading:
            return
        data = os.read(fd, 1 << 16)
        self._reading[fd] += data
        if data and (not data.endswith(b"\n") or (self._trial and self._trial[0] == fd)):
            return
        received = bytes(self._reading.pop(fd))
        self._selector.unregister(fd)
        os.close(fd)
        if self._trial and self._trial[0] == fd:
            self._trial_ended(received.decode().split(), *self._trial[1:])
        elif (imported := loads(received)) and self._trial is None:
            self._trials_left = TRIALS
            self._try(chosen(imported, loaded=sys.modules, tried=self._tried, where=places()), imported)

    def import_next(self) -> None:
        name = self.modules.pop(0)
        try:
            importlib.import_module(name)
        except Exception as problem:
            print(f"outlast | {name} is not imported ahead: {type(problem).__name__}: {problem}", flush=True)
            self.modules.clear()

    def _try(self, names: list[str], imported: Imported) -> None:
        self._trial = None
        if not names:
            return
        self._trials_left -= 1
        os.environ.update(self._environ)
        parent, (read, write) = os.getpid(), os.pipe()
        try:
            pid = os.fork()
        except OSError:  # the limit on processes
            os.close(read)
            os.close(write)
            return
        if pid == 0:
            self._detach(parent)
            attempt(names, imported, write)
        os.close(write)
        self._reading[read] = bytearray()
        self._selector.register(read, selectors.EVENT_READ)
        self._trial = read, names, imported

    def _trial_ended(self, good: list[str], names: list[str], imported: Imported) -> None:
        bad = next((package for name in names if (package := name.partition(".")[0]) not in good), None)
        if bad is None or not self._trials_left:
            self._trial = None
            self.modules = [name for name in names if name.partition(".")[0] in good]
            self._tried |= {name.partition(".")[0] for name in names}
        else:
            self._tried.add(bad)
            self._try([name for name in names if name.partition(".")[0] != bad], imported)
