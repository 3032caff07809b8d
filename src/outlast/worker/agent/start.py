"""Start of a worker (`outlast agent` in pods): first the warm process, whose imports take longest, then the agent."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from outlast.job import contract
from outlast.job.workerfiles.log_pipe import Output
from outlast.worker.agent import pid1
from outlast.worker.launch import os_calls, package_copy, sibling


def main(_: list[str]) -> None:
    """Start the warm process and the agent, and exit with the agent's code. For a job with its own Python environment, the warm
    process starts later, in that environment."""
    pid1.stand_by()
    os_calls.entitle(f"agent {os.environ[contract.Env.WORKER]}")
    package_copy.hold()
    log = Output()
    environ = os.environ | os_calls.streaming(os.environ)
    warm = None
    with contextlib.suppress(OSError):
        if b"environment:" not in Path(environ[contract.Env.JOB_FILE]).read_bytes():  # parsing it would take a while
            warm = sibling.start_warm(sys.executable, environ)
    from outlast.worker.agent import agent

    agent.main(warm, environ, log)
