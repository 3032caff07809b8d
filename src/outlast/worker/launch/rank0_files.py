"""Plain scripts in pods: all pods begin a world with the files of rank 0.

Pods share no directory. A surviving pod has what its own ranks wrote, a replaced one what the store has: a script that saves on
rank 0 and loads on all ranks would resume at a different step on each. So before the processes of a world start, the pod of
rank 0 has its upload process upload the script's files, announces that in the world's TCPStore, and the others fetch them
(`prepare.workdir`). Scripts with a session need none of this. A worker that leaves has the same done with all that rank 0 has
saved there, before it ceases to be a member (`leave`).
Docs: docs/decisions/0023-the-working-directory.md.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.workerfiles import progress

_KEY = "outlast/files"
_NOTHING, _SENT, _THERE = b"nothing", b"sent", b"in the store"
_WANTED, _GIVEN = ".push/wanted", ".push/given"
"""In the output: the generation (and attempt) for which an upload is requested, and that for which it was made or has failed."""
_TIMEOUT_S = 300.0
"""How long the start of a world waits for the files; arbitrary."""
_POLL_INTERVAL_S = 0.05


def share(tcp_store: Any, *, first: bool, called: Callable[[], bool], environ: Mapping[str, str]) -> None:
    """Give the files of rank 0 to the others (on the `first` worker), or fetch them. Ends early when the world is `called`
    together again. If that fails it is printed, and the world begins with the files that each pod has."""
    if not _stored(environ):
        return
    until = time.monotonic() + _TIMEOUT_S

    def over() -> bool:
        return called() or time.monotonic() > until

    try:
        if first:
            tcp_store.set(_KEY, _send(environ, over))
            return
        while not tcp_store.check([_KEY]):
            if over():
                return
            time.sleep(_POLL_INTERVAL_S)
        if (given := tcp_store.get(_KEY)) != _NOTHING:
            _fetch(given, environ, over)
    except RuntimeError:  # the pod of rank 0 is lost, and with it this world
        pass
    except OSError as problem:
        print(f"outlast | this worker goes on with the files that it has: {problem}", flush=True)


def _send(environ: Mapping[str, str], over: Callable[[], bool]) -> bytes:
    """Have rank 0's files uploaded from here. Returns what the others have to do."""
    record = progress.read(Path(environ[Env.STATE]), 0)
    output, generation = Path(environ[Env.OUTPUT]), environ[Env.GENERATION]
    if environ.get(Env.ATTEMPT, "0") != "0":  # what was given to an earlier attempt is old
        generation = f"{generation}.{environ[Env.ATTEMPT]}"
    if (record and record.phase != "started") or not (output / contract.WORK / contract.WORKED).exists():
        return _NOTHING  # a session, or nothing is written yet
    if record is None or record.rank != 0:  # rank 0 ran elsewhere: its files are in the store
        return _THERE
    problem = _uploaded(output, generation, over)
    if problem:
        print(f"outlast | the other workers go on with the files that they have: {problem}", flush=True)
    return _SENT if problem == "" else _NOTHING


def leave(environ: Mapping[str, str], generation: int, over: Callable[[], bool]) -> None:
    """Wait, as rank 0's worker, which leaves, for the store to have what was saved here up to that `generation`, or until it is
    `over`: this worker stays a member meanwhile, so that the others do not train from an older step."""
    if not _stored(environ):
        return
    for number in itertools.takewhile(lambda _: not over(), itertools.count(1)):
        with contextlib.suppress(OSError):  # a full disk, which may have room again: else the agent ends this process
            if not _uploaded(Path(environ[Env.OUTPUT]), f"{generation}.leave.{number}", over):
                return
        time.sleep(1.0)  # the store failed, and may be back


def _stored(environ: Mapping[str, str]) -> bool:
    """Whether what workers write is kept in a store, as where they share no directory."""
    return bool(environ.get(Env.STORE)) and not environ[Env.RENDEZVOUS].startswith("unix://")


def _uploaded(output: Path, generation: str, over: Callable[[], bool]) -> str | None:
    """Have everything uploaded. Returns why it failed, empty if it did not; None if it was `over` before."""
    files.replace(output / _WANTED, generation)
    while not over():
        number, _, problem = _read(output / _GIVEN).partition(" ")
        if number == generation:
            return problem
        time.sleep(_POLL_INTERVAL_S)
    return None


def wanted(output: Path) -> str:
    """The generation that waits for everything to be uploaded now; empty if there is none."""
    return _read(output / _WANTED)


def give(output: Path, generation: str, problem: str = "") -> None:
    """Report that everything was uploaded, or why not."""
    if generation:
        files.replace(output / _GIVEN, f"{generation} {problem}")
        (output / _WANTED).unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fetch(given: bytes, environ: Mapping[str, str], over: Callable[[], bool]) -> None:
    """Fetch in a process of its own: this one is a fork, in which the store client's threads do not exist."""
    command = [sys.executable, "-m", "outlast", "workdir", *(["--newer"] if given == _SENT else [])]
    child = subprocess.Popen(command, env=dict(environ))
    while child.poll() is None:
        if over():
            child.kill()
            child.wait()
        time.sleep(_POLL_INTERVAL_S)
