"""Distributes rank 0's files for plain scripts in pods, so that all pods begin a world with the same files.

Pods share no directory, so a script that saves on rank 0 and loads on all ranks would resume at different steps. Before it starts
in a world, rank 0's process asks its upload process to upload the script's files, and announces the upload in the world's
TCPStore. On every other pod, the first process then fetches the files (`prepare.workdir`), while the pod's other processes wait
for it. Scripts with a session do not need this. See docs/decisions/0023-the-working-directory.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.worker.launch import relocatable

_KEY = "outlast/files"
_NOTHING, _SENT, _IN_STORE = b"nothing", b"sent", b"in the store"
_REQUEST, _REPORT = ".push/wanted", ".push/given"
"""Two files in the output directory: the generation (and attempt) of the requested upload, and that of the finished one."""
_TIMEOUT_S = 300.0
"""Maximum seconds that a world's start waits for the files. Arbitrary."""
_POLL_INTERVAL_S = 0.05


def share(environ: Mapping[str, str], connect: Callable[[str], Any]) -> None:
    """Send rank 0's files to the other workers if this worker has rank 0; otherwise fetch them. Each training process calls this
    before its script. `connect` connects to the TCPStore at an address. If sharing fails, each pod uses its files."""
    if not _shared(environ):
        return
    worker, until = environ["GROUP_RANK"], time.monotonic() + _TIMEOUT_S

    def over() -> bool:
        return time.monotonic() > until

    try:
        tcp_store = connect(_address(environ))
        expected = f"{_KEY}/{worker}" if environ["LOCAL_RANK"] != "0" else _KEY
        try:
            if environ["RANK"] == "0":
                tcp_store.set(_KEY, _send(environ, over))
                return
            while not tcp_store.check([expected]):
                if over() or (expected != _KEY and _has_begun(environ)):
                    return
                time.sleep(_POLL_INTERVAL_S)
            if expected == _KEY and (announced := tcp_store.get(_KEY)) != _NOTHING:
                _fetch(announced, environ, over)
        finally:
            if environ["LOCAL_RANK"] == "0":
                tcp_store.set(f"{_KEY}/{worker}", b"")
    except RuntimeError:  # rank 0's pod is lost, and this world with it
        pass
    except OSError as problem:
        print(f"outlast | this worker continues with its own files: {problem}", flush=True)


def stays(environ: Mapping[str, str], connect: Callable[[str], Any]) -> None:
    """Announce that new processes need no files, since the script has a session. All kept processes call this, and the one with
    rank 0 makes the announcement. Raises RuntimeError."""
    if environ["RANK"] == "0" and _shared(environ):
        connect(_address(environ)).set(_KEY, _NOTHING)


def _has_begun(environ: Mapping[str, str]) -> bool:
    """Return whether this worker's first process has begun its script, possibly without the files, after a connection error."""
    record = progress_file.read(Path(environ[Env.STATE]), 0)
    start = int(environ[Env.GENERATION]), int(environ.get(Env.ATTEMPT, "0"))
    return record is not None and (record.generation, record.attempt) == start


def _shared(environ: Mapping[str, str]) -> bool:
    return _stored(environ) and environ["GROUP_WORLD_SIZE"] != "1"


def _address(environ: Mapping[str, str]) -> str:
    return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"


def _send(environ: Mapping[str, str], over: Callable[[], bool]) -> bytes:
    """Request an upload of rank 0's files on this worker. Returns the announcement for the other workers."""
    record = progress_file.read(Path(environ[Env.STATE]), 0)
    output, generation = Path(environ[Env.OUTPUT]), environ[Env.GENERATION]
    if environ.get(Env.ATTEMPT, "0") != "0":  # an earlier attempt's upload is outdated
        generation = f"{generation}.{environ[Env.ATTEMPT]}"
    if (record and record.phase != "started") or not (output / contract.WORK / contract.WORKED).exists():
        return _NOTHING  # the script has a session, or has written nothing yet
    if record is None or record.rank != 0:  # rank 0 ran elsewhere: its files are in the store
        return _IN_STORE
    try:
        problem = _uploaded(output, generation, over)
    except OSError as error:  # a full disk
        problem = str(error)
    if problem:
        print(f"outlast | the other workers continue with their own files: {problem}", flush=True)
    return _SENT if problem == "" else _NOTHING


def leave(environ: Mapping[str, str], generation: int, over: Callable[[], bool]) -> None:
    """Wait until the files of a leaving worker with rank 0 are in the store, or until `over()`. The worker remains a member until
    then, so that the other workers do not resume from an older step."""
    if not _stored(environ):
        return
    for number in itertools.takewhile(lambda _: not over(), itertools.count(1)):
        with contextlib.suppress(OSError):  # a full disk: retried until the agent kills this process
            if not _uploaded(Path(environ[Env.OUTPUT]), f"{generation}.leave.{number}", over):
                return
        time.sleep(1.0)  # the store failed, and may recover


def _stored(environ: Mapping[str, str]) -> bool:
    """Return whether the workers share no directory and keep their output in a store."""
    return bool(environ.get(Env.STORE)) and not environ[Env.RENDEZVOUS].startswith("unix://")


def _uploaded(output: Path, generation: str, over: Callable[[], bool]) -> str | None:
    """Request an upload and wait for it. Returns the error, an empty string on success, or None if `over()` became true first."""
    files.replace(output / _REQUEST, generation)
    while not over():
        number, _, problem = files.text(output / _REPORT).partition(" ")
        if number == generation:
            return problem
        time.sleep(_POLL_INTERVAL_S)
    return None


def requested(output: Path) -> str:
    """Return the generation of a requested upload; empty if there is none."""
    return files.text(output / _REQUEST)


def report(output: Path, generation: str, problem: str = "") -> None:
    """Report that the requested upload is complete, or that it failed with a `problem`."""
    if generation:
        files.replace(output / _REPORT, f"{generation} {problem}")
        (output / _REQUEST).unlink(missing_ok=True)


def _fetch(announced: bytes, environ: Mapping[str, str], over: Callable[[], bool]) -> None:
    """Fetch rank 0's files in a separate process, since this fork lacks the store client's threads."""
    command = [*relocatable.python(), "-m", "outlast", "workdir", str(os.getpid()), *(["--newer"] if announced == _SENT else [])]
    child = subprocess.Popen(command, env=dict(environ))
    while child.poll() is None:
        if over():
            child.kill()
            child.wait()
        time.sleep(_POLL_INTERVAL_S)
