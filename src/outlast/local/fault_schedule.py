"""Carries out a fault schedule for a run on this machine, in a separate process that outlives the command line.

python -m outlast faults STATE NAME SCHEDULE
"""

from __future__ import annotations

import time
from pathlib import Path

from outlast.job import faults as chaos
from outlast.local.backend import LocalBackend


def main(argv: list[str]) -> None:
    """Inject and log each fault in the schedule when it is due."""
    state, name, schedule = Path(argv[0]), argv[1], Path(argv[2])
    faults = chaos.load(schedule)
    for sentence in chaos.play(LocalBackend(state), name, faults, chaos.seed(faults)):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} chaos: {sentence}", flush=True)
