"""What scripts import is imported once per worker, too, so that a restart finds it: `import transformers` takes seconds.

A rank tells the warm process, some seconds after its last import, which modules it has loaded. A fork of the warm process tries
to import those of installed packages, and finds out whether they do nothing but import. What a package reads of the environment
has to be the same in both processes; one that starts threads or processes, opens devices or connections, writes files, draws
random numbers or crashes stays with the script. The warm process imports the others while it has nothing else to do.
Docs: docs/decisions/0042-starting.md.
"""

from __future__ import annotations

import contextlib
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
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTLED_S = 5.0
"""A rank that has imported nothing for this long has begun to train; arbitrary."""
LEAST = 20
"""Fewer modules are not worth a trial; arbitrary."""
TRIALS = 5
"""Limit of trials, each without the package that spoilt the one before."""
TRIAL_S = 120
"""Limit of one trial."""
_NEVER = {
    "mpi4py",
    "horovod",
    "deepspeed",
    "jax",
    "jaxlib",
    "tensorflow",
    "cupy",
    "torch_xla",
    "torch_neuronx",
    "habana_frameworks",
}
"""Take hold of a device or of other processes when they are imported."""
_SPOILS = {
    *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "subprocess.Popen", "pty.spawn"),
    *(
        "socket.connect",
        "os.putenv",
        "os.unsetenv",
        "os.chdir",
        "tempfile.mkdtemp",
        "tempfile.mkstemp",
    ),
}
"""Audit events of what is more than an import. https://docs.python.org/3/library/audit_events.html"""
_OF_A_RANK = re.compile(r"(LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|OUTLAST_)\w*|RANK|WORLD_SIZE")
"""Variables that are others for each rank or world."""
_TORCHS = "TORCHINDUCTOR_CACHE_DIR"
"""Set by torch itself, always to the same, when something asks for it."""
_ALONE = ("OPENBLAS_NUM_THREADS", "1")
"""Set in trials: OpenBLAS, of which scipy has one, would start threads, but stops them around a fork."""


@dataclass(frozen=True)
class Told:
    """What a rank has imported by itself, in order, each module with its file, and its environment."""

    modules: Mapping[str, str]
    environ: Mapping[str, str]


def dumps(before: Collection[str]) -> bytes:
    """What this process has imported since it had only the modules `before`."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name not in before:
            spec = getattr(module, "__dict__", {}).get("__spec__")  # lazy modules answer to attributes with imports
            origin = getattr(spec, "origin", None)
            if isinstance(origin, str):
                found[name] = origin
    return json.dumps({"modules": found, "environ": dict(os.environ)}).encode()


def loads(data: bytes) -> Told | None:
    """What was told; None if the rank ended meanwhile."""
    try:
        fields = json.loads(data)
    except ValueError:
        return None
    return Told(fields["modules"], fields["environ"])


def tell(pipe: int, before: Collection[str], settled_s: float = SETTLED_S) -> None:
    """Write what this process has imported to `pipe`, once it has imported nothing for some time, and close it."""

    def write() -> None:
        count = -1
        while count != (count := len(sys.modules)):
            time.sleep(settled_s)
        with contextlib.suppress(OSError), open(pipe, "wb") as file:  # the warm process may be gone
            file.write(dumps(before) + b"\n")

    threading.Thread(target=write, name="outlast-imports", daemon=True).start()


def places() -> list[str]:
    """Where packages are installed, and Python's own."""
    return [os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")]


def chosen(told: Told, *, loaded: Collection[str], tried: Collection[str], where: Sequence[str]) -> list[str]:
    """The modules that are worth a trial: not those of the script's own code, which may be another at the next start."""
    found = [
        name
        for name, origin in told.modules.items()
        if name not in loaded
        and name.partition(".")[0] not in {*_NEVER, "__main__", "__mp_main__"}
        and name.partition(".")[0] not in tried
        and os.path.realpath(origin).startswith(tuple(where))
    ]
    return found if len(found) >= LEAST else []


def trial(names: Sequence[str], told: Told) -> Iterator[str]:
    """Import modules, in a process that is thrown away. Yields the packages that may be imported ahead, until one may not."""
    sys.dont_write_bytecode = True
    tempfile.gettempdir()  # which writes a file the first time
    watch = _Watch(told.environ)
    packages: dict[str, list[str]] = {}
    for name in names:
        packages.setdefault(name.partition(".")[0], []).append(name)
    before = _state()
    for package, modules in packages.items():
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError:
                return
            if getattr(vars(sys.modules[name]).get("__spec__"), "origin", None) != told.modules[name]:
                return
        if watch.spoilt or _state() != before:
            return
        yield package


class _Watch:
    """Notices what a trial does. It cannot be switched off: the process is thrown away."""

    def __init__(self, theirs: Mapping[str, str]) -> None:
        self.spoilt = ""
        """The first thing that was more than an import."""
        ours = dict(os.environ)
        os.environ[_ALONE[0]] = _ALONE[1]
        read, all_ = os._Environ.__getitem__, os._Environ.__iter__

        def item(environ: Any, name: str) -> str:
            if name != _TORCHS and ours.get(name) != theirs.get(name):
                self.spoilt = self.spoilt or f"reads {name}"
            return str(read(environ, name))

        def each(environ: Any) -> Iterator[str]:
            if ours != theirs:
                self.spoilt = self.spoilt or "reads the environment"
            return all_(environ)

        os._Environ.__getitem__ = item  # type: ignore[method-assign,assignment]
        os._Environ.__iter__ = each  # type: ignore[method-assign,assignment]
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.putenv" and os.fsdecode(args[0]) == _TORCHS:
            return
        if event in _SPOILS or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            self.spoilt = self.spoilt or event


def _state() -> tuple[object, ...]:
    """What an import must leave alone."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    handlers = tuple(signal.getsignal(number) for number in sorted(signal.valid_signals()))
    found: list[object] = [len(os.listdir("/proc/self/task")), sorted(os.listdir("/proc/self/fd")), handlers, random.getstate()]
    found.append((os.getcwd(), list(sys.path)))
    if numpy:
        found.append(numpy.random.get_state(legacy=False)["state"]["key"].tobytes())
    if torch:
        found.append((torch.get_rng_state().numpy().tobytes(), torch.get_default_dtype(), torch.get_num_threads()))
        found.append(torch.are_deterministic_algorithms_enabled())
    return tuple(found)


def attempt(names: Sequence[str], told: Told, pipe: int) -> None:
    """A trial in a fresh fork: writes a line for each good package to `pipe`. Ends this process."""
    with contextlib.suppress(OSError):
        os.nice(19)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(TRIAL_S)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        for package in trial(names, told):
            os.write(pipe, f"{package}\n".encode())
    finally:
        os._exit(0)


class Ahead:
    """The warm process's part: listens to ranks, has trials made, imports. `fresh` makes a fork of it a process of its own."""

    def __init__(self, selector: selectors.BaseSelector, fresh: Callable[[int], None]) -> None:
        self._selector, self._fresh = selector, fresh
        self._reading: dict[int, bytearray] = {}
        """What came so far, by descriptor."""
        self._trial: tuple[int, list[str], Told] | None = None
        """The descriptor, modules and origin of the trial that runs."""
        self._trials_left = 0
        self._tried: set[str] = set()
        self._environ: dict[str, str] = {}
        """What packages may read: the variables that all ranks have in common."""
        self.modules: list[str] = []
        """To import when there is nothing else to do."""

    def pipe(self, environ: Mapping[str, str]) -> int:
        """The descriptor for a rank that is to tell, see `tell`. It starts with this environment."""
        read, write = os.pipe()
        self._reading[read] = bytearray()
        self._environ = {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}
        self._selector.register(read, selectors.EVENT_READ)
        return write

    def close(self) -> None:
        """Close everything, in a fork."""
        for fd in self._reading:
            os.close(fd)

    def read(self, fd: int) -> None:
        """Read on, if a descriptor is of ours. Returns never in a fork."""
        if fd not in self._reading:
            return
        data = os.read(fd, 1 << 16)
        self._reading[fd] += data
        if data and (not data.endswith(b"\n") or (self._trial and self._trial[0] == fd)):
            return
        said = bytes(self._reading.pop(fd))
        self._selector.unregister(fd)
        os.close(fd)
        if self._trial and self._trial[0] == fd:
            self._tried_out(said.decode().split(), *self._trial[1:])
        elif (told := loads(said)) and self._trial is None:
            self._trials_left = TRIALS
            self._try(chosen(told, loaded=sys.modules, tried=self._tried, where=places()), told)

    def import_next(self) -> None:
        """Import a module that has passed a trial."""
        name = self.modules.pop(0)
        try:
            importlib.import_module(name)
        except Exception as problem:
            print(f"outlast | {name} is not imported ahead: {type(problem).__name__}: {problem}", flush=True)
            self.modules.clear()

    def _try(self, names: list[str], told: Told) -> None:
        self._trial = None
        if not names:
            return
        self._trials_left -= 1
        os.environ.update(self._environ)
        parent, (read, write) = os.getpid(), os.pipe()
        try:
            pid = os.fork()
        except OSError:  # as many processes as are allowed
            os.close(read)
            os.close(write)
            return
        if pid == 0:
            self._fresh(parent)
            attempt(names, told, write)
        os.close(write)
        self._reading[read] = bytearray()
        self._selector.register(read, selectors.EVENT_READ)
        self._trial = read, names, told

    def _tried_out(self, good: list[str], names: list[str], told: Told) -> None:
        bad = next((package for name in names if (package := name.partition(".")[0]) not in good), None)
        if bad is None or not self._trials_left:
            self._trial = None
            self.modules = [name for name in names if name.partition(".")[0] in good]
            self._tried |= {name.partition(".")[0] for name in names}
        else:
            self._tried.add(bad)
            self._try([name for name in names if name.partition(".")[0] != bad], told)
