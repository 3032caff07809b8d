"""Process 1 in a pod, which runs the agent as its child, forwards signals, and reaps orphans, e.g. data loaders of a killed rank.

Unless process 1 reaps orphans, they remain zombies until the pod reaches its pid limit. The agent cannot reap them, since waiting
for *any* child would consume the exit codes of its own children. So process 1 forks before the agent has threads, files or
children. If another program is process 1 (a shared process namespace, `docker run --init`), this module does nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal

from outlast.job import contract
from outlast.worker.launch import os_calls

FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals for faults in the process itself. These signals cannot be blocked."""


def stand_by() -> None:
    """If this is process 1, fork and return only in the child; otherwise return at once."""
    if os.getpid() == 1:
        split()


def split() -> None:
    """Fork, and return in the child. The parent reaps processes until the child ends, and exits with the child's code."""
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - FAULTS
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # so that no signal is lost between fork and wait
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os_calls.entitle("init")
    os._exit(_attend(child, signals))


def _attend(child: int, signals: set[signal.Signals]) -> int:
    while True:
        number = signal.sigwait(signals)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return contract.exit_code(os.waitstatus_to_exitcode(ended[1]))
