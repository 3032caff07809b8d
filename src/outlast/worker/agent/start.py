"""Starts a worker (`outlast agent` in pods): first its warm process, whose imports take longest, then its agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.workerfiles.log_pipe import Output
from outlast.worker.agent import pid1
from outlast.worker.launch import os_calls, package_copy, relocatable, sibling
from outlast.worker.prepare import image_python


def main(_: list[str]) -> None:
    """Start the warm process and the agent, and exit with the agent's code. If the job has its own Python environment, the agent
    starts the warm process later. If the image has its own Outlast, that one runs instead of the injected copy."""
    if relocatable.home() and (installed := shutil.which("outlast")):
        os.execv(installed, [installed, "agent"])
    pid1.stand_by()
    os_calls.entitle(f"agent {os.environ[contract.Env.WORKER]}")
    package_copy.hold()
    log = Output()
    environ = package_copy.ahead(os.environ | os_calls.streaming(os.environ))
    warm = None
    with contextlib.suppress(OSError, OutlastError):  # reported by the preparation
        if b"environment:" not in Path(environ[contract.Env.JOB_FILE]).read_bytes():  # parsing it would take a while
            python = image_python.find(environ).executable if relocatable.home() else sys.executable
            warm = sibling.start_warm(python, environ)
    from outlast.worker.agent import agent

    agent.main(warm, environ, log)
