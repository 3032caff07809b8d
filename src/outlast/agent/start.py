"""The start of a worker: its warm process, whose imports take longest, and then the agent, which imports its own meanwhile.

    outlast agent                       in pods
    python -m outlast.agent.start       on this machine
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from outlast import contract
from outlast.agent import pid1
from outlast.launch import glibc, shim, sibling, titles
from outlast.workerfiles.log_pipe import Output


def start_warm(python: str, environ: dict[str, str]) -> subprocess.Popen[bytes] | sibling.Forked:
    """Start the warm process in the Python that is to train, unless this agent was born with one."""
    if sibling.warm and sibling.warm.poll() is None:
        return sibling.warm
    socket_ = os.path.join(environ[contract.Env.STATE], shim.SOCKET)
    return subprocess.Popen(
        [python, "-m", "outlast.launch.warm", socket_, str(os.getpid())], stdin=subprocess.DEVNULL, env=environ
    )


def main() -> NoReturn:
    """Start both and exit as the agent does. A job with its own Python environment has to make that before its warm process."""
    pid1.stand_by()
    titles.entitle(f"agent {os.environ[contract.Env.WORKER]}")
    log = Output()
    environ = os.environ | glibc.streaming(os.environ)
    warm = None
    with contextlib.suppress(OSError):
        if b"environment:" not in Path(environ[contract.Env.JOB_FILE]).read_bytes():  # to parse it takes a while
            warm = start_warm(sys.executable, environ)
    from outlast.agent import agent

    agent.main(warm, environ, log)


if __name__ == "__main__":
    main()
