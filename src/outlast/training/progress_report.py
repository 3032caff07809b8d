"""Reports the step of a script that has no session. This module needs no torch."""

from __future__ import annotations

import operator
import os
import threading
import time
from pathlib import Path

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.ledger import TOGETHER_S, Ledger
from outlast.job.workerfiles.progress_file import Progress, Writer


class _Reported:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = 0
        self.writer: Writer | None = None
        self.ledger: Ledger | None = None
        self.step = 0
        self.noted = float("-inf")


_reported = _Reported()


def progress(step: int, total: int | None = None) -> None:
    """Report that `step` optimizer steps are done, out of `total` if known. For scripts that have no session.

    `outlast status`, the panel and `outlast report` show the step and the remaining time. The call saves no checkpoint, is not a
    collective, and does nothing unless Outlast runs the script. Call it on every rank or on rank 0 alone, after each step or less
    often. Raises OutlastError if `step` or `total` is not a whole number.
    """
    step, total = _whole("step", step), None if total is None else _whole("total", total)
    env = os.environ
    if Env.STATE not in env:
        return
    rank, generation = int(env.get("RANK", 0)), int(env.get(Env.GENERATION, 0))
    with _reported.lock:
        if _reported.writer is None or _reported.pid != os.getpid():  # a process forked by a data loader reports nothing
            if _reported.writer is not None:
                return
            _reported.pid = os.getpid()
            _reported.writer = Writer(Path(env[Env.STATE]), int(env.get("LOCAL_RANK", 0)))
            if rank == 0 and Env.LEDGER in env:
                _reported.ledger = Ledger(Path(env[Env.LEDGER]), contract.ledger_source(env))
            _reported.step = step - 1
        # A plain script stays in the phase `started`: it has not opened a session, so it reads no notices.
        _reported.writer.write(Progress(generation=generation, rank=rank, phase="started", step=step, steps=total))
        now = time.monotonic()
        if _reported.ledger and step > _reported.step and (now - _reported.noted >= TOGETHER_S or step == total):
            _reported.ledger.write("step", generation=generation, step=step, steps=step - _reported.step)
            _reported.step, _reported.noted = step, now


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise OutlastError(f"progress(): {name} ({value!r}) must be a whole number; pass int(...)") from None
