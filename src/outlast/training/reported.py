"""Progress of scripts without a session: `progress` reports the step. Needs no torch."""

from __future__ import annotations

import operator
import os
import threading
import time
from pathlib import Path

from outlast.contract import Env
from outlast.errors import OutlastError
from outlast.ledger import TOGETHER_S, Ledger
from outlast.workerfiles.progress import Progress, Writer


class _Told:
    """What this process has reported so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = 0
        self.writer: Writer | None = None
        self.ledger: Ledger | None = None
        self.step = 0
        self.noted = float("-inf")


_told = _Told()


def progress(step: int, total: int | None = None) -> None:
    """Report that `step` optimizer steps are done, of `total` if that is known. For scripts without a session.

    `outlast status`, the panel, the remaining time and `outlast report` show it. It claims no checkpoint and is no collective. It
    does nothing where Outlast does not run the script. Call it on every rank or on rank 0 alone, after each step or less often.
    Raises OutlastError when `step` or `total` is no whole number.
    """
    step, total = _whole("step", step), None if total is None else _whole("total", total)
    env = os.environ
    if Env.STATE not in env:
        return
    rank, generation = int(env.get("RANK", 0)), int(env.get(Env.GENERATION, 0))
    with _told.lock:
        if _told.writer is None or _told.pid != os.getpid():  # a fork of a data loader tells nothing of its own
            if _told.writer is not None:
                return
            _told.pid = os.getpid()
            _told.writer = Writer(Path(env[Env.STATE]), int(env.get("LOCAL_RANK", 0)))
            _told.ledger = _ledger(env[Env.LEDGER], env) if rank == 0 and Env.LEDGER in env else None
            _told.step = step - 1
        # A plain script stays in the phase `started`: it has not opened a session, so it reads no notices.
        _told.writer.write(Progress(generation=generation, rank=rank, phase="started", step=step, steps=total))
        now = time.monotonic()
        if _told.ledger and step > _told.step and (now - _told.noted >= TOGETHER_S or step == total):
            _told.ledger.write("step", generation=generation, step=step, steps=step - _told.step)
            _told.step, _told.noted = step, now


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise OutlastError(f"progress(): {name} ({value!r}) must be a whole number; pass int(...)") from None


def _ledger(directory: str, env: os._Environ[str]) -> Ledger:
    return Ledger(Path(directory), f"worker-{env.get(Env.WORKER, 0)}-process-{env.get('LOCAL_RANK', 0)}")
