"""Process 1 of a pod: runs the agent as its child, passes signals on, and reaps whatever the kernel hands it.

Orphans become children of process 1, e.g. the data loaders of a rank that was killed. If it does not wait for them they stay
zombies, until the pod's limit of pids is used up and nothing can be forked. The agent cannot do that itself: waiting for *any*
child would take away the exit codes of its own children. So process 1 does nothing else, and forks before the agent has threads,
files or children. Where something else is process 1 (a shared process namespace, `docker run --init`, this machine), this does
nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal

from outlast.job import contract
from outlast.worker.launch import system

FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Sent by the kernel for what a process has done itself; they cannot wait."""


def stand_by() -> None:
    """Return in a child if this is process 1, which never returns from here; at once if it is not."""
    if os.getpid() == 1:
        split()


def split() -> None:
    """Return in a child; the parent attends to it and ends as it ends."""
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - FAULTS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # so that none is lost between fork and wait
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    system.entitle("init")
    os._exit(_attend(child, signals))


def _attend(child: int, signals: set[signal.Signals]) -> int:
    """Reap until `child` has ended; the exit code for that."""
    while True:
        number = signal.sigwait(signals)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return contract.exit_code(os.waitstatus_to_exitcode(ended[1]))
