"""A waiting training process's place in the next world: a file with the environment variables that have changed. The agent writes
it (`launch.rank_processes`), and the process reads it (`training.kept_process`). A leftover file does no harm, because the
process waits for a later generation or attempt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outlast.base import files
from outlast.job.contract import NEXT, Env


def write(state: Path, local_rank: int, environ: Mapping[str, str]) -> None:
    """Write a process's place. Raises OSError."""
    files.replace(state / NEXT.format(local_rank=local_rank), json.dumps(dict(environ)))


def read(state: Path, local_rank: int, after: tuple[int, int]) -> dict[str, str]:
    """Return the variables of the place if its generation and attempt are later than `after`, otherwise an empty mapping."""
    environ: dict[str, str] = files.mapping(state / NEXT.format(local_rank=local_rank))
    return environ if environ and start(environ) > after else {}


def start(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the generation and attempt in an environment."""
    return int(environ.get(Env.GENERATION, "0")), int(environ.get(Env.ATTEMPT, "0"))
