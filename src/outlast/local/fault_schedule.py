"""Carries out a chaos schedule beside a run on this machine, in a process of its own that outlives the command line.

python -m outlast.local.fault_schedule STATE NAME SCHEDULE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from outlast import chaos
from outlast.local.backend import LocalBackend


def main() -> None:
    """Inject every fault of the schedule when it is due, and log it."""
    state, name, schedule = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    faults = chaos.load(schedule)
    for sentence in chaos.play(LocalBackend(state), name, faults, chaos.seed(faults)):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} chaos: {sentence}", flush=True)


if __name__ == "__main__":
    main()
