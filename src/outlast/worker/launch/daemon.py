"""Starts daemons, which outlive the process that starts them: the launcher, for the command line or a worker that misses it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def start(argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> None:
    """Start a command in a session of its own, its output appended to `log`. It is no child of ours, so it is not waited for."""
    with open(log, "ab") as file:
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            check=True,
        )
