"""Runs installers (pip, conda) and compilers, logs their output, and extracts their error messages."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from outlast.base.errors import OutlastError, Stopped

if TYPE_CHECKING:
    from outlast.worker.prepare.fetch_from_store import Say

_NETWORK = re.compile(
    r"failed to establish a new connection|temporary failure in name resolution|name or service not known|dns error|timed? ?out"
    r"|connection (reset|refused|aborted|broken)|max retries exceeded|proxyerror|network is unreachable|remote end closed"
    r"|error sending request|could not connect|incompleteread|http error 5\d\d|5\d\d server error|status client error \(429"
    r"|no space left on device|disk quota exceeded",
    re.IGNORECASE,
)
"""Matches transient errors in the output of pip and conda."""
_POLL_S = 0.1
_LAST = 20


class Unavailable(OutlastError):
    """Raised if the packages cannot be installed now, but perhaps later."""

    retry = True


@dataclass(frozen=True)
class Shell:
    """Runs installers, logs their output to a file, and kills them on shutdown."""

    environ: Mapping[str, str]
    lock: int
    """The lock's descriptor, which the installer inherits, so that it holds the lock even if it outlives us."""
    say: Say
    stop: threading.Event
    log: Path
    """File for all output. `say` gets the last lines after a failure."""
    cwd: Path | None = None
    remedy: str = "correct the file"

    def run(self, argv: Sequence[str], name: str) -> None:
        """Run a program. If it fails, raises OutlastError with its error message."""
        env = {**self.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab+") as log:
            start = log.tell()
            with subprocess.Popen(
                argv,
                env=env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self.lock,),
            ) as process:
                while process.poll() is None:
                    if self.stop.wait(_POLL_S):
                        _kill(process)
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
        if self.stop.is_set():
            raise Stopped(f"this worker was told to leave while making {name}")
        if process.returncode:
            for line in lines[-_LAST:]:
                self.say(f"  {line}")
            program = "pip" if argv[1:3] == ["-m", "pip"] else Path(argv[0]).name
            failed = f"{name}: {program} failed: {error_message(lines) or f'exit code {process.returncode}'}"
            if any(_NETWORK.search(line) for line in lines):
                raise Unavailable(f"{failed}; the network or the machine is at fault, it is tried again")
            raise OutlastError(f"{failed}; {self.remedy}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its child processes, since pip runs another Python."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()


def error_message(lines: Sequence[str]) -> str:
    """Return the first error in an installer's output with the next lines and the exception below, or else the last line."""
    words = [line.strip() for line in lines if line.strip(" ^~")]
    begin = next((i for i, line in enumerate(words) if re.match(r"error\b|critical\b|×", line, re.IGNORECASE)), -1)
    raised = [line for line in words[begin:][5:] if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join([" ".join(words[begin:][:5])[:400], *raised[-1:]])[:600]
