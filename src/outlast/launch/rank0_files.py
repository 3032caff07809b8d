"""All pods begin a world with the same files of a plain script: those of rank 0.

Pods share no directory. One that stays has what its own ranks wrote, a replaced one what the store has: a script that saves on
rank 0 and loads on all would begin at another step on each. So before the processes of a world start, the pod of rank 0 has its
pusher send what the script wrote in the world before, says so in the world's store, and the others fetch it (`work.main`).
Sessions need none of this.
Docs: docs/decisions/0023-the-working-directory.md.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast import contract, files
from outlast.contract import Env
from outlast.workerfiles import progress

_KEY = "outlast/files"
_NOTHING, _SENT, _THERE = b"nothing", b"sent", b"in the store"
_WANTED, _GIVEN = ".push/wanted", ".push/given"
"""In the output: the generation that is to begin with what is here, and the one for which it was sent, or could not be."""
_LIMIT_S = 300.0
"""How long the beginning of a world waits for files on their way; arbitrary."""
_LOOK_S = 0.05


def share(told: Any, *, first: bool, called: Callable[[], bool], environ: Mapping[str, str]) -> None:
    """Have the files of rank 0 here, or give them to the others; `told` is the world's store. Ends early when `called`. What
    cannot be sent or fetched is said, and the world begins with what each pod has."""
    if not environ.get(Env.STORE) or environ[Env.RENDEZVOUS].startswith("unix://"):
        return
    until = time.monotonic() + _LIMIT_S

    def over() -> bool:
        return called() or time.monotonic() > until

    try:
        if first:
            told.set(_KEY, _send(environ, over))
            return
        while not told.check([_KEY]):
            if over():
                return
            time.sleep(_LOOK_S)
        if (given := told.get(_KEY)) != _NOTHING:
            _fetch(given, environ, over)
    except RuntimeError:  # the pod of rank 0 is lost, and with it this world
        pass


def _send(environ: Mapping[str, str], over: Callable[[], bool]) -> bytes:
    """Have what rank 0 wrote here pushed; what the others are to do."""
    record = progress.read(Path(environ[Env.STATE]), 0)
    output, generation = Path(environ[Env.OUTPUT]), environ[Env.GENERATION]
    if (record and record.phase != "started") or not (output / contract.WORK / contract.WORKED).exists():
        return _NOTHING  # a session; or nobody has written anything yet
    if record is None or record.rank != 0:  # rank 0 was elsewhere: whatever there is of it is in the store
        return _THERE
    files.replace(output / _WANTED, generation)
    while not over():
        match _read(output / _GIVEN).split(maxsplit=1):
            case [number] if number == generation:
                return _SENT
            case [number, problem] if number == generation:
                print(f"outlast | the other workers go on with the files that they have: {problem}", flush=True)
                return _NOTHING
        time.sleep(_LOOK_S)
    return _NOTHING


def wanted(output: Path) -> str:
    """The generation for which the pusher is to send everything at once, and then say so; empty: none."""
    return _read(output / _WANTED)


def give(output: Path, generation: str, problem: str = "") -> None:
    """Say that it was sent, or why not."""
    if generation:
        files.replace(output / _GIVEN, f"{generation} {problem}")
        (output / _WANTED).unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fetch(given: bytes, environ: Mapping[str, str], over: Callable[[], bool]) -> None:
    """Fetch in a process of its own: this one is the child of another, whose threads it does not have."""
    child = subprocess.Popen(
        [sys.executable, "-m", "outlast.prepare.workdir", *(["--newer"] if given == _SENT else [])], env=dict(environ)
    )
    while child.poll() is None:
        if over():
            child.kill()
            child.wait()
        time.sleep(_LOOK_S)
